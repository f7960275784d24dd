# SPDX-License-Identifier: Apache-2.0
"""Each line of the security page: what would be broken fails if its guard is taken away.

A check fails exactly if what it guards against is possible. Guards that live in other processes have their twins
beside the tests of these: the server's gate and TLS, what confines programs, the sockets of a cluster.
"""

import ast
import http.client
import os
import re
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from dlrover.python.rl.common import private_files, redaction
from dlrover.python.rl.common.errors import AccessDenied, CallError, InvalidJob
from dlrover.python.rl.config import layout, limits, secrets
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.metrics import endpoint
from dlrover.python.rl.runtime.process.result_files import RunFolder
from dlrover.python.rl.service import auth, server, submissions
from dlrover.python.rl.service.auth import AccessRole, Caller, TokenFile
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire
from tests.served import JOB

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


# -- checks -----------------------------------------------------------------------------------------------------------


def nothing_listens_beyond_loopback_without_a_token(folder):
    refused(lambda: endpoint.MetricsEndpoint(CollectorRegistry(), "0.0.0.0", 0).close())


def a_page_of_a_browser_is_not_answered(folder):
    served = endpoint.MetricsEndpoint(CollectorRegistry(), "127.0.0.1", 0)
    with closing(served):
        assert ask(served.address, Host="evil.example:80") == 403


def a_method_without_a_right_is_refused(folder):
    running = server.JobServer.__new__(server.JobServer)
    running._tokens = None
    refused(lambda: running._enter("Delete", SimpleNamespace(invocation_metadata=tuple)))


def a_token_file_that_others_can_read_admits_nobody(folder):
    token = auth.prepare(folder / "state").read_text().strip()
    (folder / "state" / auth.TOKENS).chmod(0o644)
    refused(lambda: TokenFile(folder / "state").caller(token))


def a_client_does_not_use_a_token_that_others_can_read(folder):
    (folder / "token").write_text(CANARY)
    (folder / "token").chmod(0o644)
    refused(lambda: private_files.read_token(folder / "token"))


def a_token_is_not_stored(folder):
    token = auth.prepare(folder / "state").read_text().strip()
    assert token not in (folder / "state" / auth.TOKENS).read_text()


def no_file_of_somebody_else_is_written_through_a_link(folder):
    (folder / "theirs").write_text("")
    (folder / "token").symlink_to(folder / "theirs")
    with suppress(FileExistsError):
        private_files.create_private(folder / "token", CANARY)
    assert (folder / "theirs").read_text() == ""


def a_job_of_somebody_else_is_not_operated(folder):
    refused(lambda: Caller("me", AccessRole.SUBMIT).check_owner("you"))


def a_reader_does_not_submit(folder):
    refused(lambda: Caller("me", AccessRole.READ).check(server.RIGHTS["Submit"]))


def no_path_leads_out_of_a_folder(folder):
    (folder / "run").mkdir()
    (folder / "outside").write_text(CANARY)
    refused(lambda: [*RunFolder(folder / "run").read(submissions.check_path("../outside"), 0)])


def no_link_leads_out_of_a_folder(folder):
    (folder / "run").mkdir()
    (folder / "outside").write_text(CANARY)
    (folder / "run/link").symlink_to(folder / "outside")
    refused(lambda: [*RunFolder(folder / "run").read(("link",), 0)])


def internal_files_of_a_run_are_not_served(folder):
    (folder / "journal.jsonl").write_text(CANARY)
    refused(lambda: [*RunFolder(folder).read(("journal.jsonl",), 0)])


def a_name_does_not_leave_its_folder(folder):
    refused(lambda: submit(folder, name="../job"))


def a_job_does_not_leave_the_root_of_the_service(folder):
    (folder / "root").mkdir()
    refused(lambda: submit(folder / "root", folder=".."))


def a_large_submission_is_refused(folder):
    refused(lambda: submit(folder, JOB + "#" * (300 * 1024)))


def a_nested_file_is_refused(folder):
    refused(lambda: load_job_text(f"{JOB}config: {'{a: ' * 60}1{'}' * 60}", "job"))


