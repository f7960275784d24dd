# SPDX-License-Identifier: Apache-2.0
"""The PyTorch rollout engine beside the contract of all engines: its models, its cache, its memory."""

import dataclasses
import gc

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory
from dlrover.python.rl.engine.api.base import Request, RolloutSettings
from dlrover.python.rl.engine.api.weights import WeightSnapshot, take_snapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.loading import as_causal_lm
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer
from dlrover.python.rl.engine.rollout_torch.decoder import HuggingFaceDecoder
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.rollout_torch.fused import FusedDecoder
from tests.support.rollout_cases import TEXTS, completions, drain, prompts, sampling, snapshot
from tests.support.torch_models import EOS, FUSED, GENERIC, family_model, greedy, loaded, logprobs

each_backend = pytest.mark.parametrize("backend", [{"forward": "fused"}, {"forward": "huggingface"}])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs("cuda"))]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make(model, memory=None, **settings):
    return TorchRolloutEngine(model, RolloutSettings(**settings), memory)


def assert_logprobs(model, out, tolerance, temperature=1.0):
    columns = (out.ragged(name) for name in ("tokens", "logprobs", "action_mask"))
    for tokens, values, mask in zip(*columns, strict=True):
        assert np.abs(logprobs(model, tokens, temperature) - values[1:])[mask[1:]].max() < tolerance


# -- models -----------------------------------------------------------------------------------------------------------
QUICK = ("llama, llama3 rope", "mistral, wide heads", "qwen2", "qwen3, tied", "qwen2, sliding", "gemma2", "gpt2")


@pytest.mark.parametrize(
    "label",
    [*QUICK, *(pytest.param(label, marks=pytest.mark.slow) for label in (*FUSED, *GENERIC) if label not in QUICK)],
)
def test_model_of_each_family_generates_as_the_library(label):
    model = family_model(label)
    engine = make(loaded(model), max_batch=3)
    assert type(engine._decoder) is (FusedDecoder if label in FUSED else HuggingFaceDecoder)
    out = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    assert completions(out) == [greedy(model, text.encode(), 24) for text in TEXTS]
    out = engine.generate(prompts(), sampling(temperature=0.7, samples_per_prompt=2), (3,))
    assert_logprobs(model, out, 1e-4, temperature=0.7)


@pytest.mark.parametrize("label", ["qwen2, tied", "qwen3", "llama, tied, with biases", "gpt2"])
def test_weights_are_received_under_the_checkpoint_names(label):
    model, other = family_model(label), family_model(label)
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    engine = make(loaded(model))
    engine.receive(take_snapshot(loaded(other).named_weights(), 4))
    out = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    assert completions(out) == [greedy(other, text.encode(), 24) for text in TEXTS]


def state_space_model():
    settings = {"vocab_size": 259, "hidden_size": 16, "eos_token_id": EOS, "pad_token_id": 256}
    return as_causal_lm(MambaForCausalLM(MambaConfig(**settings, num_hidden_layers=1)), make_byte_tokenizer())


