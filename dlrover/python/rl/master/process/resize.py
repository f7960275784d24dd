# SPDX-License-Identifier: Apache-2.0
"""Other numbers of members for the roles of a running job, on request and for want of places."""

from collections.abc import Collection
from difflib import get_close_matches

from dlrover.python.rl.common.errors import CallError, ConfigError, InvalidJob
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.machine import can_resize
from dlrover.python.rl.control.state import JobState, ranks_of
from dlrover.python.rl.runtime.member.inspection import Inspection

MAX_MEMBERS = 10_000


def resizable(job: JobSpec, state: JobState, inspection: Inspection, role: str, num: int) -> JobSpec:
    """The job as it would be. Raises InvalidJob for a role that never can, CallError for a job that cannot now."""
    name = job.name
    check_new_size(name, role, num, job.workloads)
    if why := never_resized(job, inspection, role):
        raise InvalidJob([ConfigError("role", f"{role} of '{name}' cannot be resized: {why}")])
    if not can_resize(state, role):
        raise CallError(f"'{name}' can be resized once it does steps, and not while it restarts or ends")
    sizes = {other: spec.num for other, spec in state.settings.roles.items()} if state.settings else {}
    return job.with_sizes({**sizes, role: num})


def check_new_size(name: str, role: str, num: int, roles: Collection[str]) -> None:
    """Raises InvalidJob unless the job ``name`` has the role, and it may have ``num`` members."""
    if role not in roles:
        near = get_close_matches(role, list(roles), n=1, cutoff=0.4)
        hint = f": did you mean '{near[0]}'?" if near else f"; it has {', '.join(sorted(roles))}"
        raise InvalidJob([ConfigError("role", f"'{name}' has no role '{role}'{hint}")])
    if not 1 <= num <= MAX_MEMBERS:
        raise InvalidJob([ConfigError("num", f"{num} is not between 1 and {MAX_MEMBERS}")])


def validate_least(job: JobSpec, inspection: Inspection) -> list[ConfigError]:
    """The roles that may not go on with fewer members."""
    found = []
    for role, spec in job.workloads.items():
        why = never_resized(job, inspection, role) if spec.min else ""
        if spec.min > spec.num:
            why = f"num is {spec.num}"
        if spec.min and job.scheduling_strategy == "SIMPLE":
            why = "with scheduling_strategy SIMPLE nothing is reserved, so nobody knows what is missing"
        found += [ConfigError(f"workload.{role.lower()}.min", f"{spec.min} cannot be: {why}")] if why else []
    return found


def never_resized(job: JobSpec, inspection: Inspection, role: str) -> str:
    """Why the role cannot have another number of members while its job runs; empty if it can."""
    if role in inspection.stateful:
        return "its members hold a state that is committed for each rank"
    if role in inspection.collectives:
        return "its members meet in collectives"
    if together := [other for other in job.collocation_of(RLRoleType(role)) if other != role]:
        return f"it shares devices with {', '.join(together)}"
    return ""


def size_of(state: JobState, role: str) -> int:
    return len(ranks_of(state, role))
