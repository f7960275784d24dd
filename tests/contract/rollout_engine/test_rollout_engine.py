# SPDX-License-Identifier: Apache-2.0
"""The contract of rollout engines: samples and their log-probs, single requests, places, and new weights."""

import asyncio
import dataclasses
import time

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.common.progress import noted_progress
from dlrover.python.rl.common.spans import record_phases
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import Request, TrainSettings
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_info
from dlrover.python.rl.engine.api.rollout_server import RolloutServer
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout.sampling import cut
from tests.support.rollout_cases import EOS, TEXTS, Reference, completions, drain, drawn, prompts, requests, sampling


# -- what comes back --------------------------------------------------------------------------------------------------
def test_output_has_its_columns(engine):
    """Progress is noted at least as often as the engine gives tokens out: else a long call would be treated as hung."""
    before = noted_progress()
    out = engine.generate(prompts(), sampling(samples_per_prompt=3), (1,))
    assert noted_progress() > before
    ragged = {"tokens": "int64", "action_mask": "bool", "logprobs": "float32"}
    dense = {"prompt_id": "int64", "sample_index": "int64", "version": "int64", "finished": "bool"}
    assert {name: out.ragged(name).values.dtype for name in ragged} == ragged
    assert {name: out.dense(name).dtype for name in dense} == dense
    assert all(np.array_equal(out.ragged(name).offsets, out.ragged("tokens").offsets) for name in ragged)
    for columns, rows in ((out, 15), (engine.generate(prompts([]), sampling(), (1,)), 0)):
        assert (set(columns.columns), len(columns)) == ({*ragged, *dense, "completion"}, rows)
    actions = out.ragged("action_mask").values
    assert (out.ragged("logprobs").values[~actions] == 0).all()
    assert (out.ragged("logprobs").values[actions] < 0).all()


@pytest.mark.feature(81)
def test_output_is_in_the_order_of_prompts_and_samples(engine):
    out = engine.generate(prompts(first_id=7), sampling(samples_per_prompt=4), (1,))
    assert out["prompt_id"].tolist() == [7 + row // 4 for row in range(20)]
    assert out["sample_index"].tolist() == [0, 1, 2, 3] * 5
    for row in range(len(out)):
        text = TEXTS[row // 4].encode()
        assert out.ragged("tokens")[row][: len(text)].tolist() == list(text)
        assert out.ragged("action_mask")[row].tolist().index(True) == len(text)


def test_greedy_completion_is_the_librarys(engine, reference):
    out = engine.generate(prompts(), sampling(temperature=0.0, samples_per_prompt=2), (0,))
    assert completions(out)[::2] == [reference.greedy(text.encode(), 24) for text in TEXTS] == completions(out)[1::2]


# -- what a sample depends on -----------------------------------------------------------------------------------------
@pytest.mark.feature(82)
@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 20}])
def test_prompt_draws_the_same_alone_and_in_a_batch(engine, changes):
    params = sampling(samples_per_prompt=4, max_new_tokens=60, **changes)
    together = engine.generate(prompts(), params, (3, 5))
    alone = Batch.concat([engine.generate(prompts().rows(row, row + 1), params, (3, 5)) for row in range(len(TEXTS))])
    assert completions(together) == completions(alone)
    assert np.allclose(together.ragged("logprobs").values, alone.ragged("logprobs").values, atol=1e-5)


def test_seed_prompt_and_index_change_the_sample(engine):
    def draw(first_id, seed):
        return completions(engine.generate(prompts(["go"], first_id), sampling(samples_per_prompt=2), seed))

    base = draw(0, (1, 2))
    assert base == draw(0, (1, 2))
    assert base[0] != base[1]
    for other in (draw(1, (1, 2)), draw(0, (1, 3)), draw(0, (12,))):
        assert base[0] != other[0]


def test_fewer_and_shorter_samples_begin_longer_ones(engine):
    long = completions(engine.generate(prompts(), sampling(max_new_tokens=20, samples_per_prompt=3), (4,)))
    short = completions(engine.generate(prompts(), sampling(max_new_tokens=5, samples_per_prompt=2), (4,)))
    assert short == [tokens[:5] for row, tokens in enumerate(long) if row % 3 < 2]


