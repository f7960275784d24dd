# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine beside the contract of all rollout engines. Needs an environment with vLLM."""

import ast
import importlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineDied, EngineError, OutOfDeviceMemory, WeightSyncError
from dlrover.python.rl.engine.api.base import RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.vllm.plugin import _Causes
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from tests.support import rollout_cases
from tests.support.commands import wait_for
from tests.support.rollout_cases import drain, drawn, snapshot
from tests.support.sync_sides import ToySource, publish

TEXTS = ("a", "what is it?", "37+45=")
pytestmark = [pytest.mark.needs("vllm"), pytest.mark.filterwarnings("default")]  # vLLM calls what it deprecates
prompts, requests = partial(rollout_cases.prompts, TEXTS), partial(rollout_cases.requests, TEXTS)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=128, layers=2, max_positions=128)


def make(model, *settings, memory=None, **options):
    return engine_class(ROLLOUT_ENGINES, "vllm")(model, RolloutSettings(*settings, **options), memory)


@pytest.fixture(scope="module")
def shared_engine(model_path):
    backend = {"engine_args": {"worker_extension_cls": "tests.support.vllm_damage.Damage"}}
    engine = make(model_path, max_batch=8, backend=backend)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine, model_path):
    """On its device, with the model's weights as version 0."""
    shared_engine.cuda()
    shared_engine.receive(snapshot(model_path, 0), rewind=True)
    return shared_engine


def tokens_of(engine, sampling, seed=(2,)):
    return engine.generate(prompts(), sampling, seed).ragged("tokens").values.tolist()


def checksums_of(engine):
    """Return the digest of each tensor of each worker's model."""
    return engine._server._call(engine._server._llm.compute_weight_checksums())


def test_update_pauses_only_running_requests(engine, model_path, monkeypatch):
    server, pauses = engine._server, []

    async def pause(**options):
        pauses.append(options["mode"])
        await type(server._llm).pause_generation(server._llm, **options)

    monkeypatch.setattr(server._llm, "pause_generation", pause)
    engine.generate(prompts(), SamplingParams(max_new_tokens=2), (0,))
    wait_for(lambda: not server._tasks)
    engine.receive(snapshot(model_path, 1))
    assert pauses == []
    engine.add(requests(), SamplingParams(max_new_tokens=64, ignore_eos=True), (0,))
    engine.advance()
    engine.receive(snapshot(model_path, 2))
    assert pauses == ["keep"]
    drain(engine)


def versions_of(engine):
    return engine.generate(prompts(), SamplingParams(max_new_tokens=2), (0,))["version"].tolist()


