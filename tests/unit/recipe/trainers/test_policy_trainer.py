# SPDX-License-Identifier: Apache-2.0
"""Decisions of the loop about a step: whether it trains, which model is the best, and what is written again."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.base.config import PolicyConfig
from dlrover.python.rl.recipe.online.batch import SampleLog, StepBatch
from dlrover.python.rl.recipe.reporting.rewards import StepWarnings
from dlrover.python.rl.recipe.trainers import policy_trainer
from dlrover.python.rl.recipe.trainers.policy_trainer import PolicyTrainer
from dlrover.python.rl.trainer.plan import plan_of
from dlrover.python.rl.trainer.port import Pending

NAN = float("nan")


def step_of(*rewards):
    count = len(rewards)
    rows = Batch(
        {
            "prompt_id": np.zeros(count, dtype=np.int64),
            "sample_index": np.arange(count),
            "retry": np.zeros(count, dtype=np.int64),
            "reward": np.array(rewards),
            "action_tokens": np.ones(count, dtype=np.int64),
            "token_count": np.ones(count, dtype=np.int64),
            "finished": np.ones(count, dtype=np.bool_),
        }
    )
    return StepBatch(Pending([]), tuple(range(count)), rows, 1, count, train_rows=rows)


@pytest.mark.parametrize(
    ("rewards", "weights", "calls"),
    [((NAN, NAN), (1, 1), []), ((NAN, 1.0), (0, 0), ["aux"]), ((NAN, 1.0), (0, 1), ["aux", "update"])],
)
def test_step_without_a_weighted_sample_updates_nothing(rewards, weights, calls):
    done, weighted = [], Batch({"weight": np.float32(weights)})
    trainer = SimpleNamespace(
        run_log=SimpleNamespace(write_refused=None),
        offending_samples=lambda batch: [],
        compute_aux_outputs=lambda batch: done.append("aux"),
        add_token_columns=lambda batch, aux: batch.train_rows,
        algorithm=SimpleNamespace(annotate=lambda rows: weighted),
        update=lambda *_: done.append("update") or {"loss": 1.0},
    )
    metrics = PolicyTrainer.train(trainer, 3, step_of(*rewards))
    assert done == calls and metrics == ({"loss": 1.0} if "update" in calls else {})


@pytest.mark.parametrize(
    ("evaluation", "is_offered"),
    [
        ({"eval/reward": 0.5}, True),
        ({"eval/a/reward": 0.5, "eval/b/reward": NAN}, False),
        ({"eval/reward": NAN}, False),
    ],
)
@pytest.mark.parametrize("step", [4, 5])
def test_best_model_has_an_evaluation_of_all_sets(monkeypatch, evaluation, is_offered, step):
    calls = []
    monkeypatch.setattr(policy_trainer.rewards, "step_metrics", lambda scores: evaluation)
    collector = SimpleNamespace(
        synced_bytes=7,
        sync_weights=lambda: calls.append("sync"),
        evaluate=lambda step: calls.append("evaluate"),
        collect_scores=lambda answers: answers,
    )
    trainer = SimpleNamespace(
        cfg=PolicyConfig(model="m", eval_every=2),
        reward_failures=SimpleNamespace(metrics=dict),
        collector=collector,
        sandbox={},
        warnings=StepWarnings(True, 64),
        model_saver=SimpleNamespace(
            update=lambda step, metrics: calls.append("offer"), save_step=lambda step: calls.append("save")
        ),
        report=lambda step, metrics, *counts: calls.append(counts),
    )
    PolicyTrainer.record(trainer, step, step_of(0.0, 1.0), {})
    evaluated = ["sync", "evaluate", *(["offer"] if is_offered else [])] if step == 4 else []
    assert calls == [*evaluated, "save", (2, 2, 2)]


@pytest.mark.parametrize(
    ("marks", "is_refused"), [({"actor": "a", "critic": "a"}, False), ({"actor": "a", "critic": "b"}, True)]
)
def test_role_with_another_vocabulary_is_refused(marks, is_refused):
    trainer = SimpleNamespace(group=lambda role: SimpleNamespace(vocabulary=lambda: [marks[role]]))
    with pytest.raises(EngineError, match="'critic' has another vocabulary") if is_refused else nullcontext():
        PolicyTrainer.check_vocabularies(trainer, ["critic"])


@pytest.mark.parametrize(
    ("name", "engine", "precision", "max_staleness", "corrects"),
    [
        ("gspo", "torch", "fp32", 0, False),
        ("gspo", "torch", "fp32", 1, True),
        ("grpo", "torch", "fp32", 1, False),
        ("grpo", "vllm", "fp32", 0, True),
        ("grpo", "torch", "bf16", 0, True),
    ],
)
def test_correction_is_on_where_rollouts_differ(name, engine, precision, max_staleness, corrects):
    config = {"engine": {"rollout": engine, "precision": precision}, "rollout": {"max_staleness": max_staleness}}
    assert bool(plan_of(PolicyTrainer).algorithm_defaults(config, name)) == corrects


@pytest.mark.parametrize(
    ("name", "logged"),
    [("loss", "loss"), ("entropy", "policy/entropy"), ("critic/loss", "critic/loss"), ("lr", "lr")],
)
def test_metric_of_an_update_has_one_name(name, logged):
    assert policy_trainer._log_name(name) == logged


def test_repeated_step_has_its_lines_once(tmp_path):
    calls, log = [], SimpleNamespace()
    rollouts = SimpleNamespace(begin_samples=lambda *place: calls.append(place) or [40])
    trainer = SimpleNamespace(RG_ROLLOUT=rollouts, job_dir=tmp_path, run_log=log, results_dir=Path(tmp_path))
    samples = SampleLog(trainer, None)
    samples.load_state_dict({"end": 60})
    samples.begin_step(5)
    assert calls == [(tmp_path / "samples.jsonl", 5, 60)]
    assert samples.state_dict() == {"end": 40}
