# SPDX-License-Identifier: Apache-2.0
"""The contract of ``generate``: what is drawn, what is told about it, what is refused."""

import dataclasses

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.progress import noted_progress
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.rollout.requests import sampling_params
from tests.support.rollout_cases import EOS, TEXTS, completions, drain, prompts, requests, sampling

COLUMNS = {
    *("prompt_id", "sample_index", "tokens", "action_mask", "logprobs", "finished", "version", "completion"),
}  # fmt: skip

# -- what comes back --------------------------------------------------------------------------------------------------


def test_columns_of_the_output(engine):
    out = engine.generate(prompts(), sampling(samples_per_prompt=3), (1,))
    assert set(out.columns) == COLUMNS
    assert len(out) == 15
    for name, dtype in (("tokens", "int64"), ("action_mask", "bool"), ("logprobs", "float32")):
        assert out.ragged(name).values.dtype == dtype
        assert np.array_equal(out.ragged(name).offsets, out.ragged("tokens").offsets)
    for name, dtype in (("prompt_id", "int64"), ("sample_index", "int64"), ("version", "int64"), ("finished", "bool")):
        assert out.dense(name).dtype == dtype
    actions = out.ragged("action_mask").values
    assert (out.ragged("logprobs").values[~actions] == 0).all()
    assert (out.ragged("logprobs").values[actions] < 0).all()


@pytest.mark.feature(81)
def test_output_i_belongs_to_prompt_i_and_its_samples_are_adjacent(engine):
    out = engine.generate(prompts(first_id=7), sampling(samples_per_prompt=4), (1,))
    assert out["prompt_id"].tolist() == [7 + row // 4 for row in range(20)]
    assert out["sample_index"].tolist() == [0, 1, 2, 3] * 5
    for row in range(len(out)):
        text = TEXTS[row // 4].encode()
        assert out.ragged("tokens")[row][: len(text)].tolist() == list(text)
        assert out.ragged("action_mask")[row].tolist().index(True) == len(text)


def test_the_text_is_the_completions_without_special_tokens(engine):
    out = engine.generate(prompts(), sampling(samples_per_prompt=2), (3,))
    expected = engine.tokenizer.batch_decode(completions(out), skip_special_tokens=True)
    assert out.objects("completion") == expected


def test_progress_is_noted_while_tokens_come(engine):
    """At least as often as the engine gives tokens out, without which a long call would be treated as hung."""
    before = noted_progress()
    engine.generate(prompts(), sampling(samples_per_prompt=2), (3,))
    assert noted_progress() > before


def test_no_prompts_give_no_rows(engine):
    out = engine.generate(prompts([]), sampling(), (1,))
    assert len(out) == 0
    assert set(out.columns) == COLUMNS


def test_greedy_equals_the_librarys_generate(engine, reference):
    out = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    assert completions(out) == [reference.greedy(text.encode(), 24) for text in TEXTS]


def test_every_sample_of_a_greedy_prompt_is_the_same(engine):
    out = completions(engine.generate(prompts(), sampling(temperature=0.0, samples_per_prompt=3), (0,)))
    assert all(out[row] == out[row - row % 3] for row in range(15))


# -- what a sample depends on -----------------------------------------------------------------------------------------


@pytest.mark.feature(82)
@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 20}])
def test_a_prompt_alone_and_in_a_ragged_batch(engine, changes):
    params = sampling(samples_per_prompt=4, max_new_tokens=60, **changes)
    together = engine.generate(prompts(), params, (3, 5))
    alone = Batch.concat([engine.generate(prompts().rows(row, row + 1), params, (3, 5)) for row in range(len(TEXTS))])
    assert completions(together) == completions(alone)
    assert np.allclose(together.ragged("logprobs").values, alone.ragged("logprobs").values, atol=1e-5)


@pytest.mark.feature(82)
def test_the_order_of_the_prompts_does_not_matter(engine):
    params = sampling(samples_per_prompt=3)
    first = engine.generate(prompts(), params, (9,))
    second = engine.generate(prompts().take([4, 2, 0, 3, 1]), params, (9,))
    where = {key: row for row, key in enumerate(zip(second["prompt_id"], second["sample_index"], strict=True))}
    keys = zip(first["prompt_id"], first["sample_index"], strict=True)
    assert completions(first) == completions(second.take([where[key] for key in keys]))


