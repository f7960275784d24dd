"""What a run leaves behind: ``metrics.jsonl``, ``samples.jsonl``, TensorBoard events, a curve, a summary."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensorboardX import SummaryWriter


class RunLog:
    """Writes the figures of a run into its directory, each step as it comes.

    Args:
        folder: the job's directory; files of an earlier run there are replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = open(folder / "metrics.jsonl", "w", encoding="utf-8")  # noqa: SIM115 -- until close()
        self._samples = open(folder / "samples.jsonl", "w", encoding="utf-8")  # noqa: SIM115 -- until close()
        self._board = SummaryWriter(str(folder / "tensorboard"))
        self._history: list[tuple[int, dict[str, float]]] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        values = {name: float(value) for name, value in metrics.items()}
        self._history.append((step, values))
        self._metrics.write(json.dumps({"step": step, **values}) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write samples of a step, one line each."""
        self._samples.writelines(_line({"step": step, **row}) for row in rows)
        self._samples.flush()

    def held_out(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the last answers to the held-out problems, one line each, to ``held_out.jsonl``."""
        (self._folder / "held_out.jsonl").write_text("".join(map(_line, rows)), encoding="utf-8")

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the closing figures, which the command line prints as a table."""
        (self._folder / "summary.json").write_text(json.dumps(dict(values), indent=2), encoding="utf-8")

    def curve(self, name: str, file: str) -> None:
        """Draw one figure over the steps as a PNG, with its running mean."""
        points = [(step, values[name]) for step, values in self._history if name in values]
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
        """Flush and close every file."""
        self._metrics.close()
        self._samples.close()
        self._board.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def running_mean(values: list[float], window: int) -> list[float]:
    """Each value's mean with up to ``window - 1`` before it."""
    return [sum(values[max(0, end - window) : end]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)]
