# SPDX-License-Identifier: Apache-2.0
"""The SGLang engine beside the contract of all rollout engines, against a server that stands in."""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from dlrover.python.rl.common.errors import EngineDied, EngineError, OutOfDeviceMemory, WeightSyncError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.loading import write_atomically
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, tiny_config
from dlrover.python.rl.engine.sglang import SglangOptions, launch_arguments
from dlrover.python.rl.engine.sglang.engine import SglangRolloutEngine
from dlrover.python.rl.engine.sglang.server import SglangServer
from tests.support import sglang_stand_in
from tests.support.commands import is_alive
from tests.support.rollout_cases import drain, snapshot
from tests.support.served import until


@pytest.fixture
def served(model_path):
    stand_in, url, close = sglang_stand_in.serve(model_path)
    yield stand_in, url
    close()


@pytest.fixture
def connect(served, model_path):
    with ExitStack() as stack:

        def make(memory=None, backend=None, **settings):
            settings = {"max_batch": 4, "backend": {"url": served[1], **(backend or {})}, **settings}
            engine = SglangRolloutEngine(model_path, RolloutSettings(**settings), memory)
            return stack.enter_context(closing(engine))

        yield make


@pytest.fixture
def engine(connect):
    return connect(backend={"chunk_tokens": 4})


def prompts(count=3):
    rows = [list(b"what is it?"[: number + 2]) for number in range(count)]
    return Batch({"prompt_id": np.arange(count), "tokens": Ragged.from_rows(rows)})


@pytest.mark.feature(14)
@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="'sglang' is installed here")
def test_missing_sglang_names_the_option_url(model_path):
    with pytest.raises(EngineError, match="sglang is not installed here: give the option 'url', the URL of its server"):
        SglangRolloutEngine(model_path, RolloutSettings())


def test_launch_arguments_follow_the_settings():
    settings = RolloutSettings(device="cuda:1", precision="bf16", max_batch=7, tensor_parallel_size=2)
    flags = launch_arguments("/m", settings, SglangOptions(server_args={"log-level": "error", "skip-warmup": True}))
    expected = {"--model-path": "/m", "--dtype": "bfloat16", "--device": "cuda", "--tp-size": "2"}
    expected |= {"--sampling-backend": "pytorch", "--max-running-requests": "7"}
    assert expected.items() <= dict(pairwise(flags)).items()
    assert {"--enable-deterministic-inference", "--enable-memory-saver", "--skip-warmup"} <= set(flags)


def test_advance_draws_a_chunk_and_generate_the_whole(engine, served):
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    whole = engine.generate(prompts(1), sampling, (1,)).ragged("tokens")[0][2:]
    assert served[0].said.count("/generate") == 1
    engine.add([Request.fresh(0, 0, prompts(1).ragged("tokens")[0])], sampling, (1,))
    assert engine.advance() == []
    (part,) = engine.abort()
    assert part.request.done.tolist() == whole[:4].tolist()
    engine.add([part.request], sampling, (1,))
    assert engine.advance() == []
    (done,) = engine.advance()
    assert done.request.done.tolist() == whole.tolist()


@pytest.mark.parametrize("longest", [127, 39])
def test_sequence_near_the_limit_ends_by_its_length(longest, served, connect, model_path):
    """127: by the context of 128 tokens; 39: by a cache of 40."""
    served[0].longest = longest
    engine = connect(backend={"chunk_tokens": 16})
    engine.receive(snapshot(model_path, 0))
    sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
    lengths = [2, 8, longest - 7, longest - 6]
    engine.add([Request.fresh(number, 0, np.arange(length)) for number, length in enumerate(lengths)], sampling, (1,))
    ends = {number: (item.finish, len(item.request.done)) for (number, _), item in drain(engine).items()}
    assert ends == {number: ("length", longest - 5 - length) for number, length in enumerate(lengths)}
    with pytest.raises(EngineError, match=f"{longest - 4} tokens does not fit the backend's limit of {longest - 5}"):
        engine.check(Ragged.from_rows([np.arange(longest - 5)]), sampling)


@pytest.mark.slow
def test_stop_string_over_two_chunks_ends_a_completion(engine):
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, samples_per_prompt=24)
    requests = [Request.fresh(0, index, np.array(list(b"go"))) for index in range(24)]
    engine.add(requests, sampling, (1,))
    done = {item.request.key: item for _ in range(3) for item in engine.advance()}
    request = next(
        item.request for item in done.values() if all(32 < token < 127 for token in item.request.done[3:5].tolist())
    )
    stop = bytes(request.done[3:5].tolist()).decode()
    assert engine.tokenizer.decode(request.done[:5]).endswith(stop)
    engine.add([requests[request.sample_index]], SamplingParams(max_new_tokens=12, ignore_eos=True, stop=(stop,)), (1,))
    assert engine.advance() == []
    (ended,) = engine.advance()
    assert (ended.finish, ended.request.done.tolist()) == ("stop", request.done[:5].tolist())


