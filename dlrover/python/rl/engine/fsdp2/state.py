"""One rank's part of a model and its optimizer as a tree of plain values and tensors."""

from collections.abc import Mapping
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.fsdp2.model import TrainedModel
from dlrover.python.rl.engine.weights import misfits


def local_state(model: TrainedModel, version: int) -> dict[str, Any]:
    """What :func:`restore_local_state` goes back to; the tensors are the live ones."""
    moments = None
    if model.optimizer is not None:
        moments = {
            shard.name: {kind: model.residence.there(tensor) for kind, tensor in state.items()}
            for shard, state in model.optimizer.state()
        }
    return {
        "version": version,
        "layout": list(model.shards.grid.layout.shape),
        "model": {name: model.residence.there(tensor) for name, tensor in _weights(model).items()},
        "optimizer": moments,
    }


@torch.no_grad()
def restore_local_state(model: TrainedModel, state: Mapping[str, Any]) -> None:
    """Copy a state into a model.

    Raises:
        WeightSyncError: the state is of another model; nothing was changed.
        EngineError: it is of another layout, or exactly one of the two has an optimizer; nothing was changed.
    """
    moments, layout = state["optimizer"], list(model.shards.grid.layout.shape)
    if (moments is None) != (model.optimizer is None):
        raise EngineError("the state of a trained engine does not fit a frozen one, nor the other way round")
    if state["layout"] != layout:
        raise EngineError(f"the state is of layout {state['layout']}, not {layout}: a checkpoint can be read in both")
    own = _weights(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    faults = misfits(shapes, {name: tuple(tensor.shape) for name, tensor in state["model"].items()})
    own_moments = {shard.name: kept for shard, kept in model.optimizer.state()} if model.optimizer else {}
    faults += [f"the optimizer's '{name}' is unknown" for name in moments or {} if name not in own_moments]
    faults += [f"the optimizer's '{name}' is missing" for name in own_moments if name not in moments]
    if faults:
        raise WeightSyncError("the state is of another model: " + "; ".join(faults))
    for name, tensor in own.items():
        model.residence.there(tensor).copy_(state["model"][name])
    for name, kept in own_moments.items():
        for kind, tensor in kept.items():
            model.residence.there(tensor).copy_(moments[name][kind])
    if model.residence.on_device:
        for shard in model.shards:
            shard.refresh()


def _weights(model: TrainedModel) -> dict[str, Any]:
    """Masters and buffers by name; of a model with adapters, the adapters: nothing else of it changes."""
    if model.has_adapters:
        return {shard.name: shard.master for shard in model.shards.trained}
    return {shard.name: shard.master for shard in model.shards} | dict(model.buffers)
