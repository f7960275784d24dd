# SPDX-License-Identifier: Apache-2.0
"""What a wrong input is answered with, as a user sees it: processes of their own, from outside."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.held_job import wait_for

ROOT = Path(__file__).resolve().parents[3]
CLI = "from dlrover.python.rl.cli.entry import main; main()"
NO_HUB = "http://127.0.0.1:9"
DEADLINE_S = 200.0
OWN_FRAME = re.compile(r'File ".*dlrover/python/rl/')
slow = pytest.mark.slow

JOB = """
trainer: {module: dlrover.python.rl.recipe.grpo, class: GRPOTrainer, device_type: CPU, device_per_node: 4}
workload:
  actor: {module: dlrover.python.rl.recipe.workloads, class: ActorWorkload}
  rollout: {module: dlrover.python.rl.recipe.workloads, class: RolloutWorkload}
  reward: {module: dlrover.python.rl.recipe.workloads, class: RewardWorkload}
config:
  model: model
  steps: 1
  prompts_per_step: 4
  rollout: {samples_per_prompt: 2, max_new_tokens: 4}
  data: {train: train.jsonl, eval_rows: 4}
"""
REWARDS = """
def raises(completion, answer, extra_info):
    return {}[answer]


def of_nothing():
    return 0.0


def raises_a_lot(completion, answer):
    raise ValueError("\\n".join(40 * str(line) for line in range(20_000)))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A working directory: a job, its data and its model."""
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model", hidden=32, layers=1)
    rows = [json.dumps({"prompt": f"1+{row}=", "answer": str(row + 1)}) for row in range(20)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "bad.jsonl").write_text("\n".join([*rows, '{"prompt": ']))
    (folder / "job.yaml").write_text(JOB)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "bare").mkdir()
    (folder / "bare/config.json").write_text('{"model_type": "llama"}')
    return folder


def start(folder, *command):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_ENDPOINT": NO_HUB}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=env, **streams)


def answer(folder, *command):
    """The exit code, and all that is printed; never a frame of the package's own."""
    process = start(folder, *command)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert not OWN_FRAME.search(printed), printed
    return process.returncode, printed


def cli(folder, line):
    return answer(folder, "-c", CLI, *line.split(" "))


def recipe(folder, line, *launcher):
    given = "model=model data.train=train.jsonl data.eval_rows=4 steps=1 prompts_per_step=4"
    sizes = "rollout.samples_per_prompt=2 rollout.max_new_tokens=4"
    return answer(folder, *launcher, "-m", "dlrover.python.rl.recipe.grpo", *f"{given} {sizes} {line}".split())


def errors_in(printed):
    """The lines of a refusal, which come last."""
    assert printed.count("in the job:\n") == 1, printed
    return printed.partition(" in the job:\n")[2].removesuffix("\n").split("\n")


NO_MODEL = "no folder 'some-org/none', and the hub cannot be reached: "
NO_DATA = "config.data.train: some-org/none: is no file or folder, and the hub cannot be reached: "


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("submit --job_name a --rl_config jop.yaml", "--rl_config: no such file: jop.yaml; did you mean 'job.yaml'?"),
        ("run --local job.yaml trainr.module=x", "trainr.module: unknown key 'trainr'; did you mean 'trainer.module'?"),
        pytest.param("check job.yaml name=a/b_c", "name: 'a/b_c' is not a job name: use 1 to 63 of", marks=slow),
        pytest.param("check job.yaml model=modl", "config.model: no such folder: modl; did you mean", marks=slow),
        pytest.param("check job.yaml model=bare", "config.model: bare holds no tokenizer: it has", marks=slow),
        pytest.param(
            "check job.yaml reward.function=rewards:of_nothing",
            "config.reward.function: 'rewards:of_nothing' takes no completion: it is called as (completion, ",
            marks=slow,
        ),
        pytest.param("run job.yaml data.train=bad.jsonl", "bad.jsonl:21: not JSON", marks=slow),
        pytest.param("run job.yaml data.train=some-org/none", NO_DATA, marks=slow),
        pytest.param("check --hub job.yaml data.train=some-org/none", NO_DATA, marks=slow),
        pytest.param("check --hub job.yaml model=some-org/none", f"config.model: {NO_MODEL}", marks=slow),
        pytest.param("run job.yaml job_dir=/proc/none/out", "job_dir: cannot be created: ", marks=slow),
        pytest.param("run --local job.yaml job_dir=/proc/none/out", "job_dir: cannot be created: ", marks=slow),
    ],
)
def test_a_wrong_input_is_refused_in_one_line(inputs, line, said):
    code, printed = cli(inputs, line)
    assert code == 2, printed
    (error,) = errors_in(printed)
    assert error.startswith(f"  - {said}")


