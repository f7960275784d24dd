# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine beside the contract of all rollout engines. Needs an environment with vLLM."""

import gc
import importlib
import os
import random
import signal
import weakref
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineDied, EngineError, OutOfDeviceMemory, WeightSyncError
from dlrover.python.rl.engine.api.base import RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from tests.support import rollout_cases
from tests.support.rollout_cases import drain, snapshot

TEXTS = ("a", "what is it?", "37+45=")
pytestmark = [pytest.mark.needs("vllm"), pytest.mark.filterwarnings("default")]  # vLLM calls what it deprecates


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=128, layers=2, max_positions=128)


def make(model, *settings, memory=None, **options):
    return engine_class(ROLLOUT_ENGINES, "vllm")(model, RolloutSettings(*settings, **options), memory)


@pytest.fixture(scope="module")
def shared_engine(model_path):
    engine = make(model_path, max_batch=8)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine, model_path):
    """On its device, with the model's weights as version 0."""
    shared_engine.cuda()
    shared_engine.receive(snapshot(model_path, 0), rewind=True)
    return shared_engine


@pytest.fixture
def runner(engine):
    return engine._offloadable.runner


@pytest.fixture
def worker(runner):
    return runner.llm.model_executor.driver_worker.worker


prompts, requests = partial(rollout_cases.prompts, TEXTS), partial(rollout_cases.requests, TEXTS)


def tokens_of(engine, sampling, seed=(2,)):
    return engine.generate(prompts(), sampling, seed).ragged("tokens").values.tolist()


def versions_of(engine):
    return engine.generate(prompts(), SamplingParams(max_new_tokens=2), (0,))["version"].tolist()


CUT, SAMPLED = {"temperature": 0.7, "top_k": 9, "top_p": 0.8}, {"top_p": 0.5, "logprobs": "sampled"}


@pytest.mark.parametrize("changes", [{}, CUT, SAMPLED], ids=["whole", "cut", "sampled"])
def test_vllm_draws_as_the_torch_engine(engine, model_path, changes):
    sampling = SamplingParams(max_new_tokens=20, samples_per_prompt=6, **changes)
    other = TorchRolloutEngine(model_path, RolloutSettings(max_batch=8))
    other.receive(snapshot(model_path, 0))
    output, expected = (each.generate(prompts(), sampling, (3, 1)) for each in (engine, other))
    assert output.ragged("tokens").values.tolist() == expected.ragged("tokens").values.tolist()
    assert np.allclose(output.ragged("logprobs").values, expected.ragged("logprobs").values, atol=1e-5)
    assert output.objects("completion") == expected.objects("completion")
    assert output["finished"].tolist() == expected["finished"].tolist()


@pytest.mark.feature(104)
def test_read_back_finds_each_other_weight(runner, model_path):
    """Among them the head that is tied to the embeddings: on a CPU, vLLM itself keeps the old one."""
    call = runner.llm.collective_rpc
    other = snapshot(model_path, 1, scale=1.02)
    (faults,) = call("read_back", args=(other,))
    assert faults == [f"'{name}' has other values" for name in sorted(other.buffers) if np.any(other.buffers[name])]
    call("take_weights", args=(other,))
    assert call("read_back", args=(other,)) == [[]]
    name = "model.layers.1.mlp.up_proj.weight"
    partly = {key: other.tensor(key) for key in other.buffers} | {name: other.tensor(name) + 1}
    assert call("read_back", args=(take_snapshot(partly.items(), 1),)) == [[f"'{name}' has other values"]]
    fewer = {key: other.tensor(key) for key in other.buffers if key != "model.norm.weight"}
    assert call("read_back", args=(take_snapshot(fewer.items(), 1),)) == [
        ["vLLM's 'model.norm.weight' is never written"]
    ]


