"""The steps of a trainer: where they begin, what is theirs, and the commit at the end of each."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dlrover.python.rl.common.errors import (
    CallError,
    CheckpointCorrupt,
    CheckpointMissing,
    InvocationError,
    JobFailed,
    StepAbandoned,
)
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.trainer.durable import DurablePort
from dlrover.python.rl.trainer.port import COMMIT, FORGET, PERSIST, RESTORE, WHERE, Port, Standing
from dlrover.python.rl.trainer.recovery import (
    Checkpoints,
    MemberId,
    Recovery,
    Renewed,
    RestartInfo,
    RoleTraits,
    is_damage,
)
from dlrover.python.rl.trainer.role_group import CallCounter

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Attempt:
    """Which trainer object of its process this is.

    Attributes:
        number: how many were before it.
        opened: whether one of them had entered ``steps()``.
        reason: why the last one was given up.
    """

    number: int = 0
    opened: bool = False
    reason: str = ""


class NoRecovery:
    """Lost members do not come back: a loss ends the trainer."""

    epoch = 1
    fresh = True
    restart_info = RestartInfo()

    def incarnations(self) -> Mapping[MemberId, int]:
        return {}

    def renew(self, role: str, rank: int, incarnation: int, why: str) -> Renewed:
        raise JobFailed(f"{role}[{rank}] is lost, and nobody replaces it here: {why}")

    def opened(self) -> None:
        pass

    def began(self, step: int) -> None:
        pass

    def progressed(self, step: int) -> None:
        pass


class Steps:
    """The steps of one trainer object.

    Args:
        port: how members are called.
        recovery: how lost members come back; None: they do not.
        checkpoints: where commits are kept; None: nowhere.
        roles: role to what recovery must know of it.
        attempt: which trainer object of its process this is.

    Attributes:
        port: what role groups call through.
        counter: numbers the calls.
        state: the trainer's own state.
        restart_info: why this trainer runs again, and the step it goes on after.
        commits: how many steps it has committed.
    """

    def __init__(
        self,
        port: Port,
        recovery: Recovery | None,
        checkpoints: Checkpoints | None,
        roles: Mapping[str, RoleTraits],
        attempt: Attempt,
    ) -> None:
        self._recovery: Recovery = recovery or NoRecovery()
        self._recovers, self._checkpoints, self._attempt = recovery is not None, checkpoints, attempt
        # Who takes over from an earlier trainer, or trainer object, finds members that are replaced already.
        opened = attempt.opened or not self._recovery.fresh
        self.port = DurablePort(port, self._recovery, roles, checkpoints, opened)
        self.counter = CallCounter()
        self.state: dict[str, Any] = {}
        info = self._recovery.restart_info
        self.restart_info = replace(info, count=info.count + attempt.number, reason=attempt.reason or info.reason)
        self.commits = 0
        self._as_new = set(self.port.members()) if self._recovery.fresh and not attempt.number else set()
        self._loaded = False
        self._begun = False

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, total: int) -> Iterator[int]:
        """Yield the steps after the last commit up to ``total``, and commit each at the end of its body.

        ::

            open ---> begin --> the user's body --> commit --.--> begin what comes after the loop
                        '<-----------------------------------'
        """
        committed = self.open()
        for step in range(committed + 1, total + 1):
            self.begin(step)
            yield step
            self.commit(step, last=step == total)
        self.begin(max(committed, total) + 1)

    def open(self) -> int:
        """Bring everybody to the newest commit; returns its step. A second loop goes on where the first has ended."""
        if self._begun:
            return self.port.committed or 0
        self._begun = True
        if self._recovers and not self._attempt.opened:
            self._recovery.opened()
        self.port.opened = self._recovers
        self.port.settle()
        self.port.log.end()
        if self.port.log.gave_up:
            _LOG.warning("too many calls between init() and steps(): a new member repeats only those of init()")
        committed = self._go_back() if self._checkpoints is not None else 0
        self.restart_info = replace(self.restart_info, step=committed)
        return committed

    def begin(self, step: int) -> None:
        """Calls from here on belong to ``step``."""
        if step == self.port.step:
            return  # what came after a loop goes on in the next one
        self.counter.open(step)
        self.port.begin_step(step)
        self._recovery.began(step)

    def commit(self, step: int, last: bool = False) -> None:
        """Every stateful member and the trainer write their state after ``step``: from now on that is where everything
        goes on. Ends only when nothing had to be recovered meanwhile."""
        while True:
            recoveries = self.port.recoveries
            self.port.settle()
            answers = {}
            if self._checkpoints is not None:
                request = self._checkpoints.commit_request(step, last)
                answers = self.port.ask(self.port.members(stateful_only=True), COMMIT, request)
            if self.port.recoveries == recoveries:
                break
        if self._checkpoints is not None:
            self._publish(self._checkpoints, step, answers)
        self.port.commit(step)
        self.commits += step > 0
        if step > 0:
            self._recovery.progressed(step)

    def finish(self) -> None:
        """``fit`` has returned: wait for what it left running, and for the copy in the job's directory."""
        if not self._begun:
            return
        self.port.settle()
        request = self._checkpoints.persist_request() if self._checkpoints is not None else None
        if self._checkpoints is None or request is None:
            return
        try:
            answers = self.port.ask(self.port.members(stateful_only=True), PERSIST, request)
            self._checkpoints.persisted(answers)
        except (InvocationError, CheckpointCorrupt, CheckpointMissing, OSError) as error:
            _LOG.warning("the last commit is not in the job's directory: %s", error)

    # -- going back ---------------------------------------------------------------------------------------------------

    @contextmanager
    def setup(self) -> Iterator[None]:
        """Calls made inside are those of ``init``. They, and those up to the first step, are repeated for every member
        that takes another's place."""
        self.port.log.begin_setup()
        yield
        self.port.log.end_init()

    def forget(self) -> None:
        """Let members forget the steps that an earlier trainer object has made."""
        standings = self.port.ask(self.port.members(), WHERE)
        self._as_new = {member for member, standing in standings.items() if standing == Standing()}
        self.port.ask([member for member in standings if member not in self._as_new], FORGET)

    def can_go_back(self) -> bool:
        """Whether there is a commit that another trainer object could go on from."""
        return self._begun and self._recovers and self.port.committed is not None and self._checkpoints is not None

    def _go_back(self) -> int:
        assert self._checkpoints is not None
        while (step := self._newest(self._checkpoints)) is not None:
            try:
                saved = self._checkpoints.load(step)
                self._loaded = True
                load_state(self.state, saved)
                self._bring_members_to(step)
            except (InvocationError, CheckpointCorrupt, CheckpointMissing) as error:
                if not is_damage(error):
                    raise
                self._checkpoints.discard(step, str(error).partition("\n")[0])
                continue
            return step
        self.commit(0)
        return 0

    def _newest(self, checkpoints: Checkpoints) -> int | None:
        """The step to go back to; None: there is none, and everybody is as ``init`` has left them."""
        lost = ""
        try:
            step = checkpoints.newest()
        except CheckpointMissing as error:
            step, lost = None, str(error)
        if step is None:
            self._start_over(lost)
        return step

    def _bring_members_to(self, step: int) -> None:
        assert self._checkpoints is not None
        self.port.go_on_from(step)
        standings = self.port.ask(self.port.members(), WHERE)
        ahead = {member: standing.touched for member, standing in standings.items() if standing.touched > step + 1}
        if ahead:
            _LOG.warning(
                "the later commits are gone: from step %d everybody goes back to %d", max(ahead.values()), step
            )
        self.port.ask(ahead, FORGET)
        while behind := self._members_not_at(step):
            self._as_new.difference_update(behind)
            self.port.ask(behind, RESTORE, self._checkpoints.restore_request(step))

    def _members_not_at(self, step: int) -> list[MemberId]:
        """The stateful members that must go back to get to ``step``: where one rank of those that meet in collectives
        must, all must, or the others would answer from what they kept while it waits for them."""
        members = self.port.members(stateful_only=True)
        standings = self.port.ask(members, WHERE)
        behind = {member for member, standing in standings.items() if not standing.agrees_with(step)}
        roles = {role for role, _ in behind if self.port.roles[role].together}
        return [member for member in members if member in behind or member[0] in roles]

    def _start_over(self, lost: str) -> None:
        """There is nothing to go back to (``lost`` says what was, ``""``: nothing is known of): see to it that
        everybody begins at step 1.

        Raises:
            CheckpointMissing: a member that nobody has replaced holds the state of a later step.
            StepAbandoned: what was lost had been partly loaded already. Those who have it are replaced now, and another
                trainer object begins at step 1.
        """
        standings = self.port.ask(self.port.members(stateful_only=True), WHERE)
        moved = [member for member, standing in standings.items() if not self._is_new(member, standing)]
        known = self._checkpoints.last_known() if self._checkpoints is not None else None
        last = max([standing.touched for standing in standings.values()] + [known.step if known else 0])
        what = f"{lost or 'no commit is left to go back to'}; the steps up to {last} are lost"
        current = self._recovery.incarnations()
        wrote: Mapping[MemberId, int] = known.incarnations if known is not None else {}
        survivors = [member for member in moved if member not in wrote or current.get(member, 0) <= wrote[member]]
        if survivors:
            raise CheckpointMissing(f"{what}, and {_names(survivors)} cannot begin again: they hold a later state")
        if moved or self._loaded:
            for role, rank in moved:
                self._recovery.renew(role, rank, current[role, rank], "it holds a part of a commit that is lost")
            self.port.go_on_from(0)
            raise StepAbandoned(1, CheckpointMissing(what))
        if lost or self.restart_info.count:
            _LOG.warning(
                "%s; all stateful members are new: the job begins again at step 1", what if lost else "no commit"
            )

    def _is_new(self, member: MemberId, standing: Standing) -> bool:
        """Whether a member is as ``init`` has left it."""
        return standing.touched == 0 and (standing.agrees_with(0) or member in self._as_new)

    def _publish(self, checkpoints: Checkpoints, step: int, answers: Mapping[MemberId, Any]) -> None:
        try:
            checkpoints.commit(step, answers, dump_state(self.state))
        except (CheckpointCorrupt, CheckpointMissing) as error:
            raise StepAbandoned(step, error) from error


def _names(members: list[MemberId]) -> str:
    return ", ".join(f"{role}[{rank}]" for role, rank in members)


def dump_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's state as a plain tree: objects give their ``state_dict()``."""
    return {
        name: {"object": value.state_dict()} if hasattr(value, "load_state_dict") else {"value": value}
        for name, value in state.items()
    }


def load_state(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Load objects in place, and put plain values where they were.

    Raises:
        CallError: an object is not there.
    """
    for name, entry in saved.items():
        if "value" in entry:
            state[name] = entry["value"]
        elif hasattr(state.get(name), "load_state_dict"):
            state[name].load_state_dict(entry["object"])
        else:
            raise CallError(f"self.state['{name}'] was saved from an object: put it there in init(), before steps()")