def convolution_model():
    settings = {"vocab_size": 259, "hidden_size": 16, "eos_token_id": EOS, "pad_token_id": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    config = Lfm2Config(**settings, **heads, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    return as_causal_lm(Lfm2ForCausalLM(config), make_byte_tokenizer())


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (state_space_model, {}, "'mamba' keeps a state"),
        (convolution_model, {}, "'lfm2' keeps a state"),
        (lambda: dataclasses.replace(loaded(family_model("qwen2")), eos_ids=()), {}, "no end-of-sequence"),
        (lambda: loaded(family_model("gpt2")), {"backend": {"forward": "fused"}}, "not support model type 'gpt2'"),
        (lambda: "~/absent", {}, "it is not a folder"),
        (None, {"backend": {"forwrd": "fused"}}, "unknown key 'forwrd'; did you mean 'forward'"),
        (None, {"backend": {"prefill_tokens": 0}}, "prefill_tokens"),
        (None, {"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        (None, {"memory": DeviceMemory(device="cuda")}, "runs on cpu, but its DeviceMemory is of cuda"),
    ],
)
def test_impossible_engine_is_refused(model_path, model, settings, message):
    with pytest.raises(EngineError, match=message):
        make(model() if model else model_path, **settings)


def test_sequence_past_longrope_positions_is_refused():
    engine = make(loaded(family_model("llama, longrope")))
    with pytest.raises(EngineError, match="a sequence of 65 tokens does not fit the model's 64 positions"):
        engine.generate(prompts(["a" * 64]), sampling(), (0,))


def test_every_end_token_of_the_generation_config_ends(model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.generation_config.eos_token_id = list(range(128))
    path = tmp_path / "many-ends"
    model.save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    out = make(path).generate(prompts(), sampling(samples_per_prompt=8), (0,))
    for done, tokens in zip(out["finished"], completions(out), strict=True):
        assert done == (tokens[-1] < 128 or tokens[-1] == EOS)
        assert all(128 <= token != EOS for token in tokens[:-1])


def test_model_in_the_home_folder_is_found(model_path, monkeypatch):
    monkeypatch.setenv("HOME", str(model_path.parent))
    assert make(f"~/{model_path.name}").version == -1


@pytest.mark.parametrize("device", DEVICES)
@each_backend
def test_bfloat16_is_near_float32(model_path, backend, device):
    engine = make(model_path, precision="bf16", backend=backend, device=device)
    memory = engine.footprint()["weights"]
    assert memory == pytest.approx(make(model_path, backend=backend).footprint()["weights"] / 2, rel=0.01)
    out = engine.generate(prompts(), sampling(samples_per_prompt=2), (3,))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert_logprobs(model, out, 0.1)


def attention(queries, keys, values):
    return torch.softmax(queries.double() @ keys.double().mT / keys.shape[-1] ** 0.5, dim=-1) @ values.double()


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_does_not_round_large_scores(model_path, device):
    """Keys with large biases give scores a large common part: rounding it would hide their differences."""
    decoder, generator = make(model_path, precision="bf16", device=device)._decoder, torch.Generator().manual_seed(0)
    assert decoder.allocate(3, 64) == 3
    queries = (torch.randn(3, 2, 2, 8, generator=generator) + 10).to(device, torch.bfloat16)
    pasts = [torch.randn(2, 2, 2, length, 8, generator=generator) for length in (10, 25, 40)]
    for past in pasts:
        past[:, 0] += 10
        decoder._cache.add_row(past.to(device, torch.bfloat16))
    (part,) = decoder._cache.segments(heads=4)
    result = decoder._by_kernel(0, queries, part).cpu().double()
    for row, past in enumerate(pasts):
        assert (result[row] - attention(queries.cpu()[row], *past[0].bfloat16())).abs().max() < 0.02


@pytest.mark.parametrize("apart", [False, True])
def test_rows_of_any_length_attend_to_their_own_past(model_path, apart):
    decoder, generator = make(model_path)._decoder, torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (40,), generator=generator).tolist()
    assert decoder.allocate(40, 64) == 40
    if apart:
        decoder._cache._min_saving = 0
    pasts = [torch.randn(2, 2, 2, length, 8, generator=generator) for length in lengths]
    for past in pasts:
        decoder._cache.add_row(past)
    segments = decoder._cache.segments(heads=4)
    assert len(segments) == (3 if apart else 1)
    heads = torch.randn(40, 8, 8, generator=generator)
    result = decoder._attend(1, heads, segments).view(40, 2, 2, 8)
    for row, past in enumerate(pasts):
        assert torch.allclose(result[row].double(), attention(heads[row, :4].view(2, 2, 8), *past[1]), atol=1e-5)


# -- continuous batching ----------------------------------------------------------------------------------------------
class Watched:
    def __init__(self, engine):
        self._decoder, self.read, self.rows = engine._decoder, [], []
        engine._batch._decoder = self

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def prefill(self, sequences):
        self.read += [tokens.tolist() for tokens in sequences]
        return self._decoder.prefill(sequences)

    def step(self, tokens):
        self.rows.append(len(tokens))
        return self._decoder.step(tokens)


@pytest.mark.parametrize("max_batch", [1, 3, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (8, 64))])
@each_backend
def test_prompt_of_several_samples_is_read_once(model_path, backend, max_batch):
    engine = make(model_path, max_batch=max_batch, backend=backend)
    params = sampling(samples_per_prompt=7, max_new_tokens=10)
    expected = completions(make(model_path).generate(prompts(), params, (4,)))
    watched = Watched(engine)
    assert completions(engine.generate(prompts(), params, (4,))) == expected
    assert sorted(watched.read) == sorted(list(text.encode()) for text in TEXTS)
    assert max(watched.rows) <= max_batch


def test_free_row_is_taken_in_the_next_step(model_path):
    engine = make(model_path, max_batch=2)
    watched = Watched(engine)
    for number, length in enumerate((3, 8, 4, 2)):
        params = sampling(max_new_tokens=length, ignore_eos=True)
        engine.add([Request.fresh(number, 0, [5, 6, 7])], params, (1,))
    ended = []
    while engine.running:
        ended.append([item.request.prompt_id for item in engine.advance()])
    assert ended == [[], [], [0], [], [], [], [2], [1], [3]]
    assert watched.rows == [2, 2, 1, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("budget", [1, 20, 60, 8192])
def test_prompts_are_read_within_the_token_budget(model_path, budget):
    engine = make(model_path, backend={"prefill_tokens": budget})
    widths, calls = [], []
    prefill, add_rows = engine._decoder.prefill, engine._decoder.add_rows

    def watched(sequences):
        widths.append(len(sequences) * max(map(len, sequences)))
        calls.append("read")
        return prefill(sequences)

    engine._decoder.prefill = watched
    engine._decoder.add_rows = lambda prefixes: (calls.append("add"), add_rows(prefixes))[1]
    out = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    longest = max(map(len, TEXTS))
    assert all(width <= max(budget, longest) for width in widths)
    assert calls == ["read", "add"] * len(widths)
    assert completions(out) == completions(make(model_path).generate(prompts(), sampling(temperature=0.0), (0,)))


@each_backend
def test_longer_request_may_come_while_others_run(model_path, backend):
    engine = make(model_path, backend=backend)
    short, long = sampling(max_new_tokens=20), sampling(max_new_tokens=110)
    expected = completions(engine.generate(prompts(["abc"]), short, (1,)))
    engine = make(model_path, backend=backend)
    engine.add([Request.fresh(0, 0, list(b"abc"))], short, (1,))
    engine.advance()
    engine.add([Request.fresh(1, 0, list(b"defghi"))], long, (1,))
    done = drain(engine)
    assert done[0, 0].request.done.tolist() == expected[0]
    assert done[1, 0].finish in ("eos", "length")


# -- errors in the middle ---------------------------------------------------------------------------------------------
@each_backend
def test_nan_weights_are_an_error_until_whole_ones_come(model_path, backend):
    engine = make(model_path, backend=backend)
    sent = snapshot(model_path, 0)
    engine.receive(sent)
    expected = completions(engine.generate(prompts(), sampling(), (0,)))
    nan = {name: torch.full_like(sent.tensor(name), torch.nan) for name in sent.buffers}
    engine.receive(take_snapshot(nan.items(), 1))
    with pytest.raises(EngineError, match="NaN or infinite"):
        engine.generate(prompts(), sampling(), (0,))
    assert engine.running == 0
    engine.receive(sent, rewind=True)
    engine.add([Request.fresh(0, 0, list(TEXTS[0].encode()))], sampling(), (0,))
    for _ in range(3):
        engine.advance()
    engine.receive(take_snapshot(nan.items(), 1))
    with pytest.raises(EngineError, match="NaN or infinite"):
        engine.advance()
    assert engine.running == 1
    engine.receive(sent, rewind=True)
    (done,) = [item for _ in range(24) for item in engine.advance()]
    assert done.request.done.tolist() == expected[0]
    assert completions(engine.generate(prompts(), sampling(), (0,))) == expected


class Interrupted(WeightSnapshot):
    def tensor(self, name, device="cpu"):
        if name == list(self.buffers)[2]:
            raise MemoryError("no more room")
        return super().tensor(name, device)


def test_weights_written_in_part_are_not_served(model_path):
    engine, sent = make(model_path), snapshot(model_path, 1)
    engine.receive(snapshot(model_path, 0))
    fields = {field.name: getattr(sent, field.name) for field in dataclasses.fields(sent)}
    with pytest.raises(MemoryError):
        engine.receive(Interrupted(**fields))
    assert engine.version == -1
    with pytest.raises(EngineError, match="failed midway"):
        engine.generate(prompts(), sampling(), (0,))
    engine.receive(sent)
    assert len(engine.generate(prompts(), sampling(), (0,))) == 5


# -- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.feature(20)
@each_backend
def test_meta_leaves_no_weight_tensor(model_path, backend):
    gc.collect()
    before = {tensor.untyped_storage()._cdata for tensor in tensors()}
    engine = make(model_path, backend=backend)
    engine.generate(prompts(), sampling(), (0,))
    size = 32 * 32
    born = [
        StorageWeakRef(tensor.untyped_storage())
        for tensor in tensors()
        if tensor.untyped_storage()._cdata not in before and tensor.numel() >= size and not tensor.is_meta
    ]
    assert born
    engine.meta()
    gc.collect()
    assert not [storage for storage in born if not storage.expired()]
    engine.cuda()
    engine.receive(snapshot(model_path, 0))
    assert len(engine.generate(prompts(), sampling(), (0,))) == 5


@pytest.mark.feature(20)
@each_backend
def test_unchanged_weights_are_copied_to_the_host_once(model_path, backend):
    engine, rows = make(model_path, backend=backend), prompts()
    store, expected = engine._decoder.store, completions(engine.generate(rows, sampling(), (3,)))

    def sleep_and_wake_without_the_device_memory():
        for flat in store._flats.values():
            flat.zero_()
        engine.cpu()
        addresses = {kind: host.data_ptr() for kind, host in store._hosts.items()}
        engine.cuda()
        return addresses

    engine.cpu()
    engine.cuda()
    first = sleep_and_wake_without_the_device_memory()
    assert completions(engine.generate(rows, sampling(), (3,))) == expected
    engine.receive(snapshot(model_path, 1, 0.5))
    engine.cpu()
    engine.cuda()
    halved = completions(engine.generate(rows, sampling(), (3,)))
    assert halved != expected
    assert sleep_and_wake_without_the_device_memory() == first  # the same memory
    assert completions(engine.generate(rows, sampling(), (3,))) == halved


def tensors():
    every = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [tensor for tensor in every if tensor.layout is torch.strided]


def test_memory_of_an_engine_is_accounted_for(model_path):
    memory = DeviceMemory()
    first, second = make(model_path, memory), make(model_path, memory, max_batch=4)
    elements = sum(tensor.numel() for _, tensor in load_causal_lm(model_path).named_weights())
    assert first.footprint()["weights"] == pytest.approx(4 * elements, rel=0.02)
    assert first.footprint()["weights"] >= 4 * elements
    second.generate(prompts(), sampling(), (0,))
    layers, kv_heads, head_dim, length = 2, 2, 8, 128
    assert second.footprint()["kv_cache"] == 4 * layers * 2 * 4 * kv_heads * length * head_dim
    assert set(memory.by_owner()) == {"rollout engine", "rollout engine 2"}
    second.cpu()
    assert (second.footprint(), memory.total()) == ({}, first.footprint()["weights"])
    second.cuda("weights")
    assert set(second.footprint()) == {"weights"}
    second.cuda("kv_cache")
    assert set(second.footprint()) == {"weights", "kv_cache"}
    second.close()
    assert second.footprint() == {}


@pytest.mark.parametrize(("forward", "copies"), [("fused", 1), ("huggingface", 2)])
def test_little_memory_runs_fewer_sequences_at_a_time(model_path, forward, copies):
    params, backend = sampling(samples_per_prompt=3), {"forward": forward}
    expected = completions(make(model_path).generate(prompts(), params, (0,)))
    weights = make(model_path, backend=backend).footprint()["weights"]
    row = 4 * 2 * 2 * 2 * 8 * 128 * copies
    memory = DeviceMemory(capacity=weights + 3 * row)
    engine = make(model_path, memory, gpu_memory_utilization=1.0, backend=backend)
    watched = Watched(engine)
    assert completions(engine.generate(prompts(), params, (0,))) == expected
    assert max(watched.rows) == 3
    assert memory.peak <= weights + 3 * row


@pytest.mark.needs("cuda")
def test_replaced_cache_leaves_its_room_to_the_next(model_path):
    """PyTorch keeps what was freed, which the device then counts as taken."""
    memory = DeviceMemory("cuda")
    whole = torch.cuda.mem_get_info("cuda")[1]
    engine = make(model_path, memory, device="cuda", gpu_memory_utilization=0.5, max_batch=10**9)
    for length in (30, 100):
        engine.generate(prompts(), sampling(max_new_tokens=length), (0,))
        assert 0.3 * whole < engine.footprint()["kv_cache"] < 0.5 * whole


def test_missing_memory_names_its_holders(model_path):
    memory = DeviceMemory(capacity=20_000)
    with pytest.raises(OutOfDeviceMemory, match="rollout engine asks for .* bytes of weights"):
        make(model_path, memory)
    weights = make(model_path).footprint()["weights"]
    engine = make(model_path, DeviceMemory(capacity=weights + 100))
    with pytest.raises(OutOfDeviceMemory, match=f"bytes of kv_cache .*rollout engine: {weights:,} of weights"):
        engine.generate(prompts(), sampling(), (0,))
    assert engine.running == 0
