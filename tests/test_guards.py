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


def ask(address, **headers):
    with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request("GET", "/metrics", headers=headers)
        return connection.getresponse().status


def submit(root, text=JOB, **fields):
    return submissions.check_submission(wire.SubmitRequest(client_token="t", job_file=text, **fields), "me", root)


GUARDS = {}
"""Check to its guards: each a place, a name there, and what stands in its place when the guard is taken away."""


def guarded_by(place, name, instead):
    """Note the guard of a check; one that is behind another is noted, too."""

    def note(check):
        GUARDS.setdefault(check, []).append((place, name, instead))
        return check

    return note


def anything(*_, **__):
    return None


def write_through(path, text):
    path.write_text(text)


def of_any_name(*_):
    return []


def importing(job):
    __import__(str(job.trainer.module))
    return submissions_plan(job)


submissions_plan = submissions.plan


# -- checks -----------------------------------------------------------------------------------------------------------


@guarded_by(endpoint, "is_loopback", lambda host: True)
def nothing_listens_beyond_loopback_without_a_token(folder):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    refused(lambda: endpoint.MetricsEndpoint(CollectorRegistry(), ("0.0.0.0", 0), "", tls).close())


@guarded_by(endpoint, "is_loopback", lambda host: True)
def a_token_of_scrapers_does_not_travel_in_the_clear(folder):
    refused(lambda: endpoint.MetricsEndpoint(CollectorRegistry(), ("0.0.0.0", 0), CANARY).close())


