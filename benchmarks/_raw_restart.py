# SPDX-License-Identifier: Apache-2.0
"""R: what Ray itself needs to restart an actor, from its death to its first good call."""

import os
import signal
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

_AGAIN_S = 0.01
_ANSWER_S = 120.0


class RawActor:
    """An actor that imports what a worker imports."""

    def __init__(self) -> None:
        import torch  # noqa: F401

        from benchmarks._recovery_job import crunch

        self._work = crunch

    def work(self) -> int:
        """A call; returns the process id."""
        self._work(1)
        return os.getpid()


class RawRestart:
    """An actor with Ray's own restarts, killed again and again.

    Args:
        env: environment of its process, equal to the environment of the workers it is compared with.
        actor: a class with the method ``work``, and the arguments of its constructor.
    """

    def __init__(self, env: dict[str, str], actor: type[Any] = RawActor, *arguments: Any) -> None:
        options: dict[str, Any] = {"max_restarts": -1, "num_cpus": 0, "runtime_env": {"env_vars": env}}
        self._actor = ray.remote(actor).options(**options).remote(*arguments)
        self._pid: int = ray.get(self._actor.work.remote(), timeout=_ANSWER_S)

    def measure(self) -> float:
        """Seconds from a kill to the first good call."""
        began_s = time.monotonic()
        os.kill(self._pid, signal.SIGKILL)
        while True:
            try:
                pid = ray.get(self._actor.work.remote(), timeout=_ANSWER_S)
            except (RayActorError, GetTimeoutError):
                time.sleep(_AGAIN_S)
                continue
            if pid != self._pid:
                self._pid = pid
                return time.monotonic() - began_s

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._actor)