def processes_of(pid):
    """Return the processes that a process has started, and theirs, without the one that counts Python's resources."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = folder.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(pid) and b"resource_tracker" not in folder.joinpath("cmdline").read_bytes():
                children += [int(folder.name), *processes_of(folder.name)]
    return children


def assert_ended(pids):
    end = time.monotonic() + 20
    while left := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < end, f"{left} still run"
        time.sleep(0.05)


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


# -- weights -----------------------------------------------------------------------------------------------------------
HEAD, UP, DOWN = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.feature(104)
@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        ("dropped", "model.norm.weight", "'model.norm.weight' has other values"),
        ("swapped", UP, f"'{DOWN}' has other values; '{UP}' has other values"),
        ("stale", HEAD, f"'{HEAD}' has other values"),
        ("broken off", HEAD, "no such tensor"),
    ],
)
def test_damaged_weights_are_not_served(engine, model_path, fault, name, message):
    """vLLM is ended, and its requests continue with the same tokens once it has whole weights."""
    sampling, later = SamplingParams(max_new_tokens=60, ignore_eos=True), snapshot(model_path, 1, scale=1.02)
    engine.receive(later)
    expected = tokens_of(engine, sampling, (5,))
    engine.receive(snapshot(model_path, 0), rewind=True)
    engine.add(requests(), sampling, (5,))
    engine._server._call(engine._server._llm.collective_rpc("damage_next_load", args=(fault, name, DOWN)))
    with pytest.raises(WeightSyncError, match=f"did not load the weights of version 1: .*{message}"):
        engine.receive(later)
    assert (engine.version, engine.place()) == (-1, "cuda")
    with pytest.raises(EngineError, match="receive them again"):
        engine.advance()
    engine.receive(later)
    done = drawn(drain(engine))
    assert [token for number, text in enumerate(TEXTS) for token in [*text.encode(), *done[number, 0]]] == expected


@pytest.mark.parametrize(("device", "parts"), [("cpu", [None] * 3), ("cuda", [None, 0, 1])])
def test_an_eighth_is_read_back_where_tensors_have_to_be_sent(engine, model_path, monkeypatch, device, parts):
    """All are at the first load."""
    server, seen = engine._server, []
    update = server._llm.update_weights
    monkeypatch.setattr(
        server._llm, "update_weights", lambda request: seen.append(request.update_info["part"]) or update(request)
    )
    monkeypatch.setattr(server._llm.vllm_config.device_config, "device_type", device)
    server._loads = 0
    for version in range(1, 4):
        engine.receive(snapshot(model_path, version))
    assert seen == parts


@pytest.mark.feature(104)
def test_loaded_weights_are_those_of_a_fresh_engine(engine, tmp_path, model_path):
    """Among them the head that is tied to the embeddings."""
    lm = load_causal_lm(model_path)
    before = checksums_of(engine)
    engine.receive(snapshot(model_path, 1, scale=1.02))
    updated = checksums_of(engine)
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter *= 1.02
    lm.model.save_pretrained(tmp_path / "later")
    lm.tokenizer.save_pretrained(tmp_path / "later")
    with closing(make(tmp_path / "later", max_batch=8)) as fresh:
        assert updated == checksums_of(fresh)
    changed = [name for name, digest in updated[0].items() if digest != before[0][name]]
    constant = [name for name, digest in updated[0].items() if "bias" in name and digest == before[0][name]]
    assert sorted(changed + constant) == sorted(updated[0])


def test_running_requests_are_kept_over_an_update(engine, model_path):
    """Their prompts are read again with the new weights, and nothing is submitted again."""
    sampling = SamplingParams(max_new_tokens=100, temperature=0.0, ignore_eos=True)
    engine.add(requests(), sampling, (6,))
    engine.advance()
    submitted = dict(engine._submitted)
    engine.receive(snapshot(model_path, 1, scale=1.02))
    assert engine._submitted == submitted
    versions = [item.request.versions.tolist() for item in drain(engine).values()]
    assert all(each == sorted(each) and {0, 1} == set(each) for each in versions)


@pytest.mark.parametrize("keep_kv", [False, True])
def test_no_request_meets_a_cache_of_older_weights(tmp_path, keep_kv):
    """A prompt of more than one block of the cache gives the tokens of an engine that has only the new weights."""
    path = write_tiny_model(tmp_path / "T", hidden=128, layers=2, max_positions=512)
    params, later = SamplingParams(max_new_tokens=8, temperature=0.0), snapshot(path, 1, scale=1.5)
    prompt = rollout_cases.prompts(["what is the answer? " * 9])
    other = TorchRolloutEngine(path, RolloutSettings(max_batch=8))
    other.receive(later)
    expected = other.generate(prompt, params, (0,))
    with closing(make(path, max_batch=2, backend={"keep_kv": keep_kv})) as engine:
        engine.receive(snapshot(path, 0))
        assert not np.allclose(engine.generate(prompt, params, (0,))["logprobs"].values, expected["logprobs"].values)
        engine.receive(later)
        output = engine.generate(prompt, params, (0,))
    assert np.allclose(output.ragged("logprobs").values, expected.ragged("logprobs").values, atol=1e-5)


@pytest.mark.parametrize("keep_kv", [False, True])
def test_update_reads_each_running_request_again_once(tmp_path, keep_kv):
    """vLLM's counters show it: a request whose tokens are read again is preempted, and there is no further prompt."""
    path = write_tiny_model(tmp_path / "T", hidden=128, layers=2, max_positions=1024)
    backend = {"keep_kv": keep_kv, "engine_args": {"disable_log_stats": False}}
    read_metrics = importlib.import_module("vllm.v1.metrics.reader").get_metrics_snapshot

    def counts():
        metrics = read_metrics()
        names = ("vllm:num_preemptions", "vllm:prompt_tokens")
        return np.array([sum(each.value for each in metrics if each.name == name) for name in names])

    with closing(make(path, max_batch=8, backend=backend)) as engine:
        increases, versions = [], [snapshot(path, version) for version in range(4)]
        engine.receive(versions[0])
        engine.add(requests(), SamplingParams(max_new_tokens=900, ignore_eos=True), (6,))
        for version in range(1, 4):
            goal = 2 + max(len(each.tokens) for each in engine._requests.by_number.values())
            while any(len(each.tokens) < goal for each in engine._requests.by_number.values()):
                engine.advance()
            before = counts()
            engine.receive(versions[version])
            while min(each.columns.values["versions"][-1] for each in engine._requests.by_number.values()) < version:
                engine.advance()
            increases.append((counts() - before).tolist())
        assert len(drain(engine)) == len(TEXTS)
    assert increases == [[0 if keep_kv else len(TEXTS), 0]] * 3


