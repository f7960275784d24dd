# SPDX-License-Identifier: Apache-2.0
"""What only the vLLM engine has beside the contract of all rollout engines. Needs an environment with vLLM."""

import gc
import importlib.util
import os
import pickle
import random
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineDied, EngineError, MissingExtra, OutOfDeviceMemory, WeightSyncError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import (
    LoraSettings,
    OptimizerConfig,
    Request,
    RolloutSettings,
    SamplingParams,
    TrainSettings,
)
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class
from dlrover.python.rl.engine.api.weights import take_snapshot, verify_snapshot
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.transports import make_transport

ABSENT = importlib.util.find_spec("vllm") is None
needs_vllm = pytest.mark.needs("vllm")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM warns of what it uses itself


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=128, layers=2, max_positions=128)


@pytest.fixture(scope="module")
def engine(model_path):
    made = engine_class(ROLLOUT_ENGINES, "vllm")(model_path, RolloutSettings(max_batch=8))
    yield made
    made.close()


def snapshot(path, version, scale=1.0):
    return take_snapshot(((name, tensor * scale) for name, tensor in load_causal_lm(path).named_weights()), version)


def prompts(texts=("a", "what is it?", "37+45=")):
    rows = [list(text.encode()) for text in texts]
    return Batch({"prompt_id": np.arange(len(rows)), "tokens": Ragged.from_rows(rows)})


@pytest.mark.feature(14)
@pytest.mark.skipif(not ABSENT, reason="'vllm' is installed here")
def test_without_vllm_the_extra_is_named():
    with pytest.raises(MissingExtra, match=r"dlrover-rl\[vllm\]"):
        engine_class(ROLLOUT_ENGINES, "vllm")


@needs_vllm
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=40, samples_per_prompt=6),
        SamplingParams(max_new_tokens=20, samples_per_prompt=6, temperature=0.7, top_k=9, top_p=0.8),
        SamplingParams(max_new_tokens=20, samples_per_prompt=6, top_p=0.5, logprobs="sampled"),
    ],
    ids=["whole", "cut", "sampled"],
)
def test_it_draws_what_the_torch_engine_draws(engine, model_path, sampling):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    other = TorchRolloutEngine(model_path, RolloutSettings(max_batch=8))
    other.receive(snapshot(model_path, 0))
    mine, theirs = (drawer.generate(prompts(), sampling, (3, 1)) for drawer in (engine, other))
    assert mine.ragged("tokens").values.tolist() == theirs.ragged("tokens").values.tolist()
    assert np.allclose(mine.ragged("logprobs").values, theirs.ragged("logprobs").values, atol=1e-5)
    assert mine.objects("completion") == theirs.objects("completion")
    assert mine["finished"].tolist() == theirs["finished"].tolist()


@pytest.mark.feature(104)
@needs_vllm
def test_what_is_read_back_is_what_is_served(engine, model_path):
    """The head that is tied to the embeddings among it: on a CPU, vLLM itself keeps the old one."""
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    call = engine._offloadable.runner.llm.collective_rpc
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
        ["vLLM's 'model.norm.weight' is written by nothing"]
    ]


@pytest.mark.feature(104)
@needs_vllm
def test_weights_that_were_not_taken_are_not_served(engine, model_path, monkeypatch):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    worker = engine._offloadable.runner.llm.model_executor.driver_worker.worker
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


@needs_vllm
def test_each_tensor_is_read_back_at_the_first_load_and_in_one_of_eight_later_ones(engine, model_path, monkeypatch):
    engine.cuda()
    runner = engine._offloadable.runner
    take_weights = runner.llm.model_executor.driver_worker.worker.take_weights
    names = list(snapshot(model_path, 0).buffers)
    found = dict.fromkeys(names, 0)

    def take_others(weights):
        take_weights(take_snapshot(((name, weights.tensor(name) + 1) for name in weights.buffers), weights.version))

    weights = snapshot(model_path, 0)
    for part in range(8):
        monkeypatch.setattr(runner, "_loads", part + 1)
        with monkeypatch.context() as patch:
            patch.setattr(runner.llm.model_executor.driver_worker.worker, "take_weights", take_others)
            with pytest.raises(WeightSyncError) as caught:
                runner.load(weights)
        for name in names:
            found[name] += f"'{name}' has other values" in str(caught.value)
        assert runner._loads == 0
    assert set(found.values()) == {1}
    runner.load(weights)
    assert runner._loads == 1


