"""The trainer's side of getting members back: ask the master who takes a dead one's place, and call that from then on.

While the master itself is away the question is asked again until it is back.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlrover.python.rl.common.errors import JobFailed, MasterLost
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.control.commands import StartTrainer
from dlrover.python.rl.control.events import Cause, CauseKind
from dlrover.python.rl.runtime.ray.activity import Activity
from dlrover.python.rl.runtime.ray.actors import ask, find
from dlrover.python.rl.runtime.ray.port import RayPort
from dlrover.python.rl.trainer.recovery import MemberId, Renewed, RestartInfo

_LOG = get_logger(__name__)

_WAIT_S = 5.0
_ASK_S = 30.0
_TELL_EVERY = 20
"""Steps after which progress is told though nothing was lost: a report may have met a master that was away."""


@dataclass(frozen=True)
class Seat:
    """Who a member is for a trainer that starts: incarnation 0 and no handle for one that is being replaced."""

    role: str
    rank: int
    incarnation: int
    handle: Any


@dataclass(frozen=True)
class Replaced:
    """The members of a role as they are after a replacement: rank to incarnation and actor name."""

    members: Mapping[int, tuple[int, str]]


def replacement(  # noqa: PLR0913 -- what the master is asked, and how long
    master: Any, epoch: int, role: str, rank: int, incarnation: int, cause: Cause, timeout_s: float
) -> Replaced:
    """Wait until somebody has taken a dead member's place.

    Args:
        master: the master's handle.
        epoch: of the trainer that asks.
        role: the member's role.
        rank: its rank.
        incarnation: the one that is dead.
        cause: what was seen of its death.
        timeout_s: how long to go on asking.

    Raises:
        JobFailed: there will be no replacement.
        MasterLost: nobody answers.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            found: Replaced | None = ask(
                lambda: master.renew.remote(epoch, role, rank, incarnation, cause, _WAIT_S), _ASK_S
            )
        except MasterLost as error:
            if time.monotonic() > deadline_s:
                raise
            _LOG.warning("%s[%d] waits for its replacement: %s", role, rank, error)
            continue
        if found is not None:
            return found
        if time.monotonic() > deadline_s:
            raise JobFailed(f"nobody took the place of {role}[{rank}] within {timeout_s:g} s")


class RayRecovery:
    """How a trainer's members come back on Ray; implements :class:`~dlrover.python.rl.trainer.recovery.Recovery`.

    Args:
        master: the master's handle.
        port: what calls the members; told of each.
        seats: who is called at the beginning; one without a handle is waited for.
        command: what the brain says of this epoch.
        timeout_s: how long to wait for a replacement.
        activity: told while a replacement is waited for.
    """

    def __init__(  # noqa: PLR0913 -- what a trainer's process is given, one by one
        self,
        master: Any,
        port: RayPort,
        seats: Sequence[Seat],
        command: StartTrainer,
        timeout_s: float,
        activity: Activity,
    ) -> None:
        self.epoch, self.fresh = command.epoch, command.fresh
        self.restart_info = RestartInfo(command.restarts, command.reason)
        self.step = 0
        self._master, self._port, self._timeout_s, self._activity = master, port, timeout_s, activity
        self._handles: dict[MemberId, Any] = {}
        self._lock = threading.RLock()
        self._tell = True
        for seat in seats:
            if seat.handle is not None:
                self._call(seat.role, seat.rank, seat.handle, seat.incarnation)
        for seat in seats:
            if seat.handle is None:
                self.renew(seat.role, seat.rank, 0, "it was being replaced when the trainer started")

    def handles(self) -> dict[RLRoleType, list[Any]]:
        """Role to the handles of its members, in rank order."""
        with self._lock:
            found: dict[RLRoleType, list[Any]] = {}
            for (role, _), handle in sorted(self._handles.items(), key=lambda item: item[0]):
                found.setdefault(RLRoleType(role), []).append(handle)
            return found

    def incarnations(self) -> Mapping[MemberId, int]:
        return self._port.incarnations()

    def renew(self, role: str, rank: int, incarnation: int, why: str) -> Renewed:
        with self._activity.waiting(), self._lock:
            handles: dict[int, Any] = {}
            dead = incarnation
            while self.incarnations().get((role, rank), 0) <= dead:
                self._tell = True
                cause = Cause(CauseKind.PROCESS_DIED, f"{role}[{rank}]", why)
                found = replacement(self._master, self.epoch, role, rank, dead, cause, self._timeout_s)
                dead = max(dead, self._take(role, rank, found, handles))
            numbers = {at: number for (of, at), number in self.incarnations().items() if of == role}
            return Renewed(role, numbers, handles)

    def _take(self, role: str, rank: int, found: Replaced, handles: dict[int, Any]) -> int:
        """Call the replacements from now on; the incarnation of the wanted one if it is gone again already, else 0."""
        gone = 0
        for at, (incarnation, name) in found.members.items():
            if incarnation == self.incarnations().get((role, at), 0):
                continue
            handle = find(name)
            if handle is not None:
                self._call(role, at, handle, incarnation)
                handles[at] = handle
            elif at == rank:
                gone = incarnation
        return gone

    def _call(self, role: str, rank: int, handle: Any, incarnation: int) -> None:
        self._port.replace(role, rank, handle, incarnation)
        self._handles[role, rank] = handle

    def opened(self) -> None:
        ask(lambda: self._master.opened.remote(self.epoch), _ASK_S)

    def began(self, step: int) -> None:
        self.step = step

    def progressed(self, step: int) -> None:
        if self._tell or step % _TELL_EVERY == 0:
            self._master.progressed.remote(self.epoch, step)
            self._tell = False
