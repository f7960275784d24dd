# SPDX-License-Identifier: Apache-2.0
"""Progress of this process inside a call, which tells one that is long from one that hangs.

Engines note each generated token, micro-batch, and tensor that is loaded or received; heartbeats carry how long ago the
last one was, from which ``hang_after_s`` counts.
"""

import time

_noted, _noted_s = 0, 0.0


def note_progress() -> None:
    global _noted, _noted_s  # noqa: PLW0603 -- of the process, as its calls are
    _noted, _noted_s = _noted + 1, time.monotonic()


def noted_progress() -> int:
    """The number of times that progress was noted."""
    return _noted


def last_progress_s() -> float:
    """When progress was noted last, as ``time.monotonic`` counts."""
    return _noted_s
