"""Where the time of a step goes, told from beneath the loop: by the calls that the trainer waits for.

::

    the loop        RG_ACTOR.update(...)
    durable steps   what is repeated after a loss
    TimedPort       the time until an answer is there, under the name of what was called
    the port        Ray, a launcher's processes, this process

A call that takes results which are not there yet (rewards of completions that are still being drawn) is waited for in
the order of the calls, so that each phase has its own time.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dlrover.python.rl.trainer.call_log import probe
from dlrover.python.rl.trainer.port import COMMIT, Call, Outcome, Port, Ref
from dlrover.python.rl.trainer.shard import Rows
from dlrover.python.rl.trainer.steps import Attempt, Steps
from dlrover.python.rl.trainer.trainer import BaseTrainer, TrainerLink

PHASES = {
    "generate": "generation",
    "draw": "generation",
    "take": "generation",
    "tell": "generation",
    "score": "reward",
    "logprobs": "reference",
    "judge": "teacher",
    "values": "critic",
    "train": "update",
    "update": "update",
    "publish_weights": "sync",
    "published": "sync",
    "receive_weights": "sync",
    "measure": "evaluation",
    "save": "saving",
    COMMIT: "commit",
}
"""What the methods of the ready workloads are for; others are a phase under their own name."""

_REST = "trainer"


class Stopwatch:
    """Adds up the time that the thread which made it spends in phases.

    Args:
        now_s: seconds of a clock that never goes back.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.now_s, self._thread = now_s, threading.get_ident()
        self._spent: dict[str, float] = {}
        self._inside = False
        self._began_s = now_s()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is ``name``; inside another phase it is that one's."""
        if self._inside or threading.get_ident() != self._thread:
            yield
            return
        self._inside, began_s = True, self.now_s()
        try:
            yield
        finally:
            self._inside = False
            self._spent[name] = self._spent.get(name, 0.0) + self.now_s() - began_s

    def lap(self) -> tuple[float, dict[str, float]]:
        """The seconds since the last lap, and how they divide: those in no phase are the ``trainer``'s own."""
        now_s = self.now_s()
        whole, spent = now_s - self._began_s, self._spent
        self._began_s, self._spent = now_s, {}
        return whole, {**spent, _REST: whole - sum(spent.values())}


class TimedPort:
    """A port whose calls are timed.

    Args:
        inner: the port.
        stopwatch: takes the times.
    """

    def __init__(self, inner: Port, stopwatch: Stopwatch) -> None:
        self._inner, self._stopwatch = inner, stopwatch
        self._made: dict[int, tuple[Ref, tuple[Ref, ...]]] = {}

    def put(self, value: Any) -> Ref:
        with self._stopwatch.phase("sending"):
            return self._inner.put(value)

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        with self._stopwatch.phase(_phase(call.method)):
            ref = self._inner.submit(role, rank, call)
        self._made[id(ref.token)] = made = ref, tuple(_taken(call))
        if ref.size is not None:
            self._made[id(ref.size)] = made  # a probe of it has that in the token's place
        return ref

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        left_s, since_s = timeout_s, self._stopwatch.now_s()
        for source in self._sources(refs):
            with self._stopwatch.phase(_phase(source.method)):
                self._inner.wait([probe(source)], left_s)
            if timeout_s is not None:
                left_s = max(timeout_s - (self._stopwatch.now_s() - since_s), 0.0)
        with self._stopwatch.phase(_phase(refs[0].method) if refs else _REST):
            return self._inner.wait(refs, left_s)

    def forget(self) -> None:
        """Calls so far are waited for no more."""
        self._made = {}

    def _sources(self, refs: Sequence[Ref]) -> list[Ref]:
        """The calls whose results these take, directly or not, in the order they were made. Each is told once."""
        found: dict[int, Ref] = {}
        asked = list(refs)
        while asked:
            ref = asked.pop()
            _, taken = self._made.pop(id(ref.token), (ref, ()))
            found |= {id(source.token): source for source in taken if source.size is not None}
            asked += taken
        return list(found.values())[::-1]


def _taken(call: Call) -> Iterator[Ref]:
    for value in (*call.args, *call.kwargs.values()):
        items = value.parts if isinstance(value, Rows) else value if isinstance(value, list) else [value]
        yield from (item for item in items if isinstance(item, Ref) and item.method)


def _phase(method: str) -> str:
    return PHASES.get(method, method.removeprefix("!"))


class TimedTrainer(BaseTrainer):
    """A trainer whose steps are timed."""

    def bind(self, link: TrainerLink, attempt: Attempt | None = None) -> Steps:
        """As in the base class, with a timed port."""
        self.stopwatch = Stopwatch()
        self._timed = TimedPort(link.port, self.stopwatch)
        return super().bind(replace(link, port=self._timed), attempt)

    def time_figures(self) -> dict[str, float]:
        """The seconds since these figures were last asked for: ``step_s``, and ``time/<phase>``, which add up to it.

        Asked for at the end of a step's body, they hold the commit of the step before.
        """
        self._timed.forget()
        whole, spent = self.stopwatch.lap()
        return {"step_s": whole, **{f"time/{phase}": seconds for phase, seconds in spent.items()}}
