"""Engines driven by hand in this process: for a debugger, and for tests."""

import contextlib
import os
import socket
from collections.abc import Sequence

from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.executor import starting
from dlrover.python.rl.runtime.host import MemberHost
from dlrover.python.rl.runtime.hosting import Device, class_at
from dlrover.python.rl.runtime.local.port import LocalMember, LocalPort
from dlrover.python.rl.runtime.node_memory import forget_memory
from dlrover.python.rl.trainer.workload import MemberContext

HERE = "here"


class LocalHosting:
    """Implements :class:`~dlrover.python.rl.runtime.hosting.Hosting` without processes.

    Args:
        kind: of the devices.
        count: how many to count with; they are the same device, whatever their number.
    """

    separate = False

    def __init__(self, kind: str = "cpu", count: int = 1) -> None:
        self.devices = tuple(Device(HERE, "127.0.0.1", "cuda" if kind == "cuda" else "cpu") for _ in range(count))
        self._members: dict[str, list[LocalMember]] = {}
        self.port = LocalPort(self._members, enforce_deadlines=False)

    def start(self, crew: str, seats: Sequence[Sequence[int]], where: str) -> list[Process]:
        cls, world = class_at(where), len(seats)
        members = []
        for rank in range(world):
            context = MemberContext(name=f"{crew}[{rank}]", role=RLRoleType(crew), rank=rank, world_size=world)
            host = MemberHost()
            with starting(context.name):
                host.start(lambda _handle, _config: cls(), context, None, None)
            members.append(LocalMember(host, {}))
        self._members[crew] = members
        here = Process(HERE, os.getpid(), socket.gethostname(), "127.0.0.1")
        return [here] * world

    def end(self, crew: str) -> None:
        with contextlib.ExitStack() as stack:
            for member in self._members.pop(crew, []):
                member.alive = False
                stack.callback(member.host.close)

    def forget(self, job: str, run: str) -> None:
        forget_memory(job, run)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for crew in self._members:
                stack.callback(self.end, crew)
