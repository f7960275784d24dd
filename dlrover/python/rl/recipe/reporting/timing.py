# SPDX-License-Identifier: Apache-2.0
"""The time of each phase of a step, by the calls that the trainer waits for."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.trainer.port import COMMIT, WRITTEN, Call, Outcome, Port, Ref
from dlrover.python.rl.trainer.shard import Rows

_REST = "trainer"


class Stopwatch:
    """Adds up the seconds that the thread which constructs it spends in phases; ``now_s`` is a monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.now_s, self._thread = now_s, threading.get_ident()
        self._seconds: dict[str, float] = {}
        self._inside = False
        self._lap_began_s = now_s()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the block under ``name``; inside another phase it counts for that one."""
        if self._inside or threading.get_ident() != self._thread:
            yield
            return
        self._inside, began_s = True, self.now_s()
        try:
            yield
        finally:
            self._inside = False
            self._seconds[name] = self._seconds.get(name, 0.0) + self.now_s() - began_s

    def lap(self) -> tuple[float, dict[str, float]]:
        """The seconds since the last lap, in all and by phase; the time outside every phase is the ``trainer``'s."""
        now_s = self.now_s()
        total_s, seconds = now_s - self._lap_began_s, self._seconds
        self._lap_began_s, self._seconds = now_s, {}
        return total_s, {**seconds, _REST: total_s - sum(seconds.values())}


@dataclass
class TimedPort:
    """A port whose calls are timed; ``phases`` are by method, or by ``role.method`` where roles differ, and methods
    that it lacks are phases under their own names.

    A call may take pending results (rewards of completions that are still being generated). Its sources are waited for
    first, in the order of the calls, so that each phase is booked its own time.
    """

    inner: Port
    stopwatch: Stopwatch
    phases: Mapping[str, str]
    _calls: dict[int, tuple[Ref, tuple[Ref, ...]]] = field(default_factory=dict)

    def put(self, value: Any) -> Ref:
        with self.stopwatch.phase("sending"):
            return self.inner.put(value)

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        with self.stopwatch.phase(self._phase_of(role, call.method)):
            ref = self.inner.submit(role, rank, call)
        self._calls[id(ref.token)] = entry = ref, tuple(_pending_arguments(call))
        if ref.size is not None:
            self._calls[id(ref.size)] = entry  # a probe's token is the size
        return ref

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        remaining_s, since_s = timeout_s, self.stopwatch.now_s()
        for source in self._pop_sources(refs):
            with self.stopwatch.phase(self._phase_of(source.role, source.method)):
                self.inner.wait([source.probe()], remaining_s)
            if timeout_s is not None:
                remaining_s = max(timeout_s - (self.stopwatch.now_s() - since_s), 0.0)
        with self.stopwatch.phase(self._phase_of(refs[0].role, refs[0].method) if refs else _REST):
            return self.inner.wait(refs, remaining_s)

    def forget(self) -> None:
        """Drop the records of the calls so far; their sources are no longer waited for."""
        self._calls = {}

    def _pop_sources(self, refs: Sequence[Ref]) -> list[Ref]:
        """The calls whose results ``refs`` take, directly or not, in the order of the calls; each is returned once."""
        sources: dict[int, Ref] = {}
        queue = list(refs)
        while queue:
            ref = queue.pop()
            _, arguments = self._calls.pop(id(ref.token), (ref, ()))
            sources |= {id(source.token): source for source in arguments if source.size is not None}
            queue += arguments
        return list(sources.values())[::-1]

    def _phase_of(self, role: str, method: str) -> str:
        by_method = self.phases.get(method, method.removeprefix("!"))
        return self.phases.get(f"{role}.{method}", by_method)


def _pending_arguments(call: Call) -> Iterator[Ref]:
    for value in (*call.args, *call.kwargs.values()):
        items = value.parts if isinstance(value, Rows) else value if isinstance(value, list) else [value]
        yield from (item for item in items if isinstance(item, Ref) and item.method)


_METHODS = {
    "generation": ("generate", "sample", "fetch", "summarize"),
    "reward": ("score",),
    "reference": ("logprobs", "reference_logprobs"),
    "teacher": ("teacher_logprobs",),
    "critic": ("values",),
    "update": ("train", "update"),
    "sync": ("publish_weights", "published_stamp", "receive_weights"),
    "evaluation": ("measure",),
    "saving": ("save", "texts", "begin_samples", "write_samples", "write_held_out"),
    "commit": (COMMIT, WRITTEN),
}
PHASES = {method: phase for phase, methods in _METHODS.items() for method in methods}
"""The phase of each workload method; a method that is not listed is a phase under its own name."""

PHASES_BY_ROLE = {f"{RLRoleType.CRITIC}.update": "critic"}  # the speed of training is the actor's