@pytest.mark.feature(14)
def test_weights_on_a_device_reach_vllm_without_the_host(engine, model_path, monkeypatch):
    """vLLM's worker opens the sender's memory, and compares its bytes before it loads them; the host stands in for the
    device."""
    later, sampling = snapshot(model_path, 1, scale=1.02), SamplingParams(max_new_tokens=20)
    source = ToySource({name: later.tensor(name) for name in later.buffers}, 1)
    with closing(CudaIpcTransport()) as sender, closing(CudaIpcTransport()) as receiver:
        weights = receiver.receive(publish(sender, source)[0])
        monkeypatch.setattr(os, "memfd_create", None)
        engine.receive(weights)
        on_device = checksums_of(engine), tokens_of(engine, sampling)
        monkeypatch.undo()
        engine.receive(later)
        assert on_device == (checksums_of(engine), tokens_of(engine, sampling))
        weights.buffers["model.norm.weight"][0] += 1
        with pytest.raises(WeightSyncError, match="'model.norm.weight'.* came with other bytes than were sent"):
            engine.receive(weights, rewind=True)


def test_weights_larger_than_the_memory_are_refused(model_path):
    weights = sum(tensor.nbytes for _, tensor in load_causal_lm(model_path).named_weights())
    with pytest.raises(OutOfDeviceMemory, match=f"vllm asks for {weights:,} bytes of weights on cpu"):
        make(model_path, memory=DeviceMemory(capacity=weights - 1))


# -- processes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "backend", "message"),
    [
        (None, {"max_model_length": 9}, "did you mean 'max_model_len'"),
        ("/nowhere/at/all", {}, "no model"),
        (None, {"engine_args": {"no_such_argument": 1}}, "vLLM does not start: .*no_such_argument"),
        (None, {"sampler": "vllm"}, "second model runner only: leave out sampler"),
    ],
)
def test_impossible_settings_of_vllm_are_refused(model_path, model, backend, message):
    with pytest.raises(EngineError, match=message):
        make(model or model_path, backend=backend)


def test_heads_without_attention_in_vllm_are_refused(tmp_path):
    narrow = write_tiny_model(tmp_path / "T", hidden=96, layers=1, max_positions=32)
    with pytest.raises(EngineError, match=r"heads of width 32, 64, .* and this model's have 24"):
        make(narrow)


def test_failed_start_tells_its_cause_and_leaves_nothing(model_path):
    """The cause lies in a process of vLLM, whose own error only says that there is one."""
    memory, before = DeviceMemory(), processes_of(os.getpid())
    with pytest.raises(EngineError, match="vLLM does not start: ValueError: .* available memory"):
        make(model_path, memory=memory, backend={"kv_cache_bytes": 1000})
    assert memory.total() == 0
    assert_ended(set(processes_of(os.getpid())) - set(before))


def test_start_of_vllm_leaves_the_process_unchanged(model_path):
    threads, count, environment = torch.set_num_threads, torch.get_num_threads(), dict(os.environ)
    python, array, random_state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    main = vars(sys.modules["__main__"]).get("__file__")
    other, message = make(model_path, max_batch=2, backend={"max_model_len": 40}), "41 tokens does not fit .* of 40"
    with closing(other), pytest.raises(EngineError, match=message):
        other.generate(rollout_cases.prompts(["x" * 40]), SamplingParams(max_new_tokens=10), (0,))
    assert (torch.set_num_threads is threads, torch.get_num_threads()) == (True, count)
    assert dict(os.environ) == environment
    assert vars(sys.modules["__main__"]).get("__file__") == main
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python, array)
    assert not torch.distributed.is_initialized()


SCRIPT = """
import sys
from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class

engine = engine_class(ROLLOUT_ENGINES, "vllm")(sys.argv[1], RolloutSettings(max_batch=2))
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ends", ["kill", "exit"])
def test_vllm_ends_with_the_script_that_started_it(tmp_path, model_path, ends):
    """The script has no guard against being imported by the processes that it starts."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", model_path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as script:
        assert script.stdout.readline() == b"started\n"
        started = processes_of(script.pid)
        assert started
        if ends == "kill":
            script.kill()
    assert_ended(started)