def test_a_setting_as_an_option_is_answered_with_its_form(inputs):
    code, printed = cli(inputs, "run --local job.yaml --steps 5")
    assert code == 2
    assert printed.endswith("Error: no option --steps: settings are written key=value, steps=5\n")


@pytest.mark.slow
def test_a_check_looks_up_no_name_on_the_hub(inputs):
    code, printed = cli(inputs, "check --local job.yaml model=some-org/none data.train=other/none")
    assert code == 0, printed
    for what in ("model: some-org/none", "data: other/none"):
        assert f"\n{what}, on the hub: not looked up (check --hub does)\n" in printed


FAILURES = [
    ("model=some-org/none", "no model at 'some-org/none': it is not a folder, and the hub cannot be reached: "),
    ("data.max_prompt_tokens=1 data.over_long=drop", "DataError: config.data.max_prompt_tokens: leaves no prompt to "),
    ("reward.function=rewards:raises", "DataError: step 1: the reward function failed on all 8 samples, last with: "),
]


@slow
@pytest.mark.parametrize(("override", "said"), FAILURES, ids=["model", "prompts", "reward"])
@pytest.mark.parametrize("runtime", ["dlrover-rl", "recipe"])
def test_inputs_that_only_a_run_finds_wrong_fail_it_without_a_traceback_of_its_own(
    inputs, tmp_path, runtime, override, said
):
    given = f"{override} job_dir={tmp_path}/out"
    code, printed = cli(inputs, f"run --local job.yaml {given}") if runtime != "recipe" else recipe(inputs, given)
    assert code == 1, printed
    assert printed.count(said) == 1
    raised = override.startswith("reward")
    assert printed.count("Traceback") == raised
    assert printed.count("in raises\n    return {}[answer]\n") == raised
    assert printed.count("samples failed: rewards:raises raised KeyError: ") == 2 * raised, "once for each batch"


@pytest.mark.slow
def test_a_long_message_of_a_reward_function_is_cut(inputs, tmp_path):
    code, printed = cli(inputs, f"run --local job.yaml reward.function=rewards:raises_a_lot job_dir={tmp_path}/out")
    assert code == 1
    assert "samples failed: rewards:raises_a_lot raised ValueError: 000" in printed
    assert "in raises_a_lot\n" in printed
    assert len(printed) < 8000


@slow
@pytest.mark.parametrize(("override", "said"), [("seed=x", "config.seed: "), ("job_dir=/proc/none/out", "job_dir: ")])
def test_a_refusal_ends_every_rank_and_torchrun_repeats_its_reason_in_the_end(inputs, override, said):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    code, printed = recipe(inputs, override, *launcher)
    assert code == 1, "torchrun has no other code"
    assert f"  traceback : 1 error in the job:\n    - {said}" in printed.partition("Root Cause")[2]
    assert printed.count("exitcode  : 2") == 2, printed


def test_ctrl_c_while_the_command_is_being_loaded_is_answered_in_one_line(inputs):
    process = start(inputs, "-c", CLI, "run", "--local", "job.yaml")
    wait_for(lambda: "/_pydantic_core" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, printed.strip()) == (130, "interrupted before anything was started")


@slow
def test_a_run_on_a_full_disk_says_that_it_waits_and_then_that_there_is_no_space(inputs, tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        (tmp_path / "others").write_bytes(bytes(2_000_000))
        code, printed = cli(inputs, f"run --local job.yaml job_dir={tmp_path}/out")
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert code == 1
    assert f"no disk space for {tmp_path}/out/model; waiting up to 60 s: " in printed
    assert "No space left on device: " in printed.partition("job: failed, ")[2]
    assert "(no_space is not retried)" in printed
    assert "Traceback" not in printed