@pytest.mark.feature(104)
def test_weights_missed_by_a_worker_are_not_served(engine, worker, model_path, monkeypatch):
    monkeypatch.setattr(worker, "take_weights", lambda weights: None)
    with pytest.raises(WeightSyncError, match="has other values"):
        engine.receive(snapshot(model_path, 1, scale=1.02))
    assert engine.version == -1
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' has other values"):  # all after a failure
        engine.receive(snapshot(model_path, 1, scale=1.02))
    with pytest.raises(EngineError, match="receive them again"):
        engine.generate(prompts(), SamplingParams(), (0,))
    monkeypatch.undo()
    engine.receive(snapshot(model_path, 1, scale=1.02))
    assert engine.version == 1


def test_each_tensor_is_read_back_in_one_of_eight_loads(runner, worker, model_path, monkeypatch):
    """All are at the first load, and after a failure."""
    weights, take_weights = snapshot(model_path, 0), worker.take_weights
    faults = Counter()

    def take_others(weights):
        take_weights(take_snapshot(((name, weights.tensor(name) + 1) for name in weights.buffers), weights.version))

    for part in range(8):
        monkeypatch.setattr(runner, "_loads", part + 1)
        with monkeypatch.context() as patch:
            patch.setattr(worker, "take_weights", take_others)
            with pytest.raises(WeightSyncError) as caught:
                runner.load(weights)
        faults.update(name for name in weights.buffers if f"'{name}' has other values" in str(caught.value))
        assert runner._loads == 0
    assert faults == Counter(weights.buffers.keys())
    runner.load(weights)
    assert runner._loads == 1


@pytest.mark.feature(20)
def test_meta_leaves_no_weight_of_vllm(engine, model_path):
    module = engine._offloadable.runner.llm.model_executor.driver_worker.worker.model_runner.model
    references = [weakref.ref(tensor) for tensor in module.parameters()]
    assert len(references) > 10
    del module
    engine.meta()
    gc.collect()
    assert [each for each in references if each() is not None] == []
    engine.cuda()
    engine.receive(snapshot(model_path, 0))
    assert versions_of(engine) == [0] * len(TEXTS)


def test_weights_larger_than_the_memory_are_refused(model_path):
    weights = sum(tensor.nbytes for _, tensor in load_causal_lm(model_path).named_weights())
    with pytest.raises(OutOfDeviceMemory, match=f"vllm asks for {weights:,} bytes of weights on cpu"):
        make(model_path, memory=DeviceMemory(capacity=weights - 1))


@pytest.fixture
def sleeper(engine, runner, monkeypatch):
    """The engine with vLLM's sleep, which a CPU does not have: its calls are recorded, and nothing moves."""
    from dlrover.python.rl.engine.vllm.runner import SleepingRunner

    calls = []
    monkeypatch.setattr(runner.llm, "wake_up", lambda tags: calls.append(("wake", *tags)))
    monkeypatch.setattr(runner.llm, "sleep", lambda level: calls.append(("sleep", level)))
    monkeypatch.setattr(runner, "sleep_again", lambda: calls.append(("sleep again",)))
    call, noted = runner.call_workers, {"drop_host_copies": "drop host copies", "release_host_memory": ""}

    def call_workers(method, *arguments):
        if method not in noted:
            return call(method, *arguments)
        return calls.extend([(noted[method],)] if noted[method] else [])

    monkeypatch.setattr(runner, "call_workers", call_workers)
    monkeypatch.setattr(engine, "_offloadable", SleepingRunner(lambda: runner))
    yield engine, calls
    monkeypatch.undo()
    engine._offload.leave("cpu")
    engine._offloadable.sleep(keep_weights=True)


def test_weights_missed_on_waking_leave_the_device(sleeper, worker, model_path, monkeypatch):
    engine, calls = sleeper
    engine.cpu()
    engine.receive(snapshot(model_path, 1, scale=1.02))
    with monkeypatch.context() as patch:
        patch.setattr(worker, "take_weights", lambda weights: None)
        with pytest.raises(WeightSyncError, match="has other values"):
            engine.cuda()
    assert calls == [("sleep", 1), ("drop host copies",), ("wake", "weights"), ("sleep", 2)]
    assert (engine.version, engine.place(), engine.footprint()) == (-1, "meta", {})
    engine.cuda()
    with pytest.raises(EngineError, match="receive them again"):
        engine.generate(prompts(), SamplingParams(), (0,))
    engine.receive(snapshot(model_path, 1, scale=1.02))
    assert versions_of(engine) == [1] * len(TEXTS)


