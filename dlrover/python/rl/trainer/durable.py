"""The port of durable steps: what is called through it outlives the members that are called.

::

    submit --> log: setup (init's calls, for ever), step (the open step's, until its commit)
    wait -----> a member died, or a result is gone?
                  renew: who takes its place (one member, or all of its role)
                  rebuild each: setup again, the last commit, this step again, in order
                  issue again what else failed because of it
                  and wait on

Calls have ids, and members answer a repeated id from what they kept: to issue a call again is always safe. A recovery
that is struck by a further death goes round once more; there is no special case for it.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import (
    CheckpointMissing,
    InvocationError,
    ReplayDiverged,
    ResultLost,
    StepAbandoned,
    WorkloadDied,
)
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.trainer.call_log import LOSSES, CallLog, Entry, lasting, probe, sources
from dlrover.python.rl.trainer.outbox import GRACE_S, Outbox
from dlrover.python.rl.trainer.port import (
    RAW_CALL,
    RESTORE,
    STRAGGLER_LOG_INTERVAL_S,
    WHERE,
    Call,
    Outcome,
    Port,
    Ref,
)
from dlrover.python.rl.trainer.recovery import Checkpoints, MemberId, Recovery, Renewed, RoleTraits, is_damage

_LOG = get_logger(__name__)

_MOST_TRIES = 20

_Lost: TypeAlias = dict[Entry, tuple[Ref, InvocationError]]


@dataclass
class DurablePort:
    """A port that recovers what is called through it. Thread safe.

    Args:
        inner: the port beneath.
        recovery: how lost members come back.
        roles: role to its traits.
        checkpoints: where commits are; None: stateful members cannot be rebuilt once a step is committed.
        opened: whether losses are recovered; before that they are raised.
        renewed: told of new members, for their raw handles.

    Attributes:
        step: the open step, 0 before the first.
        recoveries: how often something was recovered.
    """

    inner: Port
    recovery: Recovery
    roles: Mapping[str, RoleTraits]
    checkpoints: Checkpoints | None = None
    opened: bool = False
    renewed: Callable[[Renewed], None] = lambda renewed: None
    step: int = 0
    recoveries: int = 0
    log: CallLog = field(default_factory=CallLog)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._known = dict(self.recovery.incarnations())
        self._unbuilt: set[MemberId] = set()
        self._outbox = Outbox(self.inner, self.recovery.epoch)

    @property
    def committed(self) -> int | None:
        """The last committed step, None for none."""
        return self._outbox.committed

    def go_on_from(self, step: int) -> None:
        """``step`` is the last committed one: new members are brought there."""
        self._outbox.committed = step

    def close(self, why: StepAbandoned) -> None:
        """Another trainer object goes on: threads of this one that still call are told so."""
        self._outbox.closed = why

    # -- the port -----------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> Ref:
        return Ref(self, Entry("", 0, None, self.inner.put(value), ended=True))

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        with self._lock:
            logged = self.log.is_open and call.call_id != RAW_CALL
            if logged:
                call = lasting(call, self.inner)
            entry = Entry(role, rank, call)
            if logged:
                self.log.link(entry)
            entry.ref = self._outbox.issue(entry, call.sized)
            if logged:
                self.log.add(entry)
        return Ref(self, entry, None, role, rank, call.method)

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        """As every port. The time that a recovery takes does not count: the deadline begins anew after it."""
        entries: list[Entry] = [ref.token for ref in refs]
        while True:
            runs = [entry.ref for entry in entries]
            outcomes = self.inner.wait(runs, timeout_s)
            death = self._death_behind(outcomes)
            with self._lock:
                if death is not None:
                    self._recover({}, [death])
                elif self._note(entries, runs, outcomes):
                    _see(entries, outcomes)
                    return outcomes

    # -- what a step needs --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until every call in the log has ended well, those included that nobody waited for.

        Raises:
            InvocationError: one of them failed, with an error of the user's that nobody has seen yet.
            StepAbandoned: a repeated call did not do what it did before.
        """
        while True:
            with self._lock:
                running = self.log.running()
                runs = [entry.run for entry in running]
            if not running:
                break
            outcomes = self.inner.wait([probe(run) for run in runs], STRAGGLER_LOG_INTERVAL_S)
            death = self._death_behind(outcomes)
            with self._lock:
                if death is not None:
                    self._recover({}, [death])
                elif self._note(running, runs, outcomes):
                    _log_late(running, outcomes)
        for entry in self.log.entries():
            if entry.failed is not None and not entry.seen:
                raise entry.failed

    def ask(self, members: Iterable[MemberId], verb: str, request: Any = None) -> dict[MemberId, Any]:
        """Ask members something beside the step's calls, and wait. When one dies meanwhile, it is replaced and all are
        asked again.

        Raises:
            InvocationError: an answer is an error.
        """
        asked = list(members)
        while True:
            with self._lock:
                outcomes = self._outbox.finish([self._outbox.ask(member, verb, request) for member in asked])
                lost = [outcome.error for outcome in outcomes if isinstance(outcome.error, LOSSES)]
                if lost and self.opened:
                    self._recover({}, [error for error in lost if isinstance(error, WorkloadDied)])
                    continue
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
            return dict(zip(asked, (outcome.value for outcome in outcomes), strict=True))

    def begin_step(self, step: int) -> None:
        """Calls from here on are those of ``step``."""
        with self._lock:
            self.step = step
            self.log.begin_step()

    def commit(self, step: int) -> None:
        """``step`` is committed: its calls will not be needed again."""
        with self._lock:
            self.log.close_step()
            self._outbox.committed = step

    def members(self, stateful_only: bool = False) -> list[MemberId]:
        """Every member, or those that have state."""
        return [
            (role, rank)
            for role, traits in self.roles.items()
            for rank in range(traits.size)
            if traits.stateful or not stateful_only
        ]

    # -- what came of calls -------------------------------------------------------------------------------------------

    def _note(self, entries: Sequence[Entry], runs: Sequence[Ref], outcomes: Sequence[Outcome]) -> bool:
        """Write down what came of ``runs``, and recover what was lost. Whether the outcomes stand."""
        lost: _Lost = {}
        stands = True
        for entry, run, outcome in zip(entries, runs, outcomes, strict=True):
            if outcome.late:
                continue
            if run is not entry.ref and run is not entry.again:
                stands = False  # another thread's recovery has issued it anew
            elif outcome.error is not None and self._is_lost(entry, outcome.error):
                lost[entry] = run, outcome.error
            else:
                self._end(entry, run, outcome.error)
        if lost:
            self._recover(lost, [error for _, error in lost.values() if isinstance(error, WorkloadDied)])
        return stands and not lost

    def _end(self, entry: Entry, run: Ref, error: InvocationError | None) -> None:
        """A call has come to its end: with a value, or with an error that is the user's."""
        if self.opened and isinstance(error, ReplayDiverged):
            raise self._abandoned(error)
        if run is entry.ref:
            entry.ended, entry.failed = True, error
            return
        entry.again = None
        if error is not None and entry.failed is None:
            raise self._abandoned(error)

    def _is_lost(self, entry: Entry, error: InvocationError) -> bool:
        """Whether a call failed through no fault of its own, so that issuing it again helps."""
        if not self.opened:
            return False
        if isinstance(error, LOSSES):
            return True
        made = sources(entry.call) if (error.role, error.rank) != entry.member else []
        self._look(made)
        # It is the error of a call whose result this one was to take: has that one been issued anew since?
        return bool(made) and all(source.failed is None for source in made)

    def _look(self, entries: Iterable[Entry]) -> _Lost:
        """See which calls have ended by now; returns those that failed of a loss."""
        asked = [(entry, entry.run) for entry in entries if not entry.ended or entry.again is not None]
        outcomes = self.inner.wait([probe(run) for _, run in asked], 0.0) if asked else []
        lost: _Lost = {}
        for (entry, run), outcome in zip(asked, outcomes, strict=True):
            if isinstance(outcome.error, LOSSES):
                lost[entry] = run, outcome.error
            elif not outcome.late:
                self._end(entry, run, outcome.error)
        return lost

    def _death_behind(self, outcomes: Sequence[Outcome]) -> WorkloadDied | None:
        """The death of another rank that an error of the user's is the echo of, or None."""
        for error in (outcome.error for outcome in outcomes if self.opened and outcome.error is not None):
            traits = self.roles.get(error.role)
            if isinstance(error, LOSSES) or traits is None or not traits.together or traits.size == 1:
                continue
            siblings = [(error.role, rank) for rank in range(traits.size) if rank != error.rank]
            asked = [self._outbox.ask(member, WHERE, None) for member in siblings]
            for outcome in self.inner.wait(asked, GRACE_S):
                if isinstance(outcome.error, WorkloadDied):
                    return outcome.error
        return None

    # -- recovery: the lock is held -----------------------------------------------------------------------------------

    def _recover(self, lost: _Lost, deaths: Sequence[WorkloadDied]) -> None:
        """Bring every call of the log to where it has been issued to a living member, in order."""
        self.recoveries += 1
        self._look(self.log.entries())
        for death in deaths:
            self._renew(death)
        for _ in range(_MOST_TRIES):
            loss = self._rebuild()
            if loss is None:
                break
            if isinstance(loss, WorkloadDied):
                self._renew(loss)
        else:
            raise self._abandoned(loss or RuntimeError("a recovery came to no end"))
        lost = {**lost, **self._look(self.log.entries())}
        for entry in self.log.in_order(lost):
            self._issue_again(entry, *lost[entry])

    def _renew(self, death: WorkloadDied) -> None:
        if 0 < death.incarnation < self._known.get((death.role, death.rank), 0):
            return  # known, and replaced
        first_line = str(death).partition("\n")[0]
        renewed = self.recovery.renew(death.role, death.rank, death.incarnation, first_line)
        fresh = {
            (renewed.role, rank): incarnation
            for rank, incarnation in renewed.incarnations.items()
            if incarnation > self._known.get((renewed.role, rank), 0)
        }
        if fresh:
            ranks = ", ".join(f"{rank}" for _, rank in fresh)
            _LOG.warning("step %d: %s: rank %s is replaced (%s)", self.step, renewed.role, ranks, first_line)
            self._known.update(fresh)
            self._unbuilt.update(fresh)
            self.renewed(renewed)

    def _rebuild(self) -> InvocationError | None:
        """Bring new members to where the log is. Returns what was lost meanwhile, None when all is done.

        Raises:
            StepAbandoned: the last commit cannot be restored.
            InvocationError: a call of ``init`` raises now.
        """
        again = [entry for entry in self.log.setup if entry.member in self._unbuilt]
        runs = [self._repeat(entry) for entry in again]
        restores = [
            self._outbox.ask(member, RESTORE, self._restore_request())
            for member in self._unbuilt
            if self._has_state(member)
        ]
        outcomes = self._outbox.finish([*map(probe, runs), *restores], patient=True)
        deaths = [outcome.error for outcome in outcomes if isinstance(outcome.error, WorkloadDied)]
        loss = deaths[0] if deaths else self._loss_of_setup(again, outcomes)
        if loss is not None:
            return loss
        for outcome in outcomes[len(again) :]:
            if outcome.error is not None:
                self._discard(outcome.error)
        for entry in self.log.step:
            if entry.member in self._unbuilt:
                self._repeat(entry)
        self._unbuilt.clear()
        return None

    def _loss_of_setup(self, entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> InvocationError | None:
        """The first loss among repeated calls of ``init``."""
        for entry, outcome in zip(entries, outcomes, strict=False):
            if isinstance(outcome.error, ResultLost):
                self._issue_sources(entry)
            if isinstance(outcome.error, LOSSES):
                return outcome.error
            if outcome.error is not None and entry.failed is None:
                raise outcome.error
            self._end(entry, entry.run, outcome.error)
        return None

    def _has_state(self, member: MemberId) -> bool:
        return self._outbox.committed is not None and self.roles[member[0]].stateful

    def _restore_request(self) -> Any:
        if self.checkpoints is None or self._outbox.committed is None:
            raise self._abandoned(CheckpointMissing("no commits are kept"))
        return self.checkpoints.restore_request(self._outbox.committed)

    def _discard(self, error: InvocationError) -> None:
        """The last commit cannot be restored: it is none any more."""
        if is_damage(error) and self.checkpoints is not None and self._outbox.committed is not None:
            self.checkpoints.discard(self._outbox.committed, str(error.original))
            raise self._abandoned(error)
        raise error

    def _repeat(self, entry: Entry) -> Ref:
        """Issue a call to a new member. An answer that is there stays what it was."""
        entry.tries = 0
        run = self._outbox.issue(entry, sized=True)
        if entry.ended and (entry.failed is None or entry.seen):
            entry.again = run
        else:
            entry.ref, entry.ended, entry.failed = run, False, None
        return run

    def _issue_again(self, entry: Entry, run: Ref, error: InvocationError) -> None:
        """``run`` of a call failed of ``error``, through no fault of its own."""
        if run is not entry.ref and run is not entry.again:
            return  # its member is new, and the call was issued to it with all others
        entry.tries += 1
        if entry.call is None or entry.tries > _MOST_TRIES:
            raise self._abandoned(error)
        if isinstance(error, ResultLost):
            self._issue_sources(entry)
        issued = self._outbox.issue(entry, sized=True)
        if run is entry.again:
            entry.again = issued
        else:
            entry.ref, entry.ended, entry.failed = issued, False, None

    def _issue_sources(self, entry: Entry) -> None:
        for source in sources(entry.call):
            if source.call is not None:
                source.ref, source.ended, source.failed = self._outbox.issue(source, sized=True), False, None

    def _abandoned(self, cause: BaseException) -> StepAbandoned:
        return StepAbandoned(self.step, cause)


def _see(entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> None:
    for entry, outcome in zip(entries, outcomes, strict=True):
        entry.seen |= outcome.error is not None


def _log_late(entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> None:
    late = [entry for entry, outcome in zip(entries, outcomes, strict=True) if outcome.late]
    names = ", ".join(f"{entry.role}[{entry.rank}].{entry.call.method}" for entry in late[:8] if entry.call is not None)
    if late:
        _LOG.warning("the commit still waits for %d calls: %s", len(late), names)
