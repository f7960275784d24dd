"""Members that come back in this process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dlrover.python.rl.runtime.local.port import LocalHandle, LocalMember, LocalPort
from dlrover.python.rl.trainer.recovery import MemberId, Renewed, RestartInfo


def _nobody_listens(*told: int) -> None:
    pass


@dataclass
class LocalRecovery:
    """Puts a new member in the place of a killed one; implements
    :class:`~dlrover.python.rl.trainer.recovery.Recovery`.

    Args:
        port: calls the members.
        make: makes a member: role, rank, incarnation, and why.
        epoch: of the trainer.
        fresh: whether the members are as new.
        restart_info: why the trainer runs.
        on_opened: told when steps begin.
        on_progress: told of a commit after a start or a recovery.
    """

    port: LocalPort
    make: Callable[[str, int, int, str], LocalMember]
    epoch: int = 1
    fresh: bool = True
    restart_info: RestartInfo = field(default_factory=RestartInfo)
    on_opened: Callable[[], None] = _nobody_listens
    on_progress: Callable[[int], None] = _nobody_listens

    def incarnations(self) -> Mapping[MemberId, int]:
        return {
            (str(role), rank): member.incarnation
            for role, members in self.port.members.items()
            for rank, member in enumerate(members)
        }

    def renew(self, role: str, rank: int, incarnation: int, why: str) -> Renewed:
        members = self.port.members[role]
        if not members[rank].alive or members[rank].incarnation == incarnation:
            again = [at for at in range(len(members)) if at == rank or members[rank].together]
            for at in again:
                self.port.kill(role, at)
            for at in again:
                members[at] = self.make(role, at, members[at].incarnation + 1, why)
        numbers = {at: member.incarnation for at, member in enumerate(members)}
        return Renewed(role, numbers, {at: LocalHandle(self.port, role, at) for at in numbers})

    def opened(self) -> None:
        self.on_opened()

    def began(self, step: int) -> None:
        pass

    def progressed(self, step: int) -> None:
        self.on_progress(step)
