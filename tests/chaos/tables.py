# SPDX-License-Identifier: Apache-2.0
"""Tables of results as text."""

from collections.abc import Iterable, Sequence


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
