# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.chaos.fault_table [--check]``: the tables of ``docs/fault-table.md`` from what was measured.

What is expected of each kind of fault stands in ``expected.toml``; what was measured stands in
``benchmarks/results/chaos.json``: the ``report.json`` of one run of :mod:`tests.chaos.run`, or a list of such, and in
``chaos-outside.json``, a list of what :mod:`tests.chaos.outside` has written as ``results.json``. Without a file the
page says that there are no metrics.
"""

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.faults import Kind
from tests.chaos.tables import markdown, percentile
from tests.support.commands import ROOT as REPOSITORY

PAGE = REPOSITORY / "docs" / "fault-table.md"
RESULTS = REPOSITORY / "benchmarks" / "results" / "chaos.json"
OUTSIDE = REPOSITORY / "benchmarks" / "results" / "chaos-outside.json"
BEGIN, END = "<!-- fault table: begin -->", "<!-- fault table: end -->"

Run = Mapping[str, Any]
"""What one chaos run has written."""


class Expected(NamedTuple):
    """The expected course of a kind of fault: the action, its effect, its detector and the recovery."""

    done: str
    comes: str
    noticed: str
    recovered: str


CRASHES = {Kind.KILL_ACTOR, Kind.KILL_ROLLOUT, Kind.KILL_REWARD, Kind.KILL_TRAINER, Kind.KILL_STANDBY}
CRASHES |= {Kind.CUT_RECEIVE, Kind.CUT_PUBLISH}
"""Processes of the job that are killed and nothing else."""

MASTERLESS = frozenset({Kind.KILL_MASTER, Kind.TEAR_JOURNAL})

_TEXT = Path(__file__).with_name("expected.toml").read_text(encoding="utf-8")
EXPECTED = {Kind(name): Expected(**columns) for name, columns in tomllib.loads(_TEXT).items()}


def load_runs(path: Path = RESULTS) -> list[Run]:
    """The runs in a results file, none when there is no file."""
    if not path.exists():
        return []
    results = json.loads(path.read_text(encoding="utf-8"))
    return results if isinstance(results, list) else [results]


def render_outside(series: Sequence[Mapping[str, Any]]) -> str:
    """A line for each series of runs whose processes were killed by their pids alone."""
    if not series:
        return "No run that was disturbed from outside is kept here yet."
    head = ["killed", "runs", "in the undisturbed bits", "kills", "of these before the first step"]
    rows = []
    for results in series:
        runs = [result for name, result in results.items() if name != "undisturbed"]
        names = Counter(name.removeprefix("ray::").partition(".")[0] for result in runs for _, name in result["killed"])
        early = sum(at_s < result["first_step_s"] for result in runs for at_s, _ in result["killed"])
        seconds = [result["seconds"] for result in runs]
        killed = ", ".join(f"{name} {count}" for name, count in sorted(names.items()))
        counts = [len(runs), sum(result["same"] for result in runs), names.total(), early]
        rows.append([killed, *counts, f"{percentile(seconds, 0.5):.0f}", f"{max(seconds):.0f}"])
    return markdown([*head, "seconds p50", "max"], rows)


def render(runs: Sequence[Run], outside: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the text between the page's markers."""
    rows = [[f"{kind.value}", *EXPECTED[kind]] for kind in Kind]
    expected = markdown(["fault", "done by", "expected", "noticed by", "recovery"], rows)
    measured = render_measured(runs) if runs else "No run's metrics are kept here yet."
    outside_table = render_outside(outside)
    return f"{expected}\n\n{measured}\n\nKilled from outside (`make chaos-outside`):\n\n{outside_table}"


def render_measured(runs: Sequence[Run]) -> str:
    """Sum runs up in a sentence, and their findings in a table of the kinds of faults."""
    findings = [finding for run in runs for finding in run["findings"]]
    kinds = len({finding["fault"]["kind"] for finding in findings})
    overlapping = sum(bool(finding.get("overlaps")) for finding in findings)
    steps = sum(max((commit["step"] for commit in run["commits"]), default=0) for run in runs)
    redone = sum(sum(run["redone"].values()) for run in runs)
    violations = sum(len(run["problems"]) for run in runs)
    summary = (
        f"{_count(len(runs), 'run')} of {_count(steps, 'step')} in all, {_count(len(findings), 'fault')} of "
        f"{_count(kinds, 'kind')}, {overlapping} of them overlapping another recovery; {_count(redone, 'step')} done "
        f"again, {_count(violations, 'violation')} of what must hold. {_crashes(findings)} Seconds, from the fault on:"
    )
    by_kind: dict[str, list[Mapping[str, Any]]] = {kind.value: [] for kind in Kind}
    for finding in findings:
        by_kind[finding["fault"]["kind"]].append(finding)
    names = ("noticed", "replaced", "next commit")
    head = ["fault", "count", *(f"{name} {share}" for name in names for share in ("p50", "p99")), "noted as"]
    return f"{summary}\n\n{markdown(head, [[kind, *_figures(rows)] for kind, rows in by_kind.items()])}"


def _crashes(findings: Sequence[Mapping[str, Any]]) -> str:
    """Summarize how soon dead processes were noticed, if the master was alive to notice them."""
    dead = [
        (finding["fault"]["at_s"], finding["fault"]["at_s"] + finding["back_s"])
        for finding in findings
        if finding["fault"]["kind"] in MASTERLESS and finding["back_s"]
    ]
    alone, together = [], []
    for finding in findings:
        if finding["fault"]["kind"] in CRASHES and finding["noticed_s"] is not None:
            struck_s = finding["fault"]["at_s"]
            overlap = any(begin < struck_s + finding["noticed_s"] and struck_s < end for begin, end in dead)
            (together if overlap else alone).append(finding["noticed_s"])
    sentence = f"Of {_count(len(alone), 'crash')} the master had noted 99 % within {percentile(alone, 0.99) or 0:.2f} s"
    if together:
        worst = f"{max(together):.2f} s, most of it until the master was back"
        sentence += f"; of {len(together)} more, which struck while it was dead itself, all within {worst}"
    return f"{sentence}."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('sh') else 's'}"


def _figures(findings: Sequence[Mapping[str, Any]]) -> list[object]:
    times = [
        percentile([finding[name] for finding in findings], share)
        for name in ("noticed_s", "back_s", "commit_s")
        for share in (0.5, 0.99)
    ]
    causes = Counter(str(finding["cause"]) for finding in findings)
    causes_text = ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items())) or "-"
    return [len(findings), *times, causes_text]


def with_table(page: str, table: str) -> str:
    """``page`` with ``table`` between its markers."""
    before, begin, remainder = page.partition(BEGIN)
    _, end, after = remainder.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; with ``--check`` 1 when the page is not what the results render to."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fault_table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the page would change")
    parser.add_argument("--results", type=Path, default=RESULTS, help="what chaos runs have measured")
    parser.add_argument("--outside", type=Path, default=OUTSIDE, help="what runs disturbed from outside have measured")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the markers")
    options = parser.parse_args(argv)
    page = options.page.read_text(encoding="utf-8")
    wanted = with_table(page, render(load_runs(options.results), load_runs(options.outside)))
    if wanted == page:
        return 0
    if options.check:
        outdated = f"{options.page} is not what {options.results} renders to"
        sys.stderr.write(f"{outdated}: python -m tests.chaos.fault_table\n")
        return 1
    options.page.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
