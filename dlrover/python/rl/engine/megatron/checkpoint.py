"""The parameters of Megatron's GPT as a checkpoint has them: under Hugging Face's names, each rank its part, so that
any layout and any engine that keeps to those names can go on from it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dlrover.python.rl.engine.megatron.conversion import Form, join, padded_vocab, split
from dlrover.python.rl.engine.megatron.shape import TransformerShape
from dlrover.python.rl.engine.megatron.shards import MegatronShard, MegatronShards, Stage
from dlrover.python.rl.engine.torch.checkpoint import model_tensor, optimizer_tensor
from dlrover.python.rl.engine.torch.optimizer import MasterOptimizer

_DIVIDED: Mapping[Form, int] = {"vocab": 0, "columns": 1, "qkv": 0, "gate_up": 0}
"""The dimension of each of the tensors that the tensor-parallel ranks divide."""


class CheckpointTensors:
    """Copies of a rank's masters and moments in host memory, taken apart into Hugging Face's tensors.

    Attributes:
        tensors: by the checkpoint's name: to be written, or read into.
    """

    def __init__(
        self, shape: TransformerShape, stage: Stage, shards: MegatronShards, optimizer: MasterOptimizer[Any] | None
    ) -> None:
        self._shape, self._stage, self._local = shape, stage, _local_shape(shape, stage)
        self._shards, self._optimizer = shards, optimizer
        self._mesh = None
        if stage.layout.tensor > 1:
            self._mesh = DeviceMesh.from_group(stage.tensors, "cpu")
        self.tensors: dict[str, Any] = {}
        for shard in shards:
            self._take_apart(shard, shard.master.detach(), model_tensor)
        for shard, state in optimizer.state() if optimizer is not None else ():
            for kind in ("exp_avg", "exp_avg_sq"):
                self._take_apart(shard, state[kind], lambda name, kind=kind: optimizer_tensor(name, kind))
            for source in shard.parameter.sources:
                self.tensors[optimizer_tensor(source, "step")] = state["step"].to("cpu", copy=True)

    def _take_apart(self, shard: MegatronShard, tensor: Any, named: Any) -> None:
        item = shard.parameter
        for source, whole, part in zip(item.sources, item.shapes, join(item, [tensor], self._local), strict=True):
            self.tensors[named(source)] = self._divided(part.to("cpu", copy=True).contiguous(), whole, item.form)

    def _divided(self, part: Any, whole: tuple[int, ...], form: Form) -> Any:
        if self._mesh is None or form == "whole":
            return part
        return DTensor.from_local(
            part,
            self._mesh,
            [Shard(_DIVIDED[form])],
            run_check=False,
            shape=torch.Size(whole),
            stride=torch.empty(whole, device="meta").stride(),
        )

    def all_names(self) -> list[str]:
        """What the checkpoint holds of the whole model, other stages' parts too."""
        kinds = () if self._optimizer is None else ("step", "exp_avg", "exp_avg_sq")
        sources = list(self._shards.shapes())
        return [model_tensor(name) for name in sources] + [optimizer_tensor(name, k) for name in sources for k in kinds]

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy the tensors into the masters and moments that they were taken from."""
        for shard in self._shards:
            shard.master.copy_(self._together(shard, model_tensor))
            shard.refresh()
        for shard, state in self._optimizer.state() if self._optimizer is not None else ():
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind].copy_(self._together(shard, lambda name, kind=kind: optimizer_tensor(name, kind)))
            state["step"].copy_(self.tensors[optimizer_tensor(shard.parameter.sources[0], "step")])

    def _together(self, shard: MegatronShard, named: Any) -> Any:
        found = [self.tensors[named(source)] for source in shard.parameter.sources]
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in found]
        together = split(shard.parameter, parts, self._local, 0, 1)
        missing = len(shard.master) - len(together)  # rows that fill up the vocabulary
        return torch.cat([together, together.new_zeros(missing, *together.shape[1:])]) if missing else together


def _local_shape(shape: TransformerShape, stage: Stage) -> TransformerShape:
    """The model's numbers as one tensor-parallel rank sees them."""
    ranks = stage.layout.tensor
    rows = padded_vocab(shape.vocab, ranks) // ranks
    return dataclasses.replace(
        shape,
        heads=shape.heads // ranks,
        kv_heads=shape.kv_heads // ranks,
        intermediate=shape.intermediate // ranks,
        vocab=min(rows, shape.vocab - rows * stage.place.tensor),
    )
