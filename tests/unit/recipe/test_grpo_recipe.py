# SPDX-License-Identifier: Apache-2.0
"""The GRPO recipe in one process."""

import json
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.plain import to_plain
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_here
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.trainer.plan import plan_of
from tests.ray.recipe_jobs import grpo_job


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of three steps, the reports it gave, and what it did between them."""
    folder = tmp_path_factory.mktemp("grpo")
    job = grpo_job(folder, f"job_dir={folder / 'out'}", "steps=3", "eval_every=2")
    reports, activities = [], []
    status = run_here(check_job(job, local=True), reports.append, activities.append)
    assert (status.phase, status.activity) == (Phase.FINISHED, ""), status.cause
    return folder / "out", reports, activities


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_step_is_reported_and_written(finished):
    out, reports, _ = finished
    assert [(report.step, report.total_steps) for report in reports] == [(1, 3), (2, 3), (3, 3)]
    initial, *rows = lines(out / "metrics.jsonl")
    summary = json.loads((out / "summary.json").read_text())
    assert initial == {"step": 0, **{name: summary[f"before/{name}"] for name in initial if name != "step"}}
    assert {"eval/accuracy", "eval/reward", "eval/failed"} == initial.keys() - {"step"}
    assert [row["step"] for row in rows] == [1, 2, 3]
    named = {"reward/mean", "reward/std", "loss", "grad_norm", "lr", "completions/length_p95", "completions/truncated"}
    named |= {f"policy/{name}" for name in ("kl", "entropy", "mismatch_kl", "clip_low", "clip_high")}
    named |= {"speed/tokens_per_s", "speed/rollout_tokens_per_s", "time/step"}
    assert all(named <= set(row) for row in rows)
    assert ["eval/accuracy" in row for row in rows] == [False, True, False]
    assert [row["total/samples"] for row in rows] == [32, 64, 96]
    assert 0 < rows[0]["total/tokens"] < rows[1]["total/tokens"] < rows[2]["total/tokens"]
    assert all(0 <= row["policy/mismatch_kl"] < 1e-6 < row["policy/entropy"] for row in rows)
    assert rows[0]["policy/kl"] == 0.0, "the reference is the policy's own start"


def test_what_a_run_does_is_announced_in_order(finished):
    roles = ["actor", "rollout", "reward", "reference"]
    assert sorted(finished[2][:4]) == sorted(f"starting {role}" for role in roles)
    assert finished[2][4:] == [
        "loading the models",
        "evaluating before the training",
        "step 1",
        "evaluating after the training",
        "saving the model",
    ]


def test_samples_carry_the_version_of_the_weights_that_drew_them(finished):
    rows = lines(finished[0] / "samples.jsonl")
    assert len(rows) == 3 * 4 * 8
    assert {(row["step"], row["version"]) for row in rows} == {(1, 0), (2, 1), (3, 2)}


def test_tensorboard_reads_the_events(finished):
    events = EventAccumulator(str(finished[0] / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("reward/mean")] == [1, 2, 3]


def test_the_curve_is_a_png(finished):
    assert (finished[0] / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_loads_with_transformers_and_the_held_out_rows_were_never_trained_on(finished):
    out, *_ = finished
    AutoTokenizer.from_pretrained(out / "model")
    AutoModelForCausalLM.from_pretrained(out / "model")
    held = {row["prompt_id"] for row in lines(out / "held_out.jsonl")}
    trained = {row["prompt_id"] for row in lines(out / "samples.jsonl")}
    assert len(held) == 8
    assert not held & trained
    summary = json.loads((out / "summary.json").read_text())
    assert summary["held_out_prompts"] == 8
    assert (summary["train_engine"], summary["rollout_engine"]) == ("Fsdp2TrainEngine", "TorchRolloutEngine")


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
    )
    assert any(where.startswith(f"{bad}:7") for where in found)
    assert found["config.model"] == f"no such folder: {tmp_path}/modell; did you mean '{tmp_path}/model'?"
    assert "did you mean 'clip_high'" in found["config.algorithm.clip_hi"]


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
        ("data.train=none.jsonl", "config.data.train", "none.jsonl: no such file"),
        ("+data.eval={a: none.jsonl}", "config.data.eval.a", "none.jsonl: no such file"),
        ("+data.eval={}", "config.data.eval", "has no set"),
        ("+data.eval={a/b: none.jsonl}", "config.data.eval", "'a/b' is no name"),
        ("+eval.samples=2", "config.eval.samples", "needs config.eval.temperature"),
        ("steps=0", "config.steps", "greater than 0"),
        ("engine.train=fspd2", "config.engine.train", "did you mean 'fsdp2'"),
        ("engine.rollout=vlm", "config.engine.rollout", "did you mean 'vllm'"),
        ("+engine.rollout_options={prefil_tokens: 2}", "config.engine.rollout_options.prefil_tokens", "prefill_tokens"),
        ("+engine.train_options={zero_stage: 2}", "config.engine.train_options.zero_stage", "unknown"),
        ("+engine.parallel={ddp_size: 2}", "config.engine.parallel", "1 ranks cannot be divided by ddp_size 2"),
        ("+engine.parallel={pipeline_parallel_size: 2}", "config.engine", "fsdp2 supports only 1"),
        ("optimizer={name: adamw_8bits}", "config.optimizer.name", "adamw_8bit"),
        ("+engine.rollout_tensor_parallel_size=2", "config.engine.rollout_tensor_parallel_size", "runs on one device"),
    ],
)
def test_a_bad_value_is_named_with_its_place(tmp_path, override, where, what):
    found = problems_of(tmp_path, override)
    assert what in found[where].lower(), found


@pytest.mark.parametrize("name", ["sft", "dpo", "ipo", "reward_model"])
def test_algorithms_on_examples_have_trainers_of_their_own(tmp_path, name):
    config = {**to_plain(grpo_job(tmp_path).config), "algorithm": {"name": name}}
    problems = plan_of(GRPOTrainer).check_config(config, dict.fromkeys(("ACTOR", "ROLLOUT", "REWARD"), 1))
    assert [str(problem) for problem in problems] == [
        "config.algorithm.name: it learns from examples, not from samples"
    ]


@pytest.mark.parametrize(
    ("kind", "engine", "where", "message"),
    [
        ("train", "deepspeed", "train", "'deepspeed' is not installed: pip install 'dlrover-rl[deepspeed]'"),
        ("rollout", "vllm", "rollout", "'vllm' is not installed: pip install 'dlrover-rl[vllm]'"),
        ("rollout", "sglang", "rollout_options.url", "sglang is not installed here: set its server's URL"),
    ],
)
def test_an_engine_that_is_not_installed_is_named_with_a_remedy(tmp_path, kind, engine, where, message):
    if find_spec(engine):
        pytest.skip(f"{engine} is installed")
    assert problems_of(tmp_path, f"engine.{kind}={engine}")[f"config.engine.{where}"] == message


def test_ranks_may_divide_a_base_in_4_bits_which_needs_the_extra_of_moments_in_8_bits(tmp_path, monkeypatch):
    where, job = "config.engine.lora.quantize_base", ["workload.actor.num=2", "+engine.lora={quantize_base: nf4}"]
    for sizes in ("{ddp_size: 1}", "{ddp_size: 2}", "{context_parallel_size: 2}"):
        assert not any("engine" in key for key in problems_of(tmp_path, *job, f"+engine.parallel={sizes}"))
    found = problems_of(tmp_path, *job, "+engine.parallel={tensor_parallel_size: 2}")
    assert found["config.engine"] == "adapters cannot be split: tensor_parallel_size must be 1, not 2"

    def absent_version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent_version)
    absent = "'bitsandbytes>=0.50' is not installed: pip install 'dlrover-rl[bitsandbytes]'"
    assert problems_of(tmp_path, *job)[where] == absent
    assert problems_of(tmp_path, "+optimizer.name=adamw_8bit")["config.optimizer.name"] == absent


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


def write_rows(folder, *rows):
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