def test_random_state_of_the_process_is_unused(engine):
    samples = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        samples.append(completions(engine.generate(prompts(), sampling(), (4,))))
        assert torch.equal(torch.get_rng_state(), state)
    assert samples[0] == samples[1]


# -- log-probs --------------------------------------------------------------------------------------------------------
def expected_logprobs(reference, out, temperature, change=lambda logprobs: logprobs):
    values = []
    for tokens, actions in zip(out.ragged("tokens"), out.ragged("action_mask"), strict=True):
        reference_logprobs = change(reference.logprobs(tokens, temperature))
        picked = reference_logprobs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
        values.append(np.where(actions[1:], picked, 0.0))
    return np.concatenate([np.concatenate([[0.0], row]) for row in values])


@pytest.mark.feature(84, 123)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
def test_logprobs_are_the_models(engine, reference, temperature):
    out = engine.generate(prompts(), sampling(temperature=temperature, samples_per_prompt=4), (2,))
    expected = expected_logprobs(reference, out, temperature)
    assert np.abs(expected - out.ragged("logprobs").values).max() < 1e-4


@pytest.mark.feature(123)
@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.4}, {"top_k": 30, "top_p": 0.5}], ids=str)
def test_cut_logprobs_are_of_the_requested_distribution(kind, engine, reference, limits):
    params = sampling(temperature=0.7, samples_per_prompt=4, **limits)
    if not kind.tells_cut:
        with pytest.raises(EngineError, match="top_k"):
            engine.check(prompts().ragged("tokens"), dataclasses.replace(params, logprobs="sampled"))
        return
    whole = engine.generate(prompts(), params, (2,))
    assert np.abs(expected_logprobs(reference, whole, 0.7) - whole.ragged("logprobs").values).max() < 1e-4
    sampled = engine.generate(prompts(), dataclasses.replace(params, logprobs="sampled"), (2,))
    assert completions(sampled) == completions(whole)
    top_k, top_p = limits.get("top_k"), limits.get("top_p", 1.0)
    expected = expected_logprobs(reference, sampled, 0.7, lambda each: cut(each, top_k, top_p).log_softmax(-1))
    assert np.isfinite(expected).all(), "a token was drawn that had been cut off"
    assert np.abs(expected - sampled.ragged("logprobs").values).max() < 1e-4


# -- where a completion ends ------------------------------------------------------------------------------------------
@pytest.mark.feature(85)
def test_end_of_sequence_is_trained_and_ends_a_sample(engine):
    out = engine.generate(prompts(), sampling(max_new_tokens=60, samples_per_prompt=16), (0,))
    assert 0 < out["finished"].sum() < len(out)
    for done, tokens in zip(out["finished"], completions(out), strict=True):
        assert (tokens[-1] == EOS) == done
        assert EOS not in tokens[:-1]
        assert done or len(tokens) == 60


def test_end_of_sequence_can_be_ignored(engine):
    params = sampling(max_new_tokens=60, samples_per_prompt=16)
    ended = completions(engine.generate(prompts(), params, (0,)))
    out = engine.generate(prompts(), dataclasses.replace(params, ignore_eos=True), (0,))
    assert out.ragged("action_mask").values.sum() == 60 * len(out)
    assert not out["finished"].any()
    assert [tokens[: len(first)] for tokens, first in zip(completions(out), ended, strict=True)] == ended
    assert any(EOS in tokens[:-1] for tokens in completions(out))


@pytest.mark.feature(83)
def test_stop_string_ends_a_completion(engine):
    params = sampling(max_new_tokens=40, samples_per_prompt=16, ignore_eos=True)
    out = engine.generate(prompts(["go"]), params, (8,))
    row = max(range(16), key=lambda row: len(out.objects("completion")[row].encode("ascii", "ignore")))
    tokens = completions(out)[row]
    at = next(at for at in range(8, 38) if all(32 < token < 127 for token in tokens[at : at + 2]))
    stop = bytes(tokens[at : at + 2]).decode()
    before = engine.tokenizer.decode(tokens[: at + 2], skip_special_tokens=True)
    assert before.index(stop) == len(before) - 2, "the stop string comes here first"
    stopping = dataclasses.replace(params, stop=("never this", stop))
    for keep, text in ((False, before[:-2]), (True, before)):
        out = engine.generate(prompts(["go"]), dataclasses.replace(stopping, keep_stop=keep), (8,))
        assert completions(out)[row] == tokens[: at + 2]
        assert out.objects("completion")[row] == text
        assert out["finished"][row]


