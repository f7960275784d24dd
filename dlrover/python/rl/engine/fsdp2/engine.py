# SPDX-License-Identifier: Apache-2.0
"""The default train engine: a Hugging Face model and its optimizer under FSDP2, with this rank's shards."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import Rendezvous, TokenLoss
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.cpu_kernels import install_cpu_kernels
from dlrover.python.rl.engine.fsdp2 import INFO
from dlrover.python.rl.engine.fsdp2.materialize import MaterializedModule, MaterializeOptions, materialize
from dlrover.python.rl.engine.fsdp2.shards import CopySums, Grid, ParameterShard, Shards, to_local_tensor
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.chunked_head import ChunkedHead
from dlrover.python.rl.engine.model.loading import DTYPES, find_known_ids, find_limits, layers_of, list_aliases
from dlrover.python.rl.engine.model.outputs import OutputReader
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.training.adapters import check_adapters, fresh_adapter, is_adapter, model_name
from dlrover.python.rl.engine.training.backend import (
    TrainBackend,
    TrainSetup,
    read_checkpoint,
    stored_name,
    write_checkpoint,
)
from dlrover.python.rl.engine.training.redivide import merge_states, place
from dlrover.python.rl.engine.training.stepping import MasterOptimizer, accumulate_gradients, find_first_nonfinite
from dlrover.python.rl.engine.training.train_engine_base import BackendTrainEngine


def compile_layers(module: Any) -> None:
    """Compile the parts of decoder layers (attention, MLP, norms), each at its first call: once for all layers and any
    number of tokens, and again without gradients.

    The layers themselves are not compiled, since FSDP2 and gradient checkpointing change their calls; nor is packed
    attention, whose documents differ in each batch. Raises EngineError if the model does not name its layers."""
    layers = layers_of(module)
    if not layers:
        raise EngineError(f"{type(module).__name__} does not name its layers: they cannot be compiled")
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
    for part in (part for layer in layers for part in layer.children()):
        part.forward = torch.compile(part.forward, dynamic=True)


class Fsdp2Backend(TrainBackend):
    shards: Shards

    def __init__(self, setup: TrainSetup, grid: Grid, parked: ParkedTensors, loaded: bool) -> None:
        super().__init__(setup, parked)
        spec, settings, options = setup.spec, setup.settings, setup.options
        module = setup.empty_module(grid.shard_size)
        if grid.layout.context > 1:
            attention.check_context_parallel(module, grid.layout.context, grid.layout.tensor)
        if options.compile_layers:
            compile_layers(module)
        else:
            install_cpu_kernels(module, attention.packed_attention)
        materialized = _materialize(setup, module, grid, loaded)
        vocabulary = materialized.vocabulary
        self.module = self.passes = module
        self.shards, self.buffers = materialized.shards, materialized.buffers
        self.packs, self.limits = attention.can_pack(module), find_limits(module)
        chunked = ChunkedHead.of(module) if self.packs and settings.head == "causal" and not vocabulary else None
        known_ids = find_known_ids(spec.tokenizer, self.limits[0], settings.mask_unknown_ids)
        self.reader = OutputReader(
            settings.head, settings.device, self.packs, 0, grid.context, vocabulary, chunked, known_ids
        )
        self.copy_sums: CopySums | None = None
        if setup.config is not None:
            self.optimizer = MasterOptimizer(setup.config, self.shards.trained)
            self.copy_sums = CopySums(self.shards.trained, grid.copies) if grid.copies is not None else None
        parked.hold("weights", [shard.master for shard in self.shards if not shard.on_host])
        parked.hold("weights", [to_local_tensor(shard.parameter) for shard in self.shards])
        parked.hold("weights", module.buffers())
        if self.optimizer is not None and not any(shard.on_host for shard in self.shards):
            parked.hold("optimizer", self.optimizer.tensors())

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Enclose passes through the module: free gathered parameters afterwards, even after a failure."""
        try:
            yield
        except BaseException:
            if hasattr(self.module, "reset_iter_state"):
                self.module.reset_iter_state()
            raise
        finally:
            if hasattr(self.module, "reshard"):
                self.module.reshard()

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        def read(micro: MicroBatch, entropy: bool) -> tuple[Any, ...]:
            return self.reader.read(self.module, micro, temperature, entropy)

        device, rank = self.setup.settings.device, self.shards.grid.place
        with self._computing():
            steps = micros if self.copy_sums is None else self.copy_sums.begin_at_last(micros)
            sums = accumulate_gradients(steps, batch, loss, read, torch.Tensor.backward, device)
        # One rank reports for a model replica, whose ranks all compute the same loss.
        return sums if rank.context == 0 and rank.tensor == 0 else {}

    def reduce_gradients(self) -> list[Any]:
        return self.shards.take_gradients(None if self.copy_sums is None else self.copy_sums.finish)

    def gradient_norm(self) -> float:
        """Sum in the ranks' order, and count copies and the parameters that tensor-parallel ranks share once."""
        trained, grid = self.shards.trained, self.shards.grid
        norms = torch.stack([torch.linalg.vector_norm(shard.gradient) for shard in trained]).double()
        copies = [grid.layout.tensor if shard.tensor_dim is None else 1 for shard in trained]
        squares = sum(norm * norm / count for norm, count in zip(norms.tolist(), copies, strict=True))
        return math.sqrt(sum(self.setup.ranks.gather(squares if grid.place.ddp == 0 else 0.0)))

    def first_bad_gradient(self) -> str:
        gradients = {shard.name: shard.gradient for shard in self.shards.trained}
        return find_first_nonfinite(self.setup.ranks, gradients, list(gradients))

    def drop_gradients(self) -> None:
        if self.copy_sums is not None:
            self.copy_sums.forget()
        for shard in self.shards:
            shard.parameter.grad = shard.master.grad = shard.gradient = None

    def update(self, version: int, norm: float) -> float:
        for shard in self.shards.trained:
            shard.copy_gradient_to_host()
            note_progress()
        return super().update(version, norm)

    # -- weights ------------------------------------------------------------------------------------------------------

    def _whole(self, shard: ParameterShard, dtype: Any = None) -> Any:
        device, locate, grid = self.setup.settings.device, self.parked.locate, self.shards.grid
        if shard.quantized is not None:
            packed = locate(shard.master)
            return shard.quantized.restored(shard.whole(packed.to(device), grid) if shard.sharded else packed)
        copy, local = locate(to_local_tensor(shard.parameter)), locate(shard.master)
        if copy.dtype in (dtype, local.dtype):  # the same values, on the device
            local = copy
        elif shard.on_host:
            local = local.to(copy.device)
        divided = shard.sharded or shard.tensor_dim is not None
        if divided or local.dtype != (dtype or local.dtype):  # casts on the device
            local = local.to(device).to(dtype)
        return shard.whole(local, grid) if divided else local

    @torch.no_grad()
    def write_weights(self, weights: WeightSnapshot) -> None:
        for shard in self.shards:
            self.parked.locate(shard.master).copy_(weights.tensor(shard.name)[shard.ranges(self.shards.grid)])
        for name, buffer in self.buffers.items():
            self.parked.locate(buffer).copy_(weights.tensor(name))

    # -- states -------------------------------------------------------------------------------------------------------

    def local_state(self) -> dict[str, Any]:
        locate, grid, adapted = self.parked.locate, self.shards.grid, self.setup.settings.lora is not None
        model = {shard.name: locate(shard.master) for shard in (self.shards.trained if adapted else self.shards)}
        model |= {} if adapted else {name: locate(buffer) for name, buffer in self.buffers.items()}
        places = {shard.name: place(shard.shape, shard.ranges(grid)) for shard in self.shards if shard.name in model}
        moments = None if self.optimizer is None else self.optimizer.moments(locate)
        return {"layout": list(grid.layout.shape), "places": places, "model": model, "optimizer": moments}

    def _checkpoint_tensors(self) -> dict[str, Any]:
        """Return the live tensors by name, as DTensors if ranks divide them. A quantized model is read from its files
        again: only its adapters are saved."""
        is_quantized = any(shard.quantized is not None for shard in self.shards)
        saved = self.shards.trained if is_quantized else self.shards
        tree = {stored_name(shard.name): shard.as_dtensor(shard.master.detach()) for shard in saved}
        tree |= {stored_name(name): buffer for name, buffer in self.buffers.items()}
        for shard, state in self.optimizer.state() if self.optimizer else ():
            for kind, tensor in state.items():
                tree[stored_name(shard.name, kind)] = shard.as_dtensor(tensor) if tensor.ndim else tensor
        return tree

    def write_checkpoint(self, path: Path, version: int) -> None:
        write_checkpoint(path, self.setup.ranks, self.shards.grid.layout, self._checkpoint_tensors(), version)

    def read_checkpoint(self, path: Path) -> int:
        version = read_checkpoint(path, self.setup.ranks, self.shards.grid.layout, self._checkpoint_tensors())
        self.refresh()
        return version


