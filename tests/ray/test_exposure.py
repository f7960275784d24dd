# SPDX-License-Identifier: Apache-2.0
"""Nothing listens beyond loopback unless the user asks for it: the sockets of a service with its Ray, and of a job."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dlrover.python.rl.common.sockets import machine_addresses
from dlrover.python.rl.runtime.ray.cluster.health import find_risk
from tests.support.commands import Desk, answers, listening, processes_below, wait_for
from tests.support.processes import free_port
from tests.support.toy_job import toy_text

pytestmark = pytest.mark.ray


def beyond_loopback(addresses):
    return {each for each in addresses if not each.startswith(("127.", "::1:", "::ffff:127."))}


@pytest.fixture
def desk(tmp_path):
    with Desk(tmp_path, HOME=str(tmp_path)) as desk:
        yield desk


def test_service_its_ray_and_its_job_listen_on_loopback(desk, tmp_path):
    (tmp_path / "job.yaml").write_text(toy_text(tmp_path / "notes", steps=10**6, step_s=0.1))
    (tmp_path / "root").mkdir()
    service = desk.start("serve", "--root", "root", "--cpus", "6", "--port", "0", "--metrics-port", "0")
    state = tmp_path / ".dlrover-rl/service"
    wait_for((state / "address").exists, 60)
    server = (state / "address").read_text().strip()
    desk.run("enqueue", "job.yaml", DLROVER_RL_SERVER=server)
    wait_for((tmp_path / "notes/starts").exists, 120)
    addresses = listening([service.pid, *processes_below(service.pid)])
    assert {server, server.replace("127.", "::ffff:127.", 1)} & addresses and len(addresses) > 5
    assert beyond_loopback(addresses) == set()
    (token,) = [path for path in state.iterdir() if path.name == "token"]
    assert (state.stat().st_mode & 0o777, token.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.slow
def test_process_group_and_weight_sync_listen_on_loopback(desk, tmp_path):
    port, notes = free_port(), tmp_path / "notes"
    faults = ["trainer:end:1:hold"]
    text = toy_text(notes, {"actor": 2}, "Meeting", "Ranked", steps=1, faults=faults)
    (tmp_path / "job.yaml").write_text(text.replace("trainer:\n", f"trainer:\n  torch_master_port: [{port}]\n"))
    job = desk.start("run", "job.yaml")
    wait_for(lambda: (notes / "ports").exists() or job.poll() is not None)
    assert job.poll() is None, job.said()
    addresses = listening([job.pid, *processes_below(job.pid)])
    ports = (notes / "ports").read_text().split()
    assert ports[0] == str(port)
    stores = {f"127.0.0.1:{port}" for port in ports}
    assert len(stores) == 2 and stores <= addresses
    assert beyond_loopback(addresses) == set()


def test_listening_sees_a_socket_beyond_loopback():
    with socket.create_server(("0.0.0.0", 0)) as server:
        exposed = beyond_loopback(listening([os.getpid()]))
        assert f"0.0.0.0:{server.getsockname()[1]}" in exposed


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_serve_beyond_loopback_without_a_certificate_is_refused(desk, host):
    output = desk.run("serve", "--host", host, "--port", "0", "--dry-run", code=2)
    assert "add --tls-cert and --tls-key" in output


@pytest.mark.skipif(not machine_addresses(), reason="this machine has loopback only")
@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_cluster_beyond_loopback_without_a_token_is_a_risk(tmp_path, mode):
    port = free_port()
    options = [f"--port={port}", "--num-cpus=0", "--include-dashboard=false", "--disable-usage-stats", "--block"]
    # Where this process itself has started a cluster, Ray is to stay on loopback.
    environ = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "0" * 64}
    environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, (tmp_path / "output").open("w") as log:
        command = [Path(sys.executable).with_name("ray"), "start", "--head", f"--temp-dir={folder}", *options]
        head = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            gcs = f"{machine_addresses()[0]}:{port}"
            wait_for(lambda: answers(gcs), 60)
            risk = find_risk(f"127.0.0.1:{port}", "")
            assert risk == find_risk(gcs, "") and ("can run code" in risk) == (mode == "disabled")
        finally:
            head.terminate()
            head.wait(60)