# -- refusals: nothing starts -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        (["ok", "x" * 128], {}, "129 tokens"),
        (["ok", ""], {}, r"\[1\]"),
        (["ok"], {"temperature": -0.1}, "temperature: .*got -0.1"),
        (["ok"], {"max_new_tokens": 0}, "max_new_tokens: .*got 0"),
        (["ok"], {"samples_per_prompt": 0}, "samples_per_prompt: .*got 0"),
        (["ok"], {"top_k": 0}, "top_k: .*got 0"),
        (["ok"], {"top_p": 0.0}, "top_p: .*got 0.0"),
        (["ok"], {"stop": ("",)}, "stop"),
        (["ok"], {"stop": "text"}, "stop: .*got 'text'"),
        (["ok"], {"logprobs": "both"}, "logprobs: .*got 'both'"),
    ],
)
def test_bad_prompt_or_sampling_is_refused(engine, texts, changes, message):
    batch, params = prompts(texts), sampling(**changes)
    with pytest.raises(EngineError, match=message):
        engine.check(batch.ragged("tokens"), params)
    with pytest.raises(EngineError, match=message):
        engine.generate(batch, params, (0,))
    assert engine.running == 0


# -- ids that the tokenizer does not have: a model whose embedding has more rows, as every Qwen's has ----------------
TOKENS, ROWS = 259, 320

SAMPLING = {"temperature 1": {}, "cooled": {"temperature": 0.7}, "top_k": {"top_k": 200}, "top_p": {"top_p": 0.9}}


@pytest.fixture(scope="module")
def padded_path(kind, tmp_path_factory):
    if not engine_info(ROLLOUT_ENGINES, kind.name).masks_unknown_ids:
        pytest.skip(f"{kind.name} samples from all ids")
    path = tmp_path_factory.mktemp("models") / "padded"
    return write_tiny_model(path, hidden=kind.hidden, layers=2, max_positions=128, rows=ROWS)


@pytest.fixture(scope="module")
def sides(kind, padded_path):
    """A rollout engine and a train engine, both with the mask or both without; made once."""
    pairs = {}
    for masked in (True, False):
        train = Fsdp2TrainEngine(padded_path, None, TrainSettings(mask_unknown_ids=masked))
        engine = kind.make(padded_path, mask_unknown_ids=masked)
        engine.receive(train.publish())
        pairs[masked] = engine, train
    yield pairs
    for engine, _ in pairs.values():
        engine.close()


def ratios(rollouts, train, temperature):
    trained = train.evaluate(rollouts.select("tokens", "action_mask"), temperature).ragged("logprobs").values
    actions = rollouts.ragged("action_mask").values
    return np.exp((trained - rollouts.ragged("logprobs").values)[actions])


@pytest.mark.parametrize("name", SAMPLING)
def test_ratio_is_1_before_the_first_update(sides, name):
    options = sampling(samples_per_prompt=8, ignore_eos=True, **SAMPLING[name])
    rollouts = {masked: engine.generate(prompts(), options, (5,)) for masked, (engine, _) in sides.items()}
    for masked, (_, train) in sides.items():
        assert abs(ratios(rollouts[masked], train, options.temperature) - 1).max() < 1e-3
    assert abs(ratios(rollouts[True], sides[False][1], options.temperature) - 1).mean() > 0.02, "one side alone"
    shares = {masked: np.mean(np.concatenate(completions(out)) >= TOKENS) for masked, out in rollouts.items()}
    assert shares[True] == 0
    assert shares[False] > 0.15


def test_greedy_takes_no_unknown_id(kind, padded_path):
    train = Fsdp2TrainEngine(padded_path, None, TrainSettings(mask_unknown_ids=True))
    engine = kind.make(padded_path)
    named = dict(train.named_weights())
    with torch.no_grad():  # the unknown rows point to where every token's state is, more or less
        named["model.embed_tokens.weight"][TOKENS:] = 4 * named["model.norm.weight"]
    engine.receive(train.publish())
    assert max(map(max, completions(engine.generate(prompts(), sampling(temperature=0.0), (0,))))) < TOKENS
    engine.close()


