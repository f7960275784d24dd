# SPDX-License-Identifier: Apache-2.0
"""Recipes under launchers: the processes are real ones, and none outlives its test."""

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.common.sockets import machine_addresses
from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.recipe.launch import _command, _store, _validate_sharing, describe_job, launch
from dlrover.python.rl.runtime.run.folder import FAILED, newest_owner
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv
from tests.support.launching import (
    ADD,
    DEADLINE_S,
    DISTILL,
    GRPO,
    GUIDE,
    PAIRS,
    PPO,
    ROOT,
    SFT,
    TORCHRUN,
    TWO,
    TWO_STEPS,
    differ,
    launched_rank,
    run,
    started,
    weights,
    write_desk,
)
from tests.support.processes import free_port
from tests.support.processes import run as run_ranks
from tests.support.run_files import read_json, read_lines


@pytest.fixture
def desk(tmp_path):
    return write_desk(tmp_path)


# -- what is asked for ------------------------------------------------------------------------------------------------


def problems_of(*overrides, recipe="sft", job_file=None, launch=LaunchEnv()):  # noqa: B008 -- a frozen value
    with pytest.raises(InvalidJob) as caught:
        describe_job(recipe, job_file, overrides, launch)
    return {item.where: item.what for item in caught.value.errors}


def test_a_misspelt_key_is_named_with_the_nearest_one(desk, monkeypatch):
    monkeypatch.chdir(desk)
    found = problems_of("model=model", "data.trian=examples.jsonl", "batch_siz=4", "checkpoint.evry=3")
    assert "did you mean 'train'" in found["config.data.trian"]
    assert "did you mean 'batch_size'" in found["config.batch_siz"]
    assert "did you mean 'every'" in found["checkpoint.evry"]
    assert found["config.data.train"] == "is required"


def test_an_option_of_the_algorithm_is_named_with_its_place(desk, monkeypatch):
    monkeypatch.chdir(desk)
    found = problems_of("model=model", "data.train=pairs.jsonl", "beta=0.1", recipe="dpo")
    assert found["config.beta"] == "unknown key 'beta'; did you mean 'algorithm.beta'?"


def test_a_job_file_and_overrides_go_together(desk, monkeypatch):
    monkeypatch.chdir(desk)
    launch = LaunchEnv(0, 4, 0, 2, nodes=2)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    job = describe_job("", "toy.yaml", ["steps=9", "name=mine"], launch)
    assert (job.name, job.config.steps, job.checkpoint.resume, job.checkpoint.every) == (
        "mine",
        9,
        "never",
        2,
    )  # a first start
    assert {role: spec.num for role, spec in job.workloads.items()} == {"ACTOR": 4, "ROLLOUT": 4}
    assert job.trainer.node_number == 2
    assert describe_job("", "toy.yaml", ["checkpoint.resume=never"], launch).checkpoint.resume == "never"
    assert "did you mean 'steps'" in problems_of("stepz=9", recipe="", job_file="toy.yaml")["stepz"]
    assert problems_of(recipe="") == {"--config": "is required: a job file"}


