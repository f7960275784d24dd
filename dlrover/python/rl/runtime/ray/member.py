"""The actor that hosts one workload.

The master knows a workload by its dotted name and the names of its methods; the class itself is imported here, in the
process that runs it. For each public method of the workload the actor has one of the same name, so that raw handles
(``trainer.actors[0].update.remote(...)``) work; role groups call :meth:`MemberActor.dlrover_invoke`.

::

    locate -> start -> invoke ...            a member
    locate -> prepare ... -> locate -> start a standby: everything imported before it is needed
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from dlrover.python.rl.common.errors import CallSkipped, InvocationError
from dlrover.python.rl.common.log import configure_logging
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.beats import Beat, Beater, BeatTerms
from dlrover.python.rl.runtime.executor import starting
from dlrover.python.rl.runtime.host import CallHeader, MemberHost
from dlrover.python.rl.runtime.loading import enter_folder, load_class
from dlrover.python.rl.runtime.ports import HeldPort
from dlrover.python.rl.runtime.wire import decode
from dlrover.python.rl.trainer.shard import row_count
from dlrover.python.rl.trainer.workload import MemberContext

_BEAT_S = 5.0
"""How long a beat may take to be answered before the next one is tried."""


@dataclass(frozen=True)
class MemberStart:
    """What a process is told to become a member.

    Attributes:
        job: the job.
        context: who it is among its peers.
        incarnation: which of the member's processes it is.
    """

    job: JobSpec
    context: MemberContext
    incarnation: int


def reserved_devices() -> tuple[int, ...]:
    """The accelerators that Ray reserved for this process, by the numbers they have here: from 0 where it hides the
    others."""
    reserved = ray.get_runtime_context().get_accelerator_ids().values()
    numbers: list[str] = next(filter(None, reserved), [])
    hidden = os.environ.get("DLROVER_RL_RAY_VISIBLE_DEVICES") == "1"
    return tuple(range(len(numbers))) if hidden else tuple(map(int, numbers))


def locate() -> Process:
    """Where this process is."""
    return Process(
        node=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        host=socket.gethostname(),
        address=ray.util.get_node_ip_address(),
    )


def locate_with_port(port: HeldPort, preferred: Sequence[int] = ()) -> Process:
    """Where this process is, and a TCP port that ``port`` keeps free for it there."""
    here = locate()
    return replace(here, port=port.take(preferred, here.address))


def send_to(master: Any) -> Any:
    """How a process's beats reach the master."""

    def send(beat: Beat) -> bool:
        known: bool = ray.get(master.beat.remote(beat), timeout=_BEAT_S)
        return known

    return send


@dataclass(frozen=True)
class Seated:
    """What a process is from its beginning.

    Attributes:
        role: its role.
        who: ``"ROLLOUT[1]"``, ``"ROLLOUT-standby[2]"``.
        number: its incarnation; a standby's number.
    """

    role: str
    who: str
    number: int


class MemberActor:
    """Hosts one workload; see the module.

    Args:
        seated: what it is.
        master: the master's handle.
        beats: how it shows that it lives.
    """

    def __init__(self, seated: Seated, master: Any, beats: BeatTerms) -> None:
        configure_logging(seated.who)
        self._role, self._master = RLRoleType(seated.role), master
        self._is = seated.who, seated.number  # one value: the beats read it from their own thread
        self._host: MemberHost | None = None
        self._port = HeldPort()
        Beater(self._beat, send_to(master), beats).start()

    def dlrover_locate(self, preferred_ports: Sequence[int]) -> Process:
        """Where this process is, and a TCP port that is kept free for it there."""
        return locate_with_port(self._port, preferred_ports)

    def dlrover_prepare(self, job: JobSpec) -> None:
        """Import what the role's workload needs, so that starting it later takes a moment.

        Raises:
            WorkloadStartError: importing it failed.
        """
        enter_folder(job.work_dir)
        with starting(f"{self._role}-standby"):
            self._load(job).warm_up()

    def dlrover_start(self, start: MemberStart) -> None:
        """Construct the workload.

        Raises:
            WorkloadStartError: importing or constructing it failed.
        """
        context = replace(start.context, devices=reserved_devices())
        os.environ.update(context.to_env())
        enter_folder(start.job.work_dir)
        self._is = f"{self._role}[{context.rank}]", start.incarnation
        configure_logging(self._is[0])
        self._host = host = MemberHost(start.incarnation, ray.get_runtime_context().get_node_id())
        with starting(self._is[0]):
            host.start(self._load(start.job), context, self._master, start.job.config)

    def _load(self, job: JobSpec) -> Any:
        spec = job.workloads[self._role]
        return load_class(spec.module, spec.class_, job.search_path)

    def _beat(self) -> Beat:
        who, number = self._is
        doing = self._host.doing() if self._host is not None else None
        if doing is None:
            return Beat(who, number)
        return Beat(who, number, doing.method, doing.age_s, doing.call_id[0])

    def dlrover_ping(self) -> bool:
        """Answer, once nothing else is running: a pending ping is how the master watches a process."""
        return True

    def dlrover_close(self) -> None:
        """Let the workload give back what it holds."""
        if self._host is not None:
            self._host.close()

    def dlrover_executed(self) -> dict[str, int]:
        """Method to how often it really ran in this process."""
        return dict(self._host.executed) if self._host is not None else {}

    def dlrover_invoke(self, header: CallHeader, *values: Any) -> Any:
        """Run a method for a role group; ``values`` are the positional arguments, then the keyword ones.

        Raises:
            InvocationError: see :meth:`~dlrover.python.rl.runtime.host.MemberHost.invoke`.
        """
        host = self._host
        if host is None or host.workload is None:
            raise CallSkipped("it has not started yet", role=self._role, rank=-1, method=header.method)

        return serve(host, header, values)

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        assert self._host is not None, "dlrover_start comes first"
        return self._host.run(method, args, kwargs)


def serve(host: MemberHost, header: CallHeader, values: Sequence[Any]) -> Any:
    """Run a method of what ``host`` holds; ``values`` are the positional arguments, then the keyword ones.

    Raises:
        InvocationError: see :meth:`~dlrover.python.rl.runtime.host.MemberHost.invoke`.
    """

    def arguments() -> tuple[Sequence[Any], Mapping[str, Any]]:
        decoded = [decode(value, _fetched) for value in values]
        cut = len(decoded) - len(header.keywords)
        return decoded[:cut], dict(zip(header.keywords, decoded[cut:], strict=True))

    try:
        result = host.invoke(header, arguments)
    except InvocationError:
        raise
    except ray.exceptions.RayTaskError as upstream:
        raise (upstream.cause if isinstance(upstream.cause, InvocationError) else upstream) from None
    return (result, row_count(result)) if header.sized else result


def _fetched(refs: Any) -> Any:
    return ray.get(refs)  # waits: for another member's call; whoever hangs there is found by its own limit


def member_class(name: str, methods: Sequence[str]) -> type[MemberActor]:
    """A :class:`MemberActor` with one more method for each name in ``methods``."""

    def forward(method: str) -> Any:
        def call(self: MemberActor, *args: Any, **kwargs: Any) -> Any:
            return self._run(method, args, kwargs)

        call.__name__ = method
        return call

    own = [method for method in methods if not hasattr(MemberActor, method)]
    return type(name, (MemberActor,), {method: forward(method) for method in own})
