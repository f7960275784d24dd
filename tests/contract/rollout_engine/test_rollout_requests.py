# SPDX-License-Identifier: Apache-2.0
"""The contract of single requests: taken in, drawn step by step, aborted, gone on with."""

import dataclasses

import numpy as np
import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import Request
from tests.support.rollout_cases import (
    KINDS,
    TEXTS,
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


def test_requests_one_by_one_draw_what_generate_draws(engine):
    expected = whole(engine)
    engine.add(requests(samples=3), PARAMS, (6,))
    assert engine.running == 15
    done = drain(engine)
    assert drawn(done) == expected
    assert engine.running == 0
    assert engine.advance() == []


def test_a_completion_has_its_request_with_all_columns(engine):
    engine.add(requests(), sampling(), (6,))
    done = drain(engine)
    for item in done.values():
        request = item.request
        assert request.prompt.tolist() == list(TEXTS[request.prompt_id].encode())
        assert (request.done.dtype, request.logprobs.dtype, request.versions.dtype) == ("int64", "float32", "int64")
        assert len(request.done) == len(request.logprobs) == len(request.versions)
        assert item.finish == ("length" if len(request.done) == 24 else "eos")
        assert item.text == engine.tokenizer.decode(request.done, skip_special_tokens=True)


def test_requests_that_come_later_change_nothing_for_those_that_run(engine):
    expected = whole(engine)
    batch = requests(samples=3)
    engine.add(batch[:4], PARAMS, (6,))
    done = {}
    for part in (batch[4:9], batch[9:]):
        for _ in range(3):
            done.update({item.request.key: item for item in engine.advance()})
        engine.add(part, PARAMS, (6,))
    assert drawn({**done, **drain(engine)}) == expected


def test_requests_of_several_samplings_run_side_by_side(kind, engine):
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
def test_an_aborted_request_goes_on_with_the_tokens_it_would_have_got(engine, steps):
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
def test_another_engine_goes_on_with_it_too(kind, engine, model_path, reference):
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


def test_some_requests_are_aborted_and_the_others_go_on(engine):
    expected = whole(engine)
    engine.add(requests(samples=3), PARAMS, (6,))
    done = {item.request.key: item for _ in range(2) for item in engine.advance()}
    keys = [(1, 0), (4, 2)]
    aborted = engine.abort(keys)
    assert [item.request.key for item in aborted] == keys
    done.update(drain(engine))
    assert drawn(done) == {key: tokens for key, tokens in expected.items() if key not in keys}


@pytest.mark.feature(96)
def test_tokens_are_stamped_with_the_weights_that_drew_them(engine, reference):
    params = sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    engine.add(requests(), params, (6,))
    for _ in range(4):
        engine.advance()
    engine.receive(reference.snapshot(1, scale=1.02))
    done = drain(engine)
    for item in done.values():
        versions = item.request.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        first = versions.index(1)
        assert first >= 4
    for item in done.values():
        first, request = item.request.versions.tolist().index(1), item.request
        past = dataclasses.replace(
            request, done=request.done[:first], logprobs=request.logprobs[:first], versions=request.versions[:first]
        )
        engine.add([past], params, (6,))
        alone = drain(engine)[request.key].request
        assert alone.done.tolist() == request.done.tolist(), "the past was not read with the new weights"
        assert np.allclose(alone.logprobs, request.logprobs, atol=1e-5)


def test_generate_tells_the_version_of_the_last_token(engine, reference):
    assert engine.version == 0
    assert engine.generate(prompts(), sampling(), (0,))["version"].tolist() == [0] * 5
    engine.receive(reference.snapshot(7))
    assert engine.generate(prompts(), sampling(), (0,))["version"].tolist() == [7] * 5


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_taken_in_leaves_everything_as_it_was(engine):
    engine.add(requests(TEXTS[:2]), PARAMS, (6,))
    fresh = Request.fresh(9, 0, [1, 2])

    def resumed(done):
        columns = {"logprobs": np.zeros(len(done), np.float32), "versions": np.zeros(len(done), np.int64)}
        return dataclasses.replace(fresh, sample_index=1, done=np.array(done), **columns)

    for bad, message in (
        (requests(TEXTS[:1])[0], r"\(0, 0\) runs already"),
        (Request.fresh(9, 1, []), "empty"),
        (Request.fresh(9, 1, [300]), "0 to 258"),
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
