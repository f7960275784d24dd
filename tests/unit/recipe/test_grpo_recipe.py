# SPDX-License-Identifier: Apache-2.0
"""The GRPO recipe in one process."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[2] / "ray"))

from recipe_jobs import grpo_job  # noqa: E402

from dlrover.python.rl.common.errors import InvalidJob  # noqa: E402
from dlrover.python.rl.common.names import RLRoleType  # noqa: E402
from dlrover.python.rl.config.typed import to_plain  # noqa: E402
from dlrover.python.rl.control.state import Phase  # noqa: E402
from dlrover.python.rl.engine.api.settings import ParallelSizes  # noqa: E402
from dlrover.python.rl.master.job import check_job, run_here  # noqa: E402
from dlrover.python.rl.recipe.base.checks import validate_roles  # noqa: E402
from dlrover.python.rl.recipe.base.config import EngineConfig, PromptData, RolloutConfig  # noqa: E402
from dlrover.python.rl.recipe.grpo import (
    GRPOConfig,
    GRPOTrainer,  # noqa: E402
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of three steps, and the reports it gave."""
    folder = tmp_path_factory.mktemp("grpo")
    job = grpo_job(folder, f"job_dir={folder / 'out'}", "steps=3", "eval_every=2")
    reports = []
    status = run_here(check_job(job, local=True), reports.append)
    assert status.phase is Phase.FINISHED, status.cause
    return folder / "out", reports


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_step_is_reported_and_written(finished):
    out, reports = finished
    assert [(report.step, report.total_steps) for report in reports] == [(1, 3), (2, 3), (3, 3)]
    rows = lines(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {"reward", "loss", "kl", "grad_norm", "tokens_per_s", "finished"} <= set(rows[0])
    assert ["accuracy" in row for row in rows] == [False, True, False]
    assert rows[0]["kl"] == 0.0, "the reference is the policy's own start"


def test_samples_carry_the_version_of_the_weights_that_drew_them(finished):
    rows = lines(finished[0] / "samples.jsonl")
    assert len(rows) == 3 * 4 * 8
    assert {(row["step"], row["version"]) for row in rows} == {(1, 0), (2, 1), (3, 2)}


def test_tensorboard_reads_the_events(finished):
    events = EventAccumulator(str(finished[0] / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("reward")] == [1, 2, 3]


def test_the_curve_is_a_png(finished):
    assert (finished[0] / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_loads_with_transformers_and_the_held_out_rows_were_never_trained_on(finished):
    out, _ = finished
    AutoTokenizer.from_pretrained(out / "model")
    AutoModelForCausalLM.from_pretrained(out / "model")
    held = {row["prompt_id"] for row in lines(out / "held_out.jsonl")}
    trained = {row["prompt_id"] for row in lines(out / "samples.jsonl")}
    assert len(held) == 8
    assert not held & trained
    summary = json.loads((out / "summary.json").read_text())
    assert summary["held-out prompts"] == 8
    assert (summary["train engine"], summary["rollout engine"]) == ("Fsdp2TrainEngine", "TorchRolloutEngine")


def problems_of(folder, *overrides):
    with pytest.raises(InvalidJob) as caught:
        check_job(grpo_job(folder, *overrides), local=True)
    return {problem.where: problem.what for problem in caught.value.errors}


def test_all_problems_of_the_configuration_are_found_before_anything_starts(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1=", "answer": 2}\n' * 6 + '{"prompt": 1+1}\n')
    found = problems_of(
        tmp_path,
        f"data.train={bad}",
        f"model={tmp_path}/modell",
        "algorithm.name=grpo",
        "+algorithm.clip_hi=0.3",
        "workload.rollout.num=20",
        "trainer.device_per_node=64",
    )
    assert any(where.startswith(f"{bad}:7") for where in found)
    assert found["config.model"] == f"no such folder: {tmp_path}/modell"
    assert "did you mean 'clip_high'" in found["config.algorithm.clip_hi"]
    assert "20 rollout members cannot share 4 prompts" in found["workload.rollout.num"]


@pytest.mark.parametrize(
    ("override", "where", "what"),
    [
        ("rollout.samples_per_prompt=1", "config.rollout.samples_per_prompt", "at least 2"),
        ("algorithm.name=grop", "config.algorithm.name", "did you mean 'grpo'"),
        ("algorithm={name: ppo}", "config.algorithm", "needs values, which this trainer does not have; the trainer of"),
        ("algorithm={name: distillation}", "config.algorithm", "the trainer of recipe.distill has it"),
        ("algorithm={name: dapo, max_tokens: 100, overlong_buffer: 20}", "config.algorithm.max_tokens", "shaping"),
        ("optimizer.lr=-1", "config.optimizer.lr", "greater than 0"),
        ("+optimizer.lrr=1", "config.optimizer.lrr", "did you mean 'lr'"),
        ("data.eval_rows=4000", "config.data.eval_rows", "cannot be held out"),
        ("data.train=none.jsonl", "none.jsonl", "no such file"),
        ("steps=0", "config.steps", "greater than 0"),
        ("engine.train=fspd2", "config.engine.train", "did you mean 'fsdp2'"),
        ("engine.rollout=vlm", "config.engine.rollout", "did you mean 'vllm'"),
        ("+engine.rollout_options={prefil_tokens: 2}", "config.engine.rollout_options.prefil_tokens", "prefill_tokens"),
        ("+engine.train_options={zero_stage: 2}", "config.engine.train_options.zero_stage", "unknown"),
        ("+engine.parallel={ddp_size: 2}", "config.engine.parallel", "1 ranks cannot be divided by ddp_size 2"),
        ("+engine.parallel={pipeline_parallel_size: 2}", "config.engine", "fsdp2 supports 1 only"),
        ("+engine.rollout_tensor_parallel_size=2", "config.engine.rollout_tensor_parallel_size", "runs on one device"),
    ],
)
def test_a_bad_value_is_named_with_its_place(tmp_path, override, where, what):
    found = problems_of(tmp_path, override)
    assert what in found[where].lower(), found


@pytest.mark.parametrize("name", ["sft", "dpo", "ipo", "reward_model"])
def test_algorithms_on_examples_have_trainers_of_their_own(tmp_path, name):
    config = {**to_plain(grpo_job(tmp_path).config), "algorithm": {"name": name}}
    problems = GRPOTrainer.check_config(config, dict.fromkeys(("ACTOR", "ROLLOUT", "REWARD"), 1))
    assert [str(problem) for problem in problems] == [
        "config.algorithm.name: it learns from examples, not from samples as this trainer does"
    ]


@pytest.mark.parametrize(("kind", "engine"), [("train", "deepspeed"), ("rollout", "vllm")])
def test_an_engine_that_is_not_installed_is_named_with_its_extra(tmp_path, kind, engine):
    if find_spec(engine):
        pytest.skip(f"{engine} is installed")
    found = problems_of(tmp_path, f"engine.{kind}={engine}")
    assert found[f"config.engine.{kind}"] == f"'{engine}' is not installed: pip install 'dlrover-rl[{engine}]'"


def test_members_that_split_the_model_share_rows():
    cfg = GRPOConfig("T", PromptData("none.jsonl"), prompts_per_step=2, rollout=RolloutConfig(samples_per_prompt=2))
    roles = {RLRoleType.ACTOR: 8, RLRoleType.ROLLOUT: 1, RLRoleType.REWARD: 1}
    (problem,) = validate_roles("GRPOTrainer", cfg, roles)
    assert str(problem) == "workload.actor.num: 8 actor members cannot share 4 samples"
    split = replace(cfg, engine=EngineConfig(parallel=ParallelSizes(tensor_parallel_size=2)))
    assert not validate_roles("GRPOTrainer", split, roles)


def test_a_kl_penalty_needs_the_reference_role(tmp_path):
    job = grpo_job(tmp_path)
    without = replace(
        job, workloads={role: spec for role, spec in job.workloads.items() if role != "REFERENCE"}, groups=()
    )
    with pytest.raises(InvalidJob, match="needs the role 'reference'"):
        check_job(without, local=True)


def write_rows(folder, *rows):
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def cause_of(folder, *overrides):
    """Why a run failed: its message, and the traceback that is printed below it."""
    status = run_here(check_job(grpo_job(folder, f"job_dir={folder / 'out'}", *overrides), local=True))
    assert status.phase is Phase.FAILED
    return f"{status.cause.message}\n{status.cause.detail}"


def test_rows_without_an_answer_are_named_where_the_reward_compares_with_it(tmp_path):
    rows = [{"prompt": f"{number}+1="} for number in range(30)]
    path = write_rows(tmp_path, {"prompt": "0+0=", "answer": 0}, *rows)
    found = problems_of(tmp_path, f"data.train={path}")
    places = [where for where in found if where.startswith(f"{path}:")]
    assert places == [f"{path}:{line}" for line in range(2, 22)]
    assert "has no 'answer'" in found[f"{path}:2"]
    assert found[str(path)] == "and 10 more errors"


def test_a_prompt_that_does_not_fit_the_model_is_named_before_training(tmp_path):
    rows = [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(20)]
    path = write_rows(tmp_path, *rows, {"prompt": "1" * 30 + "=", "answer": 1}, {"prompt": "2" * 50, "answer": 1})
    cause = cause_of(tmp_path, f"data.train={path}")
    fits = "does not fit the model's 32 positions"
    assert f"{path}:21: 31 tokens, and up to 4 new ones: a sequence of 35 tokens {fits}" in cause
    assert f"{path}:22: 50 tokens, and up to 4 new ones: a sequence of 54 tokens {fits}" in cause
    assert f"{path}:20" not in cause
    assert lines(tmp_path / "out" / "metrics.jsonl") == []


@pytest.mark.feature(64)
def test_prompts_that_are_too_long_are_refused_or_left_out_and_counted(tmp_path):
    rows = [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(20)]
    path = write_rows(tmp_path, *rows, {"prompt": "1" * 9 + "=", "answer": 1}, {"prompt": "2" * 50, "answer": 1})
    given = (f"data.train={path}", f"data.eval={path}", "data.eval_rows=22", "+data.max_prompt_tokens=8", "steps=2")
    cause = cause_of(tmp_path, *given)
    assert f"{path}:21: 10 tokens, 8 at most\n{path}:22: 50 tokens, 8 at most" in cause
    job = grpo_job(tmp_path, f"job_dir={tmp_path / 'dropped'}", *given, "+data.over_long=drop", "prompts_per_step=20")
    assert run_here(check_job(job, local=True)).phase is Phase.FINISHED
    drawn = {row["row"] for name in ("samples", "held_out") for row in lines(tmp_path / f"dropped/{name}.jsonl")}
    assert drawn == set(range(20))
    told = json.loads((tmp_path / "dropped/summary.json").read_text())
    assert (told["held-out prompts"], told["dropped prompts"]) == (20, 4)
    assert "no data.max_prompt_tokens" in problems_of(tmp_path, "+data.over_long=drop")["config.data.over_long"]


def test_a_step_without_a_single_reward_ends_the_run(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("def reward(*_):\n    raise ValueError('no such thing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cause = cause_of(tmp_path, "reward.function=broken_reward:reward")
    assert "step 1: the reward function failed on all 32 samples, last with: broken_reward:reward raised" in cause
    assert "ValueError: no such thing" in cause
    rows = lines(tmp_path / "out" / "samples.jsonl")
    assert [row["reward"] for row in rows] == [None] * 32
    assert "no such thing" in rows[0]["error"]


def test_a_reward_that_is_not_right_or_wrong_is_not_called_an_accuracy(tmp_path, monkeypatch):
    (tmp_path / "fine_reward.py").write_text("def reward(completion, *_):\n    return len(completion) / 8 + 0.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = grpo_job(tmp_path, f"job_dir={tmp_path / 'out'}", "reward.function=fine_reward:reward", "eval_every=1")
    assert run_here(check_job(job, local=True)).phase is Phase.FINISHED
    assert {"held_out_reward", "held_out_failed"} <= set(lines(tmp_path / "out" / "metrics.jsonl")[0])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {"held-out mean reward before", "held-out mean reward after", "held-out failed after"} <= set(summary)
    assert not any("accuracy" in name or "gain" in name for name in summary)


def test_the_demos_rewards_are_an_accuracy(finished):
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert {"held-out accuracy before", "held-out accuracy after", "gain in points"} <= set(summary)
    assert not any("failed" in name for name in summary)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("dlrover.python.rl.environment.verifiers:exat", "has no 'exat'; did you mean 'exact'?"),
        ("dlrover.python.rl.environment.verifier:exact", "did you mean 'dlrover.python.rl.environment.verifiers'?"),
        ("exat", "no reward function is called 'exat'; did you mean 'exact'?"),
    ],
)
def test_the_reward_function_is_looked_for(tmp_path, function, what):
    assert what in problems_of(tmp_path, f"reward.function={function}")["config.reward.function"]


def test_members_that_cannot_share_the_rows_are_refused(tmp_path):
    path = write_rows(tmp_path, {"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": 3})
    members = ["workload.rollout.num=3", "workload.reward.num=4", "trainer.device_per_node=16"]
    found = problems_of(tmp_path, f"data.eval={path}", *members)
    assert found["workload.rollout.num"] == "3 rollout members cannot share 2 prompts"
    assert found["workload.reward.num"] == "4 reward members cannot share 2 answers"


def test_conversations_need_a_chat_template(tmp_path):
    chat = {"messages": [{"role": "user", "content": "1+1="}], "answer": 2}
    path = write_rows(tmp_path, *[{"prompt": f"1+{number}=", "answer": 1 + number} for number in range(20)], chat)
    job = grpo_job(tmp_path, f"data.train={path}")
    assert check_job(job, local=True)
    settings = tmp_path / "model" / "tokenizer_config.json"
    told = json.loads(settings.read_text())
    told.pop("chat_template", None)
    settings.write_text(json.dumps(told))
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    assert (
        f"no chat template, which the 'messages' of {path}:21 need"
        in problems_of(tmp_path, f"data.train={path}")["config.model"]
    )


@pytest.mark.parametrize("override", ["engine.device=cpu", "optimizer.weight_decay=0.1", "engine.max_batch=4"])
def test_common_keys_are_overridden_without_a_plus(tmp_path, override):
    assert check_job(grpo_job(tmp_path, override), local=True)
