"""Events as journal lines: one JSON object each, with a checksum."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from dlrover.python.rl.common.errors import JournalCorrupt
from dlrover.python.rl.control.events import EVENT_TYPES, Cause, CauseKind, Event, Failed

VERSION = 1
"""Version of the line format."""

_BY_NAME = {kind.__name__: kind for kind in EVENT_TYPES}


def encode(event: Event) -> bytes:
    """One line, without its newline: ``<crc32 as 8 hex digits> <json>``."""
    body = json.dumps({"v": VERSION, "event": type(event).__name__, **asdict(event)}, sort_keys=True).encode()
    return b"%08x %s" % (zlib.crc32(body), body)


def decode(lines: Iterable[bytes]) -> list[Event]:
    """Read lines back.

    Raises:
        JournalCorrupt: a line fails its checksum, or holds no event of this version; names the line.
    """
    return [_decode_line(number, line) for number, line in enumerate(lines, 1)]


def _decode_line(number: int, line: bytes) -> Event:
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        raise JournalCorrupt(f"journal line {number} does not match its checksum")
    try:
        return _event(json.loads(body))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise JournalCorrupt(f"journal line {number} holds no event of format {VERSION}: {error}") from error


def _event(fields: dict[str, Any]) -> Event:
    version, name = fields.pop("v", None), fields.pop("event", None)
    if version != VERSION or name not in _BY_NAME:
        raise ValueError(f"it is {name!r} of format {version!r}")
    kind = _BY_NAME[name]
    if kind is Failed:
        cause = fields["cause"]
        fields["cause"] = Cause(**{**cause, "kind": CauseKind(cause["kind"])})
    event: Event = kind(**fields)
    return event
