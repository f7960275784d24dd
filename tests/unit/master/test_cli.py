# SPDX-License-Identifier: Apache-2.0
"""The command line in one process: exit codes, and one message with every problem."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlrover.python.rl.cli.commands import cli, main
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

ROOT = str(Path(__file__).parents[3])

GOOD = """
trainer: {module: tests.support.toy_jobs, class: Loop, device_type: CPU, device_per_node: 4}
workload:
  actor: {module: tests.support.toy_jobs, class: Adder, num: 2}
  rollout: {module: tests.support.toy_jobs, class: Adder}
config: {steps: 3}
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capfd):
    """Run ``dlrover-rl`` with arguments in an empty folder; gives the exit code and what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    logger = logging.getLogger("dlrover")
    kept = logger.handlers[:], logger.level, logger.propagate

    def go(*args):
        monkeypatch.setattr(sys, "argv", ["dlrover-rl", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
        out, err = capfd.readouterr()
        return code, out, err

    yield go
    logger.handlers[:], logger.level, logger.propagate = kept


def write(text=GOOD, name="job.yaml"):
    Path(name).write_text(text)
    return name


def refused(shell, text, *args, commands=(("check", "--local"), ("run", "--local"))):
    """What is said of a bad job, by every command alike; and that nothing was started."""
    messages = set()
    before = set(os.listdir()) | {write(text)}
    for command in commands:
        code, out, err = shell(*command, "job.yaml", *args)
        assert (code, out) == (2, ""), err
        assert set(os.listdir()) == before, "nothing was started"
        messages.add(err)
    (message,) = messages
    assert "Traceback" not in message
    return message


# -- jobs that run ----------------------------------------------------------------------------------------------------


def test_a_job_that_finishes_exits_with_0(shell):
    code, out, err = shell("run", "--local", write())
    assert (code, out) == (0, "")
    assert "step 3/3  loss 12" in err
    folder = Path("runs/job/latest")
    assert f"job: finished, the trainer returned; files in {folder.resolve()}" in err
    left = {"job.yaml", "environment.jsonl", "journal.jsonl", "owner.1.json", "checkpoints"}
    assert {path.name for path in folder.iterdir()} == left


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.class=FailingInit", "trainer: ValueError: the user's own words"),
        ("trainer.class=CallsFail", "ACTOR[1].fail on"),
        ("workload.actor.class=FailingStart", "ACTOR[1]: ValueError: no such model (start_failed is not retried)"),
        ("trainer.class=ExitingFit", "trainer: SystemExit: 0"),
    ],
)
def test_a_job_that_fails_exits_with_1_and_its_traceback(shell, override, said):
    code, _, err = shell("run", "--local", write(), override)
    assert code == 1
    assert said in err
    assert "Traceback (most recent call last):" in err
    assert "toy_jobs.py" in err


def test_a_job_that_is_interrupted_exits_with_130(shell):
    code, _, err = shell("run", "--local", write(), "trainer.class=InterruptedFit")
    assert code == 130
    assert "job: stopped, interrupted" in err


def test_resume_from_a_dead_disk_ends_in_one_line(shell):
    assert shell("run", "--local", write(), "job_dir=out")[0] == 0
    commit = Path("out/checkpoints/0000/step-00000003.e1")
    commit.mkdir(parents=True)
    (commit / "manifest.json").symlink_to("/proc/self/mem")  # EIO
    code, _, err = shell("resume", "out", "config.steps=4")
    assert code == 1
    assert err.splitlines()[-1] == f"{commit.absolute()}/manifest.json cannot be used: Input/output error"
    assert "Traceback" not in err


def test_an_earlier_runs_journal_is_kept(shell):
    for _ in range(3):
        assert shell("run", "--local", write(), "job_dir=out", "overwrite=true")[0] == 0
    assert {path.name for path in Path("out").glob("journal*")} == {
        "journal.jsonl",
        "journal.1.jsonl",
        "journal.2.jsonl",
    }


def test_check_prints_the_plan_and_starts_nothing(shell):
    code, out, _ = shell("check", write(), "workload.rollout.num=2")
    assert code == 0
    assert "plan: 4 bundles, {'cpu': 4.0} in all" in out
    assert "ROLLOUT    x2  tests.support.toy_jobs.Adder  each {'cpu': 1.0}  in bundle 2, 3" in out
    assert not Path("runs").exists()


def test_the_command_is_installed_and_runs_from_a_shell(tmp_path):
    (tmp_path / "job.yaml").write_text(GOOD.replace("class: Loop", "class: Lop"))
    run = subprocess.run(
        [Path(sys.executable).parent / "dlrover-rl", "check", "job.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "1 error in the job:\n"
        "  - trainer.class: module 'tests.support.toy_jobs' has no class 'Lop'; did you mean 'Loop'?\n"
    )


# -- the original's options -------------------------------------------------------------------------------------------


def test_submit_takes_the_job_as_text_or_as_a_file(shell):
    for config in (GOOD, write(), json.dumps({"trainer": {}, "workload": {}})):
        code, _, err = shell("submit", "--local", "--job_name", "mine", "--rl_config", config)
        assert code == (2 if config.startswith("{") else 0), err
    assert Path("runs/mine").is_dir()


def resolved(*options):
    """The job file that ``submit`` writes down."""
    result = CliRunner().invoke(cli, ["submit", "--local", "--job_name", "mine", "--rl_config", GOOD, *options])
    assert result.exit_code == 0, result.output
    return Path("runs/mine/latest/job.yaml").read_text()


def test_options_win_over_the_jobs_own_fields_and_absent_ones_leave_them(shell, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GOOD", f"{GOOD}restart: {{job_max_restart: 3, backoff_s: 0.5}}\n")
    assert "job_max_restart: 3\n  trainer_max_restart: 10" in resolved()
    text = resolved(
        "--max_restart", "0", "--workload_max_restart", "{'rollout': 2}", "--scheduling_strategy_type", "group"
    )
    assert "master:\n  cpu: 0.0\n  memory: 0.0\n  max_restart: -1" in text
    assert "  memory: 0.0\n  max_restart: 4" in resolved("--master_max_restart", "4")
    assert "job_max_restart: 0" in text
    assert "ROLLOUT: 2" in text
    assert "scheduling_strategy: GROUP" in text


def test_options_of_the_original_without_effect_say_so(shell):
    options = ("--state_backend_type", "ray_internal", "--master_state_backend_config", "{}")
    code, _, err = shell("submit", "--local", "--job_name", "mine", "--rl_config", GOOD, *options)
    assert code == 0
    for option in ("master_state_backend_type", "master_state_backend_config"):
        assert f"--{option} has no effect: the master keeps its journal in the job's directory" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workload_max_restart", "3"), "is not a dict of roles and limits"),
        (("--workload_max_restart", "{'rollout': 'x'}"), "is not a dict of roles and limits"),
        (("--workload_max_restart", "{'rollout': -1}"), "is not a dict of roles and limits"),
        (("--workload_max_restart", "{"), "is not a Python literal"),
        (("--workload_max_restart", "{'rolout': 1}"), "the job has no role 'ROLOUT'; did you mean 'ROLLOUT'?"),
        (("--job_max_restart", "-1"), "-1 is not in the range"),
        (("--master_max_restart", "-2"), "-2 is not in the range"),
        (("--scheduling_strategy_type", "fast"), "'fast' is not one of"),
        (("--job_max_restarts", "3"), "No such option"),
        (("--job_name", "My Job"), "'My Job' is not a job name"),
    ],
)
def test_a_wrong_option_exits_with_2(shell, options, said):
    code, _, err = shell("submit", "--local", "--job_name", "mine", "--rl_config", GOOD, *options)
    assert code == 2
    assert said in err
    assert os.listdir() == []


# -- bad jobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "class: Loop",
            "class: Lop",
            "trainer.class: module 'tests.support.toy_jobs' has no class 'Lop'; did you mean 'Loop'?",
        ),
        ("class: Loop", "class: Adder", "trainer.class: Adder does not extend BaseTrainer"),
        ("num: 2", "nmu: 2", "workload.actor.nmu: unknown key 'nmu'; did you mean 'num'?"),
        ("num: 2", "num: -2", "workload.actor.num: input should be greater than 0, got -2"),
        ("num: 2", "num: 9", "impossible placement: ACTOR x 9, ROLLOUT x 1 do not fit 1 node(s) x 4 CPU = 4"),
        ("num: 2", "num: 2, resource: {cpu: -1}", "workload.actor.resource.cpu: input should be greater than or equal"),
        ("actor:", "actr:", "workload: the role 'actor' is required; did you mean 'actr'?"),
        (
            "config:",
            "workload_group: [{actr: 1}]\nconfig:",
            "workload_group.0.actr: the job has no role 'actr'; did you",
        ),
        ("class: Adder, num", "class: Collective, num", "workload.actor.num: 2 workers of Collective meet in"),
        ("{steps: 3}", "{steps: [1, 2}", "job.yaml:6: not valid YAML"),
    ],
)
def test_a_bad_job_is_refused_with_the_place_and_the_right_name(shell, before, after, said):
    message = refused(shell, GOOD.replace(before, after, 1))
    assert message.startswith("1 error in the job:\n  - ")
    assert said in message


def test_all_problems_of_placement_classes_and_checks_come_in_one_message(shell):
    text = GOOD.replace("Loop", "Picky").replace("num: 2", "num: 9").replace("class: Adder}", "class: Addr}")
    message = refused(shell, text, "steps=0")
    assert message.splitlines()[0] == "4 errors in the job:"
    for said in ("impossible placement", "config.steps: is below 1", "9 is more than 3", "did you mean 'Adder'?"):
        assert said in message


def test_a_missing_file_is_said(shell):
    write()
    code, out, err = shell("run", "--local", "jop.yaml")
    assert (code, out) == (2, "")
    assert err == "1 error in the job:\n  - jop.yaml: no such job file; did you mean 'job.yaml'?\n"


GRPO = """
trainer: {module: dlrover.python.rl.recipe.grpo, class: GRPOTrainer, device_type: CPU, device_per_node: 4}
workload:
  actor: {module: dlrover.python.rl.recipe.workloads, class: ActorWorkload}
  rollout: {module: dlrover.python.rl.recipe.workloads, class: RolloutWorkload}
  reward: {module: dlrover.python.rl.recipe.workloads, class: RewardWorkload}
