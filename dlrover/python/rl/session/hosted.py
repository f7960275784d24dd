"""What the object in an engine's process is: the engine's own verbs, and apart from them the user's methods."""

from typing import Any

VERB = "engine."
"""Stands before the names of an engine's own verbs: no method of a user's can be called so."""


class Hosted:
    """The object in a process of an engine: ``"engine.cpu"`` is its method ``cpu``, ``"train_step"`` the user's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(VERB):
            return getattr(self, name.removeprefix(VERB))
        if name.startswith("_"):
            raise AttributeError(name)
        return self.users_method(name)

    def users_method(self, name: str) -> Any:
        """What a name stands for that is none of the engine's verbs."""
        raise AttributeError(f"an engine of this kind has no method '{name}'")
