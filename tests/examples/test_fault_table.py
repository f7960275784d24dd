# SPDX-License-Identifier: Apache-2.0
"""The page of faults shows what the chaos runs measured, and nothing else."""

import json

import pytest

from benchmarks.recovery import summary
from tests.chaos.fault_table import BEGIN, END, EXPECTED, PAGE, REPOSITORY, RESULTS, load_runs, main, render, with_table
from tests.chaos.faults import Kind

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


def test_the_page_is_what_the_results_render_to():
    assert main(["--check"]) == 0, "python -m tests.chaos.fault_table"


def test_the_tables_of_the_benchmark_are_what_its_results_render_to():
    results = REPOSITORY / "benchmarks" / "results" / "recovery.json"
    rendered = summary(json.loads(results.read_text(encoding="utf-8")))
    assert results.with_suffix(".md").read_text(encoding="utf-8") == f"{rendered}\n"


def test_every_kind_of_fault_has_its_expectation():
    assert list(EXPECTED) == list(Kind)
    assert all(part for expected in EXPECTED.values() for part in expected)


@pytest.mark.skipif(not RESULTS.exists(), reason="no chaos run's metrics are kept")
def test_the_kept_runs_violated_nothing():
    assert [problem for run in load_runs() for problem in run["problems"]] == []


def test_figures_are_those_of_the_findings():
    table = render([SAMPLE])
    cells = row_of(table, Kind.KILL_ROLLOUT)
    assert cells[2:9] == ["2", "0.04", "0.04", "0.50", "0.50", "0.90", "0.90"]
    assert cells[9] == "node_lost 1, process_died 1"
    assert row_of(table, Kind.PAUSE_GCS)[2:9] == ["1", "-", "-", "-", "-", "1.25", "1.25"]
    assert row_of(table, Kind.KILL_NODE)[2] == "0"
    assert "1 run of 40 steps in all, 3 faults of 2 kinds, 1 of them overlapping" in table
    assert "1 step done again, 0 violations" in table


def test_crashes_are_told_apart_by_whether_the_master_was_there_to_notice():
    assert "Of 2 crashes the master had noted 99 % within 0.04 s. " in render([SAMPLE])
    dead = finding(Kind.KILL_MASTER, None, 0.8, 1.0, "(nothing)")
    dead["fault"]["at_s"] = 1001.0
    crash = finding(Kind.KILL_REWARD, 1.9, 3.0, 3.0, "process_died")
    run = SAMPLE | {"findings": [*SAMPLE["findings"], dead, crash]}
    assert "Of 2 crashes the master had noted 99 % within 0.04 s; of 1 more, " in render([run])
    assert "all within 1.90 s" in render([run])


def test_several_runs_are_taken_together():
    assert row_of(render([SAMPLE, SAMPLE]), Kind.KILL_ROLLOUT)[2] == "4"


def test_without_a_run_the_page_says_so():
    table = render([])
    assert "No run's metrics are kept here yet." in table
    assert all(kind.value in table for kind in Kind)


def test_one_run_and_a_list_of_runs_can_be_read(tmp_path):
    for content in (SAMPLE, [SAMPLE]):
        (tmp_path / "chaos.json").write_text(json.dumps(content))
        assert load_runs(tmp_path / "chaos.json") == [SAMPLE]


def test_a_page_that_differs_is_refused_and_then_written(tmp_path, capsys):
    results, page = tmp_path / "chaos.json", tmp_path / "page.md"
    results.write_text(json.dumps(SAMPLE))
    page.write_text(PAGE_WITHOUT_TABLE)
    where = ["--results", str(results), "--page", str(page)]
    assert main(["--check", *where]) == 1
    assert "is not what" in capsys.readouterr().err
    assert page.read_text() == PAGE_WITHOUT_TABLE
    assert main(where) == 0
    assert main(["--check", *where]) == 0
    assert page.read_text().startswith("# Faults") and page.read_text().endswith(f"{END}\nafter\n")


def test_what_stands_around_the_markers_stays():
    assert with_table(f"a{BEGIN}b{END}c", "t") == f"a{BEGIN}\n\nt\n\n{END}c"
    with pytest.raises(ValueError, match="needs the lines"):
        with_table("no markers", "t")
    assert BEGIN in PAGE.read_text(encoding="utf-8")
