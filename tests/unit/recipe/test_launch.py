# SPDX-License-Identifier: Apache-2.0
"""Recipes under launchers, whose processes are real ones, and against one process."""

import json
import os
import re
import shutil
import signal
import socket
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.common.sockets import machine_addresses
from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.recipe.launch import _command, _store, _validate_sharing, describe_job, launch
from dlrover.python.rl.runtime.run.folder import FAILED, newest_owner
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv
from tests.support.commands import wait_for
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
    distance,
    launched_rank,
    run,
    started,
    write_desk,
)
from tests.support.manual_clock import within
from tests.support.processes import free_port
from tests.support.processes import run as run_ranks
from tests.support.run_files import read_json, read_lines, untimed


@pytest.fixture
def desk(tmp_path):
    return write_desk(tmp_path)


@pytest.fixture
def at_desk(desk, monkeypatch):
    """The current directory; no process may be started there, which would be killed with this one."""
    monkeypatch.chdir(desk)
    return desk


ARITHMETIC = ["model=model", "data.train=problems.jsonl", "data.eval_rows=8"]
EXACT = "reward.function=dlrover.python.rl.environment.verifiers:exact"


def problems_of(*overrides, recipe="sft", job_file=None, launch=LaunchEnv()):  # noqa: B008 -- a frozen value
    with pytest.raises(InvalidJob) as caught:
        describe_job(recipe, job_file, overrides, launch)
    return {item.where: item.what for item in caught.value.errors}


@pytest.mark.usefixtures("at_desk")
def test_misspelt_key_is_named_with_the_nearest_one():
    problems = problems_of("model=model", "data.trian=examples.jsonl", "checkpoint.evry=3")
    assert "did you mean 'train'" in problems["config.data.trian"]
    assert "did you mean 'every'" in problems["checkpoint.evry"]
    assert problems["config.data.train"] == "is required"
    problems = problems_of("model=model", "data.train=pairs.jsonl", "beta=0.1", recipe="dpo")
    assert problems["config.beta"] == "unknown key 'beta'; did you mean 'algorithm.beta'?"


@pytest.mark.usefixtures("at_desk")
def test_overrides_change_a_job_file():
    launch = LaunchEnv(0, 4, 0, 2, nodes=2)
    job = describe_job("", "toy.yaml", ["steps=9", "name=mine"], launch)
    assert (job.name, job.config.steps, job.checkpoint.every) == ("mine", 9, 2)
    assert job.checkpoint.resume == "never"  # a first start
    assert {role: spec.num for role, spec in job.workloads.items()} == {"ACTOR": 4, "ROLLOUT": 4}
    assert job.trainer.node_number == 2
    assert describe_job("", "toy.yaml", ["checkpoint.resume=never"], launch).checkpoint.resume == "never"
    assert "did you mean 'steps'" in problems_of("stepz=9", recipe="", job_file="toy.yaml")["stepz"]
    assert problems_of(recipe="") == {"--config": "is required: a job file"}


@pytest.mark.feature(86)
@pytest.mark.usefixtures("at_desk")
def test_key_of_the_environment_may_have_its_other_name(capsys):
    script = ROOT / "tests/support/rl2_environment.py"
    describe_job("grpo", None, [*ARITHMETIC, f"actor.rollout.env_path={script}"], LaunchEnv())
    assert "config.actor.rollout.env_path is read as rollout.env_path" in capsys.readouterr().err
    missing = script.with_name("rl2_environmnt.py")
    problems = problems_of(*ARITHMETIC, f"actor.rollout.env_path={missing}", recipe="grpo")
    assert "did you mean 'rl2_environment.py'" in problems["config.rollout.env_path"]
    problems = problems_of(*ARITHMETIC, "actor.rollout.env_pth=x", f"rollout.env_path={script}", recipe="grpo")
    assert "did you mean 'actor.rollout.env_path'" in problems["config.actor.rollout.env_pth"]


