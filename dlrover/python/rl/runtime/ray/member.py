"""The actor that hosts one workload.

The master knows a workload by its dotted name and the names of its methods; the class itself is imported here, in the
process that runs it. For each public method of the workload the actor has one of the same name, so that raw handles
(``trainer.actors[0].update.remote(...)``) work; role groups call :meth:`MemberActor.dlrover_invoke`.
"""

import asyncio
import inspect
import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import ray

from dlrover.python.rl.common.errors import InvocationError, WorkloadStartError
from dlrover.python.rl.common.log import configure_logging
from dlrover.python.rl.runtime.loading import enter_folder, load_class
from dlrover.python.rl.runtime.ports import free_port
from dlrover.python.rl.runtime.ray.wire import decode
from dlrover.python.rl.trainer.shard import row_count
from dlrover.python.rl.trainer.workload import MemberContext, member_context


@dataclass(frozen=True)
class Location:
    """Where an actor's process is: node id, host name and address, process id, and a TCP port that is free there."""

    node_id: str
    host: str
    address: str
    pid: int
    port: int


@dataclass(frozen=True)
class Target:
    """Which class a member hosts, and where it finds it."""

    module: str
    class_: str
    search_path: tuple[str, ...]
    work_dir: str


@dataclass(frozen=True)
class CallHeader:
    """What a call carries besides its arguments: its id, the method, names of the trailing keyword arguments, and
    whether the row count of the result is wanted."""

    call_id: tuple[int, int]
    method: str
    keywords: tuple[str, ...]
    sized: bool


def locate(preferred_ports: Sequence[int] = ()) -> Location:
    """Where this process is."""
    context = ray.get_runtime_context()
    address = ray.util.get_node_ip_address()
    return Location(
        context.get_node_id(), socket.gethostname(), address, os.getpid(), free_port(preferred_ports, address)
    )


class MemberActor:
    """Hosts one workload; see the module."""

    def __init__(self, who: str) -> None:
        configure_logging(who)
        self._who = who
        self._workload: Any = None
        self._context = MemberContext()
        self._loop: asyncio.Runner | None = None

    def dlrover_locate(self, preferred_ports: Sequence[int]) -> Location:
        """Where this member is."""
        return locate(preferred_ports)

    def dlrover_start(self, target: Target, context: MemberContext, master: Any, config: Any) -> int:
        """Construct the workload. Returns the process id.

        Raises:
            WorkloadStartError: importing or constructing it failed.
        """
        os.environ.update(context.to_env())
        enter_folder(target.work_dir)
        self._context = context
        try:
            with member_context(context):
                self._workload = load_class(target.module, target.class_, target.search_path)(master, config)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: whatever it raises travels on
            raise WorkloadStartError(self._who, f"{type(error).__name__}: {error}", traceback.format_exc()) from None
        return os.getpid()

    def dlrover_ping(self) -> bool:
        """Answer, once nothing else is running: a pending ping is how the master watches a member."""
        return True

    def dlrover_close(self) -> None:
        """Let the workload give back what it holds."""
        if self._workload is not None:
            self._workload.close()

    def dlrover_invoke(self, header: CallHeader, *values: Any) -> Any:
        """Run a method for a role group; ``values`` are the positional arguments, then the keyword ones.

        Raises:
            InvocationError: the method raised; carries role, rank, method, host, traceback, and the exception itself
                (as ``original``) when it can be pickled.
        """
        try:
            arguments = [decode(value, ray.get) for value in values]
            cut = len(arguments) - len(header.keywords)
            kwargs = dict(zip(header.keywords, arguments[cut:], strict=True))
            result = self._run(header.method, arguments[:cut], kwargs)
        except InvocationError:
            raise
        except ray.exceptions.RayTaskError as upstream:
            raise (upstream.cause if isinstance(upstream.cause, InvocationError) else upstream) from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code: whatever it raises travels on
            raise self._failure(header.method, error) from None
        return (result, row_count(result)) if header.sized else result

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = getattr(self._workload, method)(*args, **kwargs)
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(_awaited(result))

    def _failure(self, method: str, error: BaseException) -> InvocationError:
        failure = InvocationError(
            f"{type(error).__name__}: {error}",
            role=self._context.role,
            rank=self._context.rank,
            method=method,
            node=socket.gethostname(),
            remote_traceback=traceback.format_exc(),
        )
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:  # noqa: BLE001 -- a user's exception may fail to pickle in any way; its text is carried anyway
            return failure
        failure.original = error
        return failure


async def _awaited(result: Any) -> Any:
    return await result


def member_class(name: str, methods: Sequence[str]) -> type[MemberActor]:
    """A :class:`MemberActor` with one more method for each name in ``methods``."""

    def forward(method: str) -> Any:
        def call(self: MemberActor, *args: Any, **kwargs: Any) -> Any:
            return self._run(method, args, kwargs)

        call.__name__ = method
        return call

    own = [method for method in methods if not hasattr(MemberActor, method)]
    return type(name, (MemberActor,), {method: forward(method) for method in own})
