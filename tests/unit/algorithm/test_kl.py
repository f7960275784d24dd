# SPDX-License-Identifier: Apache-2.0
"""KL estimators: values, and expected gradients summed exactly over a small vocabulary."""

import pytest
import torch

from dlrover.python.rl.algorithm.losses.policy_gradient import kl_estimate, kl_penalty

KINDS = ("k1", "k2", "k3")


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    policy, reference = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference.log_softmax(-1)


def expected_gradient(kind: str) -> torch.Tensor:
    """The gradient of the estimator as a loss, averaged over tokens drawn from the policy."""
    logits, reference = policies()
    logprobs = logits.log_softmax(-1)
    (logprobs.detach().exp() * kl_estimate(logprobs, reference, kind)).sum().backward()
    return logits.grad


def divergence_gradient(forward: bool) -> torch.Tensor:
    logits, reference = policies()
    logprobs = logits.log_softmax(-1)
    if forward:
        (reference.exp() * (reference - logprobs)).sum().backward()
    else:
        (logprobs.exp() * (logprobs - reference)).sum().backward()
    return logits.grad


@pytest.mark.feature(116)
@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065307)])
def test_values_by_hand(kind, expected):
    value = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), kind)
    assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.feature(116)
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_exact_in_expectation(kind):
    logits, reference = policies()
    logprobs = logits.detach().log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    assert (logprobs.exp() * kl_estimate(logprobs, reference, kind)).sum().item() == pytest.approx(exact.item())


@pytest.mark.feature(116)
def test_expected_gradients():
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(7, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k2"), divergence_gradient(forward=False))
    torch.testing.assert_close(expected_gradient("k3"), divergence_gradient(forward=True))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_give_zero(kind):
    logprobs = torch.tensor([-0.5, -20.0])
    assert kl_estimate(logprobs, logprobs, kind).tolist() == [0, 0]


def test_k1_is_no_loss_and_unknown_kinds_are_refused():
    logprobs = torch.tensor([-1.0])
    with pytest.raises(ValueError, match="k1 cannot be a loss: .* expectation under pi is zero"):
        kl_penalty(logprobs, logprobs, "k1")
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_penalty(logprobs, logprobs, "k4")
    with pytest.raises(ValueError, match="unknown KL estimator 'kl'"):
        kl_estimate(logprobs, logprobs, "kl")