@pytest.mark.feature(86)
def test_the_environments_key_may_be_the_one_that_it_has_elsewhere(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    script = ROOT / "tests/support/rl2_environment.py"
    given = ["model=model", "data.train=problems.jsonl", "data.eval_rows=8"]
    describe_job("grpo", None, [*given, f"actor.rollout.env_path={script}"], LaunchEnv())
    assert "config.actor.rollout.env_path is read as rollout.env_path" in capsys.readouterr().err
    found = problems_of(*given, f"actor.rollout.env_path={script.with_name('rl2_environmnt.py')}", recipe="grpo")
    assert "did you mean 'rl2_environment.py'" in found["config.rollout.env_path"]
    found = problems_of(*given, "actor.rollout.env_pth=x", f"rollout.env_path={script}", recipe="grpo")
    assert "did you mean 'actor.rollout.env_path'" in found["config.actor.rollout.env_pth"]


def test_an_other_name_on_the_command_line_counts_before_what_the_file_has(desk, monkeypatch):
    monkeypatch.chdir(desk)
    Path("mine.yaml").write_text(
        "trainer: {module: dlrover.python.rl.recipe.grpo, class: GRPOTrainer}\n"
        "workload: {actor: {module: dlrover.python.rl.recipe.workloads, class: ActorWorkload},"
        " rollout: {module: dlrover.python.rl.recipe.workloads, class: RolloutWorkload},"
        " reward: {module: dlrover.python.rl.recipe.workloads, class: RewardWorkload}}\n"
        "config: {model: model, data: {train: problems.jsonl, eval_rows: 8}, optimizer: {lr: 0.5},"
        " reward: {function: 'dlrover.python.rl.environment.verifiers:exact'}}\n"
    )
    config = describe_job("", "mine.yaml", ["learning_rate=0.25", "kl.type=null"], LaunchEnv()).config
    assert config.optimizer.lr == 0.25
    assert (config.algorithm.name, config.algorithm.clip_low, config.algorithm.kl_in) == ("grpo", 0.2, "loss")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.adv_estimator=grpo", "algorithm.name"),
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_in=reward"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "algorithm.averaging"),
        ("actor_rollout_ref.actor.optim.lr_=1", "did you mean 'actor_rollout_ref.actor.optim.lr'"),
    ],
)
def test_a_key_of_another_library_is_answered_where_it_is_written(desk, monkeypatch, override, said):
    monkeypatch.chdir(desk)
    reward = "reward.function=dlrover.python.rl.environment.verifiers:exact"
    found = problems_of("model=model", "data.train=problems.jsonl", "data.eval_rows=8", reward, override, recipe="grpo")
    assert said in found[f"config.{override.split('=')[0]}"]


@pytest.mark.parametrize(
    ("overrides", "goes_on"),
    [
        ([], True),
        (["checkpoint.resume=never"], False),
        (["checkpoint.resume=latest"], True),
        (["commits=false"], False),
    ],
)
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("interrupt", 130, "interrupted: to resume from the last commit, run the same command again"),
        ("fail", 1, "to resume from the last commit, run the same command again"),
        ("data", 1, ""),  # the same command fails again
    ],
)
def test_the_same_command_is_said_to_go_on_only_where_it_does(
    tmp_path, monkeypatch, capsys, overrides, goes_on, fault, code, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr("dlrover.python.rl.recipe.launch.configure_logging", lambda name: None)
    # An interrupted trainer's thread lives as long as its process, here as long as the other tests, and waits.
    monkeypatch.setattr("dlrover.python.rl.trainer.port.STRAGGLER_LOG_INTERVAL_S", threading.TIMEOUT_MAX)
    Path("acting.yaml").write_text(
        "{trainer: {module: tests.support.launched_toys, class: ActingTrainer},"
        " config: {commits: true, fault: interrupt},"
        " workload: {actor: {module: tests.support.launched_toys, class: Raiser}}}"
    )
    assert launch("", "acting.yaml", [f"fault={fault}", *overrides]) == code
    lines = capsys.readouterr().err.splitlines()
    assert (said in lines) == (goes_on and fault != "data")
    assert fault != "data" or not any("same command" in line for line in lines)
    if fault == "interrupt" and not goes_on:
        again = ": no step was committed; the same command starts over" if "commits=false" in overrides else ""
        assert f"interrupted{again}" in lines


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [("grpo", ["rollout.samples_per_prompt", "engine.parallel.ddp_size"]), ("sft", ["data.mask_prompt", "batch_size"])],
)
def test_the_help_of_a_recipe_lists_its_keys(recipe, keys):
    said = CliRunner().invoke(_command, ["--help"], obj=recipe)
    assert said.exit_code == 0
    assert all(f"  {key} " in said.output for key in keys), said.output


@pytest.mark.parametrize(("engine", "refused"), [("fsdp2", False), ("deepspeed", True), ("megatron", True)])
def test_an_engine_that_takes_a_process_for_itself_has_no_reference_beside_several_ranks(engine, refused):
    for processes in (1, 2):
        job = load_job(ROOT / "examples/arithmetic/grpo.yaml", [f"engine.train={engine}"])
        problems = _validate_sharing(job, LaunchEnv(0, processes, 0, processes))
        assert bool(problems) == (refused and processes == 2)


