# SPDX-License-Identifier: Apache-2.0
"""Commands in separate processes, and the process table."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "dlrover.python.rl.cli"]
_DEADLINE_S = 120.0


def environment(**more):
    """Return the environment of a command, which finds the package and the tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path.cwd())]), **more}


def run(folder, *command, code=0, within_s=250.0, typed=None, **env):
    """Run a command in ``folder``, which must end with this exit code; None: with any. Return what it has left."""
    options = {"cwd": folder, "env": environment(**{"OMP_NUM_THREADS": "1", **env}), "input": typed}
    command = list(map(str, command))
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False, **options)
    assert code in (done.returncode, None), done.stdout[-4000:] + done.stderr[-4000:]
    return done


def run_here(monkeypatch, capfd, *arguments):
    """Run ``dlrover-rl`` in this process; return its exit code, output and errors."""
    from dlrover.python.rl.cli.commands import main

    monkeypatch.setattr(sys, "argv", ["dlrover-rl", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code or 0
    return code, *capfd.readouterr()


def run_python(folder, *arguments, **options):
    """Run Python likewise."""
    return run(folder, sys.executable, *arguments, **options)


@contextmanager
def serve_page(folder):
    """Serve the runs in ``folder``, as ``dlrover-rl view`` does; yield the address and the id of the process."""
    command = [*CLI, "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = server.stderr.readline()
            assert line.startswith("http://"), line + server.stderr.read()
            yield line.split()[0], server.pid
        finally:
            server.terminate()


def debian_programs(folder, package, *programs):
    """Return the folder of these programs: of this machine, or unpacked from Debian's package; None without either."""
    if all(map(shutil.which, programs)):
        return Path(shutil.which(programs[0])).parent
    if not shutil.which("apt-get"):
        return None
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True, timeout=120)
    (file,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", file, folder / "root"], check=True, timeout=60)
    return folder / "root/usr/bin"


class Command(subprocess.Popen):
    """A command in a separate session, as in a terminal: Ctrl-C reaches the whole foreground group."""

    def __init__(self, arguments, output, cwd, **env):
        self.output = output
        with output.open("w") as log:
            super().__init__(
                arguments, cwd=cwd, env=environment(**env), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __exit__(self, *error):
        self.kill()
        super().__exit__(*error)

    def said(self):
        return self.output.read_text()

    def has_said(self, text):
        """Return True if ``text`` is in the output, or the command has ended."""
        return text in self.said() or self.poll() is not None

    def end(self, code=0, within_s=_DEADLINE_S):
        """Wait for the end, which must have this exit code, and return the output."""
        self.wait(within_s)
        assert self.returncode == code, self.said()
        return self.said()

    def interrupt(self):
        os.killpg(self.pid, signal.SIGINT)


class Desk:
    """A working directory in which commands are typed, with variables and the address of a cluster for all of them."""

    def __init__(self, folder, address="", **env):
        self.folder, self.env, self.commands, self.address = folder, env, [], address

    def start(self, *arguments, **env):
        output = self.folder / f"output-{len(self.commands)}.txt"
        options = ["--address", self.address] if self.address else []
        command = Command([*CLI, *arguments, *options], output, self.folder, **{**self.env, **env})
        self.commands.append(command)
        return command

    def run(self, *arguments, code=0, within_s=_DEADLINE_S, **env):
        return self.start(*arguments, **env).end(code, within_s)

    def status(self, name):
        return json.loads(self.run("status", name, "--json"))

    def detach(self, name, text, *overrides):
        """Start the job of a file's text, and return once it has done two steps."""
        (self.folder / f"{name}.yaml").write_text(text)
        self.run("run", f"{name}.yaml", "--detach", *overrides)
        wait_for(lambda: self.status(name)["step"] > 2)

    def kill_all(self):
        for command in self.commands:
            command.kill()
            command.wait(_DEADLINE_S)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for command in self.commands:
            command.terminate()
            command.wait(_DEADLINE_S)


def wait_for(reached, within_s=_DEADLINE_S):
    """Wait until ``reached()`` is true, and return what it gave."""
    deadline_s = time.monotonic() + within_s
    while not (outcome := reached()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s"
        time.sleep(0.02)
    return outcome


def kill_processes(pids):
    """Kill these processes; some may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def answers(address):
    """Return True if there is a listener at ``host:port``."""
    host, _, port = address.rpartition(":")
    with closing(socket.socket()) as probe:
        return probe.connect_ex((host, int(port))) == 0


def say(line):
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def process_table():
    """Return the command line of every process."""
    processes = psutil.process_iter(["cmdline"])
    return {process.pid: " ".join(process.info["cmdline"] or ()).strip() for process in processes}


def processes_below(pid):
    """Return the command lines of all descendants of a process."""
    with suppress(psutil.NoSuchProcess):
        return {child.pid: command_of(child.pid) for child in psutil.Process(pid).children(recursive=True)}
    return {}


def command_of(pid):
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline()).strip()
    return ""


def is_alive(pid: int) -> bool:
    """Return True if a process exists that is no zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def listening(pids):
    """The addresses that processes listen at, as ``address:port``."""
    sockets = []
    for pid in pids:
        with suppress(psutil.Error):
            sockets += psutil.Process(pid).net_connections("tcp")
    return {f"{each.laddr.ip}:{each.laddr.port}" for each in sockets if each.status == psutil.CONN_LISTEN}
