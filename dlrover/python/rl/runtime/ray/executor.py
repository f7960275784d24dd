"""Carrying out the brain's commands on Ray. Lives in the master's process, on its event loop."""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import NAMESPACE, member_name, trainer_name
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import (
    Command,
    Failed,
    MemberStarted,
    Place,
    Placed,
    Release,
    Released,
    RestartDue,
    StartMembers,
    StartTrainer,
    TrainerFinished,
    TrainerStarted,
    WaitThenRestart,
)
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.runtime.executor import Emit
from dlrover.python.rl.runtime.ray.failures import MemberGone, classify
from dlrover.python.rl.runtime.ray.member import Location, Target, member_class
from dlrover.python.rl.runtime.ray.placing import lacking, place_options, reserve, until_reserved
from dlrover.python.rl.runtime.ray.trainer import TrainerActor
from dlrover.python.rl.trainer.workload import MemberContext

_LOG = get_logger(__name__)

WATCH_INTERVAL_S = 0.5
_POLL_S = 0.05
_CLOSE_GRACE_S = 1.0
_GONE_DEADLINE_S = 20.0
_LATE_LOG_S = 30.0

_VISIBLE_DEVICES_OFF = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
}


@dataclass
class _Incarnation:
    """What one incarnation of the job owns."""

    groups: list[PlacementGroup] = field(default_factory=list)
    members: dict[tuple[RLRoleType, int], Any] = field(default_factory=dict)
    trainer: Any = None
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)