def test_a_reward_model_is_a_model_beside_the_policy(desk, monkeypatch):
    monkeypatch.chdir(desk)
    scorer = read_json(desk / "model" / "config.json")
    scorer |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    shutil.copytree(desk / "model", desk / "scorer")
    (desk / "scorer" / "config.json").write_text(json.dumps(scorer))
    given = ["model=model", "data.train=problems.jsonl", "data.eval_rows=8", "reward.model=scorer"]
    judge = "workload.reward.class=ModelRewardWorkload"
    job = describe_job("grpo", None, [*given, judge], LaunchEnv())
    assert job.workloads["REWARD"].class_ == "ModelRewardWorkload"
    object.__setattr__(job, "workloads", {role: job.workloads[role] for role in ("ACTOR", "ROLLOUT", "REWARD")})
    job.config.engine = {"train": "deepspeed"}
    (problem,) = _validate_sharing(job, LaunchEnv(0, 2, 0, 2))
    assert "cannot run the models of reward in the processes" in problem.what
    assert describe_job("grpo", None, given, LaunchEnv()).workloads["REWARD"].class_ == "ModelRewardWorkload"
    judge = "workload.reward.class=RewardWorkload"
    assert "has to be ModelRewardWorkload" in problems_of(*given, judge, recipe="grpo")["workload.reward.class"]


def test_a_world_without_an_address_is_refused():
    assert LaunchEnv.from_env({}) == LaunchEnv()
    with pytest.raises(InvalidJob, match="start with torchrun"):
        LaunchEnv.from_env({"WORLD_SIZE": "2", "RANK": "1"})
    env = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    assert LaunchEnv.from_env({**env, "MASTER_PORT": "1"}) == LaunchEnv(3, 4, 1, 2, "a", 2)


# -- a job of arithmetic ----------------------------------------------------------------------------------------------


def result(desk, folder="runs/toy/latest"):
    return (desk / folder / "result.txt").read_text()


def steps_done(desk, folder="runs/toy/latest"):
    file = desk / folder / "steps.txt"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_an_error_of_one_rank_ends_all_while_the_others_wait_for_it_in_a_collective(desk):
    began_s = time.monotonic()
    said = run(desk, f"{TWO} {ADD} fault.where=raise", code=1)
    assert time.monotonic() - began_s < 45
    assert re.search(r"ACTOR\[1\]\.add on \S+: ArithmeticError: told to fail", said)
    assert 'raise ArithmeticError("told to fail")' in said
    assert steps_done(desk) == [1, 2]
    # torchrun ends rank 0 as soon as rank 1 has ended.
    assert newest_owner(desk / "runs/toy/latest").state == FAILED
    assert "to resume from the last commit, run the same command again" in said
    assert "told to fail" in said.partition("Root Cause")[2], said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fault.where=die", r"ACTOR\[1\]\.add: the process of rank 1 is gone"),
        ("fault.where=leave", r"ACTOR\[1\]\.add: the process of rank 1 is gone"),
        ("fault.where=die fault.rank=0", "rank 0 is gone: rank 1 ends"),
        ("fault.where=start", r"ACTOR\[1\] could not start: RuntimeError: told not to start"),
    ],
)
def test_a_process_that_is_lost_is_named_and_ends_all(desk, fault, words):
    said = run(desk, f"{TWO} --monitor-interval=10 {ADD} {fault}", code=1)
    assert re.search(words, said), said


@pytest.mark.slow
def test_a_start_after_a_fault_goes_on_from_the_last_step_and_ends_as_if_there_had_been_none(desk):
    run(desk, f"{TWO} {ADD} job_dir=whole")
    run(desk, f"{TWO} {ADD} fault.where=die fault.once=once", code=1)
    assert steps_done(desk) == [1, 2]
    said = run(desk, f"{TWO} {ADD} fault.where=die fault.once=once")
    assert "finished" in said
    assert steps_done(desk) == [1, 2, 3, 4, 5]
    assert result(desk) == result(desk, "whole")
    assert [path.name for path in (desk / "runs/toy/latest").glob("owner*")] == ["owner.2.json"]


