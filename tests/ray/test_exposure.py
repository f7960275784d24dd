# SPDX-License-Identifier: Apache-2.0
"""Nothing listens beyond loopback unless the user asks for it: the sockets of a service with its Ray, and of a job."""

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from test_cli_on_ray import CLI, descendants, environment

from dlrover.python.rl.common.sockets import machine_addresses
from dlrover.python.rl.runtime.ray.cluster.health import find_risk
from tests.ray import exposed_jobs
from tests.ray.durable_jobs import wait_for
from tests.ray.service_jobs import job_text
from tests.support.processes import free_port

pytestmark = pytest.mark.ray

LISTEN = "0A"


def listening(pids):
    """The addresses that processes listen at, as ``address:port``, from the kernel's tables."""
    rows = {}
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTEN:
                rows[inode] = family, local
    return {readable(*rows[inode]) for pid in pids for inode in sockets_of(pid) if inode in rows}


def sockets_of(pid):
    """The inodes of a process's sockets."""
    links = []
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(entry))
    return [link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")]


def readable(family, local):
    address, _, port = local.partition(":")
    size = 4 if family == socket.AF_INET else 16
    words = bytes.fromhex(address)
    plain = b"".join(words[at : at + 4][::-1] for at in range(0, size, 4))
    return f"{socket.inet_ntop(family, plain)}:{int(port, 16)}"


def beyond_loopback(addresses):
    return {each for each in addresses if not each.startswith(("127.", "::1:", "::ffff:127."))}


@contextmanager
def started(folder, *arguments):
    with open(folder / "output", "w") as log:
        process = subprocess.Popen(
            [*CLI, *arguments],
            cwd=folder,
            env={**environment(), "HOME": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def test_the_sockets_of_a_service_its_ray_and_its_job_are_on_loopback(tmp_path):
    (tmp_path / "job.yaml").write_text(job_text(tmp_path / "notes", 10**6, 0.1))
    (tmp_path / "root").mkdir()
    with started(tmp_path, "serve", "--root", "root", "--cpus", "6", "--port", "0", "--metrics-port", "0") as service:
        state = tmp_path / ".dlrover-rl/service"
        wait_for((state / "address").exists, 60)
        server = (state / "address").read_text().strip()
        environ = {**environment(), "HOME": str(tmp_path), "DLROVER_RL_SERVER": server}
        subprocess.run([*CLI, "enqueue", "job.yaml"], cwd=tmp_path, env=environ, check=True, timeout=60)
        wait_for((tmp_path / "notes").exists, 60)
        addresses = listening([service.pid, *descendants(service.pid)])
        assert {server, server.replace("127.", "::ffff:127.", 1)} & addresses and len(addresses) > 5
        assert beyond_loopback(addresses) == set()
        (token,) = [path for path in state.iterdir() if path.name == "token"]
        assert (state.stat().st_mode & 0o777, token.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.slow
def test_the_process_group_and_the_weight_sync_of_a_job_are_on_loopback(tmp_path):
    port = free_port()
    (tmp_path / "job.yaml").write_text(exposed_jobs.job_text(tmp_path / "notes", port))
    with started(tmp_path, "run", "job.yaml") as job:
        wait_for((tmp_path / "notes").exists, 120)
        addresses = listening([job.pid, *descendants(job.pid)])
    ports = (tmp_path / "notes").read_text().split()
    assert ports[0] == str(port)
    stores = {f"127.0.0.1:{port}" for port in ports}
    assert len(stores) == 2 and stores <= addresses
    assert beyond_loopback(addresses) == set()


def test_a_socket_beyond_loopback_would_be_seen():
    with socket.create_server(("0.0.0.0", 0)) as server:
        exposed = beyond_loopback(listening([os.getpid()]))
        assert f"0.0.0.0:{server.getsockname()[1]}" in exposed


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_beyond_loopback_without_a_certificate_nothing_starts(tmp_path, host):
    with started(tmp_path, "serve", "--host", host, "--port", "0", "--dry-run") as service:
        assert service.wait(30) == 2
    assert "add --tls-cert and --tls-key" in (tmp_path / "output").read_text()


@pytest.mark.skipif(not machine_addresses(), reason="this machine has loopback only")
@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_cluster_beyond_loopback_is_a_risk_unless_it_asks_for_a_token(tmp_path, mode):
    port = free_port()
    options = [f"--port={port}", "--num-cpus=0", "--include-dashboard=false", "--disable-usage-stats", "--block"]
    # Where this process itself has started a cluster, Ray is to stay on loopback.
    environ = {**environment(), "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "0" * 64}
    environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, (tmp_path / "output").open("w") as log:
        command = [Path(sys.executable).with_name("ray"), "start", "--head", f"--temp-dir={folder}", *options]
        head = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            gcs = f"{machine_addresses()[0]}:{port}"
            wait_for(lambda: is_open(gcs), 60)
            risk = find_risk(f"127.0.0.1:{port}", "")
            assert risk == find_risk(gcs, "") and ("runs code" in risk) == (mode == "disabled")
        finally:
            head.terminate()
            head.wait(60)


def is_open(address):
    with suppress(OSError):
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()
        return True
    return False