def test_seed_prompt_id_and_sample_index_each_change_the_sample(engine):
    def draw(first_id, seed):
        return completions(engine.generate(prompts(["go"], first_id), sampling(samples_per_prompt=2), seed))

    base = draw(0, (1, 2))
    assert base == draw(0, (1, 2))
    assert base[0] != base[1]
    for other in (draw(1, (1, 2)), draw(0, (1, 3)), draw(0, (12,))):
        assert base[0] != other[0]


def test_fewer_samples_and_shorter_ones_are_the_first_of_more(engine):
    long = completions(engine.generate(prompts(), sampling(max_new_tokens=20, samples_per_prompt=3), (4,)))
    short = completions(engine.generate(prompts(), sampling(max_new_tokens=5, samples_per_prompt=2), (4,)))
    assert short == [tokens[:5] for row, tokens in enumerate(long) if row % 3 < 2]


def test_the_processs_random_state_neither_counts_nor_changes(engine):
    torch.manual_seed(1)
    first = engine.generate(prompts(), sampling(), (4,))
    state = torch.get_rng_state()
    torch.rand(3)
    assert completions(engine.generate(prompts(), sampling(), (4,))) == completions(first)
    torch.manual_seed(1)
    engine.generate(prompts(), sampling(), (4,))
    assert torch.equal(torch.get_rng_state(), state)


# -- log-probs --------------------------------------------------------------------------------------------------------


def expected_logprobs(reference, out, temperature, cut=lambda logprobs: logprobs):
    values = []
    for tokens, actions in zip(out.ragged("tokens"), out.ragged("action_mask"), strict=True):
        reference_logprobs = cut(reference.logprobs(tokens, temperature))
        picked = reference_logprobs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
        values.append(np.where(actions[1:], picked, 0.0))
    return np.concatenate([np.concatenate([[0.0], row]) for row in values])


@pytest.mark.feature(84, 123)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
def test_logprobs_are_the_models_at_the_temperature(engine, reference, temperature):
    out = engine.generate(prompts(), sampling(temperature=temperature, samples_per_prompt=4), (2,))
    expected = expected_logprobs(reference, out, temperature)
    assert np.abs(expected - out.ragged("logprobs").values).max() < 1e-4


@pytest.mark.feature(84, 123)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_the_train_engines(engine, reference, temperature):
    out = engine.generate(prompts(), sampling(temperature=temperature, samples_per_prompt=4), (2,))
    trainer = Fsdp2TrainEngine(reference.path, None)
    trained_logprobs = trainer.evaluate(out.select("tokens", "action_mask"), temperature).ragged("logprobs").values
    trainer.close()
    assert np.abs(trained_logprobs - out.ragged("logprobs").values).max() < 1e-4


CUTS = [{"top_k": 5}, {"top_p": 0.4}, {"top_k": 30, "top_p": 0.5}]


def slow_cut(logprobs, top_k=None, top_p=1.0):
    """Token by token, with Python's own sort and sums."""
    out = torch.full_like(logprobs, -torch.inf)
    for row, values in enumerate(logprobs.tolist()):
        ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))[:top_k]
        whole, nucleus, mass = sum(np.exp(values[token]) for token in ranked), [], 0.0
        for token in ranked:
            if mass >= top_p * whole:
                break
            nucleus.append(token)
            mass += np.exp(values[token])
        for token in nucleus:
            out[row, token] = values[token] - np.log(mass)
    return out


@pytest.mark.feature(123)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_with_a_cut_the_logprobs_are_of_the_distribution_that_was_asked_for(kind, engine, reference, cut):
    params = sampling(temperature=0.7, samples_per_prompt=4, **cut)
    if not kind.tells_cut:
        with pytest.raises(EngineError, match="top_k"):
            engine.check(prompts().ragged("tokens"), dataclasses.replace(params, logprobs="sampled"))
        return
    whole = engine.generate(prompts(), params, (2,))
    assert np.abs(expected_logprobs(reference, whole, 0.7) - whole.ragged("logprobs").values).max() < 1e-4
    sampled = engine.generate(prompts(), dataclasses.replace(params, logprobs="sampled"), (2,))
    assert completions(sampled) == completions(whole)
    expected = expected_logprobs(reference, sampled, 0.7, lambda logprobs: slow_cut(logprobs, **cut))
    assert np.isfinite(expected).all(), "a token was drawn that had been cut off"
    assert np.abs(expected - sampled.ragged("logprobs").values).max() < 1e-4


def test_top_k_one_is_greedy(engine):
    greedy = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    assert completions(engine.generate(prompts(), sampling(top_k=1), (5,))) == completions(greedy)
    assert completions(engine.generate(prompts(), sampling(top_p=1e-9), (5,))) == completions(greedy)


