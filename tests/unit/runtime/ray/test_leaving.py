# SPDX-License-Identifier: Apache-2.0
"""A worker whose process goes on as a later incarnation refuses what was meant for the earlier one."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from dlrover.python.rl.common.errors import CallSkipped, WorkloadDied
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.runtime.member.arguments import CallHeader
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.runtime.ray.processes import member
from dlrover.python.rl.runtime.ray.processes.member import MemberActor
from dlrover.python.rl.runtime.ray.processes.port import is_loss
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext


class Workload(BaseWorkload):
    closed = 0

    def hello(self):
        return "hello"

    def reduce(self):
        """Waits for a lost rank, as nccl's collectives do, and returns anything once its group is aborted."""
        groups = sys.modules["torch.distributed"]
        groups.waiting.set()
        assert groups.aborted.wait(60)
        return "anything"

    def close(self):
        type(self).closed += 1


def started(actor, incarnation):
    actor._identity = ProcessId("ACTOR", 0), incarnation
    actor._host = MemberHost(incarnation)
    actor._host.start(Workload, MemberContext(), None, {})


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setattr(member, "configure_logging", lambda who: None)
    made = MemberActor(ProcessId("ACTOR", 0), 1, None, None)
    started(made, 1)
    return made


def call(actor, incarnation, epoch=1, method="hello"):
    return actor.dlrover_invoke(CallHeader((1, 0), method, incarnation=incarnation, epoch=epoch).pack())


def test_calls_to_the_earlier_incarnation_find_it_gone(actor):
    assert call(actor, 1) == actor._run("hello", (), {}) == "hello"
    actor.dlrover_leave()
    assert Workload.closed == 1
    for refused in (lambda: call(actor, 1), lambda: actor._run("hello", (), {})):
        with pytest.raises(WorkloadDied) as died:
            refused()
        assert died.value.incarnation == 1 and is_loss(died.value)
    with pytest.raises(CallSkipped, match="not started yet"):
        call(actor, 2)
    started(actor, 2)
    with pytest.raises(WorkloadDied):
        actor._run("hello", (), {})  # queued since before: the object has no state yet
    with pytest.raises(WorkloadDied):
        call(actor, 1)
    assert call(actor, 2) == actor._run("hello", (), {}) == "hello"


class Groups:
    """The used part of ``torch.distributed``: one group of ``backends``, whose abort waits for ``may_abort``."""

    def __init__(self, backends):
        self.backends, self.calls, self.is_there = backends, [], True
        self.waiting, self.may_abort, self.aborted = threading.Event(), threading.Event(), threading.Event()
        self.distributed_c10d = SimpleNamespace(_abort_process_group=self._abort)

    def is_available(self):
        return True

    def is_initialized(self):
        return self.is_there

    def get_backend_config(self):
        return self.backends

    def destroy_process_group(self):
        self._end("destroy")

    def _abort(self):
        assert self.may_abort.wait(60)
        self._end("abort")
        self.aborted.set()

    def _end(self, how):
        assert self.is_there
        self.is_there = False
        self.calls.append((how, Workload.closed))


@pytest.fixture
def groups_of(monkeypatch):
    def install(backends):
        groups = Groups(backends)
        monkeypatch.setitem(sys.modules, "torch.distributed", groups)
        monkeypatch.setattr(Workload, "closed", 0)
        return groups

    return install


def test_lose_peer_aborts_a_call_and_refuses_its_result(actor, groups_of):
    groups = groups_of("cpu:gloo,cuda:nccl")
    with ThreadPoolExecutor(2) as threads:
        reduced = threads.submit(call, actor, 1, method="reduce")
        assert groups.waiting.wait(60)
        actor.lose_peer(1)
        with pytest.raises(WorkloadDied):  # before the abort has ended
            actor._run("hello", (), {})
        leaving = threads.submit(actor.dlrover_leave)
        groups.may_abort.set()
        with pytest.raises(WorkloadDied) as died:
            reduced.result(60)
        assert died.value.incarnation == 1
        leaving.result(60)
    assert groups.calls == [("abort", 0)] and Workload.closed == 1, "aborted once, before the workload is closed"
    groups.is_there = True
    started(actor, 2)
    actor.lose_peer(1)  # the answer to a heartbeat of the earlier incarnation
    assert groups.is_there and call(actor, 2) == "hello"


def test_dlrover_leave_waits_for_an_abort_that_hangs(actor, groups_of):
    """The master gives up on it after a while, and replaces the process."""
    groups = groups_of("cuda:nccl")
    with ThreadPoolExecutor(1) as threads:
        actor.lose_peer(1)
        leaving = threads.submit(actor.dlrover_leave)
        assert not leaving.done() and not Workload.closed
        groups.may_abort.set()
        leaving.result(60)
    assert Workload.closed == 1


@pytest.mark.parametrize(("backends", "calls"), [("gloo", [("destroy", 1)]), ("cpu:gloo,cuda:nccl", [("abort", 0)])])
def test_dlrover_leave_of_an_idle_member_ends_its_groups(actor, groups_of, backends, calls):
    """Nccl's before the workload closes, which would destroy them and wait for the lost rank."""
    groups = groups_of(backends)
    groups.may_abort.set()
    actor.dlrover_leave()
    assert groups.calls == calls
