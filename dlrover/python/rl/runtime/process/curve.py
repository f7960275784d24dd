# SPDX-License-Identifier: Apache-2.0
"""The curve of a run's reward or loss over its steps; needs matplotlib, the extra ``plot``."""

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from dlrover.python.rl.common.disk_space import DiskWait, replace
from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

METRICS = "metrics.jsonl"
CURVES = {"reward/mean": "reward.png", "loss": "loss.png"}
"""Metrics and the files of their curves; a run draws the first that it has."""

_MEAN_OF = 10

Points: TypeAlias = Sequence[tuple[int, float]]
"""Steps and values."""


def redraw(folder: Path) -> None:
    """Draw the curve of a run that has ended early, if it has the metrics for one; does not wait for the disk."""
    rows = list(_read_rows(folder / METRICS))
    name = next((name for name in CURVES if any(name in row for row in rows)), None)
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None] if name else []
    if name and points:
        try:
            replace(folder / CURVES[name], curve_png(name, points), DiskWait(limit_s=0.0, transient_s=0.0))
        except ImportError:
            pass
        except Exception as error:  # noqa: BLE001 - Ctrl-C may have left a half of matplotlib, and nothing needs the curve
            _LOG.warning("continuing without %s: %s", CURVES[name], error)


def _read_rows(file: Path) -> Iterable[Mapping[str, Any]]:
    with suppress(OSError, ValueError):  # an end within a line leaves a part of it
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def finite_points(name: str, rows: Iterable[tuple[int, Mapping[str, float]]]) -> Points:
    return [(step, values[name]) for step, values in rows if math.isfinite(values.get(name, math.nan))]


def curve_png(name: str, points: Points) -> bytes:
    """A PNG with the running mean of a few steps; raises ImportError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, values = [point[0] for point in points], [point[1] for point in points]
    axes.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    axes.plot(steps, running_mean(values, _MEAN_OF), color="tab:blue", linewidth=2, label=f"mean of {_MEAN_OF} steps")
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    figure.tight_layout()
    content = io.BytesIO()
    canvas.print_png(content)  # draws once, savefig twice
    return content.getvalue()


def running_mean(values: list[float], window: int) -> list[float]:
    return [sum(values[max(0, end - window) : end]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)]