@needs_vllm
def test_broken_weights_are_an_error_not_a_sample(engine, model_path):
    engine.cuda()
    engine.receive(snapshot(model_path, 0, scale=torch.nan), rewind=True)
    with pytest.raises(EngineError, match="NaN or infinite"):
        engine.generate(prompts(), SamplingParams(), (0,))
    assert engine.running == 0
    engine.receive(snapshot(model_path, 0))


@pytest.mark.feature(20)
@needs_vllm
def test_after_meta_no_weight_of_vllms_is_alive(engine, model_path):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    module = engine._offloadable.runner.llm.model_executor.driver_worker.worker.model_runner.model
    alive = [weakref.ref(tensor) for tensor in module.parameters()]
    assert len(alive) > 10
    del module
    engine.meta()
    gc.collect()
    assert [there for there in alive if there() is not None] == []
    engine.cuda()
    engine.receive(snapshot(model_path, 0))
    assert engine.generate(prompts(), SamplingParams(), (0,))["version"].tolist() == [0] * 3


@needs_vllm
def test_memory_is_accounted_for_and_what_does_not_fit_is_refused(model_path):
    weights = sum(tensor.nbytes for _, tensor in load_causal_lm(model_path).named_weights())
    with pytest.raises(OutOfDeviceMemory, match=f"vllm asks for {weights:,} bytes of weights on cpu"):
        engine_class(ROLLOUT_ENGINES, "vllm")(model_path, RolloutSettings(), DeviceMemory(capacity=weights - 1))


@pytest.fixture
def sleeper(engine, model_path, monkeypatch):
    """The engine with vLLM's sleep, which a CPU does not have: what it is asked for is noted, and nothing moves."""
    from dlrover.python.rl.engine.vllm.runner import SleepingRunner

    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    runner, asked = engine._offloadable.runner, []
    monkeypatch.setattr(runner.llm, "wake_up", lambda tags: asked.append(("wake", *tags)))
    monkeypatch.setattr(runner.llm, "sleep", lambda level: asked.append(("sleep", level)))
    monkeypatch.setattr(runner, "sleep_again", lambda: asked.append(("sleep again",)))
    call, noted = runner.call_workers, {"drop_host_copies": "drop host copies", "release_host_memory": ""}

    def call_workers(method, *arguments):
        if method not in noted:
            return call(method, *arguments)
        return asked.extend([(noted[method],)] if noted[method] else [])

    monkeypatch.setattr(runner, "call_workers", call_workers)
    monkeypatch.setattr(engine, "_offloadable", SleepingRunner(lambda: runner))
    yield engine, runner, asked
    monkeypatch.undo()
    engine._offload.leave("cpu")
    engine._offloadable.sleep(keep_weights=True)


@needs_vllm
def test_weights_that_were_not_taken_when_vllm_woke_do_not_stay_on_the_device(sleeper, model_path, monkeypatch):
    engine, runner, asked = sleeper
    engine.cpu()
    engine.receive(snapshot(model_path, 1, scale=1.02))
    worker = runner.llm.model_executor.driver_worker.worker
    with monkeypatch.context() as patch:
        patch.setattr(worker, "take_weights", lambda weights: None)
        with pytest.raises(WeightSyncError, match="has other values"):
            engine.cuda()
    assert asked == [("sleep", 1), ("drop host copies",), ("wake", "weights"), ("sleep", 2)]
    assert (engine.version, engine.place(), engine.footprint()) == (-1, "meta", {})
    engine.cuda()
    with pytest.raises(EngineError, match="receive them again"):
        engine.generate(prompts(), SamplingParams(), (0,))
    engine.receive(snapshot(model_path, 1, scale=1.02))
    assert engine.generate(prompts(), SamplingParams(max_new_tokens=2), (0,))["version"].tolist() == [1] * 3


@needs_vllm
def test_weights_that_were_received_are_not_copied_to_the_host_when_vllm_sleeps(sleeper, model_path, monkeypatch):
    engine, runner, asked = sleeper
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
    levels = [("sleep", 1), ("drop host copies",), *wake, ("sleep", 2), *wake, ("sleep", 2), *wake]
    assert asked == levels


@needs_vllm
def test_an_engine_that_never_sleeps_keeps_no_snapshot(sleeper, model_path):
    engine, _, _ = sleeper
    weights = snapshot(model_path, 1)
    engine.receive(weights)
    kept = weakref.ref(weights)
    del weights
    gc.collect()
    assert kept() is None


