# SPDX-License-Identifier: Apache-2.0
"""The chaos harness itself: its plan, what it reads from a run's files, and that its verdict can fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.recovery import summary
from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import Cause, CauseKind, MemberStarted, Process, RoleSettings
from tests.chaos import fault_table
from tests.chaos.damage import clear, flip_bit, tear
from tests.chaos.fault_table import BEGIN, END, EXPECTED, load_runs, main, render, with_table
from tests.chaos.faults import QUICK, Kind, schedule
from tests.chaos.findings import NOTHING, false_alarms, findings_of, lost_commits
from tests.chaos.gates import Gates
from tests.chaos.harness import REPOSITORY, _wake_the_unreachable
from tests.chaos.injector import _METHODS, Injected
from tests.chaos.ledger import Commit, is_alive, is_stopped, ledger_of
from tests.chaos.tables import percentile
from tests.chaos.verdict import differences, redone_steps
from tests.support.commands import run_python


@pytest.mark.parametrize(("faults", "steps"), [(100, 400), (30, 120)])
def test_schedule_has_a_third_of_its_faults_overlapping(faults, steps):
    for seed in range(20):
        plan = schedule(seed, faults, steps)
        assert plan == schedule(seed, faults, steps) != schedule(seed + 1, faults, steps)
        planned = [fault for burst in plan for fault in burst.faults]
        assert len(planned) == faults
        assert 3 * sum(fault is not burst.faults[0] for burst in plan for fault in burst.faults) >= faults
        assert all(0.0 <= fault.after_s < 1.0 for fault in planned)
        assert all(fault.kind in QUICK for burst in plan for fault in burst.faults[1:])
        ends = [burst.step for burst in plan]
        assert ends == sorted(set(ends)) and ends[0] >= 1 and ends[-1] < steps


def test_schedule_of_many_faults_has_every_kind():
    for plan in (schedule(0, 100, 400), schedule(11, 44, 176), schedule(12, 44, 176)):
        assert {fault.kind for burst in plan for fault in burst.faults} == set(Kind)
    assert set(_METHODS) == set(Kind)


def test_schedule_with_too_few_steps_is_refused():
    with pytest.raises(ValueError, match="at least"):
        schedule(0, 100, 40)


TERMS = {"ACTOR": RoleSettings(1), "ROLLOUT": RoleSettings(1, standby=1)}
GONE = Cause(CauseKind.PROCESS_DIED, "ROLLOUT[0]", "it is gone")


def journal():
    """A rollout (pid 12) dies at 10.5 and its standby (pid 13) takes over."""
    return [
        (1.0, events.MasterStarted("head", 10)),
        (1.0, events.Submitted("toy", TERMS)),
        (2.0, MemberStarted("ACTOR", 0, 1, Process("head", 11))),
        (2.0, MemberStarted("ROLLOUT", 0, 1, Process("far", 12))),
        (2.5, events.StandbyReady("ROLLOUT", 0, Process("far", 13))),
        (3.0, events.TrainerStarted(1, Process("head", 14))),
        (10.5, events.MemberLost("ROLLOUT", 0, 1, GONE)),
        (10.6, MemberStarted("ROLLOUT", 0, 2, Process("far", 13), standby=0)),
    ]


def test_ledger_has_the_living_and_lost_processes():
    ledger = ledger_of(journal())
    pids = {process: up.pid for process, up in ledger.up.items()}
    assert pids == {"master": 10, "ACTOR[0]": 11, "ROLLOUT[0]": 13, "trainer": 14}
    (loss,) = ledger.losses
    assert (loss.who, loss.number, loss.pid, loss.cause.kind) == ("ROLLOUT[0]", 1, 12, CauseKind.PROCESS_DIED)


def test_findings_have_the_loss_and_return_of_a_fault():
    fault = Injected(Kind.KILL_ROLLOUT, 10.4, 7, "ROLLOUT[0]", 12, "far")
    (finding,) = findings_of([fault], ledger_of(journal()), [Commit(7, 1, 10.3), Commit(8, 1, 11.0)])
    assert (finding.noticed_s, finding.back_s, finding.commit_s) == pytest.approx((0.1, 0.2, 0.6))
    assert finding.cause == "process_died"


def test_findings_overlap_until_the_fault_before_has_healed():
    first = Injected(Kind.KILL_ROLLOUT, 10.4, 7, "ROLLOUT[0]", 12, "far")
    commits = [Commit(8, 1, 11.0)]
    for at_s, overlaps in ((10.9, True), (11.1, False)):
        second = Injected(Kind.KILL_GCS, at_s, 7, "GCS", 5)
        findings = findings_of([first, second], ledger_of(journal()), commits)
        assert (findings[1].overlaps, findings[1].cause) == (overlaps, NOTHING)


def test_findings_of_a_paused_master_end_when_it_runs_again():
    fault = Injected(Kind.PAUSE_MASTER, 10.4, 7, "master", 10, back_s=11.9)
    (finding,) = findings_of([fault], ledger_of([*journal(), (60.0, events.MasterStarted("head", 15))]), [])
    assert finding.back_s == pytest.approx(1.5)


def test_false_alarm_is_a_loss_without_a_fault():
    ledger = ledger_of(journal())
    assert [loss.who for loss in false_alarms([], ledger)] == ["ROLLOUT[0]"]
    assert false_alarms([Injected(Kind.HANG_ROLLOUT, 10.4, 7, "ROLLOUT[0]", 12)], ledger) == []
    assert false_alarms([Injected(Kind.PAUSE_RAYLET, 10.4, 7, "raylet", 12)], ledger)


def test_loss_of_a_node_explains_its_processes():
    fault = Injected(Kind.KILL_NODE, 10.4, 7, "node", 99, "far")
    lost = (10.45, events.NodeLost("far", Cause(CauseKind.NODE_LOST, "job", "it is gone")))
    ledger = ledger_of([*journal()[:6], lost, *journal()[6:]])
    assert false_alarms([fault], ledger) == []
    (finding,) = findings_of([fault], ledger, [])
    assert (finding.cause, finding.noticed_s) == ("node_lost", pytest.approx(0.05))


def test_lost_commits_beyond_the_damaged_one_are_named():
    commits = [Commit(step, 1, float(step)) for step in (1, 2, 3, 3, 4)]
    damaged = Injected(Kind.FLIP_MEMORY, 3.5, 3)
    assert lost_commits(commits, [damaged]) == []
    assert lost_commits(commits, [])
    assert lost_commits([Commit(2, 1, 0.5), Commit(3, 1, 1.0), Commit(2, 1, 2.0)], [damaged])
    commits = [Commit(2, 1, 0.5), Commit(8, 1, 1.0), Commit(3, 1, 2.0)]
    assert not lost_commits(commits, [Injected(Kind.FLIP_MEMORY, 2.5, 8)])


def test_redone_steps_are_those_of_every_rollout():
    calls = [("R0", 1), ("R1", 1), ("R0", 2), ("R1", 2), ("R0", 2), ("R1", 2), ("R0", 3), ("R0", 3), ("R1", 3)]
    executions = [{"method": "generate", "who": member, "step": step} for member, step in calls]
    assert redone_steps(executions) == {2: 1}


def test_percentile_leaves_out_missing_values():
    assert percentile([None, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.99) == 2.0
    assert percentile([None], 0.5) is None


def write_run(folder, rewards=(0.25, 0.5), samples=2):
    folder.mkdir(parents=True)
    rows = [{"step": step, "reward/mean": reward, "time/step": id(folder)} for step, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample_rows = [{"step": step, "prompt_id": 3, "sample_index": at} for step in (1, 2) for at in range(samples)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sample_rows))
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"weights")
    return folder


def double(file):
    file.write_text(file.read_text() * 2)


@pytest.mark.parametrize(
    ("run", "change", "words"),
    [
        ({}, None, "checkpoint"),  # which these runs lack; that times differ does not count
        ({"rewards": (0.25, 0.75)}, None, "metrics of step 2"),
        ({"rewards": (0.25,)}, None, "not 1 to 2 once"),
        ({"samples": 3}, None, "has 6 rows"),
        ({}, lambda folder: double(folder / "samples.jsonl"), "more than once"),
        ({}, lambda folder: (folder / "model/weights").write_bytes(b"weightz"), "model/weights"),
    ],
)
def test_differences_other_than_times_are_named(tmp_path, run, change, words):
    oracle, chaos = write_run(tmp_path / "oracle"), write_run(tmp_path / "chaos", **run)
    if change:
        change(chaos)
    lines = differences(oracle, chaos, 2)
    assert any(words in line for line in lines)
    assert run or change or all(words in line for line in lines)


def test_flip_bit_and_tear_damage_a_file(tmp_path):
    file = tmp_path / "state"
    file.write_bytes(bytes(8))
    assert flip_bit(file, 13) == 13
    assert file.read_bytes() == bytes([0, 32, 0, 0, 0, 0, 0, 0])
    assert tear(file, 21) == 5
    assert file.stat().st_size == 5


def test_armed_gate_is_taken_once(tmp_path):
    gates = Gates(tmp_path)
    assert not gates.take("nan_loss")
    gates.arm("nan_loss")
    assert [gates.take("nan_loss"), gates.take("nan_loss")] == [True, False]
    assert gates.await_taken("nan_loss", 5.0)
    assert gates.await_taken("nan_loss", 0.0) is None


def waiting_process():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_killed_process_is_not_alive_before_it_is_waited_for():
    with waiting_process() as child:
        assert is_alive(child.pid)
        child.send_signal(signal.SIGKILL)
        while is_alive(child.pid):
            pass
        assert child.wait() == -signal.SIGKILL


def test_stopped_processes_on_a_lost_node_are_woken():
    children = {node: waiting_process() for node in ("far", "head")}
    faults = [Injected(Kind.HANG_ROLLOUT, 1.0, 1, "ROLLOUT[0]", child.pid, node) for node, child in children.items()]
    try:
        for child in children.values():
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
        _wake_the_unreachable(faults)
        assert [is_stopped(child.pid) for child in children.values()] == [True, True]
        _wake_the_unreachable([Injected(Kind.KILL_RAYLET, 0.5, 1, "raylet", 1, "far"), *faults])
        assert [is_stopped(child.pid) for child in children.values()] == [False, True]
    finally:
        for child in children.values():
            child.kill()
            child.communicate()


KILLED = """
import os, pathlib, sys
from tests.chaos.damage import small_disk
folder = pathlib.Path(sys.argv[1])
with small_disk(folder, 1) as mounted:
    (folder / "left").touch()
    os._exit(0 if mounted else 3)
