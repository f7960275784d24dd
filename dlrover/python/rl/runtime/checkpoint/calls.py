# SPDX-License-Identifier: Apache-2.0
"""The calls of a step as plain values: a commit of them stands for the state after them.

Kept besides the values of ``data/state_tree.py``: dataclasses and enums, as the names of their classes and their
values. Nothing is unpickled: a writer of commits can choose values and methods of the workload, but cannot add code.
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
    """``arguments`` is as :func:`to_plain` made it, the positional and the keyword ones."""

    method: str
    arguments: Any

    @classmethod
    def of(cls, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "RecordedCall":
        """Before the call, which may change its arguments. Raises DataError for those that have no plain form."""
        return cls(method, to_plain([list(args), dict(kwargs)]))

    def load(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments. Raises DataError."""
        args, kwargs = from_plain(self.arguments)
        return args, kwargs

    def dump(self) -> list[Any]:
        return [self.method, self.arguments]


def to_plain(value: Any, depth: int = 0) -> Any:
    """``value`` with each dataclass and enum as a dict whose one key is a tuple, and with copies of what may change."""
    if depth > MAX_DEPTH:
        raise _unsaved(f"nested more than {MAX_DEPTH} levels deep, or it contains itself")
    if isinstance(value, Enum):
        if value.name not in type(value).__members__:
            raise _unsaved(f"a {type(value).__name__} without a name")
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
        if not value.flags.c_contiguous:
            raise _unsaved("an array in another order: sums over it may have other last bits")
        return value.copy() if value.flags.writeable else value
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.requires_grad or not value.is_contiguous():
            raise _unsaved("a tensor that is on a device, has a gradient, or is in another order")
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


_known_modules: set[str] = set()
"""Those that are imported where a workload of this kind has been made: another process has them, too."""


def note_modules() -> None:
    """The workload of this process is made. What is imported later may come with the arguments of a call."""
    _known_modules.update(sys.modules)


def _class_name(found: type[Any]) -> str:
    module, name = found.__module__, f"{found.__module__}:{found.__qualname__}"
    is_elsewhere = module != "__main__" and (module in _known_modules or module.startswith(_OURS))
    if not is_elsewhere or _find_class(name) is not found:
        raise _unsaved(f"a {found.__qualname__}, which other processes may not have")
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
        self._written: dict[int, int] = {}  # how many calls of a step its commit has
        self._unrecorded: set[int] = set()  # steps with a call that cannot be repeated

    @contextmanager
    def recording(self, step: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """A call of ``step``, which runs inside. Whether an error would come again is unknown."""
        call = None
        try:
            call = RecordedCall.of(method, args, kwargs)
        except Exception:  # noqa: BLE001 -- a property of the user's may raise anything
            self._leave_out(step)
        else:
            self._steps.setdefault(step, []).append(call)
        try:
            yield
        except ResultLost:  # an argument's value: it has not run
            if call is not None:
                self._steps[step].remove(call)
            raise
        except (Exception, SystemExit):
            self._leave_out(step)
            raise

    def _leave_out(self, step: int) -> None:
        self._unrecorded |= {step, step + 1} if step in self._written else {step}

    def calls_of(self, step: int) -> list[list[Any]] | None:
        """Those of ``step``, to be written; None if one of them cannot be."""
        calls = self._steps.get(step, [])
        self._written[step] = len(calls)
        return None if step in self._unrecorded else [call.dump() for call in calls]

    def settle(self, step: int) -> None:
        """``step`` is committed. Calls that came after its commit are part of the next one's."""
        late = self._steps.get(step, [])[self._written.get(step, 0) :]
        self._steps = {other: calls for other, calls in self._steps.items() if other > step}
        if late:
            self._steps[step + 1] = [*late, *self._steps.get(step + 1, [])]
        self._written = {other: count for other, count in self._written.items() if other > step}
        self._unrecorded = {other for other in self._unrecorded if other > step}


def load_calls(tree: Any) -> list[RecordedCall]:
    """The calls in a file of them. Raises DataError: it is none, or a class is not there."""
    try:
        calls = [RecordedCall(method, arguments) for method, arguments in tree["calls"]]
        for call in calls:
            call.load()
    except (TypeError, KeyError, ValueError, AttributeError, ImportError) as error:
        raise DataError([ConfigError("calls", f"not calls: {error}")]) from error
    return calls
