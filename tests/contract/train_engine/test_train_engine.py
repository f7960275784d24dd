# SPDX-License-Identifier: Apache-2.0
"""Contract of every train engine in every layout: five steps like a plain loop's, and all that must not change them."""

import functools

import numpy as np
import pytest
import torch

from dlrover.python.rl.engine.api.settings import Layout
from tests.support.plain_engine import (
    assert_close,
    make_batch,
    plain_model,
    plain_outputs,
    plain_run,
    reported,
    write_model,
)
from tests.support.processes import run
from tests.support.train_cases import ENGINES, is_on_host, is_slow, named, parameters
from tests.support.train_exercise import SAVED_AFTER, five_steps, go_on

# -- what is compared -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("contract") / "T")


@pytest.fixture(scope="session")
def expected(model_path):
    torch.set_num_threads(1)
    return plain_run(model_path)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def results_of(model_path, checkpoints):
    """A function that returns each rank's results of five steps of a case. Each case runs once."""

    @functools.cache
    def of(name):
        case = named(name)
        return run(case.world_size, five_steps, case, model_path, checkpoints / name)

    return of


@pytest.mark.feature(44, 47)
@pytest.mark.parametrize("case", parameters())
def test_five_steps_end_in_the_weights_of_the_plain_loop(case, results_of, expected):
    reports, weights = expected
    for rank in results_of(case.name):
        assert_close(rank["weights"], weights)
        for step, plain in zip(rank["told"], reports, strict=True):
            assert reported(step) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("case", parameters())
def test_each_rank_notes_progress_at_every_micro_batch(case, results_of):
    """Check the signs of progress without which a long call would be treated as hung."""
    for rank in results_of(case.name):
        evaluated, trained = rank["progress"]
        assert evaluated >= 1 and trained >= SAVED_AFTER


@pytest.mark.feature(52)
@pytest.mark.parametrize("case", parameters())
def test_what_a_step_reports_is_the_same_on_all_ranks(case, results_of):
    first, *later = (rank["told"] for rank in results_of(case.name))
    assert all(reports == first for reports in later)


@pytest.mark.feature(47, 50)
@pytest.mark.parametrize("case", parameters())
def test_logprobs_and_entropies_are_the_dense_models(case, results_of, model_path):
    model, batch = plain_model(model_path), make_batch(0)
    ranks = results_of(case.name)
    parts = [
        next(rank for rank in ranks if rank["replica"] == at) for at in sorted({rank["replica"] for rank in ranks})
    ]
    columns = [batch.ragged(name) for name in ("tokens", "action_mask", "candidates")]
    for index, kind in enumerate(("logprobs", "entropy", "candidate_logprobs")):
        rows = [row for part in parts for row in part[kind]]
        for row, tokens, mask, candidates in zip(rows, *columns, strict=True):
            with torch.no_grad():
                wanted = plain_outputs(model, tokens, mask, candidates)[index].numpy()
            assert np.allclose(row[mask], wanted, atol=1e-5)
            assert not row[~mask].any()


@pytest.mark.feature(17)
@pytest.mark.parametrize("case", parameters())
def test_in_host_memory_nothing_is_on_the_device(case, results_of):
    for rank in results_of(case.name):
        before, empty, after = rank["footprints"]
        assert before == after
        assert "weights" in before
        assert ("optimizer" in before) != is_on_host(case)
        assert empty == {}
        assert rank["places"] == ["cpu", "cuda"]


@pytest.mark.feature(45)
@pytest.mark.parametrize("case", parameters())
def test_copies_of_a_part_are_equal_to_the_bit(case, results_of):
    layout = Layout.of(case.world_size, case.sizes)
    by_part = {}
    for number, rank in enumerate(results_of(case.name)):
        place = layout.coordinates(number)
        by_part.setdefault((place.shard, place.pipeline, place.context, place.tensor), set()).add(rank["digest"])
    assert all(len(digests) == 1 for digests in by_part.values())


@pytest.mark.parametrize("case", parameters())
def test_rank_0_publishes_all_weights(case, results_of, expected):
    ranks = results_of(case.name)
    assert ranks[0]["snapshot"] == sorted(expected[1])


@pytest.mark.parametrize(
    "case", parameters(slow=lambda case: is_slow(case) or 2 in (case.sizes.ddp_size, case.sizes.context_parallel_size))
)
def test_saved_loaded_and_continued_is_not_stopping_bit_for_bit(case, results_of, model_path, checkpoints):
    undisturbed = results_of(case.name)
    alone = f"{case.engine}-1"
    if any(case.name == alone for engine in ENGINES.values() for case in engine.cases):
        results_of(alone)
    else:
        alone = case.name
    folders = (checkpoints / case.name, checkpoints / alone)
    for rank, (same, resharded) in zip(
        undisturbed, run(case.world_size, go_on, case, model_path, *folders), strict=True
    ):
        assert same["digest"] == rank["digest"]
        assert same["told"] == rank["told"][SAVED_AFTER:]
        assert_close(resharded["weights"], rank["weights"])
