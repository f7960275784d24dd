# SPDX-License-Identifier: Apache-2.0
"""The constructors, in one process and launched in two: what they train, evaluate, keep and refuse."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import lr_scheduler as schedulers
from transformers import AutoTokenizer

from dlrover.python.rl.classic import (
    EnvBase,
    GRPOTrainer,
    MathDataset,
    OnPolicyDistillationTrainer,
    SFTTrainer,
    trainers,
)
from dlrover.python.rl.common.errors import InvalidJob, JobConflict
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.fake_trackers import FakeWandb
from tests.support.judging_envs import Length, Share, asked
from tests.support.launching import distance, run
from tests.support.processes import free_port
from tests.support.run_files import read_json, read_lines
from tests.support.run_files import steps_of as metrics

NAMES = ("Ada", "Emmy", "Sofia", "Grace", "Mary", "Katherine")


def sft(model, folder, **arguments):
    usual = {"num_steps": 4, "batch_size": 2, "saving_steps": 2, "logging_steps": 1, "optimizer_args": {"lr": 1e-2}}
    dataset = arguments.pop("train_dataset", asked(*NAMES))
    return SFTTrainer(model, dataset, output_dir=folder, engine={"threads": 1}, **{**usual, **arguments})


def grpo(model, folder, **arguments):
    usual = {"num_steps": 2, "batch_size": 2, "saving_steps": 2, "logging_steps": 1, "max_new_tokens": 6}
    dataset = arguments.pop("train_dataset", asked("Ada", "Grace", "Mary", kind=Share, answers=False))
    return GRPOTrainer(model, dataset, output_dir=folder, engine={"threads": 1}, **{**usual, **arguments})


def same(one, other):
    return distance(one, other) == 0


# -- SFT --------------------------------------------------------------------------------------------------------------


@pytest.mark.feature(129)
def test_cross_entropy_of_a_test_is_the_last_evaluations(model, tmp_path):
    held_out = asked("Alan", "Kurt") + [EnvBase(asked("Emil")[0].prompt, "a much longer answer")]
    trainer = sft(model, tmp_path, eval_steps=4, eval_dataset=held_out)
    trainer.train()
    last, figures = metrics(tmp_path)[-1], trainer.test()
    assert figures["ce_loss"] == pytest.approx(last["eval/loss"], abs=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["ce_loss"]))


@pytest.mark.feature(130)
def test_rewards_need_completions_drawn_to_evaluate(model, tmp_path):
    evaluated = {"num_steps": 2, "eval_steps": 2, "eval_dataset": asked("Alan", "Kurt", kind=Length)}
    drawing = {"eval_sample_completions": True, "max_new_tokens": 4}
    for folder, more in (("without", {}), ("with", drawing)):
        trainer = sft(model, tmp_path / folder, **evaluated, **more)
        trainer.train()
        last, figures = metrics(tmp_path / folder)[-1], trainer.test()
        assert ("eval/reward" in last) == ("reward_mean" in figures) == (folder == "with")
        assert {"ce_loss", "perplexity"} <= figures.keys()
    assert 0 <= last["eval/reward"] <= 4
    assert last["eval/failed"] == 0
    assert read_json(tmp_path / "with/evaluation/metrics.json")["num_samples"] == 2
    with pytest.raises(ValueError, match="has no reward"):
        sft(model, tmp_path / "none", eval_steps=2, eval_dataset=asked("Alan"), eval_sample_completions=True).train()


@pytest.mark.feature(133)
def test_models_of_steps_and_the_final_one_are_whole_folders(model, tmp_path):
    sft(model, tmp_path).train()
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_2", "step_4"]
    assert same(tmp_path / "step_4", tmp_path / "final")
    assert not same(tmp_path / "step_2", tmp_path / "final")
    AutoTokenizer.from_pretrained(tmp_path / "final")


def test_too_long_rows_are_left_out_of_the_same_steps(model, tmp_path):
    dataset = [*asked("Ada", "Grace"), EnvBase(asked("Ada")[0].prompt, "x" * 60)]
    sft(model, tmp_path, train_dataset=dataset, max_seq_len=60, num_steps=5).train()
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert read_json(tmp_path / "summary.json")["dropped_rows"] == 1


@pytest.mark.slow
def test_arguments_decide_the_tokens_of_the_loss(model, tmp_path):
    messages = (("user", "Hi"), ("assistant", "Hello"), ("user", "2+2"))
    turns = [{"role": role, "content": content} for role, content in messages]
    losses = set()
    for number, arguments in enumerate([{}, {"assistant_loss_mode": "last"}, {"mask_prompt": False}]):
        folder = tmp_path / str(number)
        sft(model, folder, train_dataset=[EnvBase(turns, 4)], num_steps=1, batch_size=1, **arguments).train()
        losses.add(metrics(folder)[0]["loss"])
    assert len(losses) == 3


@pytest.mark.feature(134)
def test_interrupted_run_resumes_at_its_step(model, tmp_path):
    sft(model, tmp_path / "whole", num_steps=6, saving_steps=3).train()
    sft(model, tmp_path / "parts", num_steps=3, saving_steps=3).train()
    first_rows = metrics(tmp_path / "parts")
    sft(model, tmp_path / "parts", num_steps=6, saving_steps=3, resume=True).train()
    rows = metrics(tmp_path / "parts")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[:3] == first_rows
    assert same(tmp_path / "parts" / "final", tmp_path / "whole" / "final")


# -- GRPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.feature(77)
def test_samples_without_answers_are_trained_on_if_they_reward(model, tmp_path):
    trainer = grpo(model, tmp_path, optimizer_args={"lr": 1e-2}, kl_penalty=0.05, ppo_steps=2)
    trainer.train()
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["reward/mean"] < 1 and row["samples/failed"] == 0 for row in rows)
    assert rows[-1]["policy/kl"] > 0
    assert not same(tmp_path / "final", model)
    assert len(read_lines(tmp_path / "samples.jsonl")) == 2 * 2 * 4


@pytest.mark.feature(78)
def test_sums_are_trained_on_and_evaluated(tmp_path):
    wide_model = write_tiny_model(tmp_path / "wide", hidden=32, layers=2, max_positions=256)
    arguments = {"num_samples": 4, "min_val": 0, "max_val": 5, "operand": "add"}
    dataset, held_out = MathDataset(**arguments), MathDataset(**arguments, seed=1)
    short = {"max_new_tokens": 4, "group_size": 2, "eval_steps": 1, "eval_dataset": held_out}
    trainer = grpo(wide_model, tmp_path, train_dataset=dataset, **short)
    trainer.train()
    assert [row["eval/reward"] for row in metrics(tmp_path)] == [-101.0, -101.0]
    assert trainer.test(num_batches=1)["num_samples"] == 2


@pytest.mark.slow
@pytest.mark.feature(139)
def test_completions_are_logged_as_far_as_is_asked_for(model, tmp_path, capsys):
    grpo(model, tmp_path, num_steps=1, log_completions=True, max_log_chars=2, max_new_tokens=12).train()
    shown = [line.split("  completion ")[1][:2] for line in capsys.readouterr().err.splitlines() if "  reward " in line]
    assert shown == [repr(sample["completion"])[1:3] for sample in read_lines(tmp_path / "samples.jsonl")]
    grpo(model, tmp_path / "again", num_steps=1).train()
    assert "  completion " not in capsys.readouterr().err


def test_figures_are_logged_every_so_many_steps(model, tmp_path, capsys):
    sft(model, tmp_path, logging_steps=3).train()
    assert [line.split("step ")[1].split("/")[0] for line in capsys.readouterr().err.splitlines()] == ["3"]


# -- on-policy distillation -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.feature(124)
@pytest.mark.parametrize("kind", [EnvBase, Share])
def test_distillation_runs_with_rewards_and_without(model, tmp_path, kind):
    teacher = write_tiny_model(tmp_path / "teacher", hidden=32, layers=2, max_positions=96, seed=3)
    samples = asked("Ada", "Grace", "Mary", kind=kind)
    arguments = {"num_steps": 2, "batch_size": 3, "saving_steps": 2, "eval_steps": 1, "max_new_tokens": 6}
    data = {"eval_dataset": samples[:2], "output_dir": tmp_path / "out", "engine": {"threads": 1}}
    trainer = OnPolicyDistillationTrainer(model, teacher, samples, **data, **arguments)
    trainer.train()
    rows = metrics(tmp_path / "out")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["policy/reverse_kl"] > 0 for row in rows)
    assert [row["reward/mean"] is None for row in rows] == [kind is EnvBase] * 2
    assert not same(tmp_path / "out" / "final", model)
    assert same(tmp_path / "out" / "final", tmp_path / "out" / "step_2")
    assert (trainer.test()["reward_mean"] is None) == (kind is EnvBase)


# -- Weights & Biases -------------------------------------------------------------------------------------------------


@pytest.mark.feature(136)
def test_wandb_run_has_project_name_and_steps_from_1(model, tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sft(model, tmp_path, num_steps=2, enable_wandb=True, wandb_project="rlfusion", wandb_run_name="sft-demo").train()
    ((arguments,), (run,)) = wandb.starts, wandb.runs.values()
    assert (arguments["project"], arguments["name"], run.exit_codes) == ("rlfusion", "sft-demo", [0])
    losses = [(step, logged["loss"]) for step, logged in run.steps]
    assert losses == [(row["step"], row["loss"]) for row in metrics(tmp_path)]
    assert [sft(model, tmp_path).wandb_project, grpo(model, tmp_path).wandb_project] == ["sft", "grpo"]


# -- refusals ---------------------------------------------------------------------------------------------------------

COMMON = ("num_steps", "batch_size", "saving_steps", "logging_steps", "eval_steps", "max_new_tokens", "max_grad_norm")
OF_GRPO = ("ppo_steps", "clip_eps", "max_log_chars", "sampling_temperature")
STEPS = {"lr_scheduler_args": {"step_size": 2}}


@pytest.mark.feature(141, 142, 147)
@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        *((SFTTrainer, {n: 0}, f"^{n}: input should be greater than 0, got 0") for n in (*COMMON, "max_seq_len")),
        *((GRPOTrainer, {n: -1}, f"^{n}: input should be greater than 0, got -1") for n in OF_GRPO),
        (SFTTrainer, {"num_step": 2}, "SFTTrainer: .* argument 'num_step'; did you mean 'num_steps'"),
        (GRPOTrainer, {"reward_funcs": len}, "has no reward_funcs: use a function such as"),
        (GRPOTrainer, {"group_size": 1}, "group_size: input should be greater than or equal to 2, got 1"),
        (GRPOTrainer, {"do_sample": False}, "do_sample=False generates the same completion"),
        (SFTTrainer, {"assistant_loss_mode": "first"}, "input should be 'all' or 'last', got 'first'"),
        (SFTTrainer, {"eval_steps": 2}, "eval_steps needs an eval_dataset"),
        (SFTTrainer, {"eval_sample_completions": True}, "eval_sample_completions needs an eval_dataset"),
        (SFTTrainer, {"seed": -1}, "seed: input should be greater than or equal to 0, got -1"),
        (SFTTrainer, {"optimizer": torch.optim.Adagrad}, "optimizer Adagrad is not supported"),
        (SFTTrainer, {"optimizer_args": {"lr": 0}}, "optimizer_args.lr"),
        (SFTTrainer, {"optimizer_args": {"lrr": 1}}, "AdamW has no 'lrr'; did you mean 'lr'"),
        (SFTTrainer, {"optimizer_args": {"eps": 1e-6}}, "eps can only be 1e-08"),
        (SFTTrainer, {"lr_scheduler_args": {"T_max": 2}}, "lr_scheduler_args need an lr_scheduler"),
        (SFTTrainer, {"lr_scheduler": schedulers.StepLR, **STEPS}, "StepLR with .* is not supported"),
        (SFTTrainer, {"lr_scheduler": schedulers.LinearLR}, "supported: ConstantLR without an end, LinearLR that"),
        (GRPOTrainer, {"generation_args": {"topk": 2}}, "generation_args has no 'topk'; did you mean"),
    ],
)
def test_constructor_refuses_a_wrong_argument(kind, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kind("model", asked("Ada"), **arguments)


def test_train_refuses_unfit_data_and_models_before_it_starts(model, tmp_path):
    for trainer, message in (
        (grpo(model, tmp_path / "a", train_dataset=asked("Ada")), r"\[0\] has no reward: EnvBase must define"),
        (sft(model, tmp_path / "b", train_dataset=asked("Ada", answers=False)), r"\[0\] has nothing to train on"),
        (grpo("/no/such/model", tmp_path / "c"), "no such folder"),
    ):
        with pytest.raises((ValueError, InvalidJob), match=message):
            trainer.train()
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_several_processes_are_refused_where_they_are_not_meant(model, tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="2 processes were launched.*pass use_accelerate=True"):
        sft(model, tmp_path).train()


# -- optimizers and schedules -----------------------------------------------------------------------------------------


def torch_rates(kind, arguments, steps, lr=1e-2):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = kind(optimizer, **arguments), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.slow
@pytest.mark.feature(141)
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (schedulers.CosineAnnealingLR, {"T_max": 4, "eta_min": 1e-3}),
        (schedulers.LinearLR, {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 4}),
        (schedulers.ConstantLR, {"factor": 1.0}),
    ],
)
@pytest.mark.parametrize("form", ["class", "instance"])
def test_schedule_gives_the_rates_of_pytorch(model, tmp_path, kind, arguments, form):
    schedule = {"lr_scheduler": kind, "lr_scheduler_args": arguments}
    if form == "instance":
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        schedule = {"lr_scheduler": kind(optimizer, **arguments)}
    sft(model, tmp_path, **schedule).train()
    assert [row["lr"] for row in metrics(tmp_path)] == pytest.approx(torch_rates(kind, arguments, 4))


@pytest.mark.feature(142)
def test_gradient_descent_by_its_class(model, tmp_path):
    sft(model, tmp_path, num_steps=1, optimizer=torch.optim.SGD, optimizer_args={"lr": 0.5}).train()
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (model, tmp_path / "final"))
    moved = torch.sqrt(sum(((before[name] - after[name]).float() ** 2).sum() for name in before))
    tied = "lm_head.weight" in before  # counted twice
    assert float(moved) > 0
    assert tied or float(moved) == pytest.approx(0.5 * metrics(tmp_path)[0]["grad_norm"], rel=1e-3)


# -- the folder -------------------------------------------------------------------------------------------------------


def test_output_dir_with_models_of_another_program_is_refused(model, tmp_path):
    (tmp_path / "step_10").mkdir()
    (tmp_path / "step_10" / "weights").touch()
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(InvalidJob, match=r"has metrics.jsonl, step_10 of another program: pass overwrite=True"):
        sft(model, tmp_path).train()
    assert (tmp_path / "step_10" / "weights").exists()
    assert sft(model, tmp_path).model_after(10) == tmp_path / "step_10"
    afresh = sft(model, tmp_path, overwrite=True)
    assert afresh.model_after() == model
    with pytest.raises(ValueError, match="no model of step 10 has been saved"):
        afresh.model_after(10)


def test_output_dir_links_to_the_last_run_and_keeps_earlier_ones(model, tmp_path):
    def state():
        return [row["step"] for row in metrics(tmp_path)], len(list(tmp_path.glob("runs/*/2*")))

    sft(model, tmp_path, num_steps=2, saving_steps=1).train()
    (first,) = tmp_path.glob("runs/*/2*")
    sft(model, tmp_path, num_steps=1, saving_steps=1).train()
    assert state() == ([1], 2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_1"]
    assert len((first / "metrics.jsonl").read_text().splitlines()) == 2
    assert sft(model, tmp_path).model_after() == model
    again = sft(model, tmp_path, num_steps=3, saving_steps=1, resume=True)
    assert again.model_after() == tmp_path / "final"
    again.train()
    assert state()[0] == [1, 2, 3]
    sft(model, tmp_path, num_steps=1, saving_steps=1, overwrite=True).train()
    assert state() == ([1], 2)


def test_output_dir_of_a_running_script_is_refused(model, tmp_path, monkeypatch):
    (tmp_path / "runs" / "sfttrainer" / "latest").mkdir(parents=True)
    monkeypatch.setattr(trainers, "newest_owner", lambda folder: SimpleNamespace(pid=1, is_here=True))
    monkeypatch.setattr(trainers, "in_use", lambda folder: True)
    with pytest.raises(JobConflict, match="is in use by"):
        sft(model, tmp_path).train()
    assert not (tmp_path / "data").exists()


# -- several processes ------------------------------------------------------------------------------------------------


LAUNCHERS = {
    "": "",
    "accelerate": "-m accelerate.commands.launch --multi_gpu --num_processes=2 --main_process_port={port}",
    "torchrun": "-m torch.distributed.run --nproc_per_node=2 --master_port={port}",
}


def launched(folder, launcher, *arguments, code=0):
    """Run the script in the processes of a launcher; what it printed."""
    script = Path(__file__).parents[2] / "support/launched_script.py"
    line = " ".join([LAUNCHERS[launcher].format(port=free_port()), str(script), *map(str, arguments)])
    return run(folder, line, code=code)


@pytest.mark.feature(5, 138)
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_two_processes_train_and_evaluate_like_one(launcher, model, tmp_path):
    """One script, several trainers after each other: the effective batch is as in one process with twice the size."""
    if launcher == "accelerate":
        pytest.importorskip("accelerate")
    write_tiny_model(f"{model}-teacher", hidden=32, layers=2, max_positions=96, seed=7)
    which = ("sft", "grpo", "distill") if launcher == "accelerate" else ("sft", "grpo")
    launched(tmp_path, launcher, model, tmp_path / "two", 4, *which)
    launched(tmp_path, "", model, tmp_path / "one", 4, *which)
    tests_of_ranks = [read_json(tmp_path / "two" / f"rank-{rank}.json") for rank in (0, 1)]
    assert tests_of_ranks[1] == dict.fromkeys(which, {})
    for name in which:
        assert sorted(path.name for path in (tmp_path / "two" / name).glob("step_*")) == ["step_2"]
        assert distance(tmp_path / "two" / name / "final", tmp_path / "one" / name / "final") < 1e-5
        assert distance(tmp_path / "two" / name / "final", model) > 1e-4
        both = zip(metrics(tmp_path / "two" / name), metrics(tmp_path / "one" / name), strict=True)
        for two, one in both:  # of both ranks, not of one
            figure = "eval/reward" if name == "sft" else "reward/mean"
            assert two[figure] == pytest.approx(one[figure], abs=1e-6)
            assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert tests_of_ranks[0][name]["num_samples"] == 3


@pytest.mark.slow
def test_refusal_by_rank_0_ends_all_ranks(model, tmp_path):
    output = launched(tmp_path, "torchrun", "/no/such/model", tmp_path, 4, "grpo", code=1)
    assert "no such folder" in output and "rank 0: did not start the job" in output
