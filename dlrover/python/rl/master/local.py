# SPDX-License-Identifier: Apache-2.0
"""Runs a whole job in this process, with the same brain as on a cluster."""

from collections import deque

from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.commands import Command, Release
from dlrover.python.rl.control.events import Event, StopRequested
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.master.brain import Brain, new_run, submission
from dlrover.python.rl.master.status import JobStatus, status_of
from dlrover.python.rl.runtime.checkpoint.journal_store import MemoryStateStore, StateStore
from dlrover.python.rl.runtime.local_executor import LocalExecutor
from dlrover.python.rl.runtime.process.inspection import Inspection
from dlrover.python.rl.trainer.trainer import Reporter, StepReport


def run_local(
    job: JobSpec,
    placement: Placement,
    report: Reporter,
    store: StateStore | None = None,
    enforce_deadlines: bool = False,
) -> JobStatus:
    """Run ``job`` to its end without Ray; Ctrl-C stops it in good order. The journal is in memory by default.

    ``enforce_deadlines`` lets calls with a timeout fail when they take longer.
    """
    brain = Brain(store or MemoryStateStore())
    last: list[StepReport] = []

    def noting(step_report: StepReport) -> None:
        last[:] = [step_report]
        report(step_report)

    run = new_run()
    executor = LocalExecutor(job, placement, noting, enforce_deadlines, run)
    commands: deque[Command] = deque()

    def emit(event: Event) -> None:
        for command in brain.handle(event):
            if isinstance(command, Release):
                commands.clear()  # starts that are still pending
            commands.append(command)

    try:
        emit(submission(job, run, Inspection(), brain))
        while commands:
            try:
                executor.execute(commands.popleft(), emit)
            except KeyboardInterrupt:
                emit(StopRequested("interrupted"))
    finally:
        brain.close()
    return status_of(job.name, brain.state, last[0] if last else None)
