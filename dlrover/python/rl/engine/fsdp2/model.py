"""What an engine holds while it has tensors: the module, this rank's shards, its optimizer, and where they are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Ragged
from dlrover.python.rl.engine.base import OptimizerConfig, TrainSettings
from dlrover.python.rl.engine.fsdp2.adapters import add_adapters, fresh_adapter, model_name
from dlrover.python.rl.engine.fsdp2.grid import Grid
from dlrover.python.rl.engine.fsdp2.materialize import Making, Materialized, drawn, materialize
from dlrover.python.rl.engine.fsdp2.optimizer import MasterAdamW
from dlrover.python.rl.engine.fsdp2.shards import Shards, plain
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.torch import attention
from dlrover.python.rl.engine.torch.blueprint import Blueprint
from dlrover.python.rl.engine.torch.outputs import Reader
from dlrover.python.rl.engine.torch.residence import Residence
from dlrover.python.rl.engine.torch.sources import place_names

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(eq=False)
class TrainedModel:
    """A materialised model. Made by :meth:`build`; :meth:`reside` accounts for its memory.

    Attributes:
        made: module and shards.
        optimizer: None of a frozen one.
        reader: gets outputs from the module.
        vocab_size: ids must be below.
        max_positions: longest sequence in tokens, or None when the model names no limit.
        has_adapters: whether only adapters are trained.
    """

    made: Materialized
    optimizer: MasterAdamW | None
    reader: Reader
    vocab_size: int
    max_positions: int | None
    has_adapters: bool
    residence: Residence = field(init=False)

    @classmethod
    def build(
        cls,
        blueprint: Blueprint,
        config: OptimizerConfig | None,
        settings: TrainSettings,
        grid: Grid,
        loaded: bool,
    ) -> "TrainedModel":
        """Make the module and, unless ``config`` is None, its optimizer.

        Args:
            blueprint: of the model.
            config: how it is trained.
            settings: how it runs.
            grid: the ranks.
            loaded: whether it gets the blueprint's weights; else zeros.
        """
        module = blueprint.empty()
        _check_parallel(module, settings, grid)
        if settings.lora is not None:
            add_adapters(module, settings.lora)
        if config is None:
            module.requires_grad_(False)
        elif settings.gradient_checkpointing:
            # Transformers recomputes in training mode only; dropout is off, so nothing else changes with the mode.
            trained = module.train()
            enable = getattr(trained, "activation_checkpointing_enable", None) or trained.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        spread = getattr(module.config.get_text_config(), "initializer_range", 0.02)

        def absent(name: str, shape: tuple[int, ...]) -> Any:
            if settings.head == "token" and name.startswith("score."):
                return drawn(name, shape, spread) if name.endswith("weight") else torch.zeros(shape)
            return fresh_adapter(name, shape)

        making = Making(
            settings.device,
            _PRECISIONS[settings.precision],
            prefix=module.base_model_prefix,
            rename=model_name if settings.lora else None,
            absent=absent,
        )
        made = materialize(module, _source(blueprint, module) if loaded else None, grid, making)
        reader = Reader(settings.head, settings.device, attention.can_pack(module), 0, grid.context, made.vocabulary)
        return cls(
            made,
            None if config is None else MasterAdamW(config, made.shards),
            reader,
            module.get_input_embeddings().num_embeddings,
            getattr(module.config.get_text_config(), "max_position_embeddings", None),
            settings.lora is not None,
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

    def check_tokens(self, tokens: Ragged) -> None:
        """Refuse ids outside the vocabulary and rows of more than :attr:`max_positions` tokens.

        Raises:
            EngineError: either is the case.
        """
        ids, longest = tokens.values, int(tokens.lengths.max(initial=0))
        if self.max_positions is not None and longest > self.max_positions:
            raise EngineError(f"a sequence of {longest} tokens does not fit the model's {self.max_positions} positions")
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise EngineError(
                f"token ids from {ids.min()} to {ids.max()}, but the model knows 0 to {self.vocab_size - 1}"
            )


def _source(blueprint: Blueprint, module: Any) -> Any:
    """The files, or the library where it names tensors in another way than they do."""
    source = blueprint.source
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(model_name(name))
    wanted = {found[0]: tuple(found) for found in names.values() if ".lora_" not in found[0]}
    found = place_names(wanted, source.shapes(), module.base_model_prefix)
    lacking = [name for name in wanted if name not in found and not name.startswith("score.")]
    return blueprint.library_source() if lacking else source


def _check_parallel(module: Any, settings: TrainSettings, grid: Grid) -> None:
    layout, name = grid.layout, type(module).__name__
    if layout.context > 1:
        if not attention.can_pack(module):
            raise EngineError(f"{name} mixes tokens by other means than attention: context_parallel_size has to be 1")
        heads = module.config.get_text_config().num_attention_heads
        if (heads // layout.tensor) % layout.context:
            raise EngineError(
                f"context_parallel_size {layout.context} cannot share {heads} attention heads"
                f" over tensor_parallel_size {layout.tensor}"
            )
    if settings.lora is not None and layout.tensor > 1:
        raise EngineError(f"adapters cannot be split: tensor_parallel_size is {layout.tensor}, and has to be 1")
