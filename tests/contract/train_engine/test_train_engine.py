# SPDX-License-Identifier: Apache-2.0
"""Contract of every train engine in every layout: steps like a plain loop's, and all that must not change them."""

import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, Qwen2ForTokenClassification

from dlrover.python.rl.engine.api.settings import Layout
from tests.support.plain_engine import (
    EntropyLoss,
    apart,
    assert_close,
    make_batch,
    plain_model,
    plain_outputs,
    plain_score_loss,
    plain_scores,
    plain_steps,
    reported,
    score_loss,
    start_weights,
    write_model,
)
from tests.support.processes import run
from tests.support.train_cases import ENGINES, is_on_host, is_slow, parameters
from tests.support.train_exercise import (
    SAVED_AFTER,
    STEPS,
    five_steps,
    go_on,
    make_engine,
    replica_of,
    share,
    train,
    weights_of,
)

# -- five steps -------------------------------------------------------------------------------------------------------


@pytest.mark.feature(44, 47)
@pytest.mark.parametrize("case", parameters())
def test_five_steps_end_in_the_weights_of_the_plain_loop(case, ranks_of, expected):
    reports, weights = expected
    for rank in ranks_of(five_steps, case):
        assert_close(rank["weights"], weights)
        for step, plain in zip(rank["steps"], reports, strict=True):
            assert reported(step) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("case", parameters())
def test_each_rank_notes_progress_at_every_micro_batch(case, ranks_of):
    """Check the signs of progress without which a long call would be treated as hung."""
    for rank in ranks_of(five_steps, case):
        evaluated, trained = rank["progress"]
        assert evaluated >= 1 and trained >= SAVED_AFTER


@pytest.mark.feature(52)
@pytest.mark.parametrize("case", parameters())
def test_all_ranks_report_the_same_of_a_step(case, ranks_of):
    first, *later = (rank["steps"] for rank in ranks_of(five_steps, case))
    assert all(reports == first for reports in later)


def rows_of(ranks, column):
    """A column's rows, of one rank of each replica, in the replicas' order."""
    by_replica = {rank["replica"]: rank[column] for rank in ranks}
    return [row for replica in sorted(by_replica) for row in by_replica[replica]]


@pytest.mark.feature(47, 50)
@pytest.mark.parametrize("case", parameters())
def test_logprobs_and_entropies_are_the_dense_models(case, ranks_of, model_path):
    model, batch, ranks = plain_model(model_path), make_batch(0), ranks_of(five_steps, case)
    columns = [batch.ragged(name) for name in ("tokens", "action_mask", "candidates")]
    for index, kind in enumerate(("logprobs", "entropy", "candidate_logprobs")):
        for row, tokens, mask, candidates in zip(rows_of(ranks, kind), *columns, strict=True):
            with torch.no_grad():
                wanted = plain_outputs(model, tokens, mask, candidates)[index].numpy()
            assert np.allclose(row[mask], wanted, atol=1e-5)
            assert not row[~mask].any()


@pytest.mark.feature(17)
@pytest.mark.parametrize("case", parameters())
def test_in_host_memory_nothing_is_on_the_device(case, ranks_of):
    for rank in ranks_of(five_steps, case):
        before, empty, after = rank["footprints"]
        assert before == after and "weights" in before
        assert ("optimizer" in before) != is_on_host(case)
        assert (empty, rank["places"]) == ({}, ["cpu", "cuda"])


@pytest.mark.feature(45)
@pytest.mark.parametrize("case", parameters())
def test_copies_of_a_part_are_equal_to_the_bit(case, ranks_of):
    layout = Layout.of(case.world_size, case.sizes)
    by_part = {}
    for number, rank in enumerate(ranks_of(five_steps, case)):
        place = layout.coordinates(number)
        by_part.setdefault((place.shard, place.pipeline, place.context, place.tensor), set()).add(rank["digest"])
    assert all(len(digests) == 1 for digests in by_part.values())


