# SPDX-License-Identifier: Apache-2.0
"""The master's metrics, served over HTTP while the job runs, if the job asks for them."""

import json
import time
from pathlib import Path

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.private_files import read_token
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Event
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.master.brain import JOURNAL
from dlrover.python.rl.metrics.endpoint import MetricsEndpoint
from dlrover.python.rl.metrics.job import JobMetrics
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.trainer.trainer import StepReport

ADDRESS = "metrics.json"

_LOG = get_logger(__name__)


class JobObserver:
    """Told of all events and reports. Metrics that cannot be served do not fail the job."""

    def __init__(self, job: JobSpec, run: str) -> None:
        self._metrics = JobMetrics(job.name, run, time.time)
        self._endpoint: MetricsEndpoint | None = None
        self._job = job

    def open(self, resumed: bool = False) -> None:
        """Begin to serve; a master that was ``resumed`` goes on with what its journal says."""
        master, folder = self._job.master, self._job.job_dir
        if resumed:
            self._metrics.replay(decode(read_lines(folder / JOURNAL)))
        if master.metrics_port < 0 or self._endpoint is not None:
            return
        try:
            token = read_token(Path(master.metrics_token_file)) if master.metrics_token_file else ""
            self._endpoint = MetricsEndpoint(self._metrics.registry, master.metrics_host, master.metrics_port, token)
            (folder / ADDRESS).write_text(json.dumps({"address": self._endpoint.address}))
        except (OSError, CallError) as error:
            _LOG.error("%s: no metrics are served: %s", self._job.name, error)

    def take(self, before: JobState, after: JobState, event: Event) -> None:
        self._metrics.take(time.time(), before, after, event)

    def report(self, report: StepReport) -> None:
        self._metrics.report(report)