@needs_vllm
def test_a_device_without_room_is_told_with_who_holds_what(sleeper, model_path, monkeypatch):
    engine, runner, asked = sleeper
    engine.cpu()

    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62")

    held = "vllm ran out of memory while computing on cpu: .* bytes are in use .*vllm: "
    with monkeypatch.context() as patch, pytest.raises(OutOfDeviceMemory, match=held):
        patch.setattr(runner.llm, "wake_up", refuse)
        engine.cuda()
    assert asked[1:] == [("sleep again",)]
    assert (engine.version, engine.place(), engine.footprint()) == (0, "cpu", {})
    engine.cuda()
    with monkeypatch.context() as patch, pytest.raises(OutOfDeviceMemory, match=held):
        patch.setattr(runner.llm, "step", refuse)
        engine.generate(prompts(), SamplingParams(), (0,))
    with monkeypatch.context() as patch, pytest.raises(OutOfDeviceMemory, match=held):
        patch.setattr(runner.llm, "collective_rpc", refuse)
        engine.receive(snapshot(model_path, 1))
    assert engine.version == -1
    engine.receive(snapshot(model_path, 1))
    assert engine.generate(prompts(), SamplingParams(max_new_tokens=2), (0,))["version"].tolist() == [1] * 3


@needs_vllm
@pytest.mark.parametrize("error", [NotImplementedError("no such kernel"), RuntimeError("a worker has ended")])
def test_what_vllm_cannot_do_is_not_its_death(engine, model_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    runner = engine._offloadable.runner
    is_death = not isinstance(error, NotImplementedError)
    with monkeypatch.context() as patch, pytest.raises(EngineError, match=str(error)) as caught:
        patch.setattr(runner.llm, "step", fail)
        engine.generate(prompts(), SamplingParams(), (0,))
    assert isinstance(caught.value, EngineDied) is is_death
    with monkeypatch.context() as patch, pytest.raises((EngineDied, WeightSyncError), match=str(error)) as caught:
        patch.setattr(runner.llm, "collective_rpc", fail)
        engine.receive(snapshot(model_path, 1))
    assert isinstance(caught.value, EngineDied) is is_death


@needs_vllm
def test_samples_that_end_beside_one_that_is_broken_are_not_lost(engine, model_path, monkeypatch):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    runner = engine._offloadable.runner
    step = runner.step
    engine.add(
        [Request.fresh(number, 0, row) for number, row in enumerate(prompts(["a", "bc"]).ragged("tokens"))],
        SamplingParams(max_new_tokens=1),
        (0,),
    )
    with monkeypatch.context() as patch, pytest.raises(EngineError, match="NaN or infinite"):
        patch.setattr(
            runner,
            "step",
            lambda: [(name, token, float("nan") if name == last(engine) else 0.0) for name, token, _ in step()],
        )
        while engine.running:
            engine.advance()
    assert engine.running == 2
    done = []
    while engine.running:
        done += engine.advance()
    assert sorted(each.request.key for each in done) == [(0, 0), (1, 0)]


def last(engine):
    return list(engine._names.values())[-1]


@needs_vllm
def test_settings_that_vllm_does_not_have_are_refused(model_path):
    make = engine_class(ROLLOUT_ENGINES, "vllm")
    with pytest.raises(EngineError, match="did you mean 'max_model_len'"):
        make(model_path, RolloutSettings(backend={"max_model_length": 9}))
    with pytest.raises(EngineError, match="no model"):
        make("/nowhere/at/all", RolloutSettings())
    with pytest.raises(EngineError, match="vLLM does not start: .*no_such_argument"):
        make(model_path, RolloutSettings(backend={"engine_args": {"no_such_argument": 1}}))


@needs_vllm
def test_heads_that_vllm_has_no_attention_for_are_refused(tmp_path):
    narrow = write_tiny_model(tmp_path / "T", hidden=96, layers=1, max_positions=32)
    with pytest.raises(EngineError, match=r"heads of width 32, 64, .* and this model's have 24"):
        engine_class(ROLLOUT_ENGINES, "vllm")(narrow, RolloutSettings())


@needs_vllm
def test_what_keeps_vllm_from_starting_is_told_and_the_next_one_starts(engine, model_path):
    engine.cpu()
    memory = DeviceMemory()
    with pytest.raises(EngineError, match="vLLM does not start: ValueError: No available memory for the cache"):
        engine_class(ROLLOUT_ENGINES, "vllm")(model_path, RolloutSettings(backend={"kv_cache_bytes": 1000}), memory)
    assert memory.total() == 0
    assert not torch.distributed.is_initialized()
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    assert len(engine.generate(prompts(), SamplingParams(max_new_tokens=2), (0,))) == 3


@needs_vllm
def test_starting_it_leaves_the_process_as_it_was(engine, model_path):
    engine.cpu()
    threads, count, environment = torch.set_num_threads, torch.get_num_threads(), dict(os.environ)
    python, array, random_state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    made = engine_class(ROLLOUT_ENGINES, "vllm")(
        model_path, RolloutSettings(max_batch=2, backend={"max_model_len": 40})
    )
    try:
        with pytest.raises(EngineError, match="41 tokens does not fit the backend's limit of 40"):
            made.generate(prompts(["x" * 40]), SamplingParams(max_new_tokens=10), (0,))
    finally:
        made.close()
    assert (torch.set_num_threads is threads, torch.get_num_threads()) == (True, count)
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python, array)
    assert not torch.distributed.is_initialized()


