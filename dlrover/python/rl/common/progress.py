# SPDX-License-Identifier: Apache-2.0
"""Progress of this process inside a call, which distinguishes a long call from one that hangs.

Engines note each generated token, micro-batch, and tensor that is loaded or received; heartbeats carry the time since
the last note, from which ``hang_after_s`` counts."""

import time

_noted, _noted_s = 0, 0.0


def note_progress() -> None:
    global _noted, _noted_s
    _noted, _noted_s = _noted + 1, time.monotonic()


def noted_progress() -> int:
    """Return the number of notes."""
    return _noted


def last_progress_s() -> float:
    """Return the time of the last note by ``time.monotonic``."""
    return _noted_s
