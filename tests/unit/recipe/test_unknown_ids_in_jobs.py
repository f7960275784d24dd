# SPDX-License-Identifier: Apache-2.0
"""Jobs of a model whose embedding has rows beyond the tokenizer's ids."""

import logging

import numpy as np
import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.reporting.rewards import StepWarnings
from tests.support.example_jobs import EXAMPLES, log_probs, metrics_of, stage, write_rows
from tests.support.policy_jobs import finished, policy_job, write_teacher


@pytest.fixture
def padded(tmp_path):
    """A folder with a model of 320 rows for 259 tokens."""
    write_tiny_model(tmp_path / "model", hidden=32, layers=2, max_positions=32, rows=320)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "masks"),
    [
        ({}, True),
        ({"train": "deepspeed"}, True),
        ({"train": "megatron"}, True),
        ({"rollout": "vllm"}, True),
        ({"rollout": "sglang"}, False),
        ({"train": "collections:OrderedDict"}, False),
        ({"rollout": "collections:OrderedDict"}, False),
        ({"mask_unknown_ids": False}, False),
    ],
)
def test_ids_are_masked_on_both_sides_or_on_none(settings, masks):
    once = EngineConfig(**settings).resolve(on_cuda=False)
    assert once.mask_unknown_ids == once.resolve(on_cuda=False).mask_unknown_ids == masks


def test_grpo_with_the_mask_begins_at_ratio_1(padded):
    _, rows = finished(policy_job(padded, "grpo", steps=2, algorithm={"correction": "truncate"}))
    assert not any("completions/unknown_ids" in row for row in rows)
    for row in rows:
        assert row["policy/mismatch_kl"] < 1e-9
        assert row["policy/ratio"] == pytest.approx(1, abs=1e-4)


def test_grpo_without_the_mask_counts_unknown_ids_and_warns_once(padded, caplog):
    with caplog.at_level(logging.WARNING):
        engine = {"threads": 1, "mask_unknown_ids": False}
        _, rows = finished(policy_job(padded, "grpo", steps=3, engine=engine, algorithm={"correction": "truncate"}))
    assert all(row["completions/unknown_ids"] > 10 for row in rows)  # of 32 samples of at most 8 tokens
    assert all(row["policy/mismatch_kl"] < 1e-9 for row in rows)
    assert ["not in the tokenizer" in record.message for record in caplog.records].count(True) == 1


def test_distillation_from_a_teacher_of_fewer_rows(padded):
    """It ended in step 1: the teacher has no row for an id that the policy sampled."""
    teachers = {"teacher": {"model": write_teacher(padded)}}
    _, rows = finished(policy_job(padded, "distill", steps=2, teachers=teachers))
    assert len(rows) == 2


def test_warning_of_unknown_ids_names_the_setting(caplog):
    warnings = StepWarnings(compares_samples=True, max_new_tokens=64)
    with caplog.at_level(logging.WARNING):
        for step, count in enumerate((0, 3, 2)):
            warnings.note_completions(step, {"completions/unknown_ids": count})
    (record,) = caplog.records
    consequence = "so no reward sees them: engine.mask_unknown_ids masks them in engines torch and vllm"
    assert record.message == f"step 1: 3 sampled ids are not in the tokenizer, {consequence}"


def test_sft_counts_unknown_ids_in_the_loss(padded):
    """SFT lowers the likelihood of such ids, as other libraries do."""
    rows = write_rows(padded / "examples.jsonl", EXAMPLES)
    config = {"model": str(padded / "model"), "data": {"train": rows}, "batch_size": 4, "engine": {"threads": 1}}
    stage("sft", padded / "out", config).run()
    (row,) = metrics_of(padded / "out")
    plain = np.concatenate(log_probs(str(padded / "model"), EXAMPLES))
    assert row["loss"] == pytest.approx(-plain.mean(), abs=1e-5)
