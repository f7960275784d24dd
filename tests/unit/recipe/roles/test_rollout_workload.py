# SPDX-License-Identifier: Apache-2.0
"""Groups of one turn that a rollout worker begins, continues, gives to the trainer, and abandons."""

import threading

import numpy as np
import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import SamplingParams
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.rollout.episodes import summarize_rows
from tests.support.rollout_member import SAMPLING, actor, member, sample, trained, wanted

DRAWN = ("tokens", "action_mask", "logprobs", "finished", "prompt_id", "sample_index", "version", "completion")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64))


@pytest.fixture(scope="module")
def first(model):
    """An actor and the ticket of its weights."""
    source = actor(model)
    return source, source.publish_weights()


@pytest.fixture(params=[0, 2], ids=["within calls", "between calls too"])
def server(request, model, first):
    server = member(model, first[1], max_staleness=request.param)
    yield server
    server.close()


def rows(batch, *names):
    """The columns as plain values, by row."""
    read = [[np.asarray(item).tolist() for item in batch[name]] for name in names]
    return list(zip(*read, strict=True))


def test_fetched_groups_are_bit_for_bit_the_engines(server):
    """The seed is ``(seed, step)``, with ``attempt`` behind it from the second on."""
    for attempt in (0, 1):
        groups = wanted(3, 1, 2, created_step=7, retry=attempt)
        standing = sample(server, groups)
        assert standing.dense("complete").all()
        taken = server.fetch(groups)
        seed = (5, 7, 1) if attempt else (5, 7)
        encoded = [server._engine.tokenizer(text)["input_ids"] for text in groups.objects("prompt")]
        prompts = Batch({"prompt_id": groups["prompt_id"], "tokens": type(taken.ragged("tokens")).from_rows(encoded)})
        generated = server._engine.generate(prompts, SAMPLING, seed)
        assert rows(taken, *DRAWN) == rows(generated, *DRAWN)
        assert rows(server.generate(groups, SAMPLING, seed), *DRAWN) == rows(generated, *DRAWN)


@pytest.mark.feature(81)
def test_fetched_rows_have_the_requested_order_and_their_ids(server):
    sample(server, wanted(4, 2, 9))
    taken = server.fetch(wanted(9, 4))
    expected = [(number, index, text) for number, text in ((9, "9+10="), (4, "4+5=" * 2)) for index in range(4)]
    assert rows(taken, "prompt_id", "sample_index", "prompt") == expected
    assert rows(taken, "retry", "turns") == [(0, 1)] * 8
    assert len(set(taken.dense("trajectory").tolist())) == 8
    for tokens, mask, versions in zip(*(taken.ragged(n) for n in ("tokens", "action_mask", "versions")), strict=True):
        assert len(tokens) == len(mask) == len(versions)
        assert versions.tolist() == [0 if chosen else -1 for chosen in mask]
    assert "reward" not in taken


def test_summary_of_fetched_rows_has_their_digests(server):
    groups = wanted(1, 2)
    sample(server, groups)
    taken = server.fetch(groups)
    summary = server.summarize(taken)
    assert rows(summary, *summary.columns) == rows(summarize_rows(taken), *summary.columns)
    assert summary.dense("action_tokens").tolist() == [int(mask.sum()) for mask in taken.ragged("action_mask")]
    assert summary.dense("token_count").tolist() == taken.ragged("tokens").lengths.tolist()
    pairs = zip(taken.ragged("tokens"), summary["digest"], strict=True)
    by_tokens = {tokens.tobytes(): digest for tokens, digest in pairs}
    assert len(set(by_tokens.values())) == len(by_tokens)


def test_sample_returns_when_enough_groups_are_complete(model, first):
    server = member(model, first[1], EngineConfig(threads=1, max_batch=4))
    groups = wanted(*range(6))
    standing = sample(server, groups, enough=2)
    complete, started = standing.dense("complete"), standing.dense("started").tolist()
    assert 2 <= complete.sum() < 6 and not all(started)
    assert started == sorted(started, reverse=True)
    assert standing.dense("prompt_id").tolist() == list(range(6))
    assert rows(sample(server, groups), "complete", "min_version") == [(True, 0)] * 6


def test_sampling_between_calls_needs_staleness(model, first):
    few, groups = EngineConfig(threads=1, max_batch=4), wanted(*range(6))
    server, before = member(model, first[1], few), set(threading.enumerate())
    standing = sample(server, groups, enough=1)
    assert rows(sample(server, groups, patience_s=0.0), *standing.columns) == rows(standing, *standing.columns)
    assert set(threading.enumerate()) <= before
    beside = member(model, first[1], few, max_staleness=1)
    sample(beside, groups, enough=1)
    while not sample(beside, groups, patience_s=0.0).dense("complete").all():
        threading.Event().wait(0.01)
    beside.close()
    assert set(threading.enumerate()) <= before


