"""What the object in an engine's process is: the verbs of the engine, and apart from them the user's methods."""

from typing import Any, Protocol

VERB = "engine."
"""Stands before the names of an engine's verbs: no method of a user's can be called so."""


class Seat(Protocol):
    """What a process of an engine holds."""

    engine: Any
    """The engine; it has those of the verbs that the seat has not."""

    def users_method(self, name: str) -> Any:
        """What a name stands for that is no verb."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Hosted:
    """The object in a process of an engine: ``"engine.cpu"`` is the verb ``cpu``, ``"train_step"`` the user's method,
    whatever its name. Only ``close`` belongs to the process.

    Args:
        seat: what it holds.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not name.startswith(VERB):
            return self._seat.users_method(name)
        verb = name.removeprefix(VERB)
        return getattr(self._seat if hasattr(self._seat, verb) else self._seat.engine, verb)

    def close(self) -> None:
        """Give back what it holds."""
        self._seat.close()