PARAMS = sampling(max_new_tokens=30, samples_per_prompt=3)


def whole(engine, params=PARAMS, seed=(6,)):
    out = engine.generate(prompts(), params, seed)
    return dict(zip(zip(out["prompt_id"], out["sample_index"], strict=True), completions(out), strict=True))


def test_completion_has_its_request_with_all_columns(engine):
    engine.add(requests(), sampling(), (6,))
    for item in drain(engine).values():
        request = item.request
        assert request.prompt.tolist() == list(TEXTS[request.prompt_id].encode())
        assert (request.done.dtype, request.logprobs.dtype, request.versions.dtype) == ("int64", "float32", "int64")
        assert len(request.done) == len(request.logprobs) == len(request.versions)
        assert item.finish == ("length" if len(request.done) == 24 else "eos")
        assert item.text == engine.tokenizer.decode(request.done, skip_special_tokens=True)


def test_later_requests_change_no_running_one(engine):
    expected = whole(engine)
    batch = requests(samples=3)
    engine.add(batch[:4], PARAMS, (6,))
    done = {}
    for part in (batch[4:9], batch[9:]):
        for _ in range(3):
            done.update({item.request.key: item for item in engine.advance()})
        engine.add(part, PARAMS, (6,))
    assert drawn({**done, **drain(engine)}) == expected


def test_requests_of_several_samplings_run_together(kind, engine):
    cut = sampling(top_k=7, logprobs="sampled" if kind.tells_cut else "policy")
    kinds = [sampling(temperature=0.0), sampling(temperature=0.6), cut, sampling()]
    kinds = [dataclasses.replace(params, max_new_tokens=6 + 5 * place) for place, params in enumerate(kinds)]
    alone = {}
    for params, request in zip(kinds, requests(), strict=False):
        engine.add([request], params, (2,))
        alone.update(drain(engine))
    for params, request in zip(kinds, requests(), strict=False):
        engine.add([request], params, (2,))
    together = drain(engine)
    assert drawn(together) == drawn(alone)
    for key, item in together.items():
        assert np.allclose(item.request.logprobs, alone[key].request.logprobs, atol=1e-5)


@pytest.mark.feature(96)
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_aborted_request_continues_with_the_same_tokens(engine, steps):
    expected = whole(engine)
    engine.add(requests(samples=3), PARAMS, (6,))
    done = {}
    for _ in range(steps):
        done.update({item.request.key: item for item in engine.advance()})
    aborted = engine.abort()
    assert engine.running == 0
    assert {item.finish for item in aborted} == {"aborted"}
    assert len(done) + len(aborted) == 15
    for item in aborted:
        assert item.request.done.tolist() == expected[item.request.key][: len(item.request.done)]
    engine.add([item.request for item in aborted], PARAMS, (6,))
    assert drawn({**done, **drain(engine)}) == expected


def test_abort_of_some_requests_leaves_the_others(engine):
    expected = whole(engine)
    engine.add(requests(samples=3), PARAMS, (6,))
    done = {item.request.key: item for _ in range(2) for item in engine.advance()}
    keys = [(1, 0), (4, 2)]
    aborted = engine.abort(keys)
    assert [item.request.key for item in aborted] == keys
    done.update(drain(engine))
    assert drawn(done) == {key: tokens for key, tokens in expected.items() if key not in keys}


def test_paused_server_generates_nothing_and_keeps_requests(engine):
    async def complete(pauses):
        server, limit = RolloutServer(engine), sampling(temperature=0.0, max_new_tokens=12)
        pending = [server.submit(request, limit, (1,)) for request in requests()]
        assert server.step()
        if pauses:
            server.pause()
            assert not server.step() and engine.running == 0
            server.resume()
        while server.step():
            pass
        return [(await server.wait(each)).request.done.tolist() for each in pending]

    assert asyncio.run(complete(True)) == asyncio.run(complete(False))


def test_most_of_a_call_is_in_phases(engine, reference):
    weights = reference.snapshot(1, scale=1.02)
    began_s = time.perf_counter()
    with record_phases() as phases:
        engine.generate(prompts(), sampling(max_new_tokens=32), (7,))
    assert 0.5 * (time.perf_counter() - began_s) < sum(phases.values()) and "generate" in phases
    with record_phases() as phases:
        engine.receive(weights)
    assert list(phases) == ["load weights"]