def test_slow_generation_is_aborted(served, connect):
    engine = connect(backend={"timeout_s": 0.5, "start_timeout_s": 30.0})
    with served[0].lock, pytest.raises(EngineError, match="has not generated within 0.5 s|does not answer /generate"):
        engine.generate(prompts(), SamplingParams(), (1,))
    assert engine.running == 0
    engine.close()
    assert "/abort_request" in served[0].said


def test_server_is_offloaded_with_the_engine(engine, served, model_path):
    engine.receive(snapshot(model_path, 0))
    engine.cpu()
    for part, parts in (("", set()), ("weights", {"weights"}), ("kv_cache", {"weights", "kv_cache"})):
        if part:
            engine.cuda(part)
        assert served[0].there == parts


def test_exchanged_files_are_removed(connect, model_path, tmp_path):
    engine = connect(backend={"exchange": str(tmp_path)})
    for version in range(3):
        engine.receive(snapshot(model_path, version))
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    engine.meta()
    assert not list(tmp_path.rglob("*.safetensors"))
    engine.receive(snapshot(model_path, 3))
    engine.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.feature(104)
def test_each_load_is_asked_for_under_its_own_version(engine, served, model_path):
    for version in (0, 0, 1):
        engine.receive(snapshot(model_path, version), rewind=True)
    engine.cpu()
    engine.cuda()
    folders = [Path(body["model_path"]) for body in served[0].updates]
    for folder, body in zip(folders, served[0].updates, strict=True):
        assert body == {"model_path": str(folder), "flush_cache": True, "weight_version": folder.name}
    assert [folder.name.partition("-")[0] for folder in folders] == ["0", "0", "1", "1"]
    assert (len(set(folders)), folders[2]) == (3, folders[3])


@pytest.mark.feature(104)
@pytest.mark.parametrize("cause", ["restart", "second worker"])
def test_tokens_of_other_weights_are_refused(cause, connect, served, model_path):
    engine = connect()
    engine.receive(snapshot(model_path, 3))
    if cause == "restart":
        served[0].__init__(model_path)
    else:
        connect().receive(snapshot(model_path, 3))
    for _ in range(2):
        with pytest.raises(EngineDied, match=r"has the weights '.*', not '3-.*': it was restarted, or another worker"):
            engine.generate(prompts(), SamplingParams(max_new_tokens=2), (0,))
        assert engine.running == 0
    engine.receive(snapshot(model_path, 3))
    assert engine.generate(prompts(), SamplingParams(max_new_tokens=2), (0,))["version"].tolist() == [3] * 3


