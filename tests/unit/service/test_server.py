# SPDX-License-Identifier: Apache-2.0
"""The service over gRPC on loopback, in a separate process, with jobs in memory."""

import asyncio
import io
import queue
import signal
import threading
import time
from collections import deque
from concurrent import futures
from contextlib import contextmanager, nullcontext, suppress
from string import ascii_lowercase, digits
from types import SimpleNamespace

import grpc
import pytest
from click.testing import CliRunner

from dlrover.python.rl.cli.remote import _target, fetch
from dlrover.python.rl.common import errors
from dlrover.python.rl.service import client as client_module
from dlrover.python.rl.service.auth import AccessRole, Caller
from dlrover.python.rl.service.client import ClientTls, ServiceClient, has_ended, phase_of
from dlrover.python.rl.service.jobs.records import JobPhase, JobRecord
from dlrover.python.rl.service.jobs.submissions import check_process, check_submission
from dlrover.python.rl.service.messages import STREAM_OPEN
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire
from dlrover.python.rl.service.server import MAX_MESSAGE, RIGHTS, SERVICE, JobServer
from tests.support.certificates import write_certificate
from tests.support.hostile_paths import PATHS
from tests.support.served import JOB, WITHIN_S, Service, close_idle, idle_connections, serving, until


@contextmanager
def running_job(folder, kind="running", **options):
    """A service whose ``job`` runs, a client of it, and the events after the one of that ``kind``."""
    with serving(folder, **options) as service, service.client() as client:
        client.submit(JOB, name="job")
        events = client.watch("job")
        next(event for event in events if event.kind == kind)
        yield service, client, events


ENDLESS = {"steps": 10**6, "step_s": 0.005}


# -- a client ---------------------------------------------------------------------------------------------------------


def test_job_is_submitted_watched_and_listed(tmp_path):
    with serving(tmp_path) as service, service.client() as client:
        job = client.submit(JOB, name="first")
        assert (job.name, job.owner, job.phase) == ("first", "admin", wire.PHASE_QUEUED)
        ended = client.wait("first", WITHIN_S)
        assert phase_of(ended) is JobPhase.FINISHED and ended.step == ended.total_steps == 3
        assert dict(ended.roles) == {"ACTOR": 1, "ROLLOUT": 2}
        events = list(client.watch("first"))
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert events[-1].kind == "finished"
        assert [[job.name for job in client.list_jobs(ended=ended)] for ended in (False, True)] == [[], ["first"]]
        assert client.artifacts("first") == []


def test_errors_come_back_as_their_classes(tmp_path):
    with serving(tmp_path, **ENDLESS, limits={"max_queued": 1, "max_running": 1}) as service:
        client = service.client()
        first, again = (client.submit(JOB, name="one", client_token="mine") for _ in range(2))
        assert first.run == again.run
        for error, use in (
            (errors.UnknownJob, lambda: client.get("on")),
            (errors.JobConflict, lambda: client.submit(JOB, name="one")),
            (errors.CallError, lambda: client.submit(JOB, name="other", client_token="mine")),
            (errors.InvalidJob, lambda: client.submit("trainer: 3", name="two")),
            (errors.InvalidJob, lambda: client.get("../one")),
            (errors.InvalidJob, lambda: client.resize("one", "ROLLUOT", 3)),
        ):
            with pytest.raises(error):
                use()
        client.submit(JOB, name="two")
        with pytest.raises(errors.ServiceBusy, match="the queue is full: 1 jobs wait"):
            client.submit(JOB, name="three")
        client.stop("one", hard=True)
        client.close()


def test_role_is_resized(tmp_path):
    with running_job(tmp_path, "step", **ENDLESS) as (_, client, events):
        client.resize("job", "rollout", 3)
        event = next(event for event in events if event.kind == "resized")
        assert event.message == "ACTOR x1, ROLLOUT x3"
        client.stop("job")
        assert phase_of(client.wait("job", WITHIN_S)) is JobPhase.STOPPED


@pytest.mark.slow
def test_requests_wait_for_a_restart_without_losing_events(tmp_path):
    service = Service(tmp_path, **ENDLESS)
    service.start()
    with service.client(patience_s=WITHIN_S) as client, futures.ThreadPoolExecutor(1) as watcher:
        job = client.submit(JOB, name="job", client_token="mine")
        watched = watcher.submit(lambda: list(client.watch("job")))
        for end in (service.stop, service.kill):
            end()
            service.start()
            assert client.submit(JOB, name="job", client_token="mine").run == job.run
        client.stop("job")
        client.wait("job", WITHIN_S)
        events = watched.result(WITHIN_S)
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert events[-1].kind == "stopped"
        assert has_ended(client.get("job"))
    service.stop()
    with service.client() as client, pytest.raises(errors.ServiceUnavailable):
        client.get("job")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["is_gone", "has_gone_silent"])
