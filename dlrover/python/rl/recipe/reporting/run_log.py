# SPDX-License-Identifier: Apache-2.0
"""The files of a run in its directory: metrics, samples, TensorBoard events, a curve, a summary, and models."""

import json
import math
import re
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar, text

from dlrover.python.rl.common.disk_space import DEFAULT_DISK_WAIT, DiskWait, append, replace, retry_io
from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.recipe.base.config import KeepConfig, LogConfig
from dlrover.python.rl.recipe.reporting import sample_file
from dlrover.python.rl.recipe.reporting.trackers import Trackers
from dlrover.python.rl.runtime.checkpoint.runs import remove_folder
from dlrover.python.rl.runtime.run.names import METRICS, SUMMARY
from dlrover.python.rl.runtime.run.progress import CURVES, Points, curve_png, finite_points
from dlrover.python.rl.trainer.trainer import RunEnd

_LOG = get_logger(__name__)

_FILES = (METRICS, sample_file.SAMPLES, sample_file.HELD_OUT, "refused.jsonl", SUMMARY, *CURVES.values())
_SUPERSEDED = tuple(sample_file.superseded(Path(name)).name for name in (METRICS, sample_file.SAMPLES))
_TENSORBOARD = "tensorboard"
_REDRAW_S = 30.0
_STEP_FOLDER = re.compile(r"step-[0-9]+")