@pytest.mark.usefixtures("at_desk")
def test_other_name_on_the_command_line_overrides_the_file():
    workloads = "module: dlrover.python.rl.recipe.workloads"
    names = {"actor": "ActorWorkload", "rollout": "RolloutWorkload", "reward": "RewardWorkload"}
    roles = ", ".join(f"{role}: {{{workloads}, class: {name}}}" for role, name in names.items())
    settings = "data: {train: problems.jsonl, eval_rows: 8}, optimizer: {lr: 0.5}, reward: {function: exact}"
    Path("mine.yaml").write_text(
        "trainer: {module: dlrover.python.rl.recipe.grpo, class: GRPOTrainer}\n"
        f"workload: {{{roles}}}\nconfig: {{model: model, {settings}}}\n"
    )
    config = describe_job("", "mine.yaml", ["learning_rate=0.25", "kl.type=null"], LaunchEnv()).config
    assert config.optimizer.lr == 0.25
    assert (config.algorithm.name, config.algorithm.clip_low, config.algorithm.kl_in) == ("grpo", 0.2, "loss")


@pytest.mark.parametrize(
    ("overrides", "resumes"), [([], True), (["checkpoint.resume=never"], False), (["commits=false"], False)]
)
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("interrupt", 130, "interrupted: to resume from the last commit, run the same command again"),
        ("fail", 1, "to resume from the last commit, run the same command again"),
        ("data", 1, ""),  # the same command fails again
    ],
)
def test_output_names_the_same_command_only_where_it_resumes(
    tmp_path, monkeypatch, capsys, overrides, resumes, fault, code, message
):
    monkeypatch.chdir(tmp_path)
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
    assert (message in lines) == (resumes and fault != "data")
    assert fault != "data" or not any("same command" in line for line in lines)
    if fault == "interrupt" and not resumes:
        again = ": no step was committed; the same command starts over" if "commits=false" in overrides else ""
        assert f"interrupted{again}" in lines


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [("grpo", ["rollout.samples_per_prompt", "engine.parallel.ddp_size"]), ("sft", ["data.mask_prompt", "batch_size"])],
)
def test_help_of_a_recipe_lists_its_keys(recipe, keys):
    result = CliRunner().invoke(_command, ["--help"], obj=recipe)
    assert result.exit_code == 0
    assert all(f"  {key} " in result.output for key in keys), result.output


@pytest.mark.parametrize(("engine", "refused"), [("fsdp2", False), ("deepspeed", True), ("megatron", True)])
def test_engine_with_its_own_process_has_no_reference_beside(engine, refused):
    for processes in (1, 2):
        job = load_job(ROOT / "examples/arithmetic/grpo.yaml", [f"engine.train={engine}"])
        problems = _validate_sharing(job, LaunchEnv(0, processes, 0, processes))
        assert bool(problems) == (refused and processes == 2)


def test_reward_model_is_a_model_beside_the_policy(at_desk):
    scorer = read_json(at_desk / "model" / "config.json")
    scorer |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    shutil.copytree(at_desk / "model", at_desk / "scorer")
    (at_desk / "scorer" / "config.json").write_text(json.dumps(scorer))
    overrides = [*ARITHMETIC, "reward.model=scorer"]
    for more in ([], ["workload.reward.class=ModelRewardWorkload"]):
        job = describe_job("grpo", None, [*overrides, *more], LaunchEnv())
        assert job.workloads["REWARD"].class_ == "ModelRewardWorkload"
    object.__setattr__(job, "workloads", {role: job.workloads[role] for role in ("ACTOR", "ROLLOUT", "REWARD")})
    job.config.engine = {"train": "deepspeed"}
    (problem,) = _validate_sharing(job, LaunchEnv(0, 2, 0, 2))
    assert "cannot run the models of reward in the processes" in problem.what
    problems = problems_of(*overrides, "workload.reward.class=RewardWorkload", recipe="grpo")
    assert "has to be ModelRewardWorkload" in problems["workload.reward.class"]


def test_world_without_an_address_is_refused():
    assert LaunchEnv.from_env({}) == LaunchEnv()
    with pytest.raises(InvalidJob, match="start with torchrun"):
        LaunchEnv.from_env({"WORLD_SIZE": "2", "RANK": "1"})
    env = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    assert LaunchEnv.from_env({**env, "MASTER_PORT": "1"}) == LaunchEnv(3, 4, 1, 2, "a", 2)