def test_streams_end_once_the_patience_is_over(tmp_path, monkeypatch, end):
    faster = {"grpc.keepalive_time_ms": 300, "grpc.keepalive_timeout_ms": 100, "grpc.http2.ping_timeout_ms": 100}
    assert sum(dict(client_module._OPTIONS)[name] for name in faster) <= 60_000
    monkeypatch.setattr(client_module, "_OPTIONS", tuple((dict(client_module._OPTIONS) | faster).items()))
    ends = queue.Queue()

    def read(stream):
        with pytest.raises(errors.ServiceUnavailable):
            deque(stream)
        ends.put(stream)

    service = Service(tmp_path, steps=1, step_s=3600.0)
    service.start()
    client = service.client(patience_s=0.5)
    client.submit(JOB, name="job")
    events = client.watch("job")
    next(event for event in events if event.kind == "running")
    service.process.send_signal(end)
    for stream in (events, (client.fetch("job", name, io.BytesIO()) for name in ["metrics.jsonl"])):
        threading.Thread(target=read, args=(stream,), daemon=True).start()
    try:
        for _ in range(2):
            ends.get(timeout=WITHIN_S)
    finally:
        client.close()
        service.kill()


class _Seen:
    """A stream that puts its metadata into a queue when its messages are waited for."""

    def __init__(self, stream, opened):
        self._stream, self._opened, self.initial_metadata = stream, opened, stream.initial_metadata

    def __iter__(self):
        self._opened.put(self.initial_metadata())
        return iter(self._stream)


def test_watcher_has_its_whole_patience_in_each_outage(tmp_path, monkeypatch):
    service, past_s, opened = Service(tmp_path, steps=1, step_s=3600.0), 0.0, queue.Queue()
    service.start()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + past_s, sleep=time.sleep)
    monkeypatch.setattr(client_module, "time", clock)
    with service.client(patience_s=WITHIN_S) as client:
        client.submit(JOB, name="job")
        events = client.watch("job")
        next(event for event in events if event.kind == "running")
        watch = client._calls["Watch"]
        client._calls["Watch"] = lambda *args, **metadata: _Seen(watch(*args, **metadata), opened)
        reader = futures.ThreadPoolExecutor(1)
        kinds = reader.submit(lambda: [event.kind for event in events])
        for _ in range(2):
            past_s += 2 * WITHIN_S
            service.kill()
            service.start()
            while STREAM_OPEN not in dict(opened.get(timeout=WITHIN_S)):
                pass
        client.stop("job")
        assert kinds.result(timeout=WITHIN_S)[-1] == "stopped"
        reader.shutdown()
    service.stop()


class _Failing:
    """A stream of a service that cannot read its own state."""

    def initial_metadata(self):
        return ((STREAM_OPEN, "1"),)

    def __iter__(self):
        error = grpc.RpcError()
        error.code, error.details = lambda: grpc.StatusCode.UNAVAILABLE, lambda: "the service cannot read its state"
        error.trailing_metadata = tuple
        raise error


def test_a_watcher_gives_up_where_each_stream_opens_and_fails():
    with ServiceClient("127.0.0.1:1", token="x" * 43, patience_s=0.5) as client:
        client._calls["Watch"] = lambda *args, **metadata: _Failing()
        began_s = time.monotonic()
        with pytest.raises(errors.ServiceUnavailable, match="cannot read its state"):
            deque(client.watch("job"))
        assert 0.5 <= time.monotonic() - began_s < WITHIN_S


# -- access -----------------------------------------------------------------------------------------------------------

METHODS = [method.name for method in SERVICE.methods]
BAD_TOKENS = {
    "none": [],
    "wrong": [("authorization", "Bearer " + "x" * 43)],
    "empty": [("authorization", "Bearer ")],
    "no scheme": [("authorization", "{token}")],
    "a prefix": [("authorization", "Bearer {prefix}")],
    "longer": [("authorization", "Bearer {token}x")],
    "twice": [("authorization", "Bearer {token}"), ("authorization", "Bearer {token}")],
    "another header": [("x-token", "Bearer {token}")],
    "long": [("authorization", "Bearer " + "x" * 10_000)],
}


