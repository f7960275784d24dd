# SPDX-License-Identifier: Apache-2.0
"""A job over several hosts, of which one is cut off, one is killed, and one joins: ``python -m tests.chaos.hosts``.

::

    network namespaces h0 h1 h2 (h3)  --veth-->  bridge in a separate namespace
    head.sh in h0, worker.sh in the others, started again when they end; dlrover-rl run in h0

Each host has a loopback interface and one to the others, its own shared memory and folder for Ray, and nothing
leads out. They share the other files, as hosts with a network disk. This process knows the command line, the process
table and the cables.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import dlrover.python.rl.cli
from tests.chaos.outside import REPOSITORY, digests, prepare
from tests.support.commands import CLI, command_of, kill_processes, say

_PREFIX = f"dlrl{os.getpid()}"
_SWITCH = f"{_PREFIX}sw"
_PORT = 6379
_CPUS = 4  # of a host and a node of the plan: no host has room for both nodes, and the head for neither
_CPUS_OF_HEAD = 2  # for the master and the trainer
_LIMIT_S = 900.0
_START_S = 10.0
_LAYOUT = ["trainer.node_number=2", f"trainer.device_per_node={_CPUS}"]
_LAYOUT += ["workload.actor.num=2", "workload.reference.num=2", "workload.rollout.num=4"]
_SCRIPTS = Path(dlrover.python.rl.cli.__path__[0], "skeleton", "ray")
_AGAIN = 'while :; do "$0" "$@"; sleep 2; done'  # as a supervisor such as systemd does


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


def has_namespaces() -> bool:
    """Return True if this machine lets a process make network namespaces and cables between them."""
    if shutil.which("ip") is None:
        return False
    try:
        ip("netns", "add", f"{_PREFIX}try")
        ip("netns", "delete", f"{_PREFIX}try")
    except (subprocess.SubprocessError, OSError):
        return False
    return True


@dataclass
class Host:
    """A network namespace with one cable to the switch, its own mounts, and the processes in it."""

    number: int
    pid: int = 0  # of a process that keeps the mounts
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return f"{_PREFIX}h{self.number}"

    @property
    def cable(self) -> str:
        return f"{_PREFIX[-8:]}c{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{10 + self.number}"

    def build(self) -> None:
        ip("netns", "add", self.namespace)
        ip("-n", self.namespace, "link", "set", "lo", "up")
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        ip("link", "set", self.cable, "netns", _SWITCH)
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.namespace, "link", "set", "eth0", "up")
        ip("-n", _SWITCH, "link", "set", self.cable, "master", "br0", "up")

        mounts = f"mount -t tmpfs none /dev/shm && mount -t tmpfs none {temporary()} && echo && exec sleep infinity"
        holder = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "sh", "-c", mounts], stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        with holder.stdout as lines:
            assert lines.readline() == b"\n", "no mounts"
        self.pid = holder.pid
        self.processes.append(holder)

    def start(self, *command: str, log: Path, **env: str) -> "subprocess.Popen[bytes]":
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "env", f"--chdir={log.parent}"]
        env = {**os.environ, **env, "OMP_NUM_THREADS": "1"}
        with log.open("ab") as output:
            pipes = {"stdout": output, "stderr": subprocess.STDOUT}
            return subprocess.Popen([*enter, *command], env=env, start_new_session=True, **pipes)

    def join(self, head: "Host", folder: Path) -> None:
        """Start Ray's node of this host with the scripts that ``dlrover-rl init`` writes."""
        if self is head:
            command = ["head.sh", self.address, f"--num-cpus={_CPUS_OF_HEAD}", f"--temp-dir={temporary()}"]
        else:
            command = ["worker.sh", head.address, self.address, f"--num-cpus={_CPUS}"]
        shell = ["bash", "-c", _AGAIN, str(_SCRIPTS / command[0]), *command[1:]]
        env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "STATE_DIR": f"{temporary()}/tables"}
        checks = {"period_ms": "500", "timeout_ms": "700", "failure_threshold": "3"}  # a lost host is seen soon
        env |= {f"RAY_health_check_{name}": value for name, value in checks.items()}
        self.processes.append(self.start(*shell, log=folder / f"host-{self.number}.log", **env))

    def pids(self) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, timeout=30)
        return [int(pid) for pid in done.stdout.split()]

    def has(self, program: str) -> bool:
        return any(program in command_of(pid) for pid in self.pids())

    def end(self) -> None:
        """Kill all of its processes; first those that start others again."""
        for process in self.processes:
            process.kill()
            process.wait(timeout=10)
        kill_processes(self.pids())

    def cut_off(self) -> None:
        ip("-n", _SWITCH, "link", "set", self.cable, "down")

    def heal(self) -> None:
        ip("-n", _SWITCH, "link", "set", self.cable, "up")

    def kill(self) -> None:
        """Cut the host's power: its processes send nothing any more."""
        self.cut_off()
        self.end()


