# SPDX-License-Identifier: Apache-2.0
"""The contract of offload and of taking over weights."""

import numpy as np
import pytest

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.api.weights import take_snapshot
from tests.support.rollout_cases import Reference, completions, drain, drawn, prompts, requests, sampling

GREEDY = sampling(temperature=0.0)


def texts(engine, params=GREEDY):
    return completions(engine.generate(prompts(), params, (1,)))


# -- where things are -------------------------------------------------------------------------------------------------


@pytest.mark.feature(17)
def test_after_cpu_and_cuda_everything_is_as_before(engine):
    before = engine.generate(prompts(), sampling(), (1,))
    assert (engine.place(), engine.version) == ("cuda", 0)
    assert engine.footprint()["weights"] > 0
    engine.cpu()
    assert (engine.place(), engine.version, engine.footprint()) == ("cpu", 0, {})
    engine.cuda()
    assert engine.place() == "cuda"
    after = engine.generate(prompts(), sampling(), (1,))
    assert completions(after) == completions(before)
    assert np.array_equal(after.ragged("logprobs").values, before.ragged("logprobs").values)


@pytest.mark.feature(18)
def test_with_the_weights_alone_they_can_be_updated_and_nothing_is_drawn(engine, reference):
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
def test_then_the_cache_makes_it_draw_what_a_fresh_engine_draws(engine, reference):
    expected = texts(engine)
    engine.receive(reference.snapshot(1, scale=1.02))
    engine.cpu()
    engine.cuda("weights")
    engine.receive(reference.snapshot(0), rewind=True)
    engine.cuda("kv_cache")
    assert texts(engine) == expected


def test_weights_that_arrive_while_offloaded_are_served_afterwards(engine, reference):
    engine.receive(reference.snapshot(1, scale=1.02))
    expected = texts(engine)
    engine.receive(reference.snapshot(0), rewind=True)
    engine.cpu()
    engine.receive(reference.snapshot(1, scale=1.02))
    engine.cuda()
    assert texts(engine) == expected


@pytest.mark.feature(20)
@pytest.mark.parametrize("room_first", [True, False])
def test_after_meta_only_new_weights_bring_it_back(engine, reference, room_first):
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


def test_calls_for_a_place_where_it_is_already_change_nothing(engine):
    expected = texts(engine)
    for call in (engine.cuda, engine.cuda, engine.cpu, engine.cpu, engine.cuda):
        call()
    assert texts(engine) == expected


def test_requests_that_run_outlive_an_offload(engine):
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
def test_a_renamed_tensor_is_refused_and_the_old_weights_serve(engine, reference):
    before, sent = texts(engine), reference.snapshot(1, scale=1.02)
    wrong = take_snapshot([(name.replace("embed_tokens", "embedding"), sent.tensor(name)) for name in sent.buffers], 1)
    with pytest.raises(
        WeightSyncError, match=r"'model\.embed_tokens\.weight' is missing.*embedding\.weight' is unknow"
    ):
        engine.receive(wrong)
    assert engine.version == 0
    assert texts(engine) == before


@pytest.mark.feature(104)
def test_a_torn_sync_leaves_the_old_weights(engine, reference):
    before, torn = texts(engine), reference.snapshot(1, scale=1.02)
    torn.buffers["model.norm.weight"][3] ^= 255
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' does not match"):
        engine.receive(torn)
    assert engine.version == 0
    assert texts(engine) == before


def test_older_weights_are_taken_over_only_when_the_run_has_gone_back(engine, reference):
    before = texts(engine)
    engine.receive(reference.snapshot(3, scale=1.02))
    older = reference.snapshot(2)
    with pytest.raises(WeightSyncError, match="version 2 is older than 3"):
        engine.receive(older)
    assert engine.version == 3
    engine.receive(older, rewind=True)
    assert engine.version == 2
    assert texts(engine) == before


@pytest.mark.feature(106)
def test_tied_embeddings_travel_once_and_the_head_follows(engine, reference):
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
