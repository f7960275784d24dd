# SPDX-License-Identifier: Apache-2.0
"""The port that records what the trainer issues and what it waits for."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dlrover.python.rl.common.spans import NO_STEP, SpanFile
from dlrover.python.rl.trainer.port import RAW_CALL, Call, Outcome, Port, Ref
from dlrover.python.rl.trainer.shard import Rows

_SHORTEST_S = 0.001
_APART_S = 0.01  # shorter pauses are inside one wait: the durable port waits in parts


class RecordedPort:
    """The port below the port of durable steps. Its ``spans`` get the calls to workers, the waits, and the steps that
    :meth:`begin_step` begins. ``at_once``: the inner port runs a call before ``submit`` returns. Thread safe."""

    def __init__(self, inner: Port, spans: SpanFile, at_once: bool = False) -> None:
        self._inner, self._spans, self._at_once = inner, spans, at_once
        self._lock = threading.RLock()
        self._issue: tuple[tuple[int, int], str, list[int], str, float, list[str]] | None = None
        self._wait: tuple[str, str, float, float] | None = None
        self._step: tuple[int, float] | None = None
        self._last_called = 0  # the step of the last call

    def put(self, value: Any) -> Ref:
        return self._inner.put(value)

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        if call.call_id != RAW_CALL:
            self._note_issue(role, rank, call)
        began_s = time.time()
        ref = self._inner.submit(role, rank, call)
        if self._at_once:
            self._note_wait(role, call.method, began_s)
        return ref

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        with self._lock:
            self._write_issue()
        began_s = time.time()
        try:
            return self._inner.wait(refs, timeout_s)
        finally:
            if refs:
                self._note_wait(refs[0].role, refs[0].method, began_s)

    def begin_step(self, step: int | None) -> None:
        """End the attempt of the current step, and begin one of ``step``. None: the trainer ends, perhaps after the
        last step, where it makes no calls."""
        with self._lock:
            self._write_issue()
            self._write_wait()
            now_s = time.time()
            if self._step is not None and (step is not None or self._step[0] == self._last_called):
                self._spans.add("step", *self._step, now_s)
            self._step = (step, now_s) if step is not None else None

    def close(self, has_finished: bool = False) -> None:
        """Write what is left. ``has_finished``: the calls since the last step, as for an evaluation, belong to none."""
        with self._lock:
            if has_finished and self._step is not None and self._step[0] == self._last_called:
                self._step, self._last_called = (NO_STEP, self._step[1]), NO_STEP
            self.begin_step(None)
        self._spans.flush()

    def _note_issue(self, role: str, rank: int, call: Call) -> None:
        with self._lock:
            issue = self._issue
            if issue is not None and issue[0] == call.call_id and issue[1] == role and rank not in issue[2]:
                issue[2].append(rank)
                return
            self._write_issue()
            self._last_called = call.call_id[0]
            self._issue = call.call_id, role, [rank], call.method, time.time(), sorted(set(_sources_of(call)))

    def _note_wait(self, role: str, method: str, began_s: float) -> None:
        ended_s = time.time()
        with self._lock:
            wait = self._wait
            if wait is not None and wait[:2] == (role, method) and began_s - wait[3] < _APART_S:
                self._wait = *wait[:3], ended_s
            elif ended_s - began_s >= _SHORTEST_S:
                self._write_wait()
                self._wait = role, method, began_s, ended_s

    def _write_issue(self) -> None:
        issue, self._issue = self._issue, None
        if issue is not None:
            call_id, *columns = issue
            self._spans.add("issue", *call_id, *columns)

    def _write_wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            self._spans.add("wait", *wait)


def _sources_of(call: Call) -> Iterator[str]:
    """Yield the calls whose results are arguments of ``call``."""
    for value in (*call.args, *call.kwargs.values()):
        items = value.parts if isinstance(value, Rows) else value if isinstance(value, list) else [value]
        yield from (f"{item.role}.{item.method}" for item in items if isinstance(item, Ref) and item.role)
