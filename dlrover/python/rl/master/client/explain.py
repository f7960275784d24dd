# SPDX-License-Identifier: Apache-2.0
"""The state of a job in sentences: since when, why, and what to try."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime

from dlrover.python.rl.common.names import resume_command
from dlrover.python.rl.control.events import CauseKind
from dlrover.python.rl.master.client.views import JobHistory, JobView


def when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


_DETAIL_LINES = 30
_SHOWN_FAILURES = 10

_PHASES = {
    "queued": "It waits in the service's queue",
    "created": "It waits for the cluster to reserve its resources",
    "starting": "It is starting",
    "placed": "Its processes are starting",
    "running": "It is running",
    "restarting": "All of its processes are restarting after a failure",
    "ending": "It is ending: its processes and resources are being released",
    "stopping": "It is stopping",
    "finished": "It has finished",
    "failed": "It has failed",
    "stopped": "It was stopped",
    "lost": "Its master was lost before the job ended",
}

_REMEDIES = {
    CauseKind.USER_ERROR: "Fix the error in the job's code; '--local' runs it in one process, for a debugger.",
    CauseKind.UNKNOWN_ERROR: "See the traceback; the machine may be the cause. The limits are"
    " restart.workload_max_restart and restart.trainer_max_restart.",
    CauseKind.DEVICE_FAILED: "Run 'dlrover-rl doctor' and 'nvidia-smi -q' on the node, and resume without it.",
    CauseKind.LINK_FAILED: "Check the network, and the log of the rank that was lost first.",
    CauseKind.RETRYABLE_ERROR: "Check the processes that the trainer waited for, then resume.",
    CauseKind.START_FAILED: "Run 'dlrover-rl check', which imports the job's classes without starting anything.",
    CauseKind.PROCESS_DIED: "See its log; after a native crash it ends with a stack. The limits are"
    " restart.workload_max_restart and restart.trainer_max_restart.",
    CauseKind.OUT_OF_MEMORY: "Use smaller batches or more nodes, or request memory in the workload's resources.",
    CauseKind.NO_SPACE: "Free disk space, or keep fewer commits (checkpoint.keep_runs, checkpoint.every); then resume.",
    CauseKind.NODE_LOST: "Resume when the node is back, or on other nodes.",
    CauseKind.HUNG: "See the stacks in the evidence. If a call takes that long, raise workload.<role>.hang_after_s, or"
    " trainer.hang_after_s.",
    CauseKind.PREEMPTED: "Resume on other nodes: its node is being drained.",
    CauseKind.NO_RESOURCES: "Request less, add nodes, or raise placement_timeout_s.",
    CauseKind.INTERNAL: "Resume the run: this is an error of the system, not of the job.",
}


def explain_lines(view: JobView, history: JobHistory | None) -> list[str]:
    since = f" since {when(history.phase_since_s)}" if history and history.phase_since_s else ""
    lines = [f"{view.name}: {_PHASES.get(view.phase, view.phase)}{since}."]
    lines += [f"Why: {view.reason}."] if view.reason else []
    lines += [f"Now: {view.activity}."] if view.activity else []
    of = f" of {view.total_steps}" if view.total_steps else ""
    lines.append(f"Last step: {view.step}{of}." if view.step else "No step has been reported.")
    if history and history.failures:
        lines.append("Failures, the first one first:")
        lines += [f"  {when(at_s)} {line}" for at_s, line in history.failures[:_SHOWN_FAILURES]]
        more = len(history.failures) - _SHOWN_FAILURES
        lines += [f"  and {more} more, in {history.source}"] if more > 0 else []
    if view.detail:
        evidence = view.detail.rstrip().splitlines()[-_DETAIL_LINES:]
        lines += ["Evidence:", *(f"  {line}" for line in evidence)]
    lines += [f"Its log: {history.log}"] if history and history.log else []
    return [*lines, *(f"What to try: {sentence}" for sentence in advice(view))]


def advice(view: JobView) -> Iterator[str]:
    """Yield what to try after the failure of a job, and how to resume it."""
    with suppress(ValueError):
        yield _REMEDIES[CauseKind(view.cause)]
    if view.phase in ("failed", "stopped", "lost") and view.step:
        again = f"dlrover-rl resume {view.reference} --server ..." if view.owner else resume_command(view.folder)
        yield f"resume after the last committed step: {again}"
