# SPDX-License-Identifier: Apache-2.0
"""The events and logs of a run as one stream in time."""

import base64
import binascii
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import CallError, InvalidJob
from dlrover.python.rl.common.log import inert
from dlrover.python.rl.common.names import hint, log_name
from dlrover.python.rl.common.private_files import with_real_parent
from dlrover.python.rl.runtime.run.files import LogReader, RunFolder

Entry = dict[str, Any]

_CLOCK = re.compile(r"(?:\[[^ ]+\] )?(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d:\d\d)(?: ([DIWEC]) |[ ,.])")
_BEGAN = re.compile(r"^--- .*, (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)$")
_DAY_S = 86_400.0
_TAIL_LINES, _LEAST_TAIL = 20_000, 50  # of all processes, and of each


def read_stream(
    folder: Path, entries: Sequence[tuple[float, str, str]], after: str, process: str, limit: int, search: str = ""
) -> Entry:
    """Return up to ``limit`` new entries of the journal (``entries``) and the logs since the cursor ``after``, oldest
    first, and the next cursor; the last ones if it is empty. Raises CallError for a damaged cursor."""
    files = RunFolder(with_real_parent(folder.absolute()))
    cursor, names, process = _decode(after), _processes(files), log_name(process)
    if process and process not in names:
        near = hint(process, names) or ": a run in one process writes none, or it has only begun"
        raise CallError(f"'{process}' has no log{near}")
    reader = LogReader(files, process, tail=max(_TAIL_LINES // max(len(names), 1), _LEAST_TAIL))
    reader.positions.update({name: (inode, offset) for name, (inode, offset) in cursor["logs"].items()})
    wanted = search.lower()
    rows: list[Entry] = [
        {"at_s": at_s, "process": name, "kind": "event", "level": "", "text": text}
        for at_s, name, text in entries[cursor["journal"] :]
        if not process or log_name(name) == process
    ]
    times = cursor["times"]
    for name, text in reader.read() if names else ():
        rows += [_entry_of(name, line, times) for line in inert(text).splitlines()]
    chosen = [row for row in rows if wanted in row["text"].lower() or wanted in row["process"].lower()]
    chosen.sort(key=lambda row: row["at_s"])
    following = {"journal": len(entries), "logs": reader.positions, "times": times}
    return {"events": chosen[-limit:] if limit else [], "next": _encode(following), "processes": names}


def _entry_of(process: str, line: str, times: dict[str, float]) -> Entry:
    """Return the entry of a log's line, also of one in JSON. A line without a date, or without a time, takes it from
    the line before."""
    with suppress(ValueError, KeyError, TypeError):
        if line.startswith('{"time": '):  # DLROVER_RL_LOG=json
            row = json.loads(line)
            line = inert(f"{row['time']} {row['level'][:1]} {row['message']}")
    began, clock = _BEGAN.match(line), _CLOCK.match(line)
    with suppress(ValueError):  # a job may print any digits
        if began:
            times[process] = datetime.fromisoformat(began[1]).timestamp()
        elif clock:
            last_s = times.get(process, 0.0)
            day = clock[1] or (datetime.fromtimestamp(last_s) if last_s else datetime.now()).strftime("%Y-%m-%d")
            at_s = datetime.fromisoformat(f"{day} {clock[2]}").timestamp()
            midnight = not clock[1] and at_s < last_s - _DAY_S / 2
            times[process] = at_s + _DAY_S * midnight
    level = clock[3] or "" if clock else ""
    return {"at_s": times.get(process, 0.0), "process": process, "kind": "log", "level": level, "text": line}


def _processes(files: RunFolder) -> list[str]:
    try:
        return files.processes()
    except InvalidJob:
        return []


def _encode(cursor: Entry) -> str:
    return base64.urlsafe_b64encode(json.dumps(cursor).encode()).decode()


def _decode(text: str) -> Entry:
    if not text:
        return {"journal": 0, "logs": {}, "times": {}}
    try:
        cursor = json.loads(base64.urlsafe_b64decode(text))
        logs = {str(name): (int(inode), max(int(offset), 0)) for name, (inode, offset) in cursor["logs"].items()}
        return {
            "journal": max(int(cursor["journal"]), 0),
            "logs": logs,
            "times": {str(name): float(at_s) for name, at_s in cursor["times"].items()},
        }
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise CallError("'after' is not a cursor that this page gave") from error
