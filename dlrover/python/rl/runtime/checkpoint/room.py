# SPDX-License-Identifier: Apache-2.0
"""The room that the commits of a job need, before it starts.

::

    of a node's memory   2 commits, the one that is written, and 1 more while it is copied;
                         on several nodes also 3 of the node before
    of job_dir           checkpoint.keep copies of all states and the one that is written; with commit_to: job_dir also
                         the generations that would be in memory
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.log import short_number
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
from dlrover.python.rl.runtime.checkpoint.runs import is_on_one_node, roots_of

_KEPT = 3  # commits in memory, of which one is being written


@dataclass(frozen=True)
class Room:
    """Bytes in the memory of the node that needs most, and in the job's directory; of the states of all members,
    ``states`` is a line for people."""

    memory: int
    disk: int
    states: str


def room_for(job: JobSpec, placement: Placement, state_bytes: Mapping[str, int | None]) -> Room | None:
    """``state_bytes`` is that of one member of each role with state; None if one is not known."""
    own = [0] * max(len(placement.nodes), 1)
    parts = []
    for role, slots in placement.slots.items():
        nbytes = state_bytes.get(str(role), 0)
        if nbytes is None:
            return None
        for slot in slots:
            own[placement.position(slot.bundle)[0]] += nbytes
        if nbytes:
            parts.append(f"{role} {len(slots)} x {short_number(nbytes)}B")
    roots = roots_of(job, "", 1)
    most = sorted(own, reverse=True)
    neighbours = most[1] if len(most) > 1 and not is_on_one_node(job) else 0
    in_memory = (_KEPT + 1) * most[0] + _KEPT * neighbours
    disk = 0 if job.archive else (job.checkpoint.keep + 1) * sum(own)
    if roots.shared:
        in_memory, disk = 0, disk + (_KEPT + 1) * sum(own)
    return Room(in_memory, disk, ", ".join(parts))


def describe_room(room: Room | None) -> list[str]:
    """Lines for ``check``."""
    if room is None:
        return ["commits: the size of a state is not known before it is loaded"]
    if not room.states:
        return []
    memory = f"{short_number(room.memory)}B in the memory of a node at most, " if room.memory else ""
    return [f"commits: {room.states}; {memory}{short_number(room.disk)}B in the job's directory"]


def validate_room(job: JobSpec, room: Room | None) -> list[ConfigError]:
    """What cannot fit, where the job's nodes are like this machine."""
    if room is None:
        return []
    errors = []
    memory, folder = memory_path(job.name, "").parent.parent, job.run_folders or job.job_dir
    if is_on_one_node(job) and 0 < _size_of(memory) < room.memory:
        advice = "checkpoint.commit_to: job_dir needs no memory"
        errors.append(_misfit("checkpoint.commit_to", room.memory, memory, advice))
    if 0 < _size_of(folder) < room.disk:
        errors.append(_misfit("job_dir", room.disk, folder, "checkpoint.keep: 1 and another disk are what helps"))
    return errors


def _misfit(where: str, nbytes: int, folder: Path, advice: str) -> ConfigError:
    need, has = short_number(nbytes), short_number(_size_of(folder))
    return ConfigError(where, f"commits need {need}B in {folder}, which has {has}B in all: {advice}")


def _size_of(folder: Path) -> int:
    """0 for what is no disk."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    disk = os.statvfs(existing)
    return disk.f_blocks * disk.f_frsize