@pytest.mark.slow
def test_everything_killed_at_once_goes_on_too_also_without_what_was_in_memory(desk):
    run(desk, f"{TWO} {ADD} job_dir=whole")
    for memory, repeated in (("kept", [4, 5]), ("lost", [3, 4, 5])):
        folder = f"runs/{memory}"
        line = f"{TWO} {ADD} job_dir={folder} steps=5 pause_s=0.5"
        with started(desk, line, DLROVER_RL_MEMORY=str(desk / memory)):
            deadline_s = time.monotonic() + DEADLINE_S
            while len(steps_done(desk, folder)) < 4:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        where = desk / (memory if memory == "kept" else "elsewhere")
        said = run(desk, f"{TWO} {ADD} job_dir={folder}", code=1, DLROVER_RL_MEMORY=str(where))
        assert "the same command, or checkpoint.resume=latest, continues" in said, "pause_s was another one"
        run(desk, f"{TWO} {ADD} job_dir={folder} checkpoint.resume=latest", DLROVER_RL_MEMORY=str(where))
        assert steps_done(desk, folder) == [1, 2, 3, 4, *repeated]
        assert result(desk, folder) == result(desk, "whole")


@pytest.mark.slow
def test_the_launchers_own_restart_goes_on_as_well(desk):
    run(desk, f"{TWO} --max-restarts=1 {ADD} fault.where=raise fault.once=once")
    assert steps_done(desk) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_second_start_in_the_same_folder_is_refused_and_a_finished_run_has_nothing_left_to_do(desk):
    line = f"{ADD} job_dir=out"
    with started(desk, f"{TWO} {line} pause_s=8"):
        deadline_s = time.monotonic() + DEADLINE_S
        while not steps_done(desk, "out"):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert "out is in use by " in run(desk, f"{line} checkpoint.resume=never", code=2)
    run(desk, f"{TWO} {line} checkpoint.resume=latest")
    done = steps_done(desk, "out")
    run(desk, f"{TWO} {line} checkpoint.resume=latest")
    assert steps_done(desk, "out") == done
    said = run(desk, f"{line} checkpoint.resume=never", code=2)
    assert "out has the results of " in said and "overwrite=true replaces them" in said
    run(desk, f"{TWO} {ADD} checkpoint.resume=never")  # a folder of its own
    assert (steps_done(desk, "out"), steps_done(desk)) == (done, [1, 2, 3, 4, 5])


def refused_rank(*where):
    """What this rank says of a job that cannot be, or its exit code."""
    try:
        return launched_rank(*where)
    except InvalidJob as error:
        return str(error)


@pytest.mark.slow
def test_a_job_that_cannot_be_is_refused_at_one_rank_with_every_problem(desk):
    said, code = run_ranks(2, refused_rank, desk, f"{SFT} batch_siz=4 data.trian=x")
    assert "did you mean 'batch_size'" in said
    assert "did you mean 'train'" in said
    assert code == 2


@pytest.mark.slow
def test_a_job_that_cannot_be_is_refused_by_one_rank_and_ends_the_report_of_the_launcher(desk):
    said = run(desk, f"{TWO} {SFT} batch_siz=4 data.trian=x", code=1)  # torchrun's own code
    refusal, report = said.split("FAILED", maxsplit=1)
    for text in (refusal, report):
        assert text.count("did you mean 'batch_size'") == 1
        assert text.count("did you mean 'train'") == 1
    assert "exitcode  : 2" in report


def interrupted(desk, line, rows):
    """A run that got Ctrl-C once it had logged some steps; its folder and output."""
    with started(desk, line) as (child,):
        folder = desk / "runs" / "shared" / "latest"
        deadline_s = time.monotonic() + DEADLINE_S
        while not (folder / "metrics.jsonl").is_file() or len(steps_of(folder)) < rows:
            assert child.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        output = child.communicate(timeout=DEADLINE_S)[0]
    assert child.returncode == 130, output
    return folder.resolve(), output


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_another_command_of_the_same_name_is_a_new_run_and_the_interrupted_one_can_be_resumed(desk):
    # Calls are repeated with the same settings only, and the number of steps is one.
    first, output = interrupted(desk, f"{SFT} steps=100000 name=shared checkpoint.commit_every=1", rows=3)
    assert "run the same command again" in output
    before = (first / "metrics.jsonl").read_bytes()
    said = run(desk, f"{SFT} steps=2 optimizer.lr=1e-2 name=shared")
    assert "resuming in" not in said
    assert "\nshared  step 2/2  " in said
    other = (desk / "runs" / "shared" / "latest").resolve()
    assert other != first
    assert steps_of(other) == [1, 2]
    assert (first / "metrics.jsonl").read_bytes() == before
    done = len(steps_of(first))
    said = run(desk, f"-m dlrover.python.rl.master.main resume {first} steps={done + 2}")
    assert re.search(rf"resuming in {first}, after step \d+", said), said
    assert steps_of(first) == list(range(1, done + 3))


