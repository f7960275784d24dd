"""What the machine wants done. Each command may be given again, and the second time finds what the first has done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Place:
    """Reserve the job's resources on nodes other than ``excluded``; answer ``Placed`` or ``Failed``."""

    incarnation: int
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class StartMembers:
    """Start these members of a role; they meet in one rendezvous when the role's scope is GROUP. Answer one
    ``MemberStarted`` each, or ``MemberLost``. Watch them from then on.

    Attributes:
        role: the role.
        members: rank and incarnation of each.
        standbys: rank to the number of the standby that shall become it, where there is one.
        excluded: nodes not to use.
    """

    role: str
    members: tuple[tuple[int, int], ...]
    standbys: Mapping[int, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class KillMember:
    """Make sure that this incarnation of a member is gone. No answer."""

    role: str
    rank: int
    incarnation: int


@dataclass(frozen=True)
class StartStandby:
    """Start a standby; answer ``StandbyReady`` or ``StandbyLost``."""

    role: str
    number: int
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class KillStandby:
    """Make sure that a standby is gone, and its place free. No answer."""

    role: str
    number: int


@dataclass(frozen=True)
class StartTrainer:
    """Start the trainer; answer ``TrainerStarted``, then ``StepsOpened``, then ``TrainerFinished`` or ``TrainerLost``.

    Attributes:
        epoch: its number.
        fresh: whether the members are as new; False: they hold what an earlier epoch did.
        restarts: how often the trainer or the whole job has restarted.
        reason: why it restarts, ``""`` the first time.
        excluded: nodes not to use.
    """

    epoch: int
    fresh: bool
    restarts: int = 0
    reason: str = ""
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class KillTrainer:
    """Make sure that this epoch of the trainer is gone. No answer."""

    epoch: int


@dataclass(frozen=True)
class Release:
    """End every process of the job and give its resources back; answer ``Released``. Shared memory is given back too
    when ``final``."""

    incarnation: int
    final: bool


@dataclass(frozen=True)
class Wait:
    """Answer ``WaitOver(timer)`` after ``delay_s``."""

    timer: str
    delay_s: float


Command: TypeAlias = (
    Place | StartMembers | KillMember | StartStandby | KillStandby | StartTrainer | KillTrainer | Release | Wait
)
