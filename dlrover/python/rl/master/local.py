"""Running a whole job in this process, by the same brain that runs it on a cluster."""

from collections import deque

from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.commands import Command, Release
from dlrover.python.rl.control.events import Event, StopRequested
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.master.brain import Brain, new_run, submission
from dlrover.python.rl.master.status import JobStatus, status_of
from dlrover.python.rl.runtime.inspection import Inspection
from dlrover.python.rl.runtime.local.executor import LocalExecutor
from dlrover.python.rl.runtime.state_store import MemoryStateStore, StateStore
from dlrover.python.rl.trainer.trainer import Reporter, StepReport


def run_local(
    job: JobSpec,
    placement: Placement,
    report: Reporter,
    store: StateStore | None = None,
    enforce_deadlines: bool = False,
) -> JobStatus:
    """Run ``job`` to its end without Ray and return how it ended. Ctrl-C stops it in good order.

    Args:
        job: what to run.
        placement: the plan.
        report: where step reports go.
        store: where the journal goes; memory by default.
        enforce_deadlines: let calls with a timeout fail when they take longer.
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
                commands.clear()  # what was still to begin shall not
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
