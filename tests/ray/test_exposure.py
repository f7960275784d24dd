# SPDX-License-Identifier: Apache-2.0
"""Nothing listens beyond loopback unless somebody asks for it: the sockets of a service with its Ray, and of a job."""

import os
import socket
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import ray
from durable_jobs import wait_for
from service_jobs import job_text
from test_cli_on_ray import CLI, descendants, environment

from dlrover.python.rl.runtime.ray.cluster import cluster

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
    with open(folder / "said", "w") as said:
        process = subprocess.Popen(
            [*CLI, *arguments],
            cwd=folder,
            env={**environment(), "HOME": str(folder)},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def test_the_sockets_of_a_service_its_ray_and_its_job_are_on_loopback(tmp_path):
    (tmp_path / "job.yaml").write_text(job_text(tmp_path / "notes", 10**6, 0.1))
    with started(tmp_path, "serve", "--cpus", "6", "--port", "0", "--metrics-port", "0") as service:
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


def test_a_socket_beyond_loopback_would_be_seen():
    with socket.create_server(("0.0.0.0", 0)) as server:
        found = beyond_loopback(listening([os.getpid()]))
        assert f"0.0.0.0:{server.getsockname()[1]}" in found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_beyond_loopback_without_a_certificate_nothing_starts(tmp_path, host):
    with started(tmp_path, "serve", "--host", host, "--port", "0", "--dry-run") as service:
        assert service.wait(30) == 2
    assert "add --tls-cert and --tls-key" in (tmp_path / "said").read_text()


class Context:
    gcs_address = "10.1.2.3:6379"


def test_a_cluster_beyond_loopback_that_asks_for_no_token_is_a_risk(monkeypatch):
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "whoever reaches its ports runs code" in cluster.risk_of_open_ray()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert cluster.risk_of_open_ray() == ""
    monkeypatch.setattr(Context, "gcs_address", "127.0.0.1:6379")
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert cluster.risk_of_open_ray() == ""
