# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the calls of a step, and how each of them survives the death of its worker.
"""The port of durable steps: its calls survive the death of the workers that run them.

::

    submit --> log: setup (init's calls, for the whole run), step (the open step's, until its commit)
    wait ----> a worker died, or a result is lost?
                 renew: replace the worker, or all workers of its role
                 rebuild each: its setup calls, the state of the last commit, its calls of this step, in order
                 retry the other calls that failed because of it
                 and wait again

Workers answer a repeated call id from the results they keep, so issuing a call again is always safe. A further death
during a recovery starts another round. If the last commit is older than the step before, the loss of a worker with
state abandons the step, and all workers go back to the commit together.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.trainer import call_log
from dlrover.python.rl.trainer.call_log import CallState, LoggedCall
from dlrover.python.rl.trainer.port import (
    RAW_CALL,
    READ,
    RESTORE,
    STORE,
    STRAGGLER_LOG_INTERVAL_S,
    WHERE,
    Call,
    Checkpoints,
    Outcome,
    Port,
    Recovery,
    Ref,
    Renewed,
    RoleTraits,
    Standing,
    Transfer,
    is_damage,
)

_LOG = get_logger(__name__)


@dataclass
class Transfers:
    """Copies files between workers. ``request`` sends, and returns the answers; it sends again after a recovery."""

    sender: call_log.CallSender
    request: Callable[[Callable[[], Sequence[Ref]]], list[Any]]
    nodes: dict[ProcessId, str] = field(default_factory=dict)

    def locate(self, standings: Mapping[ProcessId, Standing]) -> None:
        """Note the nodes of workers."""
        self.nodes.update({member: standing.node for member, standing in standings.items()})

    def make(self, transfers: Sequence[Transfer]) -> dict[Transfer, str]:
        """Make the transfers, and return the node of each that has arrived."""
        under_way = list(transfers)
        for number in range(max((len(each.parts) for each in transfers), default=0)):
            now = [each for each in under_way if number < len(each.parts)]
            stored = self.request(partial(self._send, now, number))
            failed = {each for each, is_stored in zip(now, stored, strict=True) if not is_stored}
            under_way = [each for each in under_way if each not in failed]
        return {each: self.nodes[each.target] for each in under_way}

    def bring(
        self, checkpoints: Checkpoints, new: Sequence[ProcessId], step: int | None, busy: Collection[ProcessId]
    ) -> InvocationError | None:
        """Send the nodes of ``new`` workers the files that they lack of the commit of ``step``, during a recovery;
        return a failure. Prefer sources that are not ``busy``, which would answer later."""
        outcomes = self.sender.finish([self.sender.ask(member, WHERE) for member in new])
        if failure := _failure_in(outcomes):
            return failure
        self.locate({member: outcome.value for member, outcome in zip(new, outcomes, strict=True)})
        nodes = dict(sorted(self.nodes.items(), key=lambda item: item[0] in busy))
        for transfer in checkpoints.transfers_to(step, new, nodes) if step is not None else ():
            for number in range(len(transfer.parts)):
                if failure := _failure_in(self.sender.finish(self._send([transfer], number))):
                    return failure
        return None

    def _send(self, transfers: Sequence[Transfer], number: int) -> list[Ref]:
        """Send the requests for one part of each transfer."""
        runs = []
        for transfer in transfers:
            part, content = transfer.parts[number], transfer.content
            if transfer.source is not None:
                content = self.sender.ask(transfer.source, READ, part)
            runs.append(self.sender.ask(transfer.target, STORE, part, content))
        return runs


def _failure_in(outcomes: Sequence[Outcome]) -> InvocationError | None:
    return next((outcome.error for outcome in outcomes if outcome.error is not None), None)


_MAX_ROUNDS = 20
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 1.0

_LostRuns: TypeAlias = dict[LoggedCall, tuple[Ref, InvocationError]]


@dataclass(repr=False)
class DurablePort:
    """A port that recovers lost calls once it is ``opened``, and raises failures before. Thread safe.

    Without ``checkpoints`` stateful workers cannot be rebuilt once a step has ended; ``renewed`` receives the raw
    handles of new workers. ``publish`` is called while the trainer waits for results and a commit is being written."""

    inner: Port
    recovery: Recovery
    roles: Mapping[str, RoleTraits]
    checkpoints: Checkpoints | None = None
    opened: bool = False
    renewed: Callable[[Renewed], None] = lambda renewed: None
    publish: Callable[[], None] | None = None
    step: int = 0
    recoveries: int = 0
    log: call_log.CallLog = field(default_factory=call_log.CallLog)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._incarnations = dict(self.recovery.incarnations())
        self._unbuilt: set[ProcessId] = set()
        self._sender = call_log.CallSender(self.inner, self.recovery.epoch)
        self.transfers = Transfers(self._sender, self._request)
        self.committed: int | None = None

    @property
    def ended(self) -> int:
        """The last step whose calls will not be issued again."""
        return self._sender.settled

    def resume_from(self, step: int) -> None:
        """Set the last committed step, to which new workers are restored."""
        self.committed = self._sender.settled = step

    def close(self, why: errors.StepAbandoned) -> None:
        """Raise ``why`` in threads that still call, since another trainer object has taken over."""
        self._sender.closed = why

    def put(self, value: Any) -> Ref:
        stored = LoggedCall("", 0, None)
        stored.ref, stored.state = self.inner.put(value), CallState.ANSWERED
        return Ref(self, stored)

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        with self.lock:
            is_logged = self.log.is_open and call.call_id != RAW_CALL
            if is_logged:
                call = call_log.preserve_arguments(call, self.inner)
            logged = self.log.link(role, rank, call) if is_logged else LoggedCall(role, rank, call)
            logged.issue(self._sender.send(logged, call.sized))
            if is_logged:
                self.log.add(logged)
            run: Ref = logged.ref
            ref = run.rebind(self, logged)
            ref.size = call_log.CallProbe(logged) if call.sized else None
            return ref

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        """Wait as the inner port does; the deadline starts again after each recovery."""
        probes = [isinstance(ref.token, call_log.CallProbe) for ref in refs]
        calls: list[LoggedCall] = [
            ref.token.call if probe else ref.token for ref, probe in zip(refs, probes, strict=True)
        ]
        while True:
            runs = [call.ref for call in calls]
            awaited = [run.probe() if probe else run for run, probe in zip(runs, probes, strict=True)]
            outcomes = self._wait_and_publish(awaited, timeout_s)
            death = self._find_death_behind(outcomes)
            with self.lock:
                if death is not None:
                    self._recover({}, [death])
                elif self._record(calls, runs, outcomes):
                    call_log.mark_raised(calls, outcomes)
                    return outcomes

    def _wait_and_publish(self, runs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        """Wait as the inner port does, and publish a commit in between once it is written."""
        pause_s = _FIRST_LOOK_S
        # Another thread may publish it, and withdraw the function.
        while (publish := self.publish) is not None and (timeout_s is None or timeout_s > pause_s):
            outcomes = self.inner.wait(runs, pause_s)
            is_over = not any(outcome.late for outcome in outcomes) or any(outcome.error for outcome in outcomes)
            publish()
            if is_over:
                return outcomes
            timeout_s = None if timeout_s is None else timeout_s - pause_s
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return self.inner.wait(runs, timeout_s)

    def are_idle(self, members: Collection[ProcessId]) -> bool:
        with self.lock:
            return not any(call.member in members for call in self.log.running())

    def replace_late(self, late: errors.InvocationTimeout) -> None:
        """End the late workers, and rebuild their replacements without the late call."""
        if not self.opened:
            raise errors.CallError("workers are replaced from steps() on, not in init()")
        role, ranks = late.role, late.late
        with self.lock:
            self.log.drop_late(role, ranks, late.method, self.roles[role].together)
            deaths = [errors.WorkloadDied("it was late", role=role, rank=rank, method=late.method) for rank in ranks]
            for death in deaths:
                death.incarnation = self._incarnations.get(ProcessId(role, death.rank), 0)
            self._recover({}, deaths)

    def settle(self) -> None:
        """Wait until every call in the log has succeeded, even if the trainer did not wait for it. Raises a user's
        error that the trainer has not received yet, or StepAbandoned if a replay diverged."""
        while True:
            with self.lock:
                running = self.log.running()
                runs = [call.latest_run for call in running]
            if not running:
                break
            outcomes = self.inner.wait([run.probe() for run in runs], STRAGGLER_LOG_INTERVAL_S)
            death = self._find_death_behind(outcomes)
            with self.lock:
                if death is not None:
                    self._recover({}, [death])
                elif self._record(running, runs, outcomes):
                    call_log.log_late(running, outcomes)
        for call in self.log.all_calls():
            if call.state is CallState.FAILED and call.error is not None:
                raise call.error

    def ask(self, members: Iterable[ProcessId], verb: str, *request: Any) -> dict[ProcessId, Any]:
        """Send workers a request that is not a call of a step, and wait; ask all again if one had to be replaced."""
        recipients = list(members)
        answers = self._request(lambda: [self._sender.ask(member, verb, *request) for member in recipients])
        return dict(zip(recipients, answers, strict=True))

    def _request(self, send: Callable[[], Sequence[Ref]]) -> list[Any]:
        while True:
            with self.lock:
                outcomes = self._sender.finish(send())
                lost = [outcome.error for outcome in outcomes if isinstance(outcome.error, call_log.LOST_CALL_ERRORS)]
                if lost and self.opened:
                    self._recover({}, [error for error in lost if isinstance(error, errors.WorkloadDied)])
                    continue
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
            return [outcome.value for outcome in outcomes]

    def begin_step(self, step: int) -> None:
        with self.lock:
            self.step = step
            self.log.open(self.log.step)

    def end_step(self, step: int) -> None:
        """Drop the calls of ``step``, which will not be issued again."""
        with self.lock:
            self.log.close_step()
            self._sender.settled = step

    # -- the outcomes of calls ----------------------------------------------------------------------------------------

    def _record(self, calls: Sequence[LoggedCall], runs: Sequence[Ref], outcomes: Sequence[Outcome]) -> bool:
        """Record the outcomes of ``runs``, and recover lost ones. Returns False if some were issued again."""
        lost: _LostRuns = {}
        is_current = True
        for call, run, outcome in zip(calls, runs, outcomes, strict=True):
            if outcome.late:
                continue
            if not call.is_current(run):
                is_current = False  # another thread's recovery has issued it again
            elif outcome.error is not None and self._is_lost(call, outcome.error):
                lost[call] = run, outcome.error
            else:
                self._end(call, run, outcome.error)
        if lost and self.opened:
            self._recover(lost, [error for _, error in lost.values() if isinstance(error, errors.WorkloadDied)])
        elif lost:
            ended = self._poll(self.log.all_calls()).items()
            self._retry_all({**lost, **{call: run for call, run in ended if isinstance(run[1], errors.CallSkipped)}})
        return is_current and not lost

    def _end(self, call: LoggedCall, run: Ref, error: InvocationError | None) -> None:
        if isinstance(error, errors.StaleCall):
            self._sender.closed = error  # another trainer has taken over: calls of this one could run out of order
            raise error
        if self.opened and isinstance(error, errors.ReplayDiverged):
            raise errors.StepAbandoned(self.step, error)
        if not call.end(run, error):
            raise errors.StepAbandoned(self.step, error or RuntimeError("a replay diverged"))

    def _is_lost(self, call: LoggedCall, error: InvocationError) -> bool:
        """Return True if the error is not the call's own, so that issuing it again helps."""
        if not self.opened:
            return isinstance(error, errors.CallSkipped)  # an earlier call failed on an argument, without its worker
        if isinstance(error, call_log.LOST_CALL_ERRORS):
            return True
        sources = call_log.sources_of(call.call) if ProcessId(error.role, error.rank) != call.member else []
        self._poll(sources)
        # The error is of a call whose result this one takes. Has that call been issued again since?
        return bool(sources) and all(source.error is None for source in sources)

    def _poll(self, calls: Iterable[LoggedCall]) -> _LostRuns:
        """Record the calls that have ended by now; return the lost ones."""
        running = [(call, call.latest_run) for call in calls if call.is_running]
        outcomes = self.inner.wait([run.probe() for _, run in running], 0.0) if running else []
        lost: _LostRuns = {}
        for (call, run), outcome in zip(running, outcomes, strict=True):
            if isinstance(outcome.error, call_log.LOST_CALL_ERRORS):
                lost[call] = run, outcome.error
            elif not outcome.late:
                self._end(call, run, outcome.error)
        return lost

    def _find_death_behind(self, outcomes: Sequence[Outcome]) -> errors.WorkloadDied | None:
        """Return the death of another rank if a user's error is its echo."""
        for error in (outcome.error for outcome in outcomes if self.opened and outcome.error is not None):
            traits = self.roles.get(error.role)
            if isinstance(error, call_log.LOST_CALL_ERRORS) or traits is None or not traits.together:
                continue
            siblings = [ProcessId(error.role, rank) for rank in range(traits.size) if rank != error.rank]
            questions = [self._sender.ask(member, WHERE) for member in siblings]
            for outcome in self.inner.wait(questions, call_log.GRACE_S) if questions else ():
                if isinstance(outcome.error, errors.WorkloadDied):
                    return outcome.error
        return None

    # -- recovery: the lock is held -----------------------------------------------------------------------------------

    def _recover(self, lost: _LostRuns, deaths: Sequence[errors.WorkloadDied]) -> None:
        """Replace dead workers, and issue every call of the log that needs it again, in order."""
        self.recoveries += 1
        self._poll(self.log.all_calls())
        for death in deaths:
            self._renew(death)
        for _ in range(_MAX_ROUNDS):
            failure = self._rebuild()
            if failure is None:
                break
            if isinstance(failure, errors.WorkloadDied):
                self._renew(failure)
        else:
            raise errors.StepAbandoned(self.step, failure or RuntimeError("a recovery did not end"))
        self._retry_all({**lost, **self._poll(self.log.all_calls())})

    def _renew(self, death: errors.WorkloadDied) -> None:
        if 0 < death.incarnation < self._incarnations.get(ProcessId(death.role, death.rank), 0):
            return  # already replaced
        first_line = str(death).partition("\n")[0]
        renewed = self.recovery.renew(death.role, death.rank, death.incarnation, first_line)
        fresh = {
            member: incarnation
            for rank, incarnation in renewed.incarnations.items()
            if incarnation > self._incarnations.get(member := ProcessId(renewed.role, rank), 0)
        }
        if fresh:
            ranks = ", ".join(f"{member.rank}" for member in fresh)
            _LOG.warning("step %d: %s: replaced rank %s (%s)", self.step, renewed.role, ranks, first_line)
            self._incarnations.update(fresh)
            self._unbuilt.update(fresh)
            self.renewed(renewed)
        is_stateful = any(self.roles[member.role].stateful for member in fresh)
        if self.committed is not None and self.committed < self.ended and is_stateful:
            raise errors.StepAbandoned(self.step, death)

    def _rebuild(self) -> InvocationError | None:
        """Repeat the log on new workers. Return a further failure."""
        if self.checkpoints is not None and self.checkpoints.spread:
            busy = {call.member for call in self.log.running()}
            if lost := self.transfers.bring(self.checkpoints, list(self._unbuilt), self.committed, busy):
                return lost
        setup = [call for call in self.log.setup if call.member in self._unbuilt]
        runs = [self._repeat(call) for call in setup]
        stateful = [member for member in self._unbuilt if self.roles[member.role].stateful]
        restores: list[Ref] = []
        if stateful and self.committed is not None:
            if self.checkpoints is None:
                raise errors.StepAbandoned(self.step, errors.CheckpointMissing("no commits are kept"))
            request = self.checkpoints.restore_request(self.committed)
            restores = [self._sender.ask(member, RESTORE, request) for member in stateful]
        outcomes = self._sender.finish([*(run.probe() for run in runs), *restores], patient=True)
        deaths = [outcome.error for outcome in outcomes if isinstance(outcome.error, errors.WorkloadDied)]
        failure = deaths[0] if deaths else self._record_setup(setup, outcomes)
        if failure is not None:
            return failure
        for outcome in outcomes[len(setup) :]:
            if outcome.error is not None:
                self._discard_commit(outcome.error)
        for call in self.log.step:
            if call.member in self._unbuilt:
                self._repeat(call)
        self._unbuilt.clear()
        return None

    def _record_setup(self, calls: Sequence[LoggedCall], outcomes: Sequence[Outcome]) -> InvocationError | None:
        """Record repeated calls of ``init``; return the error of the first lost one."""
        for call, outcome in zip(calls, outcomes, strict=False):
            if isinstance(outcome.error, errors.ResultLost):
                self._issue_sources(call)
            if isinstance(outcome.error, call_log.LOST_CALL_ERRORS):
                return outcome.error
            if outcome.error is not None and call.error is None:
                raise outcome.error
            self._end(call, call.latest_run, outcome.error)
        return None

    def _discard_commit(self, error: InvocationError) -> None:
        """Abandon the step without the last commit, which a worker cannot restore, if it is damaged."""
        if is_damage(error) and self.checkpoints is not None and self.committed is not None:
            self.checkpoints.discard(self.committed, str(error.original))
            raise errors.StepAbandoned(self.step, error)
        raise error

    def _repeat(self, call: LoggedCall) -> Ref:
        run = self._sender.send(call, sized=True)
        call.repeat(run)
        return run

    def _retry_all(self, lost: _LostRuns) -> None:
        for call in self.log.sort(lost):
            run, error = lost[call]
            if not call.is_current(run):
                continue  # its worker is new, and the call was issued to it with all others
            if not call.can_retry:
                raise errors.StepAbandoned(self.step, error) if self.opened else error
            if isinstance(error, errors.ResultLost):
                self._issue_sources(call)
            call.retry(run, self._sender.send(call, sized=True))

    def _issue_sources(self, call: LoggedCall) -> None:
        for source in call_log.sources_of(call.call):
            if source.call is not None:
                source.issue(self._sender.send(source, sized=True))
