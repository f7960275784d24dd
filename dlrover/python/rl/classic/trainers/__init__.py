# SPDX-License-Identifier: Apache-2.0
"""The base of RLFusion's trainers: their arguments, and the run of a recipe's job in the processes of a script."""

import inspect
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.optim import lr_scheduler as schedulers

from dlrover.python.rl.algorithm.losses.fields import check_fields
from dlrover.python.rl.classic.envs import SampleDataset
from dlrover.python.rl.classic.evaluator import Evaluator, NonNegative, Positive, PositiveNumber, sampling_params
from dlrover.python.rl.classic.rewards import reward_function
from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobConflict
from dlrover.python.rl.common.log import configure_logging, get_logger
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.load import search_folders
from dlrover.python.rl.config.spec import RUNS, JobSpec
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.recipe import workloads
from dlrover.python.rl.recipe.launch import check_job, run_together
from dlrover.python.rl.runtime.run.folder import LATEST, folder_name, in_use, new_run, newest_owner
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv
from dlrover.python.rl.trainer.trainer import StepReport

_LOG = get_logger(__name__)

_LINKED = ("metrics.jsonl", "samples.jsonl", "summary.json", "tensorboard")
_MODELS = ("final", "step_*")

SAMPLED_ROLES = ("actor", "rollout", "reward")
"""Roles of a recipe that samples."""


