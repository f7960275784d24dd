# SPDX-License-Identifier: Apache-2.0
"""The actor that hosts one workload.

Only the process that runs a workload imports its class. The actor has each public method of the workload, so that raw
handles (``trainer.actors[0].update.remote(...)``) work; role groups call :meth:`MemberActor.dlrover_invoke`.

::

    locate -> start -> invoke ...            a worker
    locate -> prepare ... -> locate -> start a standby, which imports before it is needed
    ... lose_peer, in a thread: abort the collectives on devices -> leave -> locate -> start
                                             a worker that keeps its process when its group loses a rank
"""

import gc
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from dlrover.python.rl.common.errors import CallSkipped, InvocationError
from dlrover.python.rl.common.log import configure_logging
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.common.sockets import HeldPort
from dlrover.python.rl.common.spans import SpanFile
from dlrover.python.rl.config.spec import JobSpec, LivenessSpec
from dlrover.python.rl.control.events import CauseKind, Process
from dlrover.python.rl.control.liveness import Work
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_name
from dlrover.python.rl.runtime.member.arguments import CallHeader, decode
from dlrover.python.rl.runtime.member.heartbeat import BeatAnswer, DepartureNotice, Heartbeat, HeartbeatSender
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.runtime.member.loading import enter_folder, held_secrets, load_workload, starting, take_secrets
from dlrover.python.rl.runtime.run.files import LogCopier, copy_output
from dlrover.python.rl.runtime.run.machine import try_devices
from dlrover.python.rl.trainer.port import gone_incarnation
from dlrover.python.rl.trainer.shard import row_count
from dlrover.python.rl.trainer.workload import MemberContext

_BEAT_S = 5.0  # for the answer to a heartbeat


def reserved_devices() -> tuple[int, ...]:
    """Return the accelerators that Ray reserved for this process by its own numbers: from 0 if Ray hides the others."""
    names = _accelerators(ray.get_runtime_context())
    if os.environ.get("DLROVER_RL_RAY_VISIBLE_DEVICES") == "1":
        return tuple(range(len(names)))
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return tuple(sorted(visible.index(name) if name in visible else int(name) for name in names))


def _accelerators(context: Any) -> list[str]:
    """Return the node's ids of the accelerators that Ray reserved for this process."""
    reserved: list[str] = next(filter(None, context.get_accelerator_ids().values()), [])
    return reserved


# Lets a process outlive its NCCL communicators: torch's watchdog would end it when one fails.
WITHOUT_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"


def _torch_groups() -> Any:
    distributed = sys.modules.get("torch.distributed")
    is_used = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_used else None


def abort_groups() -> None:
    """Abort this process's torch groups if one is on devices: its collectives, and destroying it, wait for a lost rank
    for ever. Groups on CPUs fail by themselves, and cannot be aborted."""
    distributed = _torch_groups()
    if distributed is not None and "nccl" in distributed.get_backend_config():
        distributed.distributed_c10d._abort_process_group()


def locate() -> Process:
    context = ray.get_runtime_context()
    here = Process(context.get_node_id(), os.getpid(), socket.gethostname(), ray.util.get_node_ip_address())
    return replace(here, devices=",".join(_accelerators(context)))


def send_to(master: Any, lose_peer: Callable[[int], None] = lambda number: None) -> Any:
    """Return a function that sends heartbeats; ``lose_peer`` gets the incarnation of a worker that has lost a peer."""

    def send(beat: Heartbeat) -> bool:
        answer: BeatAnswer = ray.get(master.beat.remote(beat), timeout=_BEAT_S)
        if answer is BeatAnswer.WITHOUT_SECRETS:
            master.reveal.remote(held_secrets())
        if answer is BeatAnswer.PEER_LOST:
            lose_peer(beat.number)
        return answer is not BeatAnswer.REPLACED

    return send


