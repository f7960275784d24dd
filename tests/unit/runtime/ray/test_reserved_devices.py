# SPDX-License-Identifier: Apache-2.0
"""Which accelerators a worker is told are its own."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import ray
import torch

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.recipe.base import engine_workload
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import device_of
from dlrover.python.rl.recipe.rollout.stream import ThreadLoop
from dlrover.python.rl.recipe.workloads import ReferenceWorkload, RolloutWorkload
from dlrover.python.rl.runtime.ray.processes.member import locate, reserved_devices
from dlrover.python.rl.trainer.workload import MemberContext, member_context


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
def test_they_are_numbered_as_the_process_sees_them(monkeypatch, reserved, hides, visible, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_accelerator_ids=lambda: reserved))
    monkeypatch.setenv("DLROVER_RL_RAY_VISIBLE_DEVICES", hides)
    assert reserved_devices() == devices


def test_its_device_is_the_current_one_of_every_thread_that_computes(monkeypatch):
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


def test_a_process_reports_their_ids_on_its_node_whatever_it_sees(monkeypatch):
    told = {"get_accelerator_ids": lambda: {"GPU": ["2", "3"]}, "get_node_id": lambda: "0a"}
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(**told))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("DLROVER_RL_RAY_VISIBLE_DEVICES", "1")
    assert (locate().node, locate().devices) == ("0a", "2,3")


@pytest.mark.parametrize(
    ("context", "device", "found"),
    [
        (MemberContext(role=RLRoleType.ROLLOUT, local_rank=1, devices=(6, 7)), "cuda", "cuda:6"),
        (MemberContext(role=RLRoleType.ROLLOUT, local_rank=1), "cuda", "cuda:1"),
        (MemberContext(role=RLRoleType.ROLLOUT, local_rank=1, devices=(6,)), "cuda:2", "cuda:2"),
        (MemberContext(role=RLRoleType.ROLLOUT, local_rank=1), "cpu", "cpu"),
    ],
)
def test_an_engine_runs_where_its_member_was_placed(context, device, found):
    with member_context(context):
        workload = RolloutWorkload(None, {})
    assert workload.devices == context.devices
    assert device_of(workload, EngineConfig(device=device)) == found


def test_the_environment_tells_them_too():
    context = MemberContext(devices=(2, 3))
    assert context.to_env()["DEVICES"] == "2,3"
    assert MemberContext.from_env(context.to_env()) == context
    assert MemberContext.from_env({**context.to_env(), "DEVICES": ""}).devices == ()
