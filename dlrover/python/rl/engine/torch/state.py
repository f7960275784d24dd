"""One rank's part of a model and its optimizer as a tree of plain values and tensors."""

from collections.abc import Mapping
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.weights import misfits


@torch.no_grad()
def restore(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copy a rank's state into its live tensors.

    Both have ``layout``, ``model`` (tensors by name) and ``optimizer`` (None of a frozen engine; else by name the
    tensors of each kind).

    Args:
        own: the live tensors.
        state: what such a tree was before.

    Raises:
        WeightSyncError: the state is of another model; nothing was changed.
        EngineError: it is of another layout, exactly one of the two has an optimizer, or its tensors were an engine's
            live ones, and have been released with it; nothing was changed.
    """
    moments, own_moments = state["optimizer"], own["optimizer"]
    if (moments is None) != (own_moments is None):
        raise EngineError("the state of a trained engine does not fit a frozen one, nor the other way round")
    if state["layout"] != own["layout"]:
        raise EngineError(
            f"the state is of layout {state['layout']}, not {own['layout']}: a checkpoint can be read in both"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in own["model"].items()}
    faults = misfits(shapes, {name: tuple(tensor.shape) for name, tensor in state["model"].items()})
    faults += [f"the optimizer's '{name}' is unknown" for name in moments or {} if name not in own_moments]
    faults += [f"the optimizer's '{name}' is missing" for name in own_moments or {} if name not in moments]
    if not faults and moments and any(moments[name].keys() != kept.keys() for name, kept in own_moments.items()):
        faults = ["its optimizer is another one"]
    if faults:
        raise WeightSyncError("the state is of another model: " + "; ".join(faults))
    if any(map(_emptied, state["model"].values())):
        raise EngineError("the state's tensors were released with their engine: take a copy before meta()")
    for name, tensor in own["model"].items():
        tensor.copy_(state["model"][name])
    for name, kept in (own_moments or {}).items():
        for kind, tensor in kept.items():
            tensor.copy_(moments[name][kind])


def _emptied(tensor: Any) -> bool:
    return bool(tensor.numel()) and tensor.untyped_storage().nbytes() == 0
