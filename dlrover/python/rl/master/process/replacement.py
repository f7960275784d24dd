# SPDX-License-Identifier: Apache-2.0
"""What the trainer is told of a member that it found dead."""

from collections.abc import Callable

from dlrover.python.rl.common.errors import JobFailed
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.state import JobState, Member, MemberPhase, Phase, ranks_of
from dlrover.python.rl.runtime.ray.processes.trainer import Replaced


def find_up(state: JobState, role: str, rank: int, incarnation: int) -> Member | None:
    member = state.members.get(ProcessId(role, rank))
    is_up = member is not None and member.incarnation == incarnation and member.phase is MemberPhase.UP
    return member if is_up else None


def replacement(  # noqa: PLR0913 -- one decision
    state: JobState, role: str, rank: int, incarnation: int, whole: bool, name_of: Callable[[str, int, int, int], str]
) -> Replaced | None:
    """The process after ``incarnation`` of a member, with its group if that is replaced as a ``whole``; None while it
    is not there yet. Raises JobFailed if there will be none."""
    if state.phase is not Phase.RUNNING:
        lost = ProcessId(role, rank)
        raise JobFailed(f"{lost} is not replaced: the job is {state.phase.value}. {state.reason}".strip())
    group = {at: state.members.get(ProcessId(role, at)) for at in ranks_of(state, role)}
    member = group.get(rank)
    if member is None or member.incarnation <= incarnation or member.phase is not MemberPhase.UP:
        return None
    up = {at: peer for at, peer in group.items() if peer is not None and peer.phase is MemberPhase.UP}
    if whole and len(up) < len(group):
        return None
    return Replaced({at: (peer.incarnation, name_of(role, at, peer.first, peer.standby)) for at, peer in up.items()})
