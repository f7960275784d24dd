"""Knowing at once that a process is gone, and why."""

import asyncio
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from dlrover.python.rl.control.events import Cause, Process
from dlrover.python.rl.runtime.ray.actors import session_folder
from dlrover.python.rl.runtime.ray.failures import MemberGone, classify
from dlrover.python.rl.runtime.stacks import ray_worker_log_tail

WATCH_INTERVAL_S = 0.5
_UNAVAILABLE_TRIES = 20
_UNAVAILABLE_PAUSE_S = 0.1


async def until_gone(who: str, handle: Any) -> MemberGone:
    """Hold a ping pending on a process: it fails the moment the process is gone, busy or not."""
    unavailable = 0
    while True:
        try:
            await handle.dlrover_ping.remote()  # waits: for the end of the process, which may never come
            unavailable = 0
        except ActorUnavailableError as error:
            unavailable += 1  # a broken connection is not yet a death
            if unavailable > _UNAVAILABLE_TRIES:
                return MemberGone(who, error)
            await asyncio.sleep(_UNAVAILABLE_PAUSE_S)
            continue
        except RayActorError as error:
            return MemberGone(who, error)
        await asyncio.sleep(WATCH_INTERVAL_S)


async def answer_of(who: str, ref: Any, timeout_s: float) -> Any:
    """The answer of a process.

    Raises:
        MemberGone: it died.
        TimeoutError: there was none in time.
    """
    try:
        return await asyncio.wait_for(_awaited(ref), timeout_s)
    except RayActorError as error:
        raise MemberGone(who, error) from error


async def _awaited(ref: Any) -> Any:
    return await ref  # waits: the caller's deadline


def cause_with_log(error: Exception, process: Process | None) -> Cause:
    """The cause that an error amounts to, with the last log lines of the process where they can be read."""
    cause = classify(error)
    if process is None or not isinstance(error, MemberGone):
        return cause
    tail = ray_worker_log_tail(session_folder(), process.pid)
    detail = "\n\n".join(part for part in (cause.detail, f"its last log lines:\n{tail}" if tail else "") if part)
    return replace(cause, detail=detail)


__all__ = ["MemberGone", "RayError", "answer_of", "cause_with_log", "until_gone"]
