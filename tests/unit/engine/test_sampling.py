# SPDX-License-Identifier: Apache-2.0
"""Drawing a token: the distribution, the cuts, the random numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.engine.api.base import SamplingParams
from dlrover.python.rl.engine.rollout.sampling import choose, cut, uniforms


def drawing(**changes):
    return SamplingParams(**changes)


def test_each_token_is_drawn_as_often_as_its_probability():
    logits = torch.tensor([2.0, 0.0, 1.0, -torch.inf, 0.5]).expand(20000, 5)
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    tokens, logprobs = choose(logits, drawing(temperature=0.7), torch.from_numpy(uniforms((1,), 2, 3, 20000)))
    shares = torch.bincount(tokens, minlength=5) / 20000
    assert torch.allclose(shares, expected, atol=0.012)
    assert shares[3] == 0
    assert torch.allclose(logprobs.exp().float(), expected[tokens])


@pytest.mark.parametrize("changes", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_nothing_without_probability_is_ever_drawn(changes):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, 4)
    edges = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert choose(logits, drawing(**changes), edges)[0].tolist() == [1, 2]


@pytest.mark.parametrize("vocabulary", [4097, 10_000])
def test_of_many_tokens_each_draw_inverts_the_sum_of_probabilities(vocabulary):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(400, vocabulary, generator=generator)
    draws = torch.rand(400, generator=generator, dtype=torch.float64)
    tokens, logprobs = choose(logits, drawing(), draws)
    policy = torch.log_softmax(logits, dim=-1)
    sums = policy.exp().double().cumsum(dim=-1)
    assert tokens.tolist() == [int((row > draw * row[-1]).nonzero()[0]) for row, draw in zip(sums, draws, strict=True)]
    assert torch.equal(logprobs, policy.gather(1, tokens[:, None]).squeeze(1))


def test_of_many_tokens_nothing_without_probability_is_sampled_at_the_edges():
    """The sum of a block may be rounded otherwise than its running sum."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((2000, 5000), -torch.inf)
    logits[:, 10:500] = 6 * torch.randn(2000, 490, generator=generator)
    logits[:, 1300] = 12.0
    probabilities = torch.softmax(logits, dim=-1).double()
    edge = probabilities[:, :500].sum(dim=-1) / probabilities.sum(dim=-1)
    below_one = torch.full_like(edge, 1.0 - 2.0**-53)
    for draws in (torch.zeros_like(edge), edge, torch.nextafter(edge, torch.zeros_like(edge)), below_one):
        tokens, logprobs = choose(logits, drawing(), draws)
        assert logprobs.isfinite().all()
        assert probabilities.gather(1, tokens[:, None]).min() > 0


def test_of_many_tokens_logits_that_are_no_numbers_have_a_logprob_that_is_none():
    logits = torch.zeros((1, 5000))
    logits[0, 3] = torch.nan
    tokens, logprobs = choose(logits, drawing(), torch.full((1,), 0.5, dtype=torch.float64))
    assert 0 <= int(tokens) < 5000
    assert logprobs.isnan().all()


def test_cut_draws_keep_the_shares_of_what_is_left():
    logits = torch.tensor([2.0, 0.0, 1.0, -3.0, 0.5]).expand(20000, 5)
    draws = torch.from_numpy(uniforms((1,), 2, 3, 20000))
    tokens, logprobs = choose(logits, drawing(top_k=3, logprobs="sampled"), draws)
    expected = torch.softmax(torch.tensor([2.0, -torch.inf, 1.0, -torch.inf, 0.5]), dim=-1)
    assert torch.allclose(torch.bincount(tokens, minlength=5) / 20000, expected, atol=0.012)
    assert torch.allclose(logprobs.exp().float(), expected[tokens])
    same, policy = choose(logits, drawing(top_k=3), draws)
    assert torch.equal(same, tokens)
    assert torch.allclose(policy.exp().float(), torch.softmax(logits[0], dim=-1)[tokens])


LOGITS = st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=9)


@settings(deadline=None, max_examples=300)
@given(LOGITS, st.none() | st.integers(1, 10), st.floats(0.01, 1.0))
def test_cuts_equal_a_slow_reference(logits, top_k, top_p):
    """Integers as logits: ties are common."""
    logprobs = torch.log_softmax(torch.tensor([logits], dtype=torch.float64), dim=-1)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    whole = math.fsum(math.exp(logprobs[0, token]) for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        if mass / whole >= top_p - 1e-12 and kept:
            break
        kept.append(token)
        mass += math.exp(logprobs[0, token])
    borderline = any(abs(part / whole - top_p) < 1e-9 for part in np.cumsum([math.exp(logprobs[0, t]) for t in ranked]))
    found = cut(logprobs, top_k, top_p)[0]
    if not borderline:
        assert found.isfinite().nonzero().flatten().tolist() == sorted(kept)
    assert torch.equal(found[found.isfinite()], logprobs[0][found.isfinite()])


def test_the_least_share_keeps_the_most_likely_token():
    logprobs = torch.log_softmax(torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 2.0]]).double(), dim=-1)
    assert cut(logprobs, None, 1e-300).isfinite().tolist() == [[False, True, False], [True, False, False]]


def test_greedy_takes_the_most_likely_and_tells_the_plain_logprob():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    for changes in ({}, {"top_k": 1, "logprobs": "sampled"}):
        tokens, logprobs = choose(logits, drawing(temperature=0.0, **changes), torch.zeros(1, dtype=torch.float64))
        assert tokens.tolist() == [1]
        assert torch.allclose(logprobs, torch.log_softmax(logits, dim=-1)[:, 1])


def test_logits_that_are_no_numbers_have_a_logprob_that_is_none():
    logits = torch.tensor([[0.0, torch.nan, 1.0]])
    for temperature in (0.0, 1.0):
        tokens, logprobs = choose(logits, drawing(temperature=temperature), torch.full((1,), 0.5, dtype=torch.float64))
        assert 0 <= int(tokens) < 3
        assert logprobs.isnan().all()


def test_random_numbers_belong_to_seed_prompt_sample_and_position():
    base = uniforms((1, 2), 3, 4, 8)
    assert np.array_equal(uniforms((1, 2), 3, 4, 20)[:8], base)
    assert ((base >= 0) & (base < 1)).all()
    for other in (
        uniforms((1, 3), 3, 4, 8),
        uniforms((12,), 3, 4, 8),
        uniforms((1, 2), 4, 4, 8),
        uniforms((1, 2), 3, 5, 8),
    ):
        assert not np.isin(other, base).any()
