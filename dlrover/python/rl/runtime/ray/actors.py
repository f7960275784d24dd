"""Making and finding the system's own actors."""

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from dlrover.python.rl.common.errors import JobConflict
from dlrover.python.rl.common.names import NAMESPACE

_MEGABYTE = 1024 * 1024


def current_actor() -> Any:
    """The handle of the actor this code runs in."""
    return ray.get_runtime_context().current_actor


def launch(cls: type, name: str, args: tuple[Any, ...], resources: Mapping[str, float]) -> Any:
    """Start a detached actor and return its handle.

    Args:
        cls: its class.
        name: in the system's namespace.
        args: of the constructor.
        resources: ``cpu``, and ``memory`` in MB.

    Raises:
        JobConflict: an actor of this name is alive.
    """
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": 0,
        "num_cpus": resources.get("cpu", 0),
        "memory": int(resources.get("memory", 0) * _MEGABYTE) or None,
    }
    try:
        return ray.remote(cls).options(**options).remote(*args)
    except ValueError as error:
        raise JobConflict(
            f"'{name}' is already running on this cluster: stop it first or choose another name"
        ) from error


def find(name: str) -> Any:
    """The handle of a running actor of the system, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def ask(ref: Any, timeout_s: float) -> Any:
    """The answer of an actor.

    Raises:
        TimeoutError: none within ``timeout_s`` seconds.
        ConnectionError: the actor is gone.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from error
    except RayActorError as error:
        raise ConnectionError(str(error)) from error


def wait_gone(name: str, timeout_s: float) -> None:
    """Wait until no actor has this name.

    Raises:
        TimeoutError: it still does after ``timeout_s`` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    while find(name) is not None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the actor {name} is still there after {timeout_s:g} s")
        time.sleep(0.05)


def end(handle: Any) -> None:
    """Kill an actor."""
    ray.kill(handle)
