# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a user's module: materialised, called, offloaded, published."""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

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
from dlrover.python.rl.engine.model.loading import (
    SafetensorsSource,
    TensorSource,
    WeightReader,
    find_model_folder,
    list_saved_tensors,
    write_atomically,
)
from dlrover.python.rl.engine.model.ranks import Ranks, gather_parts
from dlrover.python.rl.engine.model.train_module import CallShare, empty_weights
from dlrover.python.rl.engine.module.parallel import Gradients, SharedSequences


def find_weight_source(module: Any) -> WeightReader:
    """Return the source of a :class:`TrainModule`'s weights."""
    origin = module.materialization_source()
    if isinstance(origin, Mapping):
        return TensorSource(origin)
    if callable(origin):
        shapes = {module.source_name(name): tuple(tensor.shape) for name, tensor in list_saved_tensors(module).items()}
        return TensorSource({name: partial(_make, origin, name, shape) for name, shape in shapes.items()}, shapes)
    return SafetensorsSource(find_model_folder(origin))


def _make(make: Callable[[str, tuple[int, ...]], Any], name: str, shape: tuple[int, ...]) -> Any:
    tensor = make(name, shape)
    if tuple(tensor.shape) != shape:
        raise EngineError(f"materialization_source() made '{name}' as {tuple(tensor.shape)}, not {shape}")
    return tensor


