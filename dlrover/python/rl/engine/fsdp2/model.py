"""A model and its optimizer under FSDP2: the module, this rank's shards of it, and where they are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import OptimizerConfig, TokenLoss, TrainSettings
from dlrover.python.rl.engine.fsdp2.adapters import add_adapters, fresh_adapter, is_adapter, merge, model_name
from dlrover.python.rl.engine.fsdp2.checkpoint import checkpoint_tensors
from dlrover.python.rl.engine.fsdp2.grid import Grid
from dlrover.python.rl.engine.fsdp2.materialize import Making, Materialized, materialize
from dlrover.python.rl.engine.fsdp2.shards import ParameterShard, Shards, plain
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.torch import attention
from dlrover.python.rl.engine.torch.blueprint import Blueprint
from dlrover.python.rl.engine.torch.checkpoint import read_checkpoint, write_checkpoint
from dlrover.python.rl.engine.torch.lighter import lighten
from dlrover.python.rl.engine.torch.loading import prepare
from dlrover.python.rl.engine.torch.optimizer import MasterOptimizer
from dlrover.python.rl.engine.torch.outputs import Reader
from dlrover.python.rl.engine.torch.packing import MicroBatch
from dlrover.python.rl.engine.torch.precision import DTYPES
from dlrover.python.rl.engine.torch.ranks import Ranks
from dlrover.python.rl.engine.torch.residence import Residence
from dlrover.python.rl.engine.torch.sources import Source
from dlrover.python.rl.engine.torch.state import restore
from dlrover.python.rl.engine.torch.stepping import accumulate
from dlrover.python.rl.engine.weights import WeightSnapshot


@dataclass(eq=False)
class TrainedModel:
    """A materialised model: a :class:`~dlrover.python.rl.engine.torch.backend.TrainBackend`.

    Made by :meth:`build`; :meth:`reside` accounts for its memory.

    Attributes:
        settings: how it runs.
        ranks: all of the engine.
        made: module and shards.
        optimizer: None of a frozen one.
        reader: gets outputs from the module.
        vocab_size: ids must be below.
        max_positions: longest sequence in tokens, or None when the model names no limit.
    """

    settings: TrainSettings
    ranks: Ranks
    made: Materialized
    optimizer: MasterOptimizer[ParameterShard] | None
    reader: Reader
    vocab_size: int
    max_positions: int | None
    residence: Residence = field(init=False)

    @classmethod
    def build(  # noqa: PLR0913 - what a model is made of
        cls,
        blueprint: Blueprint,
        config: OptimizerConfig | None,
        settings: TrainSettings,
        ranks: Ranks,
        grid: Grid,
        loaded: bool,
    ) -> "TrainedModel":
        """Make the module and, unless ``config`` is None, its optimizer.

        Args:
            blueprint: of the model.
            config: how it is trained.
            settings: how it runs.
            ranks: all of the engine.
            grid: their places.
            loaded: whether it gets the blueprint's weights; else zeros.
        """
        module = blueprint.empty()
        _check_parallel(module, settings, grid)
        lighten(module)
        if settings.lora is not None:
            add_adapters(module, settings.lora)
        prepare(module, config is not None, settings.gradient_checkpointing)

        def absent(name: str, shape: tuple[int, ...]) -> Any:
            head = blueprint.absent(name, shape)
            return fresh_adapter(name, shape) if head is None else head

        making = Making(
            settings.device,
            DTYPES[settings.precision],
            prefix=module.base_model_prefix,
            rename=model_name if settings.lora else None,
            absent=absent,
        )
        made = materialize(module, _source(blueprint, module) if loaded else None, grid, making)
        reader = Reader(settings.head, settings.device, attention.can_pack(module), 0, grid.context, made.vocabulary)
        return cls(
            settings,
            ranks,
            made,
            None if config is None else MasterOptimizer(config, made.shards.trained),
            reader,
            module.get_input_embeddings().num_embeddings,
            getattr(module.config.get_text_config(), "max_position_embeddings", None),
        )

    def reside(self, owner: str, memory: DeviceMemory) -> "TrainedModel":
        """Account for the memory from now on.

        Raises:
            OutOfDeviceMemory: it is more than the device has.
        """
        self.residence = Residence(owner, memory)
        self.residence.hold("weights", [shard.master for shard in self.shards])
        self.residence.hold("weights", [plain(shard.parameter) for shard in self.shards])
        self.residence.hold("weights", self.module.buffers())
        if self.optimizer is not None:
            self.residence.hold("optimizer", self.optimizer.tensors())
        return self

    @property
    def module(self) -> Any:
        """The module."""
        return self.made.module

    @property
    def shards(self) -> Shards:
        """This rank's parts of its parameters."""
        return self.made.shards

    @property
    def buffers(self) -> Mapping[str, Any]:
        """Its saved buffers."""
        return self.made.buffers

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around passes through the module: afterwards nothing is left of the parameters that were put together, also
        when it ended midway."""
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
        """Ids have to be below the first, and rows of at most the second's tokens; None: the model names no limit."""
        return self.vocab_size, self.max_positions

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def packs(self) -> bool:
        """Whether it keeps packed documents apart."""
        return self.reader.packs

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        """Each micro-batch with what :meth:`Reader.read` says of it, without gradient."""
        with self.computing():
            for micro in micros:
                yield micro, self.reader.read(self.module, micro, temperature, entropy)

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        """Gradients of the loss, and its sums for ``settle``: empty on ranks that another one speaks for."""

        def read(micro: MicroBatch, entropy: bool) -> tuple[Any, ...]:
            return self.reader.read(self.module, micro, temperature, entropy)

        with self.computing():
            sums = accumulate(micros, batch, loss, read, torch.Tensor.backward, self.settings.device)
        return sums if self.shards.grid.speaks else {}

    def reduce_gradients(self) -> list[Any]:
        """Sum the gradients over the ranks; returns this rank's part of them."""
        return self.shards.take_gradients()

    def gradient_norm(self) -> float:
        """Of the whole gradient: the same bits on every rank."""
        return self.shards.gradient_norm(self.ranks)

    def first_bad_gradient(self) -> str:
        """The name of the first parameter whose gradient is not finite, the same on every rank."""
        return self.shards.first_bad_gradient(self.ranks)

    def update(self, version: int, norm: float) -> float:
        """Clip the gradient, whose norm is ``norm``, and take the step after ``version``; return its rate."""
        assert self.optimizer is not None
        return self.optimizer.step(version, norm)

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self.shards.drop_gradients()

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Name and whole tensor of everything, adapters merged. A collective where ranks divide the model.

        Of a model in training all are float32, also what is kept in another precision because it is frozen.
        """
        lora = self.settings.lora
        for shard in self.shards:
            if lora is None:
                yield shard.name, self._told(self._whole(shard))
            elif not is_adapter(shard):
                yield model_name(shard.name), self._told(merge(self.shards, shard, self._whole, lora))
        yield from ((name, self.residence.there(buffer)) for name, buffer in self.buffers.items())

    def _told(self, tensor: Any) -> Any:
        return tensor if self.optimizer is None else tensor.float()

    def _whole(self, shard: ParameterShard) -> Any:
        local = self.residence.there(shard.master)
        divided = shard.sharded or shard.tensor_dim is not None
        return shard.whole(local.to(self.settings.device), self.shards.grid) if divided else local

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of all parameters and saved buffers."""
        shapes = {shard.name: shard.shape for shard in self.shards}
        return shapes | {name: tuple(buffer.shape) for name, buffer in self.buffers.items()}

    @torch.no_grad()
    def write_weights(self, weights: WeightSnapshot) -> None:
        """Take over a verified snapshot."""
        for shard in self.shards:
            self.residence.there(shard.master).copy_(weights.tensor(shard.name)[shard.ranges(self.shards.grid)])
        for name, buffer in self.buffers.items():
            self.residence.there(buffer).copy_(weights.tensor(name))

    # -- states -------------------------------------------------------------------------------------------------------

    def local_state(self) -> dict[str, Any]:
        """``layout``, ``model`` (with adapters, those alone: nothing else of it changes) and ``optimizer`` (None of a
        frozen one): the live tensors."""
        there, moments = self.residence.there, None
        if self.optimizer is not None:
            moments = {
                shard.name: {kind: there(tensor) for kind, tensor in state.items()}
                for shard, state in self.optimizer.state()
            }
        adapted = self.settings.lora is not None
        model = {shard.name: there(shard.master) for shard in (self.shards.trained if adapted else self.shards)}
        model |= {} if adapted else {name: there(buffer) for name, buffer in self.buffers.items()}
        return {"layout": list(self.shards.grid.layout.shape), "model": model, "optimizer": moments}

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        """Copy in what :meth:`local_state` gave.

        Raises:
            WeightSyncError: it is of another model; nothing was changed.
            EngineError: it is of another layout, or exactly one of the two is frozen; nothing was changed.
        """
        restore(self.local_state(), state)
        self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        there = self.residence.there
        for shard in self.shards:
            if shard.master.dtype != shard.parameter.dtype:
                there(plain(shard.parameter)).copy_(there(shard.master))

    def write_checkpoint(self, path: Path, version: int) -> None:
        """Write model, optimizer, version and random state, each rank its part."""
        tensors = checkpoint_tensors(self.made, self.optimizer)
        write_checkpoint(path, self.ranks, self.shards.grid.layout, tensors, version)

    def read_checkpoint(self, path: Path) -> int:
        """Go back to what :meth:`write_checkpoint` wrote, in this layout or another; return the version.

        Raises:
            EngineError: there is no checkpoint, or it is of another model or optimizer.
        """
        tensors = checkpoint_tensors(self.made, self.optimizer)
        version = read_checkpoint(path, self.ranks, self.shards.grid.layout, tensors)
        self._refresh()
        return version

    def release(self) -> None:
        """There is nothing to undo."""


def _source(blueprint: Blueprint, module: Any) -> Source:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(model_name(name))
    wanted = {found[0]: tuple(found) for found in names.values() if ".lora_" not in found[0]}
    return blueprint.source_of(wanted, module.base_model_prefix)


def _check_parallel(module: Any, settings: TrainSettings, grid: Grid) -> None:
    layout = grid.layout
    if layout.context > 1:
        attention.check_sharing(module, layout.context, layout.tensor)