def test_group_not_listed_again_is_abandoned(server):
    sample(server, wanted(1, 2, 3), enough=0, patience_s=0.0)
    standing = sample(server, wanted(2, 3, created_step=2))
    assert standing.dense("complete").all()
    assert set(server._scheduler._groups) == {(2, 0, 2), (3, 0, 2)}
    assert server._engine.running == 0


def test_same_prompt_in_two_steps_is_two_groups(server):
    """They have the same key in the engine, so one waits for the other."""
    both = Batch.concat([wanted(1, created_step=1), wanted(1, created_step=2), wanted(1, created_step=2, retry=1)])
    sample(server, both)
    taken = server.fetch(both)
    alone = Batch.concat([server.generate(wanted(1), SAMPLING, seed) for seed in ((5, 1), (5, 2), (5, 2, 1))])
    assert rows(taken, "tokens") == rows(alone, "tokens")
    assert len(set(taken.dense("trajectory").tolist())) == 12


def test_prompt_too_long_is_an_error_and_others_stay(server):
    long = wanted(1, 2, prompt=["fine", "x" * 80])
    with pytest.raises(EngineError, match="64"):
        sample(server, long)
    assert sample(server, wanted(1, prompt=["fine"])).dense("complete").all()


# -- partial rollout ---------------------------------------------------------------------------------------------------


LONG = SamplingParams(max_new_tokens=24, temperature=1.0, samples_per_prompt=4)
SHORT = SamplingParams(max_new_tokens=4, temperature=1.0, samples_per_prompt=4)


def partly(server, groups, number):
    """Draw a few tokens more of groups known from before: until one of four tokens is complete."""
    standing = sample(server, Batch.concat([wanted(number, created_step=number), groups]), enough=1, sampling=SHORT)
    return rows(standing, "complete", "min_version")[1:]


@pytest.mark.feature(96)
def test_unfinished_sample_continues_under_new_weights(model):
    source = actor(model)
    first = source.publish_weights()
    whole, server = member(model, first), member(model, first)
    groups = wanted(1, 2, 3)
    sample(whole, groups, sampling=LONG)
    expected = whole.fetch(groups)
    sample(server, groups, patience_s=0.0, sampling=LONG)
    assert partly(server, groups, 21) == [(False, 0)] * 3
    server.receive_weights(trained(source))
    assert partly(server, groups, 22) == [(False, 0)] * 3
    server.receive_weights(trained(source))
    assert rows(sample(server, groups), "complete", "min_version") == [(True, 0)] * 3
    taken = server.fetch(groups)
    columns = (taken.ragged(name) for name in ("versions", "action_mask", "tokens"))
    for versions, chosen, tokens, before in zip(*columns, expected.ragged("tokens"), strict=True):
        generated, prompt_size = versions[chosen].tolist(), int((~chosen).sum())
        assert generated == sorted(generated)
        assert generated.count(0) >= min(4, len(generated))
        assert set(generated) == {0, 1, 2} or len(generated) < 12
        same = prompt_size + generated.count(0)
        assert tokens[:same].tolist() == before[:same].tolist()
    assert taken.dense("version").max() == 2
    assert taken.dense("min_version").tolist() == [0] * 12


def test_interrupted_step_repeats_the_same_bits(model, first):
    """The actor was replaced: its weights come again, while groups are half done."""
    whole, server = member(model, first[1]), member(model, first[1])
    groups = wanted(1, 2, 3)
    sample(whole, groups, sampling=LONG)
    sample(server, groups, patience_s=0.0, sampling=LONG)
    assert partly(server, groups, 21) == [(False, 0)] * 3
    server.receive_weights(first[1])
    sample(server, groups, sampling=LONG)
    assert rows(server.fetch(groups), *DRAWN) == rows(whole.fetch(groups), *DRAWN)


def test_run_set_back_draws_later_samples_again(model):
    source = actor(model)
    older = source.publish_weights()
    server = member(model, older)
    sample(server, wanted(1))
    before = server.fetch(wanted(1))
    server.receive_weights(trained(source))
    both = Batch.concat([wanted(1), wanted(1, 2, created_step=2)])
    sample(server, both)
    assert server.fetch(both).dense("version").tolist() == [0] * 4 + [1] * 8
    server.receive_weights(older)
    assert rows(sample(server, both, patience_s=0.0), "started", "complete") == [(True, True)] + [(False, False)] * 2
    sample(server, both)
    taken = server.fetch(both)
    assert taken.dense("version").tolist() == [0] * 12
    assert rows(taken, "tokens")[:4] == rows(before, "tokens")