def test_killed_process_of_vllm_is_an_error(model_path):
    before = processes_of(os.getpid())
    with closing(make(model_path, max_batch=2)) as engine:
        engine.receive(snapshot(model_path, 0), rewind=True)
        engine.add(requests(), SamplingParams(max_new_tokens=100, ignore_eos=True), (0,))
        engine.advance()
        for pid in set(processes_of(os.getpid())) - set(before):
            os.kill(pid, signal.SIGTERM)  # so that it aborts its requests
        with pytest.raises(EngineDied, match="vLLM has ended"):
            drain(engine)
        assert (engine.running, engine.version) == (len(TEXTS), -1)
        engine.receive(snapshot(model_path, 0), rewind=True)  # which starts it again
        engine.advance()
        for pid in set(processes_of(os.getpid())) - set(before):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="vLLM has ended"):
            engine.receive(snapshot(model_path, 1))


def test_refused_request_tells_its_cause(engine, model_path, monkeypatch):
    exceptions = importlib.import_module("vllm.v1.engine.exceptions")

    async def refuse(*_):
        raise exceptions.EngineGenerateError from RuntimeError("no block is free")
        yield

    engine.receive(snapshot(model_path, 1))
    engine.add(requests()[:1], SamplingParams(max_new_tokens=3), (0,))
    monkeypatch.setattr(engine._server._llm, "generate", refuse)
    with pytest.raises(EngineError, match="refused a request: RuntimeError: no block is free"):
        engine.advance()
    engine.abort()


def test_cause_is_the_first_error_that_vllm_logs(tmp_path):
    logger, causes = logging.Logger("vllm"), tmp_path / "causes"
    logger.addHandler(_Causes(str(causes)))
    logger.error("worker %d died", 1)
    logger.error("the engine failed", exc_info=RuntimeError("cancelled"))
    assert causes.read_text().splitlines() == ["worker 1 died", "RuntimeError: cancelled"]


def test_plugin_does_nothing_in_other_processes():
    source = "import sys; from dlrover.python.rl.engine.vllm.plugin import register; register(); print(*sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", source], capture_output=True, check=True).stdout.split().count(b"vllm")
        == 0
    )


PRIVATE = {
    "vllm._custom_ops": "the only switch of packed copies of weights on a CPU, which updates do not reach",
}


def test_names_of_vllm_are_public():
    names = {}
    for path in sorted(Path(importlib.import_module("dlrover.python.rl.engine.vllm").__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                names |= {f"{node.module}.{alias.name}": path.name for alias in node.names}
    assert len(names) > 15
    assert {name for name in names if "._" in name} == PRIVATE.keys()
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.import_module(name)


@pytest.mark.feature(99)
@pytest.mark.slow
def test_two_ranks_draw_the_same_as_one(engine, model_path):
    engine.receive(snapshot(model_path, 1, scale=1.02))
    sampling = SamplingParams(max_new_tokens=20, samples_per_prompt=3)
    expected, before = tokens_of(engine, sampling), processes_of(os.getpid())
    with closing(make(model_path, max_batch=8, tensor_parallel_size=2)) as two:
        two.receive(snapshot(model_path, 1, scale=1.02))
        assert tokens_of(two, sampling) == expected
        started = set(processes_of(os.getpid())) - set(before)
        assert len(started) >= 3
    assert_ended(started)


# -- sleep: vLLM's place is taken by a stand-in, since nothing sleeps on a CPU -----------------
class Recorder:
    """Notes the calls that the engine makes."""

    def __init__(self, arguments, env, options):
        self.calls, self.fails = [("start", env.get("CUDA_VISIBLE_DEVICES"), env.get("TRITON_F32_DEFAULT"))], ()
        Recorder.last = self

    def cache_bytes(self, token_bytes):
        return 100

    def __getattr__(self, name):
        def call(*arguments):
            values = arguments[0].version if name == "load" else arguments
            self.calls.append((name, values) if arguments else (name,))
            if name in self.fails:
                raise EngineError("CUDA error: out of memory")

        return call


@pytest.fixture
def on_gpus(monkeypatch):
    server = importlib.import_module("dlrover.python.rl.engine.vllm.server")
    monkeypatch.setattr(server, "Server", Recorder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 40, 1 << 40))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device: 0)


@pytest.mark.parametrize(
    ("device", "precision", "size", "devices", "expected"),
    [("cuda:2", "fp32", 1, (), ("6,7", "ieee")), ("cuda:0", "bf16", 2, (0, 1, 3, 2), ("4,5,7,6", None))],
)
def test_vllm_has_its_devices_and_precision(model_path, on_gpus, device, precision, size, devices, expected):
    backend = {"engine_args": {"pipeline_parallel_size": 2}}
    make(model_path, device, precision, tensor_parallel_size=size, devices=devices, backend=backend)
    assert Recorder.last.calls == [("start", *expected)]


