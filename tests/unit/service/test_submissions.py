# SPDX-License-Identifier: Apache-2.0
"""Submissions are read beside the service, each taken or refused; any bytes and text, within a second of processor
time each."""

import asyncio
import errno
import hashlib
import io
import os
import random
import signal
import string
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import CallError, DLRoverRLError, InvalidJob, ServiceBusy, ServiceUnavailable
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Cause, CauseKind
from dlrover.python.rl.service.jobs import submissions, working_dirs
from dlrover.python.rl.service.jobs.records import JobEvent, JobRecord, SubmitJob
from dlrover.python.rl.service.jobs.submissions import CallLimit, SubmissionReader, check_submission, in_a_process
from dlrover.python.rl.service.jobs.working_dirs import WorkingDirs
from dlrover.python.rl.service.messages import details_of, error_of, event_message, job_message
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire
from dlrover.python.rl.service.server import MAX_MESSAGE, SERVICE
from tests.support.commands import is_alive, processes_below
from tests.support.manual_clock import within
from tests.support.served import JOB, serving, until

REQUEST = wire.SubmitRequest(client_token="t", name="job", job_file=JOB)


def reader_of(service):
    """The process in which a service reads job files, beside multiprocessing's own."""
    (pid,) = [pid for pid, command in processes_below(service.process.pid).items() if "spawn_main" in command]
    return pid


@pytest.mark.slow
def test_dead_reader_costs_one_answer_and_ends_with_its_service(tmp_path):
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


@pytest.fixture
def reader(monkeypatch):
    """A reader of two submissions of a caller at once, which finishes none before its ``free`` is set."""
    free = threading.Event()
    monkeypatch.setattr(submissions, "_MAX_WAITING", 2)
    monkeypatch.setattr(submissions, "_read", lambda request, owner, root: free.wait() and ())
    reader = SubmissionReader(lambda: ThreadPoolExecutor(1))
    reader.free = free
    yield reader
    reader.close()


async def test_reader_refuses_a_caller_with_too_many_submissions(reader, tmp_path):
    reads = [asyncio.create_task(reader.read(REQUEST, owner, tmp_path)) for owner in ("ann", "ann", "bob")]
    await asyncio.sleep(0)
    with pytest.raises(ServiceBusy, match="'ann' has 2 submissions"):
        await reader.read(REQUEST, "ann", tmp_path)
    reader.free.set()
    assert all(isinstance(error, InvalidJob) for error in await asyncio.gather(*reads, return_exceptions=True))


def test_slow_job_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "_MAX_S", 0.05)
    monkeypatch.setattr(submissions, "check_submission", lambda *_: [None for _ in iter(int, 1)])  # never ends
    (error,) = submissions._read(REQUEST.SerializeToString(), "ann", tmp_path)
    assert "takes longer than 0.05 s" in str(error)


def test_overrides_are_limited_together(tmp_path):
    long = [f"config.k{at}={'1' * 9000}" for at in range(8)]
    request = wire.SubmitRequest(client_token="t", job_file=JOB, overrides=long)
    with pytest.raises(InvalidJob, match="overrides: have more than .* characters together"):
        check_submission(request, "ann", tmp_path)


@pytest.mark.parametrize("is_linked", [False, True])
def test_submission_has_the_folder_of_its_files(tmp_path, monkeypatch, is_linked):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    for name in ("runs", "out") if is_linked else ():
        (tmp_path / name).symlink_to("scratch")
    runs, out = (tmp_path / ("scratch" if is_linked else name) for name in ("runs", "out"))
    request = wire.SubmitRequest(client_token="t", job_file=JOB, name="job")
    submitted = check_submission(request, "ann", tmp_path)
    assert (submitted.job.folder, submitted.run_folders) == ("", str(runs / "job"))
    request.overrides.append("job_dir=out/a")
    submitted = check_submission(request, "ann", tmp_path)
    assert (submitted.job.folder, submitted.run_folders) == (str(out / "a"), "")


async def test_place_of_a_gone_caller_is_held_while_its_file_is_read(reader, tmp_path):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await reader.read(REQUEST, "ann", tmp_path)
    queued = asyncio.create_task(reader.read(REQUEST, "ann", tmp_path))
    await asyncio.sleep(0)
    with pytest.raises(ServiceBusy):
        await reader.read(REQUEST, "ann", tmp_path)
    reader.free.set()
    with pytest.raises(InvalidJob):
        await queued
    await asyncio.to_thread(until, lambda: not reader._waiting._held)


