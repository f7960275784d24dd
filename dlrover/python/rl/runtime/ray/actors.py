"""Making and finding the system's own actors."""

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from dlrover.python.rl.common.errors import DLRoverRLError, JobConflict, MasterLost
from dlrover.python.rl.common.names import NAMESPACE
from dlrover.python.rl.runtime.node_memory import forget_memory

_MEGABYTE = 1024 * 1024
_AGAIN_S = 0.1
_GONE_S = 10.0
_HEAD, _HEAD_SHARE = "node:__internal_head__", 0.0001


def current_actor() -> Any:
    """The handle of the actor this code runs in."""
    return ray.get_runtime_context().current_actor


def session_folder() -> str:
    """Where Ray keeps the logs of this node's processes."""
    return str(ray._private.worker.global_worker.node.get_session_dir_path())


def was_restarted() -> bool:
    """Whether the actor this code runs in is a new process of one that has died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray asks itself in a way that it calls deprecated, on the user's terminal
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def launch(cls: type, name: str, args: tuple[Any, ...], resources: Mapping[str, float], max_restarts: int = 0) -> Any:
    """Start a detached actor and return its handle. It runs beside Ray's own head where it can, so that a lost worker
    node does not take it along.

    Args:
        cls: its class.
        name: in the system's namespace.
        args: of the constructor.
        resources: ``cpu``, and ``memory`` in MB.
        max_restarts: how often Ray starts it again, with the same arguments.

    Raises:
        JobConflict: an actor of this name is alive.
    """
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": max_restarts,
        # Whatever is asked of it while it is started again waits, instead of failing.
        "max_task_retries": -1 if max_restarts else 0,
        "num_cpus": resources.get("cpu", 0),
        "memory": int(resources.get("memory", 0) * _MEGABYTE) or None,
    }
    if _fits_the_head(options["num_cpus"], options["memory"] or 0):
        options["resources"] = {_HEAD: _HEAD_SHARE}
    try:
        return ray.remote(cls).options(**options).remote(*args)
    except ValueError as error:
        raise JobConflict(
            f"'{name}' is already running on this cluster: stop it first or choose another name"
        ) from error


def _fits_the_head(cpus: float, memory: int) -> bool:
    """Whether the node of Ray's head can ever have so much: it is often kept free of work."""
    heads = [node["Resources"] for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"]]
    return any(head.get("CPU", 0) >= cpus and head.get("memory", 0) >= memory for head in heads)


def find(name: str) -> Any:
    """The handle of a running actor of the system, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def ask(request: Callable[[], Any], timeout_s: float) -> Any:
    """The answer of a master. One that is being started again is asked again.

    Args:
        request: sends the question and returns the ref of its answer.
        timeout_s: seconds in all.

    Raises:
        MasterLost: there is no answer in time, or the master is gone for good.
        DLRoverRLError: what the master itself answered with.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return _answer(request(), deadline_s - time.monotonic(), timeout_s)
        except ActorUnavailableError as error:
            if time.monotonic() > deadline_s:
                raise MasterLost(f"the master did not come back within {timeout_s:g} s") from error
            time.sleep(_AGAIN_S)


def _answer(ref: Any, left_s: float, timeout_s: float) -> Any:
    try:
        return ray.get(ref, timeout=max(left_s, 0.0))
    except ActorUnavailableError:
        raise
    except GetTimeoutError as error:
        raise MasterLost(f"the master did not answer within {timeout_s:g} s") from error
    except RayTaskError as error:
        if isinstance(error.cause, DLRoverRLError):
            raise error.cause from None
        raise MasterLost(f"the master failed: {error}") from error
    except RayActorError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise MasterLost(f"the master is gone: {lines[0] if lines else type(error).__name__}") from error


def sweep(job: str) -> list[str]:
    """End whatever of a job is left on the cluster though its master is not: actors and placement groups by name, and
    what its runs keep in this node's memory.

    Returns:
        The names of what was ended.
    """
    prefix, found = f"{job}/", []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix):
            with suppress(ValueError):  # gone in the meantime
                ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
                found.append(actor["name"])
    for identity, group in ray.util.placement_group_table().items():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(identity))))
            found.append(group["name"])
    for name in found:
        with suppress(TimeoutError):  # what it writes from now on is its own
            wait_gone(name, _GONE_S)
    forget_memory(job, patience_s=_GONE_S if found else 0.0)
    return found


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
