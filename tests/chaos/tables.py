# SPDX-License-Identifier: Apache-2.0
"""A run's findings as text."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.chaos.findings import Finding, confusion


def percentile(values: Iterable[float | None], share: float) -> float | None:
    """The smallest value that ``share`` of the values do not exceed; None of none."""
    numbers = sorted(value for value in values if value is not None)
    return numbers[min(int(share * len(numbers)), len(numbers) - 1)] if numbers else None


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, aligned."""
    cells = [[str(cell) for cell in head], *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def fault_table(findings: Sequence[Finding], redone: Mapping[str, int]) -> str:
    """One row for each kind: how many, how many overlapping, seconds to notice, to replace, to the next commit."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.fault.kind.value, []).append(finding)
    rows = [[kind, *_row(kinds[kind]), redone.get(kind, 0)] for kind in sorted(kinds)]
    rows.append(["all", *_row(findings), sum(redone.values())])
    head = ["fault", "n", "over-", "noticed", "", "replaced", "", "next commit", "", "steps"]
    units = ["", "", "lapping", "p50 s", "p99 s", "p50 s", "p99 s", "p50 s", "p99 s", "redone"]
    return markdown(head, [units, *rows])


def _row(findings: Sequence[Finding]) -> list[object]:
    times = ([f.noticed_s for f in findings], [f.back_s for f in findings], [f.commit_s for f in findings])
    metrics = [percentile(values, share) for values in times for share in (0.5, 0.99)]
    return [len(findings), sum(finding.overlaps for finding in findings), *metrics]


def confusion_table(findings: Sequence[Finding], alarms: Mapping[str, int]) -> str:
    """A table of faults (rows) by the causes that the master noted (columns). The last row: losses without a fault."""
    matrix = {**confusion(findings), "(no fault)": Counter(alarms)}
    causes = sorted({cause for counts in matrix.values() for cause in counts})
    return markdown(["fault", *causes], [[kind, *(matrix[kind][c] or "" for c in causes)] for kind in matrix])