def bearer(token):
    return [("authorization", f"Bearer {token}")]


def call(channel, method, metadata, request=None):
    """The status code of a call, OK for the first answer of a stream."""
    row = SERVICE.methods_by_name[method]
    make = channel.unary_stream if row.server_streaming else channel.unary_unary
    ask = make(f"/{SERVICE.full_name}/{method}", lambda message: message, lambda data: data)
    message = request or getattr(wire, row.input_type.name)()
    try:
        answer = ask(message.SerializeToString(), metadata=metadata, timeout=WITHIN_S)
        if row.server_streaming:
            next(answer, None)
            answer.cancel()
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("shared"), **ENDLESS, failures=1000) as running:
        yield running


@pytest.mark.parametrize("metadata", BAD_TOKENS.values(), ids=BAD_TOKENS)
@pytest.mark.parametrize("method", METHODS)
def test_without_a_valid_token_every_method_is_refused(shared, method, metadata):
    token = shared.token
    sent = [(key, value.format(token=token, prefix=token[:-1])) for key, value in metadata]
    with grpc.insecure_channel(shared.address) as channel:
        assert call(channel, method, sent) is grpc.StatusCode.UNAUTHENTICATED


def test_open_service_answers_without_a_token(tmp_path):
    assert set(RIGHTS) == set(METHODS)
    with serving(tmp_path, is_open=True) as service, grpc.insecure_channel(service.address) as channel:
        codes = {method: call(channel, method, []) for method in METHODS}
        assert grpc.StatusCode.UNAUTHENTICATED not in codes.values(), codes
        assert codes["List"] is grpc.StatusCode.OK


def test_role_decides_the_calls_on_own_and_foreign_jobs(tmp_path):
    requests = {
        "Submit": wire.SubmitRequest(client_token="t", job_file="x"),
        "Get": wire.GetRequest(name="job"),
        "Stop": wire.StopRequest(name="job"),
        "Resize": wire.ResizeRequest(name="job", role="ROLLOUT", num=2),
        "Logs": wire.LogsRequest(name="job"),
        "Artifacts": wire.ArtifactsRequest(name="job"),
        "Wait": wire.WaitRequest(name="job"),
        "Watch": wire.WatchRequest(name="job"),
        "List": wire.ListRequest(),
    }
    with serving(tmp_path, **ENDLESS) as service, grpc.insecure_channel(service.address) as channel:
        tokens = {role.value: service.token_of(role.value, role) for role in AccessRole}
        tokens["other"] = service.token_of("other", AccessRole.SUBMIT)
        with service.client(tokens["submit"]) as client:
            client.submit(JOB, name="job")
            next(event for event in client.watch("job") if event.kind == "step")

        def refused(token):
            codes = {method: call(channel, method, bearer(token), request) for method, request in requests.items()}
            return {method for method, code in codes.items() if code is grpc.StatusCode.PERMISSION_DENIED}

        assert {role: refused(tokens[role]) for role in ("read", "admin", "other", "submit")} == {
            "read": {"Submit", "Stop", "Resize"},
            "admin": set(),
            "other": {"Stop", "Resize"},
            "submit": set(),
        }


def test_health_needs_no_token_and_reflection_does(shared):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(shared.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        check = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
        assert health.Check(check, timeout=WITHIN_S).status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        for ask in (lambda: stub.ServerReflectionInfo(iter([request]), timeout=WITHIN_S), lambda: health.Watch(check)):
            with pytest.raises(grpc.RpcError) as refused:
                next(ask())
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = bearer(shared.token)
        answer = next(stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=WITHIN_S))
        assert SERVICE.full_name in [row.name for row in answer.list_services_response.service]


def test_stop_does_not_reach_a_newer_job_of_the_name():
    """The new job is saved between the check of the old one's owner and the decision."""
    old, stopped_runs = JobRecord("job", "old", "mallory", "t", phase=JobPhase.STOPPED), []

    async def ask(operation):
        stopped_runs.append(operation.run)
        return old

    server = JobServer.__new__(JobServer)
    server._manager = SimpleNamespace(get=lambda name: old, ask=ask)
    asyncio.run(server._stop(wire.StopRequest(name="job"), Caller("mallory", AccessRole.SUBMIT)))
    assert stopped_runs == ["old"]


