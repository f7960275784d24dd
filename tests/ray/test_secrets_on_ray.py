# SPDX-License-Identifier: Apache-2.0
"""Secrets of a job reach its processes, and are nowhere else: canaries in every field that may have one."""

import os
import secrets
import signal
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from json import loads
from pathlib import Path

import pytest
import yaml
from durable_jobs import wait_for
from test_cli_on_ray import CLI, environment

from dlrover.python.rl.control.events import MasterStarted, MemberStarted
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines

pytestmark = pytest.mark.ray

JOB = """
name: secretive
trainer: {module: secret_jobs, class: HoldingTrainer, device_type: CPU, device_per_node: 2}
workload:
  actor: {module: secret_jobs, class: Holder}
master: {metrics_port: 0}
"""


class Witness:
    """Reads all that others can read while the job runs: arguments of processes, metrics, files of Ray's session."""

    def __init__(self, canaries, folder, temporary):
        self.canaries, self.folder, self.temporary = canaries, folder, temporary
        self.found = {}
        self.seen_files, self.scrapes = set(), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(60)

    def look(self, where, content):
        for name, canary in self.canaries.items():
            if canary.encode() in content:
                self.found.setdefault(name, set()).add(where)

    def _watch(self):
        while not self._over.wait(0.3):
            self.look_at_arguments()
            self.look_at_files(self.temporary)
            self.look_at_metrics()

    def look_at_arguments(self):
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                self.look("arguments of a process", (entry / "cmdline").read_bytes())

    def look_at_files(self, folder):
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file() and path.name != "held" and not path.name.startswith("job-file"):
                    self.look(str(path.relative_to(folder)), path.read_bytes())
                    self.seen_files.add(path.name)

    def look_at_metrics(self):
        for path in self.folder.glob("runs/secretive/*/metrics.json"):
            with suppress(OSError):
                address = loads(path.read_text())["address"]
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                    self.look("metrics", answer.read())
                    self.scrapes += 1


@pytest.mark.parametrize("ends", ["well", pytest.param("badly", marks=pytest.mark.slow)])
def test_canaries_are_found_nowhere(tmp_path, ends):
    temporary, folder = Path("/tmp") / f"rl{secrets.token_hex(3)}", tmp_path / "desk"
    temporary.mkdir()
    folder.mkdir()
    canaries = {name: f"canary{secrets.token_hex(12)}" for name in ("env", "member", "api_key", "password")}
    job = yaml.safe_load(JOB)
    job["env"] = {"API_KEY": canaries["env"]}
    job["workload"]["actor"]["env"] = {"MEMBER_TOKEN": canaries["member"]}
    job["config"] = {
        "folder": str(folder),
        "steps": 20,
        "fails": ends == "badly",
        "judge": {"api_key": canaries["api_key"], "password": canaries["password"]},
    }
    (folder / "job-file.yaml").write_text(yaml.safe_dump(job))
    with Witness(canaries, folder, temporary) as witness:
        done = subprocess.run(
            [*CLI, "run", "job-file.yaml"],
            cwd=folder,
            env={**environment(), "TMPDIR": str(temporary)},
            capture_output=True,
            timeout=200,
            check=False,
        )
        time.sleep(0.5)
    assert done.returncode == (1 if ends == "badly" else 0), done.stderr.decode()[-3000:]
    assert (folder / "held").read_text().split("\n") == [canaries[n] for n in ("env", "member", "api_key", "password")]
    witness.look("output", done.stdout + done.stderr)
    witness.look_at_files(folder)
    assert witness.scrapes and {"journal.jsonl", "job.yaml", "trainer.log", "gcs_server.out"} <= witness.seen_files
    assert witness.found == {}
    os.rmdir(temporary) if not list(temporary.iterdir()) else None


@pytest.mark.slow
def test_a_master_that_comes_back_has_the_secrets_from_its_processes(tmp_path):
    """It is killed, then a member: the new one has the secrets, which no file could give."""
    job = yaml.safe_load(JOB)
    job["env"], job["workload"]["actor"]["env"] = {"API_KEY": "canary-1"}, {"MEMBER_TOKEN": "canary-2"}
    job["config"] = {"folder": str(tmp_path), "steps": 150, "fails": False}
    job["config"]["judge"] = {"api_key": "canary-3", "password": "canary-4"}
    (tmp_path / "job-file.yaml").write_text(yaml.safe_dump(job))
    process = subprocess.Popen([*CLI, "run", "job-file.yaml"], cwd=tmp_path, env=environment())
    try:
        wait_for((tmp_path / "held").exists, 60)
        (journal,) = {path.resolve() for path in tmp_path.rglob("journal.jsonl")}
        for kind in (MasterStarted, MemberStarted):
            event = next(event for _, event in decode(read_lines(journal)) if isinstance(event, kind))
            os.kill(event.pid if kind is MasterStarted else event.process.pid, signal.SIGKILL)
            time.sleep(3)
        assert process.wait(120) == 0
    finally:
        process.kill()
    events = [event for _, event in decode(read_lines(journal))]
    assert sum(isinstance(event, MasterStarted) for event in events) == 2
    assert sum(isinstance(event, MemberStarted) for event in events) >= 2
    assert (tmp_path / "held").read_text().split("\n") == [f"canary-{n}" for n in range(1, 5)]