def test_received_weights_are_not_copied_to_the_host(sleeper, runner, model_path, monkeypatch):
    engine, calls = sleeper
    loaded, load = [], runner.load
    monkeypatch.setattr(runner, "load", lambda weights: (loaded.append(weights.version), load(weights)))
    step = SamplingParams(max_new_tokens=4), (0,)
    engine.cpu()
    engine.receive(snapshot(model_path, 1, scale=1.02))
    engine.cuda()
    first = engine.generate(prompts(), *step)
    engine.cpu()
    engine.cuda()
    assert loaded == [1, 1]
    assert engine.generate(prompts(), *step)["logprobs"].values.tolist() == first["logprobs"].values.tolist()
    engine.cpu()
    engine.receive(snapshot(model_path, 2, scale=1.04))
    engine.cuda()
    assert (loaded, engine.version) == ([1, 1, 2], 2)
    wake = [("wake", "weights"), ("wake", "kv_cache")]
    assert calls == [("sleep", 1), ("drop host copies",), *wake, ("sleep", 2), *wake, ("sleep", 2), *wake]


def test_missing_device_memory_names_its_holders(sleeper, runner, model_path, monkeypatch):
    engine, calls = sleeper
    engine.cpu()

    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62")

    message = "vllm ran out of memory while computing on cpu: .* bytes are in use .*vllm: "
    with monkeypatch.context() as patch, pytest.raises(OutOfDeviceMemory, match=message):
        patch.setattr(runner.llm, "wake_up", refuse)
        engine.cuda()
    assert calls[1:] == [("sleep again",)]
    assert (engine.version, engine.place(), engine.footprint()) == (0, "cpu", {})
    engine.cuda()
    with monkeypatch.context() as patch, pytest.raises(OutOfDeviceMemory, match=message):
        patch.setattr(runner.llm, "step", refuse)
        engine.generate(prompts(), SamplingParams(), (0,))
    with monkeypatch.context() as patch, pytest.raises(OutOfDeviceMemory, match=message):
        patch.setattr(runner.llm, "collective_rpc", refuse)
        engine.receive(snapshot(model_path, 1))
    assert engine.version == -1
    engine.receive(snapshot(model_path, 1))
    assert versions_of(engine) == [1] * len(TEXTS)


@pytest.mark.parametrize("error", [NotImplementedError("no such kernel"), RuntimeError("a worker has ended")])
def test_missing_feature_of_vllm_is_not_its_death(engine, runner, model_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    is_death = not isinstance(error, NotImplementedError)
    with monkeypatch.context() as patch, pytest.raises(EngineError, match=str(error)) as caught:
        patch.setattr(runner.llm, "step", fail)
        engine.generate(prompts(), SamplingParams(), (0,))
    assert isinstance(caught.value, EngineDied) is is_death
    with monkeypatch.context() as patch, pytest.raises((EngineDied, WeightSyncError), match=str(error)) as caught:
        patch.setattr(runner.llm, "collective_rpc", fail)
        engine.receive(snapshot(model_path, 1))
    assert isinstance(caught.value, EngineDied) is is_death


@pytest.mark.parametrize(
    ("model", "backend", "message"),
    [
        (None, {"max_model_length": 9}, "did you mean 'max_model_len'"),
        ("/nowhere/at/all", {}, "no model"),
        (None, {"engine_args": {"no_such_argument": 1}}, "vLLM does not start: .*no_such_argument"),
    ],
)
def test_impossible_settings_of_vllm_are_refused(model_path, model, backend, message):
    with pytest.raises(EngineError, match=message):
        make(model or model_path, backend=backend)


def test_heads_without_attention_in_vllm_are_refused(tmp_path):
    narrow = write_tiny_model(tmp_path / "T", hidden=96, layers=1, max_positions=32)
    with pytest.raises(EngineError, match=r"heads of width 32, 64, .* and this model's have 24"):
        make(narrow)


def test_failed_start_is_an_error_and_the_next_one_starts(engine, model_path):
    engine.cpu()
    memory = DeviceMemory()
    with pytest.raises(EngineError, match="vLLM does not start: ValueError: No available memory for the cache"):
        make(model_path, memory=memory, backend={"kv_cache_bytes": 1000})
    assert memory.total() == 0
    assert not torch.distributed.is_initialized()
    assert versions_of(engine) == [0] * len(TEXTS)


def test_start_of_vllm_leaves_the_process_unchanged(engine, model_path):
    engine.cpu()
    threads, count, environment = torch.set_num_threads, torch.get_num_threads(), dict(os.environ)
    python, array, random_state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    other, message = make(model_path, max_batch=2, backend={"max_model_len": 40}), "41 tokens does not fit .* of 40"
    with closing(other), pytest.raises(EngineError, match=message):
        other.generate(rollout_cases.prompts(["x" * 40]), SamplingParams(max_new_tokens=10), (0,))
    assert (torch.set_num_threads is threads, torch.get_num_threads()) == (True, count)
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python, array)
    assert not torch.distributed.is_initialized()