def write_module(path: Path, module: Any, tensors: Mapping[str, Any]) -> None:
    """Write a module's exported tensors to the folder ``path``, atomically: a Hugging Face model in its format, as the
    library's class, with the tokenizer of its source; any other module as ``model.safetensors``."""
    if not isinstance(module, PreTrainedModel):
        named = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_atomically(path, None, None, add=lambda folder: save_file(named, folder / "model.safetensors"))
        return
    hf_logging.disable_progress_bar()
    kind = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers."))
    with empty_weights():
        model = kind(module.config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(find_model_folder(module.config.name_or_path))
    except (OSError, ValueError, EngineError):
        tokenizer = None  # a new model, or one without text inputs
    write_atomically(path, model, tokenizer, tensors)


class ModuleEngine:
    """Runs a :class:`TrainModule`. All ranks call every method together.

    ``label`` is the engine's name in messages, ``payload`` the module without weights, by cloudpickle. Raises an
    ``EngineError`` if the module cannot be divided as configured, or its weights are not found."""

    def __init__(
        self,
        label: str,
        payload: bytes,
        settings: TrainSettings,
        rendezvous: Rendezvous,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.version, self.training = 0, True
        self._payload, self._settings = payload, settings
        self._parked = ParkedTensors(label, memory or DeviceMemory(settings.device))
        self._made: MaterializedModule | None = None
        self._gradients: Any = None  # as long as there are weights
        self._expects_weights = False
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ranks = Ranks.connect(rendezvous, settings.device)
        # Called by every optimizer of the process, whenever the module makes it.
        self._hook = register_optimizer_step_post_hook(self._count_step)
        try:
            self._grid = Grid.of(self._ranks, settings.parallel, settings.device)
            self._materialize(None)
        except BaseException:
            self.close()
            raise

    def _materialize(self, source: WeightReader | None) -> None:
        module = cloudpickle.loads(self._payload)  # noqa: TID251 -- the caller's module
        sequences = SharedSequences(module, self._grid) if self._grid.context is not None else None
        # A user's optimizer needs float32 parameters. Without FSDP's casts, autocast lowers the precision.
        low = self._settings.precision == "bf16" and self._grid.shards is not None
        options = MaterializeOptions(
            device=self._settings.device,
            precision=torch.bfloat16 if low else torch.float32,
            rename=module.source_name,
            absent=module.initial_weight,
        )
        self._made = materialize(module, source or find_weight_source(module), self._grid, options)
        self._gradients = Gradients(module, self._made.shards, sequences)
        if self._made.vocabulary is not None:
            group = self._grid.tensors.get_group()
            head = module.get_output_embeddings()
            head.register_forward_hook(lambda _module, _args, logits: _join_columns(logits, group))
        self._account()
        module.train(self.training)
        module.on_weights_materialized()
        self._account()

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, method: str, share: CallShare, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the module. Raises an ``EngineError`` if the weights are not on the device."""
        module = self._require_ready(method).module
        low = self._settings.precision == "bf16" and self._grid.shards is None
        autocast = torch.autocast(torch.device(self._settings.device).type, torch.bfloat16, enabled=low)
        with self._gradients.calling(module.gradients, share), autocast:
            result = getattr(module, method)(*args, **kwargs)
        self._account()
        return result

    def _require_ready(self, caller: str) -> MaterializedModule:
        if self._made is None:
            owner = self._parked.owner
            raise EngineError(f"{owner} has released its weights: call cuda() and sync weights before {caller}")
        if not self._parked.on_device:
            raise EngineError(f"{self._parked.owner} is in host memory: call cuda() before {caller}")
        return self._made

    def _count_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        mine = {id(shard.parameter) for shard in self._made.shards} if self._made is not None else set()
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            self._optimizers.add(optimizer)
            self.version += 1

    def train(self, mode: bool) -> None:
        """Switch training mode on or off, for later materialised weights too."""
        self.training = mode
        if self._made is not None:
            self._made.module.train(mode)

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield the name and whole tensor of each exported weight, cast to ``dtype`` if it is given. A collective.
        Raises an ``EngineError`` if the weights are released, or two are exported under one name."""
        if self._made is None:
            raise EngineError(f"{self._parked.owner} has released its weights: there is nothing to export")
        module, shards = self._made.module, {shard.name: shard for shard in self._made.shards}
        exported_names: set[str] = set()

        def whole(name: str) -> Any:
            if name not in shards:
                raise EngineError(f"the module has no parameter '{name}'{hint(name, shards)}")
            return self._whole(shards[name])

        own = ((shard.name, self._whole(shard)) for shard in self._made.shards)
        buffers = ((name, self._parked.locate(buffer)) for name, buffer in self._made.buffers.items())
        for name, tensor in chain(own, buffers):
            exported = module.export_weight(name, tensor, whole)
            if exported is None:
                continue
            if exported[0] in exported_names:
                raise EngineError(f"two parameters are exported as '{exported[0]}'; '{name}' is one of them")
            exported_names.add(exported[0])
            yield exported[0], exported[1].to(dtype)

    @torch.no_grad()
    def _whole(self, shard: ParameterShard) -> Any:
        return shard.whole(self._parked.locate(shard.master).to(self._settings.device), self._grid)

    def publish(self) -> WeightSnapshot | None:
        """Return the exported weights in host memory, on rank 0 only. A collective."""
        if self._ranks.rank == 0:
            return take_snapshot(self.named_weights(), self.version)
        deque(self.named_weights(), maxlen=0)
        return None

    def receive(self, weights: WeightSnapshot) -> WeightStamp:
        """Adopt another engine's weights; each rank reads its part.

        Raises:
            WeightSyncError: a name, shape or byte differs; nothing was changed.
            EngineError: the module trains, so only its own steps change its weights; or it is not on the device.
        """
        if self._made is None and self._expects_weights:
            module = cloudpickle.loads(self._payload)  # noqa: TID251 -- the caller's module
            verify_snapshot(weights, self._expected(module), serving=-1)
            self._materialize(TensorSource({name: partial(weights.tensor, name) for name in weights.buffers}))
        else:
            materialized = self._require_ready("a weight sync")
            if self._find_optimizers(materialized.module):
                raise EngineError(f"{self._parked.owner} has an optimizer: only its own steps change its weights")
            verify_snapshot(weights, self._expected(materialized.module), serving=-1)
            self._write(materialized, weights)
        self.version = weights.version
        return weights.stamp

    @torch.no_grad()
    def _write(self, target: MaterializedModule, weights: WeightSnapshot) -> None:
        rename = target.module.source_name
        for shard in target.shards:
            if (name := rename(shard.name)) in weights.buffers:
                shard.master.copy_(weights.tensor(name)[shard.ranges(self._grid)])
                shard.refresh()
        for own, buffer in target.buffers.items():
            buffer.copy_(weights.tensor(rename(own)))

    def _expected(self, module: Any) -> dict[str, tuple[int, ...]]:
        tensors = list_saved_tensors(module)
        return {
            module.source_name(name): tuple(tensor.shape)
            for name, tensor in tensors.items()
            if module.initial_weight(name, tuple(tensor.shape)) is None
        }

    def save(self, path: Path) -> None:
        """Write the exported weights, atomically. A collective; rank 0 writes."""
        is_writer = self._ranks.rank == 0
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.named_weights() if is_writer}
        if is_writer and self._made is not None:
            write_module(path, self._made.module, tensors)

    # -- places -------------------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        """Move parameters, gradients, optimizer states and buffers to host memory."""
        if not self._parked.on_device:
            return
        for kind, tensors in self._list_tensors(self._require_ready("cpu()")).items():
            self._parked.hold(kind, tensors)
        self._parked.to_host()

    def cuda(self, part: Part = "all") -> None:
        """Bring all back; after :meth:`meta` the next weights materialise the module."""
        if part == "kv_cache":
            raise EngineError(f"{self._parked.owner} trains: it has no key-value cache")
        self._expects_weights = self._made is None
        if not self._parked.on_device:
            self._parked.to_device()
            self._parked = ParkedTensors(self._parked.owner, self._parked.memory)

    def meta(self) -> None:
        """Release the module and its tensors."""
        self._made, self._expects_weights = None, False
        self._parked = ParkedTensors(self._parked.owner, self._parked.memory)
        self._gradients = None
        gc.unfreeze()  # a worker under Ray has frozen it
        gc.collect()  # a module and its hooks refer to each other
        self._parked.memory.release_cache()

    def place(self) -> DeviceKind:
        if self._made is None:
            return "meta"
        return "cuda" if self._parked.on_device else "cpu"

    def footprint(self) -> dict[str, int]:
        return self._parked.memory.bytes_of(self._parked.owner)

    def close(self) -> None:
        self._hook.remove()
        self.meta()
        self._ranks.close()

    def _account(self) -> None:
        if self._made is not None:
            for kind, tensors in self._list_tensors(self._made).items():
                self._parked.memory.hold(self._parked.owner, kind, tensors)

    def _list_tensors(self, materialized: MaterializedModule) -> dict[Kind, list[Any]]:
        parameters = [shard.parameter for shard in materialized.shards]
        states = [
            value
            for optimizer in self._find_optimizers(materialized.module)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim  # AdamW counts its steps on the host
        ]
        return {
            "weights": [to_local_tensor(tensor) for tensor in [*parameters, *materialized.module.buffers()]],
            "gradients": [to_local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None],
            "optimizer": [to_local_tensor(state) for state in states],
        }

    def _find_optimizers(self, module: Any) -> set[Any]:
        attributes = [
            item for value in vars(module).values() for item in (value if isinstance(value, list | tuple) else [value])
        ]
        return {item for item in attributes if isinstance(item, torch.optim.Optimizer)} | set(self._optimizers)


def _join_columns(part: Any, group: Any) -> Any:
    """Gather the last dimension, which ranks divide. All compute the same with it, so only the own part needs a
    gradient."""
    parts = gather_parts(part, group)
    parts[dist.get_rank(group)] = part
    return torch.cat(parts, dim=-1)
