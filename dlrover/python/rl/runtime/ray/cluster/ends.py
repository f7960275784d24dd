# SPDX-License-Identifier: Apache-2.0
"""Noticing the ends of actors by what Ray's head publishes: looking costs no message, and none while they live."""

import asyncio
from typing import Any

from ray.core.generated.gcs_pb2 import ActorTableData
from ray.exceptions import ActorUnavailableError, RayActorError

_LOOK_S = 0.2


class ActorEnds:
    """One task looks at all actors that are waited for, on the event loop of the first who waits."""

    def __init__(self) -> None:
        self._watched: dict[asyncio.Future[None], Any] = {}
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, handle: Any) -> RayActorError:
        """The error of calls to the actor, once its process has ended, busy or not."""
        handle.dlrover_ping.remote()  # Ray follows the actors that this process has called
        ended = asyncio.get_running_loop().create_future()
        self._watched[ended] = handle
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        try:
            await ended  # waits: for the end of the process, which may never come
        finally:
            del self._watched[ended]
        while True:
            try:
                await handle.dlrover_ping.remote()  # waits: no longer than Ray needs to say that the actor is dead
            except ActorUnavailableError:
                pass
            except RayActorError as error:
                return error
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        try:
            while self._watched:
                self._look_at_all()
                await asyncio.sleep(_LOOK_S)
        finally:
            self._looking = None

    def _look_at_all(self) -> None:
        for ended, handle in self._watched.items():
            if ended.done():
                continue
            try:
                if handle._get_local_state() == ActorTableData.ActorState.DEAD:
                    ended.set_result(None)
            except Exception as error:  # noqa: BLE001 -- who waits must know that this end would not be noticed
                ended.set_exception(error)
