# SPDX-License-Identifier: Apache-2.0
"""Small runs of the policy recipes: what they log and leave, columns of an engine, unknown ids, and what they learn."""

import logging
import os

import numpy as np
import pytest

from dlrover.python.rl.algorithm.losses.policy_gradient import PolicyGradient
from dlrover.python.rl.algorithm.registry import ALGORITHMS
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.environment.sandbox.confinement import sandbox_level
from dlrover.python.rl.recipe.base.config import EngineConfig
from tests.support import column_engine
from tests.support.example_jobs import EXAMPLES, log_probs, stage
from tests.support.policy_jobs import finished, policy_job, reverse_kl, write_inputs, write_teacher
from tests.support.run_files import metrics_of, read_json, read_lines, write_rows

MODEL = "model/model.safetensors"
PRIVATE = ("checkpoints", "commits", "journal.jsonl")
"""Files for a later start of the run alone."""

ADAPTED = ("model.safetensors", "config.json", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")


@pytest.mark.feature(125)
def test_actor_stays_while_the_critic_is_warmed_up(tmp_path):
    critic = {"optimizer": {"lr": 3e-3}, "warmup_steps": 3}
    out, rows = finished(policy_job(tmp_path, "ppo", out="frozen", steps=3, critic=critic))
    assert rows[2]["critic/value_error"] < rows[0]["critic/value_error"]
    assert all(row[f"sandbox/{sandbox_level()}"] == 1 for row in rows)
    assert (out / MODEL).read_bytes() == (tmp_path / MODEL).read_bytes()
    out, rows = finished(policy_job(tmp_path, "ppo", steps=4, critic=critic))
    assert ["loss" in row for row in rows] == [False] * 3 + [True]
    assert (out / MODEL).read_bytes() != (tmp_path / MODEL).read_bytes()


@pytest.mark.slow
def test_evaluation_of_two_sets_has_metrics_of_each(tmp_path):
    counts = {"few": 2, "more": 3}
    rows = {name: [{"prompt": f"{name}{n}", "answer": "1"} for n in range(count)] for name, count in counts.items()}
    sets = {name: write_rows(tmp_path / f"{name}.jsonl", prompts) for name, prompts in rows.items()}
    data = {"train": str(tmp_path / "problems.jsonl"), "eval": sets}
    evaluation = {"eval_every": 1, "eval": {"samples": 4, "temperature": 1.0}, "keep": {"best": "eval/more/pass@2"}}
    reward = {"function": "tests.support.policy_rewards:odd", "workers": 1, "timeout_s": 60.0}
    folder, (metrics,) = finished(policy_job(tmp_path, "ppo", data=data, steps=1, reward=reward, **evaluation))
    held_out, summary = read_lines(folder / "held_out.jsonl"), read_json(folder / "summary.json")
    places = [(name, row) for name, count in counts.items() for row in range(count) for _ in range(4)]
    assert [(row["set"], row["row"]) for row in held_out] == places
    for name in sets:
        right = np.array([row["reward"] for row in held_out if row["set"] == name]).reshape(-1, 4)
        expected = {"avg@4": right.mean(), "pass@4": right.any(axis=1).mean()}
        assert {key: metrics[f"eval/{name}/{key}"] for key in expected} == pytest.approx(expected)
        assert summary[f"eval/{name}/accuracy"] == pytest.approx(right.mean())
    assert (folder / "best/config.json").is_file()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), pytest.param(0o077, 0o600, marks=pytest.mark.slow)])