@needs_vllm
def test_two_engines_of_a_process_do_not_end_each_other(engine, model_path):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    sampling = SamplingParams(max_new_tokens=8)
    expected = engine.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist()
    other = engine_class(ROLLOUT_ENGINES, "vllm")(model_path, RolloutSettings(max_batch=2))
    other.receive(snapshot(model_path, 0))
    assert other.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist() == expected
    other.close()
    assert engine.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist() == expected


@pytest.mark.feature(100, 105)
@needs_vllm
@pytest.mark.parametrize(("bucket_bytes", "lora"), [(1 << 10, None), (1 << 20, None), (1 << 20, LoraSettings(rank=2))])
def test_after_a_step_it_draws_what_a_fresh_engine_on_the_saved_weights_draws(
    bucket_bytes, lora, engine, model_path, tmp_path
):
    if lora is not None:
        pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    trainer = train_a_step(model_path, lora)
    wire = make_transport("pull", {"bucket_bytes": bucket_bytes}, SyncSettings())
    ticket = wire.offer(trainer)
    stamp, received = wire.send(ticket, trainer), wire.receive(ticket)
    engine.cuda()
    engine.receive(received, rewind=True)
    trainer.save(tmp_path / "saved")
    fresh = TorchRolloutEngine(tmp_path / "saved", RolloutSettings(max_batch=8))
    fresh.receive(trainer.publish())
    params = SamplingParams(max_new_tokens=20, temperature=0.0)
    mine, theirs = (drawer.generate(prompts(), params, (0,)) for drawer in (engine, fresh))
    assert (received.stamp, engine.version) == (stamp, 1)
    assert mine.ragged("tokens").values.tolist() == theirs.ragged("tokens").values.tolist()
    told = trainer.evaluate(mine.select("tokens", "action_mask")).ragged("logprobs").values
    assert np.abs(told - mine.ragged("logprobs").values).max() < 1e-4
    del received
    wire.close()
    trainer.close()


def train_a_step(model_path, lora=None):
    trainer = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2), TrainSettings(lora=lora))
    rows = [np.random.default_rng(0).integers(0, 256, 12) for _ in range(4)]
    masks = [np.arange(12) >= 4 for _ in rows]
    weight = np.full(4, 1 / 32, dtype=np.float32)
    batch = Batch({"tokens": Ragged.from_rows(rows), "action_mask": Ragged.from_rows(masks), "weight": weight})
    trainer.step(batch, lambda logprobs, columns: (-(logprobs * columns["weight"]).sum(), {}))
    return trainer


@needs_vllm
def test_weights_reach_workers_of_other_processes_without_a_file_that_could_stay(model_path):
    sent = snapshot(model_path, 7)
    with importlib.import_module("dlrover.python.rl.engine.vllm.child").share_weights(sent) as shared:
        shared = pickle.loads(pickle.dumps(shared))
        script = "import pickle, sys; print(pickle.load(sys.stdin.buffer).open().tensor(sys.argv[1]).sum().item())"
        name = "model.layers.1.mlp.up_proj.weight"
        told = subprocess.run(
            [sys.executable, "-c", script, name],
            input=pickle.dumps(shared),
            capture_output=True,
            cwd=Path(__file__).parents[3],
            timeout=120,
        )
        assert float(told.stdout) == sent.tensor(name).sum().item(), told.stderr
        verify_snapshot(shared.open(), sent.shapes, -1)
        assert shared.open().stamp == sent.stamp
    with pytest.raises(FileNotFoundError):
        shared.open()


