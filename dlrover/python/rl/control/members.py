# SPDX-License-Identifier: Apache-2.0
"""The members of a job, in a mapping that is immutable and yet quick to change."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import Process

_CHUNK = 64


class MemberPhase(StrEnum):
    WAITING = "waiting"  # no process: it is not due yet, or a back-off runs
    STARTING = "starting"
    UP = "up"


@dataclass(frozen=True)
class Member:
    incarnation: int  # of its process, or of the next one
    phase: MemberPhase = MemberPhase.WAITING
    process: Process | None = None  # while it is up
    standby: int = -1  # the standby that it is or was, -1 for none
    born: int = 0  # the incarnation with which its process began, 0: this one

    @property
    def first(self) -> int:
        """The incarnation with which its process began."""
        return self.born or self.incarnation

    def next(self, in_its_process: bool = False) -> "Member":
        return Member(self.incarnation + 1, born=self.first if in_its_process else 0)


_Chunks = tuple[tuple[Member, ...], ...]


class Members(Mapping[ProcessId, Member]):
    """The members by role and rank, which count from 0, in that order. A change copies only the chunks of ranks that it
    is in, so that an event costs the same with ten members and with ten thousand. ``up`` of them are up."""

    __slots__ = ("_ids", "_roles", "up")

    def __init__(self, members: Mapping[ProcessId, Member] | None = None) -> None:
        ranks: dict[str, dict[int, Member]] = {}
        for process_id, member in (members or {}).items():
            ranks.setdefault(process_id.role, {})[process_id.rank] = member
        self._roles: dict[str, _Chunks] = {role: _chunks(by_rank) for role, by_rank in ranks.items()}
        self._ids = [ProcessId(role, rank) for role, by_rank in ranks.items() for rank in range(len(by_rank))]
        self.up = sum(member.phase is MemberPhase.UP for member in self.values())

    def replacing(self, changes: Mapping[ProcessId, Member]) -> "Members":
        """With other values of members that it has; raises KeyError for others."""
        changed: dict[tuple[str, int], list[Member]] = {}
        up = self.up
        for process_id, member in changes.items():
            place = process_id.role, process_id.rank // _CHUNK
            chunk = changed.get(place)
            if chunk is None:
                chunk = changed[place] = list(self._chunk(process_id))
            up += (member.phase is MemberPhase.UP) - (chunk[process_id.rank % _CHUNK].phase is MemberPhase.UP)
            chunk[process_id.rank % _CHUNK] = member
        roles = {role: list(self._roles[role]) for role, _ in changed}
        for (role, number), chunk in changed.items():
            roles[role][number] = tuple(chunk)
        other = Members()
        other._roles = self._roles | {role: tuple(chunks) for role, chunks in roles.items()}
        other._ids, other.up = self._ids, up
        return other

    def changed_since(self, before: "Members") -> Iterator[ProcessId]:
        """The members whose values may differ, among those that ``before`` has."""
        for role, chunks in before._roles.items():
            now = self._roles.get(role, ())
            for number, chunk in enumerate(chunks):
                if number >= len(now) or now[number] is not chunk:
                    yield from (ProcessId(role, number * _CHUNK + at) for at in range(len(chunk)))

    def __getitem__(self, process_id: ProcessId) -> Member:
        return self._chunk(process_id)[process_id.rank % _CHUNK]

    def __contains__(self, process_id: object) -> bool:
        return isinstance(process_id, ProcessId) and self.get(process_id) is not None

    def get(self, process_id: ProcessId, default: Member | None = None) -> Member | None:  # type: ignore[override]
        try:
            return self[process_id]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[ProcessId]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def values(self) -> Iterator[Member]:  # type: ignore[override]
        return chain.from_iterable(chain.from_iterable(self._roles.values()))

    def items(self) -> Iterator[tuple[ProcessId, Member]]:  # type: ignore[override]
        return zip(self._ids, self.values(), strict=True)

    def _chunk(self, process_id: ProcessId) -> tuple[Member, ...]:
        chunks, number = self._roles.get(process_id.role, ()), process_id.rank // _CHUNK
        if process_id.kind is not process_id.kind.MEMBER or not 0 <= number < len(chunks):
            raise KeyError(process_id)
        if process_id.rank % _CHUNK >= len(chunks[number]):
            raise KeyError(process_id)
        return chunks[number]

    def __repr__(self) -> str:
        return f"Members({dict(self)!r})"


def _chunks(ranks: Mapping[int, Member]) -> _Chunks:
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"the ranks of a role count from 0: {sorted(ranks)}")
    members = (ranks[rank] for rank in range(len(ranks)))
    return tuple(iter(lambda: tuple(islice(members, _CHUNK)), ()))
