# SPDX-License-Identifier: Apache-2.0
"""The actor of a worker: heartbeats, incarnations, errors through raw handles, and its accelerators."""

import asyncio
import gc
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
import torch

from dlrover.python.rl.common.errors import CallSkipped, WorkloadDied
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.recipe.base import engine_workload
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import device_of
from dlrover.python.rl.recipe.roles.rollout import ThreadLoop
from dlrover.python.rl.recipe.workloads import ReferenceWorkload, RolloutWorkload
from dlrover.python.rl.runtime.member.arguments import CallHeader
from dlrover.python.rl.runtime.member.heartbeat import BeatAnswer, Heartbeat
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.runtime.ray.processes import member
from dlrover.python.rl.runtime.ray.processes.member import MemberActor
from dlrover.python.rl.runtime.ray.processes.port import is_loss
from dlrover.python.rl.trainer.port import RAW_CALL
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext, member_context

WATCHDOG, OFF = member.WITHOUT_WATCHDOG
FIRST = ProcessId("ACTOR", 0)
JOB = f"""
trainer: {{module: toys, class: Loop, device_per_node: 1, device_type: CPU}}
workload: {{actor: {{module: {__name__}, class: Workload}}}}
"""


class Workload(BaseWorkload):
    closed = 0

    @classmethod
    def keeps_process(cls, config):
        return True

    def hello(self):
        return "hello"

    def fail(self, text):
        raise ValueError(text)

    def reduce(self):
        """Waits for a lost rank, as nccl's collectives do, and returns anything once its group is aborted."""
        groups = sys.modules["torch.distributed"]
        groups.waiting.set()
        assert groups.aborted.wait(60)
        return "anything"

    def close(self):
        type(self).closed += 1


@pytest.fixture
def unstarted(monkeypatch):
    monkeypatch.setattr(member, "configure_logging", lambda process: None)
    monkeypatch.setattr(member, "reserved_devices", tuple)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(Workload, "closed", 0)
    yield MemberActor(FIRST, 1, "master", None)
    gc.collect()
    gc.freeze()  # as it was before, see tests/conftest.py


@pytest.fixture
def actor(unstarted):
    start(unstarted, 1)
    return unstarted


def start(actor, incarnation):
    """Start it without heartbeats."""
    actor._identity = FIRST, incarnation
    actor._host = MemberHost(incarnation)
    actor._host.start(Workload, MemberContext(role=RLRoleType.ACTOR), None, {})


def start_in_job(actor, folder):
    job = load_job_text(f"{JOB}job_dir: {folder}\n", "job")
    actor.dlrover_start(job, MemberContext(role=RLRoleType.ACTOR), 1)


def call(actor, incarnation, epoch=1, method="hello"):
    return actor.dlrover_invoke(CallHeader((1, 0), method, incarnation=incarnation, epoch=epoch).pack())


def test_heap_is_frozen_from_the_first_step_until_it_leaves(actor):
    before = gc.get_freeze_count()
    actor.dlrover_invoke(CallHeader(RAW_CALL, "hello").pack())
    assert gc.get_freeze_count() == before
    call(actor, 1)
    assert gc.get_freeze_count() > before
    actor.dlrover_leave()
    assert not gc.get_freeze_count()


@pytest.mark.parametrize(
    ("answer", "is_current", "calls"),
    [
        (BeatAnswer.CURRENT, True, []),
        (BeatAnswer.WITHOUT_SECRETS, True, ["revealed"]),
        (BeatAnswer.PEER_LOST, True, [3]),
        (BeatAnswer.REPLACED, False, []),
    ],
)
def test_answer_to_a_heartbeat_ends_only_a_replaced_process(monkeypatch, answer, is_current, calls):
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref)
    noted, beat = [], SimpleNamespace(remote=lambda beat: answer)
    reveal = SimpleNamespace(remote=lambda secrets: noted.append("revealed"))
    master = SimpleNamespace(beat=beat, reveal=reveal)
    assert member.send_to(master, noted.append)(Heartbeat(FIRST, 3)) is is_current
    assert noted == calls


@pytest.mark.parametrize(("setting", "value"), [("", OFF), ("1", "1")])
def test_watchdog_is_off_unless_the_user_has_set_it(unstarted, tmp_path, setting, value):
    os.environ.pop(WATCHDOG, None)
    if setting:
        os.environ[WATCHDOG] = setting
    start_in_job(unstarted, tmp_path)
    assert os.environ[WATCHDOG] == value


def test_heartbeat_of_an_idle_member_has_the_notice(unstarted, tmp_path):
    unstarted._notice = SimpleNamespace(read=lambda: "the node will go")
    start_in_job(unstarted, tmp_path)
    beat = unstarted._beat()
    assert (beat.method, beat.notice, beat.work) == ("", "the node will go", unstarted._host.work)


