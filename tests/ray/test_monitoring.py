# SPDX-License-Identifier: Apache-2.0
"""A job watched by Debian's Prometheus: the numbers are the journal's, and the shipped alerts fire."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from dlrover.python.rl import metrics
from dlrover.python.rl.control.events import MemberLost, MemberStarted
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from tests.support.commands import Desk, debian_programs, kill_processes, processes_below, wait_for
from tests.support.processes import free_port
from tests.support.toy_job import toy_text
from tests.unit.master.test_job_metrics import expressions

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ALERTS = Path(metrics.__path__[0]) / "alerts.yaml"


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """The folder of ``prometheus`` and ``promtool``: of this machine, or unpacked from Debian's package."""
    folder = debian_programs(tmp_path_factory.mktemp("prometheus"), "prometheus", "prometheus", "promtool")
    return folder or pytest.skip("neither prometheus nor apt-get is here")


class Prometheus:
    """Debian's Prometheus with the shipped alerts, a process."""

    def __init__(self, tmp_path, tools, scraped, every="1s"):
        intervals = {"scrape_interval": every, "evaluation_interval": every}
        config = {"global": intervals, "rule_files": [str(ALERTS)], "scrape_configs": scraped}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.web, self.log = f"127.0.0.1:{free_port()}", (tmp_path / "prometheus.log").open("w")
        options = {"config.file": tmp_path / "prometheus.yml", "storage.tsdb.path": tmp_path / "data"}
        options |= {"web.listen-address": self.web}
        command = [tools / "prometheus", *(f"--{name}={value}" for name, value in options.items())]
        self.server = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        wait_for(self.is_ready, 60)

    def is_ready(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.web}/-/ready", timeout=10) as answer:
            return answer.status == 200
        return False

    def close(self):
        self.server.terminate()
        self.server.wait(60)
        self.log.close()

    def read(self, path):
        with urllib.request.urlopen(f"http://{self.web}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    def value(self, query):
        result = self.read(f"query?query={urllib.parse.quote(query)}")["result"]
        return float(result[0]["value"][1]) if result else None

    def alerts(self):
        """The firing alerts, each with the label of its job."""
        firing = [alert["labels"] for alert in self.read("alerts")["alerts"] if alert["state"] == "firing"]
        return {(labels["alertname"], labels.get("job_name")) for labels in firing}

    def firing(self):
        return {name for name, _ in self.alerts()}


class Watched(Prometheus):
    """An endless job and a Prometheus server."""

    def __init__(self, tmp_path, tools):
        text = toy_text(tmp_path / "notes", steps=10**6, step_s=0.1, name="watched", master={"metrics_port": 0})
        (tmp_path / "watched.yaml").write_text(text)
        self.folder = tmp_path / "runs" / "watched"
        self.job = Desk(tmp_path).start("run", "watched.yaml", f"job_dir={self.folder}")
        wait_for(lambda: list(self.folder.rglob("metrics.json")), 120)
        (metrics_file,) = self.folder.rglob("metrics.json")
        self.address, self.folder = json.loads(metrics_file.read_text())["address"], metrics_file.parent
        super().__init__(tmp_path, tools, [{"job_name": "rl", "static_configs": [{"targets": [self.address]}]}])

    def close(self):
        self.job.terminate()
        self.job.wait(60)
        super().close()

    def events(self, kind):
        (journal,) = self.folder.rglob("journal*")
        return [event for _, event in decode(read_lines(journal)) if isinstance(event, kind)]

    def member(self):
        return self.events(MemberStarted)[-1].process.pid


@pytest.fixture
def watched(tmp_path, tools):
    running = Watched(tmp_path, tools)
    yield running
    running.close()


def test_alert_rules_are_accepted_by_promtool(tools):
    done = subprocess.run([tools / "promtool", "check", "rules", ALERTS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_are_accepted_by_promtool_and_equal_the_journal(watched, tools):
    with urllib.request.urlopen(f"http://{watched.address}/metrics", timeout=10) as answer:
        text = answer.read()
    done = subprocess.run([tools / "promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: (watched.value("rl_job_step") or 0) > 5, 60)
    os.kill(watched.member(), signal.SIGKILL)
    wait_for(lambda: (watched.value("rl_job_recovery_seconds_count") or 0) == 1, 60)
    assert watched.value('rl_job_failures_total{role="ACTOR",cause="process_died"}') == len(watched.events(MemberLost))
    assert watched.value("sum(rl_job_restarts_total)") == 0
    assert watched.value('rl_job_time_seconds_total{use="recovery",cause="process_died"}') > 0
    assert watched.value('rl_job_member_up{role="ACTOR",rank="0"}') == 1
    assert watched.value('rl_job_member_heartbeat_age_seconds{role="ACTOR",rank="0"}') < 30
    wait_for(lambda: (watched.value('rl_job_moved_bytes_total{of="commits"}') or 0) > 1000, 60)
    wait_for(lambda: watched.value('rl_job_call_seconds_count{method="update"}') > 10, 60)
    assert 0 < watched.value("rl_job_goodput_ratio") < 1


def test_alerts_fire_on_a_hang_and_on_a_crash_loop(watched, tmp_path):
    wait_for(lambda: (watched.value("rl_job_step") or 0) > 20, 90)
    assert watched.firing() == set()
    (tmp_path / "notes/hang").touch()
    wait_for(lambda: "JobHangs" in watched.firing(), 240)
    assert "JobCrashLoop" not in watched.firing()
    (tmp_path / "notes/hang").unlink()
    wait_for(lambda: "JobHangs" not in watched.firing(), 30)
    for number in range(6):
        os.kill(watched.member(), signal.SIGKILL)
        wait_for(lambda number=number: len(watched.events(MemberStarted)) == number + 2, 60)
        time.sleep(2)  # a scrape sees each
    wait_for(lambda: "JobCrashLoop" in watched.firing(), 60)


# -- the service ------------------------------------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path):
    with Desk(tmp_path, HOME=str(tmp_path)) as desk:
        yield desk


def kill_masters(service):
    commands = processes_below(service.pid)
    kill_processes(pid for pid, command in commands.items() if command.startswith("ray::RLMaster"))


@pytest.mark.parametrize("every", ["1s", "15s"])
def test_failed_job_and_lost_master_of_a_service_raise_alerts(desk, tmp_path, tools, every):
    (tmp_path / "root").mkdir()
    service = desk.start("serve", "--root", "root", "--cpus", "6", "--port", "0", "--metrics-port", "0")
    wait_for(lambda: service.has_said("serving at"), 120)
    address = re.search(r"metrics at http://(\S+)/metrics", service.said())[1]
    scraped = [{"job_name": "dlrover-rl", "static_configs": [{"targets": [address]}]}]
    scraped.append({"job_name": "dlrover-rl-jobs", "http_sd_configs": [{"url": f"http://{address}/sd"}]})
    scraped[1]["http_sd_configs"][0]["refresh_interval"] = every
    server = (tmp_path / ".dlrover-rl/service/address").read_text().strip()

    def enqueue(name, **settings):
        settings |= {"rollout": "Sampler", "master": {"metrics_port": 0, "max_restart": 0}}
        (tmp_path / f"{name}.yaml").write_text(toy_text(tmp_path / name, name=name, **settings))
        desk.run("enqueue", f"{name}.yaml", DLROVER_RL_SERVER=server)

    with contextlib.closing(Prometheus(tmp_path, tools, scraped, every)) as prometheus:
        enqueue("fails", faults=["ACTOR-0:update:3:error"])
        wait_for(lambda: ("JobFailed", "fails") in prometheus.alerts(), 120)
        enqueue("endless", steps=10**6, step_s=0.1, roles={"actor": 1, "rollout": 1}, devices=3)
        wait_for(lambda: (prometheus.value('rl_job_step{job_name="endless"}') or 0) > 3, 120)
        assert prometheus.alerts() == {("JobFailed", "fails")}
        for _, expression in expressions():
            prometheus.value(expression.replace("$job", ".*"))  # an HTTPError if Prometheus does not accept it
        assert prometheus.value('rl_job_step{owner=~".+"}') > 3
        desk.run("resize", "endless", "rollout", "2", DLROVER_RL_SERVER=server)
        *_, (_, resizes) = expressions()
        wait_for(lambda: (prometheus.value(resizes.replace("$job", ".*")) or 0) > 0, 60)
        wait_for(lambda: prometheus.value('rl_job_members{role="ROLLOUT"}') == 2, 60)
        assert prometheus.value('rl_service_jobs_ended_total{phase="failed"}') == 1

        def is_reported():
            kill_masters(service)
            return ("MasterDown", "endless") in prometheus.alerts()

        wait_for(is_reported, 240)
        wait_for(lambda: kill_masters(service) or ("JobFailed", "endless") in prometheus.alerts(), 180)