@guarded_by(serve, "is_loopback", lambda host: True)
def nothing_listens_beyond_loopback_in_the_clear(folder):
    refused(lambda: serve._tls_options("0.0.0.0", dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca"))))


@guarded_by(client, "is_loopback", lambda host: True)
def a_client_does_not_send_its_token_in_the_clear(folder):
    refused(lambda: client.ServiceClient("10.0.0.1:8470", CANARY).close())


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
    with closing(served):
        assert ask(served.address, Host="evil.example:80") == 403


@guarded_by(server, "RIGHTS", {"Delete": AccessRole.READ})
def a_method_without_a_right_is_refused(folder):
    running = server.JobServer.__new__(server.JobServer)
    running._tokens = None
    refused(lambda: running._enter("Delete", SimpleNamespace(invocation_metadata=tuple)))


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


@guarded_by(private_files, "create_private", write_through)
def no_file_of_another_user_is_written_through_a_link(folder):
    (folder / "theirs").write_text("")
    (folder / "token").symlink_to(folder / "theirs")
    with suppress(FileExistsError):
        private_files.create_private(folder / "token", CANARY)
    assert (folder / "theirs").read_text() == ""


@guarded_by(Caller, "check_owner", anything)
def a_job_of_another_user_is_not_operated(folder):
    refused(lambda: Caller("me", AccessRole.SUBMIT).check_owner("you"))


@guarded_by(ledger, "_check_run", anything)
def a_stop_does_not_reach_the_next_job_of_a_name(folder):
    """Who may stop the old job sends the stop while the new one is being saved."""
    old = JobRecord("job", "old", "mallory", "t", phase=JobPhase.STOPPED, sequence=1)
    draft = Draft(Ledger(QueueLimits(), [old], last_event=1), lambda: "new")
    draft.decide(SubmitJob(JobRecord("job", "", "ann", "t", "fingerprint"), JobDescription("text")), 0.0)
    assert isinstance(draft.decide(StopJob("job", "old", "a reason"), 0.0), CallError)
    assert draft.changed["new"].phase is JobPhase.QUEUED


@guarded_by(Draft, "_check_room", anything)
def a_queue_does_not_grow_without_end(folder):
    draft = Draft(Ledger(QueueLimits(max_queued=2)), map(str, count()).__next__)
    submissions = [JobRecord(f"job-{at}", "", f"user-{at}", "t", "fingerprint") for at in range(3)]
    assert isinstance(
        [draft.decide(SubmitJob(job, JobDescription("text")), 0.0) for job in submissions][-1], ServiceBusy
    )


@guarded_by(Draft, "_check_room", anything)
def an_owner_does_not_fill_the_queue(folder):
    draft = Draft(Ledger(QueueLimits(max_queued_per_owner=2)), map(str, count()).__next__)
    submissions = [JobRecord(f"job-{at}", "", "me", f"t{at}", "fingerprint") for at in range(3)]
    assert isinstance(
        [draft.decide(SubmitJob(job, JobDescription("text")), 0.0) for job in submissions][-1], ServiceBusy
    )


@guarded_by(Caller, "check", anything)
def a_reader_does_not_submit(folder):
    refused(lambda: Caller("me", AccessRole.READ).check(server.RIGHTS["Submit"]))


@guarded_by(submissions, "check_path", lambda path: tuple(path.split("/")))
@guarded_by(RunFolder.read.__globals__, "_PRIVATE", ())
def no_path_leads_out_of_a_folder(folder):
    (folder / "run").mkdir()
    (folder / "outside").write_text(CANARY)
    refused(lambda: [*RunFolder(folder / "run").read(submissions.check_path("../outside"), 0)])


@guarded_by(private_files, "_READ", os.O_RDONLY)
def no_link_leads_out_of_a_folder(folder):
    (folder / "run").mkdir()
    (folder / "outside").write_text(CANARY)
    (folder / "run/link").symlink_to(folder / "outside")
    refused(lambda: [*RunFolder(folder / "run").read(("link",), 0)])


@guarded_by(private_files, "_STEP", os.O_PATH | os.O_DIRECTORY)
def no_folder_that_became_a_link_is_read(folder):
    (folder / "state").mkdir()
    (folder / "state/token").write_text(CANARY)
    (folder / "run").symlink_to("state")
    refused(lambda: [*RunFolder(folder / "run").read(("token",), 0)])


@guarded_by(RunFolder.read.__globals__, "_PRIVATE", ())
def internal_files_of_a_run_are_not_served(folder):
    (folder / "journal.jsonl").write_text(CANARY)
    refused(lambda: [*RunFolder(folder).read(("journal.jsonl",), 0)])


@guarded_by(submissions, "check_job_name", str)
@guarded_by(layout, "check_job_name", str)
@guarded_by(submissions, "_faults_of_job", of_any_name)
def a_name_does_not_leave_its_folder(folder):
    refused(lambda: submit(folder, name="../job"))


@guarded_by(submissions, "_folder", lambda text, root, errors: root)
def a_job_does_not_leave_the_root_of_the_service(folder):
    (folder / "root").mkdir()
    refused(lambda: submit(folder / "root", folder=".."))


@guarded_by(submissions, "MAX_TEXT", 1 << 30)
def a_large_submission_is_refused(folder):
    refused(lambda: submit(folder, JOB + "#" * (300 * 1024)))


@guarded_by(plain, "_faults", of_any_name)
@guarded_by(omegaconf.omegaconf, "get_yaml_loader", lambda **_: yaml.UnsafeLoader)
def a_tag_does_not_construct_an_object(folder):
    with suppress(InvalidJob):
        load_job_text(f"{JOB}config: {{x: !!python/object/apply:os.mkdir ['{folder}/made']}}\n", "job")
    assert not (folder / "made").exists()


@guarded_by(plain, "MAX_BYTES", 1 << 30)
def a_large_file_is_refused(folder):
    refused(lambda: plain.check_text("#" * 1_000_001, "job.yaml"))


@guarded_by(plain, "MAX_NODES", 1 << 30)
def a_file_of_many_values_is_refused(folder):
    refused(lambda: plain.check_text(f"[{'1,' * 50_000}]", "job.yaml"))


@guarded_by(plain, "MAX_DEPTH", 1000)
def a_nested_file_is_refused(folder):
    refused(lambda: load_job_text(f"{JOB}config: {'{a: ' * 60}1{'}' * 60}", "job"))


@guarded_by(plain, "MAX_ALIASES", 1000)
def aliases_do_not_multiply(folder):
    bomb = "config:\n  a0: &a0 [x]\n" + "".join(f"  a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 40))
    refused(lambda: load_job_text(JOB + bomb + f"  b: [{', '.join(['*a0'] * 200)}]\n", "job"))


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


def said_about(text, *overrides):
    with pytest.raises(InvalidJob) as refusal:
        load_job_text(JOB + text, "job", overrides)
    return str(refusal.value)


@guarded_by(typed, "without_secrets", lambda values, where: values)
def a_secret_of_a_wrong_type_is_not_shown(folder):
    assert CANARY not in said_about(f"env: {{API_KEY: [{CANARY}]}}\n")


@guarded_by(load, "is_secret_at", lambda where, value: False)
def an_override_without_an_equals_sign_does_not_show_its_secret(folder):
    assert CANARY not in said_about("", f"env.API_KEY:{CANARY}")


@guarded_by(submissions, "seal", lambda job: (job, {}))
def a_secret_is_not_stored_by_the_service(folder):
    refused(lambda: submit(folder, f"{JOB}env: {{API_KEY: {CANARY}}}\n"))


@guarded_by(log, "hide_values", anything)
def a_known_secret_is_not_logged(folder):
    log.hide_values([CANARY])
    assert CANARY not in log.redacted(f"ValueError: {CANARY} is wrong")


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


@guarded_by(globals(), "constraints", str)
def all_requirements_are_pinned(folder):
    """Every requirement, by a version that the constraints name exactly."""
    pinned = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([\w.+]+)$", constraints(), re.MULTILINE))
    names = {re.split(r"[^A-Za-z0-9_.-]", text)[0].lower() for text in requirements()}
    assert len(names) > 8 and names - {name.lower().replace("_", "-") for name in pinned} == set()


def constraints():
    return (ROOT / "requirements/constraints.txt").read_text()


def requirements():
    """Return the requirements of every installation."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@pytest.fixture(autouse=True)
def no_known_secrets(monkeypatch):
    monkeypatch.setattr(log, "_secrets", ())


@pytest.mark.parametrize("check", GUARDS, ids=lambda check: check.__name__)
def test_check_passes(check, tmp_path):
    check(tmp_path)


@pytest.mark.parametrize("check", GUARDS, ids=lambda check: check.__name__)
def test_check_without_its_guard_fails(check, tmp_path, monkeypatch):
    for where, name, instead in GUARDS[check]:
        change = monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr
        change(where, name, instead)
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