# -- a job of arithmetic -----------------------------------------------------------------------------------------------


def result(desk, folder="runs/toy/latest"):
    return (desk / folder / "result.txt").read_text()


def steps_done(desk, folder="runs/toy/latest"):
    file = desk / folder / "steps.txt"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_steps(count, steps, child=None):
    """Wait until a run has taken as many steps."""
    wait_for(lambda: len(steps()) >= count or (child is not None and child.poll() is not None), DEADLINE_S)
    assert len(steps()) >= count


def test_error_of_one_rank_ends_all_in_a_collective(desk):
    with within(45):
        output = run(desk, f"{TWO} {ADD} fault.where=raise", code=1)
    assert re.search(r"ACTOR\[1\]\.add on \S+: ArithmeticError: told to fail", output)
    assert 'raise ArithmeticError("told to fail")' in output
    assert steps_done(desk) == [1, 2]
    # torchrun ends rank 0 as soon as rank 1 has ended.
    assert newest_owner(desk / "runs/toy/latest").state == FAILED
    assert "to resume from the last commit, run the same command again" in output
    assert "told to fail" in output.partition("Root Cause")[2], output


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
def test_lost_process_is_named_and_ends_all(desk, fault, words):
    output = run(desk, f"{TWO} --monitor-interval=10 {ADD} {fault}", code=1)
    assert re.search(words, output), output


@pytest.mark.slow
def test_start_after_a_fault_resumes_and_ends_the_same(desk):
    run(desk, f"{TWO} {ADD} job_dir=whole")
    run(desk, f"{TWO} {ADD} fault.where=die fault.once=once", code=1)
    assert steps_done(desk) == [1, 2]
    assert "finished" in run(desk, f"{TWO} {ADD} fault.where=die fault.once=once")
    assert steps_done(desk) == [1, 2, 3, 4, 5]
    assert result(desk) == result(desk, "whole")
    assert [path.name for path in (desk / "runs/toy/latest").glob("owner*")] == ["owner.2.json"]


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "repeated"), [("kept", [4, 5]), ("lost", [3, 4, 5])])
def test_run_killed_whole_resumes_with_or_without_its_memory(desk, memory, repeated):
    run(desk, f"{TWO} {ADD} job_dir=whole")
    with started(desk, f"{TWO} {ADD} job_dir=out steps=5 pause_s=0.5", DLROVER_RL_MEMORY=str(desk / memory)):
        wait_for_steps(4, lambda: steps_done(desk, "out"))
    where = str(desk / (memory if memory == "kept" else "elsewhere"))
    output = run(desk, f"{TWO} {ADD} job_dir=out", code=1, DLROVER_RL_MEMORY=where)
    assert "the same command, or checkpoint.resume=latest, continues" in output, "pause_s was another one"
    run(desk, f"{TWO} {ADD} job_dir=out checkpoint.resume=latest", DLROVER_RL_MEMORY=where)
    assert steps_done(desk, "out") == [1, 2, 3, 4, *repeated]
    assert result(desk, "out") == result(desk, "whole")


@pytest.mark.slow
def test_restart_by_the_launcher_resumes(desk):
    run(desk, f"{TWO} --max-restarts=1 {ADD} fault.where=raise fault.once=once")
    assert steps_done(desk) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_second_start_in_the_same_folder_is_refused(desk):
    line = f"{ADD} job_dir=out"
    with started(desk, f"{TWO} {line} pause_s=8"):
        wait_for_steps(1, lambda: steps_done(desk, "out"))
        assert "out is in use by " in run(desk, f"{line} checkpoint.resume=never", code=2)
    run(desk, f"{TWO} {line} checkpoint.resume=latest")
    output = run(desk, f"{line} checkpoint.resume=never", code=2)
    assert "out has the results of " in output and "overwrite=true replaces them" in output