"""


def test_clear_removes_the_small_disk_of_a_killed_run(tmp_path):
    folder = tmp_path / "run"
    killed = run_python(REPOSITORY, "-c", KILLED, folder / "chaos" / "out", code=None)
    if killed.returncode == 3:
        pytest.skip("mounting is not allowed here")
    assert killed.returncode == 0
    clear(folder)
    assert list(folder.iterdir()) == []
    assert str(folder) not in Path("/proc/self/mounts").read_text()


PAGE_WITHOUT_TABLE = f"# Faults\n\n{BEGIN}\nold\n{END}\nafter\n"


def finding(kind, noticed_s, back_s, commit_s, cause, overlaps=False):
    fault = {"kind": kind.value, "at_s": 1000.0, "step": 3, "who": "", "pid": 1, "node": "", "note": "", "back_s": 0.0}
    times = {"noticed_s": noticed_s, "back_s": back_s, "commit_s": commit_s}
    return {"fault": fault, **times, "cause": cause, "overlaps": overlaps}


SAMPLE = {
    "seconds": 61.5,
    "problems": [],
    "redone": {"4": 1},
    "findings": [
        finding(Kind.KILL_ROLLOUT, 0.02, 0.5, 0.9, "process_died"),
        finding(Kind.KILL_ROLLOUT, 0.04, 0.25, 0.7, "node_lost", overlaps=True),
        finding(Kind.PAUSE_GCS, None, None, 1.25, "(nothing)"),
    ],
    "commits": [{"step": 1, "epoch": 1, "at_s": 999.0}, {"step": 40, "epoch": 1, "at_s": 1010.0}],
}


def row_of(table, kind):
    """The cells of the last row of a kind, which is the measured one."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    return [cells for cells in rows if len(cells) > 1 and cells[1] == kind.value][-1]


