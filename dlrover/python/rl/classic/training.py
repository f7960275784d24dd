"""What the trainers have in common: their arguments, and how these become a recipe's configuration."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dlrover.python.rl.algorithm.fields import check_fields
from dlrover.python.rl.classic.arguments import NonNegative, Positive, PositiveNumber, sampling_of
from dlrover.python.rl.classic.envs import Samples
from dlrover.python.rl.classic.optimizers import optimizer_config
from dlrover.python.rl.classic.running import Recipe, Told, place_of, run
from dlrover.python.rl.recipe.trackers import WandbConfig
from dlrover.python.rl.runtime.torchrun.links import Place

DATA = "data"
"""The folder in ``output_dir`` for what becomes of the data sets."""


@dataclass(kw_only=True)
class Training:
    """Arguments of every trainer, and ``train``."""

    model: str | Path
    num_steps: Positive = 100
    """Training steps."""

    saving_steps: Positive = 10
    """Write model and tokenizer to ``step_<number>`` every so many steps, and to ``final`` after the last."""

    logging_steps: Positive = 10
    """Log a line of figures every so many steps; ``metrics.jsonl`` has those of every step."""

    eval_steps: Positive | None = None
    """Evaluate on ``eval_dataset`` every so many steps."""

    eval_dataset: Samples | None = None
    do_sample: bool = True
    sampling_temperature: PositiveNumber = 1.0
    generation_args: Mapping[str, Any] | None = None
    """``top_k``, ``top_p``, ``stop``, where completions are drawn to evaluate."""

    enable_wandb: bool = False
    """Log figures to Weights & Biases too."""

    wandb_project: str = "dlrover-rl"
    wandb_run_name: str | None = None
    output_dir: str | Path = "./outputs"
    optimizer: type = torch.optim.AdamW
    """A class of ``torch.optim``."""

    optimizer_args: Mapping[str, Any] | None = None
    """Its arguments; ``{"lr": 1e-5}`` by default."""

    lr_scheduler: Any = None
    """A class of ``torch.optim.lr_scheduler``, or a scheduler, whose settings are taken; None: the rate stays."""

    lr_scheduler_args: Mapping[str, Any] | None = None
    """Arguments of the class."""

    seed: NonNegative = 42
    max_grad_norm: PositiveNumber | None = None
    """Global gradient norm to clip to; None: no clipping."""

    log_level: int = logging.INFO
    use_accelerate: bool = False
    """The script runs in every process of ``accelerate launch`` or ``torchrun``; ``batch_size`` is that of each."""

    resume: bool = False
    """Go on from the last step that an earlier run has finished in ``output_dir``."""

    engine: Mapping[str, Any] | None = None
    """Fields of :class:`~dlrover.python.rl.recipe.config.EngineConfig`, ``{"train": "deepspeed"}``."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.eval_steps is not None and self.eval_dataset is None:
            raise ValueError("eval_steps needs an eval_dataset")
        self._optimizer()
        sampling_of(1, 1.0, self.generation_args)

    def train(self) -> None:
        """Train from ``model`` on, to the end; in every process of a launch.

        Raises:
            InvalidJob: with every problem; nothing was started.
            DLRoverRLError: what the training has failed of.
        """
        place = place_of(self.use_accelerate)
        run(lambda: self._recipe(place), place, self._told())

    @property
    def folder(self) -> Path:
        """``output_dir``."""
        return Path(self.output_dir)

    def model_after(self, step: int | None = None) -> Path | str:
        """The model of a step that has been saved; the trained one by default, or where there is none, ``model``.

        Raises:
            ValueError: that of the step has not been saved.
        """
        found = self.folder / ("final" if step is None else f"step_{step}")
        if found.is_dir():
            return found
        if step is not None:
            raise ValueError(f"no model of step {step} has been saved in {self.folder}")
        return self.model

    def _recipe(self, place: Place) -> Recipe:
        raise NotImplementedError

    def _told(self) -> Told:
        wandb = WandbConfig(self.wandb_project, self.wandb_run_name) if self.enable_wandb else None
        return Told(self.log_level, self.logging_steps, wandb=wandb)

    def _optimizer(self) -> dict[str, Any]:
        given = {"lr": 1e-5} if self.optimizer_args is None else self.optimizer_args
        scheduler = (self.lr_scheduler, self.lr_scheduler_args)
        return asdict(optimizer_config(self.optimizer, given, *scheduler, max_grad_norm=self.max_grad_norm))

    def _engine(self) -> dict[str, Any]:
        on_cuda = torch.cuda.is_available()
        usual = {"device": "cuda" if on_cuda else "cpu", "precision": "bf16" if on_cuda else "fp32"}
        return {**usual, **(self.engine or {})}
