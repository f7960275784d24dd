# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a model and its optimizer, out of the states of ranks that divided it otherwise.

A state has ``model`` and ``optimizer`` as for ``restore_state``, and ``places``: of each divided parameter the shape of
the whole, and where the rank's part starts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.api.weights import describe_shape_mismatches


def place(shape: Sequence[int], ranges: Sequence[slice]) -> dict[str, list[int]]:
    return {"shape": list(shape), "start": [part.start for part in ranges]}


@torch.no_grad()
def merge_states(own: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> None:
    """Copy what ``own``, the live tensors of this rank, covers of the ``states`` of all ranks of another layout.

    Raises:
        WeightSyncError: a state is of another model, or lacks what says where its parts belong.
        EngineError: a part is in no state, or one of the two is frozen.
    """
    copied = dict.fromkeys(own["model"], 0)
    counts = [
        (name, kind, tensor)
        for name, part in own["model"].items()
        for kind, tensor in _moments(own, name).items()
        if tensor.ndim == 0 < part.ndim  # the number of steps
    ]
    seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in copied}
    for state in states:
        _check(own, state)
        for name, kind, tensor in counts:
            tensor.copy_(_moments(state, name)[kind])
        for name in copied:
            start = _start(state, name)
            if start not in seen[name]:  # copies of the model have the same parts
                seen[name].add(start)
                copied[name] += _copy(own, state, name)
    missing = [name for name, tensor in own["model"].items() if copied[name] != tensor.numel()]
    if missing:
        raise EngineError(f"the states of the other ranks lack a part of {', '.join(missing[:8])}")


def _check(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    moments, own_moments = state["optimizer"] or {}, own["optimizer"] or {}
    if (state["optimizer"] is None) != (own["optimizer"] is None):
        raise EngineError("the state of a trained engine does not fit a frozen one, nor the reverse")
    faults = describe_shape_mismatches(_shapes(own), _shapes(state))
    if not faults and {name: set(kinds) for name, kinds in moments.items()} != {
        name: set(kinds) for name, kinds in own_moments.items()
    }:
        faults = ["its optimizer is of another kind"]
    if faults:
        raise WeightSyncError("the state is of another model: " + "; ".join(faults))


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the whole parameters."""
    places = state["places"]
    return {
        name: tuple(places[name]["shape"] if name in places else tensor.shape)
        for name, tensor in state["model"].items()
    }


def _moments(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    moments: Mapping[str, Any] = (state["optimizer"] or {}).get(name, {})
    return moments


def _start(state: Mapping[str, Any], name: str) -> tuple[int, ...]:
    where = state["places"].get(name)
    return tuple(where["start"]) if where is not None else (0,) * state["model"][name].dim()


def _copy(own: Mapping[str, Any], state: Mapping[str, Any], name: str) -> int:
    """Copy where the two parts overlap; returns the number of elements."""
    part, other = own["model"][name], state["model"][name]
    own_slices, other_slices = [], []
    for own_start, own_size, start, size in zip(
        _start(own, name), part.shape, _start(state, name), other.shape, strict=True
    ):
        low, high = max(own_start, start), min(own_start + own_size, start + size)
        if low >= high:
            return 0
        own_slices.append(slice(low - own_start, high - own_start))
        other_slices.append(slice(low - start, high - start))
    target, source = tuple(own_slices), tuple(other_slices)
    part[target].copy_(other[source])
    for kind, tensor in _moments(own, name).items():
        if tensor.ndim or not part.ndim:
            # The scales of numbers in 8 bits are of whole rows.
            dimensions = part.ndim if tensor.shape == part.shape else 1
            tensor[target[:dimensions]].copy_(_moments(state, name)[kind][source[:dimensions]])
    return int(part[target].numel())
