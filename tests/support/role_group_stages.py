# SPDX-License-Identifier: Apache-2.0
"""The stages of the contract suite: the same workloads, on each runtime."""

import asyncio
import itertools
import signal
import threading
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayActorError

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.control.commands import Place, Release, StartMembers
from dlrover.python.rl.control.events import MemberStarted, Placed, Released
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.runtime.local import LocalHandle, LocalMember, LocalPort
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.runtime.ray.cluster.api import RayClusterApi
from dlrover.python.rl.runtime.ray.executor import RayExecutor
from dlrover.python.rl.runtime.ray.placement import RunPlan
from dlrover.python.rl.runtime.ray.processes.actors import find
from dlrover.python.rl.runtime.ray.processes.port import RayPort
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv, accept_all
from dlrover.python.rl.runtime.torchrun.port import TorchrunPort
from dlrover.python.rl.trainer.role_group import public_methods
from dlrover.python.rl.trainer.trainer import TrainerLink
from dlrover.python.rl.trainer.workload import MemberContext
from tests.support.launched_rank import Launcher
from tests.support.role_group_toys import Pairs, StageTrainer, Toy

CLASSES = {"ACTOR": Toy, "ROLLOUT": Toy, "REWARD": Pairs}
SIZES = {"ACTOR": 5, "ROLLOUT": 2, "REWARD": 4}
CONFIG = OmegaConf.create({"lr": 0.5})

_numbers = itertools.count(1)


def make_trainer(handles, port, tmp_path, classes=CLASSES):
    trainer = StageTrainer(handles, {role: classes[role] for role in handles}, CONFIG)
    trainer.bind(TrainerLink(port, lambda report: None, "contract", tmp_path))
    return trainer


def contract_job(name, devices=8, **liveness):
    builder = JobBuilder().device_type("CPU").device_per_node(devices).config(CONFIG)
    builder.trainer("tests.support.role_group_toys", "unused").liveness(**liveness)
    for role, size in SIZES.items():
        builder.role(role, "tests.support.role_group_toys", CLASSES[role].__name__).total(size)
    return builder.spec(name, (str(Path(__file__).parents[2]),))


class Stage:
    """The workers of all roles on a runtime, which sets ``port``."""

    def __init__(self, tmp_path):
        self._path = tmp_path

    @cached_property
    def handles(self):
        return {RLRoleType(role): [self.handle(role, rank) for rank in range(size)] for role, size in SIZES.items()}

    def handle(self, role, rank):
        return LocalHandle(self.port, role, rank)

    def trainer(self, **sizes):
        """A trainer of the first workers of each role: groups of any size without starting other ones."""
        some = {role: members[: sizes.get(role, len(members))] for role, members in self.handles.items()}
        return make_trainer(some, self.port, self._path)

    def call_raw(self, handle, method, *args):
        return getattr(handle, method).remote(*args).result()


class LocalStage(Stage):
    """All workers in this process."""

    def __init__(self, tmp_path):
        super().__init__(tmp_path)
        members = {role: [self._member(role, rank) for rank in range(size)] for role, size in SIZES.items()}
        self.port = LocalPort(members)

    def _member(self, role, rank):
        size = SIZES[role]
        context = MemberContext(f"job/{role}-{rank}", RLRoleType(role), rank, size, rank, size, "127.0.0.1", 4321)
        host = MemberHost()
        host.start(CLASSES[role], context, None, CONFIG)
        return LocalMember(host, context.to_env())

    def close(self):
        for member in (member for members in self.port.members.values() for member in members):
            member.host.close()

    def kill(self, role, rank):
        self.port.kill(role, rank)


class RayStage(Stage):
    """Workers as detached actors, started by the production executor."""

    def __init__(self, tmp_path):
        super().__init__(tmp_path)
        job = contract_job(f"contract-{next(_numbers)}", devices=11, lease_s=3600.0)  # no master is there to answer
        placement, problems = plan(job)
        assert not problems
        methods = {role: tuple(public_methods(cls)) for role, cls in CLASSES.items()}
        self._executor = RayExecutor(RunPlan(job, "0", placement, methods), None, RayClusterApi())
        asyncio.run(self._start())
        self.port = RayPort(self.handles)

    def handle(self, role, rank):
        return find(self._executor.name_of(role, rank, 1, standby=-1))

    async def _execute(self, event, *commands, count=1):
        """Carry commands out, which give ``count`` events of this class."""
        events = asyncio.Queue()
        for command in commands:
            self._executor.execute(command, events.put_nowait)
        for _ in range(count):
            assert isinstance(came := await asyncio.wait_for(events.get(), 120), event), came

    async def _start(self):
        await self._execute(Placed, Place(1))
        starts = [StartMembers(role, tuple((rank, 1) for rank in range(size))) for role, size in SIZES.items()]
        await self._execute(MemberStarted, *starts, count=sum(SIZES.values()))

    def close(self):
        self._executor._tasks.clear()  # they ended with the loop they ran on
        self._executor._table.clear()
        asyncio.run(self._execute(Released, Release(1, final=True)))

    def kill(self, role, rank):
        handle = self.handles[role][rank]
        ray.kill(handle)
        deadline_s = time.monotonic() + 10
        with suppress(RayActorError):
            while time.monotonic() < deadline_s:  # ray.kill returns before the process has ended
                ray.get(handle.dlrover_ping.remote(), timeout=10)

    def call_raw(self, handle, method, *args):
        return ray.get(getattr(handle, method).remote(*args), timeout=30)


class TorchrunStage(Stage):
    """Rank r of every role in process r of a launch; this process is rank 0."""

    def __init__(self, tmp_path):
        super().__init__(tmp_path)
        launch = LaunchEnv(0, max(SIZES.values()), 0, max(SIZES.values()))
        job = contract_job("contract")
        self._launcher = Launcher(launch.world_size)
        self.port = TorchrunPort(launch, accept_all(launch, self._launcher))
        self._thread = threading.Thread(target=self.port.worker.run, daemon=True)
        self._thread.start()
        for role, rank in job.members():
            context = MemberContext(f"job/{role}-{rank}", role, rank, SIZES[role], 0, 1, "127.0.0.1", 4321)
            self.port.start(job, "run", context).result(60)

    def close(self):
        self.port.end(clean=True)
        self._thread.join(20)
        assert not self._thread.is_alive()
        for child in self._launcher.children:
            assert child.wait(20) in (0, -signal.SIGKILL)

    def kill(self, role, rank):
        self._launcher.children[rank - 1].kill()