class TensorBoardWriter:
    """Appends steps to a new event file in ``folder``. When :meth:`log` returns, the whole step is in the file, unlike
    with ``SummaryWriter``. TensorBoard hides steps of earlier files from ``first_step`` on."""

    def __init__(self, folder: Path, first_step: int, disk_wait: DiskWait = DEFAULT_DISK_WAIT) -> None:
        self._disk_wait = disk_wait
        retry_io(lambda: folder.mkdir(parents=True, exist_ok=True), folder, disk_wait)
        number = len(list(folder.iterdir()))
        self._path = folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}"
        events = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if number:
            restart = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=time.time(), step=first_step, session_log=restart))
        self._write(events)

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        summaries = [scalar(name, value) for name, value in metrics.items() if math.isfinite(value)]
        if samples:
            summaries.append(text("samples", markdown_table(samples)))
        self._write(Event(wall_time=time.time(), step=step, summary=summary) for summary in summaries)

    def _write(self, events: Iterable[Event]) -> None:
        records = []
        for event in events:  # in TensorFlow's record format
            body = event.SerializeToString()
            length = struct.pack("<Q", len(body))
            records += [length, struct.pack("<I", masked_crc32c(length)), body, struct.pack("<I", masked_crc32c(body))]
        append(self._path, b"".join(records), self._disk_wait)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows of the same columns; characters that would end a cell are escaped."""
    cells = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _cell(value: Any) -> str:
    shown = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return shown.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


class RunLog:
    """Writes the metrics of a run into its directory at each step. Non-finite numbers become null.

    A step is in the files once: when it begins again, the rows of the earlier attempt move to ``*.superseded.jsonl``
    until it has ended. On a full disk each method waits for ``disk_wait`` before it raises the error, and leaves no
    partial line. The state has the totals and the id of the run, by which trackers recognize a resumed run."""

    def __init__(
        self,
        folder: Path,
        disk_wait: DiskWait = DEFAULT_DISK_WAIT,
        config: LogConfig | None = None,
        settings: Mapping[str, Any] | None = None,
        name: str = "",
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.owns_samples = True  # False: another process writes ``samples.jsonl``
        self._folder, self._disk_wait, self._config = folder, disk_wait, config or LogConfig()
        self._trackers = Trackers(self._config, folder, settings or {}, disk_wait, name)
        self._run = uuid4().hex[:12]
        self._current_step: int | None = None
        self._history: list[tuple[int, dict[str, float]]] = []  # the curves' metrics by step
        self._can_plot, self._now_s, self._drawn_s = True, now_s, now_s()
        self.drawing: threading.Thread | None = None  # the last thread that draws the curve
        self._samples: Sequence[Mapping[str, Any]] = []  # of this step, for trackers
        self._totals = {"samples": 0, "tokens": 0}

    def begin_step(self, step: int) -> None:
        """Remove the rows of ``step`` and of later steps; step 1 removes all files of an earlier run's log."""
        folder, before = self._folder, step - 1
        if before == self._current_step:
            self._current_step = step
            return
        if not before:
            for name in (*_FILES, *_SUPERSEDED):
                if name != sample_file.SAMPLES or self.owns_samples:
                    (folder / name).unlink(missing_ok=True)
            earlier = (Path(sample_file.SAMPLES).stem,) if self.owns_samples else ()
            for name in (_TENSORBOARD, sample_file.EVALUATIONS, *earlier):
                shutil.rmtree(folder / name, ignore_errors=True)
        retry_io((folder / sample_file.SAMPLES).touch, folder / sample_file.SAMPLES, self._disk_wait)
        for name in (METRICS, sample_file.SAMPLES) if self.owns_samples else (METRICS,):
            self._append(name, ())
            sample_file.cut_at_step(folder / name, step)
        rows = map(json.loads, (folder / METRICS).read_text(encoding="utf-8").splitlines())
        self._history = [
            (row["step"], _curves_of({name: math.nan if value is None else value for name, value in row.items()}))
            for row in rows
        ]
        if [number for number, _ in self._history if number] != list(range(1, step)):
            _LOG.warning("%s lacks rows of steps up to %d, the last committed one", folder / METRICS, before)
        self._tensorboard = TensorBoardWriter(folder / _TENSORBOARD, step, self._disk_wait)
        self._current_step = step

    def write_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step; step 0 is the evaluation before training, and is written during step 1."""
        values = {name: float(value) for name, value in metrics.items()}
        self._history.append((step, _curves_of(values)))
        self._append(METRICS, [{"step": step, **values}])
        sample_file.drop_superseded(self._folder / METRICS, step)
        samples, self._samples = self._samples, []
        self._tensorboard.log(step, values, samples)
        self._trackers.log(self._run, step, values, samples)

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        file, wait = self._folder / sample_file.SAMPLES, self._disk_wait
        self.show_samples(step, sample_file.write_step(file, step, rows, self.excerpt(step), disk_wait=wait))

    def excerpt(self, step: int) -> sample_file.Excerpt:
        config = self._config
        has_table = bool(config.samples_every) and (step - 1) % config.samples_every == 0
        limit = {"all": math.inf, "off": 0}.get(str(config.samples), config.samples)
        rows = config.samples_rows if has_table else 0
        return sample_file.Excerpt(config.show_samples, config.max_chars, rows, float(limit), config.token_samples)

    def show_samples(self, step: int, written: sample_file.Written) -> None:
        self._samples = written.table
        for line in written.printed:
            _LOG.info("step %d: %s", step, line)

    def write_refused(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        self._replace("refused.jsonl", sample_file.format_lines(step, rows))

    def write_held_out(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        sample_file.write_evaluation(self._folder / sample_file.HELD_OUT, step, rows, self._disk_wait)

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write the closing metrics, which the command line prints as a table, and end the run in the trackers."""
        self._replace(SUMMARY, json.dumps(sample_file.replace_non_finite(values), indent=2).encode())
        self.close("finished")

    def close(self, outcome: RunEnd) -> None:
        self._trackers.close(outcome)

    def count(self, **amounts: int) -> dict[str, float]:
        """Add a step's ``samples`` and ``tokens``; returns the totals of the run."""
        self._totals = {name: total + amounts[name] for name, total in self._totals.items()}
        return {f"total/{name}": float(total) for name, total in self._totals.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"run": self._run, **self._totals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run = state["run"]
        self._totals = {name: state.get(name, 0) for name in self._totals}

    def redraw(self, name: str) -> None:
        """Draw one metric over the steps as a PNG, in a thread, unless it was drawn recently."""
        now_s = self._now_s()
        if now_s - self._drawn_s < _REDRAW_S or not self._can_plot or (self.drawing and self.drawing.is_alive()):
            return
        self._drawn_s, points = now_s, finite_points(name, self._history)
        draw = partial(self._draw, name, points, may_fail=True)  # the end of the run draws it again
        self.drawing = threading.Thread(target=draw, name="curve", daemon=True)
        self.drawing.start()

    def write_curve(self, name: str) -> None:
        if self.drawing is not None:
            self.drawing.join()  # waits: for a drawing, at most ``disk_wait`` on a full disk
        self._draw(name, finite_points(name, self._history))

    def _draw(self, name: str, points: Points, may_fail: bool = False) -> None:
        file = CURVES[name]
        try:
            self._replace(file, curve_png(name, points))
        except OSError:
            if not may_fail:
                raise
        except ImportError:
            if self._can_plot:
                _LOG.warning("matplotlib is not installed (dlrover-rl[plot]); continuing without %s", file)
            self._can_plot = False

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        content = b"".join(map(sample_file.format_line, rows))
        append(self._folder / name, content, self._disk_wait)

    def _replace(self, name: str, content: bytes) -> None:
        replace(self._folder / name, content, self._disk_wait)


def _curves_of(values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in CURVES if name in values}


def validate_keep(config: KeepConfig, eval_every: int | None, metric_names: Collection[str]) -> list[ConfigError]:
    """Check ``config`` against the interval of evaluations (0 or None: none) and their metrics."""
    errors = []
    if config.best is not None and not eval_every:
        errors.append(ConfigError("config.keep.best", "needs evaluations: set config.eval_every"))
    elif config.metric is not None and config.metric not in metric_names:
        errors.append(_unknown_metric(config.metric, metric_names))
    if config.patience and config.best is None:
        errors.append(ConfigError("config.keep.patience", "needs a metric: set config.keep.best"))
    return errors


def _unknown_metric(name: str, metric_names: Collection[str]) -> ConfigError:
    return ConfigError("config.keep.best", f"no metric '{name}'{hint(name, metric_names)}")


class ModelSaver:
    """Saves models with ``save``, and counts evaluations without progress; part of a trainer's ``state``."""

    def __init__(self, config: KeepConfig, folder: Path, save: Callable[[Path], Any]) -> None:
        self._config, self._folder, self._save = config, folder, save
        self._measure = [config.metric, config.prefers_low]
        self.evaluated = ""  # digest of the evaluation rows
        self._best: float | None = None
        self._best_step = self._worse = 0
        if config.metric != config.best:
            _LOG.warning("keep.best: the metric %s is now called %s", config.best, config.metric)

    @property
    def should_stop(self) -> bool:
        return 0 < self._config.patience <= self._worse

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the model if the evaluation is better than the best so far. NaN does not count, nor does an evaluation
        without the metric (an accuracy needs rewards of 0 and 1). Raises InvalidJob if the first one lacks it."""
        name = self._config.metric
        if name is None:
            return
        if name not in metrics and self._best is None:
            raise InvalidJob([_unknown_metric(name, metrics)])
        if name not in metrics:
            _LOG.warning("step %d: the evaluation has no %s, and does not count for keep.best", step, name)
        if math.isnan(metrics.get(name, math.nan)):
            return
        value, lowest = metrics[name], self._config.prefers_low
        if self._best is not None and not (value < self._best if lowest else value > self._best):
            self._worse += 1
            if self.should_stop:
                _LOG.info("%s has not been better than %g for %d evaluations", name, self._best, self._worse)
            return
        self._best, self._best_step, self._worse = value, step, 0
        self._save(self._folder / "best")

    def save_step(self, step: int) -> None:
        every, last = self._config.save_every, self._config.keep_last
        if not every or step % every:
            return
        folder = self._folder / "steps"
        self._save(folder / f"step-{step}")
        newest = {f"step-{step - every * back}" for back in range(last or 0)}
        for path in folder.iterdir() if last is not None else ():
            if _STEP_FOLDER.fullmatch(path.name) and path.name not in newest:
                remove_folder(path)

    def summary(self) -> dict[str, Any]:
        if self._config.metric is None:
            return {}
        step, model = (None, None) if self._best is None else (self._best_step, str(self._folder / "best"))
        return {f"best/{self._config.metric}": self._best, "best/step": step, "best/model": model}

    def state_dict(self) -> dict[str, Any]:
        measured = {"of": self._measure, "evaluated": self.evaluated}
        return {**measured, "best": self._best, "step": self._best_step, "worse": self._worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume; if the metric or the evaluation rows have changed, there is no best model yet."""
        if list(state.get("of", self._measure)) != self._measure:
            return
        if (evaluated := state.get("evaluated")) and evaluated != self.evaluated:
            if state["best"] is not None:
                _LOG.warning("keep.best starts over: the evaluation rows have changed since the last commit")
            return
        self._best, self._best_step, self._worse = state["best"], state["step"], state["worse"]
