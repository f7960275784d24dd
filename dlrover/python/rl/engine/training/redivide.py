# SPDX-License-Identifier: Apache-2.0
"""States of a rank's part of a model and its optimizer, restored in the same layout or merged for another one.

A state has ``layout``, ``model`` (tensors by name) and ``optimizer`` (None if frozen; else the tensors of each kind, by
name). A state for other layouts has ``places``: for each divided parameter the shape of the whole, and the start of the
rank's part.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError, OtherLayout, WeightSyncError
from dlrover.python.rl.engine.api.weights import describe_shape_mismatches


@torch.no_grad()
def restore_state(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copy a rank's state into ``own``, its live tensors. After an error nothing has changed.

    Raises:
        WeightSyncError: the state is of another model.
        OtherLayout: its ranks have divided the model otherwise.
        EngineError: only one of the two is frozen, or the state has been released.
    """
    _check_trained(own, state)
    if state["layout"] != own["layout"]:
        raise OtherLayout(f"the state is of layout {state['layout']}, not {own['layout']}: use a checkpoint instead")
    _check(own, state, {}, {})
    if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in state["model"].values()):
        raise EngineError("the state's tensors were released with their engine: copy them before meta()")
    for name, tensor in own["model"].items():
        tensor.copy_(state["model"][name])
    for name, kinds in (own["optimizer"] or {}).items():
        for kind, tensor in kinds.items():
            tensor.copy_(state["optimizer"][name][kind])


def place(shape: Sequence[int], ranges: Sequence[slice]) -> dict[str, list[int]]:
    return {"shape": list(shape), "start": [part.start for part in ranges]}


@torch.no_grad()
def merge_states(own: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> None:
    """Copy this rank's part out of the ``states`` of all ranks of another layout into ``own``, its live tensors.
    Raises WeightSyncError if a state is of another model, and an ``EngineError`` if a part is in no state, or only one
    of the two is frozen."""
    copied = dict.fromkeys(own["model"], 0)
    moments = own["optimizer"] or {}
    counts = [
        (name, kind, tensor)
        for name, kinds in moments.items()
        for kind, tensor in kinds.items()
        if tensor.ndim == 0 < own["model"][name].ndim  # the number of steps
    ]
    seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in copied}
    for state in states:
        _check(own, state, own["places"], state["places"])
        for name, kind, tensor in counts:
            tensor.copy_(state["optimizer"][name][kind])
        for name in copied:
            start = _find_start(state, name)
            if start not in seen[name]:  # copies of the model have the same parts
                seen[name].add(start)
                copied[name] += _copy(own, state, name)
    missing = [name for name, tensor in own["model"].items() if copied[name] != tensor.numel()]
    if missing:
        raise EngineError(f"the states of the other ranks lack a part of {', '.join(missing[:8])}")


def _check_trained(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    if (state["optimizer"] is None) != (own["optimizer"] is None):
        raise EngineError("a trained engine's state does not fit a frozen engine, nor the reverse")


def _check(
    own: Mapping[str, Any], state: Mapping[str, Any], own_places: Mapping[str, Any], places: Mapping[str, Any]
) -> None:
    """Raise an error unless the whole parameters have equal names and shapes, and the moments equal names and kinds."""
    _check_trained(own, state)
    expected, actual = (
        {name: tuple(at[name]["shape"] if name in at else tensor.shape) for name, tensor in model.items()}
        for model, at in ((own["model"], own_places), (state["model"], places))
    )
    moments, own_moments = state["optimizer"] or {}, own["optimizer"] or {}
    faults = describe_shape_mismatches(expected, actual)
    faults += [f"the optimizer's '{name}' is unknown" for name in moments if name not in own_moments]
    faults += [f"the optimizer's '{name}' is missing" for name in own_moments if name not in moments]
    if not faults and any(moments[name].keys() != kinds.keys() for name, kinds in own_moments.items()):
        faults = ["it has another optimizer"]
    if faults:
        raise WeightSyncError("the state is of another model: " + "; ".join(faults))


def _find_start(state: Mapping[str, Any], name: str) -> tuple[int, ...]:
    where = state["places"].get(name)
    return tuple(where["start"]) if where is not None else (0,) * state["model"][name].dim()


def _copy(own: Mapping[str, Any], state: Mapping[str, Any], name: str) -> int:
    """Copy the overlap of the two parts; returns the number of elements."""
    part, other = own["model"][name], state["model"][name]
    own_slices, other_slices = [], []
    for own_start, own_size, start, size in zip(
        _find_start(own, name), part.shape, _find_start(state, name), other.shape, strict=True
    ):
        low, high = max(own_start, start), min(own_start + own_size, start + size)
        if low >= high:
            return 0
        own_slices.append(slice(low - own_start, high - own_start))
        other_slices.append(slice(low - start, high - start))
    target, source = tuple(own_slices), tuple(other_slices)
    part[target].copy_(other[source])
    for kind, tensor in (own["optimizer"] or {}).get(name, {}).items():
        if tensor.ndim or not part.ndim:
            # The scales of numbers in 8 bits are of whole rows.
            dimensions = part.ndim if tensor.shape == part.shape else 1
            tensor[target[:dimensions]].copy_(state["optimizer"][name][kind][source[:dimensions]])
    return int(part[target].numel())
