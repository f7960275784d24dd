# SPDX-License-Identifier: Apache-2.0
"""Secrets of a job reach its processes, and are nowhere else: canaries in every field that may have one."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.control.events import MasterStarted, MemberStarted
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.master.process.metrics import MetricsEndpoint
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.service.client import ServiceClient, phase_of
from dlrover.python.rl.service.jobs.records import JobPhase
from tests.support.commands import Desk, environment, wait_for
from tests.support.toy_job import toy_text

pytestmark = pytest.mark.ray


def toy_job(folder, **keys):
    text = toy_text(folder, trainer="Holding", name="secretive", master={"metrics_port": 0}, step_s=0.1, **keys)
    return yaml.safe_load(text)


FIELDS = "env member api_key password camel header cookie listed nested user_part parameter connection pem database"
FIELDS = FIELDS.split()

UNGUARDED = """
import dlrover.python.rl.common.log as redaction
import dlrover.python.rl.config.secrets as secrets

secrets.is_secret_at = lambda where, value: False
redaction.hide_values = lambda values: None
"""


def made_canaries(*names):
    """Random texts, which are numbers where a job's values are."""
    return {name: f"{secrets.randbelow(9 * 10**30) + 10**30}" for name in names}


def job_with(canaries, folder, ends):
    """A job file with a canary in every kind of place that may have a secret."""
    pem = f"-----BEGIN PRIVATE KEY-----\n{secrets.token_hex(24)}\n{canaries['pem']}\n-----END PRIVATE KEY-----\n"
    by_key = {"api_key": canaries["api_key"], "password": int(canaries["password"]), "openaiApiKey": canaries["camel"]}
    deeper = {"github_tokens": [canaries["listed"]], "secret": {"value": canaries["nested"]}}
    in_texts = {
        "headers": {"X-Api-Key": canaries["header"], "Cookie": f"id={canaries['cookie']}"},
        "url": f"https://{canaries['user_part']}@host/x",
        "query": f"https://host/x?a=1&api_key={canaries['parameter']}",
        "connection_string": f"host=h user=u auth={canaries['connection']}",
        "database": f"postgresql://user:{canaries['database']}@host/x",
    }
    settings = {**by_key, **deeper, **in_texts, "pem": pem}
    steps = 10**6 if ends == "cancelled" else 20
    job = toy_job(folder, steps=steps, ends=ends, secret_settings=settings, env={"API_KEY": canaries["env"]})
    job["workload"]["actor"]["env"] = {"MEMBER_TOKEN": canaries["member"]}
    return job


def expected(job):
    """Return the environment of a worker of the job."""
    return {**job["env"], **job["workload"]["actor"]["env"], "config": job["config"]["secret_settings"]}


class Witness:
    """Reads all that others can read while the job runs: arguments of processes, metrics, files of Ray's session and
    of others that are ``watched``. A canary may be in the files that ``own`` it."""

    def __init__(self, canaries, folder, *watched, own=()):
        self.canaries, self.folder, self.watched, self.own = canaries, folder, watched, {"held", *own}
        self.found, self.seen_files, self.scrapes = {}, set(), 0
        self._over, self._thread = threading.Event(), threading.Thread(target=self._watch)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(60)

    def look(self, where, content):
        for name, canary in list(self.canaries.items()):
            if canary.encode() in content:
                self.found.setdefault(name, set()).add(where)

    def _watch(self):
        while not self._over.wait(0.3):
            for entry in Path("/proc").glob("[0-9]*"):
                self.look("arguments of a process", content_of(entry / "cmdline"))
            for folder in self.watched:
                self.look_at_files(folder)
            self.look_at_metrics()

    def look_at_files(self, folder):
        for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
            if path.name not in self.own and not path.name.startswith("job-file") and path.is_file():
                self.look(str(path.relative_to(folder)), content_of(path))
                self.seen_files.add(path.name)

    def look_at_metrics(self):
        """Read the metrics of jobs and of a service, whose addresses are in their files."""
        files = [*self.folder.glob("runs/*/*/metrics.json"), *self.folder.glob("service.log")]
        for address in re.findall(rb"127\.0\.0\.1:\d+(?=/metrics|\"})", b"".join(map(content_of, files))):
            with suppress(OSError, HTTPException):
                with urllib.request.urlopen(f"http://{address.decode()}/metrics", timeout=5) as answer:
                    self.look("metrics", answer.read())
                self.scrapes += 1


