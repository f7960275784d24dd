# SPDX-License-Identifier: Apache-2.0
"""The messages between ranks, and the workers of one process, which run one call at a time in order of submission."""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.common.spans import SpanFile
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory
from dlrover.python.rl.runtime.local import close_members, process_environment
from dlrover.python.rl.runtime.member.arguments import CallHeader, Stored, decode
from dlrover.python.rl.runtime.member.host import Arguments, MemberHost
from dlrover.python.rl.runtime.member.loading import starting
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv
from dlrover.python.rl.trainer.workload import MemberContext

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class ResultKey:
    """Names a result, or its row count, as an argument of a call; as a message it requests that."""

    number: int
    rows: bool = False


@dataclass(frozen=True)
class Start:
    """A task: construct this process's worker of a role."""

    number: int
    job: JobSpec
    run: str
    context: MemberContext


@dataclass(frozen=True)
class Run:
    """A task: call a worker. ``retain``: its result stays in the process until it is fetched."""

    number: int
    role: str
    header: CallHeader
    values: Stored
    retain: bool


@dataclass(frozen=True)
class End:
    """A task: close the workers. ``clean``: the job has finished, and needs its commits no longer."""

    clean: bool


Task: TypeAlias = Start | Run | End


Unneeded: TypeAlias = tuple[int, ...]  # the numbers of retained results that may go


@dataclass(frozen=True)
class Result:
    """The outcome of a task, or the answer to a request; a call whose result is retained returns only the row count."""

    key: ResultKey
    error: BaseException | None = None
    rows: int | None = None
    value: Stored | None = None


def send_when_done(key: ResultKey, future: Future[Stored], send: Callable[[Result], None]) -> None:
    """Answer a :class:`ResultKey`."""

    def answer(done: Future[Stored]) -> None:
        error = done.exception(0)
        send(Result(key, error) if error is not None else Result(key, value=done.result(0)))

    future.add_done_callback(answer)


class Worker:
    """Runs tasks in the thread that calls :meth:`run`. ``send`` sends results, and requests for other processes'
    results, to rank 0, where ``fetch`` returns such a result, or its row count."""

    def __init__(
        self, launch: LaunchEnv, send: Callable[[Any], None], fetch: Callable[[ResultKey], Future[Stored]] | None = None
    ) -> None:
        self._launch, self._send, self._fetch = launch, send, fetch or self._request
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._retained: dict[int, Future[Stored]] = {}
        self._requests: dict[ResultKey, Future[Stored]] = {}
        self._members: dict[str, tuple[MemberHost, Mapping[str, str]]] = {}
        self._runs: set[tuple[str, str]] = set()
        self.ended = threading.Event()

    def handle(self, message: Task | ResultKey | Unneeded | Result) -> None:
        """Handle a message of rank 0: queue tasks, answer everything else at once. Thread safe."""
        if isinstance(message, tuple):
            for number in message:
                self._retained.pop(number, None)
        elif isinstance(message, ResultKey):
            send_when_done(message, self._retained[message.number], self._send)
        elif isinstance(message, Result):
            future = self._requests.pop(message.key)
            if message.error is not None:
                future.set_exception(message.error)
            elif message.value is not None:
                future.set_result(message.value)
        else:
            if isinstance(message, Run) and message.retain:
                self._retained[message.number] = Future()
            self._tasks.put(message)

    def run(self) -> bool:
        """Run tasks until :class:`End`; returns its ``clean``."""
        while True:
            task = self._tasks.get()  # waits: for rank 0, whose end is a task as well
            if isinstance(task, End):
                close_members(self._members.values())
                for job, run in self._runs if task.clean else ():
                    forget_memory(job, run)
                self.ended.set()
                return task.clean
            self._send(self._start(task) if isinstance(task, Start) else self._invoke(task))

    def _request(self, key: ResultKey) -> Future[Stored]:
        self._requests[key] = future = Future[Stored]()
        self._send(key)
        return future

    def _start(self, task: Start) -> Result:
        job, world_size = task.job, task.context.world_size
        local_world_size = min(self._launch.local_world_size, world_size)
        context = replace(task.context, local_rank=self._launch.local_rank, local_world_size=local_world_size)
        os.environ.update(job.env)  # permanently: the trainer has it too
        env = {**job.env, **job.workloads[context.role].env, **context.to_env()}
        member = ProcessId(str(context.role), context.rank)
        number = context.name.rpartition("/")[2]  # of the start of the run, the same for all ranks
        attempt = int(number) if number.isdecimal() else 1
        host = MemberHost(node=socket.gethostname(), spans=SpanFile(job.job_dir, member, attempt, job.spans_mb))
        try:
            with starting(f"{context.role}[{context.rank}]"), process_environment(env):
                host.load(job, context)
        except Exception as error:  # noqa: BLE001 -- a process boundary: it travels to rank 0
            return Result(ResultKey(task.number), error)
        self._members[context.role] = host, env
        self._runs.add((job.name, task.run))
        return Result(ResultKey(task.number))

    def _invoke(self, task: Run) -> Result:
        host, env = self._members[task.role]

        def load_arguments() -> Arguments:
            items = task.values.load()
            values = [self._get(item) if isinstance(item, ResultKey) else decode(item, self._get) for item in items]
            cut = len(values) - len(task.header.keywords)
            return values[:cut], dict(zip(task.header.keywords, values[cut:], strict=True))

        try:
            with process_environment(env):
                result = Stored.of(host.invoke(task.header, load_arguments), own=True)
        except InvocationError as error:
            return self._fail(task, error)
        except Exception as error:  # noqa: BLE001 -- loading the arguments or serialising the result failed
            return self._fail(task, host.failure(task.header.method, error))
        if task.retain:
            self._retained[task.number].set_result(result)
        return Result(ResultKey(task.number), rows=result.rows, value=None if task.retain else result)

    def _fail(self, task: Run, error: InvocationError) -> Result:
        if task.retain:
            self._retained[task.number].set_exception(error)
        return Result(ResultKey(task.number), error)

    def _get(self, key: Any) -> Any:
        if isinstance(key, list):
            return [self._get(item) for item in key]
        retained = self._retained.get(key.number)
        # waits: for an earlier call, which fails with its process
        stored = (retained or self._fetch(key)).result()
        return stored.rows if retained is not None and key.rows else stored.load()
