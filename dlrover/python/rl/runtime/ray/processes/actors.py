# SPDX-License-Identifier: Apache-2.0
"""Starting, finding and asking the system's own actors; the environment of a job's processes; causes of failures."""

import asyncio
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray import exceptions

from dlrover.python.rl.common.errors import DLRoverRLError, JobConflict, MasterLost, WorkloadStartError
from dlrover.python.rl.common.log import HIDDEN, get_logger
from dlrover.python.rl.common.names import RLRoleType, master_name
from dlrover.python.rl.config.secrets import seal
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Cause, CauseKind, Process
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory
from dlrover.python.rl.runtime.member.heartbeat import ray_worker_log_tail
from dlrover.python.rl.runtime.member.interpreters import interpreter_env
from dlrover.python.rl.runtime.member.loading import cause_of
from dlrover.python.rl.runtime.ray.cluster.api import (
    MEGABYTE,
    ActorPlacement,
    ActorRequest,
    RayClusterApi,
    awaited,
    forget_on_nodes,
    remove_groups,
)
from dlrover.python.rl.runtime.ray.cluster.nodes import in_daemon_thread

_LOG = get_logger(__name__)

_RETRY_S = 0.1
_GONE_S = 10.0
_HEAD, _HEAD_SHARE = "node:__internal_head__", 0.0001

VISIBLE_DEVICES_OFF = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
}

# Several processes share the cores: threads that spin while they wait would take them from others.
ON_CPU = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_MASTER_RETRY_S = 0.5
_OURS = {"CPU": "cpu", "GPU": "gpu", "memory": "memory"}
_RAYS_OWN = ("node:", "object_store")


def process_env(job: JobSpec) -> dict[str, str]:
    """Return the environment of a job's processes, without secrets: Ray shows it in their arguments, and stores it."""
    job = seal(job)[0]
    defaults = ON_CPU if job.trainer.device_type == "CPU" else {}
    return {name: value for name, value in {**defaults, **job.env}.items() if value != HIDDEN}


def member_env(job: JobSpec, role: RLRoleType) -> dict[str, str]:
    spec = seal(job)[0].workloads[role]
    env = {**process_env(job), **{name: value for name, value in spec.env.items() if value != HIDDEN}}
    env = interpreter_env(spec.python, env)
    return env if spec.env.get("DLROVER_RL_RAY_VISIBLE_DEVICES") == "1" else {**VISIBLE_DEVICES_OFF, **env}


def current_actor() -> Any:
    return ray.get_runtime_context().current_actor


def session_folder() -> str:
    """Return the folder of Ray's files on this node, such as the logs of its processes."""
    return str(ray._private.worker.global_worker.node.get_session_dir_path())


def was_restarted() -> bool:
    """Return True if this actor's process replaces one that has died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray would print a deprecation warning about its own call
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def launch(cls: type, name: str, args: tuple[Any, ...], resources: Mapping[str, float], max_restarts: int = 0) -> Any:
    """Start a detached actor with ``cpu`` and ``memory`` (MB) and return its handle. It runs on the head node if it
    fits there, to survive the loss of a worker node. Raises JobConflict if an actor of this name is alive."""
    needs = dict(resources)
    memory = needs.get("memory", 0.0) * MEGABYTE
    heads = [node["Resources"] for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"]]
    # The head node often gets no work, and may have too few resources.
    if any(head.get("CPU", 0) >= needs.get("cpu", 0) and head.get("memory", 0) >= memory for head in heads):
        needs[_HEAD] = _HEAD_SHARE
    try:
        return RayClusterApi().start_actor(ActorRequest(name, cls, args, {}, ActorPlacement(needs), max_restarts))
    except ValueError as error:
        message = f"'{name}' is already running on this cluster: stop it first or choose another name"
        raise JobConflict(message) from error


def find(name: str) -> Any:
    return RayClusterApi().find_actor(name)


def ask(request: Callable[[], Any], timeout_s: float) -> Any:
    """Return a master's answer; ``request`` returns its ref, and is repeated while the master restarts. Raises
    MasterLost without an answer in time, or the DLRoverRLError that the master raised."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get(request(), timeout=max(deadline_s - time.monotonic(), 0.0))
        except (TimeoutError, exceptions.RayTaskError, exceptions.RayActorError) as error:
            _raise_if_final(error, deadline_s, timeout_s)
        time.sleep(_RETRY_S)


def _raise_if_final(error: Exception, deadline_s: float, timeout_s: float) -> None:
    """Raise the error of a call to a master as one of this package; return if the call can be repeated."""
    if isinstance(error, exceptions.ActorUnavailableError):
        if time.monotonic() > deadline_s:
            raise MasterLost(f"the master did not come back within {timeout_s:g} s") from error
    elif isinstance(error, TimeoutError):
        raise MasterLost(f"the master did not answer within {timeout_s:g} s") from error
    elif isinstance(error, exceptions.RayTaskError):
        if isinstance(error.cause, DLRoverRLError):
            raise error.cause from None
        raise MasterLost(f"the master failed: {error.cause}") from error
    else:
        raise MasterLost(f"the master is gone: {_one_line(error)}") from error


