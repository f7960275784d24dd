"""Trackers of other makers: Weights & Biases and MLflow. They are there to look at; a run never fails for them."""

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from annotated_types import Ge, Gt

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.recipe.disk import PATIENT, Patience, replace

_LOG = get_logger(__name__)

_NOTES = "trackers.json"


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases. What else it knows, it reads from its own environment variables."""

    project: str
    """The project's name."""

    name: str | None = None
    """The run's name; None: the job's."""


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow."""

    experiment: str
    """The experiment's name."""

    name: str | None = None
    """The run's name; None: the job's."""

    uri: str | None = None
    """The tracking server; None: as MLflow's own environment variables say."""


@dataclass(frozen=True)
class LogConfig:
    """Where the figures of a run go, beside ``metrics.jsonl`` and TensorBoard's events in its directory."""

    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None

    show_samples: Annotated[int, Ge(0)] = 0
    """How many of a step's samples to show in the log of the console."""

    max_chars: Annotated[int, Gt(0)] = 200
    """Characters of each text shown there; all of it is in ``samples.jsonl``."""


class Tracker(Protocol):
    """One that has been opened."""

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step."""
        ...

    def close(self) -> None:
        """The run has come to its end."""
        ...


class Trackers:
    """Tells each step to all of them once, whatever was redone: the steps that they know of are noted in the job's
    directory, with the run that they belong to.

    Args:
        config: which.
        folder: the job's directory.
        settings: of the run, for them to show.
        patience: with a full disk.
    """

    def __init__(
        self, config: LogConfig, folder: Path, settings: Mapping[str, Any], patience: Patience = PATIENT
    ) -> None:
        self._config, self._folder, self._settings, self._patience = config, folder, settings, patience
        self._open: dict[str, Tracker] | None = None
        self._notes: dict[str, Any] = {}

    def step(self, run: str, step: int, figures: Mapping[str, float]) -> None:
        """Tell the figures of a step; those that are no numbers are left out.

        Args:
            run: names the run; the same when it goes on.
            step: from 1.
            figures: of the step.
        """
        if self._open is None:
            self._begin(run)
        if not self._open or step <= self._notes["told"]:
            return
        numbers = {name: value for name, value in figures.items() if math.isfinite(value)}
        for name in list(self._open):
            self._try(name, lambda tracker: tracker.step(step, numbers))
        self._notes["told"] = step
        self._write()

    def close(self) -> None:
        """The run has come to its end."""
        for name in list(self._open or ()):
            self._try(name, lambda tracker: tracker.close())
        self._open = None

    def _begin(self, run: str) -> None:
        makers: dict[str, Callable[[], Tracker]] = {}
        if self._config.wandb is not None:
            makers["wandb"] = lambda: _Wandb(self._config.wandb, run, self._folder, self._settings)
        if self._config.mlflow is not None:
            makers["mlflow"] = lambda: _Mlflow(self._config.mlflow, self._notes, self._folder, self._settings)
        self._open = {}
        if not makers:
            return
        file = self._folder / _NOTES
        noted = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._notes = noted if noted.get("run") == run else {"run": run, "told": 0}
        for name, make in makers.items():
            try:
                self._open[name] = make()
            except ImportError:
                _LOG.warning("%s is not installed: pip install %s; the run goes on without it", name, name)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the training has nothing to do with it
                _LOG.warning("the run goes on without %s: %s: %s", name, type(error).__name__, error)
        self._write()

    def _try(self, name: str, tell: Callable[[Tracker], None]) -> None:
        assert self._open is not None, "it is in there"
        try:
            tell(self._open[name])
        except Exception as error:  # noqa: BLE001 -- as above
            _LOG.warning("from here on the run goes on without %s: %s: %s", name, type(error).__name__, error)
            del self._open[name]

    def _write(self) -> None:
        replace(self._folder / _NOTES, json.dumps(self._notes).encode(), self._patience)


class _Wandb:
    def __init__(self, config: WandbConfig | None, run: str, folder: Path, settings: Mapping[str, Any]) -> None:
        assert config is not None
        wandb = importlib.import_module("wandb")
        name = config.name or folder.name
        self._run = wandb.init(
            project=config.project, name=name, id=run, resume="allow", dir=str(folder), config=dict(settings)
        )

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(
        self, config: MlflowConfig | None, notes: dict[str, Any], folder: Path, settings: Mapping[str, Any]
    ) -> None:
        assert config is not None
        self._mlflow = mlflow = importlib.import_module("mlflow")
        if config.uri is not None:
            mlflow.set_tracking_uri(config.uri)
        mlflow.set_experiment(config.experiment)
        known = notes.get("mlflow")  # the server gives its runs names of its own
        begun = mlflow.start_run(run_id=known) if known else mlflow.start_run(run_name=config.name or folder.name)
        if not known:
            notes["mlflow"] = begun.info.run_id
            mlflow.log_dict(dict(settings), "config.json")

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        self._mlflow.end_run()