@pytest.mark.feature(99)
@pytest.mark.slow
def test_two_ranks_draw_the_same_as_one(engine, model_path):
    engine.receive(snapshot(model_path, 1, scale=1.02))
    sampling = SamplingParams(max_new_tokens=20, samples_per_prompt=3)
    expected = tokens_of(engine, sampling)
    engine.cpu()
    with closing(make(model_path, max_batch=8, tensor_parallel_size=2)) as two:
        two.receive(snapshot(model_path, 1, scale=1.02))
        assert tokens_of(two, sampling) == expected
        pids = [worker.proc.pid for worker in two._offloadable.runner.llm.model_executor.workers]
        assert len({*pids, os.getpid()}) == 3
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDied, match="vLLM failed in a step"):
            two.generate(prompts(), sampling, (2,))
        assert two.running == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "workers outlive their engine"


def test_sleeping_buffers_are_read_from_their_copies():
    """The host's memory stands in for the device's, and other values in it for the sleep."""
    from dlrover.python.rl.engine.vllm.worker import read_copies

    blocks = [torch.arange(64, dtype=torch.uint8), torch.arange(100, 132, dtype=torch.uint8)]
    buffers = {
        "whole": blocks[1].view(torch.bfloat16).view(4, 4),
        "at the end": blocks[0][32:].view(torch.float32),
        "of other memory": torch.ones(3),
    }
    wanted = {name: tensor.clone() for name, tensor in buffers.items()}
    copies = {block.data_ptr(): block.clone() for block in blocks}
    for block in blocks:
        block.zero_()
    read = read_copies(buffers, copies)
    assert read.keys() == {"whole", "at the end"}
    for name, tensor in read.items():
        assert (tensor.shape, tensor.dtype) == (wanted[name].shape, wanted[name].dtype)
        assert tensor.view(torch.uint8).tolist() == wanted[name].view(torch.uint8).tolist()


@pytest.fixture(scope="module")
def apart(model_path):
    engine = make(model_path, max_batch=8, backend={"own_process": True})
    yield engine
    engine.close()


def test_vllm_in_another_process_generates_the_same(engine, apart, model_path):
    sampling = SamplingParams(max_new_tokens=20, samples_per_prompt=4)
    rows = []
    for each in (engine, apart):
        each.cuda()
        each.receive(snapshot(model_path, 0, scale=1.1), rewind=True)
        rows.append(each.generate(prompts(), sampling, (3, 1)))
    assert rows[0].objects("completion") == rows[1].objects("completion")
    assert np.array_equal(rows[0].ragged("logprobs").values, rows[1].ragged("logprobs").values)


def test_killed_process_of_vllm_is_an_error(model_path):
    with closing(make(model_path, max_batch=2, backend={"own_process": True})) as engine:
        process = engine._offloadable._process
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="vLLM's process has ended with status -9"):
            engine.receive(snapshot(model_path, 0), rewind=True)
    assert process.poll() == -signal.SIGKILL


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 40, 1 << 40))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device: 0)


