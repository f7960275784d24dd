# SPDX-License-Identifier: Apache-2.0
"""A service in a separate process, with jobs in memory: ``python served.py '{"folder": ...}'`` prints its port."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

WITHIN_S = 20.0

JOB = """
trainer: {module: some_module, class: Trainer, device_type: CPU, device_per_node: 3}
workload:
  actor: {module: some_module, class: Actor}
  rollout: {module: some_module, class: Rollout, num: 2}
"""


async def serve(
    folder, port=0, steps=3, step_s=0.01, cpus=16.0, limits=None, is_open=False, tls=None, results="", failures=10,
    off=(), reads_in="thread", open_files=None,
):  # fmt: skip
    """``off``: names of modules, and what takes the place of a guard there; ``open_files``: soft and hard limit."""
    if open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(open_files))
    from dlrover.python.rl.service.auth import TokenFile
    from dlrover.python.rl.service.jobs import submissions
    from dlrover.python.rl.service.jobs.ledger import QueueLimits
    from dlrover.python.rl.service.jobs.records import JobPhase, Observed
    from dlrover.python.rl.service.jobs.store import SqliteJobStore
    from dlrover.python.rl.service.jobs.submissions import SubmissionReader
    from dlrover.python.rl.service.manager import JobManager
    from dlrover.python.rl.service.runner import MemoryRunner
    from dlrover.python.rl.service.server import FailureLimit, JobServer, TlsFiles

    for module, name, value in off:
        setattr(import_module(f"dlrover.python.rl.service.{module}"), name, value)

    class Runner(MemoryRunner):
        def run(self, record, description):
            with open(Path(folder) / "begun", "a") as starts:
                starts.write(f"{record.run} {os.getpid()}\n")
            if results:
                self._sink(Observed(record.name, record.run, JobPhase.RUNNING, results=results))
            else:
                super().run(record, description)

    state = Path(folder) / "state"
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    runner = Runner(steps, step_s, cpus)
    manager = JobManager(SqliteJobStore(state), runner, QueueLimits(**(limits or {})))
    await manager.start()
    files = TlsFiles(*(Path(path) if path else None for path in tls)) if tls else None
    tokens = None if is_open else TokenFile(state)
    reader = SubmissionReader(getattr(submissions, f"in_a_{reads_in}"))
    server = JobServer(manager, tokens, Path(folder), files, FailureLimit(failures), reader)
    print(await server.start(f"127.0.0.1:{port}"), flush=True)  # noqa: T201 -- for who started it
    await ending.wait()
    await server.close(0.1)
    await manager.close()


class Service:
    """Started, ended and killed as often as wanted, on one port."""

    def __init__(self, folder, **options):
        from dlrover.python.rl.service.auth import prepare

        self.folder, self.options, self.port = folder, options, 0
        prepare(folder / "state")

    def start(self):
        options = {**self.options, "folder": str(self.folder), "port": self.port}
        command = [sys.executable, "-X", "faulthandler", __file__, json.dumps(options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line, "the service did not start"
        self.port = int(line)

    def stop(self):
        self.process.terminate()
        assert (code := self.process.wait(WITHIN_S)) == 0, code
        self.process.stdout.close()

    def kill(self):
        self.process.kill()
        self.process.wait(WITHIN_S)
        self.process.stdout.close()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def token(self):
        from dlrover.python.rl.common.private_files import read_token

        return read_token(self.folder / "state" / "token")

    def client(self, token=None, patience_s=0.0, **options):
        from dlrover.python.rl.service.client import ServiceClient

        return ServiceClient(self.address, token or self.token, patience_s=patience_s, **options)

    def token_of(self, name, role):
        from dlrover.python.rl.common.private_files import read_token
        from dlrover.python.rl.service.auth import add_token

        return read_token(add_token(self.folder / "state", name, role, self.folder / f"{name}.token"))

    def begun(self):
        """The runs that were begun, and re-begun in a later life of a service whose jobs end with it."""
        return [line.split()[0] for line in (self.folder / "begun").read_text().splitlines()]


def idle_connections(service, count):
    return [socket.create_connection(("127.0.0.1", service.port), timeout=WITHIN_S) for _ in range(count)]


def close_idle(connections):
    """Wait until the service has closed them; raises TimeoutError."""
    for connection in connections:
        with suppress(ConnectionResetError), connection:
            while connection.recv(4096):
                pass


@contextmanager
def serving(folder, **options):
    service = Service(folder, **options)
    service.start()
    try:
        yield service
    finally:
        service.stop()


def until(condition, within_s=WITHIN_S):
    from tests.support.commands import wait_for

    wait_for(condition, within_s)


if __name__ == "__main__":
    asyncio.run(serve(**json.loads(sys.argv[1])))
