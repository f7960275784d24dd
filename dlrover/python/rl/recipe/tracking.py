"""What a run leaves behind: ``metrics.jsonl``, ``samples.jsonl``, TensorBoard events, a curve, a summary."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensorboardX import SummaryWriter

_METRICS, _SAMPLES = "metrics.jsonl", "samples.jsonl"
_FILES = (_METRICS, _SAMPLES, "held_out.jsonl", "summary.json", "reward.png", "loss.png")
_BOARD = "tensorboard"


class RunLog:
    """Writes the figures of a run into its directory, each step as it comes. Numbers that are none become null.

    Args:
        folder: the job's directory. What an earlier run's log left there is removed first, TensorBoard's events
            included, so that no two runs mix; everything else stays, the model too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / _BOARD, ignore_errors=True)
        for name in (_METRICS, _SAMPLES):
            (folder / name).touch()
        self._board = SummaryWriter(str(folder / _BOARD))
        self._history: list[tuple[int, dict[str, float]]] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        values = {name: float(value) for name, value in metrics.items()}
        self._history.append((step, values))
        self._append(_METRICS, [{"step": step, **values}])
        for name, value in values.items():
            if math.isfinite(value):
                self._board.add_scalar(name, value, step)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write samples of a step, one line each."""
        self._append(_SAMPLES, ({"step": step, **row} for row in rows))

    def held_out(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the last answers to the held-out problems, one line each, to ``held_out.jsonl``."""
        (self._folder / "held_out.jsonl").write_text("".join(map(_line, rows)), encoding="utf-8")

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the closing figures, which the command line prints as a table."""
        (self._folder / "summary.json").write_text(json.dumps(_nulled(values), indent=2), encoding="utf-8")

    def curve(self, name: str, file: str) -> None:
        """Draw one figure over the steps as a PNG, with its running mean."""
        points = [(step, values[name]) for step, values in self._history if math.isfinite(values.get(name, math.nan))]
        figure = Figure(figsize=(7, 4), dpi=120)
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        steps, values = [point[0] for point in points], [point[1] for point in points]
        axes.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
        axes.plot(steps, running_mean(values, 10), color="tab:blue", linewidth=2, label="mean of 10 steps")
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(self._folder / file)

    def close(self) -> None:
        """Write out what TensorBoard's events still lack."""
        self._board.close()

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Opened anew each time: a run that fails leaves no file open and no line unwritten."""
        with open(self._folder / name, "a", encoding="utf-8") as file:
            file.writelines(map(_line, rows))


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_nulled(row), ensure_ascii=False, allow_nan=False) + "\n"


def _nulled(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity, and most readers refuse them."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def running_mean(values: list[float], window: int) -> list[float]:
    """Each value's mean with up to ``window - 1`` before it."""
    return [sum(values[max(0, end - window) : end]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)]
