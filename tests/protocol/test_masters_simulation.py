# SPDX-License-Identifier: Apache-2.0
"""Masters against simulated disasters: ended, frozen, cut off and replaced, two and more of them alive at once.

Each seed is one job with the production master, brain, journal, hang detector and executor, on simulated processes,
cluster and clock. ``python tests/protocol/replay_protocol.py masters SEED`` shows one; ``--seeds N --jobs 2`` tries
many more.
"""

import errno
import gc

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import NodeLost
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.process.brain import JOURNAL, fresh_journal
from dlrover.python.rl.master.process.rl_master import RLMaster
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from tests.protocol.loops_world import Violation, World
from tests.protocol.masters_job import Job
from tests.protocol.masters_disk import TRANSIENT
from tests.protocol.masters_run import FAULTS, SITUATIONS, run
from tests.protocol.replay_protocol import reached_by

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
SEEDS, MORE_SEEDS = range(80), range(80, 2500)
PHASES = ("placed", "running", "restarting", "ending")


@pytest.fixture(autouse=True)
def collected():
    """Processes that were killed had tasks that have not begun: they go while that is no fault."""
    yield
    gc.collect()


def test_jobs_finish_whatever_happens_to_their_masters():
    reached = reached_by("masters", SEEDS)
    assert not {f"{fault} / running" for fault in FAULTS} - reached.keys()
    assert reached["a replaced master leaves"] > len(SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_jobs_finish_after_more_seeds_and_every_fault_in_every_phase():
    reached = reached_by("masters", MORE_SEEDS)
    assert not {f"{fault} / {phase}" for fault in FAULTS for phase in PHASES} - reached.keys()


def test_a_lost_node_is_noticed_whatever_else_tells_of_it(tmp_path):
    world = World(0)
    job = Job(world, tmp_path)

    def noticed():
        return [event for _, event in decode(read_lines(tmp_path / JOURNAL)) if isinstance(event, NodeLost)]

    try:
        with job.environment():
            job.begin()
            world.run(lambda: job.committed >= 3, 60.0)
            node = job.state().members[ProcessId("ACTOR", 0)].process.node
            job.cluster.lose_node(node)
            world.run(noticed, 120.0)
            assert [event.node for event in noticed()] == [node]
    finally:
        job.close()
        world.close()


def fail_in(moment, job, failing):
    """Run a job whose journal's disk begins to fail at a ``moment``."""
    world = job.world
    if moment == "start":
        job.disk.failing = failing
    job.begin()
    if moment != "start":
        world.run(lambda: job.committed >= 3, 60.0)
        next(actor for name, actor in sorted(job.cluster.actors.items()) if "/ACTOR" in name.upper()).die()
    if moment == "recovery":
        world.run(lambda: job.state().recoveries.get("ACTOR"), 60.0)
    job.disk.failing = failing


@pytest.mark.parametrize("moment", ["start", "loss", "recovery"])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("number", TRANSIENT)
def test_journal_disk_that_falters_for_seconds_costs_nothing(tmp_path, moment, call, number):
    world = World(0)
    job = Job(world, tmp_path)
    try:
        with job.environment():
            fail_in(moment, job, ((call,), number, 1.0))
            world.after(10.0, lambda: setattr(job.disk, "failing", None))
            world.run(job.is_over, 300.0)
            job.check_end()
            assert sum(job.state().recoveries.values()) == (moment != "start")
    finally:
        job.close()
        world.close()


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_journal_disk_that_falters_for_a_minute_ends_job(tmp_path, call):
    world = World(0)
    job = Job(world, tmp_path)
    try:
        with job.environment():
            fail_in("loss", job, ((call,), errno.EIO, 1.0))
            world.run(job.is_over, 60.0)
            state = job.master.rl_master._state
            assert state.phase is Phase.FAILED and "Input/output error" in state.reason
            job.disk.failing = None
            assert job.state().phase is Phase.RUNNING  # for the next start, which continues after the last commit
            assert fresh_journal(job.spec) == tmp_path / JOURNAL
    finally:
        job.close()
        world.close()


def test_a_seed_of_the_masters_is_the_same_run_every_time():
    for seed in (1, 30, 59):
        assert run(seed).lines == run(seed).lines


def broken_by(seed):
    try:
        run(seed)
    except Violation as error:
        assert "python tests/protocol/replay_protocol.py masters" in error.__notes__[0]
        return str(error)
    return ""


@pytest.mark.slow
def test_a_master_that_does_not_ask_whether_it_was_replaced_ends_what_is_needed(monkeypatch):
    monkeypatch.setattr(RLMaster, "_check_current", lambda self: None)
    assert any("which was replaced, ends sim/run1/" in broken_by(seed) for seed in range(40, 400))  # 49 is the first