class RayExecutor:
    """Runs a job as detached, named actors.

    Args:
        job: what to run.
        placement: where its members go.
        methods: role to the public methods of its workload.
        master: the master's own handle, given to workloads and trainer.
    """

    def __init__(self, job: JobSpec, placement: Placement, methods: Mapping[str, tuple[str, ...]], master: Any) -> None:
        self._job, self._placement, self._methods, self._master = job, placement, methods, master
        self._owned: dict[int, _Incarnation] = {}
        self._running: set[asyncio.Task[None]] = set()

    def execute(self, command: Command, emit: Emit) -> None:
        number = command.incarnation
        owned = self._owned.setdefault(number, _Incarnation())
        if isinstance(command, Place):
            self._spawn(self._place(number, owned, emit), owned, emit, number)
        elif isinstance(command, StartMembers):
            self._spawn(self._start_members(number, owned, emit), owned, emit, number)
        elif isinstance(command, StartTrainer):
            self._spawn(self._run_trainer(number, owned, emit), owned, emit, number)
        elif isinstance(command, Release):
            self._detach(self._release(number, owned, emit))
        elif isinstance(command, WaitThenRestart):
            self._detach(self._wait(command, emit))

    # -- tasks --------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None], owned: _Incarnation, emit: Emit, number: int) -> None:
        """Run ``work`` as part of an incarnation: whatever it raises is a failure of the job, and release ends it."""

        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 -- the end of the line: it becomes an event
                emit(Failed(number, classify(error)))

        owned.tasks.append(self._detach(guarded()))

    def _detach(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("%s of %s failed", task.get_name(), self._job.name, exc_info=task.exception())

    # -- placing ------------------------------------------------------------------------------------------------------

    async def _place(self, number: int, owned: _Incarnation, emit: Emit) -> None:
        if self._job.scheduling_strategy != "SIMPLE":
            owned.groups = reserve(self._placement, f"{self._job.name}/{number}")
            await until_reserved(owned.groups, self._placement, self._job.placement_timeout_s)
        emit(Placed(number))

    # -- members ------------------------------------------------------------------------------------------------------

    async def _start_members(self, number: int, owned: _Incarnation, emit: Emit) -> None:
        for role, rank in self._job.members():
            handle = self._create(number, owned, role, rank)
            owned.members[role, rank] = handle
            self._spawn(self._watch(f"{role}[{rank}]", handle), owned, emit, number)
        asked = {
            (role, rank): handle.dlrover_locate.remote(self._job.preferred_ports(role))
            for (role, rank), handle in owned.members.items()
        }
        located = await self._within_deadline(_all(asked))
        contexts = self._contexts(number, located)
        # The configuration is the same for all members: stored once.
        config = ray.put(self._job.config)
        started = {
            (role, rank): self._target(role, handle, contexts[role, rank], config)
            for (role, rank), handle in owned.members.items()
        }
        for (role, rank), pid in (await _all(started)).items():
            emit(MemberStarted(number, role, rank, located[role, rank].host, pid))

    async def _within_deadline(self, located: Coroutine[Any, Any, dict[Any, Any]]) -> dict[Any, Any]:
        """Where the members are, once all have found a place; without reserved groups that may take for ever."""
        timeout_s = self._job.placement_timeout_s
        try:
            return await asyncio.wait_for(located, timeout_s)
        except TimeoutError:
            raise lacking(self._placement, timeout_s) from None

    def _create(self, number: int, owned: _Incarnation, role: RLRoleType, rank: int) -> Any:
        spec = self._job.workloads[role]
        env = {**self._process_env(), **self._job.env, **spec.env}
        if spec.env.get("DLROVER_RL_RAY_VISIBLE_DEVICES") != "1":
            env = {**_VISIBLE_DEVICES_OFF, **env}
        name = member_name(self._job.name, number, role, rank)
        actor = ray.remote(member_class(spec.class_, self._methods.get(role, ()))).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            # Replacing a member is the master's job: Ray's own restart would hide it, in its constructor's state.
            max_restarts=0,
            runtime_env={"env_vars": env},
            **place_options(self._placement.slots[role][rank], self._placement, owned.groups),
        )
        return actor.remote(f"{role}[{rank}]")

    def _process_env(self) -> dict[str, str]:
        if self._job.trainer.device_type != "CPU":
            return {}
        # Several processes share the cores: threads that spin while they wait take them from the others.
        return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

    def _target(self, role: RLRoleType, handle: Any, context: MemberContext, config: Any) -> Any:
        spec = self._job.workloads[role]
        target = Target(spec.module, spec.class_, self._job.search_path, self._job.work_dir)
        return handle.dlrover_start.remote(target, context, self._master, config)

    def _contexts(
        self, number: int, located: Mapping[tuple[RLRoleType, int], Location]
    ) -> dict[tuple[RLRoleType, int], MemberContext]:
        contexts = {}
        for role, rank in self._job.members():
            here = located[role, rank].node_id
            on_node = [other for other in range(self._job.workloads[role].num) if located[role, other].node_id == here]
            first = located[role, 0]
            contexts[role, rank] = MemberContext(
                name=member_name(self._job.name, number, role, rank),
                role=role,
                rank=rank,
                world_size=self._job.workloads[role].num,
                local_rank=on_node.index(rank),
                local_world_size=len(on_node),
                master_addr=first.address,
                master_port=first.port,
                collocation=",".join(self._job.collocation_of(role)),
            )
        return contexts

    async def _watch(self, who: str, handle: Any) -> None:
        """Hold a ping pending on the member: it fails the moment the process is gone, busy or not."""
        while True:
            try:
                await handle.dlrover_ping.remote()
            except RayActorError as error:
                raise MemberGone(who, error) from error
            await asyncio.sleep(WATCH_INTERVAL_S)

    # -- trainer ------------------------------------------------------------------------------------------------------

    async def _run_trainer(self, number: int, owned: _Incarnation, emit: Emit) -> None:
        owned.trainer = (
            ray.remote(TrainerActor)
            .options(
                name=trainer_name(self._job.name, number),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                num_cpus=0,
                runtime_env={"env_vars": {**self._process_env(), **self._job.env}},
            )
            .remote()
        )
        handles: dict[RLRoleType, list[Any]] = {}
        for (role, _), handle in owned.members.items():
            handles.setdefault(role, []).append(handle)
        resources = {role: dict(slots[0].resources) for role, slots in self._placement.slots.items()}
        try:
            where = await owned.trainer.start.remote(self._job, handles, resources, self._master)
            emit(TrainerStarted(number, where.host, where.pid))
            await owned.trainer.run.remote()
        except RayActorError as error:
            raise MemberGone("trainer", error) from error
        except RayTaskError:
            # What the trainer raised may be the echo of a member's death: let the watch speak first.
            await asyncio.sleep(WATCH_INTERVAL_S + _POLL_S)
            raise
        emit(TrainerFinished(number))

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _release(self, number: int, owned: _Incarnation, emit: Emit) -> None:
        """End everything of an incarnation. Whatever goes wrong is logged, and the rest goes on."""
        for task in owned.tasks:
            task.cancel()
        if owned.trainer is not None:
            ray.kill(owned.trainer)
        try:
            await self._close_members(owned)
            for handle in owned.members.values():
                ray.kill(handle)
            for group in owned.groups:
                remove_placement_group(group)
            names = [member_name(self._job.name, number, *member) for member in owned.members]
            await _until_gone([*names, trainer_name(self._job.name, number)])
        finally:
            self._owned.pop(number, None)
            emit(Released(number))

    async def _close_members(self, owned: _Incarnation) -> None:
        """Let idle workloads close; one that is busy or dead is not waited for longer than a moment."""
        closing = {
            asyncio.ensure_future(_one(f"{role}[{rank}]", handle.dlrover_close.remote())): f"{role}[{rank}]"
            for (role, rank), handle in owned.members.items()
        }
        if not closing:
            return
        done, late = await asyncio.wait(closing, timeout=_CLOSE_GRACE_S)
        for task in late:
            task.cancel()
        for task in done:
            error = task.exception()
            if error is not None and not isinstance(error, MemberGone):
                _LOG.warning("%s did not close: %s", closing[task], error)

    async def _wait(self, command: WaitThenRestart, emit: Emit) -> None:
        await asyncio.sleep(command.delay_s)
        emit(RestartDue(command.incarnation))


async def _all(pending: Mapping[tuple[RLRoleType, int], Any]) -> dict[Any, Any]:
    """Await an answer of each member. The first failure ends the wait; who is late is logged."""
    tasks = {asyncio.ensure_future(_one(f"{role}[{rank}]", ref)): (role, rank) for (role, rank), ref in pending.items()}
    late = set(tasks)
    try:
        while late:
            done, late = await asyncio.wait(late, timeout=_LATE_LOG_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not done:
                _LOG.warning("still waiting for %s to start", ", ".join(f"{tasks[task]}" for task in late))
    finally:
        for task in late:
            task.cancel()
    return {member: task.result() for task, member in tasks.items()}


async def _one(who: str, ref: Any) -> Any:
    try:
        return await ref
    except RayActorError as error:
        raise MemberGone(who, error) from error


async def _until_gone(names: list[str]) -> None:
    """Wait until no actor of these names is left."""
    deadline = asyncio.get_running_loop().time() + _GONE_DEADLINE_S
    for name in names:
        while _exists(name):
            if asyncio.get_running_loop().time() > deadline:
                _LOG.warning("the actor %s is still there after %g s", name, _GONE_DEADLINE_S)
                return
            await asyncio.sleep(_POLL_S)


def _exists(name: str) -> bool:
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True
