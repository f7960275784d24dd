# SPDX-License-Identifier: Apache-2.0
"""Drawing a token: the distribution, the cuts, the random numbers; and the end of a request."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import Request, SamplingParams
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer
from dlrover.python.rl.engine.rollout.requests import FinishRules, RunningRequest
from dlrover.python.rl.engine.rollout.sampling import choose, cut, uniforms


def test_tokens_are_drawn_by_their_probabilities():
    logits = torch.tensor([2.0, 0.0, 1.0, -torch.inf, 0.5]).expand(20000, 5)
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    tokens, logprobs = choose(logits, SamplingParams(temperature=0.7), torch.from_numpy(uniforms((1,), 2, 3, 20000)))
    shares = torch.bincount(tokens, minlength=5) / 20000
    assert torch.allclose(shares, expected, atol=0.012)
    assert shares[3] == 0
    assert torch.allclose(logprobs.exp().float(), expected[tokens])


@pytest.mark.parametrize("changes", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_impossible_token_is_never_drawn(changes):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, 4)
    edges = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert choose(logits, SamplingParams(**changes), edges)[0].tolist() == [1, 2]


@pytest.mark.parametrize("vocabulary", [4097, 10_000])
def test_draw_from_many_tokens_inverts_the_sum(vocabulary):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(400, vocabulary, generator=generator)
    draws = torch.rand(400, generator=generator, dtype=torch.float64)
    tokens, logprobs = choose(logits, SamplingParams(), draws)
    policy = torch.log_softmax(logits, dim=-1)
    sums = policy.exp().double().cumsum(dim=-1)
    assert tokens.tolist() == [int((row > draw * row[-1]).nonzero()[0]) for row, draw in zip(sums, draws, strict=True)]
    assert torch.equal(logprobs, policy.gather(1, tokens[:, None]).squeeze(1))


def test_impossible_token_of_many_is_never_drawn():
    """The sum of a block may be rounded otherwise than its running sum."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((2000, 5000), -torch.inf)
    logits[:, 10:500] = 6 * torch.randn(2000, 490, generator=generator)
    logits[:, 1300] = 12.0
    probabilities = torch.softmax(logits, dim=-1).double()
    edge = probabilities[:, :500].sum(dim=-1) / probabilities.sum(dim=-1)
    below_one = torch.full_like(edge, 1.0 - 2.0**-53)
    for draws in (torch.zeros_like(edge), edge, torch.nextafter(edge, torch.zeros_like(edge)), below_one):
        tokens, logprobs = choose(logits, SamplingParams(), draws)
        assert logprobs.isfinite().all()
        assert probabilities.gather(1, tokens[:, None]).min() > 0


LOGITS = st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=9)


@settings(deadline=None, max_examples=300)
@given(LOGITS, st.none() | st.integers(1, 10), st.floats(0.01, 1.0))
@example([0.0, 3.0, 1.0], None, 1e-300)
@example([2.0, 2.0, 2.0], None, 1e-300)
def test_cut_equals_a_slow_reference(logits, top_k, top_p):
    """Integers as logits: ties are common."""
    logprobs = torch.log_softmax(torch.tensor([logits], dtype=torch.float64), dim=-1)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    whole = math.fsum(math.exp(logprobs[0, token]) for token in ranked)
    nucleus, mass = [], 0.0
    for token in ranked:
        if mass / whole >= top_p - 1e-12 and nucleus:
            break
        nucleus.append(token)
        mass += math.exp(logprobs[0, token])
    borderline = any(abs(part / whole - top_p) < 1e-9 for part in np.cumsum([math.exp(logprobs[0, t]) for t in ranked]))
    limited = cut(logprobs, top_k, top_p)[0]
    if not borderline:
        assert limited.isfinite().nonzero().flatten().tolist() == sorted(nucleus)
    assert torch.equal(limited[limited.isfinite()], logprobs[0][limited.isfinite()])


def test_greedy_takes_the_likeliest_with_plain_logprob():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    for changes in ({}, {"top_k": 1, "logprobs": "sampled"}):
        tokens, logprobs = choose(
            logits, SamplingParams(temperature=0.0, **changes), torch.zeros(1, dtype=torch.float64)
        )
        assert tokens.tolist() == [1]
        assert torch.allclose(logprobs, torch.log_softmax(logits, dim=-1)[:, 1])