def content_of(path):
    with suppress(OSError):
        return path.read_bytes()
    return b""


@contextmanager
def short_folder():
    """Ray's sockets need a short path."""
    folder = Path("/tmp") / f"rl{secrets.token_hex(3)}"
    folder.mkdir()
    yield folder
    with suppress(OSError):
        folder.rmdir()


def witnessed_run(folder, ends, **environ):
    """The witness of a run of a job with all kinds of secrets, which have reached it."""
    canaries = made_canaries(*FIELDS)
    job = job_with(canaries, folder, ends)
    (folder / "job-file.yaml").write_text(yaml.safe_dump(job))
    with short_folder() as temporary:
        desk = Desk(folder, TMPDIR=str(temporary), **environ)
        with Witness(canaries, folder, temporary) as witness, desk.start("run", "job-file.yaml") as command:
            if ends == "cancelled":
                wait_for((folder / "held").exists, 100)
                command.send_signal(signal.SIGINT)
            output = command.end({"well": 0, "badly": 1, "cancelled": 130}[ends], 200)
            time.sleep(0.5)
        witness.look("output", output.encode())
        witness.look_at_files(folder)
    assert json.loads((folder / "held").read_text()) == expected(job)
    assert witness.scrapes and {"journal.jsonl", "job.yaml", "trainer.log", "gcs_server.out"} <= witness.seen_files
    return witness


@pytest.mark.parametrize(
    "ends", ["well", *(pytest.param(ends, marks=pytest.mark.slow) for ends in ("badly", "cancelled"))]
)
def test_secrets_of_a_run_are_nowhere_else(tmp_path, ends):
    assert witnessed_run(tmp_path, ends).found == {}


@pytest.mark.slow
def test_secrets_without_the_guards_are_seen(tmp_path):
    (tmp_path / "unguarded").mkdir()
    (tmp_path / "unguarded/sitecustomize.py").write_text(UNGUARDED)
    path = f"{tmp_path / 'unguarded'}{os.pathsep}{environment()['PYTHONPATH']}"
    occurrences = witnessed_run(tmp_path, "badly", PYTHONPATH=path).found
    assert set(occurrences) == set(FIELDS)
    assert {"output"} < set.union(*occurrences.values())


def test_witness_sees_arguments_files_and_metrics(tmp_path):
    canaries = made_canaries("argument", "file", "metric")
    registry = CollectorRegistry()
    Gauge("x", "y", ["z"], registry=registry).labels(canaries["metric"]).set(1)
    (tmp_path / "a").write_text(canaries["file"])
    (tmp_path / "held").write_text(canaries["metric"])
    endpoint = MetricsEndpoint(registry, ("127.0.0.1", 0))
    (tmp_path / "service.log").write_text(f"metrics at {endpoint.url}\n")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", canaries["argument"]])
    try:
        with Witness(canaries, tmp_path, tmp_path) as witness:
            wait_for(lambda: len(witness.found) == 3, 30)
        assert witness.found == {"argument": {"arguments of a process"}, "file": {"a"}, "metric": {"metrics"}}
    finally:
        sleeper.kill()
        sleeper.wait(10)
        endpoint.close()


@contextmanager
def service(folder, temporary, **environ):
    """``dlrover-rl serve`` with its own Ray: its client, and a function that runs a command."""
    desk, state = Desk(folder, HOME=str(folder), TMPDIR=str(temporary), **environ), folder / ".dlrover-rl/service"
    (folder / "root").mkdir()
    process = desk.start("serve", "--root", "root", "--cpus", "6", "--port", "0", "--metrics-port", "0")
    process.output.rename(folder / "service.log")

    def call(*words):
        command = desk.start(*words, DLROVER_RL_SERVER=(state / "address").read_text().strip())
        command.wait(100)
        return command.returncode, command.said().encode()

    try:
        wait_for((state / "address").exists, 100)
        address, token = ((state / name).read_text().strip() for name in ("address", "token"))
        with ServiceClient(address, token, patience_s=0.0) as client:
            yield client, call
    finally:
        process.terminate()
        code = process.wait(60)
        desk.kill_all()  # commands that hang
    assert code == 0