@pytest.mark.parametrize(("ranks", "cache_bytes"), [(1, 256_000), (2, 128_000)])
def test_memory_is_accounted_for_and_excess_refused(connect, model_path, ranks, cache_bytes):
    weights = -(-sum(tensor.nbytes for _, tensor in load_causal_lm(model_path).named_weights()) // ranks)
    with pytest.raises(OutOfDeviceMemory, match=f"sglang asks for {cache_bytes:,} bytes of kv_cache"):
        connect(DeviceMemory(capacity=weights + cache_bytes - 1), tensor_parallel_size=ranks)
    memory = DeviceMemory(capacity=weights + cache_bytes)
    engine = connect(memory, tensor_parallel_size=ranks)
    assert engine.footprint() == {"weights": weights, "kv_cache": cache_bytes}
    assert memory.total() == weights + cache_bytes
    engine.cpu()
    assert memory.total() == 0


LAUNCH = """
import json, os, sys, threading
from tests.support import sglang_stand_in

flags = dict(zip(sys.argv[1:], sys.argv[2:] + [""]))
open("flags.json", "w").write(json.dumps({**flags, "pid": os.getpid()}))
sglang_stand_in.serve(flags["--model-path"], int(flags["--port"]))
threading.Event().wait()
"""


@pytest.fixture
def launchable(tmp_path, monkeypatch):
    (tmp_path / "packages/sglang").mkdir(parents=True)
    (tmp_path / "packages/sglang/__init__.py").touch()
    (tmp_path / "packages/sglang/launch_server.py").write_text(LAUNCH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    paths = [tmp_path / "packages", Path(__file__).parents[3]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    return tmp_path


@pytest.mark.slow
@pytest.mark.feature(14)
@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="'sglang' is installed here")
def test_server_is_started_and_ended_without_a_url(launchable, model_path):
    backend = {"start_timeout_s": 120.0, "server_args": {"log-level": "error"}, "exchange": str(launchable)}
    engine = SglangRolloutEngine(model_path, RolloutSettings(max_batch=4, backend=backend))
    flags = json.loads(Path("flags.json").read_text())
    assert (flags["--host"], flags["--max-running-requests"], flags["--log-level"]) == ("127.0.0.1", "4", "error")
    engine.receive(snapshot(model_path, 0))
    assert engine.generate(prompts(), SamplingParams(max_new_tokens=3), (0,))["version"].tolist() == [0, 0, 0]
    engine.close()
    until(lambda: not is_alive(flags["pid"]))
    assert not list(launchable.glob("weights-*"))


def test_ended_server_of_this_process_is_a_death():
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE)
    server, elsewhere = (SglangServer("http://127.0.0.1:9", *process) for process in ((ended,), ()))
    with pytest.raises(EngineDied, match="does not answer /generate: it has ended with status 3"):
        server.call("POST", "/generate", {})
    with pytest.raises(EngineError, match="ended with status 3"):
        server.wait_until_up(1.0)
    server.close()
    with pytest.raises(EngineError, match="does not answer") as caught:
        elsewhere.call("POST", "/generate", {})
    assert not isinstance(caught.value, EngineDied)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 did not come up in 0\.1 s"):
        elsewhere.wait_until_up(0.1)


OWNER = """
import subprocess, sys
keeper = [sys.executable, "-m", "dlrover.python.rl.engine.sglang.server", sys.argv[1]]
inner = "import os, subprocess, time; child = subprocess.Popen(['sleep', '600']);"
inner += "print(os.getpid(), child.pid, flush=True); time.sleep(600)"
server = subprocess.Popen([*keeper, sys.executable, "-c", inner], stdin=subprocess.PIPE, start_new_session=True)
from dlrover.python.rl.engine.sglang.server import SglangServer
sys.stdin.readline()
SglangServer("http://127.0.0.1:9", server).close()
"""


@pytest.mark.slow
@pytest.mark.feature(23)
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_server_process_ends_with_its_owner(end, tmp_path):
    """The keeper ends its command and what that has started, and removes the folder."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert all(is_alive(pid) for pid in pids)
    if end == "closed":
        owner.communicate(b"\n", timeout=60)
        assert owner.returncode == 0
    else:
        os.kill(owner.pid, signal.SIGKILL)
        owner.communicate(timeout=60)
        until(lambda: not folder.exists())
    until(lambda: not any(is_alive(pid) for pid in pids))


def test_refusal_of_the_server_is_in_the_error(served):
    with pytest.raises(EngineError, match="SGLang refused /generate with status 400: .*sampling_params"):
        SglangServer(served[1]).call("POST", "/generate", {"rid": "x"})


def test_samples_beside_a_nan_logprob_are_not_lost(engine, served, monkeypatch):
    answers = {}

    def generate(body):
        return {"meta_info": {"output_token_logprobs": answers[len(body["input_ids"])]}}

    monkeypatch.setattr(served[0], "generate", generate)
    requests = [Request.fresh(number, 0, row) for number, row in enumerate(prompts(2).ragged("tokens"))]
    engine.add(requests, SamplingParams(max_new_tokens=2, ignore_eos=True), (1,))
    answers |= {2: [[-1.0, 7, None], [-1.0, 8, None]], 3: [[-1.0, 7, None], [None, 8, None]]}
    with pytest.raises(EngineError, match="NaN or infinite"):
        engine.advance()
    assert engine.running == 2
    answers[3] = answers[2]
    assert [done.request.done.tolist() for done in engine.advance()] == [[7, 8]] * 2


def test_missing_memory_of_the_server_names_its_holders(engine, served, monkeypatch):
    engine.cpu()

    def resume(body):
        raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(served[0], "resume_memory_occupation", resume)
    with pytest.raises(OutOfDeviceMemory, match="sglang ran out of memory while computing on cpu: .* bytes are in use"):
        engine.cuda()
    assert (engine.place(), engine.footprint()) == ("cpu", {})


def test_woken_but_refused_weights_leave_the_device(engine, served, model_path, monkeypatch):
    engine.receive(snapshot(model_path, 0))
    engine.cpu()
    answer = {"success": False, "message": "broken"}
    monkeypatch.setattr(served[0], "update_weights_from_disk", lambda body: answer)
    with pytest.raises(WeightSyncError, match="broken"):
        engine.cuda()
    assert (served[0].there, engine.footprint()) == (set(), {})
    monkeypatch.undo()
    engine.cuda()
    assert engine.generate(prompts(), SamplingParams(max_new_tokens=2), (0,))["version"].tolist() == [0] * 3


def test_started_server_sees_the_devices_of_its_engine(model_path, monkeypatch):
    starts = []

    def record(command, **options):
        starts.append((options["env"]["CUDA_VISIBLE_DEVICES"], command[command.index("--device") + 1]))
        raise EngineError("not here")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("dlrover.python.rl.engine.sglang.server.subprocess.Popen", record)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device: 0)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 40, 1 << 40))
    with pytest.raises(EngineError, match="not here"):
        SglangRolloutEngine(model_path, RolloutSettings("cuda:2", tensor_parallel_size=2))
    assert starts == [("6,7", "cuda")]


# -- weights that are read back after a sync --------------------------------------------------------------------------
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(tokenizer, **changes):
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **ids, **SHAPE | changes))


MODELS = {
    "llama": llama,
    "llama whose heads are wider": lambda tokenizer: llama(tokenizer, head_dim=16),
    "qwen2": lambda tokenizer: Qwen2ForCausalLM(tiny_config(tokenizer, **SHAPE)),
}


@pytest.fixture
def served_model(request, tmp_path):
    torch.manual_seed(0)
    tokenizer = make_byte_tokenizer()
    path = write_atomically(tmp_path / "T", MODELS[request.param](tokenizer), tokenizer)
    stand_in, url, close = sglang_stand_in.serve(path)

    def connect(**settings):
        return SglangRolloutEngine(path, RolloutSettings(max_batch=4, backend={"url": url}, **settings))

    with closing(connect()) as engine:
        parts = {"engine": engine, "stand_in": stand_in, "connect": connect}
        yield SimpleNamespace(**parts, snapshot=partial(snapshot, path))
    close()


def generate(engine):
    return engine.generate(prompts(2), SamplingParams(max_new_tokens=3), (0,))


@pytest.mark.feature(104)
@pytest.mark.parametrize("served_model", ["llama"], indirect=True)
def test_weights_missed_by_the_server_are_not_served(served_model, caplog):
    engine = served_model.engine
    engine.receive(served_model.snapshot(0))
    names = ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.v_proj.weight")
    for name, scale in zip(names, (1.1, 1.2), strict=True):
        served_model.stand_in.deaf = (name,)
        with pytest.raises(WeightSyncError, match=f"has other values of '{name}'$"):
            engine.receive(served_model.snapshot(1, scale))
        assert engine.version == -1
    with pytest.raises(EngineError, match="receive them again"):
        generate(engine)
    served_model.stand_in.deaf = ()
    engine.receive(served_model.snapshot(1, scale=1.02))
    assert generate(engine)["version"].tolist() == [1, 1]
    assert caplog.text == ""


@pytest.mark.parametrize("served_model", ["llama"], indirect=True)
def test_weights_no_longer_read_back_are_an_error(served_model, monkeypatch):
    served_model.engine.receive(served_model.snapshot(0))
    monkeypatch.setattr(sglang_stand_in, "READS_BACK", ())
    with pytest.raises(WeightSyncError, match="'model.embed_tokens.weight'"):
        served_model.engine.receive(served_model.snapshot(1))
    assert served_model.engine.version == -1


@pytest.mark.feature(104)
@pytest.mark.parametrize("served_model", ["qwen2"], indirect=True)
def test_unreadable_weights_are_served_with_one_warning(served_model, caplog):
    with caplog.at_level(logging.WARNING):
        for version in range(3):
            served_model.engine.receive(served_model.snapshot(version, scale=1.0 + version / 50))
    assert (served_model.engine.version, served_model.stand_in.said.count("/get_weights_by_name")) == (2, 1)
    assert generate(served_model.engine)["version"].tolist() == [2, 2]
    (message,) = caplog.messages
    assert message.startswith("SGLang cannot read back 26 of this model's 26 tensors")


@pytest.mark.parametrize("served_model", ["llama whose heads are wider"], indirect=True)
def test_misread_keys_and_values_are_not_compared(served_model, caplog):
    with caplog.at_level(logging.WARNING):
        served_model.engine.receive(served_model.snapshot(0))
    assert served_model.engine.version == 0
    assert "cannot read back 4 of this model's 20 tensors" in caplog.text
    served_model.stand_in.deaf = ("model.layers.0.self_attn.q_proj.weight",)
    with pytest.raises(WeightSyncError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight'$"):
        served_model.engine.receive(served_model.snapshot(1, scale=1.02))


@pytest.mark.parametrize(("ranks", "unread"), [(2, 0), (4, 4)])
@pytest.mark.parametrize("served_model", ["llama"], indirect=True)
def test_shared_key_heads_are_not_read_back(served_model, ranks, unread, caplog):
    engine = served_model.connect(tensor_parallel_size=ranks)
    with caplog.at_level(logging.WARNING):
        engine.receive(served_model.snapshot(0))
    assert (f"cannot read back {unread} of" in caplog.text) is (unread > 0)
    engine.close()