@pytest.mark.feature(96)
def test_tokens_have_the_version_of_their_weights(engine, reference):
    params = sampling(max_new_tokens=64, temperature=0.0, ignore_eos=True)
    engine.add(requests(), params, (6,))
    for _ in range(4):
        engine.advance()
    engine.receive(reference.snapshot(1, scale=1.02))
    done = drain(engine)
    for item in done.values():
        request, versions = item.request, item.request.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        first = versions.index(1)
        columns = {name: getattr(request, name)[:first] for name in ("done", "logprobs", "versions")}
        past = dataclasses.replace(request, **columns)
        engine.add([past], params, (6,))
        alone = drain(engine)[request.key].request
        assert alone.done.tolist() == request.done.tolist(), "the past was not read with the new weights"
        assert np.allclose(alone.logprobs, request.logprobs, atol=1e-5)


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_sequence_ends_at_the_longest_length(engine, kind):
    full, short = "x" * (kind.longest - 1), "x" * 20
    engine.add(requests([full, short]), sampling(max_new_tokens=12, ignore_eos=True), (1,))
    ends = {key: (item.finish, len(item.request.done)) for key, item in drain(engine).items()}
    assert ends == {(0, 0): ("length", 1), (1, 0): ("length", 12)}
    with pytest.raises(EngineError, match=f"{kind.longest + 1} tokens does not fit"):
        engine.add(requests(["x" * kind.longest]), sampling(), (1,))
    assert engine.running == 0