@pytest.mark.feature(99)
@needs_vllm
@pytest.mark.slow
def test_two_ranks_draw_what_one_draws(engine, model_path):
    engine.cuda()
    engine.receive(snapshot(model_path, 1, scale=1.02), rewind=True)
    sampling = SamplingParams(max_new_tokens=20, samples_per_prompt=3)
    expected = engine.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist()
    engine.cpu()
    two = engine_class(ROLLOUT_ENGINES, "vllm")(model_path, RolloutSettings(max_batch=8, tensor_parallel_size=2))
    try:
        two.receive(snapshot(model_path, 1, scale=1.02))
        assert two.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist() == expected
        pids = [worker.proc.pid for worker in two._offloadable.runner.llm.model_executor.workers]
        assert len({*pids, os.getpid()}) == 3
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDied, match="vLLM failed in a step"):
            two.generate(prompts(), sampling, (2,))
        assert two.running == 0
    finally:
        two.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "workers outlive their engine"


@needs_vllm
def test_buffers_of_weights_that_sleep_are_read_from_the_copies_of_their_memory():
    """The device's memory is stood in for by the host's; that it sleeps, by other values in it."""
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
    found = read_copies(buffers, copies)
    assert found.keys() == {"whole", "at the end"}
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype) == (wanted[name].shape, wanted[name].dtype)
        assert tensor.view(torch.uint8).tolist() == wanted[name].view(torch.uint8).tolist()


@pytest.fixture(scope="module")
def apart(model_path):
    """An engine whose vLLM runs in a process of its own, as on CUDA."""
    made = engine_class(ROLLOUT_ENGINES, "vllm")(
        model_path, RolloutSettings(max_batch=8, backend={"own_process": True})
    )
    yield made
    made.close()


@needs_vllm
def test_in_a_process_of_its_own_it_generates_the_same(engine, apart, model_path):
    sampling = SamplingParams(max_new_tokens=20, samples_per_prompt=4)
    rows = []
    for each in (engine, apart):
        each.cuda()
        each.receive(snapshot(model_path, 0, scale=1.1), rewind=True)
        rows.append(each.generate(prompts(), sampling, (3, 1)))
    assert rows[0].objects("completion") == rows[1].objects("completion")
    assert np.array_equal(rows[0].ragged("logprobs").values, rows[1].ragged("logprobs").values)


@needs_vllm
def test_in_a_process_of_its_own_it_sleeps_and_wakes(apart, model_path):
    apart.cuda()
    apart.receive(snapshot(model_path, 0), rewind=True)
    before = apart.generate(prompts(), SamplingParams(max_new_tokens=8, temperature=0.0), (0,)).objects("completion")
    apart.meta()
    apart.receive(snapshot(model_path, 1))
    apart.cuda()
    assert apart.version == 1
    after = apart.generate(prompts(), SamplingParams(max_new_tokens=8, temperature=0.0), (0,)).objects("completion")
    assert before == after


@needs_vllm
def test_the_end_of_vllms_process_is_an_error_and_nothing_is_left(model_path):
    made = engine_class(ROLLOUT_ENGINES, "vllm")(
        model_path, RolloutSettings(max_batch=2, backend={"own_process": True})
    )
    process = made._offloadable._process
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="vLLM's process has ended with status -9"):
        made.receive(snapshot(model_path, 0), rewind=True)
    made.close()
    assert process.poll() == -signal.SIGKILL


@needs_vllm
def test_its_process_sees_the_devices_of_the_member_only_and_computes_in_its_precision(model_path, monkeypatch):
    """As on a node with GPUs; on this one vLLM does not start on them, in a process that says what it was given."""
    child = importlib.import_module("dlrover.python.rl.engine.vllm.child")
    given = []

    def record(command, **options):
        given.append((options["env"]["CUDA_VISIBLE_DEVICES"], options["env"].get("TRITON_F32_DEFAULT")))
        raise EngineError("not here")

    monkeypatch.setattr(child.subprocess, "Popen", record)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 0)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 0)
    wanted = (("cuda:2", "fp32", 1, ()), ("cuda:1", "bf16", 2, (1, 3)), ("cuda:0", "bf16", 4, ()))
    for device, precision, size, devices in wanted:
        settings = RolloutSettings(device, precision, tensor_parallel_size=size, devices=devices)
        with pytest.raises(EngineError, match="not here"):
            engine_class(ROLLOUT_ENGINES, "vllm")(model_path, settings)
    assert given == [("6", "ieee"), ("5,7", None), ("4,5,6,7", None)]


