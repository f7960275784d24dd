# SPDX-License-Identifier: Apache-2.0
"""The file with the last heartbeats of a live job, for those who look at its folder."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.private_files import open_file

LIVE = "live.json"
_FRESH_S = 30.0  # after which the heartbeats in the file are too old to be shown


def write_live(folder: Path, activities: Mapping[str, tuple[float, str | None, float]], at_s: float) -> None:
    """Replace the file; a disk that is full keeps the earlier one, whose heartbeats grow old."""
    fresh = folder / f".{LIVE}.tmp"
    with suppress(OSError):
        fresh.write_text(json.dumps({"at_s": at_s, "processes": activities}), encoding="utf-8")
        os.replace(fresh, folder / LIVE)


def read_live(folder: Path, now_s: float) -> dict[str, tuple[float, str | None, float]]:
    """Return the age of each process's heartbeat, its current call, and that call's seconds; empty if they are old."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError), open_file(folder / LIVE) as file:
        written: Any = json.load(file)
        since_s = now_s - float(written["at_s"])
        if since_s < _FRESH_S:
            activities = written["processes"].items()
            return {str(name): (float(age) + since_s, call, float(call_s)) for name, (age, call, call_s) in activities}
    return {}
