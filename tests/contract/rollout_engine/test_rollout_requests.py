# SPDX-License-Identifier: Apache-2.0
"""The contract of single requests, of places, and of taking over weights."""

import dataclasses

import numpy as np
import pytest

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.api.base import Request
from dlrover.python.rl.engine.api.weights import take_snapshot
from tests.support.rollout_cases import (
    KINDS,
    TEXTS,
    Reference,
    as_parameter,
    completions,
    drain,
    drawn,
    prompts,
    requests,
    sampling,
)

PARAMS = sampling(max_new_tokens=30, samples_per_prompt=3)


def whole(engine, params=PARAMS, seed=(6,)):
    """Return the completions of ``generate`` by key."""
    out = engine.generate(prompts(), params, seed)
    return dict(zip(zip(out["prompt_id"], out["sample_index"], strict=True), completions(out), strict=True))


def test_single_requests_draw_as_generate_does(engine):
    expected = whole(engine)
    engine.add(requests(samples=3), PARAMS, (6,))
    assert engine.running == 15
    done = drain(engine)
    assert drawn(done) == expected
    assert engine.running == 0
    assert engine.advance() == []


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


@pytest.mark.feature(96)
@pytest.mark.parametrize("kind", [as_parameter(kind) for kind in KINDS if kind.name == "torch"], indirect=True)
def test_aborted_request_continues_in_another_engine(kind, engine, model_path, reference):
    """The kinds whose engines start quickly."""
    expected = whole(engine)
    engine.add(requests(samples=3), PARAMS, (6,))
    for _ in range(5):
        engine.advance()
    aborted = engine.abort()
    other = kind.make(model_path, max_batch=3)
    other.receive(reference.snapshot(0))
    other.add([item.request for item in aborted], PARAMS, (6,))
    for key, tokens in drawn(drain(other)).items():
        assert tokens == expected[key]


def test_abort_of_some_requests_leaves_the_others(engine):
    expected = whole(engine)
    engine.add(requests(samples=3), PARAMS, (6,))
    done = {item.request.key: item for _ in range(2) for item in engine.advance()}
    keys = [(1, 0), (4, 2)]
    aborted = engine.abort(keys)
    assert [item.request.key for item in aborted] == keys
    done.update(drain(engine))
    assert drawn(done) == {key: tokens for key, tokens in expected.items() if key not in keys}


@pytest.mark.feature(96)
def test_tokens_have_the_version_of_their_weights(engine, reference):
    params = sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)
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
        assert first >= 4
        columns = {name: getattr(request, name)[:first] for name in ("done", "logprobs", "versions")}
        past = dataclasses.replace(request, **columns)
        engine.add([past], params, (6,))
        alone = drain(engine)[request.key].request
        assert alone.done.tolist() == request.done.tolist(), "the past was not read with the new weights"
        assert np.allclose(alone.logprobs, request.logprobs, atol=1e-5)


def test_generate_gives_the_version_of_the_weights(engine, reference):
    assert engine.version == 0
    assert engine.generate(prompts(), sampling(), (0,))["version"].tolist() == [0] * 5
    engine.receive(reference.snapshot(7))
    assert engine.generate(prompts(), sampling(), (0,))["version"].tolist() == [7] * 5


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


GREEDY = sampling(temperature=0.0)


def texts(engine, params=GREEDY):
    return completions(engine.generate(prompts(), params, (1,)))


# -- where things are -------------------------------------------------------------------------------------------------


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
    assert np.array_equal(after.ragged("logprobs").values, before.ragged("logprobs").values)


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
def test_torn_weights_are_refused_and_old_ones_serve(engine, reference):
    before, torn = texts(engine), reference.snapshot(1, scale=1.02)
    torn.buffers["model.norm.weight"][3] ^= 255
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' does not match"):
        engine.receive(torn)
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
