# SPDX-License-Identifier: Apache-2.0
"""Each line of the security page: what would be broken fails if its guard is taken away.

A check fails exactly if what it guards against is possible. Guards that live in other processes have their twins
beside the tests of these: the server's gate and TLS, what confines programs, the sockets of a cluster.
"""

import http.client
import os
import re
import ssl
import subprocess
import sys
import time
import tomllib
from contextlib import closing, nullcontext, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import omegaconf.omegaconf
import pytest
import yaml
from prometheus_client import CollectorRegistry

from dlrover.python.rl.cli import serve
from dlrover.python.rl.common import log, private_files
from dlrover.python.rl.common.errors import AccessDenied, CallError, InvalidJob, ServiceBusy
from dlrover.python.rl.config import layout, load, plain, secrets, typed
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.master.process import metrics as endpoint
from dlrover.python.rl.runtime.ray.cluster import cluster
from dlrover.python.rl.runtime.ray.cluster import health as open_ray
from dlrover.python.rl.runtime.run.files import RunFolder
from dlrover.python.rl.service import auth, client, server
from dlrover.python.rl.service.auth import AccessRole, Caller, TokenFile
from dlrover.python.rl.service.jobs import ledger, submissions
from dlrover.python.rl.service.jobs.ledger import Draft, Ledger, QueueLimits
from dlrover.python.rl.service.jobs.records import JobDescription, JobPhase, JobRecord, StopJob, SubmitJob
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire
from tests.support.served import JOB

ROOT = Path(__file__).parents[1]
CANARY = "canary-of-this-test"


def refused(call):
    try:
        call()
    except (InvalidJob, CallError, AccessDenied):
        return
    raise AssertionError("it was not refused")


def submit(root, text=JOB, **fields):
    return submissions.check_submission(wire.SubmitRequest(client_token="t", job_file=text, **fields), "me", root)


def anything(*_, **__):
    return None


def nothing_wrong(*_):
    return []


def is_here(*_):
    return True


# -- checks -----------------------------------------------------------------------------------------------------------

TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
ENDLESS = 1 << 30
BOMB = "config:\n  a0: &a0 [x]\n" + f"  b: [{', '.join(['*a0'] * 200)}]\n"


def serve_metrics(tls, token):
    endpoint.MetricsEndpoint(CollectorRegistry(), ("0.0.0.0", 0), token, tls).close()


def read_file(folder, *path):
    return [*RunFolder(folder / "run").read(path, 0)]


def enter_without_right(folder):
    running = server.JobServer.__new__(server.JobServer)
    running._tokens = None
    running._enter("Delete", SimpleNamespace(invocation_metadata=tuple))


def queue_three(owner, **limits):
    draft = Draft(Ledger(QueueLimits(**limits)), map(str, count()).__next__)
    for at in range(3):
        job = JobRecord(f"job-{at}", "", owner.format(at), f"t{at}", "fingerprint")
        answer = draft.decide(SubmitJob(job, JobDescription("text")), 0.0)
    if isinstance(answer, ServiceBusy):
        raise answer