@pytest.mark.slow
def test_the_same_command_goes_on_and_says_so(desk):
    first, _ = interrupted(desk, f"{SFT} steps=100000 name=shared", rows=3)
    with started(desk, f"{SFT} steps=100000 name=shared") as (child,):
        done, deadline_s = len(steps_of(first)), time.monotonic() + DEADLINE_S
        while len(steps_of(first)) < done + 3:
            assert child.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        output = child.communicate(timeout=DEADLINE_S)[0]
    assert f"resuming after the last committed step in {first}" in output
    assert steps_of(first)[: done + 3] == list(range(1, done + 4))


# -- without a launcher's store ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_that_no_torchrun_has_started_meet_at_the_address_of_rank_0_alone():
    assert run_ranks(2, meet) == [b"from 1", b"from 0"]


def meet(rank, world_size, port):
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = _store()
    for address in machine_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), timeout=10)
    store.set(str(rank), f"from {rank}".encode())
    other = store.get(str(1 - rank))
    store.set(f"{rank} is done", b"")
    store.get(f"{1 - rank} is done")
    return other


@pytest.mark.feature(3)
@pytest.mark.slow
def test_torchrun_with_two_processes_leaves_one_model(desk):
    (shown,) = re.findall(
        r"^torchrun --nproc_per_node=2 (-m dlrover.python.rl.recipe.sft .*)$", GUIDE.read_text(), re.M
    )
    line = shown.replace("runs/tiny", "model").replace("docs/guides/own_data/examples.jsonl", "examples.jsonl")
    said = run(desk, f"{TWO} {line} batch_size=15")
    assert "finished" in said
    found = [path.relative_to(desk).as_posix() for path in desk.rglob("*.safetensors")]
    assert sorted(found) == [
        "model/model.safetensors",
        f"runs/sft/{(desk / 'runs/sft/latest').resolve().name}/model/model.safetensors",
        "teacher/model.safetensors",
    ]
    rows = read_lines(desk / "runs/sft/latest/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.feature(4)
@pytest.mark.slow
def test_two_launchers_of_one_process_end_in_the_weights_of_one_with_two(desk):
    port = free_port()
    nodes = [
        f"{TORCHRUN} --nnodes=2 --node_rank={rank} --nproc_per_node=1 --master_addr=127.0.0.1 --master_port={port}"
        f" {SFT} job_dir=nodes"
        for rank in (0, 1)
    ]
    run(desk, *nodes)
    run(desk, f"{TWO} {SFT} job_dir=node")
    run(desk, f"{SFT} job_dir=alone")
    assert differ(desk / "nodes", desk / "node") == 0.0
    assert 0.0 <= differ(desk / "nodes", desk / "alone") < 1e-5
    assert differ(desk / "nodes", desk) > 1e-4


@pytest.mark.feature(5)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", TWO_STEPS.values(), ids=TWO_STEPS)
def test_accelerate_launch_runs_two_steps_of_each_recipe(desk, recipe):
    pytest.importorskip("accelerate")
    began_s = time.monotonic()
    launcher = f"-m accelerate.commands.launch --multi_gpu --num_processes=2 --main_process_port={free_port()}"
    said = run(desk, f"{launcher} {recipe}")
    assert time.monotonic() - began_s < 60
    assert "step 2/2" in said
    (runs,) = (desk / "runs").iterdir()
    out = (runs / "latest").resolve()
    assert {path.parent.name for path in out.rglob("*.safetensors")} == {
        "model",
        *(["critic"] if recipe == PPO else []),
    }
    if "eval_every" in recipe:
        rows = metrics(out)
        assert all("eval/accuracy" in row or "eval/reward" in row for row in rows)


TIMES = ("time/", "speed/", "memory/")


def metrics(folder):
    """The metrics of each step that do not depend on time."""
    rows = read_lines(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith((*TIMES, "sandbox/"))} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rm", "dpo"])
def test_pairs_are_learned_alike_in_one_process_and_in_two_though_one_has_no_pair_at_times(desk, recipe):
    line = f"-m dlrover.python.rl.recipe.{recipe} {PAIRS} eval_every=2 keep.best=eval/loss"
    run(desk, f"{line} job_dir=one")
    said = run(desk, f"{TWO} {line} job_dir=two")
    assert "best/eval/loss" in said
    rows = [read_lines(desk / name / "metrics.jsonl") for name in ("one", "two")]
    for alone, together in zip(*rows, strict=True):
        for name in (name for name in alone if not name.startswith(TIMES)):
            assert together[name] == pytest.approx(alone[name], abs=1e-5), name
    for name in ("model", "best"):
        first, second = (load_file(desk / job / name / "model.safetensors") for job in ("one", "two"))
        assert first.keys() == second.keys()
        assert all(torch.allclose(first[key], second[key], atol=1e-5) for key in first)


@pytest.mark.feature(138)
@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        f"{GRPO} algorithm.kl_coef=0.1 optimizer.lr=5e-4",
        f"{GRPO} updates_per_step=10 epochs=2 optimizer.lr=2e-4",
        f"{PPO} algorithm.kl_coef=0.1 algorithm.correction=truncate updates_per_step=2",
        f"{DISTILL} algorithm.name=vocabulary_distillation top=16 optimizer.lr=5e-4",
    ],
    ids=["grpo", "updates", "ppo", "distill"],
)
def test_a_recipe_is_the_same_in_one_process_and_in_two(desk, line):
    run(desk, f"{line} job_dir=one")
    run(desk, f"{TWO} {line} job_dir=two")
    assert (desk / "one/samples.jsonl").read_text() == (desk / "two/samples.jsonl").read_text()
    for one, two in zip(metrics(desk / "one"), metrics(desk / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5), "metrics are of all rows, not of one rank's"
    # AdamW makes of the rounding of a gradient near 0 up to some percent of the learning rate: 1e-3 would be too much.
    assert differ(desk / "one", desk / "two") < 1e-5
    assert differ(desk / "one", desk) > 1e-4


@pytest.mark.feature(138)
def test_figures_are_means_over_the_rows_of_both_processes_and_are_written_once(desk):
    line = GRPO.replace("steps=2", "steps=1 job_dir=out").replace("eval_every=1 ", "")
    assert run_ranks(2, launched_rank, desk, line) == [0, 0]
    _, step = metrics(desk / "out")
    rewards = [json.loads(row)["reward"] for row in (desk / "out/samples.jsonl").read_text().splitlines()]
    assert len(rewards) == 4 * 4
    means = [sum(part) / len(part) for part in (rewards, rewards[:8], rewards[8:])]
    assert step["reward/mean"] == pytest.approx(means[0])
    assert len(set(means)) == 3, "those of one rank would be others"


@pytest.mark.feature(97)
@pytest.mark.slow
def test_filtering_may_leave_fewer_samples_than_there_are_ranks(desk):
    few = "prompts_per_step=3 rollout.samples_per_prompt=2 steps=4 rollout.dynamic_filtering=drop job_dir=out"
    alike = PPO.replace(":jumble", ":often_alike").replace("eval_every=1 ", "")
    run(desk, f"{TORCHRUN} --nproc_per_node=3 {alike} {few}")
    steps = read_lines(desk / "out/metrics.jsonl")
    trained_on_two = [step for step in steps if step.get("groups/filtered") == 2]
    assert len(steps) == 1 + 4
    assert trained_on_two
    assert all({"loss", "critic/loss"} <= step.keys() for step in trained_on_two)


def test_the_weights_that_are_compared_are_compared(desk):
    assert differ(desk, desk) == 0.0
    assert torch.is_tensor(next(iter(weights(desk).values())))
