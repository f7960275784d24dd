# SPDX-License-Identifier: Apache-2.0
"""Users' modules that an engine trains: built without weights, sent to each rank, materialised there."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from dlrover.python.rl.common.errors import EngineError

WeightOrigin: TypeAlias = str | Path | Mapping[str, Any] | Callable[[str, tuple[int, ...]], Any]
"""A source of weights: a folder or hub name; tensors by name, or functions that make them; or one function of a
parameter's name and shape."""


@dataclass(frozen=True)
class CallShare:
    """A rank's part of the divided arguments of a call."""

    rows: int = 0  # of this replica; 0 for padding, and if nothing was divided
    tokens: int = 0  # in this part; the weight of its results
    of: int = 0  # rows of all replicas; 0 if nothing was divided
    sequences: bool = False  # the ranks of a replica divide the sequences of its rows, too


WHOLE = CallShare()
"""The share of a call without divided arguments."""


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build modules with their parameters on the meta device, whatever their size; their buffers, which are small and
    often computed by the constructor (rotary frequencies), are real."""
    plain = torch.nn.Module.register_parameter

    def register(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            parameter._is_hf_initialized = True  # else Transformers initialises it
        plain(module, name, parameter)

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = plain


class TrainModule(torch.nn.Module):
    """Lets an engine train any module: mix it in before the module's own class.

    Its public methods can be called through the engine; ``self`` is then the module on a rank, with its part of the
    parameters. Compute with ``self(...)``, which gathers the parts, not ``self.forward(...)``.

    ::

        class Policy(TrainModule, Qwen2ForCausalLM):
            def on_weights_materialized(self):
                self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-5)

            def train_step(self, rows): ...

        module = Policy.from_pretrained("Qwen/Qwen2.5-7B-Instruct")  # only names and shapes
    """

    gradients: ClassVar[Literal["mean", "sum"]] = "mean"
    """Result of ``loss.backward()``: the ``mean`` over the rows of all ranks, where each rank's loss is the mean over
    its own rows; or the ``sum`` of the ranks' gradients, for losses that carry their normaliser."""

    @classmethod
    def from_pretrained(cls, path: str | Path, **config: Any) -> Any:
        """Build a Hugging Face model without weights: they are read from ``path``, a folder or hub name, when the
        engine is built. ``config`` overrides the model's configuration."""
        config_class = getattr(cls, "config_class", None)
        if config_class is None:
            raise EngineError(f"{cls.__name__} is not a Hugging Face model: build it within empty_weights()")
        settings = config_class.from_pretrained(path, **config)
        settings.name_or_path = str(path)
        with torch.device("cpu"), empty_weights():
            return cls(settings)

    @property
    def device(self) -> Any:
        """The device for inputs."""
        tensor = next(self.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def materialization_source(self) -> WeightOrigin:
        """Return the source of the weights; by default the path given to :meth:`from_pretrained`."""
        source = getattr(getattr(self, "config", None), "name_or_path", "")
        if not source:
            raise EngineError(f"{type(self).__name__} has no weights: define materialization_source()")
        return str(source)

    def on_weights_materialized(self) -> None:
        """Make optimizer and schedules here: called once on each rank, when the weights are present."""

    def source_name(self, name: str) -> str:
        """Return a parameter's name in the source of the weights."""
        return name

    def initial_weight(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return a parameter that the source may lack, the same on every rank; None if the source must have it."""
        return None

    def export_weight(self, name: str, tensor: Any, whole: Callable[[str], Any]) -> tuple[str, Any] | None:
        """Return the name and tensor of a parameter in weight sync and saved files; None leaves it out, such as merged
        adapters. ``tensor`` is whole and read-only; ``whole(name)`` returns another whole parameter, a collective: call
        it on every rank alike."""
        return name, tensor


def check_empty(module: Any) -> None:
    """Raise an ``EngineError`` unless it is a :class:`TrainModule` without real parameters. Ties its weights again,
    since ``accelerate.init_empty_weights`` separates them."""
    if not isinstance(module, TrainModule):
        raise EngineError(
            f"{type(module).__name__} is not a TrainModule: class Mine(TrainModule, {type(module).__name__})"
        )
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise EngineError(
            f"{type(module).__name__} has weights already ('{real[0]}' and {len(real) - 1} more): build it with"
            f" {type(module).__name__}.from_pretrained(...), or within empty_weights()"
        )
    if hasattr(module, "tie_weights"):
        module.tie_weights()
