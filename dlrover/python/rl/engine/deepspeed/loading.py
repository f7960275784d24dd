"""A model's weights read a tensor at a time, each divided between the ranks before the next one is read."""

from collections.abc import Callable
from typing import Any

import torch

from dlrover.python.rl.engine.torch.blueprint import Blueprint


def fill(module: Any, blueprint: Blueprint, device: str, loaded: bool, divide: Callable[[Any], None]) -> None:
    """Replace a module's parameters, which are on the meta device, by real ones in float32.

    Args:
        module: built by ``blueprint``; changed in place, ties kept.
        blueprint: has the weights.
        device: where they go.
        loaded: whether they are read; else they are zeros.
        divide: called with each parameter as soon as it has its values.

    Raises:
        EngineError: the source lacks tensors, or has them in other shapes.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in named.items():
        names.setdefault(id(parameter), []).append(name)
    saved = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    read = _reader(module, blueprint, list(names.values()), list(buffers)) if loaded else None
    for first, *others in names.values():
        old = named[first]
        value = torch.zeros(old.shape) if read is None else read(first)
        new = torch.nn.Parameter(value.to(device, torch.float32, copy=True), requires_grad=old.requires_grad)
        for name in (first, *others):
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_parameter(last, new)
        divide(new)
    if read is not None:
        for name, buffer in buffers.items():
            buffer.copy_(read(name))
    module.to(device)  # the buffers: the parameters are there


def _reader(module: Any, blueprint: Blueprint, names: list[list[str]], buffers: list[str]) -> Callable[[str], Any]:
    wanted = {first: (first, *others) for first, *others in names} | {name: (name,) for name in buffers}
    shapes = {first: tuple(module.get_parameter(first).shape) for first, *_ in names}
    shapes |= {name: tuple(module.get_buffer(name).shape) for name in buffers}
    return blueprint.reader(wanted, shapes, module.base_model_prefix)