config:
  model: ./model
  data: {train: train.jsonl, eval: eval.jsonl}
"""


def test_a_recipe_names_every_missing_file_and_every_malformed_line(shell):
    rows = [json.dumps({"prompt": f"1+{row}=", "answer": str(row + 1)}) for row in range(10)]
    rows[6] = '{"prompt": "1+6=", "answer": '
    rows[8] = '{"promt": "1+8=", "answer": "9"}'
    Path("train.jsonl").write_text("\n".join(rows))
    Path("evals.jsonl").write_text("")
    message = refused(shell, GRPO, "+stepss=3", "+rollout.temperature=0")
    for said in (
        "config.stepss: unknown key 'stepss'; did you mean 'steps'?",
        "config.rollout.temperature: input should be greater than 0, got 0",
        "config.model: no such folder: ./model",
        "train.jsonl:7: not JSON",
        "train.jsonl:9: unknown key 'promt'; did you mean 'prompt'?",
        "eval.jsonl: no such file; did you mean 'evals.jsonl'?",
    ):
        assert said in message


@pytest.fixture
def recipe(tmp_path, capfd):
    """The text of a job that a recipe can run."""
    write_tiny_model(tmp_path / "model", hidden=32, layers=1)
    capfd.readouterr()
    rows = [json.dumps({"prompt": f"1+{row}=", "answer": str(row + 1)}) for row in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    return GRPO.replace(", eval: eval.jsonl", ", eval_rows: 8")


def test_any_key_of_a_recipe_can_be_overridden_and_check_full_shows_all(shell, recipe):
    write(recipe)
    code, given, _ = shell("check", "--local", "job.yaml", "seed=7", "keep.save_every=3")
    assert code == 0
    assert "  seed: 7\n" in given and "save_every: 3" in given
    assert "max_staleness" not in given
    code, full, _ = shell("check", "--local", "--full", "job.yaml", "seed=7")
    assert code == 0
    assert all(line in full for line in ("  seed: 7\n", "    max_staleness: 0\n", "    device: cpu\n"))
    assert "algorithm:\n    name: grpo\n    clip_low: 0.2\n" in full
    for line in (
        "model: ./model, 20.7 k parameters; 82.9 kB of weights to generate, 332 kB to train, activations not counted",
        "engines: train fsdp2, rollout torch, on cpu in fp32",
        "each step: 16 prompts x 8 samples = 128 of up to 64 new tokens; 1 update of 128",
    ):
        assert line in full


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sead=1", "config.sead: unknown key 'sead'; did you mean 'seed'?"),
        ("adv.estimator=gea", 'config.adv.estimator: must be one of "gae", "reinforce", got \'gea\'; here it is al'),
        ("trainer.n_epochs=2", "trainer.n_epochs: unknown key; here it is epochs, or steps for recipes that"),
        ("actor_rollout_ref.actor.clip_ratio=0.2", "here it is algorithm.clip_low and algorithm.clip_high"),
        ("train_data.path=other.jsonl", "other.jsonl: no such file"),
    ],
)
def test_a_key_that_a_recipe_has_not_is_answered_with_its_own(shell, recipe, override, said):
    assert said in refused(shell, recipe, override)


def test_a_job_on_gpus_does_not_compute_on_the_cpu(shell, recipe):
    message = refused(shell, recipe, "trainer.device_type=GPU", "engine.device=cpu", commands=[("check",)])
    assert "config.engine.device: 'cpu', but the job runs on GPUs: its GPUs would be idle" in message


def test_a_job_for_gpus_that_is_tried_without_one_says_so(shell, recipe):
    write(recipe)
    code, about, _ = shell("check", "--local", "job.yaml", "trainer.device_type=GPU")
    assert code == 0
    assert "trainer.device_type is GPU, but this process has none and computes on the CPU" in about
    code, about, _ = shell("check", "--local", "job.yaml", "trainer.device_type=GPU", "engine.device=cpu")
    assert code == 0
    assert "computes on the CPU" not in about, "the job says so itself, as that of a launched recipe does"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "name=My_job",
            "name: 'My_job' is not a job name: use 1 to 63 of a-z, 0-9 and '-', beginning and ending with a",
        ),
        ("name=My_job", "such as 'my-job'"),
        ("name=a/b c", "such as 'a-b-c'"),
        ("model=modell", "config.model: no such folder: modell; did you mean 'model'?"),
        ("model=runs/tinny", "config.model: no such folder: runs/tinny; did you mean 'runs/tiny'?"),
        (
            "model=runs/teacher",
            "config.model: no such folder: runs/teacher; 'runs' is a folder here: to use the hub's, download",
        ),
        ("model=tiny.gguf", "config.model: no such folder: tiny.gguf"),
        ("data.train=train.txt", "train.txt: no such file; did you mean 'train.jsonl'?"),
        ("model=bare", "config.model: bare holds no tokenizer: it has none of tokenizer.json, "),
        (
            "reward.function=toy_rewards:of_nothing",
            "'toy_rewards:of_nothing' takes no completion: it is called as (completion, answer, extra_info)",
        ),
    ],
)
def test_an_input_that_is_almost_right_is_answered_once_in_one_line(shell, recipe, override, said):
    Path("bare").mkdir()
    Path("bare/config.json").write_text(json.dumps({"model_type": "llama"}))
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/config.json").write_text("{}")
    Path("toy_rewards.py").write_text("def of_nothing():\n    return 0.0\n")
    message = refused(shell, recipe, override)
    assert message.count(said) == 1
    assert message.startswith("1 error in the job:\n")


def test_what_has_no_effect_is_refused(shell):
    write()
    for line, said in (
        ("run --local --address auto job.yaml", "--address: names a cluster, but --local runs without Ray"),
        ("run --local job.yaml", ""),
        ("resume --local job name=other", "name: cannot be changed"),
        ("resume --local job job_dir=elsewhere", "job_dir: cannot be changed"),
        ("eval --local job +name=other", "name: cannot be changed"),
    ):
        code, _, err = shell(*line.split())
        assert (code, said in err) == (2 if said else 0, True), err


def test_a_submitted_file_has_its_classes_beside_it(shell):
    Path("jobs").mkdir()
    Path("jobs/beside.py").write_text("from tests.support.toy_jobs import *\n")
    write(GOOD.replace("tests.support.toy_jobs", "beside"), "jobs/job.yaml")
    code, _, err = shell("submit", "--local", "--job_name", "mine", "--rl_config", "jobs/job.yaml")
    assert code == 0, err


def test_a_missing_actor_is_said_once(shell):
    text = GOOD.replace("  actor: {module: tests.support.toy_jobs, class: Adder, num: 2}\n", "")
    message = refused(shell, text, commands=[("check",)])
    assert message == "1 error in the job:\n  - workload: the role 'actor' is required; the job has rollout\n"


def test_a_missing_file_is_no_text_of_a_job(shell):
    Path("job.yaml").write_text(GOOD)
    code, out, err = shell("submit", "--local", "--job_name", "a", "--rl_config", "jop.yaml")
    assert (code, out) == (2, "")
    assert err == "1 error in the job:\n  - --rl_config: no such file: jop.yaml; did you mean 'job.yaml'?\n"


def test_keys_of_other_libraries_are_read_as_the_recipes_own(shell, recipe):
    write(recipe)
    code, full, _ = shell("check", "--local", "--full", "job.yaml", "learning_rate=0.5", "kl.type=reward")
    assert code == 0
    assert "    lr: 0.5\n" in full and "    kl_in: reward\n" in full


def test_the_keys_of_users_own_trainers_must_be_in_the_file(shell):
    message = refused(shell, GOOD, "stepz=1")
    assert "stepz: unknown key 'stepz'; did you mean 'steps'? (write +stepz=... to add it)" in message


def test_problems_of_every_kind_come_in_one_message(shell):
    """Unknown key, unknown role in a group, class that does not import, impossible placement, negative number, missing
    data file, malformed line 7: all at once, each with its place and the nearest right name."""
    rows = [json.dumps({"prompt": f"1+{row}=", "answer": str(row + 1)}) for row in range(10)]
    rows[6] = '{"prompt": "1+6=", "answer": '
    Path("train.jsonl").write_text("\n".join(rows))
    Path("evals.jsonl").write_text("\n".join(rows[:3]))
    text = (
        GRPO.replace("device_per_node: 4", "device_per_node: 4, nod_number: 2")
        .replace("class: RewardWorkload", "class: RewardWorkloads")
        .replace("class: RolloutWorkload}", "class: RolloutWorkload, num: 9}")
        .replace("config:", "workload_group: [{actor: 1, refrence: 1}]\nconfig:\n  prompts_per_step: -3")
    )
    message = refused(shell, text)
    for said in (
        "trainer.nod_number: unknown key 'nod_number'; did you mean 'node_number'?",
        "workload_group.0.refrence: the job has no role 'refrence'",
        "has no class 'RewardWorkloads'; did you mean 'RewardWorkload'?",
        "impossible placement: ACTOR x 1, ROLLOUT x 9, REWARD x 1 do not fit 1 node(s) x 4 CPU = 4",
        "config.prompts_per_step: input should be greater than 0, got -3",
        "eval.jsonl: no such file; did you mean 'evals.jsonl'?",
        "train.jsonl:7: ",
        "config.model: no such folder: ./model",
    ):
        assert said in message, message


def test_a_job_directory_that_cannot_be_is_said(shell):
    Path("taken").write_text("")
    assert "job_dir: " in refused(shell, f"job_dir: taken/here\n{GOOD}")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--steps", "5"], "no option --steps: settings are written key=value, steps=5"),
        (["-steps=5"], "no option -steps: settings are written key=value, steps=5"),
        (["--max-steps=5"], "no option --max-steps: settings are written key=value, max_steps=5"),
        (["--loca"], "or did you mean --local?"),
        (["trainr.module=x"], "trainr.module: unknown key 'trainr'; did you mean 'trainer.module'?"),
        (["job_dir=/proc/nowhere/out"], "job_dir: cannot be created: "),
    ],
)
def test_a_wrong_argument_is_answered_with_the_right_one(shell, given, words):
    code, out, err = shell("run", "--local", write(), *given)
    assert code == 2
    assert words in err
    assert "Traceback" not in out + err


def test_without_ray_its_functions_start_no_cluster_and_name_the_way_without_it(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "guide.py").write_text(
        "import ray\n"
        "from tests.support.toy_jobs import Adder, Loop\n\n\n"
        "class Gets(Loop):\n"
        "    def fit(self):\n"
        "        ray.get(list(self.RG_ACTOR.add.options(blocking=False)(1)))\n"
    )
    job = tmp_path / write(
        GOOD.replace("module: tests.support.toy_jobs, class: Loop", "module: guide, class: Gets"), tmp_path / "j"
    )
    command = [sys.executable, "-m", "dlrover.python.rl.master.main", "run", "--local", str(job), "env.TOKEN=sesame"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, str(tmp_path)])}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "CallError: there is no Ray in one process: resolve what role groups and handles return" in ran.stderr
    assert "Started a local Ray" not in ran.stderr
    assert "sesame" not in ran.stdout + ran.stderr
    assert len(ran.stdout + ran.stderr) < 5000


def test_an_error_in_the_users_data_shows_no_code_of_ours(shell):
    code, out, err = shell("run", "--local", write(), "trainer.class=DataFault")
    assert code == 1
    assert "DataError: data: row 3 is empty" in err
    assert "Traceback" not in out + err