def _materialize(setup: TrainSetup, module: Any, grid: Grid, loaded: bool) -> MaterializedModule:
    """Divide a module; unless ``loaded``, its parameters are zeros."""
    spec, prefix, source = setup.spec, module.base_model_prefix, None

    def absent(name: str, shape: tuple[int, ...]) -> Any:
        return fresh_adapter(name, shape) if is_adapter(name) else spec.absent(name, shape)

    if loaded:
        aliases = [tuple(map(model_name, names)) for names in list_aliases(module) if not is_adapter(names[0])]
        source = spec.source_of({names[0]: names for names in aliases}, prefix)
    options = MaterializeOptions(
        setup.settings.device,
        DTYPES[setup.settings.precision],
        prefix=prefix,
        rename=model_name if setup.settings.lora else None,
        absent=absent,
        on_host=setup.options.optimizer_on_host,
    )
    return materialize(module, source, grid, options)


class Fsdp2TrainEngine(BackendTrainEngine):
    """Exchanges parameters only among the ranks that shard or split the model; copies exchange gradients."""

    name, info = "fsdp2", INFO

    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        settings = self._setup.settings
        ranks = Ranks.connect(rendezvous, settings.device)
        with ranks.close_on_failure():
            self._grid = Grid.of(ranks, settings.parallel, settings.device)
        self.layout = self._grid.layout
        return ranks

    def _make(self, parked: ParkedTensors, loaded: bool) -> Fsdp2Backend:
        return Fsdp2Backend(self._setup, self._grid, parked, loaded)

    def load_states(self, states: Iterable[Mapping[str, Any]]) -> None:
        """See ``BaseTrainEngine``; later steps are equal within float32 rounding. Raises as :func:`merge_states`."""
        backend, adapters, model = self._revive(), self._setup.adapters, self._setup.spec.name

        def checked() -> Iterator[Mapping[str, Any]]:
            for state in states:
                check_adapters(adapters, state, model, lambda: backend.local_state()["model"])
                self.version, self._skipped = int(state["version"]), int(state["skipped"])
                yield state

        merge_states(backend.local_state(), checked())
        backend.refresh()
        self._has_weights = True