def test_page_of_faults_shows_the_results():
    assert main(["--check"]) == 0, "python -m tests.chaos.fault_table"


def test_tables_of_the_recovery_benchmark_show_its_results():
    results = REPOSITORY / "benchmarks" / "results" / "recovery.json"
    rendered = summary(json.loads(results.read_text(encoding="utf-8")))
    assert results.with_suffix(".md").read_text(encoding="utf-8") == f"{rendered}\n"


def test_fault_table_expects_something_of_every_kind():
    assert list(EXPECTED) == list(Kind)
    assert all(part for expected in EXPECTED.values() for part in expected)


@pytest.mark.skipif(not fault_table.RESULTS.exists(), reason="no chaos run's metrics are kept")
def test_stored_runs_violated_nothing():
    assert [problem for run in load_runs() for problem in run["problems"]] == []


def test_fault_table_has_the_figures_of_the_findings():
    table = render([SAMPLE])
    cells = row_of(table, Kind.KILL_ROLLOUT)
    assert cells[2:9] == ["2", "0.04", "0.04", "0.50", "0.50", "0.90", "0.90"]
    assert cells[9] == "node_lost 1, process_died 1"
    assert row_of(table, Kind.PAUSE_GCS)[2:9] == ["1", "-", "-", "-", "-", "1.25", "1.25"]
    assert row_of(table, Kind.KILL_NODE)[2] == "0"
    assert "1 run of 40 steps in all, 3 faults of 2 kinds, 1 of them overlapping" in table
    assert "1 step done again, 0 violations" in table


