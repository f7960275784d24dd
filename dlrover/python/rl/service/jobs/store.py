# SPDX-License-Identifier: Apache-2.0
"""The service's state on disk: an SQLite file in a folder that one service holds at a time.

Jobs and events are rows of JSON beside the columns they are looked up by. A write is one transaction, synced to disk;
an unreadable file is an error and never an empty service.
"""

import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from math import isfinite, nan
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import JobConflict, JournalCorrupt, ServiceUnavailable
from dlrover.python.rl.master.process.status import RunningProcess
from dlrover.python.rl.service.jobs.records import JobDescription, JobEvent, JobPhase, JobRecord

FILE = "jobs.sqlite"
_VERSION = 1
_SCHEMA = """
CREATE TABLE jobs (run TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE descriptions (run TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (number INTEGER PRIMARY KEY, run TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX events_of_run ON events (run);
CREATE INDEX events_of_name ON events (name, number);
"""


class SqliteJobStore:
    """Raises JobConflict if another service uses ``folder``, JournalCorrupt if its file cannot be read. Methods other
    than ``load`` raise ServiceUnavailable when the disk fails."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _hold(folder)
        self._path = folder / FILE
        self._writing = threading.Lock()
        self._idle: list[sqlite3.Connection] = []  # for reading; opening one takes longer than a read
        try:
            self._writer = self._connect()
            self._path.chmod(0o600)
            (version,) = self._writer.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._writer.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        except sqlite3.Error as error:
            raise JournalCorrupt(f"{self._path} cannot be read: {error}") from error
        if version not in (0, _VERSION):
            raise JournalCorrupt(f"{self._path} has version {version} of its schema; this service reads {_VERSION}")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=5.0)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def load(self) -> tuple[list[JobRecord], int]:
        """Return all jobs, and the number of the last event."""
        try:
            rows = self._writer.execute("SELECT body FROM jobs").fetchall()
            (last,) = self._writer.execute("SELECT coalesce(max(number), 0) FROM events").fetchone()
            return [_record(json.loads(body)) for (body,) in rows], int(last)
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            raise JournalCorrupt(f"{self._path} cannot be read: {error}") from error

    def write(
        self,
        records: Iterable[JobRecord],
        events: Iterable[JobEvent],
        descriptions: Mapping[str, JobDescription],
        forgotten: Iterable[str] = (),
    ) -> None:
        """Save everything or, with a ServiceUnavailable, nothing. A run with a description is new, and must not exist
        yet. The description of an ended run is deleted, and a forgotten run with all of its events."""
        gone = [(run,) for run in forgotten]
        saved, new, ended = list[tuple[str, str]](), list[tuple[str, str]](), list[tuple[str]]()
        for record in records:
            (new if record.run in descriptions else saved).append((record.run, _to_json(record)))
            ended += [(record.run,)] if record.phase.ended else []
        changes: list[tuple[str, Sequence[Any]]] = [
            ("INSERT INTO jobs VALUES (?, ?)", new),
            ("INSERT OR REPLACE INTO jobs VALUES (?, ?)", saved),
            ("INSERT INTO events VALUES (?, ?, ?, ?)", [(it.number, it.run, it.name, _to_json(it)) for it in events]),
            ("INSERT INTO descriptions VALUES (?, ?)", [(run, _to_json(it)) for run, it in descriptions.items()]),
            ("DELETE FROM descriptions WHERE run = ?", [*ended, *gone]),
            ("DELETE FROM jobs WHERE run = ?", gone),
            ("DELETE FROM events WHERE run = ?", gone),
        ]
        with self._writing:
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                for statement, rows in changes:
                    self._writer.executemany(statement, rows)
                self._writer.execute("COMMIT")
            except sqlite3.Error as error:
                with suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                raise ServiceUnavailable(f"the service cannot save: {error}; nothing was changed") from error

    def description(self, run: str) -> JobDescription:
        row = self._read("SELECT body FROM descriptions WHERE run = ?", run)
        if not row:
            raise JournalCorrupt(f"{self._path} has no description of run {run}")
        plain = json.loads(row[0][0])
        return JobDescription(plain["text"], tuple(plain["overrides"]), plain["folder"])

    def events(self, after: int, name: str, limit: int) -> list[JobEvent]:
        """Return up to ``limit`` events with numbers above ``after``, of one job or, for "", of all."""
        own, values = ("name = ? AND ", (name,)) if name else ("", ())
        statement = f"SELECT body FROM events WHERE {own}number > ? ORDER BY number LIMIT ?"
        events = list[JobEvent]()
        for (body,) in self._read(statement, *values, after, limit):
            plain = json.loads(body)
            metrics = {name: nan if value is None else value for name, value in plain["metrics"].items()}
            events.append(JobEvent(**{**plain, "phase": JobPhase(plain["phase"]), "metrics": metrics}))
        return events

    def _read(self, statement: str, *values: Any) -> list[Any]:
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            rows = connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise ServiceUnavailable(f"the service cannot read its state: {error}") from error
        self._idle.append(connection)
        return rows

    def close(self) -> None:
        with self._writing:  # SQLite crashes if a connection is closed while another thread uses it
            for connection in (self._writer, *self._idle):
                connection.close()
        os.close(self._lock)


def _hold(folder: Path) -> int:
    """Lock the folder until this process ends, however it ends."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise JobConflict(f"another service uses {folder}") from error
    return descriptor


def _to_json(value: JobRecord | JobEvent | JobDescription) -> str:
    """Serialize a value; non-finite numbers become null, which every reader of JSON accepts."""
    plain = asdict(value)
    for name, number in plain.items():
        if isinstance(number, float) and not isfinite(number):
            plain[name] = None
        elif name == "metrics":
            plain[name] = {key: amount if isfinite(amount) else None for key, amount in number.items()}
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def _record(plain: dict[str, Any]) -> JobRecord:
    values = {field.name: plain[field.name] for field in fields(JobRecord) if field.name in plain}
    values["phase"] = JobPhase(values["phase"])
    values["reward"] = nan if values["reward"] is None else values["reward"]
    values["members"] = tuple(RunningProcess(*member) for member in values.get("members", ()))
    return JobRecord(**values)
