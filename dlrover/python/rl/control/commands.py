# SPDX-License-Identifier: Apache-2.0
"""The commands of the state machine. A repeated command finds what the first one has done."""

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
    """Start workers, in one rendezvous if the role's scope is GROUP, and watch them; answer ``MemberStarted`` or
    ``MemberLost`` for each."""

    role: str
    members: tuple[tuple[int, int], ...]  # rank and incarnation
    standbys: Mapping[int, int] = field(default_factory=dict)  # rank to the standby that becomes it
    excluded: tuple[str, ...] = ()
    rejoining: tuple[int, ...] = ()  # ranks that are up, and continue in their processes if they answer


@dataclass(frozen=True)
class Kill:
    """End the process with this number: a worker's incarnation, the trainer's epoch, or 0 for a standby, which frees
    its slot. No answer."""

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
    fresh: bool  # False: the workers hold results of an earlier epoch
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
