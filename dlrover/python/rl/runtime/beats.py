"""Heartbeats: what a process says of itself, how it says it, and when it ends itself for want of an answer.

::

    process under way --observe--> Beat --send--> master          every ``beat_s``
                 '<-- known: go on | outdated: end at once --'
    no answer for ``lease_s``: nobody can know of this process any more, it ends itself

Ray leaves the processes of a partitioned node running beside their replacements; a lease ends them.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dlrover.python.rl.common.clock import Clock, SystemClock
from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

LEASE_OVER = 75
"""Exit code of a process whose lease ran out, or that learned of its replacement (EX_TEMPFAIL)."""


CONSTRUCTING = "__init__"
"""What a process is in while it is being started: no call, and not yet subject to the limit of a call."""


@dataclass(frozen=True)
class Beat:
    """What a process does.

    Attributes:
        who: ``"ROLLOUT[1]"`` or ``"trainer"``.
        number: its incarnation, or its epoch.
        method: the call it is in, ``""`` when it is idle or waits for others.
        age_s: seconds since that call began.
        step: the step the call belongs to, -1 for none.
    """

    who: str
    number: int
    method: str = ""
    age_s: float = 0.0
    step: int = -1


@dataclass(frozen=True)
class BeatTerms:
    """How often a process beats, and how long it lives without an answer; seconds."""

    beat_s: float = 0.5
    lease_s: float = 60.0


def leave(why: str) -> None:
    """End this process at once."""
    _LOG.error("this process ends itself: %s", why)
    os._exit(LEASE_OVER)


class Beater:
    """Beats from a thread of its own, so that a busy process beats too.

    Args:
        observe: what the process does now.
        send: carries a beat to the master; True: known, False: outdated; raises when it was not reached.
        terms: how often, and the lease.
        end: called once with the reason when this process must end.
        clock: monotonic time.
    """

    def __init__(
        self,
        observe: Callable[[], Beat],
        send: Callable[[Beat], bool],
        terms: BeatTerms,
        end: Callable[[str], None] = leave,
        clock: Clock | None = None,
    ) -> None:
        self._observe, self._send, self._terms, self._end = observe, send, terms, end
        self._clock = clock or SystemClock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlrover-beats", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stopped.set()

    def _run(self) -> None:
        reached_s = self._clock.now_s()
        while not self._stopped.wait(self._terms.beat_s):
            try:
                known = self._send(self._observe())
            except Exception as error:  # noqa: BLE001 -- whatever keeps a beat from arriving, the lease decides
                silent_s = self._clock.now_s() - reached_s
                if silent_s > self._terms.lease_s:
                    self._end(f"no master for {silent_s:.0f} s ({type(error).__name__})")
                    return
                continue
            reached_s = self._clock.now_s()
            if not known:
                self._end("another process has taken its place")
                return