# -- where a completion ends ------------------------------------------------------------------------------------------


@pytest.mark.feature(85)
def test_end_of_sequence_is_trained_and_nothing_follows_it(engine):
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


@pytest.fixture
def written(engine):
    """A sampled completion of at least 12 characters of ASCII text, and how it was drawn."""
    params = sampling(max_new_tokens=40, samples_per_prompt=16, ignore_eos=True)
    out = engine.generate(prompts(["go"]), params, (8,))
    texts = out.objects("completion")
    row = max(range(16), key=lambda row: len(texts[row].encode("ascii", "ignore")))
    return row, params, completions(out)[row]


@pytest.mark.feature(83)
def test_a_stop_string_ends_a_completion_and_is_kept_in_the_text_or_not(engine, written):
    row, params, tokens = written
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


@pytest.mark.feature(83)
def test_sampling_parameters_come_from_a_mapping_and_a_misspelt_one_is_refused(engine):
    values = {"temperature": 0, "max_new_tokens": 6, "stop": ["\n\n"]}
    out = [engine.generate(prompts(), sampling_params(values), (seed,)) for seed in (1, 2)]
    assert completions(out[0]) == completions(out[1])
    with pytest.raises(EngineError, match="unknown key 'temprature'; did you mean 'temperature'"):
        sampling_params({"temprature": 1.0})


# -- refusals: nothing starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        (["ok", "x" * 128], {}, "129 tokens"),
        (["ok", ""], {}, r"\[1\]"),
        (["ok"], {"temperature": -0.1}, "temperature: .*got -0.1"),
        (["ok"], {"temperature": float("nan")}, "temperature: .*got nan"),
        (["ok"], {"max_new_tokens": 0}, "max_new_tokens: .*got 0"),
        (["ok"], {"samples_per_prompt": 0}, "samples_per_prompt: .*got 0"),
        (["ok"], {"top_k": 0}, "top_k: .*got 0"),
        (["ok"], {"top_p": 0.0}, "top_p: .*got 0.0"),
        (["ok"], {"stop": ("",)}, "stop"),
        (["ok"], {"stop": "text"}, "stop: .*got 'text'"),
        (["ok"], {"logprobs": "both"}, "logprobs: .*got 'both'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(engine, texts, changes, message):
    batch, params = prompts(texts), sampling(**changes)
    with pytest.raises(EngineError, match=message):
        engine.check(batch.ragged("tokens"), params)
    with pytest.raises(EngineError, match=message):
        engine.generate(batch, params, (0,))
    assert engine.running == 0


def test_a_prompt_is_continued_as_far_as_the_model_reaches(engine, kind):
    """Other prompts of the batch have all their tokens, and those that are there are the same."""
    texts, params = ["x" * (kind.longest - 8), "ok"], sampling(max_new_tokens=20, ignore_eos=True)
    out = engine.generate(prompts(texts), params, (3,))
    assert [int(mask.sum()) for mask in out.ragged("action_mask")] == [8, 20]
    assert not out.dense("finished").any()
    short = engine.generate(prompts(texts), sampling(max_new_tokens=8, ignore_eos=True), (3,))
    assert short.ragged("tokens")[0].tolist() == out.ragged("tokens")[0].tolist()


@pytest.mark.parametrize("token", [-1, 259])
def test_unknown_token_ids_are_refused(engine, token):
    batch = Batch({"prompt_id": np.array([0]), "tokens": Ragged.from_rows([[5, token]])})
    with pytest.raises(EngineError, match="0 to 258"):
        engine.generate(batch, sampling(), (0,))


def test_a_prompt_that_just_fits_is_completed(engine, kind):
    out = engine.generate(prompts(["x" * (kind.longest - 8)]), sampling(max_new_tokens=8, ignore_eos=True), (0,))
    assert out.ragged("tokens").lengths.tolist() == [kind.longest]


def test_a_sequence_ends_where_it_fills_the_longest_one(engine, kind):
    full, short = "x" * (kind.longest - 1), "x" * 20
    engine.add(requests([full, short]), sampling(max_new_tokens=12, ignore_eos=True), (1,))
    done = drain(engine)
    ends = {key: (item.finish, len(item.request.done)) for key, item in done.items()}
    assert ends == {(0, 0): ("length", 1), (1, 0): ("length", 12)}
    with pytest.raises(EngineError, match=f"{kind.longest + 1} tokens does not fit"):
        engine.add(requests(["x" * kind.longest]), sampling(), (1,))
    assert engine.running == 0
