# SPDX-License-Identifier: Apache-2.0
"""The checks of ``doctor`` and its advice."""

import fcntl
import os
import socket
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from dlrover.python.rl.cli.serve import doctor
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.spec import CheckpointSpec
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
from dlrover.python.rl.runtime.ray.cluster.health import compare
from dlrover.python.rl.runtime.run import machine as health
from dlrover.python.rl.runtime.run.folder import FAILED, IN_PROCESS, begin, claim
from dlrover.python.rl.runtime.run.machine import MachineReport, check_devices, check_port
from tests.support.served import JOB


def test_doctor_of_a_sound_machine_has_nothing_to_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "check_port", lambda port: health.Check(f"TCP port {port}", True, "free"))
    done = CliRunner().invoke(doctor, ["--folder", str(tmp_path / "runs")])
    assert done.exit_code == 0, done.output
    assert "nothing to fix" in done.output and "bubblewrap" in done.output and "ray " in done.output
    assert list((tmp_path / "runs").iterdir()) == []


def test_unwritable_folder_is_bad(tmp_path):
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(doctor, ["--folder", str(tmp_path / "file")])
    assert done.exit_code == 1 and "BAD" in done.output and "name a folder that can be written" in done.output


def test_doctor_checks_the_named_ports_too(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = CliRunner().invoke(doctor, ["--folder", str(tmp_path), "--port", "1", "--port", str(port)])
    assert done.exit_code == 1 and f"BAD  TCP port {port}" in done.output
    assert all(f"TCP port {number}: " in done.output for number in (8470, 1))
    assert check_port(port).ok is True


def test_little_shared_memory_is_bad_with_a_real_setting(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(health.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20, free=64 << 20, used=0))
        check = health.check_shared_memory(Path("/dev/shm"))
    assert check.ok is False and "64 MB" in check.result and "--shm-size" in check.advice
    for advice in (check.advice, health.check_shared_memory(tmp_path / "nowhere").advice):
        setting = advice.rpartition("checkpoint.")[2]
        assert load_job_text(f"{JOB}checkpoint: {{{setting}}}", "job").checkpoint.commit_to == "job_dir"


SMI = "NVIDIA H200, {used}, 143771, {errors}\nNVIDIA H200, 0, 143771, 0\n"


@pytest.mark.parametrize(
    ("output", "code", "ok", "words"),
    [
        (SMI.format(used=4, errors=0), 0, True, "2 (NVIDIA H200)"),
        (SMI.format(used=100_000, errors=0), 0, False, "GPU 0 has 100000 of 143771 MB in use"),
        (SMI.format(used=4, errors=3), 0, False, "3 uncorrected memory errors"),
        (SMI.format(used=4, errors="[N/A]"), 0, True, "2 (NVIDIA H200)"),
        ("Unable to determine the device handle: GPU is lost", 15, False, "GPU is lost"),
    ],
)
def test_gpus_as_their_driver_sees_them(monkeypatch, output, code, ok, words):
    monkeypatch.setattr(health.shutil, "which", lambda name: f"/usr/bin/{name}")
    check = check_devices(lambda *_, **__: subprocess.CompletedProcess([], code, output, ""))
    assert check.ok is ok and words in check.result


def test_silent_driver_is_bad(monkeypatch):
    monkeypatch.setattr(health.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert check_devices(Mock(side_effect=subprocess.TimeoutExpired("nvidia-smi", 20))).ok is False


def test_clocks_and_versions_of_nodes_are_compared():
    sound, near, far = (
        MachineReport("host", ahead_s, {"ray": ray}, ())
        for ahead_s, ray in ((0.0, "2.60.0"), (0.5, "2.60.0"), (-30.0, "2.59.0"))
    )
    assert [check.ok for check in compare([sound, near])] == [True, True]
    clocks, versions = compare([sound, far])
    assert clocks.ok is False and "30.0 s apart" in clocks.result
    assert versions.ok is False and "ray differ" in versions.result


@pytest.mark.parametrize(
    ("state", "is_ended"),
    [("ended", True), ("held", False), ("owned", False), ("resumed", False), ("unseen", False), ("unseen, old", True)],
)
def test_doctor_frees_the_memory_of_ended_runs_only(tmp_path, monkeypatch, state, is_ended):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    job = begin(replace(load_job_text(JOB, "job"), job_dir=tmp_path / "out"))
    root = memory_path(job.name, job.run)
    step = root / "step-00000010.e1"
    step.mkdir(parents=True)
    (root / "saved-to").symlink_to(job.job_dir / "checkpoints" / job.run)
    (step / "state").write_bytes(bytes(3 << 20))
    if "unseen" not in state:
        claim(job, IN_PROCESS, bound=True).end(FAILED)
    if state == "owned":
        claim(replace(job, overwrite=True), IN_PROCESS, bound=True)
        step.mkdir(parents=True, exist_ok=True)
    if state == "resumed":
        resumed = replace(job, run="another", overwrite=True, checkpoint=CheckpointSpec(resume="latest"))
        claim(resumed, IN_PROCESS, bound=True)
    if state == "unseen, old":
        for path in (root, *root.rglob("*")):
            os.utime(path, (1, 1), follow_symlinks=False)
    with (root / "held").open("w") if state == "held" else nullcontext() as lock:
        if lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        title = f"memory of job-{job.run}: 3 MB of commits, of a run that has ended"
        arguments = ["--folder", str(tmp_path / "runs")]
        assert (title in CliRunner().invoke(doctor, arguments).output) is is_ended
        assert step.exists()
        freed = CliRunner().invoke(doctor, [*arguments, "--free-memory"]).output
        assert (f"{root}: 3 MB freed" in freed, root.exists()) == (is_ended, not is_ended)
