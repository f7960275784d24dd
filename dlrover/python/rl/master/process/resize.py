# SPDX-License-Identifier: Apache-2.0
"""Other numbers of members for the roles of a running job, on request and for want of places."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from difflib import get_close_matches
from typing import TYPE_CHECKING

from dlrover.python.rl.common.errors import CallError, ConfigError, InvalidJob, PlacementTimeout
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Resized
from dlrover.python.rl.control.resizing import can_resize
from dlrover.python.rl.control.state import JobState, ranks_of
from dlrover.python.rl.runtime.member.inspection import Inspection, inspect_in_child

if TYPE_CHECKING:
    from dlrover.python.rl.runtime.ray.executor import RayExecutor  # a check of a job needs no Ray

MAX_MEMBERS = 10_000

_NEXT_STEP_S, _POLL_S = 10.0, 0.05
_PLACES_S, _LOOK_S = 20.0, 1.0


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


class Resizer:
    """Gives roles of a running job other numbers of members. ``state`` is the job's; ``decide`` has an event
    journalled, and returns once that is so, or the job is restarted."""

    def __init__(
        self,
        job: JobSpec,
        inspection: Inspection,
        executor: "RayExecutor",
        state: Callable[[], JobState],
        decide: Callable[[Resized], Awaitable[None]],
    ) -> None:
        self._job, self._inspection, self._executor, self._state, self._decide = (
            job,
            inspection,
            executor,
            state,
            decide,
        )
        self._lock = asyncio.Lock()

    async def resize(self, role: str, num: int) -> None:
        """Raises CallError or InvalidJob if it cannot be, and then nothing has changed."""
        async with self._lock:
            name, job = self._job.name, resizable(self._job, self._state(), self._inspection, role, num)
            errors = (await asyncio.to_thread(inspect_in_child, job)).errors
            if errors:
                raise InvalidJob(list(errors))
            try:
                await self._executor.reservations.enlarge(self._state(), role, num, _PLACES_S)
            except PlacementTimeout as error:
                raise CallError(f"{role} of '{name}' stays as it is: {error}") from error
            await self._at_next_step(Resized(role, num))
        if size_of(self._state(), role) != num:
            raise CallError(f"'{name}' was restarted meanwhile: try again")

    async def watch_places(self) -> None:
        """Roles that have fewer members for want of places get them back, until the job ends."""
        while not self._state().phase.terminal:
            await asyncio.sleep(_LOOK_S)
            for role, wanted in self._state().wanted.items():
                await self._grow(role, wanted)

    async def _grow(self, role: str, wanted: int) -> None:
        num = await self._executor.reservations.places(RLRoleType(role), wanted)
        async with self._lock:
            if num > size_of(self._state(), role) and can_resize(self._state(), role):
                await self._at_next_step(Resized(role, num, wanted))

    async def _at_next_step(self, event: Resized) -> None:
        """What the trainer has done of a step would be lost with it; but a long step is not waited for."""
        began, until_s = self._executor.open_step, time.monotonic() + _NEXT_STEP_S
        while self._executor.open_step == began and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        await self._decide(event)
