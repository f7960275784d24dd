# SPDX-License-Identifier: Apache-2.0
"""The PyTorch rollout engine, beyond what every engine's contract asks: its models, its cache, its memory."""

import dataclasses
import gc

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class
from dlrover.python.rl.engine.api.weights import WeightSnapshot, take_snapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.loading import as_causal_lm
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, write_tiny_model
from dlrover.python.rl.engine.rollout_torch.decoder import HuggingFaceDecoder
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.rollout_torch.fused import FusedDecoder
from tests.support.torch_models import EOS, FUSED, GENERIC, family_model, greedy, loaded, logprobs

TEXTS = ["a", "what is the answer to this?", "37+45=", "a longer prompt than all of the others, by far", "xyz"]
BOTH = [{"forward": "fused"}, {"forward": "huggingface"}]
needs_cuda = pytest.mark.needs("cuda")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)


def made(model, memory=None, **settings):
    return TorchRolloutEngine(model, RolloutSettings(**settings), memory)


def prompts(texts=TEXTS):
    rows = [list(text.encode()) for text in texts]
    return Batch({"prompt_id": np.arange(len(rows)), "tokens": Ragged.from_rows(rows, dtype=np.int64)})


def sampling(**changes):
    return dataclasses.replace(SamplingParams(max_new_tokens=24), **changes)


def completions(out):
    pairs = zip(out.ragged("tokens"), out.ragged("action_mask"), strict=True)
    return [tokens[mask].tolist() for tokens, mask in pairs]


def weights_of(path, version=0, scale=1.0):
    named = load_causal_lm(path).named_weights()
    return take_snapshot(((name, tensor * scale) for name, tensor in named), version)


# -- models -----------------------------------------------------------------------------------------------------------


QUICK = ("llama, llama3 rope", "mistral, wide heads", "qwen2", "qwen3, tied", "qwen2, sliding", "gemma2", "gpt2")


@pytest.mark.parametrize(
    "label",
    [*QUICK, *(pytest.param(label, marks=pytest.mark.slow) for label in (*FUSED, *GENERIC) if label not in QUICK)],
)
def test_a_model_of_each_family_draws_what_the_library_draws(label):
    model = family_model(label)
    engine = made(loaded(model), max_batch=3)
    assert type(engine._decoder) is (FusedDecoder if label in FUSED else HuggingFaceDecoder)
    out = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    assert completions(out) == [greedy(model, text.encode(), 24) for text in TEXTS]
    drawn = engine.generate(prompts(), sampling(temperature=0.7, samples_per_prompt=2), (3,))
    for tokens, told, mask in zip(*(drawn.ragged(name) for name in ("tokens", "logprobs", "action_mask")), strict=True):
        assert np.abs(logprobs(model, tokens, 0.7) - told[1:])[mask[1:]].max() < 1e-4


@pytest.mark.parametrize("label", ["qwen2, tied", "qwen3", "llama, tied, with biases", "gpt2"])
def test_weights_arrive_in_place_under_the_checkpoints_names(label):
    model, other = family_model(label), family_model(label)
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    engine = made(loaded(model))
    engine.receive(take_snapshot(loaded(other).named_weights(), 4))
    out = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    assert completions(out) == [greedy(other, text.encode(), 24) for text in TEXTS]


def test_models_with_other_states_than_keys_and_values_are_refused():
    shared = {"vocab_size": 259, "hidden_size": 16, "eos_token_id": EOS, "pad_token_id": 256}
    mamba = MambaForCausalLM(MambaConfig(**shared, num_hidden_layers=1))
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    layers = ["conv", "full_attention"]
    lfm = Lfm2ForCausalLM(Lfm2Config(**shared, **heads, num_hidden_layers=2, layer_types=layers))
    for name, model in {"mamba": mamba, "lfm2": lfm}.items():
        with pytest.raises(EngineError, match=f"'{name}' keeps a state"):
            made(as_causal_lm(model, make_byte_tokenizer()))


def test_rows_that_would_change_the_positions_of_others_are_refused():
    engine = made(loaded(family_model("llama, longrope")))
    with pytest.raises(EngineError, match="a sequence of 65 tokens does not fit the model's 64 positions"):
        engine.generate(prompts(["a" * 64]), sampling(), (0,))


def test_a_model_without_an_end_is_refused():
    lm = dataclasses.replace(loaded(family_model("qwen2")), eos_ids=())
    with pytest.raises(EngineError, match="no end-of-sequence"):
        made(lm)


