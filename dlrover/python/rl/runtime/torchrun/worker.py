"""One process's members, and what they are asked: one thing after the other, in the order in which it was asked."""

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.executor import starting
from dlrover.python.rl.runtime.host import Arguments, CallHeader, MemberHost
from dlrover.python.rl.runtime.loading import load_class
from dlrover.python.rl.runtime.local.port import process_environment
from dlrover.python.rl.runtime.node_memory import forget_memory
from dlrover.python.rl.runtime.stored import Stored
from dlrover.python.rl.runtime.torchrun.links import Place
from dlrover.python.rl.runtime.wire import decode
from dlrover.python.rl.trainer.workload import MemberContext

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Key:
    """A result, or how many rows it has, as an argument of a call."""

    number: int
    rows: bool = False


@dataclass(frozen=True)
class Start:
    """Construct this process's member of a role."""

    number: int
    job: JobSpec
    run: str
    context: MemberContext


@dataclass(frozen=True)
class Run:
    """Call a member. ``kept``: its result stays in the process until it is asked for."""

    number: int
    role: str
    header: CallHeader
    values: Stored
    kept: bool


@dataclass(frozen=True)
class Ended:
    """What came of a :class:`Start` or :class:`Run`: an error, or the result, or where that is kept its row count."""

    number: int
    error: Exception | None = None
    rows: int | None = None
    value: Stored | None = None


@dataclass(frozen=True)
class End:
    """Close the members. ``clean``: the job is done, and nobody will go on from its commits."""

    clean: bool


Task: TypeAlias = Start | Run | End


class Worker:
    """Carries out tasks in the thread that calls :meth:`run`.

    Args:
        place: which process this is.
        tell: told what came of each task.
        obtain: gets a result, or its row count, that this process does not keep.
    """

    def __init__(self, place: Place, tell: Callable[[Ended], None], obtain: Callable[[Key], Future[Stored]]) -> None:
        self._place, self._tell, self._obtain = place, tell, obtain
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._kept: dict[int, Future[Stored]] = {}
        self._members: dict[str, tuple[MemberHost, Mapping[str, str]]] = {}
        self._runs: set[tuple[str, str]] = set()
        self.ended = threading.Event()

    def assign(self, task: Task) -> None:
        """Carry ``task`` out when its turn comes. Thread safe."""
        if isinstance(task, Run) and task.kept:
            self._kept[task.number] = Future()
        self._tasks.put(task)

    def kept(self, number: int) -> Future[Stored]:
        """The result of a task whose result is kept."""
        return self._kept[number]

    def drop(self, numbers: Sequence[int]) -> None:
        """Nobody will ask for these results any more."""
        for number in numbers:
            self._kept.pop(number, None)

    def run(self) -> bool:
        """Carry out tasks until the :class:`End`. Whether it was a clean one."""
        while True:
            task = self._tasks.get()  # waits: for rank 0, whose end is a task as well
            if isinstance(task, End):
                self._close(task.clean)
                return task.clean
            self._tell(self._start(task) if isinstance(task, Start) else self._carry_out(task))

    def _start(self, task: Start) -> Ended:
        job, world_size = task.job, task.context.world_size
        local_world_size = min(self._place.local_world_size, world_size)
        context = replace(task.context, local_rank=self._place.local_rank, local_world_size=local_world_size)
        spec = job.workloads[context.role]
        os.environ.update(job.env)  # for good: the trainer has it too
        env = {**job.env, **spec.env, **context.to_env()}
        host = MemberHost(node=socket.gethostname())
        try:
            with starting(f"{context.role}[{context.rank}]"), process_environment(env):
                host.start(load_class(spec.module, spec.class_, job.search_path), context, None, job.config)
        except Exception as error:  # noqa: BLE001 -- the boundary of a process: it travels to rank 0
            return Ended(task.number, error)
        self._members[context.role] = host, env
        self._runs.add((job.name, task.run))
        return Ended(task.number)

    def _carry_out(self, task: Run) -> Ended:
        host, env = self._members[task.role]

        def arguments() -> Arguments:
            values = [self._value(item) for item in task.values.load()]
            cut = len(values) - len(task.header.keywords)
            return values[:cut], dict(zip(task.header.keywords, values[cut:], strict=True))

        try:
            with process_environment(env):
                result = Stored.of(host.invoke(task.header, arguments), own=True)
        except InvocationError as error:
            return self._failed(task, error)
        except Exception as error:  # noqa: BLE001 -- taking the arguments or sending the result failed
            return self._failed(task, host.failure(task.header.method, error))
        if task.kept:
            self._kept[task.number].set_result(result)
            return Ended(task.number, rows=result.rows)
        return Ended(task.number, rows=result.rows, value=result)

    def _failed(self, task: Run, error: InvocationError) -> Ended:
        if task.kept:
            self._kept[task.number].set_exception(error)
        return Ended(task.number, error)

    def _value(self, item: Any) -> Any:
        return self._get(item) if isinstance(item, Key) else decode(item, self._get)

    def _get(self, key: Any) -> Any:
        if isinstance(key, list):
            return [self._get(item) for item in key]
        kept = self._kept.get(key.number)
        # waits: for an earlier call; a process that is lost in it fails it
        stored = (kept or self._obtain(key)).result()
        return stored.rows if kept is not None and key.rows else stored.load()

    def _close(self, clean: bool) -> None:
        for host, env in self._members.values():
            try:
                with process_environment(env):
                    host.close()
            except Exception:  # noqa: BLE001 -- the boundary that a process would be; the others are closed too
                _LOG.exception("closing %s failed", env["NAME"])
        for job, run in self._runs if clean else ():
            forget_memory(job, run)
        self.ended.set()
