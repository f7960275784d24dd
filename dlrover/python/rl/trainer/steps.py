# SPDX-License-Identifier: Apache-2.0
"""The steps of a trainer: the commit from which they begin, and the commit at the end of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.trainer.durable import DurablePort
from dlrover.python.rl.trainer.port import (
    COMMIT,
    FORGET,
    HELD,
    PERSIST,
    RESTORE,
    WHERE,
    WRITTEN,
    Checkpoints,
    Port,
    Recovery,
    RoleTraits,
    Standing,
    Transfer,
    is_damage,
    members_of,
)
from dlrover.python.rl.trainer.role_group import CallCounter

_LOG = get_logger(__name__)

T = TypeVar("T")

_LEFT = "\0left"  # beside the names of a user's state


@dataclass(frozen=True)
class Attempt:
    """One trainer object of a process: the number of objects before it, whether one of them has entered ``steps()``,
    and the reason for which the last one was abandoned."""

    number: int = 0
    opened: bool = False
    reason: str = ""


@dataclass
class _Pending:
    """A commit whose states are being written."""

    step: int
    answers: Mapping[ProcessId, Any]
    copied: Mapping[Transfer, str] | None = None  # None: not all states are written


class Steps:
    """The steps of one trainer object. Without ``recovery`` a lost worker ends it; without ``checkpoints`` there are no
    commits. ``note_step`` is called at the start of each step, and must return at once."""

    def __init__(
        self,
        port: Port,
        recovery: Recovery | None,
        checkpoints: Checkpoints | None,
        roles: Mapping[str, RoleTraits],
        attempt: Attempt,
        note_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._recovers, self._checkpoints, self._attempt = recovery is not None, checkpoints, attempt
        self._note_step = note_step
        recovery = recovery or Recovery()
        # After an earlier trainer, or trainer object, workers may have been replaced already.
        self.port = DurablePort(port, recovery, roles, checkpoints, opened=attempt.opened or not recovery.fresh)
        self.counter = CallCounter()
        self.state: dict[str, Any] = {}
        info = recovery.restart_info
        self.restart_info = replace(info, count=info.count + attempt.number, reason=attempt.reason or info.reason)
        self.commits = 0
        self._pending: _Pending | None = None
        self._as_new = set(members_of(self.port.roles)) if recovery.fresh and not attempt.number else set()
        self._loaded = False
        self._is_open = False
        self._running = 0  # the step whose body runs, or was left by break or return
        self._loops = 0
        self._left: list[int] = []  # the step in which each loop so far was left, 0 if it ran to its end

    def run(self, total: int) -> Iterator[int]:
        """Yield the steps after the last commit up to ``total``; end each after its body, usually with a commit.

        ::

            open ---> begin --> the user's body --> end -----.--> begin what comes after the loop
                        '<-----------------------------------'

        A body that is left by break or return ends at the next loop or the end of ``fit``.
        """
        self._commit_left_step()
        ended = self.open()
        self._loops += 1
        if len(self._left) >= self._loops:
            total = min(total, self._left[self._loops - 1] or total)
        for step in range(ended + 1, total + 1):
            self.begin(step)
            self._running = step
            yield step
            self.end(step, last=step == total)
        self.begin(max(ended, total) + 1)

    def open(self) -> int:
        """Restore trainer and workers to the newest commit; return its step. Later calls return the last ended step."""
        if self._is_open:
            return self.port.ended
        self._is_open = True
        if self._recovers and not self._attempt.opened:
            self.port.recovery.opened()
        self.port.opened = self._recovers
        self.port.settle()
        self.port.log.open(None)
        if self.port.log.overflowed:
            _LOG.warning("too many calls between init() and steps(): a new worker repeats only the calls in init()")
        if self._checkpoints is not None and self._checkpoints.spread:
            nodes = self.port.transfers.nodes
            self.port.transfers.locate(self.port.ask(members_of(self.port.roles), WHERE))
            member_on = {node: member for member, node in nodes.items()}
            answers = self.port.ask(member_on.values(), HELD, self._checkpoints.roots)
            self._checkpoints.found({node: answers[member] for node, member in member_on.items()})
        committed = 0
        if self._checkpoints is not None:
            committed = self._go_back()
            if self._checkpoints.adapts:
                standings = self.port.ask(members_of(self.port.roles), WHERE).values()
                self._checkpoints.set_deterministic(all(standing.deterministic for standing in standings))
        self.restart_info = replace(self.restart_info, step=committed)
        return committed

    def begin(self, step: int) -> None:
        if step == self.port.step:
            return  # the calls after a loop belong to the first step of the next one
        self.counter.open(step)
        self.port.begin_step(step)
        self.port.recovery.began(step)
        self._note_step(step)

    def end(self, step: int, last: bool = False) -> None:
        """End a step: publish the previous commit, and begin one of this step's states if it is due. Repeat both if a
        failure was recovered in between."""
        is_due = self._checkpoints is not None and (step == 0 or self._checkpoints.is_due(step, last))
        pending, is_whole = None, False
        while True:
            recoveries = self.port.recoveries
            self.port.settle()
            self._publish(waits=True)
            if self._checkpoints is not None and is_due:
                request = self._asked(self._checkpoints.commit_request, step, last)
                members = members_of(self.port.roles, stateful_only=True)
                pending = _Pending(step, self.port.ask(members, COMMIT, request))
                self._asked(self._checkpoints.save, step, dump_state(self.state, self._checkpoints.run, self._left))
                is_whole = self._complete(self._checkpoints, pending, asks=last, waits=last)
            if self.port.recoveries == recoveries:
                break
        self.port.end_step(step)
        self._pending, self._running = pending, 0
        if pending is None:
            if self._checkpoints is None:
                self._note_commit(step)
        elif is_whole:
            self._publish()
        else:
            self.port.publish = self._publish_if_idle

    def _complete(self, checkpoints: Checkpoints, pending: _Pending, asks: bool, waits: bool) -> bool:
        """Send the states to other nodes once all are written; return False before. ``asks``: ask the workers again."""
        if pending.copied is not None:
            return True
        transfers = self.port.transfers
        copies = checkpoints.copies(pending.answers, transfers.nodes)
        if copies is None and asks:
            members = members_of(self.port.roles, stateful_only=True)
            pending.answers = self.port.ask(members, WRITTEN, checkpoints.written_request(waits))
            copies = checkpoints.copies(pending.answers, transfers.nodes)
        pending.copied = transfers.make(copies) if copies is not None else None
        return copies is not None

    def _publish(self, waits: bool = False) -> bool:
        """Make the pending states a commit if all are written; return False if they are not."""
        pending, checkpoints = self._pending, self._checkpoints
        if pending is None or checkpoints is None:
            return True
        with self.port.lock:
            if self._pending is not pending:
                return True  # another thread has published it
            if not self._complete(checkpoints, pending, asks=True, waits=waits):
                return False
            self._asked(checkpoints.commit, pending.step, pending.answers, pending.copied)
            self._pending = self.port.publish = None
            self._note_commit(pending.step)
        self._send_own_part(checkpoints)
        return True

    def _publish_if_idle(self) -> None:
        """Publish the pending commit, unless a worker of it is busy and would answer later."""
        is_spread = self._checkpoints is not None and self._checkpoints.spread
        if self.port.are_idle(members_of(self.port.roles, stateful_only=not is_spread)):
            self._publish()

    def _note_commit(self, step: int) -> None:
        self.port.committed = step
        self.commits += step > 0
        if step > 0:
            self.port.recovery.progressed(step)

    def _commit_left_step(self, last: bool = False) -> None:
        """Commit a step whose loop was left; a trainer that continues from this commit does not resume the loop."""
        if self._running:
            self._left += [0] * (self._loops - len(self._left))
            self._left[self._loops - 1] = self._running
            self.end(self._running, last)

    def finish(self) -> None:
        """Wait, after ``fit``, for its running calls, the last commit, and its copy in the job's directory."""
        if self._running:
            self._commit_left_step(last=True)
            self._note_step(self.port.ended + 1)
        self.port.settle()
        self._publish(waits=True)
        if not self._is_open or self._checkpoints is None:
            return
        try:
            while (request := self._checkpoints.persist_request()) is not None:
                self._checkpoints.persisted(
                    self.port.ask(members_of(self.port.roles, stateful_only=True), PERSIST, request)
                )
        except (InvocationError, errors.CheckpointCorrupt, errors.CheckpointMissing, OSError) as error:
            _LOG.warning("the last commit is not in the job's directory: %s", error)

    @contextmanager
    def setup(self) -> Iterator[None]:
        """Record the calls of ``init``, which each new worker repeats with all further calls up to the first step."""
        self.port.log.open(self.port.log.setup)
        yield
        self.port.log.end_init()

    def forget(self) -> None:
        standings = self.port.ask(members_of(self.port.roles), WHERE)
        self._as_new = {member for member, standing in standings.items() if standing == Standing()}
        self.port.ask([member for member in standings if member not in self._as_new], FORGET)

    def can_go_back(self) -> bool:
        return self._is_open and self._recovers and self.port.committed is not None and self._checkpoints is not None

    def _go_back(self) -> int:
        assert self._checkpoints is not None
        while True:
            lost = ""
            try:
                step = self._checkpoints.newest()
            except errors.CheckpointMissing as error:
                step, lost = None, str(error)
            if step is None:
                self._start_over(lost)
                self.end(0, last=True)
                return 0
            try:
                saved = self._checkpoints.load(step)
                self._loaded = True
                run, left = load_state(self.state, saved)
                self._left = list(left) if run == self._checkpoints.run else []
                self._bring_members_to(step)
                self._send_own_part(self._checkpoints)
            except (InvocationError, errors.CheckpointCorrupt, errors.CheckpointMissing) as error:
                if not is_damage(error):
                    raise
                self._checkpoints.discard(step, str(error).partition("\n")[0])
            else:
                return step

    def _send_own_part(self, checkpoints: Checkpoints) -> None:
        """Send the trainer's part of the last commit to another node, if an earlier trainer could not."""
        self.port.transfers.make(checkpoints.trainers_copy(self.port.transfers.nodes))

    def _bring_members_to(self, step: int) -> None:
        assert self._checkpoints is not None
        self.port.resume_from(step)
        standings = self.port.ask(members_of(self.port.roles), WHERE)
        ahead = {member: standing.touched for member, standing in standings.items() if standing.touched > step + 1}
        if ahead:
            _LOG.warning("going back from step %d to step %d, the last committed one", max(ahead.values()), step)
        if ahead or any(standing.settled > step for standing in standings.values()):
            self.port.ask(standings, FORGET)  # all: ranks that meet have to meet again
        transfers = self.port.transfers
        while behind := self._members_not_at(step):
            self._as_new.difference_update(behind)
            transfers.make(self._checkpoints.transfers_to(step, behind, transfers.nodes))
            self.port.ask(behind, RESTORE, self._checkpoints.restore_request(step))

    def _members_not_at(self, step: int) -> list[ProcessId]:
        """Return the stateful workers that must be restored to ``step``. Ranks that meet in collectives are restored
        together, since the others would answer from kept results while one waits for them."""
        members = members_of(self.port.roles, stateful_only=True)
        standings = self.port.ask(members, WHERE)
        behind = {member for member, standing in standings.items() if not standing.agrees_with(step)}
        roles = {member.role for member in behind if self.port.roles[member.role].together}
        return [member for member in members if member in behind or member.role in roles]

    def _start_over(self, lost: str) -> None:
        """Begin at step 1, since no commit is left; ``lost`` describes the lost ones, ``""`` if none is known.

        Raises CheckpointMissing if a worker that was not replaced holds the state of a later step, StepAbandoned after
        replacing the workers that have loaded a part of a lost commit."""
        standings = self.port.ask(members_of(self.port.roles, stateful_only=True), WHERE)
        moved = [
            member
            for member, standing in standings.items()
            if standing.touched or not (standing.agrees_with(0) or member in self._as_new)
        ]
        commit = self._checkpoints.last_known if self._checkpoints is not None else None
        last = max([standing.touched for standing in standings.values()] + [commit.step if commit else 0])
        summary = f"{lost or 'no commit is left to go back to'}; the steps up to {last} are lost"
        current = self.port.recovery.incarnations()
        writers: Mapping[ProcessId, int] = commit.incarnations if commit is not None else {}
        survivors = [member for member in moved if member not in writers or current.get(member, 0) <= writers[member]]
        if survivors:
            names = ", ".join(map(str, survivors))
            raise errors.CheckpointMissing(f"{summary}; {names}, with a later state, cannot restart at step 1")
        if moved or self._loaded:
            for member in moved:
                self.port.recovery.renew(member.role, member.rank, current[member], "it holds a part of a lost commit")
            self.port.resume_from(0)
            raise errors.StepAbandoned(1, errors.CheckpointMissing(summary))
        if lost or self.restart_info.count:
            _LOG.warning(
                "%s; all stateful workers are new: the job begins again at step 1", summary if lost else "no commit"
            )

    def _asked(self, act: Callable[..., T], *args: Any) -> T:
        """Call ``act`` of the checkpoints. Raises StepAbandoned if it needs something that is lost."""
        try:
            return act(*args)
        except (errors.CheckpointCorrupt, errors.CheckpointMissing) as error:
            raise errors.StepAbandoned(self.port.step, error) from error


def dump_state(state: Mapping[str, Any], run: str = "", left: Sequence[int] = ()) -> dict[str, Any]:
    dumped = {
        name: {"object": value.state_dict()} if hasattr(value, "load_state_dict") else {"value": value}
        for name, value in state.items()
    }
    return {**dumped, _LEFT: {"value": [run, list(left)]}} if left else dumped


def load_state(state: dict[str, Any], saved: Mapping[str, Any]) -> tuple[str, Sequence[int]]:
    """Load objects in place, and replace plain values; return the run that left loops, and in which steps. Raises
    CallError if an object is missing from ``state``."""
    left: tuple[str, Sequence[int]] = ("", ())
    for name, entry in saved.items():
        if name == _LEFT:
            run, steps = entry["value"]
            left = run, steps
            continue
        if "value" in entry:
            state[name] = entry["value"]
        elif hasattr(state.get(name), "load_state_dict"):
            state[name].load_state_dict(entry["object"])
        else:
            raise errors.CallError(f"self.state['{name}'] was saved from an object: put one there in init()")
    return left
