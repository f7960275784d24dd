"""Recipes under launchers: the processes are real ones, and none outlives its test."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.load import load_job
from dlrover.python.rl.recipe.launch import _sharing_problems, described, launch
from dlrover.python.rl.recipe.tiny import write_tiny_model
from dlrover.python.rl.runtime.torchrun.links import Place
from tests.processes import free_port
from tests.processes import run as run_ranks

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guides" / "torchrun.md"
DEADLINE_S = 240.0
TORCHRUN = "-m torch.distributed.run"
TWO = f"{TORCHRUN} --nproc_per_node=2"

TOY = """
trainer: {module: launched_toys, class: AddingTrainer}
workload:
  actor: {module: launched_toys, class: Adder}
  rollout: {module: launched_toys, class: Listener}
checkpoint: {every: 2}
config: {steps: 5, pause_s: 0, fault: {where: "", rank: 1, step: 3, once: nothing}}
"""


@pytest.fixture
def desk(tmp_path):
    """A working directory with a tiny model, data, and the toy job."""
    write_tiny_model(tmp_path / "model", hidden=32, layers=2, heads=4, kv_heads=2, max_positions=32)
    write_tiny_model(tmp_path / "teacher", hidden=32, layers=2, heads=4, kv_heads=2, max_positions=32, seed=1)
    rows = [(a, b) for a in range(1, 10) for b in range(1, 6)]
    problems = [json.dumps({"prompt": f"{a}+{b}=", "answer": a + b}) for a, b in rows]
    examples = [json.dumps({"prompt": f"{a}+{b}=", "response": f"{a + b}"}) for a, b in rows]
    (tmp_path / "problems.jsonl").write_text("\n".join(problems))
    (tmp_path / "examples.jsonl").write_text("\n".join(examples))
    pairs = [json.dumps({"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a}"}) for a, b in rows[:7]]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    (tmp_path / "toy.yaml").write_text(TOY)
    return tmp_path


SFT = (
    "-m dlrover.python.rl.recipe.sft model=model data.train=examples.jsonl batch_size=15 optimizer.lr=1e-3 "
    "engine.threads=1"
)
PAIRS = "model=model data.train=pairs.jsonl batch_size=3 epochs=2 optimizer.lr=1e-3 engine.threads=1"
GRPO = (
    "-m dlrover.python.rl.recipe.grpo model=model data.train=problems.jsonl data.eval_rows=8 prompts_per_step=4 "
    "steps=2 reward.function=launched_rewards:jumble "
    "rollout.samples_per_prompt=4 rollout.max_new_tokens=4 eval_every=1 engine.threads=1"
)
WITH_CRITIC = "optimizer.lr=1e-3 critic.optimizer.lr=1e-3"
PPO = GRPO.replace("recipe.grpo", "recipe.ppo").replace("prompts_per_step=4", f"prompts_per_step=8 {WITH_CRITIC}")
DISTILL = (
    GRPO.replace("recipe.grpo", "recipe.distill").replace("reward.function=launched_rewards:jumble ", "")
    + " teachers.teacher.model=teacher"
)
TWO_STEPS = {
    "sft": f"{SFT} epochs=0.6",
    "rm": f"-m dlrover.python.rl.recipe.rm {PAIRS} batch_size=4 epochs=1",
    "dpo": f"-m dlrover.python.rl.recipe.dpo {PAIRS} batch_size=4 epochs=1",
    "grpo": GRPO,
    "ppo": PPO,
    "distill": DISTILL,
}
ADD = "-m dlrover.python.rl.recipe.launch --config toy.yaml"


@contextmanager
def started(desk, *lines, **env):
    """Processes of these command lines, all killed in the end, with whatever they have started."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    known = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER"))}
    children = [
        subprocess.Popen(
            [sys.executable, *shlex.split(line)],
            cwd=desk,
            env={**known, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for line in lines
    ]
    try:
        yield children
    finally:
        for pid in _working_in(desk):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in children:
            child.communicate(timeout=10)


def _working_in(folder):
    """The processes that work there: torchrun's children have sessions of their own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if entry.readlink() == folder:
                found.append(int(entry.parent.name))
    return found


def run(desk, *lines, code=0, **env):
    """The output of command lines that are to end with ``code``, one after the other."""
    with started(desk, *lines, **env) as children:
        outputs = [child.communicate(timeout=DEADLINE_S)[0] for child in children]
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == code, output
    return "\n".join(outputs)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


def differ(one, other):
    """The largest difference between two models."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


# -- what is asked for ------------------------------------------------------------------------------------------------


def problems_of(*overrides, recipe="sft", job_file=None, place=Place()):  # noqa: B008 -- a frozen value
    with pytest.raises(InvalidJob) as caught:
        described(recipe, job_file, overrides, place)
    return {item.where: item.what for item in caught.value.problems}


def test_a_misspelt_key_is_named_with_the_nearest_one(desk, monkeypatch):
    monkeypatch.chdir(desk)
    found = problems_of("model=model", "data.trian=examples.jsonl", "batch_siz=4", "checkpoint.evry=3")
    assert "did you mean 'train'" in found["config.data.trian"]
    assert "did you mean 'batch_size'" in found["config.batch_siz"]
    assert "did you mean 'every'" in found["checkpoint.evry"]
    assert found["config.data.train"] == "is required"


def test_a_job_file_and_overrides_go_together(desk, monkeypatch):
    monkeypatch.chdir(desk)
    place = Place(0, 4, 0, 2, nodes=2)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    job = described("", "toy.yaml", ["steps=9", "name=mine"], place)
    assert (job.name, job.config.steps, job.checkpoint.resume, job.checkpoint.every) == ("mine", 9, "latest", 2)
    assert {role: spec.num for role, spec in job.workloads.items()} == {"ACTOR": 4, "ROLLOUT": 4}
    assert job.trainer.node_number == 2
    assert described("", "toy.yaml", ["checkpoint.resume=never"], place).checkpoint.resume == "never"
    assert "did you mean 'steps'" in problems_of("stepz=9", recipe="", job_file="toy.yaml")["stepz"]
    assert problems_of(recipe="") == {"--config": "is required: a job file"}


def test_086_the_environments_key_may_be_the_one_that_it_has_elsewhere(desk, monkeypatch, caplog):
    monkeypatch.chdir(desk)
    script = Path(__file__).with_name("rl2_environment.py")
    given = ["model=model", "data.train=problems.jsonl", "data.eval_rows=8"]
    described("grpo", None, [*given, f"actor.rollout.env_path={script}"], Place())
    assert "config.actor.rollout.env_path is taken as rollout.env_path" in caplog.text
    found = problems_of(*given, f"actor.rollout.env_path={script.with_name('rl2_environmnt.py')}", recipe="grpo")
    assert "did you mean 'rl2_environment.py'" in found["config.rollout.env_path"]
    found = problems_of(*given, "actor.rollout.env_pth=x", f"rollout.env_path={script}", recipe="grpo")
    assert "unknown key 'actor'" in found["config.actor"]


def test_what_cannot_be_shared_by_so_many_processes_is_refused(desk, monkeypatch):
    monkeypatch.chdir(desk)
    found = problems_of("model=model", "data.train=examples.jsonl", "batch_size=3", place=Place(0, 4, 0, 4))
    assert found == {"config.batch_size": "4 actor members cannot share a batch of 3"}


@pytest.mark.parametrize(("engine", "refused"), [("fsdp2", False), ("deepspeed", True), ("megatron", True)])
def test_an_engine_that_takes_a_process_for_itself_has_no_reference_beside_several_ranks(engine, refused):
    for processes in (1, 2):
        job = load_job(ROOT / "examples/arithmetic/grpo.yaml", [f"engine.train={engine}"])
        problems = _sharing_problems(job, Place(0, processes, 0, processes))
        assert bool(problems) == (refused and processes == 2)


def test_a_reward_model_is_a_model_beside_the_policy(desk, monkeypatch):
    monkeypatch.chdir(desk)
    scorer = json.loads((desk / "model" / "config.json").read_text())
    scorer |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    (desk / "scorer").mkdir()
    (desk / "scorer" / "config.json").write_text(json.dumps(scorer))
    given = ["model=model", "data.train=problems.jsonl", "data.eval_rows=8", "reward.model=scorer"]
    judge = "workload.reward.class=ModelRewardWorkload"
    job = described("grpo", None, [*given, judge], Place())
    assert job.workloads["REWARD"].class_ == "ModelRewardWorkload"
    object.__setattr__(job, "workloads", {role: job.workloads[role] for role in ("ACTOR", "ROLLOUT", "REWARD")})
    job.config.engine = {"train": "deepspeed"}
    (problem,) = _sharing_problems(job, Place(0, 2, 0, 2))
    assert "cannot run the models of reward in the processes" in problem.what
    assert "has to be ModelRewardWorkload" in problems_of(*given, recipe="grpo")["workload.reward.class"]


def test_a_world_without_an_address_is_refused():
    assert Place.from_env({}) == Place()
    with pytest.raises(InvalidJob, match="start with torchrun"):
        Place.from_env({"WORLD_SIZE": "2", "RANK": "1"})
    env = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    assert Place.from_env({**env, "MASTER_PORT": "1"}) == Place(3, 4, 1, 2, "a", 2)


# -- a job of arithmetic ----------------------------------------------------------------------------------------------


def result(desk, folder="runs/toy"):
    return (desk / folder / "result.txt").read_text()


def steps_done(desk, folder="runs/toy"):
    file = desk / folder / "steps.txt"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_an_error_of_one_rank_ends_all_while_the_others_wait_for_it_in_a_collective(desk):
    began_s = time.monotonic()
    said = run(desk, f"{TWO} {ADD} fault.where=raise", code=1)
    assert time.monotonic() - began_s < 45
    assert re.search(r"ACTOR\[1\]\.add on \S+: ArithmeticError: told to fail", said)
    assert 'raise ArithmeticError("told to fail")' in said
    assert steps_done(desk) == [1, 2]


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
    assert json.loads((desk / "runs/toy/torchrun.json").read_text())["start"] == 2


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
        run(desk, f"{TWO} {ADD} job_dir={folder}", DLROVER_RL_MEMORY=str(where))
        assert steps_done(desk, folder) == [1, 2, 3, 4, *repeated]
        assert result(desk, folder) == result(desk, "whole")


@pytest.mark.slow
def test_the_launchers_own_restart_goes_on_as_well(desk):
    run(desk, f"{TWO} --max-restarts=1 {ADD} fault.where=raise fault.once=once")
    assert steps_done(desk) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_second_start_in_the_same_folder_is_refused_and_a_finished_run_has_nothing_left_to_do(desk):
    with started(desk, f"{TWO} {ADD} pause_s=8"):
        deadline_s = time.monotonic() + DEADLINE_S
        while not steps_done(desk):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert "another start of this job is running" in run(desk, f"{ADD} checkpoint.resume=never", code=1)
    run(desk, f"{TWO} {ADD}")
    done = steps_done(desk)
    run(desk, f"{TWO} {ADD}")
    assert steps_done(desk) == done
    run(desk, f"{TWO} {ADD} checkpoint.resume=never")
    assert steps_done(desk) == [*done, 1, 2, 3, 4, 5]


# -- the recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_003_torchrun_with_two_processes_leaves_one_model(desk):
    (shown,) = re.findall(
        r"^torchrun --nproc_per_node=2 (-m dlrover.python.rl.recipe.sft .*)$", GUIDE.read_text(), re.M
    )
    line = shown.replace("runs/tiny", "model").replace("docs/guides/own_data/examples.jsonl", "examples.jsonl")
    said = run(desk, f"{TWO} {line} batch_size=15")
    assert "finished" in said
    found = [path.relative_to(desk).as_posix() for path in desk.rglob("*.safetensors")]
    assert sorted(found) == [
        "model/model.safetensors",
        "runs/sft/model/model.safetensors",
        "teacher/model.safetensors",
    ]
    rows = [json.loads(line) for line in (desk / "runs/sft/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.slow
def test_004_two_launchers_of_one_process_end_in_the_weights_of_one_with_two(desk):
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


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TWO_STEPS.values(), ids=TWO_STEPS)
def test_005_accelerate_launch_runs_two_steps_of_each_recipe(desk, recipe):
    pytest.importorskip("accelerate")
    began_s = time.monotonic()
    launcher = f"-m accelerate.commands.launch --multi_gpu --num_processes=2 --main_process_port={free_port()}"
    said = run(desk, f"{launcher} {recipe}")
    assert time.monotonic() - began_s < 60
    assert "step 2/2" in said
    (out,) = (desk / "runs").iterdir()
    assert {path.parent.name for path in out.rglob("*.safetensors")} == {
        "model",
        *(["critic"] if recipe == PPO else []),
    }
    if "eval_every" in recipe:
        rows = metrics(out)
        assert all("accuracy" in row or "held_out_reward" in row for row in rows)


TIMES = ("step_s", "tokens_per_s", "train_", "time/")


def metrics(folder):
    """The figures of each step that do not depend on time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rm", "dpo"])
def test_pairs_are_learned_alike_in_one_process_and_in_two_though_one_has_no_pair_at_times(desk, recipe):
    line = f"-m dlrover.python.rl.recipe.{recipe} {PAIRS} eval_every=2 keep.best=eval_loss"
    run(desk, f"{line} job_dir=one")
    said = run(desk, f"{TWO} {line} job_dir=two")
    assert "best eval_loss" in said
    rows = [
        [json.loads(row) for row in (desk / name / "metrics.jsonl").read_text().splitlines()] for name in ("one", "two")
    ]
    for alone, together in zip(*rows, strict=True):
        for name in (name for name in alone if not name.startswith(TIMES)):
            assert together[name] == pytest.approx(alone[name], abs=1e-5), name
    for name in ("model", "best"):
        first, second = (load_file(desk / job / name / "model.safetensors") for job in ("one", "two"))
        assert first.keys() == second.keys()
        assert all(torch.allclose(first[key], second[key], atol=1e-5) for key in first)


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
def test_138_a_recipe_is_the_same_in_one_process_and_in_two(desk, line):
    run(desk, f"{line} job_dir=one")
    run(desk, f"{TWO} {line} job_dir=two")
    assert (desk / "one/samples.jsonl").read_text() == (desk / "two/samples.jsonl").read_text()
    for one, two in zip(metrics(desk / "one"), metrics(desk / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5), "figures are of all rows, not of one rank's"
    # AdamW makes of the rounding of a gradient near 0 up to some percent of the learning rate: 1e-3 would be too much.
    assert differ(desk / "one", desk / "two") < 1e-5
    assert differ(desk / "one", desk) > 1e-4


def launched_rank(rank, world_size, port, desk, line):
    """What a launcher would have started, in a process that has imported torch already."""
    os.chdir(desk)
    sys.path.append(str(Path(__file__).parent))
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _, recipe, *overrides = shlex.split(line)
    return launch(recipe.rpartition(".")[2], None, overrides)


def test_138_figures_are_means_over_the_rows_of_both_processes_and_are_written_once(desk):
    line = GRPO.replace("steps=2", "steps=1 job_dir=out").replace("eval_every=1 ", "")
    assert run_ranks(2, launched_rank, desk, line) == [0, 0]
    (step,) = metrics(desk / "out")
    rewards = [json.loads(row)["reward"] for row in (desk / "out/samples.jsonl").read_text().splitlines()]
    assert len(rewards) == 4 * 4
    means = [sum(part) / len(part) for part in (rewards, rewards[:8], rewards[8:])]
    assert step["reward"] == pytest.approx(means[0])
    assert len(set(means)) == 3, "those of one rank would be others"


@pytest.mark.slow
def test_097_filtering_may_leave_fewer_samples_than_there_are_ranks(desk):
    few = "prompts_per_step=3 rollout.samples_per_prompt=2 steps=4 rollout.dynamic_filtering=drop job_dir=out"
    alike = PPO.replace(":jumble", ":often_alike").replace("eval_every=1 ", "")
    run(desk, f"{TORCHRUN} --nproc_per_node=3 {alike} {few}")
    steps = [json.loads(line) for line in (desk / "out/metrics.jsonl").read_text().splitlines()]
    trained_on_two = [step for step in steps if step.get("filtered_groups") == 2]
    assert len(steps) == 4
    assert trained_on_two
    assert all({"loss", "critic_loss"} <= step.keys() for step in trained_on_two)


def refused_rank(*where):
    """What this rank says of a job that cannot be, or its exit code."""
    try:
        return launched_rank(*where)
    except InvalidJob as error:
        return str(error)


def test_a_job_that_cannot_be_is_refused_at_one_rank_with_every_problem(desk):
    said, code = run_ranks(2, refused_rank, desk, f"{SFT} batch_siz=4 data.trian=x")
    assert "did you mean 'batch_size'" in said
    assert "did you mean 'train'" in said
    assert code == 2


@pytest.mark.slow
def test_a_job_that_cannot_be_is_refused_once_and_the_launcher_is_told(desk):
    said = run(desk, f"{TWO} {SFT} batch_siz=4 data.trian=x", code=1)  # torchrun's own code
    assert said.count("did you mean 'batch_size'") == 1
    assert said.count("did you mean 'train'") == 1
    assert "exitcode  : 2" in said


def test_the_weights_that_are_compared_are_compared(desk):
    assert differ(desk, desk) == 0.0
    assert torch.is_tensor(next(iter(weights(desk).values())))
