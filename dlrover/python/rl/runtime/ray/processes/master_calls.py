# SPDX-License-Identifier: Apache-2.0
"""Calls to the masters of jobs from an event loop: for whoever looks after many of them at once."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from dlrover.python.rl.common.errors import DLRoverRLError, MasterLost
from dlrover.python.rl.common.names import master_name
from dlrover.python.rl.runtime.ray.cluster.api import MEGABYTE, awaited
from dlrover.python.rl.runtime.ray.cluster.daemon_thread import in_daemon_thread
from dlrover.python.rl.runtime.ray.processes.actors import end, find

_RETRY_S = 0.5
_OURS = {"CPU": "cpu", "GPU": "gpu", "memory": "memory"}
_RAYS_OWN = ("node:", "object_store")


class MasterCalls:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The master's answer; repeated while it restarts.

        Raises:
            MasterLost: it is gone, or has not answered in time.
            DLRoverRLError: the error that it answered with.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                ref = getattr(self._handle, method).remote(*arguments)
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    return await awaited(ref)
            except ActorUnavailableError as error:
                if time.monotonic() + _RETRY_S > deadline_s:
                    raise MasterLost(f"the master did not come back within {timeout_s:g} s") from error
                await asyncio.sleep(_RETRY_S)
            except TimeoutError as error:
                raise MasterLost(f"the master did not answer within {timeout_s:g} s") from error
            except RayTaskError as error:
                if isinstance(error.cause, DLRoverRLError):
                    raise error.cause from None
                raise MasterLost(f"the master failed: {error.cause}") from error
            except RayActorError as error:
                raise MasterLost(f"the master is gone: {str(error).splitlines()[0]}") from error

    def end(self) -> None:
        with suppress(RayActorError, ValueError):
            end(self._handle)


async def find_master(job: str) -> MasterCalls | None:
    handle = await in_daemon_thread(find, master_name(job))
    return None if handle is None else MasterCalls(handle)


async def cluster_capacity() -> dict[str, float]:
    """What all nodes have: ``cpu``, ``gpu``, ``memory`` in MB, and custom resources."""
    amounts = await in_daemon_thread(ray.cluster_resources)
    return {
        _OURS.get(name, name): amount / MEGABYTE if name == "memory" else float(amount)
        for name, amount in amounts.items()
        if not name.startswith(_RAYS_OWN)
    }
