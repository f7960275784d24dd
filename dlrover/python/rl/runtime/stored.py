"""Values as an object store keeps them."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from dlrover.python.rl.trainer.shard import row_count


@dataclass(frozen=True)
class Stored:
    """A serialised value: every reader gets a copy, large buffers are shared read-only."""

    data: bytes
    buffers: tuple[memoryview, ...]
    rows: int | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.data, tuple(map(pickle.PickleBuffer, self.buffers)), self.rows)

    @classmethod
    def of(cls, value: Any, own: bool = False) -> "Stored":
        """Serialise ``value``, once.

        Args:
            value: any value that can be pickled.
            own: copy large buffers as well, so that what the owner of ``value`` does to it later changes nothing here.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        views = [memoryview(buffer.raw()).toreadonly() for buffer in buffers]
        return cls(data, tuple(memoryview(bytes(view)) if own else view for view in views), row_count(value))

    def load(self) -> Any:
        """A copy of the value."""
        return pickle.loads(self.data, buffers=self.buffers)


def _received(data: bytes, buffers: Sequence[Any], rows: int | None) -> Stored:
    return Stored(data, tuple(memoryview(buffer).toreadonly() for buffer in buffers), rows)
