# SPDX-License-Identifier: Apache-2.0
"""Events as journal lines: one JSON object each, with its time and a checksum."""

import json
import types
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from dlrover.python.rl.common.errors import JournalCorrupt
from dlrover.python.rl.control.events import Event

VERSION = 2

Reader = Callable[[Any], Any]

_BY_NAME: dict[str, Any] = {kind.__name__: kind for kind in Event.__subclasses__()}


def encode(at_s: float, event: Event) -> bytes:
    """Return ``<crc32 as 8 hex digits> <json>``, without newline. Raises ValueError for numbers that are not finite."""

    def plain(value: Any) -> dict[str, Any]:
        return dict(value) if isinstance(value, Mapping) else vars(value)

    content = {"v": VERSION, "at_s": at_s, "event": type(event).__name__, **vars(event)}
    body = json.dumps(content, sort_keys=True, allow_nan=False, default=plain).encode()
    return b"%08x %s" % (zlib.crc32(body), body)


def decode(lines: Iterable[bytes]) -> list[tuple[float, Event]]:
    """Return each event with its time in seconds. Raises JournalCorrupt, which names the line that fails its checksum
    or holds no event of this version."""
    events = []
    for number, line in enumerate(lines, 1):
        checksum, _, body = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(body):
            raise JournalCorrupt(f"journal line {number} does not match its checksum")
        try:
            content = json.loads(body)
            version, name, at_s = content.pop("v", None), content.pop("event", None), content.pop("at_s", None)
            if version != VERSION:
                raise ValueError(f"it is of format {version!r}")
            event: Event = _reader(_BY_NAME[name])(content)
            events.append((_reader(float)(at_s), event))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise JournalCorrupt(f"journal line {number} holds no event of format {VERSION}: {error}") from error
    return events


@cache
def _reader(hint: Any) -> Reader:
    """Return a function that turns JSON into a value of type ``hint``; it raises ValueError for anything else."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kind = _reader(next(argument for argument in arguments if argument is not type(None)))
        return lambda value: None if value is None else kind(value)
    if origin is not None and issubclass(origin, Mapping):
        item = _reader(arguments[1])
        return lambda value: {key: item(content) for key, content in value.items()}
    if is_dataclass(hint):
        return _record(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    allowed: tuple[type, ...] = (float, int) if hint is float else (hint,)

    def read_scalar(value: Any) -> Any:
        if not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool):
            raise ValueError(f"{value!r} is not of type {hint.__name__}")
        return hint(value)

    return read_scalar


def _record(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = {item.name: _reader(hints[item.name]) for item in fields(kind)}
    required = {item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING}

    def read(content: Any) -> Any:
        missing = required - content.keys()
        if missing:
            raise ValueError(f"{kind.__name__} lacks {', '.join(sorted(missing))}")
        return kind(**{name: readers[name](value) for name, value in content.items()})

    return read
