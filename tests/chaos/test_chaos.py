# SPDX-License-Identifier: Apache-2.0
"""A GRPO job on two nodes ends bit for bit as undisturbed, whatever is killed, stopped or spoiled.

The whole plan is for ``make chaos``. Each command runs in a separate process, since its cluster has to be the only one
that the process knows.
"""

import json

import pytest

from tests.chaos import hosts
from tests.chaos.faults import NODE_LOSSES, Kind
from tests.support.commands import ROOT, run_python

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

SLOW_TO_HEAL = NODE_LOSSES | {Kind.HANG_ACTOR, Kind.HANG_ROLLOUT, Kind.HANG_REWARD, Kind.FULL_DISK, Kind.PAUSE_RAYLET}
FAST = tuple(kind for kind in Kind if kind not in SLOW_TO_HEAL)
KILLED = (Kind.KILL_ROLLOUT, Kind.KILL_REWARD, Kind.KILL_TRAINER, Kind.KILL_MASTER, Kind.KILL_GCS)
EVERY_KIND = (44, 176)
"""Faults and steps: besides those that overlap, one of each kind."""


def run(module, folder, timeout_s, *arguments):
    """Run a command of this package, which must find no violation, and return its output."""
    command = ["-m", f"tests.chaos.{module}", "--out", folder, *arguments]
    return run_python(ROOT, *command, within_s=timeout_s, OMP_WAIT_POLICY="PASSIVE").stdout


def run_chaos(folder, faults, steps, seed, kinds, *more, timeout_s=580):
    """Return the findings of a run under a plan, and the kinds of the faults that struck."""
    named = ",".join(kind.name for kind in kinds)
    plan = ("--kinds", named, "--faults", faults, "--steps", steps, "--seed", seed)
    run("run", folder, timeout_s, *plan, *more)
    report = json.loads((folder / str(seed) / "report.json").read_text())
    assert report["problems"] == []
    return report["findings"], sorted(finding["fault"]["kind"] for finding in report["findings"])


def values(kinds):
    return sorted(kind.value for kind in kinds)


@pytest.mark.parametrize(
    ("faults", "steps", "seed", "kinds", "options"),
    [
        (5, 12, 7, KILLED, ["--undisturbed-here"]),
        *((9, 30, 120, FAST, ["--max-staleness", staleness]) for staleness in (0, 2)),
    ],
    ids=["a kill of each process", "nine faults", "nine faults while rollouts run ahead"],
)
def test_run_survives_a_few_quick_faults(tmp_path, faults, steps, seed, kinds, options):
    findings, struck = run_chaos(tmp_path, faults, steps, seed, kinds, *options)
    assert len(findings) == faults and set(struck) >= set(values(KILLED))
    assert any(finding["overlaps"] for finding in findings)


@pytest.mark.parametrize("seed", [11, 12])
def test_run_survives_every_kind_of_fault(tmp_path, seed):
    _, kinds = run_chaos(tmp_path, *EVERY_KIND, seed, tuple(Kind), timeout_s=1700)
    assert set(kinds) == set(values(Kind))


@pytest.mark.parametrize("options", [(), ("--rays-own",)], ids=["workers, trainer and master", "Ray's, too"])
def test_run_survives_kills_from_outside(tmp_path, options):
    output = run("outside", tmp_path, 1700, "--seeds", "2-2" if options else "1-2", *options)
    assert "wrong: none" in output


@pytest.mark.timeout(2400)
@pytest.mark.skipif(
    not hosts.has_namespaces(),
    reason="no network namespaces can be made here; python -m tests.chaos.run has Ray nodes on one address",
)
def test_run_over_three_hosts_survives_when_one_is_cut_off(tmp_path):
    """One more dies, and one joins."""
    assert hosts.main(["--out", str(tmp_path)]) == 0
