"""TensorBoard's event files, written a step at a time: nothing is held back that a killed process would lose."""

import math
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from dlrover.python.rl.recipe.disk import PATIENT, Patience, append, patiently


class EventFile:
    """One more event file in a folder; TensorBoard reads a folder's files in the order of their names.

    Args:
        folder: where; made if it is not there.
        first_step: the first step to be written; what earlier files say of it and later ones is hidden.
        patience: with a full disk.
    """

    def __init__(self, folder: Path, first_step: int, patience: Patience = PATIENT) -> None:
        self._patience = patience
        patiently(lambda: folder.mkdir(parents=True, exist_ok=True), folder, patience)
        number = len(list(folder.iterdir()))
        self._path = folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}"
        events = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if number:
            restart = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=time.time(), step=first_step, session_log=restart))
        self._write(events)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a step; those that are no numbers are left out."""
        now_s = time.time()
        self._write(
            Event(wall_time=now_s, step=step, summary=scalar(name, value))
            for name, value in values.items()
            if math.isfinite(value)
        )

    def _write(self, events: Iterable[Event]) -> None:
        append(self._path, b"".join(map(_record, events)), self._patience)


def _record(event: Event) -> bytes:
    data = event.SerializeToString()
    size = struct.pack("<Q", len(data))
    return b"".join([size, struct.pack("<I", masked_crc32c(size)), data, struct.pack("<I", masked_crc32c(data))])
