"""Where a run stands in its data."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import DataError


class PromptCursor:
    """Draws row indices without replacement, epoch after epoch, each epoch shuffled by (seed, epoch).

    The position is one number, the rows drawn so far, so the state is three integers whatever the size of the data. A
    batch that reaches the end of an epoch goes on into the next one: no row is ever dropped. With ``total`` the last
    batch is as short as it has to be, and those after it are empty.

    Args:
        rows: how many rows there are.
        batch_size: indices in each batch; may change between runs that share a state.
        seed: another seed is another order.
        total: how many indices to give in all (``rows`` for one epoch); None: no end. May change between runs too.

    Raises:
        ValueError: ``rows`` or ``batch_size`` is not positive, or ``seed`` or ``total`` is negative.
    """

    def __init__(self, rows: int, batch_size: int, seed: int = 0, total: int | None = None) -> None:
        if rows < 1 or batch_size < 1 or seed < 0:
            raise ValueError(f"need rows >= 1, batch_size >= 1 and seed >= 0, not {rows}, {batch_size} and {seed}")
        if total is not None and total < 0:
            raise ValueError(f"cannot draw {total} rows in all")
        self._rows, self._batch_size, self._seed, self._total = rows, batch_size, seed, total
        self._drawn = 0
        self._order_epoch = 0
        self._order = self._shuffled(0)

    @property
    def epoch(self) -> int:
        """The epoch the next index is drawn from, counted from 0; equally, the number of finished epochs."""
        return self._drawn // self._rows

    def next(self, count: int | None = None) -> list[int]:
        """The next ``count`` row indices, ``batch_size`` by default; fewer, or none, at the end of ``total``."""
        batch: list[int] = []
        wanted = self._batch_size if count is None else count
        if self._total is not None:
            wanted = min(wanted, max(self._total - self._drawn, 0))
        while len(batch) < wanted:
            epoch, position = divmod(self._drawn, self._rows)
            if epoch != self._order_epoch:
                self._order_epoch, self._order = epoch, self._shuffled(epoch)
            taken = self._order[position : position + wanted - len(batch)].tolist()
            batch += taken
            self._drawn += len(taken)
        return batch

    def state_dict(self) -> dict[str, int]:
        """What :meth:`load_state_dict` needs to go on from here; plain integers."""
        return {"rows": self._rows, "seed": self._seed, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the cursor that gave ``state`` stood.

        Raises:
            DataError: the state belongs to data of another size, or to another seed.
        """
        expected = {"rows": self._rows, "seed": self._seed}
        found = {name: state.get(name) for name in expected}
        drawn = state.get("drawn")
        if found != expected or not isinstance(drawn, int) or drawn < 0:
            raise DataError(f"the cursor's state {state} does not fit {expected}: data or seed have changed")
        self._drawn = drawn

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        # RandomState's stream is frozen by numpy's policy; Generator's may change, and with it a resumed run's order.
        bits = np.random.MT19937(np.random.SeedSequence((self._seed, epoch)))
        return np.random.RandomState(bits).permutation(self._rows).astype(np.int64)