async def test_process_and_thread_read_alike(tmp_path):
    readers = [SubmissionReader(), SubmissionReader(in_a_process)]
    submitted = [await reader.read(REQUEST, "ann", tmp_path) for reader in readers]
    for reader in readers:
        reader.close()
    assert repr(submitted[0]) == repr(submitted[1]) and submitted[0].job.owner == "ann"


def test_places_are_those_of_a_caller_and_come_back():
    limit = CallLimit(2, "calls")
    with limit.hold("ann"), limit.hold("bob"):
        with limit.hold("ann"), pytest.raises(ServiceBusy, match="'ann' has 2 calls, the limit"):
            limit.hold("ann").__enter__()
        with limit.hold("ann"):
            pass
    assert not limit._held


# -- random job files and messages ------------------------------------------------------------------------------------


EACH_S = 1.0  # of processor time: how long it takes depends on what else the machine does
LONG_S = 20.0
LENGTHS = [pytest.param(1.2, id="short"), pytest.param(LONG_S, marks=pytest.mark.slow, id="long")]
REFUSALS = {
    getattr(grpc.StatusCode, name)
    for name in ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ALREADY_EXISTS", "PERMISSION_DENIED",
                 "RESOURCE_EXHAUSTED")
}  # fmt: skip

words = st.sampled_from(
    ["name", "trainer", "workload", "actor", "config", "env", "class", "${a}", "${oc.env:A}", "../x"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | words
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def fuzz(strategy, check, for_s, cpu_s=time.process_time):
    """Try examples of ``strategy`` for some seconds, each within its processor time; a failure shows its seed."""
    until_s = time.monotonic() + for_s
    number = 0
    while time.monotonic() < until_s:
        number += 1

        @seed(number)
        @settings(max_examples=100, database=None, suppress_health_check=list(HealthCheck))
        @given(strategy)
        def once(value):
            began_s = cpu_s()
            check(value)
            assert cpu_s() - began_s < EACH_S

        once()


def loads(text):
    try:
        assert isinstance(load_job_text(text, "fuzzed"), JobSpec)
    except InvalidJob as error:
        assert error.errors and str(error)


@st.composite
def spoilt(draw, text):
    """The text with pieces taken out, doubled, or replaced."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    letters = list(text)
    for _ in range(generator.randint(1, 6)):
        at = generator.randrange(len(letters))
        match generator.randrange(4):
            case 0:
                del letters[at : at + generator.randint(1, 20)]
            case 1:
                letters[at:at] = letters[at : at + generator.randint(1, 40)]
            case 2:
                letters[at] = generator.choice(string.printable + "\0\x7f\u2028\ud800&*!|>%@`")
            case 3:
                letters[at:at] = generator.choice(
                    ["!!python/object:os.system ", "&a ", "*a", "<<: ", "{", "[", "${", "? "]
                )
        letters = letters or ["x"]
    return "".join(letters)


@pytest.mark.parametrize("for_s", LENGTHS)
@pytest.mark.parametrize(
    "strategy", [st.text(max_size=200), spoilt(JOB), trees.map(yaml.safe_dump)], ids=["text", "spoilt", "trees"]
)
def test_loader_takes_or_refuses_any_text(strategy, for_s):
    fuzz(strategy, loads, for_s)


requests = st.builds(
    dict,
    client_token=st.text(max_size=10) | st.just("token"),
    name=st.text(max_size=10) | words | st.just("job"),
    job_file=spoilt(JOB) | st.text(max_size=50).filter(lambda text: text.isprintable()),
    overrides=st.lists(words | st.text(max_size=20), max_size=3),
    folder=st.text(max_size=20) | words,
    priority=st.integers(-(2**31), 2**31 - 1),
)


@pytest.mark.parametrize("for_s", LENGTHS)
def test_a_submission_is_taken_or_refused(tmp_path, for_s):
    def check(fields):
        try:
            request = wire.SubmitRequest(**fields)
        except (ValueError, UnicodeEncodeError):
            return  # not UTF-8: no client can send it
        try:
            assert isinstance(check_submission(request, "ann", tmp_path), SubmitJob)
        except DLRoverRLError as error:
            assert isinstance(error, InvalidJob)

    fuzz(requests, check, for_s)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def service(tmp_path):
    with serving(tmp_path, steps=2) as running:
        yield running


@pytest.fixture
def ask(service):
    """Ask a method with any bytes: the code of the refusal and its details."""
    metadata = (("authorization", f"Bearer {service.token}"),)
    with grpc.insecure_channel(service.address, options=[("grpc.max_send_message_length", -1)]) as channel:

        def ask(method, body):
            call = channel.unary_stream if method.server_streaming else channel.unary_unary
            try:
                answer = call(f"/{SERVICE.full_name}/{method.name}")(body, metadata=metadata, timeout=30)
                if method.server_streaming:
                    next(answer, None)
                    answer.cancel()
            except grpc.RpcError as error:
                return error.code(), error.details()
            return None, ""

        yield ask


@pytest.mark.slow
def test_random_bytes_are_no_internal_error_of_any_method(service, ask):
    def check(example):
        code, details = ask(*example)
        assert code is None or code in REFUSALS, details

    methods = st.sampled_from([each for each in SERVICE.methods if each.name not in ("Wait", "Watch")])
    times = psutil.Process(service.process.pid).cpu_times
    fuzz(st.tuples(methods, st.binary(max_size=60)), check, LONG_S, lambda: sum(times()[:2]))
    with service.client() as client:
        assert client.submit(JOB, name="after").name == "after"


@pytest.mark.slow
def test_huge_messages_are_refused_by_a_live_service(service, ask):
    for size in (MAX_MESSAGE + 1, 100_000_000):
        code, details = ask(SERVICE.methods_by_name["Submit"], bytes(size))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and len(details.splitlines()) == 1
    with service.client() as client:
        assert client.list_jobs() == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("config: {" + ", ".join(f"k{n}: 1" for n in range(1_000_000)) + "}", "bytes"),
        ("config: !!python/object/apply:os.system [id]", "tag"),
        ("config: {a: '${oc.env:HOME}'}", "oc.env"),
        ("x: " + "[" * 20_000 + "]" * 20_000, "deep"),
        ("a: &a [1,1]\n" + "\n".join(f"b{n}: [*a, *a]" for n in range(200)), "alias"),
    ],
    ids=["keys", "tag", "resolver", "deep", "aliases"],
)
def test_hostile_job_files_are_refused_within_a_second(text, words):
    base = "trainer: {module: m, class: T}\nworkload: {actor: {module: m, class: A}}\n"
    with within(EACH_S, time.process_time), pytest.raises(InvalidJob) as caught:
        load_job_text(base + text, "job")
    (error,) = caught.value.errors
    assert words in str(error) and len(str(error).splitlines()) == 1


# -- any text in a message --------------------------------------------------------------------------------------------


TEXT = "the model wrote \ud83d"


def test_half_of_an_emoji_hides_no_job():
    record = JobRecord("j", "r", "o", "t", reason=TEXT, detail=TEXT, activity=TEXT)
    message = job_message(record)
    assert {message.reason, message.detail, message.activity} == {"the model wrote ?"}
    event = event_message(JobEvent(1, 0.0, "j", "r", "step", TEXT, metrics={TEXT: 1.0}))
    assert (event.message, dict(event.metrics)) == ("the model wrote ?", {"the model wrote ?": 1.0})
    assert details_of(CallError(TEXT)) == "the model wrote ?"


@pytest.mark.parametrize("text", [TEXT, "the model wrote \udcff"])
def test_a_cause_has_valid_text(text):
    cause = Cause(CauseKind.USER_ERROR, "trainer", text, text)
    assert (cause.message, cause.detail) == ("the model wrote ?", "the model wrote ?")


# -- uploaded folders -------------------------------------------------------------------------------------------------


def archive_of(**members):
    """An archive of files with these sizes, and its digest."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, size in members.items():
            entry = tarfile.TarInfo(name.replace("__", "/"))
            entry.size = size
            tar.addfile(entry, io.BytesIO(bytes(size)))
    return archive.getvalue(), hashlib.sha256(archive.getvalue()).hexdigest()


def upload(folders, archive, digest, owner="ann"):
    return folders.add_part(digest, owner, len(archive), 0, archive)


def names_in(root):
    return sorted(path.name for path in (root / "working-dirs").iterdir())


def test_simultaneous_uploads_store_a_whole_folder(tmp_path):
    folders, (archive, digest) = WorkingDirs(tmp_path), archive_of(**{f"a{at}": 10 for at in range(300)})
    with ThreadPoolExecutor(4) as pool:
        owners = ["ann", "ann", "bob", "bob"]
        received = list(pool.map(lambda owner: upload(folders, archive, digest, owner), owners))
    assert len(archive) in received and len(list(folders.find(digest).iterdir())) == 300
    assert digest in names_in(tmp_path)


def test_folder_that_another_service_has_stored_is_taken(tmp_path):
    folders, (archive, digest) = WorkingDirs(tmp_path), archive_of(a=10)
    upload(folders, archive, digest)
    (tmp_path / "archive").write_bytes(archive)
    folders._unpack(tmp_path / "archive", folders.find(digest))
    assert names_in(tmp_path) == [digest] and (folders.find(digest) / "a").stat().st_size == 10


@pytest.mark.parametrize(
    ("limit", "message"), [({"MAX_FILES": 2}, "c: is above the limit"), ({"MAX_BYTES": 25}, "c: is above the limit")]
)
def test_large_archive_is_refused_and_leaves_nothing(tmp_path, monkeypatch, limit, message):
    for name, value in limit.items():
        monkeypatch.setattr(working_dirs, name, value)
    with pytest.raises(InvalidJob, match=message):
        upload(WorkingDirs(tmp_path), *archive_of(a=10, b__d=10, c=10))
    assert names_in(tmp_path) == []


def test_sparse_member_is_refused(tmp_path):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("sparse")
        entry.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1000000000000"}
        data = b"1\n999999999999\n1\n".ljust(512, b"\0") + b"x"
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    content = archive.getvalue()
    with pytest.raises(InvalidJob, match="sparse: is no plain file"):
        upload(WorkingDirs(tmp_path), content, hashlib.sha256(content).hexdigest())
    assert names_in(tmp_path) == []


def test_stored_folder_is_read_only(tmp_path):
    folders, (archive, digest) = WorkingDirs(tmp_path), archive_of(a=1, b__c=1)
    upload(folders, archive, digest)
    folder = folders.find(digest)
    assert not any(path.stat().st_mode & 0o222 for path in (folder, *folder.rglob("*")))


def test_what_nothing_uses_is_removed_after_an_hour(tmp_path):
    folders, digests = WorkingDirs(tmp_path), []
    for name in ("used", "unused", "renewed", "young"):
        archive, digest = archive_of(**{f"{name}__file": 1})
        digests.append(digest)
        upload(folders, archive, digest)
        if name == "renewed":
            renewed = archive, digest
    unfinished = archive_of(unfinished=1)
    folders.add_part(unfinished[1], "ann", len(unfinished[0]), 0, unfinished[0][:9])
    for path in (tmp_path / "working-dirs").iterdir():
        os.utime(path, (1, 1)) if path.name != digests[3] else None
    upload(folders, *renewed)
    (tmp_path / "working-dirs/.mine").touch()
    folders.remove_unused({".", "", f"working-dirs/{digests[0]}/used"})
    assert names_in(tmp_path) == sorted([".mine", digests[0], *digests[2:]])


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (errno.ENOSPC, ServiceUnavailable, "no room"),
        (errno.EDQUOT, ServiceUnavailable, "no room"),
        (errno.ENAMETOOLONG, InvalidJob, "a: cannot be written"),
    ],
)
def test_fault_of_the_disk_is_told_from_one_of_a_member(tmp_path, monkeypatch, code, kind, message):
    def extract(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tarfile.TarFile, "extract", extract)
    with pytest.raises(kind, match=message):
        upload(WorkingDirs(tmp_path), *archive_of(a=1))
    assert names_in(tmp_path) == []


def test_older_service_has_no_working_dirs():
    class Failure(grpc.RpcError):
        code, details, trailing_metadata = (
            lambda self, value=value: value for value in (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ())
        )

    error = error_of(Failure())
    assert isinstance(error, CallError) and "has no --working-dir" in str(error)