def test_run_folder_is_complete_and_readable_as_the_umask_says(tmp_path, umask, mode):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    before = os.umask(umask)
    try:
        engine = {"threads": 1, "lora": {"rank": 2}}
        out, (step,) = finished(policy_job(tmp_path, "grpo", steps=1, engine=engine, keep={"save_every": 1}))
    finally:
        os.umask(before)
    files = {path.relative_to(out): path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    assert {str(name): bits for name, bits in files.items() if name.parts[0] not in PRIVATE and bits != mode} == {}
    assert {bits for name, bits in files.items() if name.parts[0] in PRIVATE} <= {0o600}
    models = {f"{folder}/{file}" for folder in ("model", "steps/step-1") for file in ADAPTED}
    assert models | {"job.yaml", "environment.jsonl", "metrics.jsonl", "samples.jsonl"} <= set(map(str, files))
    summary = read_json(out / "summary.json")
    evaluated = {name.removeprefix("before/") for name in summary if name.startswith("before/")}
    assert evaluated == {"eval/accuracy", "eval/reward", "eval/failed"} and evaluated <= summary.keys()
    assert step["step"] == 1


# -- columns of a rollout engine, on their way to a loss ---------------------------------------------------------------

ENVIRONMENT = """
async def step(state, action, extra_info):
    return {"next_state": f"{state}{action}? ", "reward": float(len(set(action))), "done": False,
            "extra_info": extra_info}
"""


def run_with_columns(folder, turns, max_staleness):
    for record in (column_engine.generated, column_engine.annotated, column_engine.arrived):
        record.clear()
    (folder / "asks.py").write_text(ENVIRONMENT)
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 5, "max_staleness": max_staleness, "max_turns": turns}
    rollout |= {"env_path": str(folder / "asks.py"), "env_isolated": False}
    engine = {"threads": 1, "rollout": "tests.support.column_engine:MarginEngine"}
    algorithm = {"name": "tests.support.column_engine:Doubtful"}
    finished(policy_job(folder, "grpo", rollout=rollout, engine=engine, algorithm=algorithm, reward={}))
    return {tuple(tokens[at] for at in range(len(tokens))) for tokens in column_engine.generated.values()}


def rows_of_losses():
    """Yield the tokens of each row at a loss (log-prob, margin and the two likely ids), and its column per sample."""
    for columns in column_engine.arrived:
        values = {name: column.numpy() for name, column in columns.items()}
        for unit in np.unique(values["unit"]):
            own = {name: column[values["unit"] == unit] for name, column in values.items()}
            tokens = zip(own["rollout_logprobs"], own["margin"], *own["likely"].T.tolist(), strict=True)
            yield list(tokens), own["passes"]


def split_turns(tokens, completions):
    """The completions that a row's tokens consist of; fails if they are not whole ones."""
    turns = []
    while tokens:
        turn = next(each for each in completions if each == tuple(tokens[: len(each)]))
        turns, tokens = [*turns, turn], tokens[len(turn) :]
    return turns


@pytest.mark.parametrize(("turns", "max_staleness"), [(1, 0), (3, 1)])
def test_engine_columns_arrive_at_the_loss_token_by_token(tmp_path, turns, max_staleness):
    generated = run_with_columns(tmp_path, turns, max_staleness)
    completions = {tuple(token[1:] for token in tokens) for tokens in generated}
    rows = [(split_turns(tokens, completions), passes) for tokens, passes in rows_of_losses()]
    assert len(rows) == 3 * 4 * 4
    assert {len(parts) for parts, _ in rows} == {turns}
    assert all(set(passes) == {len(parts[-1])} for parts, passes in rows)
    for batch in column_engine.annotated:
        assert batch.dense("passes").min() >= 1
        for margin, is_action in zip(batch.ragged("margin"), batch.ragged("action_mask"), strict=True):
            assert len(margin) == len(is_action)
            assert (margin[~is_action] == -1).all(), "filled outside the policy's tokens"
            assert (margin[is_action] >= 0).all()


# -- a model whose embedding has rows beyond the tokenizer's ids -------------------------------------------------------


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
        ({"rollout": "vllm"}, True),
        ({"rollout": "sglang"}, False),
        ({"train": "collections:OrderedDict"}, False),
        ({"mask_unknown_ids": False}, False),
    ],
)
def test_unknown_ids_are_masked_on_both_sides_or_on_none(settings, masks):
    once = EngineConfig(**settings).resolve(on_cuda=False)
    assert once.mask_unknown_ids == once.resolve(on_cuda=False).mask_unknown_ids == masks


def test_grpo_with_the_mask_begins_at_ratio_1(padded):
    algorithm = {"correction": "truncate", "correction_level": "sequence"}  # with a pass before the loss
    _, rows = finished(policy_job(padded, "grpo", steps=2, algorithm=algorithm))
    assert not any("completions/unknown_ids" in row for row in rows)
    for row in rows:
        assert row["policy/mismatch_kl"] < 1e-9
        assert row["policy/ratio"] == pytest.approx(1, abs=1e-4)


def test_grpo_without_the_mask_counts_unknown_ids_and_warns_once(padded, caplog):
    engine = {"threads": 1, "mask_unknown_ids": False}
    with caplog.at_level(logging.WARNING):
        _, rows = finished(policy_job(padded, "grpo", steps=3, engine=engine, algorithm={"correction": "truncate"}))
    assert all(row["completions/unknown_ids"] > 10 for row in rows)  # of 32 samples of at most 8 tokens
    assert all(row["policy/mismatch_kl"] < 1e-9 for row in rows)
    (message,) = (record.message for record in caplog.records if "not in the tokenizer" in record.message)
    assert message.endswith("so no reward sees them: engine.mask_unknown_ids masks them in engines torch and vllm")


