# SPDX-License-Identifier: Apache-2.0
"""The machine of a run: the record of each start, and the check of devices that have failed."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.events import CauseKind, fault_of
from dlrover.python.rl.runtime.run import machine
from dlrover.python.rl.runtime.run.folder import FAILED, IN_PROCESS, begin, claim
from dlrover.python.rl.runtime.run.machine import ENVIRONMENT, describe_origin, record_environment, try_devices

JOB = "{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A}}, env: {API_KEY: canary-1}}"


def job_in(folder, **changes):
    return replace(load_job_text(JOB, "job"), job_dir=folder / "out", work_dir=str(folder), **changes)


def starts(folder):
    return [json.loads(line) for line in (folder / ENVIRONMENT).read_text().splitlines()]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["run", "job.yaml", "config.data.max_tokens=12"], "run job.yaml config.data.max_tokens=12"),
        (["run", "+env.HF_TOKEN=canary-2", "steps=3"], "run '+env.HF_TOKEN=***' steps=3"),
        (["reward.judge.api_key=canary-3"], "'reward.judge.api_key=***'"),
        (["train.py", "--api-key", "canary-4", "--lr", "1e-6"], "train.py --api-key '***' --lr 1e-6"),
        (["run", "https://me:canary-6@host/job.yaml"], "run '***'"),
        (["submit", "--rl_config", '{"env": {"X": "canary-1"}}'], """submit --rl_config '{"env": {"X": "***"}}'"""),
    ],
)
def test_command_of_a_start_has_no_secret(tmp_path, monkeypatch, arguments, shown):
    monkeypatch.setattr(sys, "orig_argv", ["dlrover-rl", *arguments])
    assert describe_origin(job_in(tmp_path))["command"] == f"dlrover-rl {shown}"


def test_commit_of_the_working_directory_is_recorded(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert describe_origin(job_in(tmp_path))["git"] is None
    git("init")
    (tmp_path / "train.py").write_text("first")
    git("add", "train.py")
    git("commit", "-m", "first")
    clean = describe_origin(job_in(tmp_path))["git"]
    (tmp_path / "new.py").write_text("untracked")
    assert (len(clean["commit"]), clean["dirty"], describe_origin(job_in(tmp_path))["git"]) == (40, False, clean)
    (tmp_path / "train.py").write_text("second")
    assert describe_origin(job_in(tmp_path))["git"] == {**clean, "dirty": True}


def test_every_start_in_a_folder_adds_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    first = begin(job_in(tmp_path))
    claim(first, IN_PROCESS, bound=True).end(FAILED)
    second = begin(replace(job_in(tmp_path), checkpoint=replace(first.checkpoint, resume="latest")))
    claim(second, IN_PROCESS, bound=True).end(FAILED)
    lines = starts(first.job_dir)
    assert [(line["start"], line["run"]) for line in lines] == [(1, first.run), (2, second.run)]
    assert lines[1]["devices"] == {"nodes": 1, "cpus": os.cpu_count(), "gpus": machine.check_devices().result}
    assert {"python", "torch", "transformers", "ray", "numpy", "dlrover-rl"} <= lines[0]["versions"].keys()
    assert {"time", "host", "runtime", "command", "work_dir", "git"} <= lines[0].keys()


def test_start_on_another_machine_keeps_the_lines_of_the_store(tmp_path):
    archive = f"file://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    for name in ("first", "second"):
        job = replace(begin(job_in(tmp_path / name, archive=archive)), run=name)
        job.job_dir.mkdir(parents=True)
        record_environment(job, 1, IN_PROCESS, on_ray=False)
    assert [line["run"] for line in starts(tmp_path / "store")] == ["first", "second"]
    assert starts(tmp_path / "second/out") == starts(tmp_path / "store")


def test_start_without_a_record_is_a_warning(tmp_path, caplog):
    job = begin(job_in(tmp_path))
    (job.job_dir / ENVIRONMENT).mkdir(parents=True)
    record_environment(job, 1, IN_PROCESS, on_ray=False)
    assert f"continuing without recording this start in {job.job_dir / ENVIRONMENT}" in caplog.text


def test_try_devices_accepts_good_ones():
    try_devices([0, 2], "import sys; assert sys.argv[1:] == ['0', '2']")


@pytest.mark.parametrize(
    ("program", "within_s", "words"),
    [
        ("raise RuntimeError('CUDA error: uncorrectable ECC error encountered')", 60, "uncorrectable ECC error"),
        ("import os; os._exit(3)", 60, "exit code 3"),
        ("import time; time.sleep(60)", 0.5, "no answer within 0.5 s"),
    ],
)
def test_try_devices_with_a_failure_is_a_fault_of_the_device(program, within_s, words):
    with pytest.raises(RuntimeError, match=words) as caught:
        try_devices([0], program, within_s)
    assert fault_of(caught.value) is CauseKind.DEVICE_FAILED


@pytest.mark.slow
def test_try_devices_without_cuda_fails():
    with nullcontext() if torch.cuda.is_available() else pytest.raises(RuntimeError, match="device check failed"):
        try_devices([0])
