# SPDX-License-Identifier: Apache-2.0
"""What only the SGLang engine has beside the contract of all rollout engines, against a server that stands in."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineDied, EngineError, OutOfDeviceMemory, WeightSyncError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.sglang import SglangOptions, launch_arguments
from dlrover.python.rl.engine.sglang.engine import SglangRolloutEngine
from dlrover.python.rl.engine.sglang.server import SglangServer
from dlrover.python.rl.engine.weight_sync.base import SyncSettings
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from tests.support import sglang_stand_in


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)


@pytest.fixture
def served(model_path):
    stand_in, url, close = sglang_stand_in.serve(model_path)
    yield stand_in, url
    close()


@pytest.fixture
def engine(served, model_path):
    made = SglangRolloutEngine(model_path, RolloutSettings(max_batch=4, backend={"url": served[1], "chunk_tokens": 4}))
    yield made
    made.close()


def snapshot(path, version, scale=1.0):
    return take_snapshot(((name, tensor * scale) for name, tensor in load_causal_lm(path).named_weights()), version)


def prompts(count=3):
    rows = [list(b"what is it?"[: number + 2]) for number in range(count)]
    return Batch({"prompt_id": np.arange(count), "tokens": Ragged.from_rows(rows)})


@pytest.mark.feature(14)
@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="'sglang' is installed here")
def test_without_sglang_the_option_url_is_named(model_path):
    with pytest.raises(EngineError, match="sglang is not installed here: give the option 'url', the URL of its server"):
        SglangRolloutEngine(model_path, RolloutSettings())


def test_a_server_is_started_so_that_it_keeps_to_the_port():
    settings = RolloutSettings(device="cuda:1", precision="bf16", max_batch=7, tensor_parallel_size=2)
    flags = launch_arguments("/m", settings, SglangOptions(server_args={"log-level": "error", "skip-warmup": True}))
    pairs = dict(zip(flags, [*flags[1:], ""], strict=True))
    assert (pairs["--model-path"], pairs["--dtype"], pairs["--device"], pairs["--tp-size"]) == (
        *("/m", "bfloat16", "cuda", "2"),
    )
    assert (pairs["--sampling-backend"], pairs["--max-running-requests"]) == ("pytorch", "7")
    assert {"--enable-deterministic-inference", "--enable-memory-saver", "--skip-warmup"} <= set(flags)


def test_a_server_that_does_not_come_up_is_an_error_that_says_so(model_path):
    backend = {"url": "http://127.0.0.1:9", "start_timeout_s": 0.1, "timeout_s": 1.0}
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 did not come up in 0\.1 s"):
        SglangRolloutEngine(model_path, RolloutSettings(backend=backend))


def test_an_advance_draws_a_chunk_and_a_round_of_generate_the_whole(engine, served):
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
def test_a_sequence_near_sglangs_limit_ends_by_its_length(longest, served, model_path):
    """127: by the context of 128 tokens; 39: by a cache of 40."""
    served[0].longest = longest
    backend = {"url": served[1], "chunk_tokens": 16}
    engine = SglangRolloutEngine(model_path, RolloutSettings(max_batch=4, backend=backend))
    engine.receive(snapshot(model_path, 0))
    sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
    lengths = [2, 8, longest - 7, longest - 6]
    engine.add([Request.fresh(number, 0, np.arange(length)) for number, length in enumerate(lengths)], sampling, (1,))
    done = []
    while engine.running:
        done += engine.advance()
    ends = {item.request.prompt_id: (item.finish, len(item.request.done)) for item in done}
    assert ends == {number: ("length", longest - 5 - length) for number, length in enumerate(lengths)}
    with pytest.raises(EngineError, match=f"{longest - 4} tokens does not fit the backend's limit of {longest - 5}"):
        engine.check(Ragged.from_rows([np.arange(longest - 5)]), sampling)
    engine.close()


@pytest.mark.slow
def test_a_stop_string_that_spans_two_chunks_ends_a_completion(engine):
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, samples_per_prompt=24)
    asked = [Request.fresh(0, index, np.array(list(b"go"))) for index in range(24)]
    engine.add(asked, sampling, (1,))
    done = {item.request.key: item for _ in range(3) for item in engine.advance()}
    request = next(
        item.request for item in done.values() if all(32 < token < 127 for token in item.request.done[3:5].tolist())
    )
    stop = bytes(request.done[3:5].tolist()).decode()
    assert engine.tokenizer.decode(request.done[:5]).endswith(stop)
    engine.add([asked[request.sample_index]], SamplingParams(max_new_tokens=12, ignore_eos=True, stop=(stop,)), (1,))
    assert engine.advance() == []
    (ended,) = engine.advance()
    assert (ended.finish, ended.request.done.tolist()) == ("stop", request.done[:5].tolist())


def test_a_server_that_takes_too_long_is_told_to_stop(served, model_path):
    stand_in, url = served
    backend = {"url": url, "timeout_s": 0.5, "start_timeout_s": 30.0}
    engine = SglangRolloutEngine(model_path, RolloutSettings(max_batch=4, backend=backend))
    with stand_in.lock, pytest.raises(EngineError, match="has not generated within 0.5 s|does not answer /generate"):
        engine.generate(prompts(), SamplingParams(), (1,))
    assert engine.running == 0
    engine.close()
    assert "/abort_request" in stand_in.said


def test_broken_weights_are_an_error_not_a_sample(engine, model_path):
    engine.receive(snapshot(model_path, 0, scale=float("nan")))
    with pytest.raises(EngineError, match="NaN or infinite"):
        engine.generate(prompts(), SamplingParams(), (0,))
    assert engine.running == 0


@pytest.mark.feature(104)
def test_weights_that_the_server_refuses_are_named_with_its_words(engine, served, model_path, monkeypatch):
    engine.receive(snapshot(model_path, 0))
    answer = {"success": False, "message": "no room for this model"}
    monkeypatch.setattr(served[0], "update_weights_from_disk", lambda body: answer)
    with pytest.raises(WeightSyncError, match="did not load the weights: .*no room for this model"):
        engine.receive(snapshot(model_path, 1, scale=1.02))
    assert engine.version == -1


@pytest.mark.feature(105)
@pytest.mark.parametrize("bucket_bytes", [1 << 10, 1 << 20])
def test_weights_that_came_in_buckets_are_served(bucket_bytes, engine, served, model_path, tmp_path):
    """As they come: each tensor a part of one long row of bytes."""
    wire = PullTransport(SyncSettings(bucket_bytes=bucket_bytes))
    trainer = Fsdp2TrainEngine(model_path, None)
    ticket = wire.offer(trainer)
    stamp = wire.send(ticket, trainer)
    received = wire.receive(ticket)
    engine.receive(received)
    assert (received.stamp, engine.version) == (stamp, 0)
    own = dict(served[0].model.named_parameters())
    assert all(torch.equal(own[name], tensor) for name, tensor in trainer.named_weights())
    del received
    wire.close()
    trainer.close()


def test_offload_asks_the_server_for_it(engine, served, model_path):
    engine.receive(snapshot(model_path, 0))
    engine.cpu()
    assert served[0].there == set()
    engine.cuda("weights")
    assert served[0].there == {"weights"}
    engine.cuda("kv_cache")
    assert served[0].there == {"weights", "kv_cache"}


def test_nothing_that_was_handed_over_stays(served, model_path, tmp_path):
    backend = {"url": served[1], "exchange": str(tmp_path)}
    engine = SglangRolloutEngine(model_path, RolloutSettings(backend=backend))
    for version in range(3):
        engine.receive(snapshot(model_path, version))
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    engine.meta()
    assert not list(tmp_path.rglob("*.safetensors"))
    engine.receive(snapshot(model_path, 3))
    engine.close()
    assert not list(tmp_path.iterdir())


def test_memory_is_accounted_for_and_what_does_not_fit_is_refused(served, model_path):
    weights = sum(tensor.nbytes for _, tensor in load_causal_lm(model_path).named_weights())
    settings = RolloutSettings(backend={"url": served[1]})
    with pytest.raises(OutOfDeviceMemory, match="sglang asks for 256,000 bytes of kv_cache"):
        SglangRolloutEngine(model_path, settings, DeviceMemory(capacity=weights + 255_999))
    memory = DeviceMemory(capacity=weights + 256_000)
    engine = SglangRolloutEngine(model_path, settings, memory)
    assert engine.footprint() == {"weights": weights, "kv_cache": 256_000}
    assert memory.total() == weights + 256_000
    engine.cpu()
    assert memory.total() == 0
    engine.close()


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


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
    """A package ``sglang`` whose ``launch_server`` is the stand-in, in an empty folder."""
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
def test_without_a_url_a_server_is_started_and_ended(launchable, model_path):
    backend = {"start_timeout_s": 120.0, "server_args": {"log-level": "error"}, "exchange": str(launchable)}
    engine = SglangRolloutEngine(model_path, RolloutSettings(max_batch=4, backend=backend))
    flags = json.loads(Path("flags.json").read_text())
    assert (flags["--host"], flags["--max-running-requests"], flags["--log-level"]) == ("127.0.0.1", "4", "error")
    engine.receive(snapshot(model_path, 0))
    assert engine.generate(prompts(), SamplingParams(max_new_tokens=3), (0,))["version"].tolist() == [0, 0, 0]
    engine.close()
    wait_until(lambda: not alive(flags["pid"]))
    assert not list(launchable.glob("weights-*"))


def test_a_server_that_was_started_here_and_has_ended_is_a_failure_of_its_process():
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE)
    server = SglangServer("http://127.0.0.1:9", ended)
    with pytest.raises(EngineDied, match="does not answer /generate: it has ended with status 3"):
        server.call("POST", "/generate", {})
    with pytest.raises(EngineError, match="ended with status 3"):
        server.wait_until_up(1.0)
    server.close()
    with pytest.raises(EngineError, match="does not answer") as elsewhere:
        SglangServer("http://127.0.0.1:9").call("POST", "/generate", {})
    assert not isinstance(elsewhere.value, EngineDied)


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
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_the_servers_process_ends_with_its_owner(how, tmp_path):
    """The keeper's side of it: whatever command it runs, and what that has started, ends, and nothing is left."""
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
    assert all(alive(pid) for pid in pids)
    if how == "closed":
        owner.communicate(b"\n", timeout=60)
        assert owner.returncode == 0
    else:
        os.kill(owner.pid, signal.SIGKILL)
        owner.communicate(timeout=60)
        wait_until(lambda: not folder.exists())
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_what_the_server_says_is_in_the_error(served):
    with pytest.raises(EngineError, match="SGLang refused /generate with status 400: .*sampling_params"):
        SglangServer(served[1]).call("POST", "/generate", {"rid": "x"})