@pytest.mark.parametrize("vocabulary", [3, 5000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprob_of_nan_logits_is_nan(vocabulary, temperature):
    logits = torch.zeros((1, vocabulary))
    logits[0, 1] = torch.nan
    sampling, draws = SamplingParams(temperature=temperature), torch.full((1,), 0.5, dtype=torch.float64)
    tokens, logprobs = choose(logits, sampling, draws)
    assert 0 <= int(tokens) < vocabulary
    assert logprobs.isnan().all()


def test_uniforms_depend_on_seed_prompt_and_sample():
    base = uniforms((1, 2), 3, 4, 8)
    assert np.array_equal(uniforms((1, 2), 3, 4, 20)[:8], base)
    assert ((base >= 0) & (base < 1)).all()
    for seed, prompt, sample in (((1, 3), 3, 4), ((12,), 3, 4), ((1, 2), 4, 4), ((1, 2), 3, 5)):
        assert not np.isin(uniforms(seed, prompt, sample, 8), base).any()


# -- the end of a request, and its text: over the byte tokenizer, where a character can be several tokens --------------
EOS = 258
RULES = FinishRules(make_byte_tokenizer(), (EOS,))


def run(tokens, **changes):
    running = RunningRequest(Request.fresh(0, 0, [1]), SamplingParams(**{"max_new_tokens": 50, **changes}), (0,))
    for count, token in enumerate(tokens, 1):
        running.tokens.append(token)
        running.columns.append({"logprobs": -1.0, "versions": 0})
        if (finish := RULES.finish_reason(running)) is not None:
            return count, finish, RULES.completion(running, finish)
    return len(tokens), None, RULES.completion(running, "aborted")


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("one STOP two", {"stop": ("STOP",)}, (8, "stop", "one ")),
        ("one STOP two", {"stop": ("STOP",), "keep_stop": True}, (8, "stop", "one STOP")),
        ("one STOP two", {"stop": ("two", "OP", "STOP")}, (8, "stop", "one ")),  # the longer of two is cut off
        ("a\n\nb", {"stop": ("\n\n",)}, (3, "stop", "a")),
        ("grün ist grün", {"stop": ("ün",)}, (5, "stop", "gr")),
        ("one two", {"stop": ("three",), "max_new_tokens": 5}, (5, "length", "one t")),
        ("aaab", {"stop": ("aab",), "max_new_tokens": 4}, (4, "stop", "a")),
    ],
)
def test_stop_string_ends_where_it_is_complete(text, changes, expected):
    count, finish, completion = run(text.encode(), **changes)
    assert (count, finish, completion.text) == expected
    assert completion.request.done.tolist() == list(text.encode()[:count])


def test_end_of_sequence_is_the_first_reason():
    assert run([65, EOS, 66], max_new_tokens=2, stop=("A",))[:2] == (1, "stop")
    count, finish, completion = run([65, EOS], max_new_tokens=2)
    assert (count, finish, completion.text) == (2, "eos", "A")
    assert completion.request.done.tolist() == [65, EOS]
    assert run([65, EOS, 66], ignore_eos=True)[1] is None


TURN = RULES.tokenizer.convert_ids_to_tokens(256)


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, f"ab{TURN}")])
def test_special_token_is_a_stop_string(keep, text):
    count, finish, completion = run([*b"ab", 256, *b"cd"], stop=("X", TURN), keep_stop=keep)
    assert (count, finish, completion.text) == (3, "stop", text)
    assert completion.request.done.tolist() == [*b"ab", 256]
    assert run([*b"aX", 256], stop=("X", TURN))[2].text == "a"
    assert run([*b"ab", 257], stop=(TURN,))[1] is None
    assert run([*b"ST", 256, 257, 256, 257, *b"OP", 67], stop=("STOP",))[0] == 8, "they have no text"


def test_special_thought_tags_stay_in_the_text():
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ("[THINK]", "[/THINK]", "[X]")])
    tokens = tokenizer("[THINK]a[X] \u00e4[/THINK] b")["input_ids"]
    request = Request(0, 0, np.array([1]), np.array([*tokens, 256, EOS]), *np.zeros((2, len(tokens) + 2)))
    running = RunningRequest(request, SamplingParams(), (0,))
    assert FinishRules(tokenizer, (EOS,)).completion(running, "eos").text == "[THINK]a \u00e4[/THINK] b"


def test_impossible_stop_string_is_refused():
    RULES.check(SamplingParams(stop=("X", TURN)))
    with pytest.raises(EngineError, match="stop string .* has the special token"):
        RULES.check(SamplingParams(stop=(f"{TURN}\n",)))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([*"abä€", "\U0001f600", 256, 257]), max_size=25),
       st.lists(st.text("abä€\U0001f600", min_size=1, max_size=4), min_size=1, max_size=3))  # fmt: skip
def test_window_finds_a_stop_as_decoding_all_does(parts, stops):
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    decode = RULES.tokenizer.decode
    expected = next(
        (count for count in range(1, len(tokens) + 1)
         if any(stop in decode(tokens[:count], skip_special_tokens=True) for stop in stops)), None
    )  # fmt: skip
    count, finish, completion = run(tokens, stop=tuple(stops), max_new_tokens=200)
    assert (count if finish == "stop" else None) == expected
    if finish == "stop":
        assert not any(stop in completion.text for stop in stops)
