"""What a train engine holds while it has tensors: the part that each backend does in its own way."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import TokenLoss
from dlrover.python.rl.engine.torch.packing import MicroBatch
from dlrover.python.rl.engine.torch.residence import Residence
from dlrover.python.rl.engine.weights import WeightSnapshot


class TrainBackend(Protocol):
    """This rank's part of a model and, unless it is frozen, of its optimizer. All ranks call every method together."""

    residence: Residence
    """Its tensors, accounted for."""

    @property
    def packs(self) -> bool:
        """Whether it keeps packed documents apart."""
        ...

    @property
    def limits(self) -> tuple[int, int | None]:
        """Ids have to be below the first, and rows of at most the second's tokens; None: the model names no limit."""
        ...

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        """Each micro-batch with what :func:`~dlrover.python.rl.engine.torch.evaluation.gathered` takes, without
        gradient.

        Raises:
            EngineError: the backend cannot tell likely ids.
        """
        ...

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        """Gradients of the loss, and its sums for ``settle``: empty on ranks that another one speaks for."""
        ...

    def reduce_gradients(self) -> list[Any]:
        """Sum the gradients over the ranks; returns this rank's part of them."""
        ...

    def gradient_norm(self) -> float:
        """Of the whole gradient: the same bits on every rank."""
        ...

    def first_bad_gradient(self) -> str:
        """The name of the first parameter whose gradient is not finite, the same on every rank."""
        ...

    def update(self, version: int, norm: float) -> float:
        """Clip the gradient, whose norm is ``norm``, and take the step after ``version``; return its rate."""
        ...

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """As :meth:`~dlrover.python.rl.engine.base.TrainEngine.named_weights`."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of what :meth:`named_weights` gives."""
        ...

    def write_weights(self, weights: WeightSnapshot) -> None:
        """Take over a verified snapshot."""
        ...

    def local_state(self) -> dict[str, Any]:
        """``layout``, ``model`` and ``optimizer`` (None of a frozen one): the live tensors."""
        ...

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        """Copy in what :meth:`local_state` gave.

        Raises:
            WeightSyncError: it is of another model; nothing was changed.
            EngineError: it is of another layout, or exactly one of the two is frozen; nothing was changed.
        """
        ...

    def write_checkpoint(self, path: Path, version: int) -> None:
        """Write all of it to the folder ``path``, each rank its part, whole or not at all."""
        ...

    def read_checkpoint(self, path: Path) -> int:
        """Go back to what :meth:`write_checkpoint` wrote; return the version.

        Raises:
            EngineError: there is no checkpoint, or it does not fit.
        """
        ...

    def release(self) -> None:
        """Undo what it has done to others; it is not used any more, and its tensors are emptied next."""
        ...
