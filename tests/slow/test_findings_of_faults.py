# SPDX-License-Identifier: Apache-2.0
"""Faults that are injected into jobs on Ray, by the seed: the step view and ``explain`` name each with its cost."""

import json
import random
from dataclasses import replace
from statistics import median

import pytest

from dlrover.python.rl.master.job import check_job, run_on_ray
from dlrover.python.rl.page.findings import findings, time_lines
from dlrover.python.rl.page.spans import read_steps
from tests.support.slowed_job import FAULT_STEP, STEPS, describe

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

KINDS = {"slow": "slow_rank", "hang": "hung_call", "kill": "lost_member"}


def faults_of(seed):
    """Return four faults of each kind, in the ranks of both roles."""
    random_ = random.Random(seed)
    targets = [("ACTOR", 0), ("ACTOR", 1), ("ROLLOUT", 0), ("ROLLOUT", 1), ("ROLLOUT", 2)]
    return [(kind, *target, random_.uniform(0.5, 1.5)) for kind in KINDS for target in random_.sample(targets, 4)]


def run(name, folder, fault):
    folder.mkdir()
    job = replace(describe(name, folder, fault), job_dir=folder / "out")
    assert str(run_on_ray(check_job(job), lambda report: None, connected=True).phase) == "finished"
    return {int(step): seconds for step, seconds in json.loads((folder / "times").read_text()).items()}


@pytest.mark.parametrize("number", range(12))
def test_injected_fault_is_named_with_its_cost(tmp_path, number):
    kind, role, rank, seconds = faults_of(seed=56)[number]
    times = run(f"fault-{number}", tmp_path / "job", f"{kind} {role} {rank} {seconds}")
    usual_s = median(times[step] for step in range(1, FAULT_STEP))
    delay_s = seconds if kind == "slow" else times[FAULT_STEP] - usual_s

    in_step = findings(read_steps(tmp_path / "job" / "out", FAULT_STEP, FAULT_STEP))
    assert [(each.kind, each.process, each.method) for each in in_step] == [(KINDS[kind], f"{role}[{rank}]", "work")]
    assert in_step[0].cost_s == pytest.approx(delay_s, rel=0.1)
    in_all = findings(read_steps(tmp_path / "job" / "out", 1, STEPS))
    assert [(each.kind, each.process) for each in in_all] == [(KINDS[kind], f"{role}[{rank}]")]
    total_s = delay_s * (STEPS - FAULT_STEP + 1) if kind == "slow" else delay_s
    assert in_all[0].cost_s == pytest.approx(total_s, rel=0.1)
    assert in_all[0].sentence in "\n".join(time_lines(tmp_path / "job" / "out"))


@pytest.mark.parametrize("number", range(4))
def test_quiet_run_raises_no_accusation(tmp_path, number):
    run(f"quiet-{number}", tmp_path / "job", "none ACTOR 0 0")
    assert time_lines(tmp_path / "job" / "out") == []
    for step in range(1, STEPS + 1):
        assert findings(read_steps(tmp_path / "job" / "out", step, step)) == []
