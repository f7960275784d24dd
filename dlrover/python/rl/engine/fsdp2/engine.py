# SPDX-License-Identifier: Apache-2.0
"""The default train engine: a Hugging Face model and its optimizer under FSDP2, with this rank's shards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous, TokenLoss, TrainSettings
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.cpu_kernels import install_cpu_kernels
from dlrover.python.rl.engine.fsdp2 import INFO
from dlrover.python.rl.engine.fsdp2.adapters import add_adapters, fresh_adapter, is_adapter, merge, model_name
from dlrover.python.rl.engine.fsdp2.materialize import MaterializedModule, MaterializeOptions, materialize
from dlrover.python.rl.engine.fsdp2.shards import Grid, ParameterShard, Shards, to_local_tensor
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.loading import DTYPES, WeightReader, prepare_training
from dlrover.python.rl.engine.model.outputs import OutputReader
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.training.backend import (
    model_tensor,
    optimizer_tensor,
    read_checkpoint,
    restore_state,
    write_checkpoint,
)
from dlrover.python.rl.engine.training.stepping import MasterOptimizer, accumulate_gradients
from dlrover.python.rl.engine.training.train_engine_base import BackendTrainEngine


def checkpoint_tensors(made: MaterializedModule, optimizer: MasterOptimizer[ParameterShard] | None) -> dict[str, Any]:
    """The live tensors by name, in a form that tells which part of the whole each is."""
    tree = {model_tensor(shard.name): shard.as_dtensor(shard.master.detach()) for shard in made.shards}
    tree |= {model_tensor(name): buffer for name, buffer in made.buffers.items()}
    for shard, state in optimizer.state() if optimizer else ():
        for kind, tensor in state.items():
            tree[optimizer_tensor(shard.name, kind)] = shard.as_dtensor(tensor) if tensor.ndim else tensor
    return tree


@dataclass(eq=False)
class Fsdp2Backend:
    """Made by :meth:`build`; :meth:`reside` accounts for its memory."""

    settings: TrainSettings
    ranks: Ranks
    made: MaterializedModule
    optimizer: MasterOptimizer[ParameterShard] | None
    reader: OutputReader
    vocab_size: int
    max_positions: int | None  # None: the model names no limit
    parked: ParkedTensors = field(init=False)

    @classmethod
    def build(  # noqa: PLR0913 - what a model is made of
        cls,
        spec: ModelSpec,
        config: OptimizerConfig | None,
        settings: TrainSettings,
        ranks: Ranks,
        grid: Grid,
        loaded: bool,
    ) -> "Fsdp2Backend":
        """Make the module, with the model's weights if ``loaded``, and unless ``config`` is None its optimizer."""
        module = spec.empty()
        _check_parallel(module, settings, grid)
        install_cpu_kernels(module, attention.packed_attention)
        if settings.lora is not None:
            add_adapters(module, settings.lora)
        prepare_training(module, config is not None, settings.gradient_checkpointing)

        def absent(name: str, shape: tuple[int, ...]) -> Any:
            head = spec.absent(name, shape)
            return fresh_adapter(name, shape) if head is None else head

        options = MaterializeOptions(
            settings.device,
            DTYPES[settings.precision],
            prefix=module.base_model_prefix,
            rename=model_name if settings.lora else None,
            absent=absent,
        )
        made = materialize(module, _source(spec, module) if loaded else None, grid, options)
        reader = OutputReader(
            settings.head, settings.device, attention.can_pack(module), 0, grid.context, made.vocabulary
        )
        return cls(
            settings,
            ranks,
            made,
            None if config is None else MasterOptimizer(config, made.shards.trained),
            reader,
            module.get_input_embeddings().num_embeddings,
            getattr(module.config.get_text_config(), "max_position_embeddings", None),
        )

    def reside(self, owner: str, memory: DeviceMemory) -> "Fsdp2Backend":
        """Account for the memory from now on. Raises ``OutOfDeviceMemory`` if it exceeds the device."""
        self.parked = ParkedTensors(owner, memory)
        self.parked.hold("weights", [shard.master for shard in self.shards])
        self.parked.hold("weights", [to_local_tensor(shard.parameter) for shard in self.shards])
        self.parked.hold("weights", self.module.buffers())
        if self.optimizer is not None:
            self.parked.hold("optimizer", self.optimizer.tensors())
        return self

    @property
    def module(self) -> Any:
        return self.made.module

    @property
    def shards(self) -> Shards:
        return self.made.shards

    @property
    def buffers(self) -> Mapping[str, Any]:
        return self.made.buffers

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around passes through the module: frees gathered parameters afterwards, also after a failure."""
        try:
            yield
        except BaseException:
            if hasattr(self.module, "reset_iter_state"):
                self.module.reset_iter_state()
            raise
        finally:
            if hasattr(self.module, "reshard"):
                self.module.reshard()

    @property
    def limits(self) -> tuple[int, int | None]:
        return self.vocab_size, self.max_positions

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def packs(self) -> bool:
        return self.reader.packs

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        with self.computing():
            for micro in micros:
                yield micro, self.reader.read(self.module, micro, temperature, entropy)

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        def read(micro: MicroBatch, entropy: bool) -> tuple[Any, ...]:
            return self.reader.read(self.module, micro, temperature, entropy)

        with self.computing():
            sums = accumulate_gradients(micros, batch, loss, read, torch.Tensor.backward, self.settings.device)
        return sums if self.shards.grid.reports else {}

    def reduce_gradients(self) -> list[Any]:
        return self.shards.take_gradients()

    def gradient_norm(self) -> float:
        return self.shards.gradient_norm(self.ranks)

    def first_bad_gradient(self) -> str:
        return self.shards.first_bad_gradient(self.ranks)

    def update(self, version: int, norm: float) -> float:
        assert self.optimizer is not None
        return self.optimizer.step(version, norm)

    def drop_gradients(self) -> None:
        self.shards.drop_gradients()

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """See ``BaseTrainEngine``. A trained model's weights are float32, frozen ones of lower precision too."""
        lora = self.settings.lora
        for shard in self.shards:
            if lora is None:
                yield shard.name, self._cast(self._whole(shard))
            elif not is_adapter(shard):
                yield model_name(shard.name), self._cast(merge(self.shards, shard, self._whole, lora))
        yield from ((name, self.parked.locate(buffer)) for name, buffer in self.buffers.items())

    def _cast(self, tensor: Any) -> Any:
        return tensor if self.optimizer is None else tensor.float()

    def _whole(self, shard: ParameterShard) -> Any:
        local = self.parked.locate(shard.master)
        divided = shard.sharded or shard.tensor_dim is not None
        return shard.whole(local.to(self.settings.device), self.shards.grid) if divided else local

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {shard.name: shard.shape for shard in self.shards}
        return shapes | {name: tuple(buffer.shape) for name, buffer in self.buffers.items()}

    @torch.no_grad()
    def write_weights(self, weights: WeightSnapshot) -> None:
        for shard in self.shards:
            self.parked.locate(shard.master).copy_(weights.tensor(shard.name)[shard.ranges(self.shards.grid)])
        for name, buffer in self.buffers.items():
            self.parked.locate(buffer).copy_(weights.tensor(name))

    # -- states -------------------------------------------------------------------------------------------------------

    def local_state(self) -> dict[str, Any]:
        """With adapters, those alone: the rest of the model does not change."""
        locate, moments = self.parked.locate, None
        if self.optimizer is not None:
            moments = {
                shard.name: {kind: locate(tensor) for kind, tensor in state.items()}
                for shard, state in self.optimizer.state()
            }
        adapted = self.settings.lora is not None
        model = {shard.name: locate(shard.master) for shard in (self.shards.trained if adapted else self.shards)}
        model |= {} if adapted else {name: locate(buffer) for name, buffer in self.buffers.items()}
        return {"layout": list(self.shards.grid.layout.shape), "model": model, "optimizer": moments}

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        restore_state(self.local_state(), state)
        self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        locate = self.parked.locate
        for shard in self.shards:
            if shard.master.dtype != shard.parameter.dtype:
                locate(to_local_tensor(shard.parameter)).copy_(locate(shard.master))

    def write_checkpoint(self, path: Path, version: int) -> None:
        tensors = checkpoint_tensors(self.made, self.optimizer)
        write_checkpoint(path, self.ranks, self.shards.grid.layout, tensors, version)

    def read_checkpoint(self, path: Path) -> int:
        tensors = checkpoint_tensors(self.made, self.optimizer)
        version = read_checkpoint(path, self.ranks, self.shards.grid.layout, tensors)
        self._refresh()
        return version

    def release(self) -> None: ...


def _source(spec: ModelSpec, module: Any) -> WeightReader:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(model_name(name))
    wanted = {aliases[0]: tuple(aliases) for aliases in names.values() if ".lora_" not in aliases[0]}
    return spec.source_of(wanted, module.base_model_prefix)


def _check_parallel(module: Any, settings: TrainSettings, grid: Grid) -> None:
    layout = grid.layout
    if layout.context > 1:
        attention.check_context_parallel(module, layout.context, layout.tensor)


class Fsdp2TrainEngine(BackendTrainEngine):
    """Only the ranks that shard or split the model exchange it: copies exchange gradients and small sums."""

    name, info = "fsdp2", INFO

    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        settings = self._settings
        ranks = Ranks.connect(rendezvous, settings.device)
        with ranks.close_on_failure():
            self._grid = Grid.of(ranks, settings.parallel, settings.device)
        self.layout = self._grid.layout
        return ranks

    def _make(self, loaded: bool) -> Fsdp2Backend:
        return Fsdp2Backend.build(self._spec, self._config, self._settings, self._ranks, self._grid, loaded).reside(
            self._owner, self._memory
        )
