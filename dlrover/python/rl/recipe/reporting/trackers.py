# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers: Weights & Biases, MLflow, Trackio, and any class that ``config.log.trackers`` names."""

import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from dlrover.python.rl.common.disk_space import DiskWait, replace
from dlrover.python.rl.common.errors import ClassNotFound, ConfigError
from dlrover.python.rl.common.extensions import ExtensionPoint
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.secrets import without_secrets
from dlrover.python.rl.recipe.base.config import LogConfig
from dlrover.python.rl.trainer.trainer import RunEnd

_LOG = get_logger(__name__)

_STATE_FILE = "trackers.json"
_REFUSED_BY_MLFLOW = re.compile(r"[^\w/.\-: ]")
_MOST_PARAMS, _LONGEST_NAME, _LONGEST_VALUE = 100, 250, 500
"""MLflow's limits of a request and of a parameter. Newer servers take 6000 characters of a value, older ones 500."""

TRACKERS = ExtensionPoint(
    "tracker",
    "dlrover_rl.trackers",
    {name: f"{__name__}:{name.capitalize()}Tracker" for name in ("wandb", "mlflow", "trackio")},
)


@dataclass(frozen=True)
class TrackedRun:
    """The run whose metrics a tracker receives; ``id`` is the same after a restart, ``name`` the job's, and ``folder``
    its directory. ``notes`` are plain data that ``start`` may write, and finds again after a restart."""

    id: str
    name: str
    folder: Path
    notes: dict[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives the metrics of one run. It is constructed with its options in ``config.log.trackers``.

    An exception is logged once, and the run continues without the tracker. A tracker that also shows samples has
    ``log_samples(rows, step)``, called after :meth:`log` with rows of the same columns: texts, numbers and None.
    """

    def start(self, config: Mapping[str, Any], run: TrackedRun) -> None:
        """Open the run, or reopen it; ``config`` is the recipe's configuration without secrets, a plain tree."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the finite metrics of a step; step 0 is the evaluation before training. A repeated step replaces the
        earlier one: the run has gone back to an earlier commit."""

    def close(self, outcome: RunEnd) -> None:
        """End the run, which :meth:`start` reopens if it is resumed. If the run failed or was stopped, another thread
        may call it; if the process is killed, nothing does."""


def validate_log(config: LogConfig) -> list[ConfigError]:
    errors = []
    for name, options in config.tracker_options.items():
        try:
            inspect.signature(TRACKERS.load(name)).bind(**options)
        except ClassNotFound as error:
            errors.append(ConfigError("config.log.trackers", str(error)))
        except TypeError as error:
            errors.append(ConfigError("config.log.trackers", f"{name}: {error}"))
    return errors


class Trackers:
    """Sends each step to all trackers; ``trackers.json`` in the job's directory has the last one."""

    def __init__(
        self, config: LogConfig, folder: Path, settings: Mapping[str, Any], disk_wait: DiskWait, name: str
    ) -> None:
        self._options, self._settings = config.tracker_options, without_secrets(settings)
        self._folder, self._disk_wait, self._name = folder, disk_wait, name or folder.name
        self._open: dict[str, Tracker] | None = None
        self._state: dict[str, Any] = {}

    def log(self, run: str, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Send a step's finite metrics and its ``samples``, unless it was the last one sent in this ``run``."""
        if self._open is None:
            self._open = self._start_all(run)
            self._save_state()
        if not self._open or (step or 1) == self._state["step"]:  # step 0 is sent in step 1
            return
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name, tracker in list(self._open.items()):
            actions = [partial(tracker.log, finite, step)]
            if samples and hasattr(tracker, "log_samples"):
                actions.append(partial(tracker.log_samples, samples, step))
            if not all(_try(name, action) for action in actions):
                self._open.pop(name, None)
        self._state["step"] = step
        self._save_state()

    def close(self, outcome: RunEnd) -> None:
        """End the run, even if an earlier process or trainer left it open. Nothing is sent afterwards."""
        saved = self._saved_state() if self._open is None else {}
        if saved and not saved.get("ended"):
            self._open = self._start_all(saved["run"])
        trackers, self._open = self._open or {}, {}
        for name, tracker in trackers.items():
            _try(name, partial(tracker.close, outcome))
        if trackers:
            self._state["ended"] = True
            self._save_state()

    def _start_all(self, run: str) -> dict[str, Tracker]:
        if not self._options:
            return {}
        state = self._saved_state()
        self._state = state if state.get("run") == run else {"run": run, "step": -1, "notes": {}}
        self._state["ended"] = False
        trackers = {}
        for name, options in self._options.items():
            notes = self._state["notes"].setdefault(name, {})
            try:
                tracker: Tracker = TRACKERS.load(name)(**options)
                tracker.start(self._settings, TrackedRun(run, self._name, self._folder, notes))
            except ImportError as error:
                package = error.name or name
                _LOG.warning("%s is not installed; continuing without %s", package, "it" if package == name else name)
            except Exception as error:  # noqa: BLE001 -- a tracker's failure must not end the training
                _LOG.warning("%s failed; continuing without it: %s: %s", name, type(error).__name__, error)
            else:
                trackers[name] = tracker
        return trackers

    def _saved_state(self) -> dict[str, Any]:
        file = self._folder / _STATE_FILE
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def _save_state(self) -> None:
        if self._options:
            replace(self._folder / _STATE_FILE, json.dumps(self._state).encode(), self._disk_wait)


def _try(name: str, action: Callable[[], None]) -> bool:
    try:
        action()
    except Exception as error:  # noqa: BLE001 -- a tracker's failure must not end the training
        _LOG.warning("%s failed; continuing without it: %s: %s", name, type(error).__name__, error)
        return False
    return True


class WandbTracker:
    """Logs to W&B. The step is a metric, since W&B's own steps refuse values of a repeated step."""

    def __init__(self, project: str, name: str | None = None) -> None:
        self._project, self._name = project, name

    def start(self, config: Mapping[str, Any], run: TrackedRun) -> None:
        self._wandb = wandb = importlib.import_module("wandb")
        arguments = {"id": run.id, "resume": "allow", "dir": str(run.folder), "config": dict(config)}
        self._run = wandb.init(project=self._project, name=self._name or run.name, **arguments)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"step": step, "samples": table})

    def close(self, outcome: RunEnd) -> None:
        self._run.finish(exit_code=int(outcome != "finished"))


