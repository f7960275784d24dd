"""What a run keeps of its model on the way, and whether it has learned all it will."""

import math
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.nearest import hint

_LOG = get_logger(__name__)

_STEP = re.compile(r"step-[0-9]+")
_LOSSES = ("loss", "nll", "perplexity", "kl", "failed")


@dataclass(frozen=True)
class KeepConfig:
    """What is kept of the model besides the last one, ``model/``, all in Hugging Face format; and an early end."""

    best: str | None = None
    """The figure of evaluations by which the best model is kept, in ``best/``: ``eval_loss``. None: none is."""

    best_is: Literal["lowest", "highest"] | None = None
    """Which value is the best. None: the lowest of what is called a loss, perplexity or kl, the highest of others."""

    patience: Annotated[int, Ge(0)] = 0
    """The run ends after so many evaluations in a row that were not better than the best; 0: it does not."""

    save_every: Annotated[int, Ge(0)] = 0
    """Write the model to ``steps/step-<number>`` every so many steps; 0: never."""

    keep_last: Annotated[int, Gt(0)] = 2
    """How many of these folders to keep, the newest ones; all others in ``steps`` are removed."""

    @property
    def prefers_low(self) -> bool:
        """Whether lower values are better."""
        return self.best_is == "lowest" if self.best_is else (self.best or "").endswith(_LOSSES)


def keep_problems(config: KeepConfig, eval_every: int, known: Collection[str]) -> list[Problem]:
    """What is wrong with it.

    Args:
        config: what to keep.
        eval_every: how often the run evaluates, 0 for never.
        known: the figures of its evaluations.
    """
    problems = []
    if config.best is not None and not eval_every:
        problems.append(Problem("config.keep.best", "needs evaluations: set config.eval_every"))
    elif config.best is not None and config.best not in known:
        problems.append(Problem("config.keep.best", f"no figure '{config.best}'{hint(config.best, known)}"))
    if config.patience and config.best is None:
        problems.append(Problem("config.keep.patience", "needs to know what is better: set config.keep.best"))
    return problems


class Keeping:
    """Keeps models, and counts evaluations without progress; belongs into a trainer's ``state``.

    Args:
        config: what to keep.
        folder: the job's directory.
        save: writes the model to a folder.
    """

    def __init__(self, config: KeepConfig, folder: Path, save: Callable[[Path], Any]) -> None:
        self._config, self._folder, self._save = config, folder, save
        self._best: float | None = None
        self._best_step = self._worse = 0

    @property
    def gives_up(self) -> bool:
        """Whether the run is to end, since it gets no better."""
        return 0 < self._config.patience <= self._worse

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Take in an evaluation: of a model that is the best so far, write it to ``best``. A figure that is NaN says
        nothing for the model, and nothing against it.

        Raises:
            InvalidJob: there is no such figure.
        """
        name = self._config.best
        if name is None:
            return
        if name not in figures:
            raise InvalidJob([Problem("config.keep.best", f"no figure '{name}'{hint(name, figures)}")])
        if math.isnan(figures[name]):
            return
        if not self._is_better(figures[name]):
            self._worse += 1
            if self.gives_up:
                _LOG.info("%s has not been better than %g for %d evaluations", name, self._best, self._worse)
            return
        self._best, self._best_step, self._worse = figures[name], step, 0
        self._save(self._folder / "best")

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return True
        return value < self._best if self._config.prefers_low else value > self._best

    def stepped(self, step: int) -> None:
        """After a step: write the model to a folder of its own, if it is its turn, and remove the oldest."""
        every = self._config.save_every
        if not every or step % every:
            return
        folder = self._folder / "steps"
        self._save(folder / f"step-{step}")
        kept = {f"step-{step - every * back}" for back in range(self._config.keep_last)}
        for found in folder.iterdir():
            if _STEP.fullmatch(found.name) and found.name not in kept:
                shutil.rmtree(found)

    def told(self) -> dict[str, Any]:
        """The closing figures."""
        if self._best is None:
            return {}
        return {
            f"best {self._config.best}": round(self._best, 6),
            "best step": self._best_step,
            "best model": str(self._folder / "best"),
        }

    def state_dict(self) -> dict[str, Any]:
        """What is best so far."""
        return {"best": self._best, "step": self._best_step, "worse": self._worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self._best, self._best_step, self._worse = state["best"], state["step"], state["worse"]
