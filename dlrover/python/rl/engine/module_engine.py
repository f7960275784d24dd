"""A rank's part of a user's module: made, called, moved, published."""

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
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.engine.backward import Gradients, weight_of
from dlrover.python.rl.engine.base import Rendezvous, TrainSettings
from dlrover.python.rl.engine.fsdp2.grid import Grid
from dlrover.python.rl.engine.fsdp2.materialize import Making, Materialized, materialize
from dlrover.python.rl.engine.fsdp2.shards import ParameterShard, plain
from dlrover.python.rl.engine.memory import DeviceMemory, Kind
from dlrover.python.rl.engine.module import Share
from dlrover.python.rl.engine.module_files import saved_tensors, source_of, write_module
from dlrover.python.rl.engine.module_sequences import SharedSequences
from dlrover.python.rl.engine.offload import Part, Place
from dlrover.python.rl.engine.torch.ranks import Ranks
from dlrover.python.rl.engine.torch.residence import Residence
from dlrover.python.rl.engine.torch.sources import Source, TensorSource
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp, take_snapshot, verify


class ModuleEngine:
    """Runs a :class:`~dlrover.python.rl.engine.module.TrainModule`. All ranks call every method together.

    Args:
        who: what messages call it.
        payload: the module without weights, by cloudpickle.
        settings: device, precision, and how the ranks divide the module.
        rendezvous: where they meet.
        memory: accounts for the device; one of its own if None.

    Attributes:
        version: steps that the module's optimizers have taken.
        training: whether the module is in training mode.

    Raises:
        EngineError: the module cannot be divided so, or its weights are not where it says.
    """

    def __init__(
        self,
        who: str,
        payload: bytes,
        settings: TrainSettings,
        rendezvous: Rendezvous,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.version, self.training = 0, True
        self._who, self._payload, self._settings = who, payload, settings
        self._memory = memory or DeviceMemory(settings.device)
        self._made: Materialized | None = None
        self._gradients: Any = None  # as long as there are weights
        self._away: Residence | None = None
        self._awaits_weights = False
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._sequences: SharedSequences | None = None
        self._ranks = Ranks.connect(rendezvous, settings.device)
        # Whatever optimizers the module makes, and whenever.
        self._hook = register_optimizer_step_post_hook(self._stepped)
        try:
            self._grid = Grid.of(self._ranks, settings.parallel, settings.device)
            self._materialize(None)
        except BaseException:
            self.close()
            raise

    def _materialize(self, source: Source | None) -> None:
        module = cloudpickle.loads(self._payload)
        if self._grid.context is not None:
            self._sequences = SharedSequences(module, self._grid)
        self._made = made = materialize(module, source or source_of(module), self._grid, self._making(module))
        self._gradients = Gradients(module, made.shards)
        if made.vocabulary is not None:
            _whole_logits(module, self._grid.tensors)
        self._account()
        module.train(self.training)
        module.on_weights_materialized()
        self._account()

    def _making(self, module: Any) -> Making:
        # A user's optimizer needs float32 parameters. Without FSDP's casts, autocast computes in less.
        low = self._settings.precision == "bf16" and self._grid.shards is not None
        return Making(
            device=self._settings.device,
            precision=torch.bfloat16 if low else torch.float32,
            rename=module.source_name,
            absent=module.initial_weight,
        )

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, method: str, share: Share, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the module.

        Args:
            method: its name.
            share: what this rank has of the arguments that are divided.
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            EngineError: the weights are not on the device.
        """
        made = self._ready(method)
        layout, shared = self._grid.layout, self._sequences
        self._gradients.weight = weight_of(made.module.gradients, share, layout.data_parallel_size, layout.context)
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

    def _ready(self, what: str) -> Materialized:
        if self._made is None:
            raise EngineError(f"{self._who} has released its weights: {what} needs cuda() and a weight sync before")
        if self._away is not None:
            raise EngineError(f"{self._who} is in host memory: {what} needs cuda() before")
        return self._made

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        mine = {id(shard.parameter) for shard in self._made.shards} if self._made is not None else set()
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            self._optimizers.add(optimizer)
            self.version += 1

    def train(self, mode: bool) -> None:
        """Training or evaluation mode, now and after the weights have come anew."""
        self.training = mode
        if self._made is not None:
            self._made.module.train(mode)

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Name and whole tensor of all that the module exports, one after the other. A collective.

        Raises:
            EngineError: the weights are released, or two are exported under one name.
        """
        if self._made is None:
            raise EngineError(f"{self._who} has released its weights: there is nothing to export")
        module, shards = self._made.module, {shard.name: shard for shard in self._made.shards}
        seen: set[str] = set()

        def whole(name: str) -> Any:
            if name not in shards:
                raise EngineError(f"the module has no parameter '{name}'{hint(name, shards)}")
            return self._whole(shards[name])

        for name, tensor in self._own_weights(self._made):
            exported = module.export_weight(name, tensor, whole)
            if exported is None:
                continue
            if exported[0] in seen:
                raise EngineError(f"two parameters are exported as '{exported[0]}'; '{name}' is one of them")
            seen.add(exported[0])
            yield exported

    def _own_weights(self, made: Materialized) -> Iterator[tuple[str, Any]]:
        for shard in made.shards:
            yield shard.name, self._whole(shard)
        yield from ((name, self._there(buffer)) for name, buffer in made.buffers.items())

    @torch.no_grad()
    def _whole(self, shard: ParameterShard) -> Any:
        local = self._there(shard.master)
        return shard.whole(local.to(self._settings.device), self._grid)

    def _there(self, tensor: Any) -> Any:
        return tensor.detach() if self._away is None else self._away.there(tensor)

    def publish(self) -> WeightSnapshot | None:
        """What the module exports, in host memory; None on all ranks but the first. A collective."""
        if self._ranks.rank == 0:
            return take_snapshot(self.named_weights(), self.version)
        deque(self.named_weights(), maxlen=0)
        return None

    def receive(self, weights: WeightSnapshot) -> WeightStamp:
        """Take over another engine's weights; each rank takes its part.

        Raises:
            WeightSyncError: a name, shape or byte is not what it should be; nothing was changed.
            EngineError: the module trains, so its weights change by its own steps only; or it is not on the device.
        """
        if self._made is None and self._awaits_weights:
            verify(weights, self._expected(cloudpickle.loads(self._payload)), serving=-1)
            self._materialize(TensorSource({name: partial(weights.tensor, name) for name in weights.buffers}))
        else:
            made = self._ready("a weight sync")
            if self._found_optimizers(made.module):
                raise EngineError(f"{self._who} has an optimizer: its weights change by its own steps only")
            verify(weights, self._expected(made.module), serving=-1)
            self._write(made, weights)
        self.version = weights.version
        return weights.stamp

    @torch.no_grad()
    def _write(self, made: Materialized, weights: WeightSnapshot) -> None:
        names = made.module.source_name
        for shard in made.shards:
            if (name := names(shard.name)) in weights.buffers:
                shard.master.copy_(weights.tensor(name)[shard.ranges(self._grid)])
                shard.refresh()
        for own, buffer in made.buffers.items():
            buffer.copy_(weights.tensor(names(own)))

    def _expected(self, module: Any) -> dict[str, tuple[int, ...]]:
        """Source name to shape of what has to come."""
        tensors = saved_tensors(module)
        return {
            module.source_name(name): tuple(tensor.shape)
            for name, tensor in tensors.items()
            if module.initial_weight(name, tuple(tensor.shape)) is None
        }

    def save(self, path: Path) -> None:
        """Write what the module exports, a Hugging Face model in its format, whole or not at all. A collective; rank 0
        writes."""
        keep = self._ranks.rank == 0
        tensors = {}
        for name, tensor in self.named_weights():
            if keep:
                tensors[name] = tensor.to("cpu", copy=True)
        if keep and self._made is not None:
            write_module(path, self._made.module, tensors)

    # -- places -------------------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        """Move parameters, gradients, optimizer states and buffers to host memory.

        Raises:
            EngineError: the weights are released.
        """
        if self._away is not None:
            return
        made = self._ready("cpu()")
        away = Residence(self._who, self._memory)
        for kind, tensors in self._tensors(made).items():
            away.hold(kind, tensors)
        away.to_host()
        self._away = away

    def cuda(self, part: Part = "all") -> None:
        """Bring them back; released ones come with the next weights.

        Raises:
            EngineError: a train engine has no key-value cache.
            OutOfDeviceMemory: they do not fit; they stay in host memory.
        """
        if part == "kv_cache":
            raise EngineError(f"{self._who} trains: it has no key-value cache")
        self._awaits_weights = self._made is None
        if self._away is not None:
            self._away.to_device()
            self._away = None

    def meta(self) -> None:
        """Release the module with everything that it made."""
        self._made, self._away, self._awaits_weights, self._sequences = None, None, False, None
        self._gradients = None
        gc.collect()  # A module and its hooks refer to each other.
        self.release_cache()

    def place(self) -> Place:
        """Where the weights are."""
        if self._made is None:
            return "meta"
        return "cuda" if self._away is None else "cpu"

    def footprint(self) -> dict[str, int]:
        """Bytes on the device by kind."""
        return self._memory.held(self._who)

    def release_cache(self) -> None:
        """Give what the allocator keeps for later back to the device."""
        self._memory.release_cache()

    def close(self) -> None:
        """Leave the other ranks and release everything."""
        self._hook.remove()
        self.meta()
        self._ranks.close()

    def _account(self) -> None:
        if self._made is not None:
            for kind, tensors in self._tensors(self._made).items():
                self._memory.hold(self._who, kind, tensors)

    def _tensors(self, made: Materialized) -> dict[Kind, list[Any]]:
        """Everything on this rank, as plain tensors."""
        parameters = [shard.parameter for shard in made.shards]
        states = [
            value
            for optimizer in self._found_optimizers(made.module)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim  # AdamW counts its steps on the host.
        ]
        return {
            "weights": [plain(tensor) for tensor in [*parameters, *made.module.buffers()]],
            "gradients": [plain(parameter.grad) for parameter in parameters if parameter.grad is not None],
            "optimizer": [plain(state) for state in states],
        }

    def _found_optimizers(self, module: Any) -> set[Any]:
        """Those that the module has as attributes, and those that have stepped it."""
        attributes = [
            item for value in vars(module).values() for item in (value if isinstance(value, list | tuple) else [value])
        ]
        return {item for item in attributes if isinstance(item, torch.optim.Optimizer)} | set(self._optimizers)


def _whole_logits(module: Any, mesh: Any) -> None:
    """Let a model whose vocabulary is split give whole logits to the user's code."""
    group = mesh.get_group()
    module.get_output_embeddings().register_forward_hook(lambda _module, _args, logits: _Whole.apply(logits, group))


class _Whole(torch.autograd.Function):
    """Joins the last dimension, which ranks divide: a new tensor, so that it may be changed in place. What the ranks
    compute with it is the same, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Any, group: Any) -> Any:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        ctx.rank, ctx.size = dist.get_rank(group), part.shape[-1]
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return gradient.narrow(-1, ctx.rank * ctx.size, ctx.size).contiguous(), None
