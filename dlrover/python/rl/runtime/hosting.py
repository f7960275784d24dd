"""Processes that a script drives by hand: each holds one object, whose methods are called through a port.

A *crew* is the processes of one engine, in rank order. They belong to the script: they end with it.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.loading import load_class
from dlrover.python.rl.trainer.port import Port


@dataclass(frozen=True)
class Device:
    """A place for one process of an engine.

    Attributes:
        node: id of its node.
        address: of the node.
        kind: ``"cuda"``, or ``"cpu"`` for a logical one on a machine without accelerators.
        name: what the node's driver calls it (``"0"``), ``""`` for a logical one.
    """

    node: str
    address: str
    kind: Literal["cuda", "cpu"] = "cpu"
    name: str = ""


class Hosting(Protocol):
    """Where the engines of a script run."""

    @property
    def devices(self) -> Sequence[Device]:
        """All that the script has; they are known by their position."""
        ...

    @property
    def port(self) -> Port:
        """Through which the objects are called: the crew's name is the role."""
        ...

    @property
    def separate(self) -> bool:
        """Whether each seat is a process of its own."""
        ...

    def start(self, crew: str, seats: Sequence[Sequence[int]], where: str) -> list[Process]:
        """Start a process for each seat and make its object.

        Args:
            crew: name of the engine; upper-case letters, digits and ``_``.
            seats: for each rank the devices it gets, all on one node.
            where: the object's class, ``package.module:Class``; it is made without arguments and has ``close()``.

        Raises:
            WorkloadStartError: a process did not come up in time, or its object could not be made. None is left.
        """
        ...

    def end(self, crew: str) -> None:
        """Let the objects close, and end the processes. One that is busy or dead is not waited for long."""
        ...

    def forget(self, job: str, run: str) -> None:
        """Remove what a run of ``job`` has left in the memory of the nodes, as
        :func:`~dlrover.python.rl.runtime.node_memory.forget_memory` does; a node that does not answer keeps it."""
        ...

    def close(self) -> None:
        """End everything and give the devices back."""
        ...


def class_at(where: str, search_path: Sequence[str] = ()) -> Any:
    """The class at ``package.module:Class``.

    Raises:
        ClassNotFound: there is none.
    """
    module, _, name = where.partition(":")
    return load_class(module, name, search_path)


def own_search_path() -> list[str]:
    """Where this process finds modules: what its processes need to find the user's."""
    return [os.path.abspath(folder or ".") for folder in sys.path]