def test_version_is_loaded_once_however_often_vllm_sleeps(model_path, on_gpus):
    engine = make(model_path, "cuda:0", "bf16")
    calls = Recorder.last.calls
    del calls[:]
    wake = [("wake", ("weights",)), ("wake", ("kv_cache",))]
    engine.cpu()
    engine.receive(snapshot(model_path, 1))
    engine.cuda()
    assert calls == [("sleep", (1,)), wake[0], ("load", 1), wake[1]]
    del calls[:]
    engine.cpu()
    engine.cuda()
    assert calls == [("sleep", (1,)), *wake]
    engine.meta()
    engine.cuda()
    engine.receive(snapshot(model_path, 2))
    assert calls[3:] == [("sleep", (2,)), *wake, ("load", 2)]


def test_weights_without_a_cache_do_not_sleep(model_path, on_gpus):
    engine = make(model_path, "cuda:0", "bf16")
    engine.receive(snapshot(model_path, 1))
    engine.cpu()
    engine.cuda("weights")
    engine.cpu()
    assert (engine.version, engine.place(), Recorder.last.calls[-1]) == (-1, "meta", ("close",))


def test_failed_sleep_ends_vllm(model_path, on_gpus):
    engine = make(model_path, "cuda:0", "bf16")
    Recorder.last.fails = ("sleep",)
    with pytest.raises(EngineError):
        engine.cpu()
    assert (engine.place(), Recorder.last.calls[-1]) == ("meta", ("close",))


def test_items_of_a_request_that_arrive_together_are_joined(model_path, on_gpus, monkeypatch):
    engine = make(model_path, "cuda:0", "bf16")
    engine.receive(snapshot(model_path, 4))
    engine.add(requests()[:1], SamplingParams(max_new_tokens=3, ignore_eos=True), (0,))
    tokens = importlib.import_module("dlrover.python.rl.engine.vllm.server").NewTokens
    items = [tokens("gone", error=EngineError("of a withdrawn request")), tokens("0", [5], [-0.5], 4)]
    items += [tokens("0", [6], [-0.5], 4), tokens("0", [7], [-0.5], 5, [4, 5, 5], "length")]
    monkeypatch.setattr(Recorder, "take", lambda _: items, raising=False)
    (completion,) = engine.advance()
    assert (completion.request.done.tolist(), completion.request.versions.tolist()) == ([5, 6, 7], [4, 5, 5])
    monkeypatch.setattr(Recorder, "take", lambda _: [tokens("1", [5], [-0.5], 4, [4], "length")])
    engine.add(requests()[:1], SamplingParams(max_new_tokens=3), (0,))
    with pytest.raises(EngineError, match="ended a request after 1 tokens: its own limit is lower"):
        engine.advance()


def test_devices_go_before_the_users_variables(monkeypatch):
    server = importlib.import_module("dlrover.python.rl.engine.vllm.server")
    users = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "VLLM_NO_USAGE_STATS": "0"}
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    with server._environment({"CUDA_VISIBLE_DEVICES": "6"}):
        assert {name: os.environ[name] for name in users} == {**users, "CUDA_VISIBLE_DEVICES": "6"}
    assert {name: os.environ[name] for name in users} == users


def test_failed_wake_ends_vllm_and_names_the_memory(model_path, on_gpus):
    engine = make(model_path, "cuda:0", "bf16")
    engine.receive(snapshot(model_path, 1))
    engine.cpu()
    first = Recorder.last
    first.fails = ("wake",)
    with pytest.raises(OutOfDeviceMemory, match="vllm ran out of memory while computing on cuda"):
        engine.cuda()
    assert first.calls[-1] == ("close",)
    assert (engine.version, engine.place(), engine.footprint()) == (-1, "meta", {})
    engine.cuda()
    engine.receive(snapshot(model_path, 1))
    assert (Recorder.last is first, engine.version) == (False, 1)
    assert Recorder.last.calls[1:] == [("load", 1)]


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.5}])
def test_policy_logprobs_of_a_cut_need_the_own_sampler(model_path, on_gpus, sampling):
    engine = make(model_path, "cuda:0", "bf16", backend={"sampler": "vllm"})
    with pytest.raises(EngineError, match="set sampling.logprobs to 'sampled'"):
        engine.check(prompts().ragged("tokens"), SamplingParams(**sampling))
    engine.check(prompts().ragged("tokens"), SamplingParams(**sampling, logprobs="sampled"))