def test_bad_request_is_refused_and_changes_nothing(engine):
    engine.add(requests(TEXTS[:2]), PARAMS, (6,))
    fresh = Request.fresh(9, 0, [1, 2])

    def resumed(done):
        columns = {"logprobs": np.zeros(len(done), np.float32), "versions": np.zeros(len(done), np.int64)}
        return dataclasses.replace(fresh, sample_index=1, done=np.array(done), **columns)

    for bad, message in (
        (requests(TEXTS[:1])[0], r"\(0, 0\) runs already"),
        (Request.fresh(9, 1, []), "empty"),
        (Request.fresh(9, 1, [300]), "0 to 258"),
        (Request.fresh(9, 1, [-1]), "0 to 258"),
        (Request.fresh(9, 1, [1] * 128), "129 tokens"),
        (resumed(range(30)), "tokens already, and its limit is"),
        (dataclasses.replace(resumed([1]), versions=np.zeros(2, np.int64)), "2 versions for 1 tokens"),
        (resumed([259]), "0 to 258"),
        (fresh, "is added twice"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.add([fresh, bad], PARAMS, (6,))
        assert engine.running == 2
    with pytest.raises(EngineError, match=r"\(5, 5\)"):
        engine.abort([(0, 0), (5, 5)])
    assert engine.running == 2
    with pytest.raises(EngineError, match="2 requests run"):
        engine.generate(prompts(), sampling(), (0,))
    engine.abort()


# -- places -----------------------------------------------------------------------------------------------------------
GREEDY = sampling(temperature=0.0)


def texts(engine, params=GREEDY):
    return completions(engine.generate(prompts(), params, (1,)))


@pytest.mark.feature(17)
def test_cpu_and_cuda_change_nothing(engine):
    before = engine.generate(prompts(), sampling(), (1,))
    for _ in range(2):
        engine.cuda()
        assert (engine.place(), engine.version) == ("cuda", 0)
    assert engine.footprint()["weights"] > 0
    for _ in range(2):
        engine.cpu()
        assert (engine.place(), engine.version, engine.footprint()) == ("cpu", 0, {})
    engine.cuda()
    after = engine.generate(prompts(), sampling(), (1,))
    assert completions(after) == completions(before)
    rounding = 1e-5 if engine.info.package == "vllm" else 0.0  # requests reach vLLM during its steps: batches differ
    assert np.allclose(after.ragged("logprobs").values, before.ragged("logprobs").values, rtol=0, atol=rounding)


@pytest.mark.feature(18)
def test_weights_alone_are_updated_and_nothing_is_drawn(engine, reference):
    engine.cpu()
    with pytest.raises(EngineError, match="cuda"):
        engine.generate(prompts(), GREEDY, (1,))
    engine.cuda("weights")
    engine.receive(reference.snapshot(1, scale=1.02))
    assert engine.version == 1
    with pytest.raises(EngineError, match="kv_cache"):
        engine.generate(prompts(), GREEDY, (1,))
    with pytest.raises(EngineError, match="kv_cache"):
        engine.advance()


@pytest.mark.feature(19)
@pytest.mark.parametrize("place", ["cpu", "weights"])
def test_weights_received_while_offloaded_are_served(engine, reference, place):
    expected = texts(engine)
    engine.receive(reference.snapshot(1, scale=1.02))
    engine.cpu()
    if place == "weights":
        engine.cuda("weights")
    engine.receive(reference.snapshot(0), rewind=True)
    engine.cuda(*(["kv_cache"] if place == "weights" else []))
    assert texts(engine) == expected


@pytest.mark.feature(20)
@pytest.mark.parametrize("room_first", [True, False])
def test_meta_needs_new_weights(engine, reference, room_first):
    expected = texts(engine)
    engine.meta()
    assert (engine.place(), engine.version, engine.footprint()) == ("meta", -1, {})
    with pytest.raises(EngineError):
        engine.generate(prompts(), GREEDY, (1,))
    if room_first:
        engine.cuda()
        with pytest.raises(EngineError, match="receive"):
            engine.generate(prompts(), GREEDY, (1,))
    engine.receive(reference.snapshot(0))
    engine.cuda()
    assert texts(engine) == expected


def test_running_requests_outlive_an_offload(engine):
    params = sampling(max_new_tokens=20)
    engine.add(requests(), params, (6,))
    expected = drawn(drain(engine))
    engine.add(requests(), params, (6,))
    done = {item.request.key: item for _ in range(4) for item in engine.advance()}
    engine.cpu()
    assert engine.running + len(done) == 5
    engine.cuda()
    done.update(drain(engine))
    assert drawn(done) == expected


# -- weights ----------------------------------------------------------------------------------------------------------
@pytest.mark.feature(103)
def test_renamed_tensor_is_refused_and_old_weights_serve(engine, reference):
    before, sent = texts(engine), reference.snapshot(1, scale=1.02)
    wrong = take_snapshot([(name.replace("embed_tokens", "embedding"), sent.tensor(name)) for name in sent.buffers], 1)
    message = r"'model\.embed_tokens\.weight' is missing.*embedding\.weight' is unknow"
    with pytest.raises(WeightSyncError, match=message):
        engine.receive(wrong)
    assert (engine.version, texts(engine)) == (0, before)


@pytest.mark.feature(104)
def test_older_weights_are_taken_only_to_rewind(engine, reference):
    before = texts(engine)
    engine.receive(reference.snapshot(3, scale=1.02))
    older = reference.snapshot(2)
    with pytest.raises(WeightSyncError, match="version 2 is older than 3"):
        engine.receive(older)
    assert engine.version == 3
    engine.receive(older, rewind=True)
    assert (engine.version, texts(engine)) == (2, before)


@pytest.mark.feature(106)
def test_tied_head_follows_the_embeddings(engine, reference):
    """The final norm undoes the scale of what the layers give, not the scale of the head: log-probs show it."""
    sent = reference.snapshot(1)
    assert "lm_head.weight" not in sent.buffers
    doubled = {name: sent.tensor(name) * (2.0 if name == "model.embed_tokens.weight" else 1.0) for name in sent.buffers}
    engine.receive(take_snapshot(doubled.items(), 1))
    out = engine.generate(prompts(), sampling(), (1,))
    other = Reference(reference.path)
    other.model.load_state_dict(doubled, strict=False)
    other.model.tie_weights()
    for tokens, logprobs, actions in zip(
        *(out.ragged(name) for name in ("tokens", "logprobs", "action_mask")), strict=True
    ):
        expected = other.logprobs(tokens, 1.0)[np.arange(len(tokens) - 1), tokens[1:]].numpy()
        assert np.abs(np.where(actions[1:], expected, 0.0) - logprobs[1:]).max() < 1e-4
