# SPDX-License-Identifier: Apache-2.0
"""Whether a role may have another number of members while its job runs."""

import asyncio
import time
from collections.abc import Callable, Collection
from difflib import get_close_matches

from dlrover.python.rl.common.errors import CallError, ConfigError, InvalidJob
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.resizing import can_resize
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.runtime.process.inspection import Inspection

MAX_MEMBERS = 10_000
_NEXT_STEP_S, _POLL_S = 10.0, 0.05


def resizable(job: JobSpec, state: JobState, inspection: Inspection, role: str, num: int) -> JobSpec:
    """The job as it would be. Raises InvalidJob for a role that never can, CallError for a job that cannot now."""
    name = job.name
    check_new_size(name, role, num, job.workloads)
    if why := _never(job, inspection, role):
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


async def until_next_step(step: Callable[[], int]) -> None:
    """What the trainer has done of a step would be lost with it; but a long step is not waited for."""
    began, until_s = step(), time.monotonic() + _NEXT_STEP_S
    while step() == began and time.monotonic() < until_s:
        await asyncio.sleep(_POLL_S)


def _never(job: JobSpec, inspection: Inspection, role: str) -> str:
    if role in inspection.stateful:
        return "its members hold a state that is committed for each rank"
    if role in inspection.collectives:
        return "its members meet in collectives"
    if together := [other for other in job.collocation_of(RLRoleType(role)) if other != role]:
        return f"it shares devices with {', '.join(together)}"
    return ""
