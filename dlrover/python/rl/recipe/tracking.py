"""What a run leaves behind: ``metrics.jsonl``, ``samples.jsonl``, TensorBoard events, a curve, a summary."""

import importlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.recipe.board import EventFile
from dlrover.python.rl.recipe.disk import PATIENT, Patience, append, replace
from dlrover.python.rl.recipe.trackers import LogConfig, Trackers

_LOG = get_logger(__name__)

_METRICS, _SAMPLES = "metrics.jsonl", "samples.jsonl"
_FILES = (_METRICS, _SAMPLES, "held_out.jsonl", "refused.jsonl", "summary.json", "reward.png", "loss.png")
_BOARD = "tensorboard"
_STEP = re.compile(rb'\{"step": ([0-9]+)[,}]')


class RunLog:
    """Writes the figures of a run into its directory, each step as it comes. Numbers that are none become null.

    A step is in the files once, however often it was begun: what was said of it by a process that died, or before the
    run went back to a checkpoint, is gone when it begins again. While the disk is full, each of the methods waits.

    Args:
        folder: the job's directory; nothing is changed there before :meth:`begin`.
        patience: with a full disk; after that the error is raised, and no half line is left.
        config: what else is told of it, and where.
        settings: of the run, a plain tree, for trackers to show.

    In a trainer's ``state`` it keeps the run's name, by which trackers know it when it goes on.
    """

    def __init__(
        self,
        folder: Path,
        patience: Patience = PATIENT,
        config: LogConfig | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._patience, self._config = folder, patience, config or LogConfig()
        self._trackers = Trackers(self._config, folder, settings or {}, patience)
        self._run = uuid4().hex[:12]
        self._begun: int | None = None
        self._history: list[tuple[int, dict[str, float]]] = []

    def begin(self, step: int) -> None:
        """Begin ``step``: what the files say of it and of later ones is removed, what they say of earlier ones is kept.

        Step 1 begins a run: all that an earlier run's log left is removed, TensorBoard's events included, so that no
        two runs mix; everything else stays, the model too.
        """
        if self._begun is None or step != self._begun + 1:
            self._go_back_to(step - 1)
        self._begun = step

    def _go_back_to(self, step: int) -> None:
        folder = self._folder
        if not step:
            for name in _FILES:
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / _BOARD, ignore_errors=True)
        for name in (_METRICS, _SAMPLES):
            self._append(name, ())
            _cut(folder / name, step + 1)
        rows = (folder / _METRICS).read_text(encoding="utf-8").splitlines()
        self._history = [_figures(json.loads(row)) for row in rows]
        if [number for number, _ in self._history] != list(range(1, step + 1)):
            _LOG.warning("%s lacks rows of steps up to %d, the last committed one", folder / _METRICS, step)
        self._board = EventFile(folder / _BOARD, step + 1, self._patience)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        values = {name: float(value) for name, value in metrics.items()}
        self._history.append((step, values))
        self._append(_METRICS, [{"step": step, **values}])
        self._board.scalars(step, values)
        self._trackers.step(self._run, step, values)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write samples of a step, one line each; show the first ones, as far as that is wanted."""
        told = list(rows)
        self._append(_SAMPLES, ({"step": step, **row} for row in told))
        for row in told[: self._config.show_samples]:
            _LOG.info("step %d: %s", step, _shown(row, self._config.max_chars))

    def refused(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the samples that an update was refused for, one line each, to ``refused.jsonl``."""
        self._replace("refused.jsonl", "".join(_line({"step": step, **row}) for row in rows).encode())

    def held_out(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the last answers to the held-out problems, one line each, to ``held_out.jsonl``."""
        self._replace("held_out.jsonl", "".join(map(_line, rows)).encode())

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the closing figures, which the command line prints as a table: the run has come to its end."""
        self._replace("summary.json", json.dumps(_nulled(values), indent=2).encode())
        self._trackers.close()

    def state_dict(self) -> dict[str, str]:
        """Which run it is."""
        return {"run": self._run}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on with the run that gave ``state``."""
        self._run = state["run"]

    def curve(self, name: str, file: str) -> None:
        """Draw one figure over the steps as a PNG, with its running mean."""
        points = [(step, values[name]) for step, values in self._history if math.isfinite(values.get(name, math.nan))]
        self._replace(file, _plotting().curve_png(name, points))

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        append(self._folder / name, "".join(map(_line, rows)).encode(), self._patience)

    def _replace(self, name: str, content: bytes) -> None:
        replace(self._folder / name, content, self._patience)


def _plotting() -> Any:
    """Not imported above: a curve is drawn once, and the workloads that import this module draw none."""
    return importlib.import_module("dlrover.python.rl.recipe.plotting")


def _shown(row: Mapping[str, Any], most: int) -> str:
    """A sample in one line of the log, each of its texts cut after ``most`` characters."""
    texts = {name: text if isinstance(text, str) else str(text) for name, text in row.items() if text is not None}
    return "  ".join(f"{name} {_cut_text(text, most)}" for name, text in texts.items())


def _cut_text(text: str, most: int) -> str:
    line = repr(text)[1:-1]
    return line if len(line) <= most else f"{line[:most]}... ({len(text)} characters)"


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_nulled(row), ensure_ascii=False, allow_nan=False) + "\n"


def _nulled(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity, and most readers refuse them."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def _cut(file: Path, step: int) -> None:
    """Cut a file of rising steps off before its first row of ``step`` or later, or the first that is torn."""
    kept = 0
    with open(file, "rb") as lines:
        for line in lines:
            found = _STEP.match(line)
            if found is None or int(found[1]) >= step or not line.endswith(b"\n"):
                break
            kept += len(line)
    os.truncate(file, kept)


def _figures(row: dict[str, Any]) -> tuple[int, dict[str, float]]:
    return row.pop("step"), {name: math.nan if value is None else value for name, value in row.items()}
