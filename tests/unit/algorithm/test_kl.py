# SPDX-License-Identifier: Apache-2.0
"""KL estimators: values, and expected gradients summed exactly over a small vocabulary."""

import pytest
import torch

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.policy_gradient import kl_estimate
from dlrover.python.rl.algorithm.registry import make_algorithm

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
    with pytest.raises(ValueError, match="k1 cannot be a loss: its expected gradient is zero"):
        GRPO(kl_estimator="k1")
    with pytest.raises(ValueError, match="kl_estimator: input should be 'k1', 'k2' or 'k3', got 'k4'"):
        GRPO(kl_estimator="k4")
    with pytest.raises(ValueError, match="unknown KL estimator 'kl'"):
        kl_estimate(logprobs, logprobs, "kl")


SURE_OF_OTHERS = [
    # log-prob of the policy (the reference has -1), k3 and its gradient, and k3 without the bound
    (-0.5, 0.106531, 0.393469, 0.106531),
    (-2.0, 0.718282, -1.718282, 0.718282),
    (-5.0, 49.59815, -53.59815, 49.59815),
    (-10.5, 13349.23, -13358.73, 13349.23),
    (-11.5, 22015.47, 0.0, 36304.00),
    (-25.0, 22015.47, 0.0, 2.6489e10),
    (-60.0, 22015.47, 0.0, 4.2012e25),
    (-95.0, 22015.47, 0.0, float("inf")),
    (-1e30, 22015.47, 0.0, float("inf")),
]


@pytest.mark.parametrize(("policy", "value", "slope", "unbounded"), SURE_OF_OTHERS)
def test_k3_of_an_unlikely_token_is_bounded(policy, value, slope, unbounded):
    logprobs, reference = torch.tensor([policy], requires_grad=True), torch.tensor([-1.0])
    penalty = kl_estimate(logprobs, reference, "k3")
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(value, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-5)
    x = logprobs.detach() - reference
    assert (x + torch.expm1(-x)).item() == pytest.approx(unbounded, rel=1e-5)


def test_k1_and_k2_of_an_unlikely_token_are_not_bounded():
    logprobs, reference = torch.tensor([-95.0]), torch.tensor([-1.0])
    assert kl_estimate(logprobs, reference, "k1").item() == -94
    assert kl_estimate(logprobs, reference, "k2").item() == 4418


@pytest.mark.parametrize("where", ["loss", "advantage"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo", "ppo"])
def test_unlikely_token_leaves_loss_and_gradient_small(name, where):
    algorithm = make_algorithm(name, {"kl_coef": 0.001, "kl_in": where, "kl_estimator": "k3"})
    logprobs = torch.tensor([-95.0, -1.0, -1.0], requires_grad=True)
    columns = {
        "old_logprobs": logprobs.detach(),
        "ref_logprobs": torch.full((3,), -1.0),
        "advantage": torch.ones(3),
        "weight": torch.full((3,), 1 / 3),
        "unit": torch.zeros(3, dtype=torch.int64),
    }
    loss, metrics = algorithm.loss(logprobs, columns)
    loss.backward()
    assert abs(loss.item()) < 1000  # before the bound: infinite
    assert logprobs.grad.abs().max() < 10
    assert metrics["kl"].item() == pytest.approx(22015.47 / 3, rel=1e-4)
