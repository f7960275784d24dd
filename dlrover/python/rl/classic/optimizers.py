"""Optimizers and schedules of PyTorch as a recipe knows them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler as schedulers

from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.engine.base import OptimizerConfig

_ARGUMENTS: dict[Any, tuple[str, set[str], dict[str, Any]]] = {
    torch.optim.AdamW: ("adamw", {"lr", "betas", "weight_decay"}, {"eps": 1e-8, "amsgrad": False, "maximize": False}),
    torch.optim.SGD: (
        "sgd",
        {"lr", "momentum", "weight_decay"},
        {"dampening": 0, "nesterov": False, "maximize": False},
    ),
}
"""Of each class its name here, the arguments that are taken over, and those that can have one value."""

_WITHOUT_EFFECT = {"foreach", "fused", "capturable", "differentiable"}
"""How PyTorch computes the same."""

_USUAL: dict[Any, dict[str, Any]] = {torch.optim.AdamW: {"weight_decay": 0.01}, torch.optim.SGD: {}}
"""PyTorch's defaults where a recipe has others."""

_SCHEDULES = "ConstantLR without an end, LinearLR that falls, CosineAnnealingLR"


def optimizer_config(
    optimizer: Any,
    arguments: Mapping[str, Any],
    scheduler: Any = None,
    scheduler_args: Mapping[str, Any] | None = None,
    max_grad_norm: float | None = None,
) -> OptimizerConfig:
    """The configuration that stands for a class of ``torch.optim`` and one of ``torch.optim.lr_scheduler``.

    Raises:
        ValueError: there is none; says what there is.
    """
    if optimizer not in _ARGUMENTS:
        known = ", ".join(kind.__name__ for kind in _ARGUMENTS)
        raise ValueError(f"optimizer {_name(optimizer)} is not known; known: {known}")
    values = {**_USUAL[optimizer], "lr": 1e-3, **_taken(optimizer, arguments)}
    values |= _schedule(scheduler, scheduler_args, values["lr"])
    config, problems = parse(OptimizerConfig, {**values, "max_grad_norm": max_grad_norm}, "optimizer_args")
    if config is None:
        raise ValueError("; ".join(map(str, problems)))
    return config


def _taken(optimizer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    name, taken, fixed = _ARGUMENTS[optimizer]
    known = {*taken, *fixed, *_WITHOUT_EFFECT}
    for argument, value in arguments.items():
        if argument not in known:
            raise ValueError(f"optimizer_args: {optimizer.__name__} has no '{argument}'{hint(argument, known)}")
        if argument in fixed and value != fixed[argument]:
            raise ValueError(f"optimizer_args: {argument} can only be {fixed[argument]}, not {value!r}")
    return {"name": name, **{argument: value for argument, value in arguments.items() if argument in taken}}


def _schedule(scheduler: Any, arguments: Mapping[str, Any] | None, lr: Any) -> dict[str, Any]:
    if scheduler is None:
        if arguments:
            raise ValueError("lr_scheduler_args go with an lr_scheduler")
        return {}
    kind, given = settings_of(scheduler, arguments)
    if kind is schedulers.CosineAnnealingLR and "T_max" in given:
        return {"schedule": "cosine", "decay_steps": given["T_max"], "min_lr": given.get("eta_min", 0.0)}
    if kind is schedulers.LinearLR and given.get("start_factor", 1.0 / 3) == 1.0:
        end = given.get("end_factor", 1.0)
        return {"schedule": "linear", "decay_steps": given.get("total_iters", 5), "min_lr": lr * end}
    if kind is schedulers.ConstantLR and given.get("factor", 1.0 / 3) == 1.0:
        return {}
    raise ValueError(f"lr_scheduler {_name(kind)} with {given} is not known; known: {_SCHEDULES}; or None")


def settings_of(scheduler: Any, arguments: Mapping[str, Any] | None) -> tuple[type, dict[str, Any]]:
    """The class of a scheduler and its arguments, whether the class is given or a scheduler."""
    if isinstance(scheduler, type):
        return scheduler, dict(arguments or {})
    if arguments:
        raise ValueError("lr_scheduler_args go with a class: this lr_scheduler has its settings")
    names = [name for name in inspect.signature(type(scheduler)).parameters if name not in ("optimizer", "last_epoch")]
    return type(scheduler), {name: getattr(scheduler, name) for name in names if hasattr(scheduler, name)}


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or type(value).__name__