class MemberActor:
    """Hosts one workload; ``number`` is a worker's incarnation or a standby's, ``beats`` None without a master."""

    def __init__(self, process_id: ProcessId, number: int, master: Any, beats: LivenessSpec | None) -> None:
        configure_logging(str(process_id))
        self._role, self._master = RLRoleType(process_id.role), master
        self._identity = process_id, number  # one value: the heartbeat thread reads it
        self._host: MemberHost | None = None
        self._left = 0  # the last incarnation that has left its peers, or has to
        self._leaving = threading.Lock()
        self._abort: threading.Thread | None = None
        self._log: LogCopier | None = None
        self._is_frozen = False
        self._port = HeldPort()
        self._notice = DepartureNotice(beats.notice_file) if beats is not None else None
        if beats is not None:
            HeartbeatSender(self._beat, send_to(master, self.lose_peer), beats).start()

    def dlrover_locate(self, preferred_ports: Sequence[int]) -> Process:
        """Return where this process runs, and a TCP port that is reserved for it."""
        here = locate()
        return replace(here, port=self._port.take(preferred_ports, here.address))

    def dlrover_prepare(self, job: JobSpec) -> None:
        """Import the role's workload, so that starting it later is fast. Raises WorkloadStartError."""
        enter_folder(job.work_dir)
        take_secrets(job, self._role)
        with starting(ProcessId.standby(self._role, 0).pool):
            load_workload(job, self._role).warm_up()

    def dlrover_start(self, job: JobSpec, context: MemberContext, incarnation: int) -> None:
        """Import and construct the workload. Raises WorkloadStartError."""
        context = replace(context, devices=reserved_devices())
        os.environ.update(context.to_env())
        enter_folder(job.work_dir)
        take_secrets(job, self._role)
        process_id = ProcessId(self._role, context.rank)
        self._identity = process_id, incarnation
        configure_logging(str(process_id))
        if self._log is not None:
            self._log.stop()
        self._log = copy_output(job.job_dir, process_id.log_name, f"{process_id} attempt {incarnation}")
        spans = SpanFile(job.job_dir, process_id, incarnation, job.spans_mb)
        self._host = host = MemberHost(incarnation, memory_name(), spans=spans)
        with starting(str(process_id)):
            if context.devices and context.restart.reason.startswith(CauseKind.DEVICE_FAILED):
                try_devices(context.devices)
            workload = load_workload(job, self._role)
            if self._master is not None and workload.keeps_process(job.config):
                os.environ.setdefault(*WITHOUT_WATCHDOG)
            host.start(workload, context, self._master, job.config)

    def lose_peer(self, number: int) -> None:
        """Refuse all results of incarnation ``number``, which may be wrong, and abort its collectives in a thread: a
        call may wait for the lost rank. If the abort hangs, so does :meth:`dlrover_leave`: the process is replaced."""
        with self._leaving:
            if self._left < number == self._identity[1]:
                self._left = number
                self._abort = threading.Thread(target=abort_groups, name="dlrover-abort", daemon=True)
                self._abort.start()

    def dlrover_leave(self) -> None:
        """Close the workload and its process groups; the next start constructs a later incarnation."""
        with self._leaving:
            host, self._host, self._left = self._host, None, self._identity[1]
        if self._abort is not None:
            self._abort.join()  # waits: as long as the master waits for this call
        abort_groups()
        if host is not None:
            host.close()
        if (distributed := _torch_groups()) is not None:
            distributed.destroy_process_group()  # peers that wait in a collective then fail
        del host
        gc.unfreeze()
        self._is_frozen = False
        gc.collect()  # the next workload needs the memory of the tensors

    def _beat(self) -> Heartbeat:
        process_id, number = self._identity
        call = self._host.current_call() if self._host is not None else None
        notice = self._notice.read() if self._notice is not None else ""
        work = self._host.work if self._host is not None else Work()
        if call is None:
            return Heartbeat(process_id, number, notice=notice, work=work)
        method, call_id, age_s = call
        return Heartbeat(process_id, number, method, age_s, call_id[0], notice, work)

    def dlrover_ping(self) -> bool:
        return True

    def dlrover_close(self) -> None:
        if self._host is not None:
            self._host.close()

    def dlrover_invoke(self, packed: bytes, *values: Any) -> Any:
        """Run a method for a role group; ``values`` are the positional arguments, then the keyword ones. Ray sends the
        bytes of the :class:`CallHeader` unchanged. Raises InvocationError as ``MemberHost.invoke``."""
        header, host = CallHeader.unpack(packed), self._host
        self._refuse_gone(header.incarnation, header.method)
        if host is None or host.workload is None:
            raise CallSkipped("it has not started yet", role=self._role, rank=-1, method=header.method)

        def load_arguments() -> tuple[Sequence[Any], Mapping[str, Any]]:
            # waits: for another worker's call, which has its own time limit
            decoded = [decode(value, ray.get) for value in values]
            cut = len(decoded) - len(header.keywords)
            return decoded[:cut], dict(zip(header.keywords, decoded[cut:], strict=True))

        if header.call_id[0] > 0 and not self._is_frozen:  # the first step: the models have been loaded
            gc.collect()
            gc.freeze()  # else each full collection takes longer than a short step, with vLLM 0.4 s
            self._is_frozen = True
        try:
            result = host.invoke(header, load_arguments)
        except InvocationError:
            raise
        except ray.exceptions.RayTaskError as upstream:
            raise (upstream.cause if isinstance(upstream.cause, InvocationError) else upstream) from None
        finally:
            self._refuse_gone(header.incarnation, header.method)
        return (result, row_count(result)) if header.sized else result

    def _refuse_gone(self, incarnation: int, method: str) -> None:
        """Raise WorkloadDied for a call to an incarnation that has left its peers, also during the call."""
        if 0 < incarnation <= self._left:
            raise gone_incarnation(incarnation, self._role, self._identity[0].rank, method)

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        number = self._identity[1]
        if self._left and (self._host is None or not self._host.is_rebuilt):
            number = self._left
        self._refuse_gone(number, method)
        assert self._host is not None, "dlrover_start comes first"
        try:
            return self._host.run(method, args, kwargs)
        except Exception as error:
            try:
                "".join(traceback.format_exception(error)).encode()
            except UnicodeEncodeError:  # Ray cannot send it, and would end the process
                raise self._host.failure(method, error) from None
            raise
        finally:
            self._refuse_gone(number, method)


def member_class(name: str, methods: Sequence[str]) -> type[MemberActor]:
    def forward(method: str) -> Any:
        def call(self: MemberActor, *args: Any, **kwargs: Any) -> Any:
            return self._run(method, args, kwargs)

        call.__name__ = method
        return call

    own = [method for method in methods if not hasattr(MemberActor, method)]
    return type(name, (MemberActor,), {method: forward(method) for method in own})
