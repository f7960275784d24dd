# SPDX-License-Identifier: Apache-2.0
"""Other numbers of members for the roles of a running job, on request and for want of places."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from dlrover.python.rl.common.errors import CallError, InvalidJob, PlacementTimeout
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Resized
from dlrover.python.rl.control.resizing import can_resize
from dlrover.python.rl.control.state import JobState, ranks_of
from dlrover.python.rl.master.process.resizing import resizable
from dlrover.python.rl.runtime.process.inspection import Inspection, inspect_in_child
from dlrover.python.rl.runtime.ray.executor import RayExecutor

_NEXT_STEP_S, _POLL_S = 10.0, 0.05
_PLACES_S, _LOOK_S = 20.0, 1.0


def size_of(state: JobState, role: str) -> int:
    return len(ranks_of(state, role))


class Resizer:
    """Gives roles of a running job other numbers of members. ``state`` is the job's; ``decide`` has an event
    journalled, and returns once that is so, or the job is restarted."""

    def __init__(
        self,
        job: JobSpec,
        inspection: Inspection,
        executor: RayExecutor,
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
