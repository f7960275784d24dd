"""Roles that share a device: each has it for the time of its own call, and its tensors are in host memory meanwhile.

::

    ACTOR    [take | cuda() | update | cpu() | give]
    ROLLOUT                                        [take | cuda() | generate | cpu() | give]

The trainer's loop knows nothing of it. A member that dies has given the device back: the kernel sees to that.

Members that share one device share all that either has: a bundle of the placement, or under a launcher the device of
their local rank. So nobody waits for a second device while a partner has the first. But ranks of a role that meet in
collectives wait within their turns for each other's turns. Of the ready recipes that is the actor alone, and its turns
come. Two such roles of one group must not be called at the same time, as one could have the device of its rank 0, and
the other that of its rank 1.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, TypeVar

import torch

from dlrover.python.rl.common.names import run_of
from dlrover.python.rl.engine.lease import DeviceLease
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.runtime.node_memory import memory_root
from dlrover.python.rl.trainer.workload import BaseWorkload

F = TypeVar("F", bound=Callable[..., Any])

_LONGEST_TURN_S = 3600.0
"""How long a call waits for its turn; that a member hangs in its turn is found long before, by its own limit."""


class EngineWorkload(BaseWorkload):
    """A workload with one engine, ``self._engine``, which has its device in turn where several roles share it."""

    takes_turns: ClassVar[bool | None] = None
    """Whether members that share a device have it one at a time. None: where the device is an accelerator; processes
    that share a host's cores need not."""

    _engine: Any = None
    _leases: tuple[DeviceLease, ...] = ()
    _memory: DeviceMemory | None = None

    @contextmanager
    def _first_turn(self, device: str) -> Iterator[DeviceMemory | None]:
        """Make the engine inside the block, on ``device``; gives what accounts for that where others share it."""
        takes_turns = torch.device(device).type != "cpu" if self.takes_turns is None else self.takes_turns
        if not (takes_turns and self.get_device_collocation() and self.name):
            yield None
            return
        folder, who = memory_root(*run_of(self.name)) / "devices", f"{self.role}[{self.rank}]"
        self._memory = memory = DeviceMemory(device)
        names = {physical_device(device), *(physical_device(f"cuda:{number}") for number in self.devices)}
        # Everybody asks for devices in the same order: nobody waits for one who waits for him.
        self._leases = tuple(DeviceLease(folder / name, who, memory) for name in sorted(names))
        with self._turn():
            yield memory

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the device inside the block; the engine is there, once it has been made."""
        if not self._leases:
            yield
            return
        with self._bare_turn():
            try:
                if self._engine is not None:
                    self._engine.cuda()
                yield
            finally:
                if self._engine is not None:
                    self._engine.cpu()

    @contextmanager
    def _bare_turn(self) -> Iterator[None]:
        """Have the device inside the block; the engine stays in host memory, and takes its tensors from there to the
        device one at a time where ranks have to put them together."""
        with ExitStack() as stack:
            for lease in self._leases:
                stack.enter_context(lease.turn(_LONGEST_TURN_S))
            try:
                yield
            finally:
                if self._memory is not None:
                    self._memory.release_cache()

    def close(self) -> None:
        """Give back the engine and the device."""
        if self._engine is not None:
            self._engine.close()
        for lease in self._leases:
            lease.close()


def on_device(method: F) -> F:
    """A method of an :class:`EngineWorkload` that needs the engine on its device."""

    @functools.wraps(method)
    def in_turn(self: EngineWorkload, *args: Any, **kwargs: Any) -> Any:
        with self._turn():
            return method(self, *args, **kwargs)

    return in_turn  # type: ignore[return-value]


def physical_device(device: str) -> str:
    """What all processes of a node call ``device``, whatever each of them can see: ``"cuda-3"``."""
    found = torch.device(device)
    index = str(found.index or 0)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return f"{found.type}-{visible[int(index)] if found.type == 'cuda' and int(index) < len(visible) else index}"