REFUSED = {
    # what is refused: the guard's place, its name there, what stands in its place when it is taken away; the call
    "metrics beyond loopback without a token": (endpoint, "is_loopback", is_here, lambda _: serve_metrics(TLS, "")),
    "a token of scrapers in the clear": (endpoint, "is_loopback", is_here, lambda _: serve_metrics(None, CANARY)),
    "a service beyond loopback in the clear": (serve, "is_loopback", is_here,
        lambda _: serve._tls_options("0.0.0.0", dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca")))),
    "a client's token in the clear": (client, "is_loopback", is_here,
        lambda _: client.ServiceClient("10.0.0.1:8470", CANARY).close()),
    "a method without a right": (server, "RIGHTS", {"Delete": AccessRole.READ}, enter_without_right),
    "a job of another user": (Caller, "check_owner", anything,
        lambda _: Caller("me", AccessRole.SUBMIT).check_owner("you")),
    "a submission of a reader": (Caller, "check", anything,
        lambda _: Caller("me", AccessRole.READ).check(server.RIGHTS["Submit"])),
    "a queue without end": (Draft, "_check_room", anything, lambda _: queue_three("user-{}", max_queued=2)),
    "an owner's long queue": (Draft, "_check_room", anything, lambda _: queue_three("me", max_queued_per_owner=2)),
    "a link out of a folder": (private_files, "_READ", os.O_RDONLY, lambda folder: read_file(folder, "link")),
    "a folder that became a link": (private_files, "_STEP", os.O_PATH | os.O_DIRECTORY,
        lambda folder: read_file(folder, "linked", "outside")),
    "an internal file of a run": (RunFolder.read.__globals__, "_PRIVATE", (),
        lambda folder: read_file(folder, "journal.jsonl")),
    "a large submission": (submissions, "MAX_TEXT", ENDLESS, lambda folder: submit(folder, JOB + "#" * (300 * 1024))),
    "a large file": (plain, "MAX_BYTES", ENDLESS, lambda _: plain.check_text("#" * 1_000_001, "job.yaml")),
    "a file of many keys": (plain, "MAX_NODES", ENDLESS, lambda _: plain.check_text(f"[{'1,' * 50_000}]", "job.yaml")),
    "a nested file": (plain, "MAX_DEPTH", 1000,
        lambda _: load_job_text(f"{JOB}config: {'{a: ' * 60}1{'}' * 60}", "job")),
    "aliases that multiply": (plain, "MAX_ALIASES", 1000, lambda _: load_job_text(JOB + BOMB, "job")),
    "a secret for the service to store": (submissions, "seal", lambda job: (job, {}),
        lambda folder: submit(folder, f"{JOB}env: {{API_KEY: {CANARY}}}\n")),
}  # fmt: skip


@pytest.fixture
def run_folder(tmp_path):
    """A run with an internal file, and links out of it."""
    (tmp_path / "run").mkdir()
    for file in (tmp_path / "outside", tmp_path / "run/journal.jsonl"):
        file.write_text(CANARY)
    (tmp_path / "run/link").symlink_to(tmp_path / "outside")
    (tmp_path / "run/linked").symlink_to("..")
    return tmp_path


@pytest.mark.parametrize("attempt", REFUSED)
def test_guard_alone_refuses_the_attempt(attempt, run_folder, monkeypatch):
    *guard, call = REFUSED[attempt]
    with pytest.raises((InvalidJob, CallError, AccessDenied, ServiceBusy)):
        call(run_folder)
    take_away(monkeypatch, *guard)
    call(run_folder)


GUARDS = {}
"""Check to its guards, as in the table."""


def guarded_by(place, name, instead):
    """Note the guard of a check; one that is behind another is noted, too."""

    def note(check):
        GUARDS.setdefault(check, []).append((place, name, instead))
        return check

    return note


def take_away(monkeypatch, place, name, instead):
    (monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr)(place, name, instead)


@guarded_by(open_ray, "risk_of_open_ray", str)
def an_open_ray_beyond_loopback_is_not_used(folder):
    def enter():
        with serve._cluster("10.0.0.1:6379", None, may_be_open=False):
            """Jobs would run."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "ray_cluster", lambda *_, **__: nullcontext())
        patch.setattr(open_ray.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"))
        patch.setattr(open_ray, "_internal_kv_get", anything)
        patch.setattr(open_ray, "gcs_answers", lambda address: address == "10.0.0.1:6379")
        refused(enter)


@guarded_by(endpoint, "is_loopback", lambda host: True)
def a_page_of_a_browser_is_not_answered(folder):
    served = endpoint.MetricsEndpoint(CollectorRegistry(), ("127.0.0.1", 0))
    with closing(served), closing(http.client.HTTPConnection(served.address, timeout=10)) as connection:
        connection.request("GET", "/metrics", headers={"Host": "evil.example:80"})
        assert connection.getresponse().status == 403


@guarded_by(auth, "check_private", Path.stat)
def a_token_file_that_others_can_read_admits_no_one(folder):
    token = auth.prepare(folder / "state").read_text().strip()
    (folder / "state" / auth.TOKENS).chmod(0o644)
    refused(lambda: TokenFile(folder / "state").caller(token))


@guarded_by(private_files, "check_private", Path.stat)
def a_client_does_not_use_a_token_that_others_can_read(folder):
    (folder / "token").write_text(CANARY)
    (folder / "token").chmod(0o644)
    refused(lambda: private_files.read_token(folder / "token"))


@guarded_by(auth, "_digest", lambda token: token.encode().hex() + token)
def a_token_is_not_stored(folder):
    token = auth.prepare(folder / "state").read_text().strip()
    assert token not in (folder / "state" / auth.TOKENS).read_text()


@guarded_by(private_files, "create_private", Path.write_text)
def no_file_of_another_user_is_written_through_a_link(folder):
    (folder / "theirs").write_text("")
    (folder / "token").symlink_to(folder / "theirs")
    with suppress(FileExistsError):
        private_files.create_private(folder / "token", CANARY)
    assert (folder / "theirs").read_text() == ""


@guarded_by(ledger, "_check_run", anything)
def a_stop_does_not_reach_the_next_job_of_a_name(folder):
    """Who may stop the old job sends the stop while the new one is being saved."""
    old = JobRecord("job", "old", "mallory", "t", phase=JobPhase.STOPPED, sequence=1)
    draft = Draft(Ledger(QueueLimits(), [old], last_event=1), lambda: "new")
    draft.decide(SubmitJob(JobRecord("job", "", "ann", "t", "fingerprint"), JobDescription("text")), 0.0)
    assert isinstance(draft.decide(StopJob("job", "old", "a reason"), 0.0), CallError)
    assert draft.changed["new"].phase is JobPhase.QUEUED


@guarded_by(submissions, "check_path", lambda path: tuple(path.split("/")))
@guarded_by(RunFolder.read.__globals__, "_PRIVATE", ())
def no_path_leads_out_of_a_folder(folder):
    (folder / "run").mkdir()
    (folder / "outside").write_text(CANARY)
    refused(lambda: read_file(folder, *submissions.check_path("../outside")))


@guarded_by(submissions, "check_job_name", str)
@guarded_by(layout, "check_job_name", str)
@guarded_by(submissions, "_faults_of_job", nothing_wrong)
def a_name_does_not_leave_its_folder(folder):
    refused(lambda: submit(folder, name="../job"))


@guarded_by(submissions, "_folder", lambda text, root, errors: root)
def a_job_does_not_leave_the_root_of_the_service(folder):
    (folder / "root").mkdir()
    refused(lambda: submit(folder / "root", folder=".."))


@guarded_by(plain, "_faults", nothing_wrong)
@guarded_by(omegaconf.omegaconf, "get_yaml_loader", lambda **_: yaml.UnsafeLoader)
def a_tag_does_not_construct_an_object(folder):
    with suppress(InvalidJob):
        load_job_text(f"{JOB}config: {{x: !!python/object/apply:os.mkdir ['{folder}/made']}}\n", "job")
    assert not (folder / "made").exists()


@guarded_by(layout, "validate_resolvers", lambda values: [])
def a_resolver_does_not_read_the_environment(folder):
    os.environ["CANARY_OF_THIS_TEST"] = CANARY
    try:
        refused(lambda: load_job_text(f"{JOB}config: {{word: '${{oc.env:CANARY_OF_THIS_TEST}}'}}\n", "job"))
    finally:
        del os.environ["CANARY_OF_THIS_TEST"]


@guarded_by(secrets, "is_secret_at", lambda where, value: False)
def a_secret_is_not_in_the_file_of_a_run(folder):
    job = load_job_text(f"{JOB}env: {{API_KEY: {CANARY}}}\nconfig: {{judge: {{api_key: {CANARY}}}}}\n", "job")
    assert CANARY not in job_to_yaml(job, hide_secrets=True)


@guarded_by(log, "hide_values", anything)
def a_known_secret_is_not_logged(folder):
    log.hide_values([CANARY])
    assert CANARY not in log.redacted(f"ValueError: {CANARY} is wrong")


@pytest.mark.parametrize(
    ("guard", "text", "overrides"),
    [
        ((typed, "without_secrets", lambda values, where: values), f"env: {{API_KEY: [{CANARY}]}}\n", []),
        ((load, "is_secret_at", lambda where, value: False), "", [f"env.API_KEY:{CANARY}"]),
    ],
    ids=["of a wrong type", "in an override without an equals sign"],
)
def test_secret_in_a_wrong_job_is_not_shown(guard, text, overrides, monkeypatch):
    def message():
        with pytest.raises(InvalidJob) as refusal:
            load_job_text(JOB + text, "job", overrides)
        return str(refusal.value)

    assert CANARY not in message()
    take_away(monkeypatch, *guard)
    assert CANARY in message()


def importing(job, plan=submissions.plan):
    __import__(str(job.trainer.module))
    return plan(job)


@guarded_by(submissions, "plan", importing)
def a_job_of_the_service_is_not_imported_by_it(folder):
    """Not even its modules, which may do anything when they are imported."""
    (folder / "some_module.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'imported')!r}).touch()\n")
    sys.path.insert(0, str(folder))
    try:
        submit(folder)
        assert "some_module" not in sys.modules and not (folder / "imported").exists()
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("some_module", None)


def test_all_requirements_are_pinned():
    constraints = (ROOT / "requirements/constraints.txt").read_text()
    pinned = set(re.findall(r"^([A-Za-z0-9_.-]+)==[\w.+]+$", constraints.lower().replace("_", "-"), re.MULTILINE))
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[^A-Za-z0-9_.-]", text)[0].lower() for text in required}
    assert len(names) > 8 and names <= pinned


@pytest.fixture(autouse=True)
def no_known_secrets(monkeypatch):
    monkeypatch.setattr(log, "_secrets", ())


@pytest.mark.parametrize("check", GUARDS, ids=lambda check: check.__name__)
def test_check_passes(check, tmp_path):
    check(tmp_path)


@pytest.mark.parametrize("check", GUARDS, ids=lambda check: check.__name__)
def test_check_without_its_guard_fails(check, tmp_path, monkeypatch):
    for guard in GUARDS[check]:
        take_away(monkeypatch, *guard)
    with pytest.raises(AssertionError):
        check(tmp_path)


def test_file_exchanged_for_a_link_is_not_followed(tmp_path):
    """A process exchanges a file for a link, and back, as fast as it can."""
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").write_text(CANARY)
    swap = (
        "import os\nos.symlink('../outside', 'l')\n"
        "while True:\n open('f', 'w').write('fine'); os.replace('f', 'file'); os.symlink('../outside', 'k'); "
        "os.replace('k', 'file')\n"
    )
    swapping = subprocess.Popen([sys.executable, "-S", "-c", swap], cwd=tmp_path / "run")
    try:
        seen, ends_s = set[bytes](), time.monotonic() + 1.0
        while time.monotonic() < ends_s or not seen:
            with suppress(InvalidJob):
                seen.add(b"".join(RunFolder(tmp_path / "run").read(("file",), 0)))
            assert time.monotonic() < ends_s + 20
        assert seen <= {b"fine", b""}
    finally:
        swapping.kill()
        swapping.wait(20)