def temporary() -> str:
    return f"/tmp/{_PREFIX}"


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    hosts = [Host(number) for number in range(count)]
    ip("netns", "add", _SWITCH)
    os.mkdir(temporary())
    try:
        ip("-n", _SWITCH, "link", "add", "br0", "type", "bridge")
        ip("-n", _SWITCH, "link", "set", "br0", "up")
        for host in hosts:
            host.build()
        yield hosts
    finally:
        for host in hosts:
            host.end()
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, timeout=30, check=False)
        subprocess.run(["ip", "netns", "delete", _SWITCH], capture_output=True, timeout=30, check=False)
        os.rmdir(temporary())


def wait_until(condition: Callable[[], object], event: str, driver: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while not condition():
        if driver.poll() is not None or time.monotonic() > deadline_s:
            raise AssertionError(f"{event} did not come:\n{log.read_text(errors='replace')[-6000:]}")
        time.sleep(0.3)


def run(folder: Path, steps: int, disturbed: bool) -> int:
    """The demo job over three hosts; its exit code. ``disturbed``: one is cut off, one killed, one heals, one joins."""
    out, log = folder / ("disturbed" if disturbed else "undisturbed"), folder / f"run-{disturbed}.log"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(16).hex()}
    with patch.dict(os.environ, token), hosts(4) as (head, second, third, fourth):
        head.join(head, folder)
        for host in (second, third):
            host.join(head, folder)
        job = str(REPOSITORY / "examples/arithmetic/grpo.yaml")
        command = [*CLI, "run", job, "--address", f"{head.address}:{_PORT}", f"steps={steps}", f"job_dir={out}"]
        time.sleep(_START_S)
        driver = head.start(*command, *_LAYOUT, log=log)

        def reach(step: int) -> None:
            wait_until(lambda: steps_of(out) >= step, f"step {step}", driver, log)

        def wait_for_members(*wanted: Host) -> None:
            wait_until(lambda: all(host.has("Workload") for host in wanted), f"workers on {wanted}", driver, log)

        reach(1)
        wait_for_members(second, third)
        if disturbed:
            reach(steps // 8)
            say(f"cutting off host {third.number}; host {fourth.number} joins")
            third.cut_off()
            fourth.join(head, folder)
            wait_for_members(second, fourth)
            reach(steps // 3)
            victim, other = (second, fourth) if second.has("ActorWorkload") else (fourth, second)
            say(f"host {third.number} heals; killing host {victim.number}, which has the actor")
            third.heal()
            victim.kill()
            wait_for_members(other, third)
        return driver.wait(timeout=_LIMIT_S)


def steps_of(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 unless the disturbed run has ended in the undisturbed bits."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.hosts", description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "hosts")
    options = parser.parse_args(argv)
    if not has_namespaces():
        say("no network namespaces can be made here: nodes on one address are what python -m tests.chaos.run has")
        return 2
    folder = (options.out / time.strftime("%Y%m%d-%H%M%S")).resolve()
    prepare(folder)
    codes = [run(folder, options.steps, disturbed) for disturbed in (False, True)]
    sums = [digests(folder / name) for name in ("undisturbed", "disturbed")]
    same = codes == [0, 0] and sums[0] == sums[1]
    say(f"{'the undisturbed bits' if same else 'WRONG'}: exit codes {codes}; kept in {folder}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
