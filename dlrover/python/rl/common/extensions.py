# SPDX-License-Identifier: Apache-2.0
"""The names by which a job file chooses a class or a function.

A name is ``package.module:Attribute``, a built-in name, or an entry point of an installed package::

    [project.entry-points."dlrover_rl.train_engines"]
    mine = "my_package.engine:MyTrainEngine"
"""

import importlib
import pkgutil
import sys
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from dlrover.python.rl.common.errors import ClassNotFound, LibraryMissing
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import hint, nearest

_LOG = get_logger(__name__)

ROLES_ELSEWHERE: ContextVar[frozenset[str]] = ContextVar("roles of other interpreters", default=frozenset())
"""Roles of the inspected job that another interpreter runs, which has packages that this one may lack."""


def runs_elsewhere(role: str) -> bool:
    return role.upper() in ROLES_ELSEWHERE.get()


@dataclass(frozen=True)
class ExtensionPoint:
    noun: str  # "train engine", for messages
    group: str  # of entry points: "dlrover_rl.train_engines"
    builtin: Mapping[str, str]  # name to "package.module:Attribute"
    moved: Mapping[str, str] = field(default_factory=dict)  # place in earlier versions to the current name

    def places(self) -> dict[str, str]:
        """Return ``package.module:Attribute`` by name; a built-in name overrides an entry point of the same name."""
        registered = {point.name: point.value for point in entry_points(group=self.group)}
        return {**registered, **self.builtin}

    def current(self, name: str) -> str:
        """Return the current name of ``name``, with a warning if it has changed."""
        if name in self.moved:
            _LOG.warning("the %s '%s' is now called '%s'", self.noun, name, self.moved[name])
        return self.moved.get(name, name)

    def place(self, name: str) -> str:
        """Return the ``package.module:Attribute`` of ``name`` without importing it; raises ClassNotFound."""
        name = self.current(name)
        if ":" in name:
            return name
        place = self.builtin.get(name) or self.places().get(name)
        if place is None:
            raise ClassNotFound(self.describe_unknown(name, self.places()))
        return place

    def describe_unknown(self, name: str, names: Collection[str]) -> str:
        """Return the message about an unknown ``name``, with the nearest of ``names``."""
        module, dot, attribute = name.rpartition(".")
        near = nearest(name, names) or (f"{module}:{attribute}" if dot else "")
        message = f"no {self.noun} is called '{name}'" + (f"; did you mean '{near}'?" if near else "")
        return f"{message}; there are {', '.join(sorted(names))}, or give 'package.module:Name'"

    def load(self, name: str) -> Any:
        return load_object(self.place(name))


def load_object(place: str) -> Any:
    """Import ``package.module:Attribute``, or a nested ``package.module:Outer.Inner``; raises ClassNotFound."""
    module, _, path = place.partition(":")
    if not (module and path):
        raise ClassNotFound(f"'{place}' is not of the form 'package.module:Name'")
    value: Any = load_module(module)
    for part in path.split("."):
        if not hasattr(value, part):
            members = [key for key, member in vars(value).items() if callable(member) and not key.startswith("_")]
            raise ClassNotFound(f"module '{module}' has no '{path}'{hint(part, members)}")
        value = getattr(value, part)
    return value


def load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except LibraryMissing as error:
        raise ClassNotFound(str(error)) from error
    except ModuleNotFoundError as error:
        missing = error.name or name
        package, _, last = missing.rpartition(".")
        more = ""
        if name == missing or name.startswith(f"{missing}."):
            paths = getattr(importlib.import_module(package), "__path__", []) if package else None
            names = {module.name for module in pkgutil.iter_modules(paths)}
            if not package:  # namespace packages are not listed, but they may be loaded
                names |= {name for name in sys.modules if "." not in name}
            if close := nearest(last, sorted(names)):
                more = f"; did you mean '{f'{package}.' if package else ''}{close}'?"
        raise ClassNotFound(f"module '{name}' cannot be imported: no module named '{missing}'{more}") from error
    except (Exception, SystemExit) as error:
        raise ClassNotFound(f"module '{name}' cannot be imported: {type(error).__name__}: {error}") from error