# -- limits -----------------------------------------------------------------------------------------------------------


def too_large_a_message(service):
    with grpc.insecure_channel(service.address) as channel:
        request = wire.SubmitRequest(client_token="t", job_file="x" * (MAX_MESSAGE + 1))
        return call(channel, "Submit", bearer(service.token), request)


def many_bad_tokens(service):
    with grpc.insecure_channel(service.address) as channel:
        return [call(channel, "List", bearer("x" * 43)) for _ in range(30)][-1]


def one_stream_too_many(service):
    """The last of the streams that one caller opens; others, and its short calls, are answered all the same."""
    other = service.token_of("other", AccessRole.READ)
    with service.client() as client, grpc.insecure_channel(service.address) as channel:
        client.submit(JOB, name="job")
        watch = channel.unary_stream(f"/{SERVICE.full_name}/Watch", wire.WatchRequest.SerializeToString)
        request = wire.WatchRequest(follow=True)
        streams = [watch(request, metadata=bearer(service.token)) for _ in range(400)]
        for stream in streams:
            next(stream)
        client.list_jobs()
        assert call(channel, "Watch", bearer(other), request) is grpc.StatusCode.OK
        code = call(channel, "Watch", bearer(service.token), request)
        wait = call(channel, "Wait", bearer(service.token), wire.WaitRequest(name="job"))
        for stream in streams:
            stream.cancel()
        until(lambda: call(channel, "Watch", bearer(service.token), request) is grpc.StatusCode.OK)
        return code if code is wait else None


@pytest.mark.parametrize(
    ("code", "off"),
    [
        (too_large_a_message, {"off": [("server", "_OPTIONS", [("grpc.max_receive_message_length", -1)])]}),
        (many_bad_tokens, {"failures": 10**9}),
        (one_stream_too_many, {"off": [("server", "_LONG_CALLS_EACH", 10**9)]}),
    ],
    ids=["message", "tokens", "streams"],
)
def test_limit_refuses_and_leaves_valid_calls_alone(tmp_path, code, off):
    with serving(tmp_path / "on") as service:
        assert code(service) is grpc.StatusCode.RESOURCE_EXHAUSTED
        with service.client() as client:
            client.list_jobs()
    with serving(tmp_path / "off", **off) as service:
        assert code(service) is not grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def unsent():
    """Calls a method without sending its message."""
    ending, calls = threading.Event(), []

    def call_without_a_message(channel, metadata):
        ask = channel.stream_unary(f"/{SERVICE.full_name}/List")
        calls.append(ask.future(iter(ending.wait, True), metadata=metadata))
        return calls[-1]

    yield call_without_a_message
    for opened in calls:
        opened.cancel()
    ending.set()


def code_of(opened):
    with pytest.raises(grpc.RpcError) as refused:
        opened.result(WITHIN_S)
    return refused.value.code()


def test_call_without_a_token_is_refused_before_its_message(shared, unsent):
    with grpc.insecure_channel(shared.address) as channel:
        assert code_of(unsent(channel, [])) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.slow
