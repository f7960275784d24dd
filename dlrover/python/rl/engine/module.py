"""Modules of the user's own that an engine trains: built without weights, sent to each rank, materialised there."""

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
class Share:
    """What a rank gets of those arguments of a call that are divided.

    Attributes:
        rows: its replica's own; 0 for padding, and where nothing was divided.
        tokens: in its part, to weight results by.
        of: rows of all replicas; 0 where nothing was divided.
        sequences: whether the ranks of a replica divide its rows' sequences, too.
    """

    rows: int = 0
    tokens: int = 0
    of: int = 0
    sequences: bool = False


WHOLE = Share()
"""Nothing was divided."""


@contextmanager
def empty_weights() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device, whatever their size; their buffers, which are
    small and often computed by the constructor (rotary frequencies), are real."""
    plain = torch.nn.Module.register_parameter

    def register(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
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

        module = Policy.from_pretrained("Qwen/Qwen2.5-7B-Instruct")  # nothing but names and shapes
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
            EngineError: the class is no Hugging Face model.
        """
        config_class = getattr(cls, "config_class", None)
        if config_class is None:
            raise EngineError(f"{cls.__name__} is no Hugging Face model: build it within empty_weights()")
        settings = config_class.from_pretrained(path, **config)
        settings.name_or_path = str(path)
        with torch.device("cpu"), empty_weights():
            return cls(settings)

    @property
    def device(self) -> Any:
        """Where the rank's part of the module is: where inputs have to be."""
        tensor = next(self.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    # -- hooks --------------------------------------------------------------------------------------------------------

    def materialization_source(self) -> WeightOrigin:
        """Where the weights come from; by default where :meth:`from_pretrained` was told.

        Raises:
            EngineError: that was not called.
        """
        source = getattr(getattr(self, "config", None), "name_or_path", "")
        if not source:
            raise EngineError(f"{type(self).__name__} has no weights: define materialization_source()")
        return str(source)

    def on_weights_materialized(self) -> None:
        """Called once on each rank, when the weights are there: make optimizer and schedules here. A module that is not
        trained needs none."""

    def source_name(self, name: str) -> str:
        """The name that a parameter has where the weights come from."""
        return name

    def initial_weight(self, name: str, shape: tuple[int, ...]) -> Any:
        """The tensor of a parameter that is not where the weights come from, the same on every rank; None if it has to
        be there."""
        return None

    def export_weight(self, name: str, tensor: Any, whole: Callable[[str], Any]) -> tuple[str, Any] | None:
        """What a parameter is outside: in weight sync and in saved files.

        Args:
            name: in the module.
            tensor: all of it, to read; every rank has it.
            whole: gives all of another parameter by its name. A collective: call it on every rank alike.

        Returns:
            Name and tensor; None for what stays here, such as adapters that were merged into another one.
        """
        return name, tensor


def check_empty(module: Any) -> None:
    """Refuse a module that is not meant to be sent to ranks; tie again what belongs together in it, since contexts that
    keep parameters without memory (``accelerate.init_empty_weights``) make a new one of each.

    Raises:
        EngineError: it is no :class:`TrainModule`, or has real parameters.
    """
    if not isinstance(module, TrainModule):
        raise EngineError(
            f"{type(module).__name__} is no TrainModule: class Mine(TrainModule, {type(module).__name__})"
        )
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise EngineError(
            f"{type(module).__name__} has weights already ('{real[0]}' and {len(real) - 1} more): build it with"
            " from_pretrained(...) of its own class, or within empty_weights()"
        )
    if hasattr(module, "tie_weights"):
        module.tie_weights()