class TrackioTracker:
    """Logs to Trackio, where a run is identified by its name: by default the job's and the run's id. A repeated step
    is added to the earlier one, and a failed run is not marked."""

    def __init__(self, project: str, name: str | None = None) -> None:
        self._project, self._name = project, name

    def start(self, config: Mapping[str, Any], run: TrackedRun) -> None:
        self._trackio = trackio = importlib.import_module("trackio")
        arguments = {"name": self._name or f"{run.name}-{run.id}", "config": dict(config), "resume": "allow"}
        self._run = trackio.init(self._project, embed=False, **arguments)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"samples": table}, step=step)

    def close(self, outcome: RunEnd) -> None:
        self._run.finish()


class MlflowTracker:
    """Logs to MLflow. Parameters are the configuration's dotted keys; ``config.json`` has the whole. Characters that
    MLflow refuses in names are replaced: ``@`` by ``_at_``, others by ``_``."""

    def __init__(self, experiment: str, name: str | None = None, uri: str | None = None) -> None:
        self._experiment, self._name, self._uri = experiment, name, uri

    def start(self, config: Mapping[str, Any], run: TrackedRun) -> None:
        self._mlflow = mlflow = importlib.import_module("mlflow")
        if self._uri is not None:
            mlflow.set_tracking_uri(self._uri)
        mlflow.set_experiment(self._experiment)
        self._notes = run.notes
        if "run_id" in run.notes:
            if not self._is_active():  # an attempt in this process may have opened it
                mlflow.start_run(run_id=run.notes["run_id"])
            return
        run.notes["run_id"] = mlflow.start_run(run_name=self._name or run.name).info.run_id  # the server chooses it
        mlflow.log_dict(dict(config), "config.json")
        params = iter(_flatten(config).items())
        while batch := dict(islice(params, _MOST_PARAMS)):
            mlflow.log_params(batch)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({_mlflow_name(name): value for name, value in metrics.items()}, step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self._mlflow.log_table(columns, f"samples/step-{step:06d}.json")

    def close(self, outcome: RunEnd) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[outcome]
        if self._is_active():
            self._mlflow.end_run(status)
        else:  # in this thread
            self._mlflow.MlflowClient().set_terminated(self._notes["run_id"], status)

    def _is_active(self) -> bool:
        active = self._mlflow.active_run()
        return active is not None and active.info.run_id == self._notes["run_id"]


def _mlflow_name(name: str) -> str:
    return _REFUSED_BY_MLFLOW.sub("_", name.replace("@", "_at_"))


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a configuration's values by their dotted keys, as MLflow's parameters; long ones are cut."""
    params: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            params |= _flatten(value, f"{prefix}{key}.")
        else:
            name = _mlflow_name(f"{prefix}{key}").replace("/", "_")  # MLflow refuses what resolves to another path
            params[name[:_LONGEST_NAME]] = str(value)[:_LONGEST_VALUE]
    return params
