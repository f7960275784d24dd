# SPDX-License-Identifier: Apache-2.0
"""The command line in one process: exit codes, and one message with every problem."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_here, run_python

ROOT = str(Path(__file__).parents[3])

GOOD = """
trainer: {module: tests.support.toy_jobs, class: Loop, device_type: CPU, device_per_node: 4}
workload:
  actor: {module: tests.support.toy_jobs, class: Adder, num: 2}
  rollout: {module: tests.support.toy_jobs, class: Adder}
config: {steps: 3}
"""


CLASS = "trainer.class: module 'tests.support.toy_jobs' has no class 'Lop'; did you mean 'Loop'?"


@pytest.fixture
def shell(tmp_path, monkeypatch, capfd, kept_logger):
    """Run ``dlrover-rl`` with arguments in an empty folder; gives its exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ROOT)

    return lambda *args: run_here(monkeypatch, capfd, *args)


def write(text=GOOD, name="job.yaml"):
    Path(name).write_text(text)
    return name


def refused(shell, text, *args):
    """Refuse a bad job with both commands alike, which start nothing; gives the message."""
    before = set(os.listdir()) | {write(text)}
    ((code, out, message),) = {shell(command, "--local", "job.yaml", *args) for command in ("check", "run")}
    assert (code, out) == (2, ""), message
    assert set(os.listdir()) == before, "nothing was started"
    assert "Traceback" not in message
    return message


# -- jobs that run ----------------------------------------------------------------------------------------------------


def test_finished_run_exits_with_0(shell):
    code, out, err = shell("run", "--local", write())
    assert (code, out) == (0, "")
    assert "step 3/3  loss 12" in err
    folder = Path("runs/job/latest")
    assert f"job: finished, the trainer returned; files in {folder.resolve()}" in err
    left = {"job.yaml", "environment.jsonl", "journal.jsonl", "owner.1.json", "checkpoints", "spans"}
    assert {path.name for path in folder.iterdir()} == left


@pytest.mark.parametrize(
    ("override", "expected", "is_traced"),
    [
        ("trainer.class=FailingInit", "trainer: ValueError: the user's own words", True),
        ("trainer.class=CallsFail", "ACTOR[1].fail on", True),
        ("workload.actor.class=FailingStart", "ACTOR[1]: ValueError: no such model (start_failed is not", True),
        ("trainer.class=ExitingFit", "trainer: SystemExit: 0", True),
        ("trainer.class=DataFault", "DataError: data: row 3 is empty", False),
    ],
)
def test_failed_run_exits_with_1(shell, override, expected, is_traced):
    code, _, err = shell("run", "--local", write(), override)
    assert code == 1
    assert expected in err
    assert ("Traceback (most recent call last):" in err) == ("toy_jobs.py" in err) == is_traced


def test_interrupted_run_exits_with_130(shell):
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


def test_check_prints_the_plan_and_starts_nothing(shell):
    code, out, _ = shell("check", write(), "workload.rollout.num=2")
    assert code == 0
    assert "plan: 4 bundles, {'cpu': 4.0} in all" in out
    assert "ROLLOUT    x2  tests.support.toy_jobs.Adder  each {'cpu': 1.0}  in bundle 2, 3" in out
    assert not Path("runs").exists()


def test_installed_command_runs_from_a_shell(tmp_path):
    (tmp_path / "job.yaml").write_text(GOOD.replace("class: Loop", "class: Lop"))
    command = [Path(sys.executable).parent / "dlrover-rl", "check", "job.yaml"]
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"1 error in the job:\n  - {CLASS}\n")


# -- the original's options -------------------------------------------------------------------------------------------

SUBMIT = ("submit", "--local", "--job_name", "mine", "--rl_config")
LIMITS = "--workload_max_restart"


def test_submit_takes_the_job_as_text_or_as_a_file(shell):
    assert [shell(*SUBMIT, config)[0] for config in (GOOD, write(), '{"trainer": {}, "workload": {}}')] == [0, 0, 2]
    assert Path("runs/mine").is_dir()


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ((), ["job_max_restart: 3\n  trainer_max_restart: 10", "  memory: 0.0\n  max_restart: -1"]),
        (("--max_restart", "0"), ["job_max_restart: 0"]),
        (("--workload_max_restart", "{'rollout': 2}"), ["ROLLOUT: 2", "job_max_restart: 3"]),
        (("--scheduling_strategy_type", "group"), ["scheduling_strategy: GROUP"]),
        (("--master_max_restart", "4"), ["  memory: 0.0\n  max_restart: 4"]),
    ],
)
def test_options_of_submit_override_fields_of_the_job(shell, options, lines):
    code, _, err = shell(*SUBMIT, f"{GOOD}restart: {{job_max_restart: 3, backoff_s: 0.5}}\n", *options)
    assert code == 0, err
    text = Path("runs/mine/latest/job.yaml").read_text()
    assert [line for line in lines if line not in text] == []


