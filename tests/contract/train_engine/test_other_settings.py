# SPDX-License-Identifier: Apache-2.0
"""Every layout with other settings than the five steps have: scores in place of log-probs, bf16, a rank that stalls."""

import functools
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, Qwen2ForTokenClassification

from tests.support.plain_engine import (
    EntropyLoss,
    apart,
    assert_close,
    make_batch,
    plain_model,
    plain_run,
    plain_score_loss,
    plain_scores,
    plain_steps,
    reported,
    score_loss,
    start_weights,
    write_model,
)
from tests.support.processes import run
from tests.support.train_cases import named, parameters
from tests.support.train_exercise import STEPS, make_engine, replica_of, share, train, weights_of

PATIENCE_S = 8.0


def slow(case):
    """The engines that the usual environment has are looked at elsewhere, in more detail."""
    return case.world_size > 1


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("settings") / "T")


@pytest.fixture(scope="module")
def critic_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("critic") / "T", kind=Qwen2ForTokenClassification, num_labels=1)


def score_and_round(rank, world_size, port, case, path, critic_path):
    """Five steps of a critic; and five of the policy in bf16, its activations recomputed."""
    critic = make_engine(case, rank, port, critic_path, head="token")
    scores = critic.evaluate(share(critic, rank, 0)).ragged("scores")
    reports = [critic.step(share(critic, rank, seed), score_loss) for seed in range(STEPS)]
    rough = make_engine(case, rank, port, path, precision="bf16", gradient_checkpointing=True)
    result = {
        "replica": replica_of(critic, rank),
        "scores": [row.copy() for row in scores],
        "critic": (reports, weights_of(critic)),
        "rough": (train(rough, rank, range(STEPS)), weights_of(rough)),
    }
    rough.close()
    critic.close()
    return result


@pytest.fixture(scope="module")
def results_of(model_path, critic_path):
    @functools.cache
    def of(name):
        case = named(name)
        return run(case.world_size, score_and_round, case, model_path, critic_path)

    return of


@pytest.fixture(scope="module")
def expected(model_path):
    return plain_run(model_path)


@pytest.fixture(scope="module")
def critic(critic_path):
    """The scores of the first batch's action tokens, row by row, and five steps."""
    model, batch = plain_model(critic_path, AutoModelForTokenClassification), make_batch(0)
    rows = zip(batch.ragged("tokens"), batch.ragged("action_mask"), strict=True)
    with torch.no_grad():
        scores = [plain_scores(model, tokens, mask).numpy() for tokens, mask in rows]
    return scores, *plain_steps(model, plain_score_loss, "scores")


@pytest.mark.parametrize("case", parameters(slow))
def test_a_critics_scores_and_steps_are_the_plain_loops(case, results_of, critic):
    ranks, (wanted, reports, weights) = results_of(case.name), critic
    by_replica = {rank["replica"]: rank["scores"] for rank in ranks}
    rows = [row for replica in sorted(by_replica) for row in by_replica[replica]]
    for row, scores, mask in zip(rows, wanted, make_batch(0).ragged("action_mask"), strict=True):
        assert np.allclose(row[mask], scores, atol=1e-5)
        assert not row[~mask].any()
    for rank in ranks:
        steps, found_weights = rank["critic"]
        assert_close(found_weights, weights)
        for step, plain in zip(steps, reports, strict=True):
            assert reported(step) == pytest.approx(plain, rel=1e-5)


@pytest.mark.feature(53)
@pytest.mark.parametrize("case", parameters(slow))
def test_bf16_is_near_and_the_weights_are_float32_on_every_rank(case, results_of, expected, model_path):
    reports, weights = expected
    ranks = results_of(case.name)
    for rank in ranks:
        steps, rough = rank["rough"]
        assert steps == ranks[0]["rough"][0]
        for step, plain in zip(steps, reports, strict=True):
            assert step.loss == pytest.approx(plain["loss"], rel=0.02)
            assert step.grad_norm == pytest.approx(plain["grad_norm"], rel=0.05)
        assert {tensor.dtype for tensor in rough.values()} == {np.dtype(np.float32)}
        # One step less, or two in another order, are 0.2 apart.
        assert 1e-3 < apart(rough, weights, start_weights(model_path)) < 0.05


# -- a rank that stalls -----------------------------------------------------------------------------------------------


class Stalling(EntropyLoss):
    """Sleep on one rank in the middle of a step, for much longer than the others wait."""

    def __call__(self, logprobs, columns):
        time.sleep(3 * PATIENCE_S)
        return super().__call__(logprobs, columns)


def stalled(rank, world_size, port, case, path):
    engine = make_engine(case, rank, port, path, timeout_s=PATIENCE_S)
    train(engine, rank, [0])
    began_s = time.monotonic()
    try:
        engine.step(share(engine, rank, 1), Stalling() if rank else EntropyLoss())
    except RuntimeError as error:
        return time.monotonic() - began_s, str(error)
    return time.monotonic() - began_s, ""


def two_ranks(case):
    return case.world_size == 2


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters(only=two_ranks))
def test_the_others_wait_for_a_rank_no_longer_than_they_were_told(case, model_path):
    (waited_s, message), _ = run(2, stalled, case, model_path)
    assert "timed out" in message.lower()
    assert waited_s < 2.5 * PATIENCE_S