@dataclass
class ClassicTrainer:
    """Arguments of every trainer, and ``train``.

    Raises:
        ValueError: an argument has an invalid value.
        TypeError: there is no such argument; gives the nearest.
    """

    recipe: ClassVar[type]

    model: str | Path
    """Folder or hub name of a causal language model."""

    _: KW_ONLY

    num_steps: Positive = 100
    """Training steps."""

    batch_size: Positive = 1
    """Samples, or prompts, of a step, for each process."""

    max_new_tokens: Positive = 1024
    saving_steps: Positive = 10
    """Write model and tokenizer to ``step_<number>`` every this many steps, and to ``final`` after the last."""

    logging_steps: Positive = 10
    """Log a line of metrics every this many steps; ``metrics.jsonl`` has those of every step."""

    eval_steps: Positive | None = None
    """Evaluate on ``eval_dataset`` every this many steps."""

    eval_dataset: SampleDataset | None = None
    do_sample: bool = True
    sampling_temperature: PositiveNumber = 1.0
    generation_args: Mapping[str, Any] | None = None
    """``top_k``, ``top_p``, ``stop``."""

    reward_timeout_s: PositiveNumber = 30.0
    """Seconds that ``get_reward`` may take; a sample that takes longer counts as failed, and is not trained on."""

    enable_wandb: bool = False
    """Log metrics to Weights & Biases too."""

    wandb_project: str = "dlrover-rl"
    wandb_run_name: str | None = None
    output_dir: str | Path = "./outputs"
    """Each run has a folder in ``output_dir/runs``; the models and metrics in ``output_dir`` are links to the last."""

    optimizer: type = torch.optim.AdamW
    """A class of ``torch.optim``."""

    optimizer_args: Mapping[str, Any] | None = None
    """Its arguments; ``{"lr": 1e-5}`` by default."""

    lr_scheduler: Any = None
    """A class of ``torch.optim.lr_scheduler``, or a scheduler, whose settings are copied; None: a constant rate."""

    lr_scheduler_args: Mapping[str, Any] | None = None
    """Arguments of the class."""

    seed: NonNegative = 42
    max_grad_norm: PositiveNumber | None = None
    """Global gradient norm to clip to; None: no clipping."""

    log_level: int = logging.INFO
    use_accelerate: bool = False
    """The script runs in every process of ``accelerate launch`` or ``torchrun``."""

    resume: bool = False
    """Continue the last run in ``output_dir`` after its last finished step."""

    overwrite: bool = False
    """Replace the last run in ``output_dir``, and files there that are not links to a run."""

    engine: Mapping[str, Any] | None = None
    """Fields of :class:`~dlrover.python.rl.recipe.base.config.EngineConfig`, ``{"train": "deepspeed"}``."""

    def __post_init__(self) -> None:
        self._has_trained = False
        self._run_folder = self.folder
        check_fields(self)
        if self.eval_steps is not None and self.eval_dataset is None:
            raise ValueError("eval_steps needs an eval_dataset")
        self._optimizer()
        sampling_params(1, 1.0, self.generation_args)

    def train(self) -> None:
        """Train ``model`` to the end; in every process of a launch.

        Raises:
            InvalidJob: with every config error, at rank 0; nothing was started.
            DLRoverRLError: the training failed.
        """
        launch = self._read_launch()
        configure_logging(f"rank {launch.rank}" if launch.world_size > 1 else "", self.log_level)
        error = run_together(lambda: self._begin_run(launch), launch, self._report)
        if error is not None:
            raise error
        self._has_trained = True
        if not launch.rank:
            self._link("final", "model")

    @property
    def folder(self) -> Path:
        return Path(self.output_dir)

    def model_after(self, step: int | None = None) -> Path | str:
        """Return the saved model of a step; by default the trained one, or ``model`` before ``train``.

        Models of an earlier run count by their step, or with ``resume``, and never with ``overwrite``.

        Raises:
            ValueError: the model of the step was not saved.
        """
        path = self.folder / ("final" if step is None else f"step_{step}")
        counts = self._has_trained or self.resume or (step is not None and not self.overwrite)
        if path.is_dir() and counts:
            return path
        if step is not None:
            raise ValueError(f"no model of step {step} has been saved in {self.folder}")
        return self.model

    def _read_launch(self) -> LaunchEnv:
        launch = LaunchEnv.from_env(os.environ)
        if launch.world_size > 1 and not self.use_accelerate:
            what = f"{launch.world_size} processes were launched, and each would train alone into the same folder"
            raise ValueError(f"{what}: pass use_accelerate=True")
        return launch

    # -- the recipe's job ---------------------------------------------------------------------------------------------

    def _begin_run(self, launch: LaunchEnv) -> JobSpec:
        """Return the checked job with its folder, to which ``output_dir`` links from now on."""
        job = check_job(lambda: self._job(launch), launch)
        self._run_folder = job.job_dir
        for path in (path for name in _MODELS for path in self.folder.glob(name)):
            if not self.resume:
                self._remove(path)
        for name in _LINKED:
            self._link(name, name)
        return job

    def _job(self, launch: LaunchEnv) -> JobSpec:
        run_folders = self.folder.absolute() / RUNS / self.recipe.__name__.lower()
        last_run = (run_folders / LATEST).resolve()
        self._check_folder(last_run)
        builder = JobBuilder().device_type("CPU").trainer(self.recipe.__module__, self.recipe.__qualname__)
        for role in self._roles():
            builder.role(role, workloads.__name__, f"{role.title()}Workload")
        builder.config(recipe_config(self, {**self._shared_config(), **self._config(launch)}))
        builder.checkpoint(resume="latest" if self.resume else "never")
        job = replace(builder.spec(run_folders.name, search_folders()), overwrite=self.overwrite)
        if (self.resume or self.overwrite) and last_run.is_dir():
            return replace(job, job_dir=last_run)
        return replace(job, run=(run := new_run()), job_dir=run_folders / folder_name(run))

    def _check_folder(self, last_run: Path) -> None:
        """Raise JobConflict where another run writes, InvalidJob where files would be lost."""
        for run in self.folder.glob(f"{RUNS}/*/{LATEST}"):
            owner = newest_owner(run.resolve())
            if owner is not None and owner.pid and owner.is_here and in_use(run.resolve()):
                raise JobConflict(f"{self.folder} is in use by {owner}")
        paths = sorted(path for name in (*_MODELS, *_LINKED) for path in self.folder.glob(name))
        names = [path.name for path in paths if not path.is_symlink()]
        if names and not self.overwrite:
            message = f"{self.folder} has {', '.join(names)} of another program: pass overwrite=True, or another folder"
            raise InvalidJob([ConfigError("output_dir", message)])

    def _roles(self) -> Sequence[str]:
        raise NotImplementedError

    def _config(self, launch: LaunchEnv) -> dict[str, Any]:
        raise NotImplementedError

    def _shared_config(self) -> dict[str, Any]:
        config = {
            "model": str(self.model),
            "optimizer": self._optimizer(),
            "engine": self._engine,
            "keep.keep_last": None,
        }
        if self.enable_wandb:
            config["log.wandb"] = {"project": self.wandb_project, "name": self.wandb_run_name}
        return config

    def _optimizer(self) -> dict[str, Any]:
        arguments = {"lr": 1e-5} if self.optimizer_args is None else self.optimizer_args
        scheduler = (self.lr_scheduler, self.lr_scheduler_args)
        return asdict(optimizer_config(self.optimizer, arguments, *scheduler, max_grad_norm=self.max_grad_norm))

    @property
    def _engine(self) -> dict[str, Any]:
        return {"rollout": "torch", **(self.engine or {})}

    @property
    def _data_folder(self) -> Path:
        return self.folder / "data"

    def _reward(self) -> dict[str, Any]:
        return {"function": reward_function(self._data_folder), "timeout_s": self.reward_timeout_s}

    # -- its steps, at rank 0 -----------------------------------------------------------------------------------------

    def _report(self, report: StepReport) -> None:
        if report.step % self.saving_steps == 0:
            self._link(f"step_{report.step}", f"steps/step-{report.step}")
        if report.step % self.logging_steps == 0:
            metrics = "  ".join(f"{name} {value:.4g}" for name, value in report.metrics.items())
            _LOG.info("step %d%s  %s", report.step, f"/{report.total_steps}" if report.total_steps else "", metrics)

    def _link(self, name: str, target: str) -> None:
        """Link ``name`` in ``output_dir`` to a file or folder of the run."""
        path = self.folder / name
        self._remove(path)
        relative = os.path.relpath(self._run_folder / target, self.folder.absolute())
        path.symlink_to(relative)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _test_dataset(self, dataset: SampleDataset | None) -> SampleDataset:
        samples = self.eval_dataset if dataset is None else dataset
        if samples is None:
            raise ValueError("test() needs a dataset: there is no eval_dataset")
        return samples

    def _evaluate(self, model: str | Path, samples: SampleDataset, **options: Any) -> dict[str, Any]:
        evaluator = Evaluator(
            model,
            samples,
            self.folder / "evaluation",
            generation_args=self.generation_args,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            reward_timeout_s=self.reward_timeout_s,
            **options,
        )
        try:
            return evaluator.evaluate()
        finally:
            evaluator.close()


