# SPDX-License-Identifier: Apache-2.0
"""The RayJob of ``init --cluster kuberay`` runs as written in the environment of the core's image.

A pod is a network namespace of this machine with separate mounts. Its commands and probes are those that KubeRay's
operator writes for the manifest: version 1.7, ``ray-operator/controllers/ray/common/pod.go`` and ``job.go``.
"""

import os
import re
import secrets
import shutil
from types import SimpleNamespace

import pytest
import yaml

from dlrover.python.rl.cli.begin import write_skeleton
from tests.chaos import hosts
from tests.support.commands import wait_for
from tests.support.image import DOCKERFILE, image_environment
from tests.support.run_files import steps_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not hosts.has_namespaces(), reason="no network namespaces can be made here"),
]

UNITS = {"Gi": 2**30, "Ti": 2**40}
OPTIONS_WITH_A_VALUE = ("log-color", "include-dashboard", "include-log-monitor")
AGENT, DASHBOARD = 52365, 8265
HEALTHY = "import urllib.request; r=urllib.request.urlopen('{}', timeout=10); exit(0 if b'success' in r.read() else 1)"


def start_command(group, address=None):
    """Return ``ray start`` as the operator writes it for a group of pods; ``address``: of the head, for workers."""
    resources = group["template"]["spec"]["containers"][0]["resources"]
    memory = re.fullmatch(r"(\d+)(\w+)", resources["limits"]["memory"])
    added = {"address": f"{address}:6379"} if address else {"dashboard-host": "0.0.0.0"}
    added |= {"num-cpus": resources["requests"]["cpu"], "memory": int(memory[1]) * UNITS[memory[2]]}
    added |= {"metrics-export-port": 8080, "dashboard-agent-listen-port": AGENT}
    options = {**added, **group["rayStartParams"], "block": "true"}
    flags = [
        f"--{name}" if value == "true" and name not in OPTIONS_WITH_A_VALUE else f"--{name}={value}"
        for name, value in sorted(options.items())
    ]
    return f"ulimit -n 65536; ray start {'' if address else '--head '}{' '.join(flags)}"


def submit_command(address, job_id, entrypoint):
    """Return what the submitter's pod runs."""
    where = f"--address {address}"
    return (
        f'until python -c "{HEALTHY.format(f"{address}/api/gcs_healthz")}" >/dev/null 2>&1 ; do sleep 2 ; done ; '
        f"if ! ray job status {where} {job_id} >/dev/null 2>&1 ; then "
        f"ray job submit {where} --no-wait --submission-id {job_id} -- {entrypoint} ; fi ; "
        f"ray job logs {where} --follow {job_id} ; ray job status {where} {job_id}"
    )


class Pod:
    """A container of the image in a network namespace."""

    def __init__(self, host, home, folder, token):
        self.host, self.log, self.address = host, folder / f"pod-{host.number}.log", host.address
        # As the operator's authOptions; Ray finds its address by the default route, which no packet takes here.
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_TMPDIR": hosts.temporary()}
        self.env |= {"HOME": str(folder), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""}
        self.env |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        hosts.ip("-n", host.namespace, "route", "add", "default", "dev", "eth0")
        # A login shell reads the image's file.
        assert self.run("mount", "--bind", str(folder / "profile.d"), "/etc/profile.d") == 0

    def start(self, *command):
        process = self.host.start(*command, log=self.log, **self.env)
        self.host.processes.append(process)
        return process

    def run(self, *command, within_s=200):
        return self.start(*command).wait(timeout=within_s)

    def answers(self, url):
        """Ask as the kubelet does: each status below 400 is a success."""
        return self.run("python", "-c", f"import urllib.request; urllib.request.urlopen('{url}', timeout=10)") == 0

    def said(self):
        return self.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    """The pods of the head, a worker, and the submitter, and the RayJob's spec, on one volume."""
    folder = tmp_path_factory.mktemp("kuberay")
    home = image_environment(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        skeleton = write_skeleton("first", "kuberay").absolute()
    work = folder / "work"
    (work / "runs").mkdir(parents=True)
    shutil.copytree(skeleton / "base/files", work / "job")
    for file in (work / "job/job.yaml", skeleton / "base/job.yaml"):
        file.write_text(file.read_text().replace("/work/", f"{work}/"))
    (line,) = re.findall(r"echo '(PATH=.*)' > /etc/profile.d/dlrover-rl.sh", DOCKERFILE.read_text())
    (folder / "profile.d").mkdir()
    (folder / "profile.d/dlrover-rl.sh").write_text(line.replace("/opt/dlrover-rl", str(home)))
    spec = yaml.safe_load((skeleton / "base/job.yaml").read_text())["spec"]
    token = secrets.token_hex(32)
    with hosts.hosts(3) as machines:
        head, worker, submitter = (Pod(machine, home, folder, token) for machine in machines)
        yield SimpleNamespace(head=head, worker=worker, submitter=submitter, spec=spec, work=work, skeleton=skeleton)


def test_rayjob_runs_as_it_is_written(pods):
    head, worker, submitter, spec = pods.head, pods.worker, pods.submitter, pods.spec
    cluster, dashboard = spec["rayClusterSpec"], f"http://{head.address}:{DASHBOARD}"
    (workers,) = cluster["workerGroupSpecs"]
    groups = {head: cluster["headGroupSpec"], worker: workers}
    service = next(yaml.safe_load_all((pods.skeleton / "service/cluster.yaml").read_text()))["spec"]
    assert service["headGroupSpec"]["rayStartParams"] == groups[head]["rayStartParams"]
    probes = [
        f"http://{pod.address}:{probe['port']}{probe['path']}"
        for pod, group in groups.items()
        for kind in ("readinessProbe", "livenessProbe")
        for probe in [group["template"]["spec"]["containers"][0][kind]["httpGet"]]
    ]
    assert not any(map(submitter.answers, probes))

    head.start("bash", "-c", "--", start_command(groups[head]))
    wait_for(lambda: worker.run("ray", "health-check", f"--address={head.address}:6379") == 0)
    worker.start("bash", "-c", "--", start_command(groups[worker], head.address))
    for url in probes:
        wait_for(lambda url=url: submitter.answers(url))
    # What the operator asks where a manifest has no probes, and Ray is older than 2.53.
    for pod in groups:
        assert pod.run("python", "-c", HEALTHY.format(f"http://localhost:{AGENT}/api/local_raylet_healthz")) == 0
    assert head.run("python", "-c", HEALTHY.format(f"http://localhost:{DASHBOARD}/api/gcs_healthz")) == 0

    command = submit_command(dashboard, "first-x7k2p", spec["entrypoint"].strip())
    assert submitter.run("bash", "-ce", "--", command, within_s=300) == 0, submitter.said() + head.said()
    assert "Job 'first-x7k2p' submitted successfully" in submitter.said()
    assert "Job 'first-x7k2p' succeeded" in submitter.said()
    assert len(steps_of(pods.work / "runs/first")) == 20
