# SPDX-License-Identifier: Apache-2.0
"""The logs and files of a run: copies of a process's output, their rotation, and reading them."""

import json
import os
import random
import re
import socket
import subprocess
import sys

import pytest

from dlrover.python.rl.common import log
from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.common.private_files import with_real_parent
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.runtime.member import loading
from dlrover.python.rl.runtime.run.files import LogCopier, LogReader, RunFolder, copy_all_rests

CHUNK = 256 * 1024
MB = 1024 * 1024


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def reader_of(logs, tail=0, process="trainer"):
    return LogReader(RunFolder(logs.parent), process, tail)


def read(reader):
    return "".join(text for _, text in reader.read())


def numbered(count, length=0):
    return [f"{number} {'x' * length}\n" for number in range(count)]


@pytest.mark.parametrize("tail", [1, 2, 100, 4_999, 5_000, 5_001, 9_999, 10_000, 10_001, 50_000])
def test_last_lines_may_begin_in_an_older_file(logs, tail):
    lines = numbered(10_000, length=100)
    (logs / "trainer.log.1").write_text("".join(lines[:5_000]))
    (logs / "trainer.log").write_text("".join(lines[5_000:]))
    assert read(reader_of(logs, tail)) == "".join(lines[-tail:])


def test_incomplete_line_follows_later(logs):
    (logs / "trainer.log").write_text("one\ntwo\nthr")
    reader = reader_of(logs, tail=1)
    assert read(reader) == "two\n"
    with (logs / "trainer.log").open("a") as file:
        file.write("ee\n")
    assert read(reader) == "three\n"


