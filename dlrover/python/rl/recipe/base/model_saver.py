# SPDX-License-Identifier: Apache-2.0
"""Models that a run saves besides the last one, and early stopping."""

import math
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import hint

_LOG = get_logger(__name__)

_STEP = re.compile(r"step-[0-9]+")
_LOSSES = ("loss", "nll", "perplexity", "kl", "failed")


@dataclass(frozen=True)
class KeepConfig:
    """Models to keep besides the last one, ``model/``, all in Hugging Face format; and early stopping."""

    best: str | None = None
    """The metric of evaluations by which the best model is kept, in ``best/``: ``eval_loss``. None: none is."""

    best_is: Literal["lowest", "highest"] | None = None
    """Which value is the best. None: the lowest of what is called a loss, perplexity or kl, the highest of others."""

    patience: Annotated[int, Ge(0)] = 0
    """The run ends after this many evaluations in a row that were not better than the best; 0: it does not."""

    save_every: Annotated[int, Ge(0)] = 0
    """Write the model to ``steps/step-<number>`` every this many steps; 0: never."""

    keep_last: Annotated[int, Gt(0)] | None = 2
    """How many of these folders to keep, the newest ones; all others in ``steps`` are removed. None: keep all."""

    @property
    def prefers_low(self) -> bool:
        return self.best_is == "lowest" if self.best_is else (self.best or "").endswith(_LOSSES)


def validate_keep(config: KeepConfig, eval_every: int, metric_names: Collection[str]) -> list[ConfigError]:
    """Check ``config`` against how often the run evaluates (0: never) and the metrics of its evaluations."""
    errors = []
    if config.best is not None and not eval_every:
        errors.append(ConfigError("config.keep.best", "needs evaluations: set config.eval_every"))
    elif config.best is not None and config.best not in metric_names:
        errors.append(_unknown_metric(config.best, metric_names))
    if config.patience and config.best is None:
        errors.append(ConfigError("config.keep.patience", "needs to know what is better: set config.keep.best"))
    return errors


def _unknown_metric(name: str, metric_names: Collection[str]) -> ConfigError:
    return ConfigError("config.keep.best", f"no metric '{name}'{hint(name, metric_names)}")


class ModelSaver:
    """Saves models, and counts evaluations without progress; belongs into a trainer's ``state``.

    Args:
        config: which models.
        folder: the job's directory.
        save: writes the model to a folder.
    """

    def __init__(self, config: KeepConfig, folder: Path, save: Callable[[Path], Any]) -> None:
        self._config, self._folder, self._save = config, folder, save
        self._best: float | None = None
        self._best_step = self._worse = 0

    @property
    def should_stop(self) -> bool:
        """True after ``patience`` evaluations without a better model."""
        return 0 < self._config.patience <= self._worse

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare an evaluation with the best one so far, and save the model where it is better. NaN is not counted.

        Raises:
            InvalidJob: the evaluation has no such metric.
        """
        name = self._config.best
        if name is None:
            return
        if name not in metrics:
            raise InvalidJob([_unknown_metric(name, metrics)])
        if math.isnan(metrics[name]):
            return
        if not self._is_better(metrics[name]):
            self._worse += 1
            if self.should_stop:
                _LOG.info("%s has not been better than %g for %d evaluations", name, self._best, self._worse)
            return
        self._best, self._best_step, self._worse = metrics[name], step, 0
        self._save(self._folder / "best")

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return True
        return value < self._best if self._config.prefers_low else value > self._best

    def save_step(self, step: int) -> None:
        """Save the model of a step where one is due, and remove the oldest."""
        every = self._config.save_every
        if not every or step % every:
            return
        folder = self._folder / "steps"
        self._save(folder / f"step-{step}")
        if self._config.keep_last is None:
            return
        newest = {f"step-{step - every * back}" for back in range(self._config.keep_last)}
        for path in folder.iterdir():
            if _STEP.fullmatch(path.name) and path.name not in newest:
                shutil.rmtree(path)

    def summary(self) -> dict[str, Any]:
        """The closing metrics."""
        if self._best is None:
            return {}
        return {
            f"best {self._config.best}": round(self._best, 6),
            "best step": self._best_step,
            "best model": str(self._folder / "best"),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "step": self._best_step, "worse": self._worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._best_step, self._worse = state["best"], state["step"], state["worse"]