def test_distillation_from_a_teacher_of_fewer_rows_finishes(padded):
    """The teacher has no row for some ids that the policy samples."""
    teachers = {"teacher": {"model": write_teacher(padded)}}
    _, rows = finished(policy_job(padded, "distill", steps=2, teachers=teachers))
    assert len(rows) == 2


def test_sft_counts_unknown_ids_in_the_loss(padded):
    """SFT lowers the likelihood of such ids, as other libraries do."""
    rows = write_rows(padded / "examples.jsonl", EXAMPLES)
    config = {"model": str(padded / "model"), "data": {"train": rows}, "batch_size": 4, "engine": {"threads": 1}}
    stage("sft", padded / "out", config).run()
    (row,) = metrics_of(padded / "out")
    plain = np.concatenate(log_probs(str(padded / "model"), EXAMPLES))
    assert row["loss"] == pytest.approx(-plain.mean(), abs=1e-5)


# -- what is learned, by a model of 35 thousand parameters -------------------------------------------------------------

SEEDS = (0, 1, 2)
COLUMNS_OF_THE_ACTOR = {"action_mask", "old_logprobs", "rollout_logprobs"}

FAMILY = sorted(
    name
    for name in ALGORITHMS.builtin
    if issubclass(schema := ALGORITHMS.load(name), PolicyGradient) and schema().needs.all <= COLUMNS_OF_THE_ACTOR
)
"""The algorithms that need neither a critic nor a teacher."""

CRITIC = {"optimizer": {"lr": 3e-3}}


def gain(rows, name="reward/mean"):
    """The last five steps' mean over the first five's."""
    values = [row[name] for row in rows]
    return np.mean(values[-5:]) / np.mean(values[:5])


@pytest.mark.slow
@pytest.mark.feature(127)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAMILY)
def test_each_of_the_family_doubles_the_reward(tmp_path, name, seed):
    roles = ("reference",) if name == "deepseek_grpo" else ()
    _, rows = finished(policy_job(tmp_path, "grpo", roles=roles, steps=60, seed=seed, algorithm={"name": name}))
    assert gain(rows) >= 2.0


@pytest.mark.slow
@pytest.mark.feature(127)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["ppo", "openai_ppo"])
def test_ppo_doubles_the_reward(tmp_path, name, seed):
    roles = ("reference",) if name == "openai_ppo" else ()
    job = policy_job(tmp_path, "ppo", roles=roles, steps=60, seed=seed, algorithm={"name": name}, critic=CRITIC)
    _, rows = finished(job)
    assert gain(rows) >= 2.0
    assert rows[-1]["critic/value"] == pytest.approx(rows[-1]["reward/mean"], abs=0.2)


@pytest.mark.slow
@pytest.mark.feature(124)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["distillation", "vocabulary_distillation"])
def test_distillation_lowers_the_reverse_kl_over_the_vocabulary(tmp_path, name, seed):
    write_inputs(tmp_path)
    teacher = write_teacher(tmp_path)
    config = {"steps": 40, "seed": seed, "top": 64, "optimizer": {"lr": 1e-2}, "algorithm": {"name": name}}
    out, _ = finished(policy_job(tmp_path, "distill", teachers={"teacher": {"model": teacher}}, **config))
    assert reverse_kl(out / "model", teacher) < 0.9 * reverse_kl(tmp_path / "model", teacher)


@pytest.mark.slow
def test_several_teachers_each_count_by_their_weight(tmp_path):
    write_inputs(tmp_path)
    first, second = write_teacher(tmp_path), write_teacher(tmp_path, "second", seed=5)
    ends = []
    for weights in ((1.0, 20.0), (20.0, 1.0)):
        teachers = {"teacher": {"model": first, "weight": weights[0]}, "coder": {"model": second, "weight": weights[1]}}
        config = {"steps": 40, "top": 64, "optimizer": {"lr": 1e-2}, "teachers": teachers}
        algorithm = {"name": "vocabulary_distillation"}
        job = policy_job(tmp_path, "distill", out=str(weights), roles=["coder"], algorithm=algorithm, **config)
        out, _ = finished(job)
        ends.append([reverse_kl(out / "model", teacher) for teacher in (first, second)])
    assert ends[1][0] < ends[0][0]
    assert ends[0][1] < ends[1][1]