def test_every_end_token_of_the_generation_config_ends(model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.generation_config.eos_token_id = list(range(128))
    path = tmp_path / "many-ends"
    model.save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    out = made(path).generate(prompts(), sampling(samples_per_prompt=8), (0,))
    for done, tokens in zip(out["finished"], completions(out), strict=True):
        assert done == (tokens[-1] < 128 or tokens[-1] == EOS)
        assert all(128 <= token != EOS for token in tokens[:-1])


def test_a_model_in_the_home_folder_is_found(model_path, monkeypatch):
    monkeypatch.setenv("HOME", str(model_path.parent))
    assert made(f"~/{model_path.name}").version == -1
    with pytest.raises(EngineError, match="it is not a folder"):
        made("~/absent")


@pytest.mark.feature(14)
def test_the_registrys_torch_engine_generates_on_a_cpu(model_path):
    engine = engine_class(ROLLOUT_ENGINES, "torch")(model_path, RolloutSettings())
    assert len(engine.generate(prompts(), sampling(), (0,))) == 5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BOTH)
def test_bfloat16_is_near_float32(model_path, backend, device):
    engine = made(model_path, precision="bf16", backend=backend, device=device)
    memory = engine.footprint()["weights"]
    assert memory == pytest.approx(made(model_path, backend=backend).footprint()["weights"] / 2, rel=0.01)
    out = engine.generate(prompts(), sampling(samples_per_prompt=2), (3,))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for tokens, told, mask in zip(*(out.ragged(name) for name in ("tokens", "logprobs", "action_mask")), strict=True):
        assert np.abs(logprobs(model, tokens) - told[1:])[mask[1:]].max() < 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_in_bfloat16_large_scores_are_not_rounded(model_path, device):
    """Where keys have large biases, scores share a large part: rounding it would drown what they differ in."""
    decoder, generator = made(model_path, precision="bf16", device=device)._decoder, torch.Generator().manual_seed(0)
    assert decoder.allocate(3, 64) == 3
    queries = (torch.randn(3, 2, 2, 8, generator=generator) + 10).to(device, torch.bfloat16)
    pasts = [torch.randn(2, 2, 2, length, 8, generator=generator) for length in (10, 25, 40)]
    for past in pasts:
        past[:, 0] += 10
        decoder._cache.add_row(past.to(device, torch.bfloat16))
    (part,) = decoder._cache.segments(heads=4)
    found = decoder._by_kernel(0, queries, part).cpu().double()
    for row, past in enumerate(pasts):
        keys, values = past[0].bfloat16().double()
        shares = torch.softmax(queries.cpu().double()[row] @ keys.mT / 8**0.5, dim=-1)
        assert (found[row] - shares @ values).abs().max() < 0.02


@pytest.mark.parametrize("apart", [False, True])
def test_rows_of_any_length_attend_to_what_is_theirs(model_path, apart):
    decoder, generator = made(model_path)._decoder, torch.Generator().manual_seed(0)
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
    found = decoder._attend(1, heads, segments).view(40, 2, 2, 8)
    for row, past in enumerate(pasts):
        keys, values = past[1].double()
        shares = torch.softmax(heads[row, :4].double().view(2, 2, 8) @ keys.mT / 8**0.5, dim=-1)
        assert torch.allclose(found[row].double(), shares @ values, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": {"forwrd": "fused"}}, "unknown key 'forwrd'; did you mean 'forward'"),
        ({"backend": {"prefill_tokens": 0}}, "prefill_tokens"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
    ],
)
def test_settings_that_it_does_not_know_are_refused(model_path, settings, message):
    with pytest.raises(EngineError, match=message):
        made(model_path, **settings)


def test_the_fused_pass_is_refused_where_it_does_not_fit():
    with pytest.raises(EngineError, match="does not support model type 'gpt2'"):
        made(loaded(family_model("gpt2")), backend={"forward": "fused"})


# -- continuous batching ----------------------------------------------------------------------------------------------


class Watched:
    """A decoder that counts what is asked of it."""

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
@pytest.mark.parametrize("backend", BOTH)
def test_the_prompt_of_n_samples_is_read_once_whatever_room_there_is(model_path, backend, max_batch):
    engine = made(model_path, max_batch=max_batch, backend=backend)
    params = sampling(samples_per_prompt=7, max_new_tokens=10)
    expected = completions(made(model_path).generate(prompts(), params, (4,)))
    watched = Watched(engine)
    assert completions(engine.generate(prompts(), params, (4,))) == expected
    assert watched.read == [list(text.encode()) for text in TEXTS] or sorted(watched.read) == sorted(
        list(text.encode()) for text in TEXTS
    )
    assert max(watched.rows) <= max_batch