@pytest.mark.slow
def test_bad_job_is_refused_by_one_rank_and_in_the_report(desk):
    output = run(desk, f"{TWO} {SFT} batch_siz=4 data.trian=x", code=1)  # torchrun's own code
    refusal, report = output.split("FAILED", maxsplit=1)
    for text in (refusal, report):
        assert text.count("did you mean 'batch_size'") == text.count("did you mean 'train'") == 1
    assert "exitcode  : 2" in report


def interrupted(desk, line, steps):
    """A run that got Ctrl-C once it had logged some steps; its folder and output."""
    with started(desk, line) as (child,):
        folder = desk / "runs" / "shared" / "latest"
        wait_for_steps(steps, lambda: steps_logged(folder) if (folder / "metrics.jsonl").is_file() else [], child)
        child.send_signal(signal.SIGINT)
        output = child.communicate(timeout=DEADLINE_S)[0]
    assert child.returncode == 130, output
    return folder.resolve(), output


def steps_logged(folder):
    return [row["step"] for row in read_lines(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_other_command_of_the_same_name_is_a_new_run(desk):
    # Calls are repeated with the same settings only, and the number of steps is one.
    first, output = interrupted(desk, f"{SFT} steps=100000 name=shared checkpoint.commit_every=1", 3)
    assert "run the same command again" in output
    before = (first / "metrics.jsonl").read_bytes()
    output = run(desk, f"{SFT} steps=2 optimizer.lr=1e-2 name=shared")
    assert "resuming in" not in output and "\nshared  step 2/2  " in output
    other = (desk / "runs" / "shared" / "latest").resolve()
    assert other != first
    assert steps_logged(other) == [1, 2]
    assert (first / "metrics.jsonl").read_bytes() == before
    done = len(steps_logged(first))
    output = run(desk, f"-m dlrover.python.rl.master.main resume {first} steps={done + 2}")
    assert re.search(rf"resuming in {first}, after step \d+", output), output
    assert steps_logged(first) == list(range(1, done + 3))


@pytest.mark.slow
def test_same_command_resumes_an_interrupted_run(desk):
    line = f"{SFT} steps=100000 name=shared"
    first, _ = interrupted(desk, line, 3)
    done = len(steps_logged(first))
    _, output = interrupted(desk, line, done + 3)
    assert f"resuming after the last committed step in {first}" in output
    assert steps_logged(first)[: done + 3] == list(range(1, done + 4))


@pytest.mark.slow
def test_processes_without_torchrun_meet_at_rank_0_alone():
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


# -- every recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.feature(3)
@pytest.mark.slow
def test_torchrun_with_two_processes_leaves_one_model(desk):
    shown = re.findall(r"^torchrun --nproc_per_node=2 (-m dlrover.python.rl.recipe.sft .*)$", GUIDE.read_text(), re.M)
    line = shown[0].replace("runs/tiny", "model").replace("docs/guides/own_data/examples.jsonl", "examples.jsonl")
    assert "finished" in run(desk, f"{TWO} {line} batch_size=15")
    out = (desk / "runs/sft/latest").resolve()
    models = {path.parent.relative_to(desk).as_posix() for path in desk.rglob("*.safetensors")}
    assert models == {"model", f"runs/sft/{out.name}/model", "teacher"}
    assert steps_logged(out) == [1, 2, 3]


@pytest.mark.feature(4)
@pytest.mark.slow
def test_two_launchers_end_in_the_weights_of_one(desk):
    where = f"--nproc_per_node=1 --master_addr=127.0.0.1 --master_port={free_port()}"
    run(desk, *(f"{TORCHRUN} --nnodes=2 --node_rank={rank} {where} {SFT} job_dir=nodes" for rank in (0, 1)))
    run(desk, f"{TWO} {SFT} job_dir=node")
    run(desk, f"{SFT} job_dir=alone")
    assert distance(desk / "nodes/model", desk / "node/model") == 0.0
    assert 0.0 <= distance(desk / "nodes/model", desk / "alone/model") < 1e-5
    assert distance(desk / "nodes/model", desk / "model") > 1e-4


@pytest.mark.feature(5)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", TWO_STEPS.values(), ids=TWO_STEPS)
def test_accelerate_launch_runs_two_steps_of_each_recipe(desk, recipe):
    pytest.importorskip("accelerate")
    with within(60):
        launcher = f"-m accelerate.commands.launch --multi_gpu --num_processes=2 --main_process_port={free_port()}"
        output = run(desk, f"{launcher} {recipe}")
    assert "step 2/2" in output
    (runs,) = (desk / "runs").iterdir()
    out = (runs / "latest").resolve()
    models = {"model", *(["critic"] if recipe == PPO else [])}
    assert {path.parent.name for path in out.rglob("*.safetensors")} == models
    if "eval_every" in recipe:
        assert all("eval/accuracy" in row or "eval/reward" in row for row in untimed_rows(out))


def untimed_rows(folder):
    """The metrics of each step that depend neither on time nor on the sandbox."""
    return [{name: row[name] for name in row if not name.startswith("sandbox/")} for row in untimed(folder)]


@pytest.mark.feature(138)
@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        f"{GRPO} algorithm.kl_coef=0.1 optimizer.lr=5e-4",
        f"{GRPO} updates_per_step=10 epochs=2 optimizer.lr=2e-4",
        f"{PPO} algorithm.kl_coef=0.1 algorithm.correction=truncate updates_per_step=2",
        f"{DISTILL} algorithm.name=vocabulary_distillation top=16 optimizer.lr=5e-4",
        # One process has no pair at times.
        f"-m dlrover.python.rl.recipe.rm {PAIRS} eval_every=2 keep.best=eval/loss",
        f"-m dlrover.python.rl.recipe.dpo {PAIRS} eval_every=2 keep.best=eval/loss",
    ],
    ids=["grpo", "updates", "ppo", "distill", "rm", "dpo"],
)
def test_recipe_is_the_same_in_one_process_and_in_two(desk, line):
    run(desk, f"{line} job_dir=one")
    output = run(desk, f"{TWO} {line} job_dir=two")
    assert ("best/eval/loss" in output) == ("keep.best" in line)
    if PAIRS not in line:
        assert (desk / "one/samples.jsonl").read_text() == (desk / "two/samples.jsonl").read_text()
        assert distance(desk / "one/model", desk / "model") > 1e-4
    for one, two in zip(untimed_rows(desk / "one"), untimed_rows(desk / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5), "metrics are of all rows, not of one rank's"
    # AdamW makes of the rounding of a gradient near 0 up to some percent of the learning rate: 1e-3 would be too much.
    for name in ("model", *(["best"] if "keep.best" in line else [])):
        assert distance(desk / "one" / name, desk / "two" / name) < 1e-5


@pytest.mark.feature(138)
def test_metrics_are_means_over_the_rows_of_both_processes(desk):
    line = GRPO.replace("steps=2", "steps=1 job_dir=out").replace("eval_every=1 ", "")
    assert run_ranks(2, launched_rank, desk, line) == [0, 0]
    _, step = untimed_rows(desk / "out")
    rewards = [row["reward"] for row in read_lines(desk / "out/samples.jsonl")]
    assert len(rewards) == 4 * 4
    means = [sum(part) / len(part) for part in (rewards, rewards[:8], rewards[8:])]
    assert step["reward/mean"] == pytest.approx(means[0])
    assert len(set(means)) == 3, "one rank's mean would be another"


@pytest.mark.feature(97)
@pytest.mark.slow
def test_filtering_may_leave_fewer_samples_than_ranks(desk):
    few = "prompts_per_step=3 rollout.samples_per_prompt=2 steps=4 rollout.dynamic_filtering=drop job_dir=out"
    alike = PPO.replace(":jumble", ":often_alike").replace("eval_every=1 ", "")
    run(desk, f"{TORCHRUN} --nproc_per_node=3 {alike} {few}")
    steps = read_lines(desk / "out/metrics.jsonl")
    trained_on_two = [step for step in steps if step.get("groups/filtered") == 2]
    assert len(steps) == 1 + 4
    assert trained_on_two
    assert all({"loss", "critic/loss"} <= step.keys() for step in trained_on_two)
