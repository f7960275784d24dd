"""The calls that a trainer may have to issue again, each as it was meant."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import CallSkipped, InvocationError, ResultLost, WorkloadDied
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.trainer.port import Call, Port, Ref
from dlrover.python.rl.trainer.recovery import MemberId
from dlrover.python.rl.trainer.shard import Rows

_INLINE_BYTES = 1 << 14
_MOST_BEFORE_STEPS = 256

LOSSES = (WorkloadDied, ResultLost, CallSkipped)
"""Errors that are nobody's fault: the call has not run, or what came of it is gone."""


@dataclass(eq=False)
class Entry:
    """A call that was submitted, or a value that was put away.

    Attributes:
        role: the role called, ``""`` for a value.
        rank: the rank called.
        call: as the trainer meant it: arguments are values, or refs of other entries. None when it will not be needed.
        ref: the answer, in the port beneath.
        ended: whether the answer is known to be there: a value, or an error of the user's.
        failed: that error, None for none.
        seen: whether the trainer has been given that error.
        again: the latest repetition of a call that had ended, for the sake of the member's state; None for none.
        tries: how often it was issued again since its member was last replaced.
        previous: the call to the same member before this one.
    """

    role: str
    rank: int
    call: Call | None
    ref: Any = None
    ended: bool = False
    failed: InvocationError | None = None
    seen: bool = False
    again: Ref | None = None
    tries: int = 0
    previous: "Entry | None" = None

    @property
    def member(self) -> MemberId:
        """Who was called."""
        return self.role, self.rank

    @property
    def run(self) -> Ref:
        """What is still to come of it, or came last."""
        run: Ref = self.again or self.ref
        return run

    def after(self) -> tuple[int, int] | None:
        """The id of the call to this member that must have run before."""
        before = self.previous
        while before is not None and before.failed is not None:
            before = before.previous  # it may have failed before it reached the member
        return None if before is None or before.call is None else before.call.call_id


@dataclass
class CallLog:
    """What was called: in ``init`` and between it and the first step, for ever; in the open step, until its commit.

    A ``fit`` without steps would go on for ever: after 256 calls those outside ``init`` are let go.

    Attributes:
        setup: the calls of ``init``, and those after it.
        step: the calls of the open step.
        gave_up: whether there were too many before the first step.
    """

    setup: list[Entry] = field(default_factory=list)
    step: list[Entry] = field(default_factory=list)
    gave_up: bool = False
    _of_init: int | None = None
    _open: list[Entry] | None = None
    _last: dict[MemberId, Entry] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether calls are written down now."""
        return self._open is not None

    def begin_setup(self) -> None:
        """Calls from here on are those of ``init``."""
        self._begin(self.setup)

    def end_init(self) -> None:
        """Calls from here on are made between ``init`` and the first step."""
        self._of_init = len(self.setup)

    def begin_step(self) -> None:
        """Calls from here on are those of a step."""
        self._begin(self.step)

    def end(self) -> None:
        """Calls from here on are written nowhere."""
        self._begin(None)

    def _begin(self, entries: list[Entry] | None) -> None:
        self._open = entries
        self._last = {}

    def link(self, entry: Entry) -> None:
        """Tell a call which one was before it."""
        entry.previous = self._last.get(entry.member)

    def add(self, entry: Entry) -> None:
        """Write a call down, once it is on its way."""
        assert self._open is not None, "somebody has begun"
        self._last[entry.member] = entry
        self._open.append(entry)
        if self._open is self.setup and self._of_init is not None:
            self._let_go(self._of_init)

    def _let_go(self, of_init: int) -> None:
        if len(self.setup) > of_init + _MOST_BEFORE_STEPS:
            del self.setup[of_init:]
            self.gave_up = True
            self.end()

    def close_step(self) -> None:
        """The step's calls will not be issued again; their answers stay."""
        for entry in self.step:
            entry.call = entry.previous = None
        self.step.clear()
        self._last = {}

    def entries(self) -> list[Entry]:
        """All calls, in order."""
        return [*self.setup, *self.step]

    def running(self) -> list[Entry]:
        """The calls of which something is still to come."""
        return [entry for entry in self.entries() if not entry.ended or entry.again is not None]

    def in_order(self, some: Iterable[Entry]) -> list[Entry]:
        """``some`` in the order in which they were called, those that are not in the log last."""
        wanted = set(some)
        logged = [entry for entry in self.entries() if entry in wanted]
        return [*logged, *wanted.difference(logged)]


def lasting(call: Call, port: Port) -> Call:
    """``call`` with a result that is kept, and with arguments that stay what they are: arrays are the caller's, who may
    change them before the call is issued again."""

    def unchanging(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.nbytes <= _INLINE_BYTES:
            return value.copy()
        return port.put(value) if isinstance(value, np.ndarray | Batch | Ragged) else value

    args = tuple(map(unchanging, call.args))
    return replace(call, args=args, kwargs={name: unchanging(value) for name, value in call.kwargs.items()}, keep=True)


def sources(call: Call | None) -> list[Entry]:
    """The calls whose results ``call`` takes."""
    return [] if call is None else [ref.token for value in (*call.args, *call.kwargs.values()) for ref in _refs(value)]


def _refs(value: Any) -> Iterator[Ref]:
    items = value.parts if isinstance(value, Rows) else value if isinstance(value, list) else [value]
    return (item for item in items if isinstance(item, Ref) and isinstance(item.token, Entry))


def beneath(value: Any) -> Any:
    """An argument as the port beneath takes it: what its refs stand for now."""
    if isinstance(value, Ref):
        return value.token.ref if isinstance(value.token, Entry) else value
    if isinstance(value, Rows):
        return replace(value, parts=tuple(map(beneath, value.parts)))
    if isinstance(value, list) and any(isinstance(item, Ref) for item in value):
        return [beneath(item) for item in value]
    return value


def probe(run: Ref) -> Ref:
    """A ref that tells whether ``run`` succeeded without fetching its value, where there is one."""
    return run if run.size is None else replace(run, token=run.size)