# -- arguments as a recipe's configuration -----------------------------------------------------------------------------

CONFIG_KEYS: Mapping[str, tuple[str, ...]] = {
    "num_steps": ("steps",),
    "seed": ("seed",),
    "saving_steps": ("keep.save_every",),
    "eval_steps": ("eval_every",),
    "ppo_steps": ("epochs",),
    "group_size": ("rollout.samples_per_prompt",),
    "clip_eps": ("algorithm.clip_low", "algorithm.clip_high"),
    "kl_penalty": ("algorithm.kl_coef",),
    "assistant_loss_mode": ("data.assistant",),
    "mask_prompt": ("data.mask_prompt",),
}
"""The recipe's keys for arguments whose value they take unchanged."""


def recipe_config(arguments: Any, computed: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``arguments`` by :data:`CONFIG_KEYS`, then ``computed``, whose keys are dotted, as one tree."""
    values = {key: getattr(arguments, name, None) for name, keys in CONFIG_KEYS.items() for key in keys}
    given = {key: value for key, value in values.items() if value is not None}
    config: dict[str, Any] = {}
    for key, value in {**given, **computed}.items():
        *parents, last = key.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return config


_OPTIMIZERS = {torch.optim.AdamW: "adamw", torch.optim.SGD: "sgd"}
_SUPPORTED = {"lr", "betas", "weight_decay", "momentum"}
_SPEED_ONLY = {"foreach", "fused", "capturable", "differentiable"}
_SCHEDULES = "ConstantLR without an end, LinearLR that falls, CosineAnnealingLR"


def optimizer_config(
    optimizer: Any,
    arguments: Mapping[str, Any],
    scheduler: Any = None,
    scheduler_args: Mapping[str, Any] | None = None,
    max_grad_norm: float | None = None,
) -> OptimizerConfig:
    """Translate a class of ``torch.optim`` and one of ``torch.optim.lr_scheduler``.

    Raises:
        ValueError: it has no counterpart; names those that have.
    """
    if optimizer not in _OPTIMIZERS:
        supported = ", ".join(kind.__name__ for kind in _OPTIMIZERS)
        raise ValueError(f"optimizer {_name(optimizer)} is not known; known: {supported}")
    values = _optimizer_values(optimizer, arguments)
    values |= _schedule_values(scheduler, scheduler_args, values["lr"])
    config, errors = parse(OptimizerConfig, {**values, "max_grad_norm": max_grad_norm}, "optimizer_args")
    if config is None:
        raise ValueError("; ".join(map(str, errors)))
    return config


def _optimizer_values(optimizer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """PyTorch's defaults and ``arguments``, in the recipe's names."""
    signature = inspect.signature(optimizer).parameters
    defaults = {name: parameter.default for name, parameter in signature.items() if name != "params"}
    for name, value in arguments.items():
        if name not in defaults:
            raise ValueError(f"optimizer_args: {optimizer.__name__} has no '{name}'{hint(name, defaults)}")
        if name not in _SUPPORTED | _SPEED_ONLY and value != defaults[name]:
            raise ValueError(f"optimizer_args: {name} can only be {defaults[name]}, not {value!r}")
    values = {name: value for name, value in {**defaults, **arguments}.items() if name in _SUPPORTED}
    return {"name": _OPTIMIZERS[optimizer], **values}


def _schedule_values(scheduler: Any, arguments: Mapping[str, Any] | None, lr: Any) -> dict[str, Any]:
    if scheduler is None:
        if arguments:
            raise ValueError("lr_scheduler_args go with an lr_scheduler")
        return {}
    kind, options = _scheduler_options(scheduler, arguments)
    if kind is schedulers.CosineAnnealingLR and "T_max" in options:
        return {"schedule": "cosine", "decay_steps": options["T_max"], "min_lr": options.get("eta_min", 0.0)}
    if kind is schedulers.LinearLR and options.get("start_factor", 1.0 / 3) == 1.0:
        end = options.get("end_factor", 1.0)
        return {"schedule": "linear", "decay_steps": options.get("total_iters", 5), "min_lr": lr * end}
    if kind is schedulers.ConstantLR and options.get("factor", 1.0 / 3) == 1.0:
        return {}
    raise ValueError(f"lr_scheduler {_name(kind)} with {options} is not known; known: {_SCHEDULES}; or None")


def _scheduler_options(scheduler: Any, arguments: Mapping[str, Any] | None) -> tuple[type, dict[str, Any]]:
    if isinstance(scheduler, type):
        return scheduler, dict(arguments or {})
    if arguments:
        raise ValueError("lr_scheduler_args go with a class: this lr_scheduler has its settings")
    names = [name for name in inspect.signature(type(scheduler)).parameters if name not in ("optimizer", "last_epoch")]
    return type(scheduler), {name: getattr(scheduler, name) for name in names if hasattr(scheduler, name)}


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or type(value).__name__
