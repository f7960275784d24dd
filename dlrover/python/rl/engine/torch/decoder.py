"""The port between the engine's loop and a model's forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.engine.torch.store import WeightStore

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Prefix:
    """What is left of tokens that a model has read.

    Attributes:
        length: how many.
        past: their keys and values, as the decoder that made it keeps them.
        logits: ``[vocab]``: of the token after them.
    """

    length: int
    past: Any
    logits: Any


class Decoder(Protocol):
    """A model with a key-value cache of rows 0, 1, 2, ...; each holds the past of one sequence.

    Attributes:
        store: the model's weights; :meth:`bind` is called when they have moved.
        capacity: tokens that a row has room for.
    """

    store: WeightStore
    capacity: int

    def bind(self) -> None:
        """Compute with the weights where they are now."""
        ...

    def fit(self, rows: int, length: int) -> int:
        """Make an empty cache for sequences of up to ``length`` tokens.

        Returns:
            How many rows it has: ``rows``, or what there is room for.

        Raises:
            OutOfDeviceMemory: there is no room for a single one.
        """
        ...

    def clear(self) -> None:
        """Release the cache."""
        ...

    def prefill(self, sequences: Sequence[Ids]) -> list[Prefix]:
        """Read whole sequences of up to ``capacity`` tokens, beside the cache; what comes back has no padding."""
        ...

    def seat(self, prefixes: Sequence[Prefix]) -> None:
        """Add a row with each, in order."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Row ``i`` becomes what ``rows[i]`` was, and those beyond are free."""
        ...

    def step(self, tokens: Any) -> Any:
        """Read a token more in each row: int64 ``[rows]`` to the logits of the next, ``[rows, vocab]``."""
        ...