def test_submit_warns_of_options_without_effect(shell):
    code, _, err = shell(*SUBMIT, GOOD, "--state_backend_type", "ray_internal", "--master_state_backend_config", "{}")
    assert code == 0
    for option in ("master_state_backend_type", "master_state_backend_config"):
        assert f"--{option} has no effect: the master keeps its journal in the job's directory" in err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((LIMITS, "3"), "is not a dict of roles and limits"),
        ((LIMITS, "{"), "is not a Python literal"),
        ((LIMITS, "{'rolout': 1}"), "the job has no role 'ROLOUT'; did you mean 'ROLLOUT'?"),
        (("--job_max_restart", "-1"), "-1 is not in the range"),
        (("--master_max_restart", "-2"), "-2 is not in the range"),
        (("--scheduling_strategy_type", "fast"), "'fast' is not one of"),
        (("--job_max_restarts", "3"), "No such option"),
        (("--job_name", "My Job"), "'My Job' is not a job name"),
    ],
)
def test_submit_with_a_wrong_option_exits_with_2(shell, options, expected):
    code, _, err = shell(*SUBMIT, GOOD, *options)
    assert code == 2
    assert expected in err
    assert os.listdir() == []


# -- bad jobs ---------------------------------------------------------------------------------------------------------


PLACEMENT = "impossible placement: ACTOR x 9, ROLLOUT x 1 do not fit 1 node(s) x 4 CPU = 4"
ACTOR = "  actor: {module: tests.support.toy_jobs, class: Adder, num: 2}\n"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("class: Loop", "class: Lop", CLASS),
        ("class: Loop", "class: Adder", "trainer.class: Adder does not extend BaseTrainer"),
        ("num: 2", "num: 9", PLACEMENT),
        (ACTOR, "", "workload: the role 'actor' is required; the job has rollout\n"),
        ("class: Adder, num", "class: Collective, num", "workload.actor.num: 2 workers of Collective use"),
        ("{steps: 3}", "{steps: [1, 2}", "job.yaml:6: not valid YAML"),
    ],
)
def test_bad_job_is_refused_with_the_place_and_right_name(shell, before, after, expected):
    message = refused(shell, GOOD.replace(before, after, 1))
    assert message.startswith("1 error in the job:\n  - ")
    assert expected in message


def test_submitted_file_may_have_its_classes_beside_it(shell):
    Path("jobs").mkdir()
    Path("jobs/beside.py").write_text("from tests.support.toy_jobs import *\n")
    write(GOOD.replace("tests.support.toy_jobs", "beside"), "jobs/job.yaml")
    code, _, err = shell(*SUBMIT, "jobs/job.yaml")
    assert code == 0, err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run --local jop.yaml", "1 error in the job:\n  - jop.yaml: no such job file; did you mean 'job.yaml'?\n"),
        ("submit --job_name a --rl_config jop.yaml", "--rl_config: no such file: jop.yaml; did you mean 'job.yaml'?"),
        ("run --local job.yaml --steps 5", "no option --steps: settings are written key=value, steps=5"),
        ("run --local job.yaml --max-steps=5", "no option --max-steps: settings are written key=value, max_steps=5"),
        ("run --local job.yaml --loca", "or did you mean --local?"),
        ("run --local job.yaml trainr.module=x", "unknown key 'trainr'; did you mean 'trainer.module'?"),
        ("run --local job.yaml stepz=1", "unknown key 'stepz'; did you mean 'steps'? (write +stepz=... to add it)"),
        ("run --local job.yaml job_dir=/proc/nowhere/out", "job_dir: cannot be created: "),
        ("run --local --address auto job.yaml", "--address: names a cluster, but --local runs without Ray"),
        ("run --supervise --detach --address x:1 job.yaml", "--supervise: cannot be used with --detach"),
        ("resume --local earlier name=other", "name: cannot be changed"),
        ("resume --local earlier job_dir=elsewhere", "job_dir: cannot be changed"),
        ("eval --local earlier +name=other", "name: cannot be changed"),
    ],
)
def test_wrong_argument_is_answered_with_the_right_one(shell, line, expected):
    write()
    if "earlier" in line:
        assert shell("run", "--local", "job.yaml", "job_dir=earlier")[0] == 0
    code, out, err = shell(*line.split())
    assert code == 2
    assert expected in err
    assert "Traceback" not in out + err


USES_RAY = """
import ray
from tests.support.toy_jobs import Adder, Loop

class Gets(Loop):
    def fit(self):
        ray.get(list(self.RG_ACTOR.add.options(blocking=False)(1)))
"""


def test_local_run_calling_ray_starts_no_cluster(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "guide.py").write_text(USES_RAY)
    text = GOOD.replace("module: tests.support.toy_jobs, class: Loop", "module: guide, class: Gets")
    write(text, tmp_path / "job.yaml")
    command = ("-m", "dlrover.python.rl.master.main", "run", "--local", "job.yaml", "env.TOKEN=sesame")
    done = run_python(tmp_path, *command, code=1, within_s=60)
    assert "CallError: a run in one process has no Ray: call .result() on what role groups and" in done.stderr
    assert "Started a local Ray" not in done.stderr
    assert "sesame" not in done.stdout + done.stderr
    assert len(done.stdout + done.stderr) < 5000
