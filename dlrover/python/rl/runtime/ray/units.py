"""What the executor remembers of the processes it has begun."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Cause, Event, MemberLost, Process, StandbyLost, TrainerLost
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.trainer.recovery import RestartInfo
from dlrover.python.rl.trainer.workload import MemberContext

TRAINER = "trainer"


@dataclass(frozen=True)
class Place:
    """What a process is in the job.

    Attributes:
        role: a role, or ``"trainer"``.
        at: the rank of a member, the number of a standby.
        standby: whether it is a standby.
    """

    role: str
    at: int = 0
    standby: bool = False

    def __str__(self) -> str:
        if self.role == TRAINER:
            return TRAINER
        return f"{self.role}-standby[{self.at}]" if self.standby else f"{self.role}[{self.at}]"

    @classmethod
    def parse(cls, who: str) -> "Place":
        """The place that ``"ROLLOUT[1]"``, ``"ROLLOUT-standby[2]"`` or ``"trainer"`` names."""
        name, _, at = who.rstrip("]").partition("[")
        return cls(name.removesuffix("-standby"), int(at or 0), name.endswith("-standby"))


@dataclass
class Unit:
    """A process that was begun.

    Attributes:
        place: what it is in the job.
        number: its incarnation or epoch, 0 for a standby.
        slot: which of its role's places it takes.
        standby: the standby it is or was, -1 for none.
        handle: its actor.
        process: where it is, None before that is known.
        up: whether it can be called.
        tasks: what waits for it.
    """

    place: Place
    number: int = 0
    slot: int = -1
    standby: int = -1
    handle: Any = None
    process: Process | None = None
    up: bool = False
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def forget(self) -> None:
        """What is still to come of it interests nobody."""
        for task in self.tasks:
            task.cancel()

    def lost(self, cause: Cause) -> Event:
        """The event that says that it is lost."""
        who, node = self.place, self.process.node if self.process else ""
        # A trainer that failed may name a member as the cause.
        named = cause if who.role == TRAINER and cause.who != "job" else _named(cause, str(who))
        if who.role == TRAINER:
            return TrainerLost(self.number, named, node)
        if who.standby:
            return StandbyLost(who.role, who.at, named, node)
        return MemberLost(who.role, who.at, self.number, named, node)


def _named(cause: Cause, who: str) -> Cause:
    return Cause(cause.kind, who, cause.message, cause.detail)


class Units:
    """The processes of a run, by their places."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._units: dict[Place, Unit] = {}

    def put(self, unit: Unit) -> None:
        """Remember a process; whoever had its place is forgotten."""
        self.take(unit.place)
        self._units[unit.place] = unit

    def take(self, place: Place) -> Unit | None:
        """Forget who has a place, and say who it was."""
        unit = self._units.pop(place, None)
        if unit is not None:
            unit.forget()
        return unit

    def holds(self, unit: Unit) -> bool:
        """Whether nobody else has taken the unit's place in the meantime."""
        return self._units.get(unit.place) is unit

    def find(self, place: Place) -> Unit | None:
        """Who has a place."""
        return self._units.get(place)

    def clear(self) -> None:
        """Forget all."""
        for place in list(self._units):
            self.take(place)

    def free_slot(self, role: str, preferred: int) -> int:
        """Which of its role's places a new process takes: the preferred one, or a free one when a standby has taken
        that."""
        taken = {unit.slot for unit in self._units.values() if unit.place.role == role}
        spec = self._job.workloads[RLRoleType(role)]
        free = [slot for slot in range(spec.num + spec.standby) if slot not in taken]
        return preferred if preferred in free or not free else free[0]

    def context(self, role: RLRoleType, rank: int, name: str, restart: RestartInfo) -> MemberContext:
        """Who a located member is among its peers, and why it starts again."""
        of_role = [unit for unit in self._units.values() if unit.place.role == role and not unit.place.standby]
        processes = {unit.place.at: unit.process or Process() for unit in of_role}
        on_node = sorted(at for at, process in processes.items() if process.node == processes[rank].node)
        first = processes.get(0, Process())
        return MemberContext(
            name=name,
            role=role,
            rank=rank,
            world_size=self._job.workloads[role].num,
            local_rank=on_node.index(rank),
            local_world_size=len(on_node),
            master_addr=first.address,
            master_port=first.port,
            collocation=",".join(self._job.collocation_of(role)),
            restart=restart,
        )


def units_of(state: JobState) -> Iterator[Unit]:
    """The processes that a state says are up, their handles still to be found."""
    for who, member in state.members.items():
        if member.process is not None:
            slot, place = member.process.slot, Place.parse(who)
            yield Unit(place, member.incarnation, slot, member.standby, process=member.process)
    for role, standbys in state.standbys.items():
        for number, standby in standbys.items():
            if standby.process is not None:
                place = Place(role, number, standby=True)
                yield Unit(place, 0, standby.process.slot, number, process=standby.process)
    if state.trainer.process is not None:
        yield Unit(Place(TRAINER), state.epoch, process=state.trainer.process)
