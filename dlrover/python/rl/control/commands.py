# SPDX-License-Identifier: Apache-2.0
"""The machine's orders. A command may be repeated: the second time finds what the first has done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dlrover.python.rl.common.names import ProcessId


@dataclass(frozen=True)
class Place:
    """Reserve the job's resources on nodes other than ``excluded``; answer ``Placed`` or ``Failed``."""

    incarnation: int
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class StartMembers:
    """Start workers, which meet in one rendezvous when the role's scope is GROUP, and watch them; answer one
    ``MemberStarted`` or ``MemberLost`` each."""

    role: str
    members: tuple[tuple[int, int], ...]  # rank and incarnation
    standbys: Mapping[int, int] = field(default_factory=dict)  # rank to the standby that becomes it
    excluded: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()  # ranks that are up, and go on in their processes if they answer


@dataclass(frozen=True)
class Kill:
    """End a process of this number, a worker's incarnation or the trainer's epoch, or a standby, whose slot is free
    then. No answer."""

    process_id: ProcessId
    number: int = 0


@dataclass(frozen=True)
class StartStandby:
    """Start a standby; answer ``StandbyReady`` or ``StandbyLost``."""

    role: str
    number: int
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class StartTrainer:
    """Start the trainer; answer ``TrainerStarted``, ``StepsOpened``, then ``TrainerFinished`` or ``TrainerLost``."""

    epoch: int
    fresh: bool  # False: the workers hold the results of an earlier epoch
    restarts: int = 0  # of the trainer or the whole job
    reason: str = ""  # why it restarts
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Release:
    """End every process of the job and release its resources; answer ``Released``."""

    incarnation: int
    final: bool  # release shared memory too


@dataclass(frozen=True)
class Wait:
    """Answer ``WaitOver(timer)`` after ``delay_s``."""

    timer: str
    delay_s: float


Command: TypeAlias = Place | StartMembers | StartStandby | StartTrainer | Kill | Release | Wait
