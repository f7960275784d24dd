# SPDX-License-Identifier: Apache-2.0
"""From constructor arguments to a recipe's configuration."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import torch
from annotated_types import Ge, Gt
from torch.optim import lr_scheduler as schedulers

from dlrover.python.rl.common.names import hint
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.engine.api.base import OptimizerConfig, SamplingParams

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]
PositiveNumber = Annotated[float, Gt(0)]
NonNegativeNumber = Annotated[float, Ge(0)]

T = TypeVar("T")

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


_TRL_ARGUMENTS = {"args", "reward_funcs", "processing_class", "peft_config", "callbacks", "data_collator"}
"""Arguments that TRL's trainers have and RLFusion's have not."""


def names_arguments(kind: type[T]) -> type[T]:
    """Class decorator: the constructor's error for an unknown argument names the nearest one."""
    original: Callable[..., None] = vars(kind)["__init__"]
    names = [name for name in inspect.signature(original).parameters if name != "self"]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = [f"'{name}'{hint(name, names)}" for name in kwargs if name not in names]
        if unknown:
            own_name = kind.__name__.removeprefix("Classic")
            if foreign := sorted(_TRL_ARGUMENTS & set(kwargs)):
                functions = "dlrover.rl.train_grpo, train_sft and the others, which read TRL's names"
                raise TypeError(f"{own_name} is RLFusion's class and has no {', '.join(foreign)}: call {functions}")
            raise TypeError(f"{own_name} has no argument {', '.join(unknown)}")
        original(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


_GENERATION_KEYS = {"top_k": "top_k", "top_p": "top_p", "stop": "stop", "stop_strings": "stop"}


def sampling_params(
    max_new_tokens: int, temperature: float, generation_args: Mapping[str, Any] | None
) -> SamplingParams:
    """Sampling parameters; ``generation_args`` may hold ``top_k``, ``top_p`` and ``stop`` (or ``stop_strings``).

    Raises:
        ValueError: it holds something else; gives the nearest.
    """
    options: dict[str, Any] = {}
    for name, value in (generation_args or {}).items():
        if name not in _GENERATION_KEYS:
            raise ValueError(f"generation_args has no '{name}'{hint(name, _GENERATION_KEYS)}")
        options[_GENERATION_KEYS[name]] = (value,) if isinstance(value, str) else value
    if "stop" in options:
        options["stop"] = tuple(options["stop"])
    return SamplingParams(max_new_tokens, temperature, **options)


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
