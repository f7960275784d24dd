# SPDX-License-Identifier: Apache-2.0
"""The copies of a process's output in the folder of its run."""

import json
import os
import socket
import subprocess
import sys

import pytest

from dlrover.python.rl.common import log
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.runtime.member import loading
from dlrover.python.rl.runtime.run.files import LogCopier, copy_all_rests

JOB = """
trainer: {module: m, class: T, device_type: CPU, device_per_node: 1}
workload:
  actor: {module: m, class: A, env: {MEMBER_TOKEN: canary-1}}
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path / "worker.err"


def append(source, text):
    with source.open("a") as file:
        file.write(text)


def log_of(folder, number=""):
    return (folder / "logs" / f"trainer.log{number}").read_text()


def test_copy_takes_a_line_once_it_has_ended(tmp_path, source):
    copier = LogCopier(tmp_path, "trainer", [source])
    for text, copied in (("whole\nhal", "whole\n"), ("f\n", "whole\nhalf\n")):
        append(source, text)
        copier.copy()
        assert log_of(tmp_path) == copied


def test_copy_of_a_rotated_source_begins_at_its_start(tmp_path, source):
    append(source, "a line before the rotation\n")
    copier = LogCopier(tmp_path, "trainer", [source])
    source.write_text("after it\n")
    copier.copy()
    assert log_of(tmp_path) == "after it\n"


def test_copy_beyond_its_limit_keeps_the_two_files_before(tmp_path, source):
    copier = LogCopier(tmp_path, "trainer", [source], max_bytes=8)
    for number in range(4):
        append(source, f"line {number}\n")
        copier.copy()
    assert [log_of(tmp_path, number) for number in ("", ".1", ".2")] == ["line 3\n", "line 2\n", "line 1\n"]


def test_secrets_of_a_process_are_not_in_its_log(tmp_path, source, monkeypatch):
    monkeypatch.setattr(log, "_secrets", ())
    monkeypatch.setattr(loading, "_HELD", {})
    monkeypatch.setenv("MEMBER_TOKEN", "")
    loading.take_secrets(load_job_text(JOB, "job"), "ACTOR")
    assert os.environ["MEMBER_TOKEN"] in loading.held_secrets().values()
    copier = LogCopier(tmp_path, "trainer", [source])
    append(source, "with canary-1\n")
    copier.copy()
    assert log_of(tmp_path) == f"with {log.HIDDEN}\n"


@pytest.mark.parametrize(
    ("is_alive", "host", "is_copied"),
    [(False, socket.gethostname(), True), (True, socket.gethostname(), False), (False, "another", False)],
)
def test_rest_of_a_process_is_copied_once_it_is_dead_here(tmp_path, source, is_alive, host, is_copied):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    append(source, "last words\n")
    note = {"host": host, "pid": os.getpid() if is_alive else ended.pid, "offsets": {str(source): 0}}
    (tmp_path / "logs" / ".trainer.json").write_text(json.dumps(note))
    copy_all_rests(tmp_path)
    assert (tmp_path / "logs" / "trainer.log").exists() == is_copied