def aliases_do_not_multiply(folder):
    bomb = "config:\n  a0: &a0 [x]\n" + "".join(f"  a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 40))
    refused(lambda: load_job_text(JOB + bomb + f"  b: [{', '.join(['*a0'] * 200)}]\n", "job"))


def a_resolver_does_not_read_the_environment(folder):
    os.environ["CANARY_OF_THIS_TEST"] = CANARY
    try:
        refused(lambda: load_job_text(f"{JOB}config: {{word: '${{oc.env:CANARY_OF_THIS_TEST}}'}}\n", "job"))
    finally:
        del os.environ["CANARY_OF_THIS_TEST"]


def a_secret_is_not_in_the_file_of_a_run(folder):
    job = load_job_text(f"{JOB}env: {{API_KEY: {CANARY}}}\nconfig: {{judge: {{api_key: {CANARY}}}}}\n", "job")
    assert CANARY not in job_to_yaml(job, hide_secrets=True)


def a_secret_is_not_stored_by_the_service(folder):
    refused(lambda: submit(folder, f"{JOB}env: {{API_KEY: {CANARY}}}\n"))


def a_known_secret_is_not_logged(folder):
    redaction.hide_values([CANARY])
    assert CANARY not in redaction.redacted(f"ValueError: {CANARY} is wrong")


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


def what_is_installed_is_pinned(folder):
    """Every requirement, by a version that the constraints name exactly."""
    pinned = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([\w.+]+)$", constraints(), re.MULTILINE))
    names = {re.split(r"[^A-Za-z0-9_.-]", text)[0].lower() for text in requirements()}
    assert len(names) > 8 and names - {name.lower().replace("_", "-") for name in pinned} == set()


def constraints():
    return (ROOT / "constraints.txt").read_text()


def requirements():
    """What every installation has."""
    body = ast.parse((ROOT / "setup.py").read_text()).body
    (core,) = (node.value for node in body if isinstance(node, ast.Assign) and node.targets[0].id == "CORE")
    return ast.literal_eval(core)


# -- the guards, and how they are taken away --------------------------------------------------------------------------


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

GUARDS = {
    nothing_listens_beyond_loopback_without_a_token: (endpoint, "is_loopback", lambda host: True),
    a_page_of_a_browser_is_not_answered: (endpoint, "is_loopback", lambda host: True),
    a_method_without_a_right_is_refused: (server, "RIGHTS", {"Delete": auth.Right.READ}),
    a_token_file_that_others_can_read_admits_nobody: (auth, "check_private", Path.stat),
    a_client_does_not_use_a_token_that_others_can_read: (private_files, "check_private", Path.stat),
    a_token_is_not_stored: (auth, "_digest", lambda token: token.encode().hex() + token),
    no_file_of_somebody_else_is_written_through_a_link: (private_files, "create_private", write_through),
    a_job_of_somebody_else_is_not_operated: (Caller, "check_owner", anything),
    a_reader_does_not_submit: (Caller, "may", lambda self, right: True),
    no_path_leads_out_of_a_folder: [
        (submissions, "check_path", lambda path: tuple(path.split("/"))),
        (RunFolder.read.__globals__, "_PRIVATE", ()),
    ],
    no_link_leads_out_of_a_folder: (os, "O_NOFOLLOW", 0),
    internal_files_of_a_run_are_not_served: (RunFolder.read.__globals__, "_PRIVATE", ()),
    a_name_does_not_leave_its_folder: [
        (submissions, "check_job_name", str),
        (layout, "check_job_name", str),
        (submissions, "_faults_of_job", of_any_name),
    ],
    a_job_does_not_leave_the_root_of_the_service: (submissions, "_folder", lambda text, root, errors: root),
    a_large_submission_is_refused: (submissions, "MAX_TEXT", 1 << 30),
    a_nested_file_is_refused: (limits, "MAX_DEPTH", 1000),
    aliases_do_not_multiply: (limits, "MAX_ALIASES", 1000),
    a_resolver_does_not_read_the_environment: (layout, "validate_resolvers", lambda values: []),
    a_secret_is_not_in_the_file_of_a_run: (secrets, "is_secret_key", lambda name, value: False),
    a_secret_is_not_stored_by_the_service: (submissions, "seal", lambda job: (job, {})),
    a_known_secret_is_not_logged: (redaction, "hide_values", anything),
    a_job_of_the_service_is_not_imported_by_it: (submissions, "plan", importing),
    what_is_installed_is_pinned: (globals(), "constraints", str),
}
"""Each check, and what stands in the place of its guard, or of its guards where one is behind another."""


@pytest.fixture(autouse=True)
def no_known_secrets(monkeypatch):
    monkeypatch.setattr(redaction, "_known", ())


@pytest.mark.parametrize("check", GUARDS, ids=lambda check: check.__name__)
def test_it_is_so(check, tmp_path):
    check(tmp_path)


@pytest.mark.parametrize("check", GUARDS, ids=lambda check: check.__name__)
def test_without_its_guard_it_is_not(check, tmp_path, monkeypatch):
    guards = GUARDS[check]
    for where, name, instead in guards if isinstance(guards, list) else [guards]:
        change = monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr
        change(where, name, instead)
    with pytest.raises(AssertionError):
        check(tmp_path)


def test_no_exchange_of_a_file_for_a_link_is_followed(tmp_path):
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