def test_a_row_that_is_free_is_taken_in_the_next_step(model_path):
    engine = made(model_path, max_batch=2)
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
def test_prompts_are_read_within_the_token_budget_and_get_rows_before_the_next_are(model_path, budget):
    engine = made(model_path, backend={"prefill_tokens": budget})
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
    assert completions(out) == completions(made(model_path).generate(prompts(), sampling(temperature=0.0), (0,)))


def test_only_those_that_have_a_row_have_their_random_numbers_in_memory(model_path):
    engine = made(model_path, max_batch=2)
    engine.add([Request.fresh(number, 0, [5, 6, 7]) for number in range(9)], sampling(ignore_eos=True), (1,))
    engine.advance()
    assert [number for number, running in engine._requests.by_number.items() if "uniform" in vars(running)] == [0, 1]


@pytest.mark.parametrize("backend", BOTH)
def test_a_longer_request_may_come_while_others_run(model_path, backend):
    engine = made(model_path, backend=backend)
    short, long = sampling(max_new_tokens=20), sampling(max_new_tokens=110)
    expected = completions(engine.generate(prompts(["abc"]), short, (1,)))
    engine = made(model_path, backend=backend)
    engine.add([Request.fresh(0, 0, list(b"abc"))], short, (1,))
    engine.advance()
    engine.add([Request.fresh(1, 0, list(b"defghi"))], long, (1,))
    done = {}
    while engine.running:
        done.update({item.request.prompt_id: item for item in engine.advance()})
    assert done[0].request.done.tolist() == expected[0]
    assert done[1].finish in ("eos", "length")


# -- errors in the middle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BOTH)
def test_broken_weights_are_an_error_not_a_sample_and_whole_ones_mend_it(model_path, backend):
    engine = made(model_path, backend=backend)
    sent = weights_of(model_path)
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


def test_a_step_that_breaks_off_leaves_the_requests_as_they_were(model_path):
    engine = made(model_path)
    params = sampling(samples_per_prompt=2)
    expected = completions(engine.generate(prompts(), params, (0,)))
    step, calls = engine._decoder.step, []

    def interrupted(tokens):
        calls.append(len(tokens))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(tokens)

    engine._decoder.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts(), params, (0,))
    assert engine.running == 0
    assert completions(engine.generate(prompts(), params, (0,))) == expected


class Interrupted(WeightSnapshot):
    """Breaks off when the third tensor is read."""

    def tensor(self, name, device="cpu"):
        if name == list(self.buffers)[2]:
            raise MemoryError("no more room")
        return super().tensor(name, device)


def test_a_sync_that_breaks_off_while_it_writes_leaves_nothing_that_is_served(model_path):
    engine, sent = made(model_path), weights_of(model_path, 1)
    engine.receive(weights_of(model_path))
    fields = {field.name: getattr(sent, field.name) for field in dataclasses.fields(sent)}
    with pytest.raises(MemoryError):
        engine.receive(Interrupted(**fields))
    assert engine.version == -1
    with pytest.raises(EngineError, match="failed midway"):
        engine.generate(prompts(), sampling(), (0,))
    engine.receive(sent)
    assert len(engine.generate(prompts(), sampling(), (0,))) == 5


@pytest.mark.parametrize("backend", BOTH)
def test_some_requests_are_aborted_from_a_cache_that_has_only_been_stepped(model_path, backend):
    engine = made(model_path, backend=backend)
    engine.receive(weights_of(model_path))
    asked = sampling(ignore_eos=True)
    undisturbed = completions(engine.generate(prompts(), asked, (0,)))
    engine = made(model_path, backend=backend)
    engine.receive(weights_of(model_path))
    rows = prompts().ragged("tokens")
    engine.add([Request.fresh(number, 0, tokens) for number, tokens in enumerate(rows)], asked, (0,))
    engine.advance()
    aborted = engine.abort([(0, 0), (2, 0)])
    assert [completion.finish for completion in aborted] == ["aborted", "aborted"]
    ended = {}
    while engine.running:
        ended |= {each.request.prompt_id: each.request.done.tolist() for each in engine.advance()}
    assert ended == {number: undisturbed[number] for number in range(len(rows)) if number not in (0, 2)}


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.feature(20)
@pytest.mark.parametrize("backend", BOTH)
def test_after_meta_no_weight_tensor_is_alive(model_path, backend):
    gc.collect()
    before = {tensor.untyped_storage()._cdata for tensor in tensors()}
    engine = made(model_path, backend=backend)
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
    engine.receive(weights_of(model_path))
    assert len(engine.generate(prompts(), sampling(), (0,))) == 5


