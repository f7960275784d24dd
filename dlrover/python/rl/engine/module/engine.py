# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a user's module: materialised, called, offloaded, published."""

import gc
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.engine.api.base import Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.weights import (
    DeviceKind,
    Part,
    WeightSnapshot,
    WeightStamp,
    take_snapshot,
    verify_snapshot,
)
from dlrover.python.rl.engine.fsdp2.materialize import MaterializedModule, MaterializeOptions, materialize
from dlrover.python.rl.engine.fsdp2.shards import Grid, ParameterShard, to_local_tensor
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory, Kind
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.loading import TensorSource, WeightReader, list_saved_tensors
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.train_module import CallShare
from dlrover.python.rl.engine.module.files import find_weight_source, write_module
from dlrover.python.rl.engine.module.parallel import Gradients, SharedSequences, compute_gradient_weight


class ModuleEngine:
    """Runs a :class:`TrainModule`. All ranks call every method together.

    ``label`` is the engine's name in messages, ``payload`` the module without weights, by cloudpickle.

    Raises:
        EngineError: the module cannot be divided so, or its weights are not where it says.
    """

    def __init__(
        self,
        label: str,
        payload: bytes,
        settings: TrainSettings,
        rendezvous: Rendezvous,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.version, self.training = 0, True
        self._label, self._payload, self._settings = label, payload, settings
        self._memory = memory or DeviceMemory(settings.device)
        self._made: MaterializedModule | None = None
        self._gradients: Any = None  # as long as there are weights
        self._parked: ParkedTensors | None = None
        self._expects_weights = False
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._sequences: SharedSequences | None = None
        self._ranks = Ranks.connect(rendezvous, settings.device)
        # Of any optimizer, whenever the module makes it.
        self._hook = register_optimizer_step_post_hook(self._count_step)
        try:
            self._grid = Grid.of(self._ranks, settings.parallel, settings.device)
            self._materialize(None)
        except BaseException:
            self.close()
            raise

    def _materialize(self, source: WeightReader | None) -> None:
        module = cloudpickle.loads(self._payload)
        if self._grid.context is not None:
            self._sequences = SharedSequences(module, self._grid)
        source = source or find_weight_source(module)
        self._made = made = materialize(module, source, self._grid, self._make_options(module))
        self._gradients = Gradients(module, made.shards)
        if made.vocabulary is not None:
            group = self._grid.tensors.get_group()
            head = module.get_output_embeddings()
            head.register_forward_hook(lambda _module, _args, logits: _Whole.apply(logits, group))
        self._account()
        module.train(self.training)
        module.on_weights_materialized()
        self._account()

    def _make_options(self, module: Any) -> MaterializeOptions:
        # A user's optimizer needs float32 parameters. Without FSDP's casts, autocast computes in less.
        low = self._settings.precision == "bf16" and self._grid.shards is not None
        return MaterializeOptions(
            device=self._settings.device,
            precision=torch.bfloat16 if low else torch.float32,
            rename=module.source_name,
            absent=module.initial_weight,
        )

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, method: str, share: CallShare, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the module. Raises an ``EngineError`` if the weights are not on the device."""
        made = self._ready(method)
        layout, shared = self._grid.layout, self._sequences
        self._gradients.weight = compute_gradient_weight(
            made.module.gradients, share, layout.data_parallel_size, layout.context
        )
        low = self._settings.precision == "bf16" and self._grid.shards is None
        kind = torch.device(self._settings.device).type
        try:
            with (
                torch.autocast(kind, torch.bfloat16, enabled=low),
                nullcontext() if shared is None else shared.divided(share.sequences),
            ):
                result = getattr(made.module, method)(*args, **kwargs)
        finally:
            self._gradients.forget()
        self._account()
        return result

    def _ready(self, caller: str) -> MaterializedModule:
        if self._made is None:
            raise EngineError(f"{self._label} has released its weights: call cuda() and sync weights before {caller}")
        if self._parked is not None:
            raise EngineError(f"{self._label} is in host memory: call cuda() before {caller}")
        return self._made

    def _count_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        mine = {id(shard.parameter) for shard in self._made.shards} if self._made is not None else set()
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            self._optimizers.add(optimizer)
            self.version += 1

    def train(self, mode: bool) -> None:
        """Training or evaluation mode, now and after the weights are materialised again."""
        self.training = mode
        if self._made is not None:
            self._made.module.train(mode)

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        """Name and whole tensor of all that the module exports, cast to ``dtype`` if there is one. A collective.

        Raises:
            EngineError: the weights are released, or two are exported under one name.
        """
        if self._made is None:
            raise EngineError(f"{self._label} has released its weights: there is nothing to export")
        module, shards = self._made.module, {shard.name: shard for shard in self._made.shards}
        exported_names: set[str] = set()

        def whole(name: str) -> Any:
            if name not in shards:
                raise EngineError(f"the module has no parameter '{name}'{hint(name, shards)}")
            return self._whole(shards[name])

        for name, tensor in self._own_weights(self._made):
            exported = module.export_weight(name, tensor, whole)
            if exported is None:
                continue
            if exported[0] in exported_names:
                raise EngineError(f"two parameters are exported as '{exported[0]}'; '{name}' is one of them")
            exported_names.add(exported[0])
            yield exported[0], exported[1].to(dtype)

    def _own_weights(self, made: MaterializedModule) -> Iterator[tuple[str, Any]]:
        for shard in made.shards:
            yield shard.name, self._whole(shard)
        yield from ((name, self._locate(buffer)) for name, buffer in made.buffers.items())

    @torch.no_grad()
    def _whole(self, shard: ParameterShard) -> Any:
        return shard.whole(self._locate(shard.master).to(self._settings.device), self._grid)

    def _locate(self, tensor: Any) -> Any:
        return tensor.detach() if self._parked is None else self._parked.locate(tensor)

    def publish(self) -> WeightSnapshot | None:
        """The exported weights in host memory; None on all ranks but the first. A collective."""
        if self._ranks.rank == 0:
            return take_snapshot(self.named_weights(), self.version)
        deque(self.named_weights(), maxlen=0)
        return None

    def receive(self, weights: WeightSnapshot) -> WeightStamp:
        """Adopt another engine's weights; each rank reads its part.

        Raises:
            WeightSyncError: a name, shape or byte differs; nothing was changed.
            EngineError: the module trains, so its weights change by its own steps only; or it is not on the device.
        """
        if self._made is None and self._expects_weights:
            verify_snapshot(weights, self._expected(cloudpickle.loads(self._payload)), serving=-1)
            self._materialize(TensorSource({name: partial(weights.tensor, name) for name in weights.buffers}))
        else:
            made = self._ready("a weight sync")
            if self._find_optimizers(made.module):
                raise EngineError(f"{self._label} has an optimizer: its weights change by its own steps only")
            verify_snapshot(weights, self._expected(made.module), serving=-1)
            self._write(made, weights)
        self.version = weights.version
        return weights.stamp

    @torch.no_grad()
    def _write(self, made: MaterializedModule, weights: WeightSnapshot) -> None:
        names = made.module.source_name
        for shard in made.shards:
            if (name := names(shard.name)) in weights.buffers:
                shard.master.copy_(weights.tensor(name)[shard.ranges(self._grid)])
                shard.refresh()
        for own, buffer in made.buffers.items():
            buffer.copy_(weights.tensor(names(own)))

    def _expected(self, module: Any) -> dict[str, tuple[int, ...]]:
        tensors = list_saved_tensors(module)
        return {
            module.source_name(name): tuple(tensor.shape)
            for name, tensor in tensors.items()
            if module.initial_weight(name, tuple(tensor.shape)) is None
        }

    def save(self, path: Path) -> None:
        """Write what the module exports, atomically. A collective; rank 0 writes."""
        is_writer = self._ranks.rank == 0
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.named_weights() if is_writer}
        if is_writer and self._made is not None:
            write_module(path, self._made.module, tensors)

    # -- places -------------------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        """Move parameters, gradients, optimizer states and buffers to host memory."""
        if self._parked is not None:
            return
        made = self._ready("cpu()")
        parked = ParkedTensors(self._label, self._memory)
        for kind, tensors in self._tensors(made).items():
            parked.hold(kind, tensors)
        parked.to_host()
        self._parked = parked

    def cuda(self, part: Part = "all") -> None:
        """Bring them back; released ones come with the next weights."""
        if part == "kv_cache":
            raise EngineError(f"{self._label} trains: it has no key-value cache")
        self._expects_weights = self._made is None
        if self._parked is not None:
            self._parked.to_device()
            self._parked = None

    def meta(self) -> None:
        """Release the module with everything that it made."""
        self._made, self._parked, self._expects_weights, self._sequences = None, None, False, None
        self._gradients = None
        gc.collect()  # A module and its hooks refer to each other.
        self._memory.release_cache()

    def place(self) -> DeviceKind:
        if self._made is None:
            return "meta"
        return "cuda" if self._parked is None else "cpu"

    def footprint(self) -> dict[str, int]:
        return self._memory.bytes_of(self._label)

    def close(self) -> None:
        self._hook.remove()
        self.meta()
        self._ranks.close()

    def _account(self) -> None:
        if self._made is not None:
            for kind, tensors in self._tensors(self._made).items():
                self._memory.hold(self._label, kind, tensors)

    def _tensors(self, made: MaterializedModule) -> dict[Kind, list[Any]]:
        parameters = [shard.parameter for shard in made.shards]
        states = [
            value
            for optimizer in self._find_optimizers(made.module)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim  # AdamW counts its steps on the host.
        ]
        return {
            "weights": [to_local_tensor(tensor) for tensor in [*parameters, *made.module.buffers()]],
            "gradients": [to_local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None],
            "optimizer": [to_local_tensor(state) for state in states],
        }

    def _find_optimizers(self, module: Any) -> set[Any]:
        attributes = [
            item for value in vars(module).values() for item in (value if isinstance(value, list | tuple) else [value])
        ]
        return {item for item in attributes if isinstance(item, torch.optim.Optimizer)} | set(self._optimizers)


class _Whole(torch.autograd.Function):
    """Joins the last dimension, which ranks divide. All ranks compute the same with it, so its gradient is the same."""

    @staticmethod
    def forward(ctx: Any, part: Any, group: Any) -> Any:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        ctx.rank, ctx.size = dist.get_rank(group), part.shape[-1]
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return gradient.narrow(-1, ctx.rank * ctx.size, ctx.size).contiguous(), None