def sweep(job: str, run: str | None = None) -> list[str]:
    """Remove the remains of a job without a master, or of one ``run``: actors and placement groups, whose names are
    returned, its files in the memory of this node, and on every node the files of runs that had actors."""
    cluster, names, prefix = RayClusterApi(), [], f"{job}/" if run is None else f"{job}/{run}/"
    for name in cluster.list_actors(prefix):
        handle = cluster.find_actor(name)
        if handle is not None:
            cluster.kill_actor(handle)
            names.append(name)
    names += remove_groups(cluster, prefix)
    for name in names:
        with suppress(TimeoutError):
            wait_gone(name, _GONE_S)
    nodes = {row.node_id: () for row in cluster.list_nodes() if row.alive}
    runs = sorted({name.split("/")[1] for name in names if name != master_name(job)})
    if all([asyncio.run(forget_on_nodes(cluster, nodes, job, run)) for run in runs]):
        forget_memory(job, run, patience_s=_GONE_S if names else 0.0, if_free=True)
    return names


def wait_gone(name: str, timeout_s: float) -> None:
    """Wait until no actor has this name. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while find(name) is not None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the actor {name} is still there after {timeout_s:g} s")
        time.sleep(0.05)


def end(handle: Any) -> None:
    ray.kill(handle)


async def end_later(actor: Any, after_s: float) -> None:
    await asyncio.sleep(after_s)
    end(actor)


def end_unless(has_begun: Callable[[], bool], after_s: float, why: str) -> None:
    """End this process, which is an actor, unless something has begun in time: its launcher is gone."""
    actor = current_actor()

    def check() -> None:
        if not has_begun():
            _LOG.error("%s within %g s: this process ends", why, after_s)
            end(actor)

    timer = threading.Timer(after_s, check)
    timer.daemon = True
    timer.start()


T = TypeVar("T")

_TRIES = 3
_PAUSE_S = 2.0


class MemberGone(Exception):
    """A process of the job is gone, with Ray's error."""

    def __init__(self, process: str, error: exceptions.RayError) -> None:
        super().__init__(process)
        self.process, self.error = process, error


def classify(error: Exception, process: Process | None = None) -> Cause:
    """Return the cause of the error of an executor's task, with the last log lines of a dead ``process``."""
    if isinstance(error, MemberGone):
        died, kind = error.error, CauseKind.PROCESS_DIED
        # Ray names the memory monitor in the text of an actor's death; its general advice mentions memory, too.
        if isinstance(died, exceptions.OutOfMemoryError) or "running low on memory" in str(died):
            kind = CauseKind.OUT_OF_MEMORY
        elif isinstance(died, exceptions.NodeDiedError) or (
            isinstance(died, exceptions.ActorDiedError) and "node has died" in str(died)
        ):
            kind = CauseKind.NODE_LOST
        tail = ray_worker_log_tail(session_folder(), process.pid) if process is not None else ""
        detail = [str(died), f"its last log lines:\n{tail}" if tail else ""]
        return Cause(kind, error.process, _one_line(died), "\n\n".join(filter(None, detail)))
    inner = error.cause if isinstance(error, exceptions.RayTaskError) else error
    if isinstance(inner, WorkloadStartError):
        return cause_of(inner, inner.who)
    return Cause(CauseKind.INTERNAL, "job", f"{type(inner).__name__}: {inner}".splitlines()[0], str(error))


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


async def answer_of(process: str, ref: Any, timeout_s: float) -> Any:
    """Return the answer of a process. Raises MemberGone if it dies, or TimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):
            return await awaited(ref)
    except exceptions.RayActorError as error:
        raise MemberGone(process, error) from error


class Threads:
    """Blocking calls off the event loop. A thread cannot be cancelled: an actor that is starting will exist anyway."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a call in a thread, which continues after a cancellation."""
        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return await asyncio.shield(work)

    async def settle(self, timeout_s: float) -> None:
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_s)


class Detached:
    """Coroutines that outlive the job; their errors are logged under its name."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._running: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        def finish(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                _LOG.error("%s: a process could not be ended", self._job, exc_info=error)

        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(finish)

    async def retry(self, action: Callable[[], Awaitable[None]]) -> None:
        """Retry an action that ends or releases something, since Ray's head may be away for a while."""
        for attempt in range(1, _TRIES + 1):
            try:
                await action()
                return
            except Exception:  # noqa: BLE001 -- the remaining actions must run
                _LOG.exception("%s: not everything could be ended or released (attempt %d)", self._job, attempt)
                await asyncio.sleep(_PAUSE_S)


class MasterCalls:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Return the master's answer to a call, like :func:`ask`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                ref = getattr(self._handle, method).remote(*arguments)
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    return await awaited(ref)
            except (TimeoutError, exceptions.RayTaskError, exceptions.RayActorError) as error:
                _raise_if_final(error, deadline_s - _MASTER_RETRY_S, timeout_s)
            await asyncio.sleep(_MASTER_RETRY_S)

    def end(self) -> None:
        with suppress(exceptions.RayActorError, ValueError):
            end(self._handle)


async def find_master(job: str) -> MasterCalls | None:
    handle = await in_daemon_thread(find, master_name(job))
    return None if handle is None else MasterCalls(handle)


async def cluster_capacity() -> dict[str, float]:
    """Return the resources of all nodes: ``cpu``, ``gpu``, ``memory`` in MB, and custom ones."""
    amounts = await in_daemon_thread(ray.cluster_resources)
    return {
        _OURS.get(name, name): amount / MEGABYTE if name == "memory" else float(amount)
        for name, amount in amounts.items()
        if not name.startswith(_RAYS_OWN)
    }