def test_last_lines_come_in_chunks_of_at_most_16_mb(logs):
    for name in ("trainer.log.1", "trainer.log"):
        (logs / name).write_text("".join(numbered(14 * MB // 1000, length=1000)))
    chunks = [text for _, text in reader_of(logs, tail=100_000).read()]
    assert max(map(len, chunks)) <= CHUNK
    assert 15 * MB < sum(map(len, chunks)) <= 16 * MB
    assert chunks[0].partition(" ")[0].isdigit()  # a whole line
    (logs / "trainer.log").write_text(("y" * (5 * MB) + "\n") * 5)
    chunks = [text for _, text in reader_of(logs, tail=5).read()]
    assert max(map(len, chunks)) <= CHUNK and sum(map(len, chunks)) <= 16 * MB


def test_file_renamed_during_a_listing_does_not_end_it(logs):
    for name in ("actor-0.log", "rollout-0.log", "trainer.log"):
        (logs / name).touch()
    listing = RunFolder(logs.parent)._walk(())
    paths = [next(listing).path]
    (logs / "rollout-0.log").rename(logs / "rollout-0.log.1")
    paths += [file.path for file in listing]
    assert paths == ["logs/actor-0.log", "logs/trainer.log"]


def test_lines_written_just_before_a_rotation_are_read_in_order(logs):
    log = logs / "trainer.log"
    log.write_text("one\n")
    reader = reader_of(logs)
    assert read(reader) == "one\n"
    with log.open("a") as file:
        file.write("two\nno end")
    log.rename(logs / "trainer.log.1")
    log.write_text("three\n")
    assert read(reader) == "two\nno endthree\n"
    (logs / "trainer.log.1").rename(logs / "trainer.log.2")
    log.rename(logs / "trainer.log.1")
    log.write_text("four\n")
    assert read(reader) == "four\n"
    assert read(reader) == ""


@pytest.mark.parametrize("seed", range(20))
def test_reader_in_time_sees_each_line_once(tmp_path, seed):
    """``max_bytes`` and the number of lines between two readings allow two rotations at most."""
    generator = random.Random(seed)
    copier = LogCopier(tmp_path, "trainer", (), max_bytes=60)
    reader, written, seen = LogReader(RunFolder(tmp_path), "trainer"), [], ""
    for number in range(200):
        written.append(f"line {number}\n")
        copier._append(written[-1].encode())
        if number % 8 == 7 or generator.random() < 0.3:
            seen += read(reader)
    assert seen + read(reader) == "".join(written)


JOB = "{trainer: {module: m, class: T}, workload: {actor: {module: m, class: A, env: {MEMBER_TOKEN: canary-1}}}}"


@pytest.fixture
def source(tmp_path):
    source = tmp_path / "worker.out"
    source.write_text("written before\n")
    return source


@pytest.fixture
def copier(tmp_path, source):
    return LogCopier(tmp_path, "trainer", [source], max_bytes=8)


def append(source, text):
    with source.open("a") as file:
        file.write(text)


def log_of(folder, number=""):
    return (folder / "logs" / f"trainer.log{number}").read_text()


def copied(folder):
    title, _, text = log_of(folder).partition("\n")
    assert title.startswith("--- trainer, pid ")
    return text


def test_copy_takes_a_line_once_it_has_ended(tmp_path, copier, source):
    for text, lines in (("one\ntw", "one\n"), ("o\n", "one\ntwo\n")):
        append(source, text)
        copier.copy()
        assert log_of(tmp_path) == lines


def test_copy_of_a_rotated_source_begins_at_its_start(tmp_path, copier, source):
    source.write_text("after it\n")
    copier.copy()
    assert log_of(tmp_path) == "after it\n"


def test_copy_beyond_its_limit_keeps_the_two_files_before(tmp_path, copier, source):
    for number in range(4):
        append(source, f"line {number}\n")
        copier.copy()
    assert [log_of(tmp_path, number) for number in ("", ".1", ".2")] == ["line 3\n", "line 2\n", "line 1\n"]


def test_secrets_of_a_process_are_not_in_its_log(tmp_path, copier, source, monkeypatch):
    monkeypatch.setattr(log, "_secrets", ())
    monkeypatch.setattr(loading, "_HELD", {})
    monkeypatch.setenv("MEMBER_TOKEN", "")
    loading.take_secrets(load_job_text(JOB, "job"), "ACTOR")
    assert os.environ["MEMBER_TOKEN"] in loading.held_secrets().values()
    append(source, "with canary-1\n")
    copier.copy()
    assert log_of(tmp_path) == f"with {log.HIDDEN}\n"


@pytest.mark.parametrize(
    ("is_alive", "host", "is_copied"),
    [(False, socket.gethostname(), True), (True, socket.gethostname(), False), (False, "another", False)],
)
def test_rest_of_a_process_is_copied_once_it_is_dead_here(tmp_path, logs, source, is_alive, host, is_copied):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    note = {"host": host, "pid": os.getpid() if is_alive else ended.pid, "offsets": {str(source): 0}}
    (logs / ".trainer.json").write_text(json.dumps(note))
    copy_all_rests(tmp_path)
    assert (logs / "trainer.log").exists() == is_copied


def test_last_words_and_timed_notes_are_copied(tmp_path, source):
    copier = LogCopier(tmp_path, "trainer", [source])
    copier.start("trainer")
    for number in (1, 2):
        copier.note(f"step {number}/2")
    append(source, "one\nthe last words")
    for _ in range(2):
        copier.stop()
        *notes, line, words = copied(tmp_path).splitlines(keepends=True)
        assert (line, words) == ("one\n", "the last words\n")
    for number, note in enumerate(notes, 1):
        assert re.fullmatch(rf"\[trainer\] \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d I step {number}/2\n", note)


@pytest.mark.parametrize("text", ["cannot open the licence file\n", "cannot open\nthe licence file"])
def test_words_of_a_process_dead_at_once_are_copied(tmp_path, source, text):
    program = f"""
import os, sys
from pathlib import Path
from dlrover.python.rl.runtime.run import files as log_copy
log_copy._POLL_S = 3600.0  # it dies before the first time
sys.stdout = os.fdopen(1, "w")
log_copy.copy_output(Path({str(tmp_path)!r}), "trainer", "trainer")
print({text!r}, end="", flush=True)
os._exit(3)
"""
    with source.open("w") as out:
        assert subprocess.run([sys.executable, "-c", program], stdout=out, check=False).returncode == 3
    copy_all_rests(tmp_path)
    assert copied(tmp_path) == text.rstrip() + "\n"
    assert not list((tmp_path / "logs").glob(".*"))


def test_files_without_a_valid_name_hide_no_others(tmp_path):
    for name in (b"caf\xe9.txt", "café.txt".encode()):
        (tmp_path / os.fsdecode(name)).touch()
    assert [file.path for file in RunFolder(tmp_path).list_files()] == ["café.txt"]


@pytest.mark.parametrize("parts", [("commits", "step.e1", "a.state"), ("results", "owner.1.json"), ("results", ".key")])
def test_private_file_at_any_depth_is_not_served(tmp_path, parts):
    for path in (tmp_path / "results" / "learnt.json", tmp_path.joinpath(*parts)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [file.path for file in RunFolder(tmp_path).list_files()] == ["results/learnt.json"]
    with pytest.raises(InvalidJob, match="is not a file that is served"):
        next(RunFolder(tmp_path).read(parts, 0))


def exchange(folder, target):
    folder.rename(folder.with_name(f"{folder.name}.away"))
    folder.symlink_to(target)


@pytest.fixture
def private(tmp_path):
    """A private folder, and beside it a run's folder."""
    for folder in ("private/logs", "runs/job/run/logs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "private/logs/trainer.log").write_text("secret\n")
    (tmp_path / "runs/job/run/logs/trainer.log").write_text("one\n")
    return tmp_path / "private"


@pytest.mark.parametrize("exchanged", ["runs", "runs/job", "runs/job/run"])
@pytest.mark.parametrize(
    "use",
    [
        lambda folder: folder.list_files(),
        lambda folder: [*folder.read(("logs", "trainer.log"), 0)],
        lambda folder: LogReader(folder, "trainer").check(),
    ],
    ids=["list", "read", "logs"],
)
def test_run_folder_exchanged_for_a_link_is_refused(private, exchanged, use):
    run, folder = private.parent / "runs/job/run", private.parent / exchanged
    behind = private / run.relative_to(folder) / "logs"  # the same path, behind the link
    behind.mkdir(parents=True, exist_ok=True)
    (behind / "trainer.log").write_text("secret\n")
    exchange(folder, private)
    with pytest.raises(InvalidJob, match="behind a link"):
        use(RunFolder(run))


def test_open_folder_stays_and_links_above_it_are_resolved(private):
    (private.parent / "scratch").symlink_to("runs")
    folder = RunFolder(with_real_parent(private.parent / "scratch/job/run"))
    assert [file.path for file in folder.list_files()] == ["logs/trainer.log"]
    with pytest.raises(InvalidJob, match="job/run: is no folder, or is behind a link"):
        RunFolder(private.parent / "scratch/job/run").list_files()
    run = private.parent / "runs/job/run"
    reader = LogReader(RunFolder(run), "trainer")
    assert read(reader) == "one\n"
    exchange(run, private)
    append(run.with_name("run.away") / "logs/trainer.log", "two\n")
    assert read(reader) == "two\n"


def test_folders_beyond_the_depth_limit_are_not_listed(tmp_path):
    deepest = tmp_path.joinpath(*["d"] * 60)
    deepest.mkdir(parents=True)
    for folder in (deepest, deepest.parents[20]):
        (folder / "file").touch()
    assert [file.path for file in RunFolder(tmp_path).list_files()] == ["d/" * 39 + "file"]


def test_process_without_a_log_is_refused_unless_it_will_start(logs):
    with pytest.raises(InvalidJob, match="rollout-0: has no log yet"):
        reader_of(logs, process="rollout-0").check()
    (logs / "trainer.log").write_text("one\n")
    reader_of(logs).check()
    for coming in (None, {"ROLLOUT": 2}):
        with pytest.raises(InvalidJob, match="trainr: has no log; did you mean 'trainer'"):
            reader_of(logs, process="trainr").check(coming)
    for process in ("rollout-1", "master", "trainer"):
        reader_of(logs, process=process).check({"ROLLOUT": 2})
    with pytest.raises(InvalidJob, match="rollout-2: has no log; did you mean 'rollout-"):
        reader_of(logs, process="rollout-2").check({"ROLLOUT": 2})
