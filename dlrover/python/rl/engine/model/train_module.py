# SPDX-License-Identifier: Apache-2.0
"""Modules of the user that an engine trains: built without weights, sent to each rank, materialised there."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from dlrover.python.rl.common.errors import EngineError

WeightOrigin: TypeAlias = str | Path | Mapping[str, Any] | Callable[[str, tuple[int, ...]], Any]
"""Where weights come from: a folder or hub name; tensors by name, or functions that make them; or one function of a
parameter's name and shape."""


@dataclass(frozen=True)
class CallShare:
    """What a rank gets of the divided arguments of a call."""

    rows: int = 0  # of this replica; 0 for padding, and if nothing was divided
    tokens: int = 0  # in this part, to weight results by
    of: int = 0  # rows of all replicas; 0 if nothing was divided
    sequences: bool = False  # the ranks of a replica divide the sequences of its rows, too


WHOLE = CallShare()
"""Of a call without divided arguments."""


@contextmanager
def empty_weights() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device, whatever their size; their buffers, which are
    small and often computed by the constructor (rotary frequencies), are real.
    """
    plain = torch.nn.Module.register_parameter

    def register(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            parameter._is_hf_initialized = True  # or Transformers draws values for it, which are nowhere
        plain(module, name, parameter)

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = plain


class TrainModule(torch.nn.Module):
    """Makes any module one that an engine can train: mix it in before the module's own class.

    Its public methods can be called through the engine; ``self`` is then the module as a rank has it, with its part of
    the parameters. Compute with ``self(...)``, not ``self.forward(...)``: the parts come together on the way.

    ::

        class Policy(TrainModule, Qwen2ForCausalLM):
            def on_weights_materialized(self):
                self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-5)

            def train_step(self, rows): ...

        module = Policy.from_pretrained("Qwen/Qwen2.5-7B-Instruct")  # only names and shapes
    """

    gradients: ClassVar[Literal["mean", "sum"]] = "mean"
    """What ``loss.backward()`` gives: the ``mean`` over the rows of all ranks, where each rank's loss is the mean over
    its own rows; or the ``sum`` of the ranks' gradients, for losses that carry their normaliser."""

    @classmethod
    def from_pretrained(cls, path: str | Path, **config: Any) -> Any:
        """A Hugging Face model without weights: they are read from ``path`` when the engine is built.

        Args:
            path: folder or hub name.
            config: overrides of the model's configuration.

        Raises:
            EngineError: the class is not a Hugging Face model.
        """
        config_class = getattr(cls, "config_class", None)
        if config_class is None:
            raise EngineError(f"{cls.__name__} is not a Hugging Face model: build it within empty_weights()")
        settings = config_class.from_pretrained(path, **config)
        settings.name_or_path = str(path)
        with torch.device("cpu"), empty_weights():
            return cls(settings)

    @property
    def device(self) -> Any:
        """Where inputs have to be."""
        tensor = next(self.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def materialization_source(self) -> WeightOrigin:
        """Where the weights come from; by default the path given to :meth:`from_pretrained`."""
        source = getattr(getattr(self, "config", None), "name_or_path", "")
        if not source:
            raise EngineError(f"{type(self).__name__} has no weights: define materialization_source()")
        return str(source)

    def on_weights_materialized(self) -> None:
        """Called once on each rank, when the weights are present: make optimizer and schedules here."""

    def source_name(self, name: str) -> str:
        """A parameter's name where the weights come from."""
        return name

    def initial_weight(self, name: str, shape: tuple[int, ...]) -> Any:
        """A parameter that the source of weights lacks, the same on every rank; None if the source must have it."""
        return None

    def export_weight(self, name: str, tensor: Any, whole: Callable[[str], Any]) -> tuple[str, Any] | None:
        """Name and tensor of a parameter in weight sync and saved files; None to leave it out, as merged adapters.

        Args:
            name: in the module.
            tensor: whole, on every rank; read only.
            whole: gives another parameter by its name, whole. A collective: call it on every rank alike.
        """
        return name, tensor


def check_empty(module: Any) -> None:
    """Raise an ``EngineError`` unless it is a :class:`TrainModule` without real parameters. Ties its weights again,
    since ``accelerate.init_empty_weights`` makes a new parameter of each.
    """
    if not isinstance(module, TrainModule):
        raise EngineError(
            f"{type(module).__name__} is not a TrainModule: class Mine(TrainModule, {type(module).__name__})"
        )
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise EngineError(
            f"{type(module).__name__} has weights already ('{real[0]}' and {len(real) - 1} more): build it with"
            " from_pretrained(...) of its own class, or within empty_weights()"
        )
    if hasattr(module, "tie_weights"):
        module.tie_weights()