def test_samples_that_end_beside_one_that_is_broken_are_not_lost(engine, served, monkeypatch):
    drawn = {}

    def generate(body):
        return {"meta_info": {"output_token_logprobs": drawn[len(body["input_ids"])]}}

    monkeypatch.setattr(served[0], "generate", generate)
    asked = [Request.fresh(number, 0, row) for number, row in enumerate(prompts(2).ragged("tokens"))]
    engine.add(asked, SamplingParams(max_new_tokens=2, ignore_eos=True), (1,))
    drawn |= {2: [[-1.0, 7, None], [-1.0, 8, None]], 3: [[-1.0, 7, None], [None, 8, None]]}
    with pytest.raises(EngineError, match="NaN or infinite"):
        engine.advance()
    assert engine.running == 2
    drawn[3] = drawn[2]
    assert [done.request.done.tolist() for done in engine.advance()] == [[7, 8]] * 2


def test_a_device_without_room_is_told_with_who_holds_what(engine, served, monkeypatch):
    engine.cpu()

    def resume(body):
        raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(served[0], "resume_memory_occupation", resume)
    with pytest.raises(OutOfDeviceMemory, match="sglang ran out of memory while computing on cpu: .* bytes are in use"):
        engine.cuda()
    assert (engine.place(), engine.footprint()) == ("cpu", {})


def test_weights_that_were_woken_and_not_taken_do_not_stay_on_the_device(engine, served, model_path, monkeypatch):
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


def test_of_several_ranks_each_device_has_its_part(served, model_path):
    weights = sum(tensor.nbytes for _, tensor in load_causal_lm(model_path).named_weights())
    settings = RolloutSettings(tensor_parallel_size=2, backend={"url": served[1]})
    engine = SglangRolloutEngine(model_path, settings)
    assert engine.footprint() == {"weights": -(-weights // 2), "kv_cache": 128_000}
    engine.close()


def test_a_started_server_sees_the_devices_of_the_engine_only(model_path, monkeypatch):
    given = []

    def record(command, **options):
        given.append((options["env"]["CUDA_VISIBLE_DEVICES"], command[command.index("--device") + 1]))
        raise EngineError("not here")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("dlrover.python.rl.engine.sglang.server.subprocess.Popen", record)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device: 0)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 40, 1 << 40))
    with pytest.raises(EngineError, match="not here"):
        SglangRolloutEngine(model_path, RolloutSettings("cuda:2", tensor_parallel_size=2))
    assert given == [("6,7", "cuda")]
