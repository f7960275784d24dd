# SPDX-License-Identifier: Apache-2.0
"""The base class of RLFusion's trainers: their arguments, and the run of a recipe's job in a script's processes."""

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

from dlrover.python.rl.classic.envs import LoadedSample, SampleDataset, write_rewards
from dlrover.python.rl.classic.evaluator import Evaluator, NonNegative, Positive, PositiveNumber, sampling_params
from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JobConflict
from dlrover.python.rl.common.log import configure_logging, get_logger
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.config.layout import job_from_mapping
from dlrover.python.rl.config.load import search_folders
from dlrover.python.rl.config.plain import from_plain
from dlrover.python.rl.config.spec import RUNS, JobSpec
from dlrover.python.rl.config.typed import check_fields, parse
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.recipe import workloads
from dlrover.python.rl.recipe.launch import check_job, run_together
from dlrover.python.rl.runtime.run.folder import LATEST, folder_name, in_use, new_run, newest_owner
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv
from dlrover.python.rl.trainer.trainer import StepReport

_LOG = get_logger(__name__)

_LINKED = ("metrics.jsonl", "samples.jsonl", "summary.json", "tensorboard")
_MODELS = ("final", "step_*")

CONFIG_KEYS: Mapping[str, tuple[str, ...]] = {  # the recipe's keys for arguments that are passed on unchanged
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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


@dataclass(frozen=True)
class ClassicTrainer:
    """The arguments of every trainer, and ``train``.

    Raises:
        ValueError: an argument has an invalid value.
        TypeError: an argument does not exist; names the nearest.
    """

    recipe: ClassVar[type]
    """The recipe's trainer."""

    model: str | Path
    """Folder or hub name of a causal language model."""

    _: KW_ONLY

    num_steps: Positive = 100
    batch_size: Positive = 1
    """Samples or prompts of a step, for each process."""

    max_new_tokens: Positive = 1024
    saving_steps: Positive = 10
    """Write model and tokenizer to ``step_<number>`` every this many steps, and to ``final`` after the last."""

    logging_steps: Positive = 10
    """Log a line of metrics every this many steps; ``metrics.jsonl`` has every step."""

    eval_steps: Positive | None = None
    eval_dataset: SampleDataset | None = None
    do_sample: bool = True
    sampling_temperature: PositiveNumber = 1.0
    generation_args: Mapping[str, Any] | None = None
    """``top_k``, ``top_p``, ``stop``."""

    reward_timeout_s: PositiveNumber = 30.0
    """Time limit of ``get_reward`` in seconds; a sample that takes longer has failed, and is not trained on."""

    enable_wandb: bool = False
    wandb_project: str = "dlrover-rl"
    wandb_run_name: str | None = None
    output_dir: str | Path = "./outputs"
    """Each run has a folder in ``output_dir/runs``; the models and metrics in ``output_dir`` are links to the last."""

    optimizer: type = torch.optim.AdamW
    """A class of ``torch.optim``."""

    optimizer_args: Mapping[str, Any] | None = None
    """Arguments of the optimizer; ``{"lr": 1e-5}`` by default."""

    lr_scheduler: Any = None
    """A class of ``torch.optim.lr_scheduler``, or a scheduler whose settings are copied; None: a constant rate."""

    lr_scheduler_args: Mapping[str, Any] | None = None
    seed: NonNegative = 42
    max_grad_norm: PositiveNumber | None = None
    """Clip the global gradient norm to this value; None: no clipping."""

    log_level: int = logging.INFO
    use_accelerate: bool = False
    """The script runs in every process of ``accelerate launch`` or ``torchrun``."""

    resume: bool = False
    """Continue the last run in ``output_dir`` after its last finished step."""

    overwrite: bool = False
    """Replace the last run in ``output_dir``, and files of other programs there."""

    engine: Mapping[str, Any] | None = None
    """Fields of :class:`~dlrover.python.rl.recipe.base.config.EngineConfig`, such as ``{"train": "deepspeed"}``."""

    _has_trained = False  # in this process
    _run = Path()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.eval_steps is not None and self.eval_dataset is None:
            raise ValueError("eval_steps needs an eval_dataset")
        optimizer_keys(self)
        sampling_params(1, 1.0, self.generation_args)

    def train(self) -> None:
        """Train ``model``; in a launch, call it in every process.

        Raises:
            InvalidJob: with every config error, at rank 0; nothing was started.
            DLRoverRLError: the training failed.
        """
        launch = self._read_launch()
        configure_logging(f"rank {launch.rank}" if launch.world_size > 1 else "", self.log_level)

        def begin_run() -> JobSpec:
            job = check_job(lambda: self._job(launch), launch)
            self._link_run(job.job_dir)
            return job

        error = run_together(begin_run, launch, self._report)
        if error is not None:
            raise error
        object.__setattr__(self, "_has_trained", True)  # the arguments are frozen
        if not launch.rank:
            self._link("final", "model")

    def model_after(self, step: int | None = None) -> Path | str:
        """Return the saved model of a step; by default the trained one, or ``model`` before ``train``.

        Models of an earlier run count by their step, or with ``resume``, and never with ``overwrite``.

        Raises:
            ValueError: the model of the step was not saved.
        """
        path = self.folder / ("final" if step is None else f"step_{step}")
        may_be_used = self._has_trained or self.resume or (step is not None and not self.overwrite)
        if path.is_dir() and may_be_used:
            return path
        if step is not None:
            raise ValueError(f"no model of step {step} has been saved in {self.folder}")
        return self.model

    @property
    def folder(self) -> Path:
        return Path(self.output_dir)

    def _read_launch(self) -> LaunchEnv:
        launch = LaunchEnv.from_env(os.environ)
        if launch.world_size > 1 and not self.use_accelerate:
            message = f"{launch.world_size} processes were launched, and each would train alone into the same folder"
            raise ValueError(f"{message}: pass use_accelerate=True")
        return launch

    def _report(self, report: StepReport) -> None:
        if report.step % self.saving_steps == 0:
            self._link(f"step_{report.step}", f"steps/step-{report.step}")
        if report.step % self.logging_steps == 0:
            metrics = "  ".join(f"{name} {value:.4g}" for name, value in report.metrics.items())
            _LOG.info("step %d%s  %s", report.step, f"/{report.total_steps}" if report.total_steps else "", metrics)

    def _check_output(self) -> None:
        """Raise JobConflict if another run writes to ``output_dir``, InvalidJob if files would be lost."""
        for run in self.folder.glob(f"{RUNS}/*/{LATEST}"):
            owner = newest_owner(run.resolve())
            if owner is not None and owner.pid and owner.is_here and in_use(run.resolve()):
                raise JobConflict(f"{self.folder} is in use by {owner}")
        paths = sorted(path for name in (*_MODELS, *_LINKED) for path in self.folder.glob(name))
        names = ", ".join(path.name for path in paths if not path.is_symlink())
        if names and not self.overwrite:
            message = f"{self.folder} has {names} of another program: pass overwrite=True, or another folder"
            raise InvalidJob([ConfigError("output_dir", message)])

    def _link_run(self, run: Path) -> None:
        """Link to the folder ``run`` from now on; the models of a resumed run stay."""
        object.__setattr__(self, "_run", run)
        for path in [path for name in _MODELS for path in self.folder.glob(name) if not self.resume]:
            _remove(path)
        for name in _LINKED:
            self._link(name, name)

    def _link(self, name: str, target: str) -> None:
        """Link ``name`` to a file or folder of the run."""
        path = self.folder / name
        _remove(path)
        path.symlink_to(os.path.relpath(self._run / target, self.folder.absolute()))

    # -- the recipe's job ---------------------------------------------------------------------------------------------

    def _job(self, launch: LaunchEnv) -> JobSpec:
        """Return the job, in a new folder below ``output_dir`` or in the last run's folder."""
        self._check_output()
        name, module = self.recipe.__name__.lower(), workloads.__name__
        values = {
            "recipe": f"{self.recipe.__module__}:{self.recipe.__name__}",
            "roles": {role: {"module": module, "class": f"{role.title()}Workload"} for role in self._roles()},
            "trainer": {"device_type": "CPU"},
            "checkpoint": {"resume": "latest" if self.resume else "never"},
            "overwrite": self.overwrite,
            "config": self._config(launch),
        }
        job = job_from_mapping(from_plain(values), name, search_folders())
        run_folders = self.folder.absolute() / RUNS / name
        last_run = (run_folders / LATEST).resolve()
        if (self.resume or self.overwrite) and last_run.is_dir():
            return replace(job, job_dir=last_run)
        run = new_run()
        return replace(job, run=run, job_dir=run_folders / folder_name(run))

    def _config(self, launch: LaunchEnv) -> dict[str, Any]:
        """Return the recipe's configuration: the arguments of :data:`CONFIG_KEYS`, and computed keys."""
        computed = {
            "model": str(self.model),
            "optimizer": optimizer_keys(self),
            "engine": {"rollout": "torch", **(self.engine or {})},
            "keep.keep_last": None,
            **self._recipe_config(launch),
        }
        if self.enable_wandb:
            computed["log.wandb"] = {"project": self.wandb_project, "name": self.wandb_run_name}
        values = {key: getattr(self, name, None) for name, keys in CONFIG_KEYS.items() for key in keys}
        config: dict[str, Any] = {}
        for key, value in ({key: value for key, value in values.items() if value is not None} | computed).items():
            *parents, last = key.split(".")
            section = config
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        return config

    def _recipe_config(self, launch: LaunchEnv) -> dict[str, Any]:
        """Write the data, and return the values of the recipe's further keys."""
        raise NotImplementedError

    def _roles(self) -> Sequence[str]:
        """Return the roles besides the recipe's own."""
        return ()

    def _reward(self, splits: Mapping[str, Sequence[LoadedSample]], empty: float | None = None) -> dict[str, Any]:
        return {"function": write_rewards(self.folder / "data", splits, empty), "timeout_s": self.reward_timeout_s}

    def _test_dataset(self, dataset: SampleDataset | None) -> SampleDataset:
        samples = self.eval_dataset if dataset is None else dataset
        if samples is None:
            raise ValueError("test() needs a dataset, since there is no eval_dataset")
        return samples

    def _evaluate(self, model: str | Path, samples: SampleDataset, **options: Any) -> dict[str, Any]:
        names = ("generation_args", "seed", "max_new_tokens", "batch_size", "reward_timeout_s")
        shared = {name: getattr(self, name) for name in names}
        evaluator = Evaluator(model, samples, self.folder / "evaluation", **shared, **options)
        try:
            return evaluator.evaluate()
        finally:
            evaluator.close()


# -- PyTorch's optimizers and schedules as the recipe's keys -----------------------------------------------------------

_OPTIMIZERS = {torch.optim.AdamW: "adamw", torch.optim.SGD: "sgd"}
_SUPPORTED = {"lr", "betas", "weight_decay", "momentum"}
_SPEED_ONLY = {"foreach", "fused", "capturable", "differentiable"}
_SCHEDULES = "ConstantLR without an end, LinearLR that falls, CosineAnnealingLR"


def optimizer_keys(trainer: ClassicTrainer) -> dict[str, Any]:
    """Return the recipe's ``optimizer`` for PyTorch's classes and arguments; raises ValueError if there is none."""
    optimizer = trainer.optimizer
    arguments = {"lr": 1e-5} if trainer.optimizer_args is None else trainer.optimizer_args
    if optimizer not in _OPTIMIZERS:
        supported = ", ".join(kind.__name__ for kind in _OPTIMIZERS)
        name = getattr(optimizer, "__name__", optimizer)
        raise ValueError(f"optimizer {name} is not supported; supported: {supported}")
    signature = inspect.signature(optimizer).parameters
    defaults = {name: parameter.default for name, parameter in signature.items() if name != "params"}
    for name, value in arguments.items():
        if name not in defaults:
            raise ValueError(f"optimizer_args: {optimizer.__name__} has no '{name}'{hint(name, defaults)}")
        if name not in _SUPPORTED | _SPEED_ONLY and value != defaults[name]:
            raise ValueError(f"optimizer_args: {name} can only be {defaults[name]}, not {value!r}")
    values = {name: value for name, value in {**defaults, **arguments}.items() if name in _SUPPORTED}
    values |= _schedule_keys(trainer.lr_scheduler, trainer.lr_scheduler_args, values["lr"])
    values |= {"name": _OPTIMIZERS[optimizer], "max_grad_norm": trainer.max_grad_norm}
    config, errors = parse(OptimizerConfig, values, "optimizer_args")
    if config is None:
        raise ValueError("; ".join(map(str, errors)))
    return asdict(config)


def _schedule_keys(scheduler: Any, arguments: Mapping[str, Any] | None, lr: Any) -> dict[str, Any]:
    """Translate a scheduler's class with its arguments, or a scheduler with its attributes."""
    if arguments and not isinstance(scheduler, type):
        raise ValueError("lr_scheduler_args need an lr_scheduler that is a class")
    if scheduler is None:
        return {}
    kind = scheduler if isinstance(scheduler, type) else type(scheduler)
    names = set(inspect.signature(kind).parameters) - {"optimizer", "last_epoch"}
    settings = dict(arguments or {}) if kind is scheduler else vars(scheduler)
    options = {name: value for name, value in settings.items() if name in names or kind is scheduler}
    if kind is schedulers.CosineAnnealingLR and "T_max" in options:
        return {"schedule": "cosine", "decay_steps": options["T_max"], "min_lr": options.get("eta_min", 0.0)}
    if kind is schedulers.LinearLR and options.get("start_factor", 1.0 / 3) == 1.0:
        end = options.get("end_factor", 1.0)
        return {"schedule": "linear", "decay_steps": options.get("total_iters", 5), "min_lr": lr * end}
    if kind is schedulers.ConstantLR and options.get("factor", 1.0 / 3) == 1.0:
        return {}
    raise ValueError(f"lr_scheduler {kind.__name__} with {options} is not supported; supported: {_SCHEDULES}; or None")
