# SPDX-License-Identifier: Apache-2.0
"""The default train engine: a Hugging Face model and its optimizer under FSDP2, with this rank's shards."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous, TokenLoss, TrainSettings
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.cpu_kernels import install_cpu_kernels
from dlrover.python.rl.engine.fsdp2 import INFO, Fsdp2Options
from dlrover.python.rl.engine.fsdp2.compiled_layers import compile_layers
from dlrover.python.rl.engine.fsdp2.copy_sums import CopySums
from dlrover.python.rl.engine.fsdp2.materialize import MaterializedModule, MaterializeOptions, materialize
from dlrover.python.rl.engine.fsdp2.shards import Grid, ParameterShard, to_local_tensor
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.chunked_head import ChunkedHead
from dlrover.python.rl.engine.model.loading import DTYPES, WeightReader, find_limits, list_aliases, prepare_training
from dlrover.python.rl.engine.model.outputs import OutputReader
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.training.adapters import (
    adapter_name,
    add_adapters,
    check_adapters,
    fresh_adapter,
    is_adapter,
    merge,
    model_name,
)
from dlrover.python.rl.engine.training.backend import (
    model_tensor,
    optimizer_tensor,
    read_checkpoint,
    write_checkpoint,
)
from dlrover.python.rl.engine.training.quantized import quantize_linear_layers
from dlrover.python.rl.engine.training.redivide import merge_states, place
from dlrover.python.rl.engine.training.stepping import MasterOptimizer, ShardedBackend, accumulate_gradients
from dlrover.python.rl.engine.training.train_engine_base import BackendTrainEngine


def checkpoint_tensors(made: MaterializedModule, optimizer: MasterOptimizer[ParameterShard] | None) -> dict[str, Any]:
    """The live tensors by name, in a form that tells which part of the whole each is. Beside a quantized model those of
    its adapters alone: it is read again from its files."""
    kept = made.shards.trained if any(shard.quantized is not None for shard in made.shards) else made.shards
    tree = {model_tensor(shard.name): shard.as_dtensor(shard.master.detach()) for shard in kept}
    tree |= {model_tensor(name): buffer for name, buffer in made.buffers.items()}
    for shard, state in optimizer.state() if optimizer else ():
        for kind, tensor in state.items():
            tree[optimizer_tensor(shard.name, kind)] = shard.as_dtensor(tensor) if tensor.ndim else tensor
    return tree


class Fsdp2Backend(ShardedBackend):
    def __init__(  # noqa: PLR0913 - what an engine is made of
        self,
        spec: ModelSpec,
        config: OptimizerConfig | None,
        settings: TrainSettings,
        options: Fsdp2Options,
        ranks: Ranks,
        grid: Grid,
        parked: ParkedTensors,
        loaded: bool,
    ) -> None:
        self._settings, self._ranks, self.parked = settings, ranks, parked
        module = spec.empty()
        if grid.layout.context > 1:
            attention.check_context_parallel(module, grid.layout.context, grid.layout.tensor)
        if not options.compile_layers:
            install_cpu_kernels(module, attention.packed_attention)
        if settings.lora is not None:
            if settings.lora.quantize_base is not None:
                quantize_linear_layers(module, DTYPES[settings.precision], grid.shard_size)
            add_adapters(module, settings.lora)
        prepare_training(module, config is not None, settings.gradient_checkpointing)
        if options.compile_layers:
            compile_layers(module)
        source = _source(spec, module) if loaded else None
        self.made = made = materialize(module, source, grid, _make_options(spec, module, settings, options))
        self.module, self.shards, self.buffers = module, made.shards, made.buffers
        self.packs = attention.can_pack(module)
        chunked = ChunkedHead.of(module) if self.packs and settings.head == "causal" and not made.vocabulary else None
        self.limits = find_limits(module)
        known_ids = spec.known_ids(self.limits[0], settings.mask_unknown_ids)
        self.reader = OutputReader(
            settings.head, settings.device, self.packs, 0, grid.context, made.vocabulary, chunked, known_ids
        )
        self.optimizer = None if config is None else MasterOptimizer(config, made.shards.trained)
        copied = config is not None and grid.copies is not None
        self.copy_sums = CopySums(made.shards.trained, grid.copies) if copied else None
        self._track_memory()

    def _track_memory(self) -> None:
        """Account for what is on the device."""
        self.parked.hold("weights", [shard.master for shard in self.shards if not shard.on_host])
        self.parked.hold("weights", [to_local_tensor(shard.parameter) for shard in self.shards])
        self.parked.hold("weights", self.module.buffers())
        if self.optimizer is not None and not any(shard.on_host for shard in self.shards):
            self.parked.hold("optimizer", self.optimizer.tensors())

    @contextmanager
    def _computing(self) -> Iterator[None]:
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

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        with self._computing():
            for micro in micros:
                note_progress()
                yield micro, self.reader.read(self.module, micro, temperature, entropy)

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        def read(micro: MicroBatch, entropy: bool) -> tuple[Any, ...]:
            return self.reader.read(self.module, micro, temperature, entropy)

        with self._computing():
            steps = micros if self.copy_sums is None else self.copy_sums.begin_at_last(micros)
            sums = accumulate_gradients(steps, batch, loss, read, torch.Tensor.backward, self._settings.device)
        return sums if self.shards.grid.reports else {}

    def reduce_gradients(self) -> list[Any]:
        return self.shards.take_gradients(None if self.copy_sums is None else self.copy_sums.finish)

    def drop_gradients(self) -> None:
        if self.copy_sums is not None:
            self.copy_sums.forget()
        super().drop_gradients()

    def update(self, version: int, norm: float) -> float:
        self.shards.hand_over()
        return super().update(version, norm)

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self, dtype: Any = None, merged: bool = True) -> Iterator[tuple[str, Any]]:
        """See ``BaseTrainEngine``. Without a ``dtype`` a trained model's weights are float32, frozen ones of lower
        precision too."""
        lora, by_name = self._settings.lora, {shard.name: shard for shard in self.shards}
        dtype = dtype or (None if self.optimizer is None else torch.float32)
        for shard in self.shards:
            if lora is None:
                yield shard.name, self._whole(shard, dtype)
            elif not is_adapter(shard.name):
                names = by_name if merged else ()
                weight = merge(shard.name, names, lambda name: self._whole(by_name[name]), lora)
                yield model_name(shard.name), weight.to(dtype)
        yield from ((name, self.parked.locate(buffer)) for name, buffer in self.buffers.items())

    def named_adapters(self) -> Iterator[tuple[str, Any]]:
        for shard in self.shards:
            if is_adapter(shard.name):
                yield adapter_name(shard.name), self._whole(shard)

    def _whole(self, shard: ParameterShard, dtype: Any = None) -> Any:
        if shard.quantized is not None:
            packed = self.parked.locate(shard.master)
            if shard.sharded:
                packed = shard.whole(packed.to(self._settings.device), self.shards.grid)
            return shard.quantized.restored(packed)
        copy, local = self.parked.locate(to_local_tensor(shard.parameter)), self.parked.locate(shard.master)
        if copy.dtype in (dtype, local.dtype):  # the same values, on the device
            local = copy
        elif shard.on_host:
            local = local.to(copy.device)
        divided = shard.sharded or shard.tensor_dim is not None
        if divided or local.dtype != (dtype or local.dtype):  # casts on the device
            local = local.to(self._settings.device).to(dtype)
        return shard.whole(local, self.shards.grid) if divided else local

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
        locate = self.parked.locate
        adapted = self._settings.lora is not None
        model = {shard.name: locate(shard.master) for shard in (self.shards.trained if adapted else self.shards)}
        model |= {} if adapted else {name: locate(buffer) for name, buffer in self.buffers.items()}
        grid = self.shards.grid
        places = {shard.name: place(shard.shape, shard.ranges(grid)) for shard in self.shards if shard.name in model}
        return {"layout": list(grid.layout.shape), "places": places, "model": model, "optimizer": self._moments()}

    def write_checkpoint(self, path: Path, version: int) -> None:
        tensors = checkpoint_tensors(self.made, self.optimizer)
        write_checkpoint(path, self._ranks, self.shards.grid.layout, tensors, version)

    def read_checkpoint(self, path: Path) -> int:
        tensors = checkpoint_tensors(self.made, self.optimizer)
        version = read_checkpoint(path, self._ranks, self.shards.grid.layout, tensors)
        self._refresh()
        return version


def _source(spec: ModelSpec, module: Any) -> WeightReader:
    aliases = [tuple(map(model_name, names)) for names in list_aliases(module) if not is_adapter(names[0])]
    return spec.source_of({names[0]: names for names in aliases}, module.base_model_prefix)


def _make_options(spec: ModelSpec, module: Any, settings: TrainSettings, options: Fsdp2Options) -> MaterializeOptions:
    def absent(name: str, shape: tuple[int, ...]) -> Any:
        return fresh_adapter(name, shape) if is_adapter(name) else spec.absent(name, shape)

    return MaterializeOptions(
        settings.device,
        DTYPES[settings.precision],
        prefix=module.base_model_prefix,
        rename=model_name if settings.lora else None,
        absent=absent,
        on_host=options.optimizer_on_host,
    )


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

    def load_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """See ``BaseTrainEngine``; later steps are equal within float32 rounding. Raises as :func:`merge_states`."""
        backend = self._revive()
        assert isinstance(backend, Fsdp2Backend)

        def noted() -> Iterator[Mapping[str, Any]]:
            for state in states:
                check_adapters(self._adapters, state, self._spec.name, lambda: backend.local_state()["model"])
                self.version, self._skipped = int(state["version"]), int(state["skipped"])
                yield state

        merge_states(backend.local_state(), noted())
        backend._refresh()
        self._has_weights = True

    def _make(self, loaded: bool) -> Fsdp2Backend:
        parked = ParkedTensors(self._owner, self._memory)
        assert isinstance(self._options, Fsdp2Options)
        return Fsdp2Backend(
            self._spec, self._config, self._settings, self._options, self._ranks, self._grid, parked, loaded
        )
