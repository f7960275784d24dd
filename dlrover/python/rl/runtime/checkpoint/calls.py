# SPDX-License-Identifier: Apache-2.0
"""The calls of a step as plain values: a commit of them stands for the state after them.

Kept besides the values of ``data/state_tree.py``: dataclasses and enums, as the names of their classes and their
values. So nothing is unpickled: whoever can write a commit can choose values, but no code.
"""

import dataclasses
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import ConfigError, DataError, ResultLost
from dlrover.python.rl.data.state_tree import MAX_DEPTH

_DATACLASS, _ENUM = "dataclass", "enum"
_OURS = "dlrover.python.rl."


@dataclass(eq=False)
class RecordedCall:
    """``arguments`` is as :func:`to_plain` made it, the positional and the keyword ones; ``raised``: it ended in an
    error, which the trainer has handled."""

    method: str
    arguments: Any
    raised: bool = False

    @classmethod
    def of(cls, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "RecordedCall":
        """Before the call, which may change its arguments. Raises DataError for those that have no plain form."""
        return cls(method, to_plain([list(args), dict(kwargs)]))

    def load(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments. Raises DataError."""
        args, kwargs = from_plain(self.arguments)
        return args, kwargs

    def dump(self) -> list[Any]:
        return [self.method, self.arguments, self.raised]


def to_plain(value: Any, depth: int = 0) -> Any:
    """``value`` with each dataclass and enum as a dict whose one key is a tuple, and with copies of what may change."""
    if depth > MAX_DEPTH:
        raise _unsaved(f"nested more than {MAX_DEPTH} levels deep, or it contains itself")
    if isinstance(value, Enum):
        return {(_ENUM, _class_name(type(value))): value.name}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, depth + 1) for item in value)
    if isinstance(value, dict):
        if type(value) is not dict or any(isinstance(key, tuple) for key in value):
            raise _unsaved(f"a {type(value).__name__} with keys that are not plain")
        return {key: to_plain(item, depth + 1) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if fields.keys() != getattr(value, "__dict__", fields).keys():
            raise _unsaved(f"a {type(value).__name__} with more than its fields")
        return {(_DATACLASS, _class_name(type(value))): to_plain(fields, depth + 1)}
    return _leaf(value)


def _leaf(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else value
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.requires_grad:
            raise _unsaved("a tensor that is on a device, or has a gradient")
        return value.clone()
    if value is not None and not isinstance(value, str | int | float | bytes | np.generic):
        raise _unsaved(f"a {type(value).__name__}")
    return value


def from_plain(value: Any) -> Any:
    """The inverse of :func:`to_plain`; raises DataError if a class is not there, or is not what was written."""
    if isinstance(value, list | tuple):
        return type(value)(from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    key = next(iter(value), None)
    if not isinstance(key, tuple):
        return {name: from_plain(item) for name, item in value.items()}
    kind, name = key
    found = _find_class(name)
    if kind == _ENUM and issubclass(found, Enum):
        return found[value[key]]
    if kind != _DATACLASS or not dataclasses.is_dataclass(found):
        raise _unsaved(f"{name} is not a {kind}")
    fields = from_plain(value[key])
    if fields.keys() != {field.name for field in dataclasses.fields(found)}:
        raise _unsaved(f"{name} has other fields now")
    loaded = object.__new__(found)  # as it was, whatever its constructor would make of the fields
    for field_name, field in fields.items():
        object.__setattr__(loaded, field_name, field)
    return loaded


def _class_name(found: type[Any]) -> str:
    name = f"{found.__module__}:{found.__qualname__}"
    if found.__module__ == "__main__" or _find_class(name) is not found:
        raise _unsaved(f"a {found.__qualname__}, which other processes cannot import")
    return name


def _find_class(name: str) -> type[Any]:
    """A class of a module that is imported, or of ours. Raises DataError."""
    module, _, path = name.partition(":")
    if module.startswith(_OURS) and module not in sys.modules:
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise _unsaved(f"there is no class {name}")
    return found


def _unsaved(what: str) -> DataError:
    return DataError([ConfigError("calls", what)])


class CallRecord:
    """A member's calls that may change its state, by step, up to the commit of each."""

    def __init__(self) -> None:
        self._steps: dict[int, list[RecordedCall]] = {}
        self._unrecorded: set[int] = set()  # steps with a call that has no plain form

    @contextmanager
    def recording(self, step: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """A call of ``step``, which runs inside."""
        try:
            call = RecordedCall.of(method, args, kwargs)
        except DataError:
            self._unrecorded.add(step)
            yield
            return
        self._steps.setdefault(step, []).append(call)
        try:
            yield
        except ResultLost:  # an argument's value: it has not run
            self._steps[step].remove(call)
            raise
        except (Exception, SystemExit):
            call.raised = True
            raise

    def calls_of(self, step: int) -> list[list[Any]] | None:
        """Those of ``step``, to be written; None if one of them cannot be."""
        return None if step in self._unrecorded else [call.dump() for call in self._steps.get(step, ())]

    def forget(self, up_to: int | None = None) -> None:
        """The calls of the steps ``up_to`` one, or of all, will not be asked for."""
        self._steps = {step: calls for step, calls in self._steps.items() if up_to is not None and step > up_to}
        self._unrecorded = {step for step in self._unrecorded if up_to is not None and step > up_to}


def load_calls(tree: Any) -> list[RecordedCall]:
    """The calls in a file of them; raises DataError."""
    try:
        calls = [RecordedCall(method, arguments, raised) for method, arguments, raised in tree["calls"]]
        for call in calls:
            call.load()
    except (TypeError, KeyError, ValueError, AttributeError, ImportError) as error:
        raise DataError([ConfigError("calls", f"not calls: {error}")]) from error
    return calls
