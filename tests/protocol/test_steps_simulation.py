# SPDX-License-Identifier: Apache-2.0
"""Durable steps against simulated disasters: two trainers at once, nodes that go, disks that are full, slow or failing.

Each seed is one job with the production steps, port, hosts and stores, on simulated processes, clock and disks.
``python -m tests.protocol.replay_protocol steps SEED`` shows one; ``--seeds N --jobs 2`` tries many more.
"""

import pytest

from tests.protocol.replay_protocol import reached_by
from tests.protocol.steps_job import ALWAYS, FAULTS, PAIRS
from tests.protocol.steps_run import run

SEEDS, MORE_SEEDS = range(300), range(300, 2000)


def test_steps_survive_every_seed_and_the_faults_of_each_kind():
    reached = reached_by("steps", SEEDS)
    assert not {f"{where}/{fault}" for where in ALWAYS for fault in FAULTS} - reached.keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_steps_of_more_seeds_survive_each_fault():
    reached = reached_by("steps", MORE_SEEDS)
    assert not {*PAIRS, "a commit of an earlier trainer", "all commits are lost"} - reached.keys()


def test_a_seed_of_the_steps_is_the_same_run_every_time():
    for seed in (1, 30, 59):
        assert run(seed).lines == run(seed).lines


def test_a_broken_seed_says_how_to_repeat_it(monkeypatch):
    monkeypatch.setattr("dlrover.python.rl.runtime.member.host.MemberHost._repeat", lambda self, header, answer: None)
    with pytest.raises(Exception) as caught:
        for seed in range(60):
            run(seed)
    assert "python -m tests.protocol.replay_protocol steps" in caught.value.__notes__[0]