def test_fault_table_separates_crashes_without_a_master():
    assert "Of 2 crashes the master had noted 99 % within 0.04 s. " in render([SAMPLE])
    dead = finding(Kind.KILL_MASTER, None, 0.8, 1.0, "(nothing)")
    dead["fault"]["at_s"] = 1001.0
    crash = finding(Kind.KILL_REWARD, 1.9, 3.0, 3.0, "process_died")
    run = SAMPLE | {"findings": [*SAMPLE["findings"], dead, crash]}
    assert "Of 2 crashes the master had noted 99 % within 0.04 s; of 1 more, " in render([run])
    assert "all within 1.90 s" in render([run])


def test_fault_table_of_several_runs_or_none():
    assert row_of(render([SAMPLE, SAMPLE]), Kind.KILL_ROLLOUT)[2] == "4"
    table = render([])
    assert "No run's metrics are kept here yet." in table
    assert all(kind.value in table for kind in Kind)


def test_fault_table_refuses_and_then_writes_an_old_page(tmp_path, capsys):
    results, page = tmp_path / "chaos.json", tmp_path / "page.md"
    results.write_text(json.dumps(SAMPLE))
    page.write_text(PAGE_WITHOUT_TABLE)
    assert load_runs(results) == [SAMPLE], "a run, or a list of them as in the repository"
    where = ["--results", str(results), "--page", str(page)]
    assert main(["--check", *where]) == 1
    assert "is not what" in capsys.readouterr().err
    assert page.read_text() == PAGE_WITHOUT_TABLE
    assert main(where) == 0
    assert main(["--check", *where]) == 0
    assert page.read_text().startswith("# Faults") and page.read_text().endswith(f"{END}\nafter\n")


def test_with_table_leaves_the_text_around_its_markers():
    assert with_table(f"a{BEGIN}b{END}c", "t") == f"a{BEGIN}\n\nt\n\n{END}c"
    with pytest.raises(ValueError, match="needs the lines"):
        with_table("no markers", "t")
    assert BEGIN in fault_table.PAGE.read_text(encoding="utf-8")


def test_fault_table_counts_runs_from_outside():
    killed = [[12.5, "ray::RLMaster.follow"], [50, "raylet"]]
    run = {"seconds": 170.0, "first_step_s": 40.0, "same": True, "killed": killed}
    series = {"undisturbed": {}, "seed 1": run, "seed 2": run | {"same": False}, "seed 3": run | {"seconds": 200.0}}
    cells = [cell.strip() for cell in fault_table.render_outside([series]).splitlines()[-1].strip("|").split("|")]
    assert cells == ["RLMaster 3, raylet 3", "3", "2", "6", "3", "170", "200"]