def test_vllm_process_has_its_devices_and_precision(model_path, on_gpus, monkeypatch):
    child = importlib.import_module("dlrover.python.rl.engine.vllm.child")
    starts = []

    def record(command, **options):
        starts.append((options["env"]["CUDA_VISIBLE_DEVICES"], options["env"].get("TRITON_F32_DEFAULT")))
        raise EngineError("not here")

    monkeypatch.setattr(child.subprocess, "Popen", record)
    settings = (("cuda:2", "fp32", 1, ()), ("cuda:1", "bf16", 2, (1, 3)))
    for device, precision, size, devices in settings:
        with pytest.raises(EngineError, match="not here"):
            make(model_path, device, precision, tensor_parallel_size=size, devices=devices)
    assert starts == [("6", "ieee"), ("5,7", None)]


@pytest.fixture
def started(on_gpus, monkeypatch):
    """Lists the starts of vLLM in this process, of which each fails."""
    runner = importlib.import_module("dlrover.python.rl.engine.vllm.runner")
    starts = []

    def record(start):
        starts.append(start)
        raise EngineError("not here")

    monkeypatch.setattr(runner, "SleepingRunner", record)
    return starts


@pytest.mark.parametrize(
    ("device", "devices", "ranks", "first"),
    [("cuda:2", (), 1, 2), ("cuda:0", (1,), 1, 1), ("cuda:0", (), 2, 0), ("cuda:0", (0, 1), 2, 0)],
)
def test_vllm_in_this_process_has_the_first_device(model_path, started, device, devices, ranks, first):
    with pytest.raises(EngineError, match=f"first visible device only, not device {first} of {ranks}"):
        make(model_path, device, "bf16", 8, ranks, backend={"own_process": False}, devices=devices)
    assert started == []


@pytest.mark.parametrize(
    ("precision", "value", "message", "count"),
    [
        ("fp32", None, "set TRITON_F32_DEFAULT=ieee in the environment", 0),
        ("fp32", "ieee", "not here", 1),
        ("bf16", None, "not here", 1),
    ],
)
def test_float32_in_this_process_needs_the_environment(
    model_path, started, monkeypatch, precision, value, message, count
):
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    if value:
        monkeypatch.setenv("TRITON_F32_DEFAULT", value)
    with pytest.raises(EngineError, match=message):
        make(model_path, "cuda", precision, backend={"own_process": False})
    assert len(started) == count


@pytest.mark.parametrize("text", ["WorkerProc initialization failed", "CUDA out of memory"])
def test_plain_exception_at_the_start_is_an_engine_error(model_path, monkeypatch, text):
    """VLLM raises it so where a worker process fails."""
    runner = importlib.import_module("dlrover.python.rl.engine.vllm.runner")

    def fail(arguments):
        raise Exception(text)

    monkeypatch.setattr(runner.LLMEngine, "from_engine_args", fail)
    memory = DeviceMemory()
    with pytest.raises(EngineError) as caught:
        make(model_path, memory=memory)
    assert isinstance(caught.value, OutOfDeviceMemory) is ("memory" in text)
    assert isinstance(caught.value, OutOfDeviceMemory) or str(caught.value) == f"vLLM does not start: Exception: {text}"
    assert memory.total() == 0


@pytest.mark.parametrize("error", [Exception("plain"), KeyError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["step", "add_request"])
def test_interrupted_step_changes_no_token(engine, runner, monkeypatch, method, error):
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = engine.generate(prompts(), sampling, (5,)).objects("completion")
    llm, calls = runner.llm, []
    function = getattr(llm, method)

    def break_off(*arguments, **options):
        out = function(*arguments, **options)  # vLLM has done it
        calls.append(method)
        if len(calls) == 2:
            raise error
        return out

    engine.add(requests(), sampling, (5,))
    with monkeypatch.context() as patch:
        patch.setattr(llm, method, break_off)
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else EngineError) as caught:
            drain(engine)
    assert isinstance(error, KeyboardInterrupt) or type(error).__name__ in str(caught.value)
    assert (engine.running, engine._names, llm.has_unfinished_requests()) == (len(TEXTS), {}, False)
    done = drain(engine)
    assert [done[number, 0].text for number in range(len(TEXTS))] == expected
