"""The processes of one run of a job on the cluster: making, finding and ending them.

Every process is a detached, named actor, so a master that has restarted finds them all by name.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import NAMESPACE, member_name, standby_name, trainer_name
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.beats import BeatTerms
from dlrover.python.rl.runtime.ray.actors import find
from dlrover.python.rl.runtime.ray.member import Seated, member_class
from dlrover.python.rl.runtime.ray.options import actor_options, member_env, process_env
from dlrover.python.rl.runtime.ray.threads import Threads
from dlrover.python.rl.runtime.ray.trainer import TrainerActor
from dlrover.python.rl.runtime.ray.units import TRAINER, Unit
from dlrover.python.rl.runtime.stacks import stacks_of

_LOG = get_logger(__name__)

_POLL_S = 0.05
_GONE_S = 20.0
_CLOSE_GRACE_S = 1.0
_REMOTE_S = 20.0


class Fleet:
    """Makes, finds and ends the processes of one run.

    Args:
        job: the job.
        run: which run of it.
        methods: role to the public methods of its workload.
        master: the master's own handle, given to members.
        beats: how members show that they live.
    """

    def __init__(
        self, job: JobSpec, run: str, methods: Mapping[str, tuple[str, ...]], master: Any, beats: BeatTerms
    ) -> None:
        self._job, self._run, self._methods, self._master, self._beats = job, run, methods, master, beats
        self._threads = Threads()

    # -- names --------------------------------------------------------------------------------------------------------

    def member_name(self, role: str, rank: int, incarnation: int, standby: int = -1) -> str:
        """The actor name of a member; one that was a standby has kept the standby's."""
        if standby >= 0:
            return standby_name(self._job.name, self._run, role, standby)
        return member_name(self._job.name, self._run, role, rank, incarnation)

    def name_of(self, unit: Unit) -> str:
        """The actor name of a process."""
        if unit.place.role == TRAINER:
            return trainer_name(self._job.name, self._run, unit.number)
        return self.member_name(unit.place.role, unit.place.at, unit.number, unit.standby)

    def names(self) -> list[str]:
        """The names of all processes of the run that are there."""
        prefix = f"{self._job.name}/{self._run}/"
        listed = ray.util.list_named_actors(all_namespaces=True)
        return [
            actor["name"] for actor in listed if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)
        ]

    # -- making -------------------------------------------------------------------------------------------------------

    async def make_member(self, unit: Unit, placed: Mapping[str, Any]) -> Any:
        """Start the process of a member or a standby. One of the same name that is there already is ended first: a
        master that died had begun it."""
        place, role = unit.place, RLRoleType(unit.place.role)
        cls = member_class(self._job.workloads[role].class_, self._methods.get(role, ()))
        seated = Seated(role, str(place), place.at if place.standby else unit.number)
        options = actor_options(self.name_of(unit), member_env(self._job, role), placed)
        return await self._make(cls, options, (seated, self._master, self._beats))

    async def make_trainer(self, epoch: int, placed: Mapping[str, Any]) -> Any:
        """Start the process of the trainer."""
        options = actor_options(trainer_name(self._job.name, self._run, epoch), process_env(self._job), placed)
        return await self._make(TrainerActor, options, (epoch, self._master, self._beats))

    async def _make(self, cls: type, options: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
        await self.end_named([options["name"]])
        return await self._threads.run(lambda: ray.remote(cls).options(**options).remote(*arguments))

    # -- ending -------------------------------------------------------------------------------------------------------

    async def end_named(self, names: Sequence[str]) -> None:
        """Kill the actors of these names and wait until none is left."""
        for name in names:
            handle = await asyncio.to_thread(find, name)
            if handle is not None:
                ray.kill(handle)
        await self._until_gone(names)

    async def end_once_made(self, name: str) -> None:
        """End an actor that may still be in the making, and that nobody wants any more."""
        await self._threads.settle(_GONE_S)
        await self.end_named([name])

    async def end_all(self) -> None:
        """End every process of the run: the trainer first, then the members, who may close what they hold."""
        await self._threads.settle(_GONE_S)
        names = await asyncio.to_thread(self.names)
        trainers = [name for name in names if "/trainer/" in name]
        await self.end_named(trainers)
        members = [name for name in names if name not in trainers]
        await self._close(members)
        await self.end_named(members)

    async def _close(self, names: Sequence[str]) -> None:
        """Let idle workloads close; one that is busy or dead is not waited for longer than a moment."""
        handles = {name: await asyncio.to_thread(find, name) for name in names}
        closing = {
            asyncio.ensure_future(_answer(handle.dlrover_close.remote())): name
            for name, handle in handles.items()
            if handle is not None
        }
        if not closing:
            return
        done, late = await asyncio.wait(closing, timeout=_CLOSE_GRACE_S)
        for task in late:
            task.cancel()
        for task in done:
            error = task.exception()
            if error is not None and not isinstance(error, ray.exceptions.RayActorError):
                _LOG.warning("%s did not close: %s", closing[task], error)

    async def _until_gone(self, names: Sequence[str]) -> None:
        deadline_s = asyncio.get_running_loop().time() + _GONE_S
        for name in names:
            while await asyncio.to_thread(find, name) is not None:
                if asyncio.get_running_loop().time() > deadline_s:
                    _LOG.warning("the actor %s is still there after %g s", name, _GONE_S)
                    return
                await asyncio.sleep(_POLL_S)


async def _answer(ref: Any) -> Any:
    return await ref  # waits: the caller's deadline


async def kill_process(process: Process) -> None:
    """SIGKILL a process of the cluster. Ray's own kill asks the process to end itself, and takes seconds to see that a
    stopped one does not."""
    if process.pid:
        await on_node(process.node, kill_here, process.pid)


async def stacks_there(process: Process) -> str:
    """The stacks of a process of the cluster, or why there are none."""
    return await on_node(process.node, stacks_of, process.pid) or "its node does not answer"


async def on_node(node: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of this package on a node; None when the node does not answer in time."""
    if node == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(function, *arguments)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    with suppress(TimeoutError, ray.exceptions.RayError):  # the node itself may be gone, and the process with it
        return await asyncio.wait_for(_answer(task.remote(*arguments)), _REMOTE_S)
    return None


def kill_here(pid: int) -> None:
    """SIGKILL a Ray worker of this machine; a pid that now belongs to something else is left alone."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
