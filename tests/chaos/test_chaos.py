# SPDX-License-Identifier: Apache-2.0
"""A GRPO job on two nodes ends bit for bit as undisturbed, whatever is killed, stopped or spoiled.

The whole plan is for ``make chaos``. The command runs in a separate process, since its cluster has to be the only one
that the process knows.
"""

import json
import subprocess
import sys

import pytest

from tests.chaos.faults import NODE_LOSSES, Kind, schedule
from tests.chaos.harness import REPOSITORY

SLOW_TO_HEAL = NODE_LOSSES | {Kind.HANG_ACTOR, Kind.HANG_ROLLOUT, Kind.HANG_REWARD, Kind.FULL_DISK, Kind.PAUSE_RAYLET}
FAST = tuple(kind for kind in Kind if kind not in SLOW_TO_HEAL)


KILLED = (Kind.KILL_ROLLOUT, Kind.KILL_REWARD, Kind.KILL_TRAINER, Kind.KILL_MASTER, Kind.KILL_GCS)


def run_chaos(folder, faults, steps, seed, kinds, timeout_s, *more):
    """Return the command's findings; there must be no violation."""
    named = ",".join(kind.name for kind in kinds)
    command = [sys.executable, "-m", "tests.chaos.run", "--out", str(folder), "--kinds", named, *more]
    for name, value in (("faults", faults), ("steps", steps), ("seed", seed)):
        command += [f"--{name}", str(value)]
    ran = subprocess.run(command, cwd=REPOSITORY, timeout=timeout_s, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-8000:]}\n{ran.stderr[-4000:]}"
    return json.loads((folder / str(seed) / "report.json").read_text())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everyone_is_killed_once_in_twelve_steps(tmp_path):
    report = run_chaos(tmp_path, 5, 12, 7, KILLED, 580, "--undisturbed-here")
    kinds = [finding["fault"]["kind"] for finding in report["findings"]]
    assert (sorted(kinds), report["problems"]) == (sorted(kind.value for kind in KILLED), [])
    assert any(finding["overlaps"] for finding in report["findings"])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nine_faults_in_thirty_steps(tmp_path):
    report = run_chaos(tmp_path, 9, 30, 120, FAST, 580)
    kinds = [finding["fault"]["kind"] for finding in report["findings"]]
    assert (len(kinds), report["problems"]) == (9, [])
    assert set(kinds) >= {kind.value for kind in KILLED}
    assert any(finding["overlaps"] for finding in report["findings"])


def kinds_of(plan):
    return {fault.kind for burst in plan for fault in burst.faults}


EVERY_KIND = (44, 176)
"""Faults and steps: besides those that overlap, one of each kind."""


@pytest.mark.parametrize("seed", [11, 12])
def test_the_plan_of_every_kind(seed):
    assert kinds_of(schedule(seed, *EVERY_KIND)) == set(Kind)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [11, 12])
def test_every_kind_of_fault(tmp_path, seed):
    report = run_chaos(tmp_path, *EVERY_KIND, seed, tuple(Kind), 1700)
    assert {finding["fault"]["kind"] for finding in report["findings"]} == {kind.value for kind in Kind}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rollouts_that_run_ahead_give_no_step_what_is_too_stale(tmp_path):
    report = run_chaos(tmp_path, 9, 30, 120, FAST, 580, "--max-staleness", "2")
    assert (len(report["findings"]), report["problems"]) == (9, [])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_from_outside_from_the_first_actor_on(tmp_path):
    command = [sys.executable, "-m", "tests.chaos.outside", "--seeds", "1-2", "--out", str(tmp_path)]
    ran = subprocess.run(command, cwd=REPOSITORY, timeout=1700, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-8000:]}\n{ran.stderr[-4000:]}"