def test_call_to_any_incarnation_reaches_a_kept_process(unstarted, tmp_path):
    start_in_job(unstarted, tmp_path)
    unstarted.dlrover_leave()
    start_in_job(unstarted, tmp_path)
    assert call(unstarted, incarnation=0, epoch=0) == "hello"


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
    start(actor, 2)
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
        self.is_available, self.is_initialized = lambda: True, lambda: self.is_there
        self.get_backend_config, self.destroy_process_group = lambda: backends, lambda: self._end("destroy")

    def _abort(self):
        assert self.may_abort.wait(60)
        self._end("abort")
        self.aborted.set()

    def _end(self, how):
        assert self.is_there
        self.is_there = False
        self.calls.append((how, Workload.closed))


@pytest.fixture
def groups(monkeypatch, request):
    groups = Groups(getattr(request, "param", "cpu:gloo,cuda:nccl"))
    monkeypatch.setitem(sys.modules, "torch.distributed", groups)
    return groups


def test_lose_peer_aborts_a_call_and_refuses_its_result(actor, groups):
    with ThreadPoolExecutor(2) as threads:
        reduced = threads.submit(call, actor, 1, method="reduce")
        assert groups.waiting.wait(60)
        actor.lose_peer(1)
        with pytest.raises(WorkloadDied):  # before the abort has ended
            actor._run("hello", (), {})
        leaving = threads.submit(actor.dlrover_leave)
        assert not leaving.done() and not Workload.closed, "it waits for the abort"
        groups.may_abort.set()
        with pytest.raises(WorkloadDied) as died:
            reduced.result(60)
        assert died.value.incarnation == 1
        leaving.result(60)
    assert groups.calls == [("abort", 0)] and Workload.closed == 1, "aborted once, before the workload is closed"
    groups.is_there = True
    start(actor, 2)
    actor.lose_peer(1)  # the answer to a heartbeat of the earlier incarnation
    assert groups.is_there and call(actor, 2) == "hello"


@pytest.mark.parametrize(
    ("groups", "calls"), [("gloo", [("destroy", 1)]), ("cpu:gloo,cuda:nccl", [("abort", 0)])], indirect=["groups"]
)
def test_dlrover_leave_of_an_idle_member_ends_its_groups(actor, groups, calls):
    """Nccl's before the workload closes, which would destroy them and wait for the lost rank."""
    groups.may_abort.set()
    actor.dlrover_leave()
    assert groups.calls == calls


def test_error_through_a_raw_handle_is_raised_as_it_is(actor):
    with pytest.raises(ValueError, match="no luck"):
        actor._run("fail", ["no luck"], {})


@pytest.mark.parametrize(
    ("reserved", "hides", "visible", "devices"),
    [
        ({"GPU": ["2", "3"]}, "", "", (2, 3)),
        ({"GPU": ["2", "3"]}, "1", "", (0, 1)),
        ({"GPU": ["3", "2"]}, "", "1,2,3", (1, 2)),
        ({"GPU": ["GPU-5c1"]}, "", "GPU-0ab,GPU-5c1", (1,)),
        ({"GPU": [], "NPU": ["5"]}, "", "", (5,)),
        ({"GPU": []}, "", "", ()),
    ],
)
def test_reserved_devices_have_the_numbers_the_process_sees(monkeypatch, reserved, hides, visible, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_accelerator_ids=lambda: reserved))
    monkeypatch.setenv("DLROVER_RL_RAY_VISIBLE_DEVICES", hides)
    assert member.reserved_devices() == devices


def test_device_is_current_in_every_computing_thread(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append((device, threading.current_thread())))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_workload, "engine_class", lambda *_: lambda *arguments: arguments)
    with member_context(MemberContext(role=RLRoleType.REFERENCE, devices=(3,))):
        ReferenceWorkload(None, {})._make_train_engine("model", EngineConfig())
    loop = ThreadLoop(None, "cuda:2")
    loop.run(asyncio.sleep(0))
    loop.close()
    ThreadLoop().close()
    assert current == [("cuda:3", threading.current_thread()), ("cuda:2", loop._thread)]


@pytest.mark.parametrize(
    ("devices", "device", "expected"),
    [((6, 7), "cuda", "cuda:6"), ((), "cuda", "cuda:1"), ((6,), "cuda:2", "cuda:2"), ((), "cpu", "cpu")],
)
def test_engine_runs_where_its_member_was_placed(devices, device, expected):
    with member_context(MemberContext(role=RLRoleType.ROLLOUT, local_rank=1, devices=devices)):
        workload = RolloutWorkload(None, {})
    assert workload.devices == devices
    assert device_of(workload, EngineConfig(device=device)) == expected
