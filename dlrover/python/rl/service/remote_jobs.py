# SPDX-License-Identifier: Apache-2.0
"""The jobs of a service, for the verbs of the command line."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from pathlib import Path

from dlrover.python.rl.master.client.jobs import SHARED_FIELDS, JobHistory, JobOperations, JobView, log_of
from dlrover.python.rl.master.process.status import RunningProcess
from dlrover.python.rl.runtime.run.files import LOGS, SUFFIX
from dlrover.python.rl.service.client import ClientTls, ServiceClient
from dlrover.python.rl.service.messages import phase_of
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire
from dlrover.python.rl.trainer.trainer import Announcer, Reporter, StepReport

_FAILURES = ("recovered", "restarted", "failed")
_STOP_S = 60.0
_PATIENCE_S = 10.0


def tls_of_environment() -> ClientTls | None:
    """``DLROVER_RL_TLS_CA``, and a client's own ``DLROVER_RL_TLS_CERT`` and ``DLROVER_RL_TLS_KEY``."""
    named = [os.environ.get(f"DLROVER_RL_TLS_{name}") for name in ("CA", "CERT", "KEY")]
    ca, certificate, key = [Path(path) if path else None for path in named]
    return ClientTls(ca, certificate, key) if ca else None


def connected(address: str) -> ServiceClient:
    """For commands, which give up soon."""
    return ServiceClient(address, tls=tls_of_environment(), patience_s=_PATIENCE_S)


@contextmanager
def service_jobs(address: str) -> Iterator[JobOperations]:
    with connected(address) as client:
        yield RemoteJobs(client)


class RemoteJobs:
    def __init__(self, client: ServiceClient) -> None:
        self._client = client

    def list_jobs(self) -> tuple[list[JobView], int]:
        answer = self._client.list_with_count(ended=True)
        return [view_of_message(job) for job in answer.jobs], answer.left_out

    def get(self, name: str) -> JobView:
        return view_of_message(self._client.get(name))

    def history(self, view: JobView) -> JobHistory | None:
        job = self._client.get(view.name)
        since_s, phase, failures = job.submitted_s, wire.PHASE_QUEUED, list[tuple[float, str]]()
        for event in self._client.watch(view.name, follow=False, without_steps=True):
            if event.run != job.run:
                continue
            if event.phase != phase:
                since_s, phase = event.at_s, event.phase
            if event.kind in _FAILURES and event.message:
                failures.append((event.at_s, event.message))
        log = log_of(failures)
        files = {file.path for file in self._client.artifacts(view.name)} if log else set()
        where = f"dlrover-rl logs {view.name} {log}" if f"{LOGS}/{log}{SUFFIX}" in files else ""
        return JobHistory(since_s, tuple(failures), "the service's events", where)

    def attach(self, name: str, report: Reporter, announce: Announcer) -> JobView:
        job = self._client.get(name)
        total = job.total_steps
        for event in self._client.watch(name):
            if event.run != job.run:  # an earlier one of this name
                continue
            if event.kind == "step":
                total = total or self._client.get(name).total_steps
                report(StepReport(event.step, total, dict(event.metrics)))
            else:
                announce(f"{event.kind} {event.message}".strip())
        return self.get(name)

    def wait(self, name: str, timeout_s: float | None) -> JobView:
        return view_of_message(self._client.wait(name, timeout_s))

    def stop(self, name: str, hard: bool) -> JobView:
        self._client.stop(name, hard)
        return view_of_message(self._client.wait(name, _STOP_S))

    def resize(self, name: str, role: str, num: int) -> JobView:
        return view_of_message(self._client.resize(name, role, num))

    def logs(self, name: str, process: str, follow: bool, tail: int) -> Iterator[tuple[str, str]]:
        for chunk in self._client.logs(name, process, follow, tail):
            yield chunk.process, chunk.text


def view_of_message(job: wire.Job) -> JobView:
    phase = phase_of(job)
    until_s = job.ended_s or time.time()
    return JobView(
        phase=phase.value,
        ended=phase.ended,
        reward=job.reward if job.step else nan,
        elapsed_s=until_s - job.started_s if job.started_s else 0.0,
        roles=dict(job.roles),
        recoveries=dict(job.recoveries),
        members=tuple(RunningProcess(each.process, each.node, each.pid, each.devices) for each in job.members),
        **{name: getattr(job, name) for name in (*SHARED_FIELDS, "cause", "detail", "owner")},
    )
