"""A model's weights read a tensor at a time, each divided between the ranks before the next one is read."""

from collections.abc import Callable
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.torch.blueprint import Blueprint
from dlrover.python.rl.engine.torch.sources import place_names


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
    values = _values(module, blueprint, list(names.values()), list(buffers)) if loaded else None
    for first, *others in names.values():
        old = named[first]
        value = torch.zeros(old.shape) if values is None else values(first)
        new = torch.nn.Parameter(value.to(device, torch.float32, copy=True), requires_grad=old.requires_grad)
        for name in (first, *others):
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_parameter(last, new)
        divide(new)
    if values is not None:
        for name, buffer in buffers.items():
            buffer.copy_(values(name))
    module.to(device)  # the buffers: the parameters are there


def _values(module: Any, blueprint: Blueprint, names: list[list[str]], buffers: list[str]) -> Callable[[str], Any]:
    """Gives the whole tensor of a parameter or saved buffer by its first name."""
    wanted = {first: (first, *others) for first, *others in names} | {name: (name,) for name in buffers}
    source = blueprint.source_of(wanted, module.base_model_prefix)
    there = source.shapes()
    found = place_names(wanted, there, module.base_model_prefix)
    shapes = {first: tuple(module.get_parameter(first).shape) for first, *_ in names}
    shapes |= {name: tuple(module.get_buffer(name).shape) for name in buffers}
    faults = [name for name in shapes if name not in found and blueprint.absent(name, shapes[name]) is None]
    faults += [
        f"{name} of shape {shapes[name]} (it has {tuple(there[at])})"
        for name, at in found.items()
        if tuple(there[at]) != shapes[name]
    ]
    if faults:
        raise EngineError(f"the checkpoint lacks {', '.join(sorted(faults))}")

    def value(name: str) -> Any:
        if name not in found:
            return blueprint.absent(name, shapes[name])
        return source.read(found[name], (slice(None),) * len(shapes[name]))

    return value