def test_calls_without_messages_hold_places_of_their_caller_only(tmp_path, unsent):
    off = [("server", "_CALLS_EACH", 3), ("server", "_MESSAGE_S", 2.0)]
    with serving(tmp_path, off=off) as service, grpc.insecure_channel(service.address) as channel:
        own, other = bearer(service.token), bearer(service.token_of("other", AccessRole.READ))
        opened = [unsent(channel, own) for _ in range(3)]
        until(lambda: call(channel, "List", own) is grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert call(channel, "List", other) is grpc.StatusCode.OK
        assert {code_of(each) for each in opened} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert call(channel, "List", own) is grpc.StatusCode.OK


def test_a_list_of_failed_jobs_fits_into_a_message():
    def listed(**values):
        records = [JobRecord(f"job-{at}", f"r{at}", "me", f"t{at}", sequence=at, **values) for at in range(1000)]
        server = JobServer.__new__(JobServer)
        server._manager = SimpleNamespace(list_jobs=lambda ended: records)
        answer = asyncio.run(server._list(wire.ListRequest(all=True, limit=1000), Caller("me", AccessRole.READ)))
        assert answer.ByteSize() <= MAX_MESSAGE and answer.left_out == 1000 - len(answer.jobs)
        return [job.name for job in answer.jobs]

    every = [f"job-{at}" for at in range(1000)]
    assert listed(phase=JobPhase.FAILED, detail="x" * 16_000) == every
    some = listed(phase=JobPhase.FAILED, reason="x" * 100_000)
    assert 30 < len(some) < 1000 and some == every[: len(some)]


def test_too_large_headers_are_refused(shared):
    with grpc.insecure_channel(shared.address) as channel:
        code = call(channel, "List", [("authorization", "Bearer " + "x" * 1_000_000)])
        assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    with shared.client() as client:
        client.list_jobs()


# -- TLS --------------------------------------------------------------------------------------------------------------


def answers(service, tls):
    with service.client(tls=tls) as client:
        try:
            return client.list_jobs() == []
        except errors.ServiceUnavailable:
            return False


@pytest.mark.slow
@pytest.mark.parametrize("ends_in_days", [1, -1])
def test_client_refuses_an_expired_certificate(tmp_path, ends_in_days):
    own, key = write_certificate(tmp_path, "dated", ends_in_days)
    with serving(tmp_path, tls=[str(own), str(key)]) as service:
        assert answers(service, ClientTls(own)) == (ends_in_days > 0)


def test_tls_service_trusts_its_ca_only_and_takes_a_new_one(tmp_path):
    (own, key), (new, new_key) = (write_certificate(tmp_path / "certs", name) for name in ("own", "new"))
    (old := own.with_name("old.pem")).write_bytes(own.read_bytes())
    with serving(tmp_path, tls=[str(own), str(key)]) as service:
        assert [answers(service, tls) for tls in (ClientTls(old), ClientTls(new), None)] == [True, False, False]
        key.unlink()
        assert answers(service, ClientTls(old))
        new_key.replace(key)
        assert answers(service, ClientTls(old))  # the certificate still belongs to another key
        own.write_bytes(new.read_bytes())
        assert [answers(service, ClientTls(ca)) for ca in (old, new)] == [False, True]


def test_service_with_a_client_ca_refuses_clients_without_one(tmp_path):
    (own, key), client = (write_certificate(tmp_path / "certs", name) for name in ("own", "client"))
    with serving(tmp_path, tls=[str(own), str(key), str(client[0])]) as service:
        assert [answers(service, tls) for tls in (ClientTls(own, *client), ClientTls(own))] == [True, False]


# -- files ------------------------------------------------------------------------------------------------------------


FILES = {
    "model/weights": bytes(range(256)) * 3000,
    "logs/trainer.log": b"one\ntwo\nthree\n",
    "logs/rollout-0.log": b"zero\n",
    "metrics.jsonl": b'{"step": 1}\n',
}
INTERNAL = ("commits/state", "journal.jsonl")


@pytest.fixture
def files(tmp_path):
    """A client of a service whose job has results, internal files and links out of its folder."""
    folder = tmp_path / "run"
    for name, content in {**FILES, **dict.fromkeys(INTERNAL, b"internal"), "../outside": b"secret"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "linked").symlink_to(tmp_path)
    with running_job(tmp_path, results=str(folder)) as (_, client, _):
        yield client


def test_results_are_listed_and_fetched_without_internal_files(files):
    assert {file.path: file.bytes for file in files.artifacts("job")} == {
        name: len(content) for name, content in FILES.items()
    }
    copy = io.BytesIO()
    assert files.fetch("job", "model/weights", copy) == 768_000
    assert copy.getvalue() == FILES["model/weights"]
    with pytest.raises(errors.InvalidJob, match="model/weight: no such file; did you mean 'model/weights'"):
        files.fetch("job", "model/weight", copy)


def test_fetch_of_a_missing_path_leaves_no_folder(files, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "connected", lambda server: nullcontext(files))
    arguments = ["--out", str(tmp_path / "new"), "--server", "its address"]
    missed = CliRunner().invoke(fetch, ["job", "modle", *arguments])
    assert "modle: no such file; known: logs" in str(missed.exception)
    assert not (tmp_path / "new").exists()
    assert CliRunner().invoke(fetch, ["job", "model", *arguments]).exit_code == 0
    assert (tmp_path / "new" / "model" / "weights").stat().st_size == 768_000


def test_no_path_leads_out_of_the_folder_of_the_run(files, tmp_path):
    outside = [f"../{tmp_path.name}/outside", str(tmp_path / "outside")]
    paths = ["link", "linked/outside", "linked", "model", *INTERNAL, *PATHS, *outside]
    assert len(paths) > 200
    for path in paths:
        copy = io.BytesIO()
        with pytest.raises(errors.InvalidJob) as refused:
            files.fetch("job", path, copy)
        assert copy.getvalue() == b"" and "secret" not in str(refused.value), path


@pytest.mark.parametrize("limits", [(64, 400), (200, 200)], ids=["a low soft limit", "a low hard limit"])
def test_idle_connections_are_closed_and_leave_clients_alone(tmp_path, limits):
    soon = ("server", "_SILENT_S", 0.5)
    with serving(tmp_path, open_files=limits, off=[soon]) as service, service.client() as client:
        client.submit(JOB, name="first")
        watching = client.watch()
        next(watching)
        idle = idle_connections(service, 220)
        assert client.get("first").name == "first"
        close_idle(idle)
        client.submit(JOB, name="second")
        assert any(event.name == "second" for event in watching)


@pytest.mark.parametrize("role", list(AccessRole))
def test_run_folder_exchanged_for_a_link_serves_nothing(tmp_path, role):
    run = tmp_path / "run"
    run.mkdir()
    with running_job(tmp_path, results=str(run)) as (service, *_):
        run.rename(tmp_path / "away")
        run.symlink_to(tmp_path / "state")
        (tmp_path / "state/logs").mkdir()
        (tmp_path / "state/logs/trainer.log").write_text("secret\n")
        reader = service.client(service.token_of("ann", role))
        for use in (
            lambda: reader.artifacts("job"),
            lambda: reader.fetch("job", "token", io.BytesIO()),
            lambda: [*reader.logs("job", "trainer")],
        ):
            with pytest.raises(errors.InvalidJob, match="behind a link that was added later"):
                use()
        reader.close()


def test_no_name_of_a_job_or_process_is_a_path(shared):
    with shared.client() as client:
        for path in PATHS:
            with pytest.raises((errors.InvalidJob, errors.UnknownJob)) as refused:
                client.get(path)
            assert isinstance(refused.value, errors.InvalidJob) or path.isalnum(), path
            with suppress(errors.InvalidJob):
                assert not set(check_process(path)) - set(f"{ascii_lowercase}{digits}-_"), path


def test_no_folder_of_a_submission_is_outside_the_root(tmp_path):
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    for path in ["inside", "link", str(tmp_path / "outside"), *PATHS]:
        request = wire.SubmitRequest(client_token="t", job_file=JOB, folder=path)
        with suppress(errors.InvalidJob):
            folder = check_submission(request, "me", root).description.folder
            assert folder in (str(root), str(root / "inside")), path


def test_a_service_does_not_choose_where_its_files_are_written(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to(tmp_path)
    for path in ["link/outside", *PATHS]:
        with suppress(errors.InvalidJob):
            assert _target(out, path).parent.is_relative_to(out), path


def test_logs_of_one_process_of_all_and_only_the_last_lines(files):
    assert [(chunk.process, chunk.text) for chunk in files.logs("job")] == [
        ("rollout-0", "zero\n"),
        ("trainer", "one\ntwo\nthree\n"),
    ]
    assert [chunk.text for chunk in files.logs("job", "trainer", tail=2)] == ["two\nthree\n"]
    for follow in (False, True):
        with pytest.raises(errors.InvalidJob, match="trainr: has no log; did you mean 'trainer'"):
            list(files.logs("job", "trainr", follow))
    with pytest.raises(errors.InvalidJob, match="is not a process such as"):
        list(files.logs("job", "../outside"))


def test_log_is_followed_over_a_rotation_to_the_end(files, tmp_path):
    log, lines = tmp_path / "run" / "logs" / "trainer.log", []
    chunks = files.logs("job", "trainer", follow=True)
    lines.append(next(chunks).text)
    with log.open("a") as file:
        file.write("four\n")
    lines.append(next(chunks).text)
    with log.open("a") as file:
        file.write("five\n")
        log.rename(log.with_name("trainer.log.1"))
    log.write_text("six\n")
    lines += [next(chunks).text, next(chunks).text]
    assert lines == ["one\ntwo\nthree\n", "four\n", "five\n", "six\n"]
    files.stop("job")
    assert list(chunks) == []


def test_log_of_a_later_process_is_waited_for(files, tmp_path):
    chunks = files.logs("job", "rollout-1", follow=True)
    threading.Timer(0.5, (tmp_path / "run" / "logs" / "rollout-1.log").write_text, ["first\n"]).start()
    assert next(chunks).text == "first\n"
    files.stop("job")
