# SPDX-License-Identifier: Apache-2.0
"""The process of vLLM, without vLLM: its options and devices, its calls, and the weights that it is given."""

import gc
import os
import pickle
import signal
from dataclasses import replace

import pytest
import torch

from dlrover.python.rl.common.errors import EngineDied, EngineError
from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, read_options, validate_engine
from dlrover.python.rl.engine.api.weights import DOWN, UP, Adapters, take_snapshot, verify_snapshot
from dlrover.python.rl.engine.model.ranks import device_environment
from dlrover.python.rl.engine.vllm import VllmOptions, child
from dlrover.python.rl.engine.vllm.child import ChildRunner, share_weights
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from tests.support.sync_sides import publish

STAND_IN = """
import sys, time
from multiprocessing.connection import Connection
from pathlib import Path
from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.vllm import child

class StandIn:
    has_weights = True
    runner = property(lambda self: self)

    def step(self):
        while not Path("go").exists():
            time.sleep(0.01)
        return [("the answer to step", 1, -0.5)]

    def abort(self, names):
        return None

    def cache_bytes(self):
        return 7

    def wake(self, kind):
        raise EngineError(f"no room for {kind}")

    def sleep(self, keep_weights):
        self.has_weights = keep_weights

    load = None

child.start_here = lambda *arguments: StandIn()
child.serve(Connection(int(sys.argv[1])))
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    (tmp_path / "stand_in_for_vllm.py").write_text(STAND_IN)
    monkeypatch.setattr(child, "_MODULE", "stand_in_for_vllm")
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    child_runner = ChildRunner({}, on_cpu=True, env={**os.environ, "PYTHONPATH": path})
    yield child_runner
    child_runner.close()


def interrupt(runner):
    def raise_interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            runner.step()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_calls_after_an_interrupted_one_get_their_answers(runner, tmp_path):
    interrupt(runner)
    (tmp_path / "go").touch()
    assert runner.abort(["0"]) is None
    with pytest.raises(EngineError, match="no room for weights"):
        runner.wake("weights")
    assert runner.cache_bytes() == 7
    runner.sleep(keep_weights=False)
    assert runner.has_weights is False
    assert runner.step() == [("the answer to step", 1, -0.5)]


def test_cut_message_ends_the_process(runner, monkeypatch):
    def interrupted(message):
        raise KeyboardInterrupt

    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(runner._connection, "send", interrupted)
        runner.cache_bytes()
    with pytest.raises(EngineDied):
        runner.cache_bytes()
    assert runner._process.poll() == -signal.SIGKILL


FIXED = ["model", "tensor_parallel_size", "distributed_executor_backend", "enable_sleep_mode", "worker_extension_cls"]
FIXED += ["moe_backend", "async_scheduling", "speculative_config", "logprobs_mode", "logits_processors"]


@pytest.mark.parametrize("name", FIXED)
def test_fixed_argument_of_vllm_is_refused_by_name(name):
    options = {"engine_args": {name: "any", "max_num_batched_tokens": 64}}
    with pytest.raises(EngineError, match=rf"^backend: arguments of vLLM .* cannot be given: {name}, got"):
        read_options(VllmOptions, options)
    (error,) = validate_engine(ROLLOUT_ENGINES, "vllm", options, "config.engine.rollout", runs_here=False)
    assert (error.where, f"cannot be given: {name}" in error.what) == ("config.engine.rollout_options", True)


def test_other_arguments_of_vllm_are_passed_on():
    options = {"engine_args": {"max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1}}
    assert read_options(VllmOptions, options).engine_args == options["engine_args"]


@pytest.mark.parametrize(
    ("visible", "device", "size", "devices", "expected"),
    [
        (None, "cuda:2", 1, (), "2"),
        (None, "cuda:2", 2, (), "2,3"),
        (None, "cuda:1", 2, (1, 3), "1,3"),
        ("4,5,6,7", "cuda:2", 1, (), "6"),
        ("GPU-a,GPU-b", "cuda:1", 1, (1,), "GPU-b"),
        (None, "cuda", 1, (), "0"),
        ("3", "cpu", 1, (), "3"),
    ],
)
def test_process_sees_the_devices_of_its_engine(monkeypatch, visible, device, size, devices, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = RolloutSettings(device, tensor_parallel_size=size, devices=devices)
    assert device_environment(settings)["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(("devices", "visible"), [((1,), ""), ((), "0,1")])
def test_too_few_devices_are_refused(monkeypatch, devices, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(EngineError, match="tensor_parallel_size 2 needs 2 devices"):
        device_environment(RolloutSettings("cuda:1", tensor_parallel_size=2, devices=devices))


# -- received weights for vLLM's processes: the pages that the sender has written -------------------------------------
class Source:
    def __init__(self):
        self.version = 0

    def named_weights(self):
        yield "a", torch.full((5, 7), float(self.version))
        yield "b", torch.full((3,), float(self.version), dtype=torch.bfloat16)


@pytest.fixture
def received():
    source, (sender, receiver) = Source(), (PullTransport(), PullTransport())

    def receive():
        source.version += 1
        return receiver.receive(publish(sender, source)[0])

    yield receive
    receiver.close()
    sender.close()


def share(weights):
    with share_weights(weights) as shared:
        return pickle.loads(pickle.dumps(shared)).open()


def test_weights_on_a_device_are_shared_in_host_memory():
    source, (sender, receiver) = Source(), (CudaIpcTransport(), CudaIpcTransport())
    weights = receiver.receive(publish(sender, source)[0])
    for opened in (share(weights), pickle.loads(pickle.dumps(weights))):
        verify_snapshot(opened, weights.shapes, -1)
        assert opened.stamp == take_snapshot(source.named_weights(), 0).stamp
        assert torch.equal(opened.tensor("b"), weights.tensor("b"))
    sender.close()


@pytest.mark.feature(14)
def test_received_weights_are_shared_without_a_copy(received, monkeypatch):
    weights = received()
    monkeypatch.setattr(os, "memfd_create", None)
    opened = share(weights)
    verify_snapshot(opened, weights.shapes, -1)
    assert opened.stamp == weights.stamp
    again = share(opened)  # from that process to its workers
    assert again.tensor("a").tolist() == weights.tensor("a").tolist()


@pytest.mark.parametrize("in_a_file", [True, False])
def test_adapters_are_shared_with_their_weights(received, in_a_file):
    factors = take_snapshot({"a" + DOWN: torch.ones(2, 7), "a" + UP: torch.ones(5, 2)}.items(), 1)
    weights = replace(received(), adapters=Adapters(factors, 0.5))
    if not in_a_file:
        weights = replace(weights, file=None)
    opened = share(weights)
    verify_snapshot(opened, weights.shapes, -1)
    assert opened.stamp == weights.stamp
    assert [opened.tensor(name).unique().tolist() for name in "ab"] == [[2.0], [1.0]]


def test_weights_open_in_a_process_are_not_overwritten(received):
    opened = share(received())
    gc.collect()
    for _ in range(3):
        received()
    assert [opened.tensor(name).unique().tolist() for name in "ab"] == [[1.0], [1.0]]


def test_weights_without_a_file_are_copied_for_the_block():
    weights = take_snapshot(Source().named_weights(), 0)
    with share_weights(weights) as shared:
        assert shared.open().tensor("b").tolist() == [0.0] * 3
    with pytest.raises(FileNotFoundError):
        shared.open()