@pytest.mark.feature(20)
@pytest.mark.parametrize("backend", BOTH)
def test_weights_that_have_not_changed_are_not_copied_to_the_host_again(model_path, backend):
    engine, rows = made(model_path, backend=backend), prompts()
    store, expected = engine._decoder.store, completions(engine.generate(rows, sampling(), (3,)))

    def wake_after_a_sleep_that_loses_what_is_on_the_device():
        for flat in store._flats.values():
            flat.zero_()
        engine.cpu()
        kept = {kind: host.data_ptr() for kind, host in store._hosts.items()}
        engine.cuda()
        return kept

    engine.cpu()
    engine.cuda()
    first = wake_after_a_sleep_that_loses_what_is_on_the_device()
    assert completions(engine.generate(rows, sampling(), (3,))) == expected
    engine.receive(weights_of(model_path, version=1, scale=0.5))
    engine.cpu()
    engine.cuda()
    halved = completions(engine.generate(rows, sampling(), (3,)))
    assert halved != expected
    assert wake_after_a_sleep_that_loses_what_is_on_the_device() == first  # the same memory
    assert completions(engine.generate(rows, sampling(), (3,))) == halved


def tensors():
    found = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return [tensor for tensor in found if tensor.layout is torch.strided]


def test_what_the_engine_holds_is_accounted_for_by_name(model_path):
    memory = DeviceMemory()
    first, second = made(model_path, memory), made(model_path, memory, max_batch=4)
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
def test_with_little_memory_fewer_sequences_run_at_a_time_and_draw_the_same(model_path, forward, copies):
    params, backend = sampling(samples_per_prompt=3), {"forward": forward}
    expected = completions(made(model_path).generate(prompts(), params, (0,)))
    weights = made(model_path, backend=backend).footprint()["weights"]
    row = 4 * 2 * 2 * 2 * 8 * 128 * copies
    memory = DeviceMemory(capacity=weights + 3 * row)
    engine = made(model_path, memory, gpu_memory_utilization=1.0, backend=backend)
    watched = Watched(engine)
    assert completions(engine.generate(prompts(), params, (0,))) == expected
    assert max(watched.rows) == 3
    assert memory.peak <= weights + 3 * row


@needs_cuda
def test_a_cache_that_is_replaced_leaves_its_room_to_the_next(model_path):
    """PyTorch keeps what was freed, which the device then counts as taken."""
    memory = DeviceMemory("cuda")
    whole = torch.cuda.mem_get_info("cuda")[1]
    engine = made(model_path, memory, device="cuda", gpu_memory_utilization=0.5, max_batch=10**9)
    for length in (30, 100):
        engine.generate(prompts(), sampling(max_new_tokens=length), (0,))
        assert 0.3 * whole < engine.footprint()["kv_cache"] < 0.5 * whole


def test_what_does_not_fit_says_who_holds_what(model_path):
    memory = DeviceMemory(capacity=20_000)
    with pytest.raises(OutOfDeviceMemory, match="rollout engine asks for .* bytes of weights"):
        made(model_path, memory)
    weights = made(model_path).footprint()["weights"]
    engine = made(model_path, DeviceMemory(capacity=weights + 100))
    with pytest.raises(OutOfDeviceMemory, match=f"bytes of kv_cache .*rollout engine: {weights:,} of weights"):
        engine.generate(prompts(), sampling(), (0,))
    assert engine.running == 0


def test_what_finds_no_room_while_it_computes_says_who_holds_what(model_path):
    engine = made(model_path)
    weights, step = engine.footprint()["weights"], engine._decoder.step
    expected = completions(engine.generate(prompts(), sampling(), (0,)))

    def full(tokens):
        raise torch.OutOfMemoryError("no room for the scores")

    engine._decoder.step = full
    message = f"ran out of memory while computing on cpu.*rollout engine: {weights:,} of weights \\+ .* of kv_cache"
    with pytest.raises(OutOfDeviceMemory, match=message):
        engine.generate(prompts(), sampling(), (0,))
    engine._decoder.step = step
    assert completions(engine.generate(prompts(), sampling(), (0,))) == expected


@pytest.mark.feature(22)
def test_releasing_the_allocators_cache_is_safe_on_a_cpu():
    DeviceMemory().release_cache()


def test_another_devices_memory_is_refused(model_path):
    with pytest.raises(EngineError, match="runs on cpu, but its DeviceMemory is of cuda"):
        made(model_path, DeviceMemory(device="cuda"))
