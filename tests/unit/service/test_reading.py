# SPDX-License-Identifier: Apache-2.0
"""Job files are read beside the service: it goes on when the reader dies, and the reader ends with it."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import InvalidJob, ServiceBusy, ServiceUnavailable
from dlrover.python.rl.service.jobs import submissions
from dlrover.python.rl.service.jobs.submissions import SubmissionReader, check_submission, in_a_process
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire
from tests.support.served import JOB, serving, until

REQUEST = wire.SubmitRequest(client_token="t", name="job", job_file=JOB)


def reader_of(service):
    """The process in which a service reads job files, beside multiprocessing's own."""
    children = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text().split()
    (pid,) = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(pid)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_dead_reader_costs_one_answer_and_a_dead_service_its_reader(tmp_path):
    with serving(tmp_path, reads_in="process") as service:
        with service.client() as client:
            assert client.submit(JOB, name="first").name == "first"
            with pytest.raises(InvalidJob, match="job_file"):
                client.submit("", name="second")
            os.kill(reader_of(service), signal.SIGKILL)
            with pytest.raises(ServiceUnavailable, match="try again"):
                client.submit(JOB, name="second")
            assert client.submit(JOB, name="second").name == "second"
        reader = reader_of(service)
        service.kill()
        until(lambda: not is_alive(reader))
        service.start()


def test_a_caller_who_submits_too_fast_is_told_and_others_are_not(tmp_path, monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(submissions, "_MAX_WAITING", 2)
    monkeypatch.setattr(submissions, "_read", lambda request, owner, root: free.wait() and ())
    reader = SubmissionReader(lambda: ThreadPoolExecutor(1))

    async def body():
        asks = [asyncio.create_task(reader.read(REQUEST, owner, tmp_path)) for owner in ("ann", "ann", "bob")]
        await asyncio.sleep(0)
        with pytest.raises(ServiceBusy, match="'ann' has 2 submissions"):
            await reader.read(REQUEST, "ann", tmp_path)
        free.set()
        assert all(isinstance(found, InvalidJob) for found in await asyncio.gather(*asks, return_exceptions=True))

    asyncio.run(body())
    reader.close()


def test_a_file_that_takes_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "_MAX_S", 0.05)
    monkeypatch.setattr(submissions, "check_submission", lambda *_: [None for _ in iter(int, 1)])  # never ends
    (error,) = submissions._read(REQUEST.SerializeToString(), "ann", tmp_path)
    assert "takes longer than 0.05 s" in str(error)


def test_overrides_are_limited_together(tmp_path):
    request = wire.SubmitRequest(
        client_token="t", job_file=JOB, overrides=[f"config.k{at}={'1' * 9000}" for at in range(8)]
    )
    with pytest.raises(InvalidJob, match="overrides: have more than .* characters together"):
        check_submission(request, "ann", tmp_path)


def test_a_submission_has_the_folder_that_its_files_go_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = wire.SubmitRequest(client_token="t", job_file=JOB, name="job")
    new = check_submission(request, "ann", tmp_path)
    assert (new.job.folder, new.run_folders) == ("", str(tmp_path / "runs" / "job"))
    request.overrides.append("job_dir=out")
    given = check_submission(request, "ann", tmp_path)
    assert (given.job.folder, given.run_folders) == (str(tmp_path / "out"), "")


def test_user_links_above_a_run_folder_are_resolved_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    for name in ("runs", "out"):
        (tmp_path / name).symlink_to("scratch")
    request = wire.SubmitRequest(client_token="t", job_file=JOB, name="job")
    assert check_submission(request, "ann", tmp_path).run_folders == str(tmp_path / "scratch/job")
    request.overrides.append("job_dir=out/a")
    assert check_submission(request, "ann", tmp_path).job.folder == str(tmp_path / "scratch/a")


def test_a_place_is_held_for_as_long_as_the_file_is_read(tmp_path, monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(submissions, "_MAX_WAITING", 1)
    monkeypatch.setattr(submissions, "_read", lambda request, owner, root: free.wait() and ())
    reader = SubmissionReader(lambda: ThreadPoolExecutor(1))

    async def body():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(REQUEST, "ann", tmp_path), 0.05)  # its caller has gone
        with pytest.raises(ServiceBusy):
            await reader.read(REQUEST, "ann", tmp_path)
        free.set()
        await asyncio.to_thread(until, lambda: not reader._waiting._held)
        with pytest.raises(InvalidJob):
            await reader.read(REQUEST, "ann", tmp_path)

    asyncio.run(body())
    reader.close()


def test_a_process_reads_what_a_thread_reads(tmp_path):
    async def body():
        readers = [SubmissionReader(), SubmissionReader(in_a_process)]
        found = [await reader.read(REQUEST, "ann", tmp_path) for reader in readers]
        for reader in readers:
            reader.close()
        assert repr(found[0]) == repr(found[1]) and found[0].job.owner == "ann"

    asyncio.run(body())
