# SPDX-License-Identifier: Apache-2.0
"""The progress of a run: a live bar on a terminal, plain lines elsewhere, and the curve of its reward or loss.

The curve needs matplotlib, the extra ``plot``.
"""

import io
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeAlias

from rich import progress
from rich.console import Console
from rich.table import Table

from dlrover.python.rl.common.disk_space import DiskWait, replace
from dlrover.python.rl.common.log import get_logger, inert
from dlrover.python.rl.runtime.run.names import METRICS
from dlrover.python.rl.trainer.step_report import StepPace, StepReport

_LOG = get_logger(__name__)

_RATE = "speed/tokens_per_s"
_HEADLINE = {
    "reward": "reward",
    "score": "score",
    "reward/mean": "reward",
    "reward/score": "score",
    "loss": "loss",
    "policy/kl": "kl",
    "policy/entropy": "entropy",
    "completions/length_mean": "length",
    "completions/truncated": "truncated",
    "eval/accuracy": "accuracy",
    "eval/loss": "eval loss",
    _RATE: "tok/s",
}
"""Metrics and their labels."""

_PLAIN_INTERVAL_S = 2.0

CURVES = {"reward/mean": "reward.png", "loss": "loss.png"}  # a run draws the first metric that it has
_MEAN_OF = 10


def print_summary(job: str, text: str) -> None:
    """Print the defined values of ``text``, the content of a run's summary, as a table."""
    table = Table("metric", "value", title=job)
    for name, value in json.loads(text).items():
        if value is not None:
            table.add_row(inert(name), f"{value:.4g}" if isinstance(value, float) else inert(str(value)))
    Console(width=100, markup=False).print(table)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Format the headline metrics of a step: ``reward 0.53  kl 0.012  4,812 tok/s``."""
    excluded = "loss" if "reward/mean" in metrics else ""  # a policy's loss is always near 0
    values = ((name, label, metrics[name]) for name, label in _HEADLINE.items() if name in metrics and name != excluded)
    texts = (f"{value:,.0f} {label}" if name == _RATE else f"{label} {value:.4g}" for name, label, value in values)
    return "  ".join(texts)


def format_step(report: StepReport) -> str:
    """Format the number of a step and its headline metrics: ``step 3/500  reward 0.53``."""
    of = f"/{report.total_steps}" if report.total_steps else ""
    return f"step {report.step}{of}  {format_metrics(report.metrics)}"


class ProgressView:
    """Shows step reports, and between them the run's activity: a context manager that is called with each report.
    ``live`` draws a bar on a terminal. ``opening`` is an activity that stays as a line."""

    def __init__(self, title: str, stream: TextIO | None = None, live: bool = True, opening: str = "") -> None:
        self.title, self._stream, self._live, self._opening = title, stream or sys.stderr, live, opening
        self._bar: progress.Progress | None = None
        self._task: int | None = None
        self._printed_s, self._entered_s = 0.0, time.monotonic()
        self._unprinted: StepReport | None = None
        self._pace = StepPace()

    def __enter__(self) -> "ProgressView":
        console = Console(file=self._stream)
        if self._live and console.is_terminal:
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[metrics]}", markup=False),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=console,
            )
            self._bar.start()
        return self

    @property
    def tasks(self) -> list[progress.Task]:
        """The tasks of the bar; empty without a terminal."""
        return [] if self._bar is None else self._bar.tasks

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._unprinted is not None:
            self._print(self._unprinted)

    def __call__(self, report: StepReport) -> None:
        self._pace.note(report.step, report.at_s or time.monotonic())
        if self._bar is None:
            now_s = time.monotonic()
            if now_s - self._printed_s < _PLAIN_INTERVAL_S and report.step != report.total_steps:
                self._unprinted = report
            else:
                self._printed_s, self._unprinted = now_s, None
                self._print(report)
            return
        metrics = format_metrics(report.metrics) + self._rate()
        total = report.total_steps or None
        self._update(self._bar, description=self.title, completed=report.step, total=total, metrics=metrics)

    def announce(self, activity: str) -> None:
        """Show the run's activity until the next report or activity."""
        activity = inert(activity)
        if activity == self._opening:
            self._show(activity)
        elif self._bar is not None:
            self._update(self._bar, description=f"{self.title}  {activity}", refresh=True)
        else:
            self._show(f"{self.title}  {time.monotonic() - self._entered_s:.0f} s  {activity}")

    def _show(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def _update(self, bar: progress.Progress, **values: Any) -> None:
        if self._task is None:
            self._task = bar.add_task(self.title, total=None, metrics="")
        bar.update(bar.tasks[self._task].id, **values)  # Rich has a separate type for task numbers

    def _print(self, report: StepReport) -> None:
        eta_s = self._pace.step_s * (report.total_steps - report.step) if self._pace.step_s else 0.0
        eta = f"  eta {eta_s:.0f} s" if self._pace.step_s and report.total_steps else ""
        self._show(f"{self.title}  {format_step(report)}{self._rate()}{eta}")

    def _rate(self) -> str:
        return f"  {1 / self._pace.step_s:.3g} steps/s" if self._pace.step_s else ""


Points: TypeAlias = Sequence[tuple[int, float]]  # steps and values


def redraw(folder: Path) -> None:
    """Draw the curve of a run that has ended early, if it has a metric for it; does not wait for the disk."""
    rows: list[Mapping[str, Any]] = []
    with suppress(OSError, ValueError):  # the last line may be incomplete
        for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
            rows.append(json.loads(line))
    name = next((name for name in CURVES if any(name in row for row in rows)), None)
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None] if name else []
    if name and points:
        try:
            replace(folder / CURVES[name], curve_png(name, points), DiskWait(limit_s=0.0, transient_s=0.0))
        except ImportError:
            pass
        except Exception as error:  # noqa: BLE001 - Ctrl-C may have interrupted matplotlib; nothing needs the curve
            _LOG.warning("continuing without %s: %s", CURVES[name], error)


def finite_points(name: str, rows: Iterable[tuple[int, Mapping[str, float]]]) -> Points:
    return [(step, values[name]) for step, values in rows if math.isfinite(values.get(name, math.nan))]


def curve_png(name: str, points: Points) -> bytes:
    """Draw a PNG with the running mean of a few steps. Raises ImportError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, values = [point[0] for point in points], [point[1] for point in points]
    axes.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    means = [sum(values[max(0, end - _MEAN_OF) : end]) / min(end, _MEAN_OF) for end in range(1, len(values) + 1)]
    axes.plot(steps, means, color="tab:blue", linewidth=2, label=f"mean of {_MEAN_OF} steps")
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    figure.tight_layout()
    content = io.BytesIO()
    canvas.print_png(content)  # draws once, savefig twice
    return content.getvalue()
