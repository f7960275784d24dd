# SPDX-License-Identifier: Apache-2.0
"""The folders of runs, seen from outside: real processes in one working directory."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.held_job import Desk

HERE = "--local"
ALL_STEPS = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    with Desk(tmp_path) as desk:
        yield desk


def kill(process):
    process.kill()
    process.wait(60)


def folders(desk):
    return sorted(path for path in (desk.folder / "runs/held").iterdir() if not path.is_symlink())


# -- one folder for each run ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_of_one_file_have_separate_folders_and_a_latest(desk):
    for process in [desk.start("run", "job.yaml", HERE) for _ in range(2)]:
        output = desk.end(process)
        assert process.returncode == 0, output
    earlier = folders(desk)
    desk.run("run", "job.yaml", HERE)
    assert len(folders(desk)) == 3
    for folder in folders(desk):
        assert desk.steps(folder) == ALL_STEPS
        assert {"job.yaml", "journal.jsonl", "owner.1.json", "checkpoints"} <= {path.name for path in folder.iterdir()}
    (last,) = set(folders(desk)) - set(earlier)
    assert (desk.folder / "runs/held/latest").resolve() == last


@pytest.mark.slow
def test_check_names_the_checkpoints_of_runs_to_be_removed(desk):
    for _ in range(3):
        desk.run("run", "job.yaml", HERE)
    first, second, third = folders(desk)
    output = desk.run("check", "job.yaml", HERE, "checkpoint.keep_runs=2")
    assert re.findall(r"the run will remove (\S+)", output) == [str(first / "checkpoints")]
    assert (first / "checkpoints").is_dir()
    desk.run("run", "job.yaml", HERE, "checkpoint.keep_runs=2")
    assert not (first / "checkpoints").exists()
    assert desk.steps(first) == ALL_STEPS
    assert (second / "checkpoints").is_dir() and (third / "checkpoints").is_dir()


# -- one owner --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_folder_in_use_is_refused_with_its_owner(desk):
    first = desk.held("out", HERE)
    owner = desk.owner("out")
    for more in ((), ("overwrite=true",), ("checkpoint.resume=latest",)):
        output = desk.run("run", "job.yaml", HERE, "job_dir=out", *more, code=2)
        assert f"in use by run {owner['run']} of 'held' (one process, process {first.pid} on" in output
        assert "Traceback" not in output
    assert "in use by" in desk.run("resume", "out", code=2)
    desk.release("out")
    assert first.wait(60) == 0
    assert desk.steps("out") == ALL_STEPS
    assert desk.owner("out") == {**owner, "state": "finished"}


@pytest.mark.slow
def test_of_several_starts_at_once_one_gets_the_folder(desk):
    os.mkfifo(desk.folder / "out.gate")
    started = [desk.start("run", "job.yaml", HERE, "job_dir=out", "hold=2") for _ in range(4)]
    refused = []
    while len(refused) < 3:
        refused += [process for process in started if process.poll() is not None and process not in refused]
    (winner,) = set(started) - set(refused)
    assert [process.returncode for process in refused] == [2, 2, 2]
    assert all(f"out is in use by run {desk.owner('out')['run']} of" in process.said() for process in refused)
    desk.release("out")
    assert winner.wait(60) == 0
    assert desk.steps("out") == ALL_STEPS


def test_going_on_comes_before_replacing(desk):
    kill(desk.held("out", HERE, "checkpoint.commit_to=job_dir"))
    output = desk.run("resume", "out", "hold=0", "overwrite=true")
    assert "after step 3" in output
    assert desk.steps("out") == ALL_STEPS


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit_to", [pytest.param("memory", marks=pytest.mark.slow), "job_dir"])
def test_killed_run_resumes_only_on_request_after_its_last_step(desk, commit_to):
    kill(desk.held("out", HERE, f"checkpoint.commit_to={commit_to}"))
    assert "has the results of" in desk.run("run", "job.yaml", HERE, "job_dir=out", code=2)
    output = desk.run("resume", "out", "hold=0")
    assert "after step 3" in output
    assert desk.steps("out") == ALL_STEPS
    assert not list((desk.folder / "memory").rglob("step-*"))


@pytest.mark.slow
def test_last_step_of_a_killed_run_survives_runs_of_its_name(desk):
    kill(desk.held("out", HERE))
    desk.run("run", "job.yaml", HERE, "job_dir=other")
    assert not list((desk.folder / "memory").rglob("step-*"))
    assert "after step 3" in desk.run("resume", "out", "hold=0")
    assert desk.steps("out") == desk.steps("other") == ALL_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("changed", [[], ["steps=7"]], ids=["the same settings", "more steps"])
def test_steps_after_the_last_commit_are_repeated_on_resume(desk, changed):
    kill(desk.held("out", HERE, "checkpoint.commit_every=100"))
    process = desk.start("resume", "out", *changed)
    desk.release("out")
    desk.end(process)
    assert process.returncode == 0
    assert desk.steps("out") == [1, 2, 3, *range(1, 8 if changed else 7)]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stop_by_a_signal_prints_a_working_resume_command(desk, number):
    process = desk.held("out", HERE)
    process.send_signal(number)
    output = desk.end(process)
    assert process.returncode == 130, output
    command = re.search(r"dlrover-rl (resume) (\S+)", output)
    assert "after step 3" in desk.run(*command.groups(), "hold=0")
    assert desk.steps("out") == ALL_STEPS
    assert "has finished" in desk.run("resume", "out")
    assert "after step 6" in desk.run("resume", "out", "steps=8", "hold=0")
    assert desk.steps("out") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(list((desk.folder / "out/checkpoints").glob("*/step-*"))) == 2, "one rule for all runs in the folder"


@pytest.mark.slow
def test_resume_takes_a_job_name_or_gives_the_nearest(desk):
    desk.run("run", "job.yaml", HERE, "steps=3")
    assert "did you mean 'held'" in desk.run("resume", "hold", code=2)
    desk.run("resume", "held", "steps=5")
    assert [desk.steps(folder) for folder in folders(desk)] == [[1, 2, 3, 4, 5]]


@pytest.mark.slow
def test_secrets_are_not_saved_and_come_from_the_environment(desk):
    process = desk.held("out", HERE, "+env.API_KEY=sesame", "+headers.x-api-key=12345678")
    kill(process)
    saved = "".join(path.read_text() for path in Path(desk.folder / "out").glob("*.yaml"))
    assert "sesame" not in saved and "12345678" not in saved
    output = desk.run("resume", "out", "hold=0", code=2)
    assert "env.API_KEY: is a secret, which is not saved: set API_KEY in the environment" in output
    assert (
        "config.headers.x-api-key: is a secret, which is not saved: set HEADERS_X_API_KEY in the environment" in output
    )
    desk.run("resume", "out", "hold=0", API_KEY="sesame", HEADERS_X_API_KEY="12345678")


@pytest.mark.slow
def test_start_waits_for_a_lost_owner_on_another_machine(desk):
    kill(desk.held("out", HERE, "liveness.lease_s=8"))
    (record,) = (desk.folder / "out").glob("owner.*.json")
    record.write_text(json.dumps({**desk.owner("out"), "machine": "elsewhere", "host": "node-7"}))
    process = desk.start("run", "job.yaml", HERE, "job_dir=out", "checkpoint.resume=latest", "hold=0")
    while "waiting up to 13 s" not in process.said():  # however long it takes to start
        assert process.poll() is None, process.said()
        os.utime(record, (time.time() - 7, time.time() - 7))  # on a loaded machine it may be late by 6 s, or early
    output = desk.end(process)
    assert process.returncode == 0 and "on node-7" in output
    assert desk.steps("out") == ALL_STEPS