@pytest.mark.parametrize("case", parameters())
def test_rank_0_publishes_all_weights(case, ranks_of, expected):
    assert ranks_of(five_steps, case)[0]["snapshot"] == sorted(expected[1])


@pytest.mark.parametrize(
    "case", parameters(slow=lambda case: is_slow(case) or 2 in (case.sizes.ddp_size, case.sizes.context_parallel_size))
)
def test_a_loaded_checkpoint_continues_bit_for_bit(case, ranks_of, model_path, folder):
    undisturbed = ranks_of(five_steps, case)
    (alone,) = [other for other in ENGINES[case.engine].cases if other.name == f"{case.engine}-1"] or [case]
    ranks_of(five_steps, alone)
    results = run(case.world_size, go_on, case, model_path, folder / case.name, folder / alone.name)
    for rank, (same, resharded) in zip(undisturbed, results, strict=True):
        assert same["digest"] == rank["digest"]
        assert same["steps"] == rank["steps"][SAVED_AFTER:]
        assert_close(resharded["weights"], rank["weights"])


# -- scores in place of log-probs, and bf16 ---------------------------------------------------------------------------


def has_several_ranks(case):
    """Engines in one process are looked at elsewhere, in more detail."""
    return case.world_size > 1


@pytest.fixture(scope="module")
def critic_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("critic") / "T", kind=Qwen2ForTokenClassification, num_labels=1)


def score_and_round(rank, world_size, port, case, path, folder, critic_path):
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
def critic(critic_path):
    """The scores of the first batch's action tokens, row by row, and five steps."""
    model, batch = plain_model(critic_path, AutoModelForTokenClassification), make_batch(0)
    rows = zip(batch.ragged("tokens"), batch.ragged("action_mask"), strict=True)
    with torch.no_grad():
        scores = [plain_scores(model, tokens, mask).numpy() for tokens, mask in rows]
    return scores, *plain_steps(model, plain_score_loss, "scores")


@pytest.mark.feature(56)
@pytest.mark.parametrize("case", parameters(has_several_ranks))
def test_a_critics_scores_and_steps_are_the_plain_loops(case, ranks_of, critic, critic_path):
    """Check a head of one row too, which is less than the ranks that shard it."""
    ranks, (wanted, reports, weights) = ranks_of(score_and_round, case, critic_path), critic
    rows = zip(rows_of(ranks, "scores"), wanted, make_batch(0).ragged("action_mask"), strict=True)
    for row, scores, mask in rows:
        assert np.allclose(row[mask], scores, atol=1e-5)
        assert not row[~mask].any()
    for rank in ranks:
        steps, trained_weights = rank["critic"]
        assert_close(trained_weights, weights)
        for step, plain in zip(steps, reports, strict=True):
            assert reported(step) == pytest.approx(plain, rel=1e-5)


@pytest.mark.feature(53)
@pytest.mark.parametrize("case", parameters(has_several_ranks))
def test_bf16_is_near_and_weights_are_float32(case, ranks_of, expected, model_path, critic_path):
    reports, weights = expected
    ranks = ranks_of(score_and_round, case, critic_path)
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

PATIENCE_S = 8.0


class Stalling(EntropyLoss):
    """Sleep on one rank in the middle of a step, for much longer than the others wait."""

    def __call__(self, logprobs, columns):
        time.sleep(3 * PATIENCE_S)
        return super().__call__(logprobs, columns)


def stalled(rank, world_size, port, case, path):
    engine = make_engine(case, rank, port, path, timeout_s=PATIENCE_S)
    train(engine, rank, [0])
    began_s, message = time.monotonic(), ""
    try:
        engine.step(share(engine, rank, 1), Stalling() if rank else EntropyLoss())
    except RuntimeError as error:
        message = str(error)
    return time.monotonic() - began_s, message


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters(only=lambda case: case.world_size == 2))
def test_ranks_wait_for_a_stalled_one_until_their_timeout(case, model_path):
    (waited_s, message), _ = run(2, stalled, case, model_path)
    assert "timed out" in message.lower()
    assert waited_s < 2.5 * PATIENCE_S
