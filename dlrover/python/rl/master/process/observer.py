# SPDX-License-Identifier: Apache-2.0
"""What the master tells of its job: to people who ask, and as metrics over HTTP if the job wants that."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.private_files import read_token
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Event
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.master.process.brain import JOURNAL
from dlrover.python.rl.master.process.status import JobStatus, Position, Update, status_of
from dlrover.python.rl.metrics.endpoint import MetricsEndpoint, tls_context
from dlrover.python.rl.metrics.job import JobMetrics
from dlrover.python.rl.runtime.checkpoint.storage.journal_store import read_lines
from dlrover.python.rl.runtime.process.heartbeat import Heartbeat
from dlrover.python.rl.trainer.step_pace import StepPace
from dlrover.python.rl.trainer.trainer import StepReport

ADDRESS = "metrics.json"
_KEPT_REPORTS = 1000  # some 15 kB each

_LOG = get_logger(__name__)


class JobObserver:
    """Told of all events and reports. Metrics that cannot be served do not fail the job."""

    def __init__(self, job: JobSpec, run: str) -> None:
        self._reports: list[StepReport] = []
        self._dropped = 0
        self._boot = os.urandom(4).hex()
        self._pace, self._began_s = StepPace(), 0.0
        self.activity = ""  # of the trainer
        self._metrics = JobMetrics(job.name, run, time.time)
        self._endpoint: MetricsEndpoint | None = None
        self._job = job

    def open(self, began_s: float, resumed: bool = False) -> None:
        """Begin to serve; a master that was ``resumed`` goes on with what its journal says."""
        self._began_s = began_s
        master, folder = self._job.master, self._job.job_dir
        if resumed:
            self._metrics.replay(decode(read_lines(folder / JOURNAL)))
        if master.metrics_port < 0 or self._endpoint is not None:
            return
        try:
            token = read_token(Path(master.metrics_token_file)) if master.metrics_token_file else ""
            pair = Path(master.metrics_tls_cert), Path(master.metrics_tls_key)
            tls = tls_context(*pair) if master.metrics_tls_cert or master.metrics_tls_key else None
            self._endpoint = MetricsEndpoint(
                self._metrics.registry, master.metrics_host, master.metrics_port, token, tls
            )
            (folder / ADDRESS).write_text(json.dumps({"address": self._endpoint.address}))
        except (OSError, CallError) as error:
            _LOG.error("%s: no metrics are served: %s", self._job.name, error)

    def take(self, before: JobState, after: JobState, event: Event) -> None:
        self._metrics.take(time.time(), before, after, event)

    def beat(self, beat: Heartbeat) -> None:
        self._metrics.beat(beat.process_id, dict(beat.pending))

    def report(self, report: StepReport) -> None:
        self._metrics.report(report)
        self._pace.note(report.step, time.monotonic())
        self.activity = ""
        self._reports.append(report)
        if len(self._reports) > _KEPT_REPORTS:
            del self._reports[0]
            self._dropped += 1

    # -- what people ask ----------------------------------------------------------------------------------------------

    def status(self, state: JobState) -> JobStatus:
        status = status_of(self._job, state, self._reports[-1] if self._reports else None, self.activity)
        return replace(status, step_s=self._pace.step_s, started_s=self._began_s)

    def end(self) -> int:
        """How many steps this process was told of."""
        return self._dropped + len(self._reports)

    def since(self, position: Position) -> int:
        return position.since(self._boot)

    def update(self, state: JobState, since: int) -> Update:
        fresh = self._reports[max(since - self._dropped, 0) :]
        return Update(self.status(state), tuple(fresh), Position(self._boot, self.end()))