@pytest.fixture
def started(monkeypatch):
    """What is started of vLLM in this process, as on a node with GPUs; nothing is."""
    runner = importlib.import_module("dlrover.python.rl.engine.vllm.runner")
    made = []

    def record(start):
        made.append(start)
        raise EngineError("not here")

    monkeypatch.setattr(runner, "SleepingRunner", record)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 0)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 0)
    return made


@needs_vllm
@pytest.mark.parametrize(
    ("device", "devices", "ranks", "first"),
    [("cuda:2", (), 1, 2), ("cuda:0", (1,), 1, 1), ("cuda:0", (), 2, 0), ("cuda:0", (0, 1), 2, 0)],
)
def test_in_this_process_vllm_runs_on_the_first_device_only(model_path, started, device, devices, ranks, first):
    settings = RolloutSettings(device, "bf16", 8, ranks, backend={"own_process": False}, devices=devices)
    with pytest.raises(EngineError, match=f"first visible device only, not device {first} of {ranks}"):
        engine_class(ROLLOUT_ENGINES, "vllm")(model_path, settings)
    assert started == []


@needs_vllm
def test_in_this_process_float32_needs_its_precision_in_the_environment(model_path, started, monkeypatch):
    make = engine_class(ROLLOUT_ENGINES, "vllm")
    settings = [RolloutSettings("cuda", name, backend={"own_process": False}) for name in ("fp32", "bf16")]
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    with pytest.raises(EngineError, match="set TRITON_F32_DEFAULT=ieee in the environment"):
        make(model_path, settings[0])
    assert started == []
    for number, (each, value) in enumerate([(settings[1], ""), (settings[0], "ieee")], 1):
        if value:
            monkeypatch.setenv("TRITON_F32_DEFAULT", value)
        with pytest.raises(EngineError, match="not here"):
            make(model_path, each)
        assert len(started) == number


@needs_vllm
@pytest.mark.parametrize("text", ["WorkerProc initialization failed", "CUDA out of memory"])
def test_a_plain_exception_at_the_start_is_an_error_of_the_engine(model_path, monkeypatch, text):
    """As vLLM raises it where a worker process fails."""
    runner = importlib.import_module("dlrover.python.rl.engine.vllm.runner")

    def fail(arguments):
        raise Exception(text)

    monkeypatch.setattr(runner.LLMEngine, "from_engine_args", fail)
    memory = DeviceMemory()
    with pytest.raises(EngineError) as caught:
        engine_class(ROLLOUT_ENGINES, "vllm")(model_path, RolloutSettings(), memory)
    assert isinstance(caught.value, OutOfDeviceMemory) is ("memory" in text)
    assert isinstance(caught.value, OutOfDeviceMemory) or str(caught.value) == f"vLLM does not start: Exception: {text}"
    assert memory.total() == 0


@needs_vllm
@pytest.mark.slow
def test_a_worker_that_does_not_start_is_an_error_of_the_engine(model_path):
    """The model is not saved in the form that its workers are to load."""
    backend = {"engine_args": {"load_format": "sharded_state"}}
    settings = RolloutSettings(max_batch=2, tensor_parallel_size=2, backend=backend)
    with pytest.raises(EngineError, match="vLLM does not start: Exception: WorkerProc initialization failed"):
        engine_class(ROLLOUT_ENGINES, "vllm")(model_path, settings)


@needs_vllm
@pytest.mark.parametrize("error", [Exception("plain"), KeyError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["step", "add_request"])
def test_after_a_step_that_broke_off_the_same_tokens_are_generated(engine, model_path, monkeypatch, method, error):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = engine.generate(prompts(), sampling, (5,)).objects("completion")
    llm, calls = engine._offloadable.runner.llm, []
    function = getattr(llm, method)

    def break_off(*arguments, **options):
        out = function(*arguments, **options)  # vLLM has gone on
        calls.append(method)
        if len(calls) == 2:
            raise error
        return out

    engine.add([Request.fresh(n, 0, row) for n, row in enumerate(prompts().ragged("tokens"))], sampling, (5,))
    with monkeypatch.context() as patch:
        patch.setattr(llm, method, break_off)
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else EngineError) as caught:
            while engine.running:
                engine.advance()
    assert isinstance(error, KeyboardInterrupt) or type(error).__name__ in str(caught.value)
    assert (engine.running, engine._names, llm.has_unfinished_requests()) == (3, {}, False)
    done = {}
    while engine.running:
        done.update({item.request.prompt_id: item.text for item in engine.advance()})
    assert [done[n] for n in range(3)] == expected