@pytest.mark.slow
def test_secrets_and_tokens_of_a_service_are_nowhere_else(tmp_path):
    """Jobs that are refused because of their secrets, one that is stopped, and one that fails."""
    canaries = made_canaries(*FIELDS, "cluster", "wrong")
    refused = job_with(canaries, tmp_path, "badly")
    with short_folder() as temporary:
        own = ("token", "auth_token")
        with Witness(canaries, tmp_path, temporary, tmp_path / ".dlrover-rl", own=own) as witness:
            with service(tmp_path, temporary, CLUSTER_API_KEY=canaries["cluster"]) as (client, call):
                canaries["token"] = (tmp_path / ".dlrover-rl/service/token").read_text().strip()
                canaries["token of Ray"] = (tmp_path / ".ray/auth_token").read_text().strip()
                assert all(len(canary) > 30 for canary in canaries.values())
                refuse_all(client, call, tmp_path, refused, canaries["wrong"], witness.look)
                stop_one_and_fail_one(client, call, tmp_path, witness.look)
            time.sleep(0.5)
        witness.look_at_files(tmp_path)
    secrets = json.loads((tmp_path / "held").read_text())
    assert secrets["CLUSTER_API_KEY"] == canaries["cluster"]
    files = {"journal.jsonl", "job.yaml", "gcs_server.out", "service.log", "jobs.sqlite"}
    assert witness.scrapes and files <= witness.seen_files
    assert witness.found == {}


def refuse_all(client, call, folder, job, wrong, look):
    """Submissions with secrets at the right places and at wrong ones, in the file and in overrides: places are named,
    values are not."""
    text = yaml.safe_dump(job)
    (folder / "job-file.yaml").write_text(text)
    status, output = call("enqueue", "job-file.yaml")
    look("refusal", output)
    assert status == 2 and output.count(b"looks like a secret") == len(FIELDS), output
    for values, overrides in [
        ({"env": {"API_KEY": int(wrong)}}, []),
        ({"env": [f"API_KEY={wrong}"]}, []),
        ({}, [f"env.API_KEY:{wrong}"]),
        ({}, [f"+env.API_KEY=${{{wrong}"]),
        ({}, [f"+judge.password={wrong}"]),
    ]:
        with pytest.raises(InvalidJob) as refusal:
            client.submit(yaml.safe_dump({**toy_job(folder), **values}), overrides=overrides)
        look("refusal", str(refusal.value).encode())


def stop_one_and_fail_one(client, call, folder, look):
    client.submit(yaml.safe_dump(toy_job(folder, steps=5, ends="badly", secret_settings={})), name="failing")
    client.submit(toy_text(folder / "notes", steps=10**6), name="stopped")
    wait_for((folder / "notes/starts").exists, 100)
    for words in ("stop stopped", "status stopped", "list"):
        status, output = call(*words.split())
        look("output", output)
        assert status == 0, output
    phases = [phase_of(client.wait(name, 100)) for name in ("failing", "stopped")]
    assert phases == [JobPhase.FAILED, JobPhase.STOPPED]
    look("output", call("explain", "failing")[1])
    for name in ("failing", "stopped"):
        look("logs", b"".join(chunk.SerializeToString() for chunk in client.logs(name)))
    look("events", b"".join(event.SerializeToString() for event in client.watch(follow=False)))


@pytest.mark.slow
def test_second_master_takes_the_secrets_from_its_processes(tmp_path):
    """The first is killed, then a worker: the new one has the secrets, which no file could give."""
    job = job_with(made_canaries(*FIELDS), tmp_path, "well")
    job["config"]["steps"] = 150
    (tmp_path / "job-file.yaml").write_text(yaml.safe_dump(job))
    with Desk(tmp_path).start("run", "job-file.yaml") as command:
        wait_for((tmp_path / "held").exists, 60)
        (journal,) = {path.resolve() for path in tmp_path.rglob("journal.jsonl")}
        for kind in (MasterStarted, MemberStarted):
            event = next(event for _, event in decode(read_lines(journal)) if isinstance(event, kind))
            os.kill(event.pid if kind is MasterStarted else event.process.pid, signal.SIGKILL)
            time.sleep(3)
        command.end(0)
    events = [event for _, event in decode(read_lines(journal))]
    assert sum(isinstance(event, MasterStarted) for event in events) == 2
    assert sum(isinstance(event, MemberStarted) for event in events) >= 2
    assert json.loads((tmp_path / "held").read_text()) == expected(job)
