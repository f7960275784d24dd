# SPDX-License-Identifier: Apache-2.0
"""How a job is, in words: what it does, since when, why it ended, and what to try."""

from contextlib import suppress
from datetime import datetime

from dlrover.python.rl.common.names import resume_command
from dlrover.python.rl.control.events import CauseKind
from dlrover.python.rl.master.operations.history import JobHistory
from dlrover.python.rl.master.operations.jobs import JobView

_DETAIL_LINES = 30
_SHOWN_FAILURES = 10

_PHASES = {
    "queued": "It waits in the service's queue",
    "created": "It waits for the cluster to reserve its resources",
    "starting": "It is being started",
    "placed": "Its processes are being started",
    "running": "It runs",
    "restarting": "All of its processes are being started again after a failure",
    "ending": "It is ending: its processes and resources are being released",
    "stopping": "It is being stopped",
    "finished": "It has finished",
    "failed": "It has failed",
    "stopped": "It was stopped",
    "lost": "Its master is gone without having ended it",
}

_REMEDIES = {
    CauseKind.USER_ERROR: "The job's own code raised. Mend what the traceback shows; '--local' runs all of it in one "
    "process, where a debugger works.",
    CauseKind.UNKNOWN_ERROR: "An exception that may be the machine's, more often than allowed. Its traceback is in the "
    "evidence; restart.* sets the limits.",
    CauseKind.DEVICE_FAILED: "A GPU or its driver failed more often than allowed. 'dlrover-rl doctor' and 'nvidia-smi "
    "-q' on the node tell more; resume without it.",
    CauseKind.LINK_FAILED: "The ranks of a role lost each other more often than allowed: look at the network, and at "
    "the log of the rank that was lost first.",
    CauseKind.RETRYABLE_ERROR: "The trainer gave up waiting. Look at the processes it waited for, then resume the run.",
    CauseKind.START_FAILED: "A constructor raised or a class cannot be imported. 'dlrover-rl check' imports the "
    "classes without starting anything.",
    CauseKind.PROCESS_DIED: "A process ended by itself or was killed more often than allowed. Its log has its last "
    "lines; a native crash leaves a stack there. restart.* sets the limits.",
    CauseKind.OUT_OF_MEMORY: "Memory ran out. Use smaller batches or more nodes, or ask for memory in the workload's "
    "resources.",
    CauseKind.NO_SPACE: "A disk stayed full. Make room in the job's folder, or keep fewer commits "
    "(checkpoint.keep_runs, checkpoint.every); then resume.",
    CauseKind.NODE_LOST: "A node went away more often than allowed. Resume when it is back, or on other nodes.",
    CauseKind.HUNG: "A process made no progress within its limit; its stacks are in the evidence. If the step is that "
    "slow, raise liveness.hang_after_s.",
    CauseKind.PREEMPTED: "Its node is being drained. Resume on other nodes.",
    CauseKind.NO_RESOURCES: "The cluster did not have the resources in time. Ask for less, add nodes, or raise "
    "placement_timeout_s.",
    CauseKind.INTERNAL: "This is a fault of the system itself, not of the job. The run can be resumed.",
}


def explain_lines(view: JobView, history: JobHistory | None) -> list[str]:
    since_s = history.phase_since_s if history else 0.0
    since = f" since {_when(since_s)}" if since_s else ""
    lines = [f"{view.name}: {_PHASES.get(view.phase, view.phase)}{since}."]
    lines += [f"Why: {view.reason}."] if view.reason else []
    lines += [f"Now: {view.activity}."] if view.activity else []
    lines += _progress(view)
    lines += _failures(history) if history else []
    if view.detail:
        evidence = view.detail.rstrip().splitlines()[-_DETAIL_LINES:]
        lines += ["Evidence:", *(f"  {line}" for line in evidence)]
    lines += [f"Its log: {history.log}"] if history and history.log else []
    lines += [f"What to try: {remedy}" for remedy in _remedies(view)]
    return lines


def _progress(view: JobView) -> list[str]:
    if not view.step:
        return ["No step has been reported."]
    of = f" of {view.total_steps}" if view.total_steps else ""
    return [f"Last step: {view.step}{of}."]


def _failures(history: JobHistory) -> list[str]:
    if not history.failures:
        return []
    shown = history.failures[:_SHOWN_FAILURES]
    lines = ["What failed, the first one first:"]
    lines += [f"  {_when(at_s)} {line}" for at_s, line in shown]
    more = len(history.failures) - len(shown)
    return lines + ([f"  and {more} more, in {history.source}"] if more else [])


def _remedies(view: JobView) -> list[str]:
    remedies = []
    with suppress(ValueError):
        remedies.append(_REMEDIES[CauseKind(view.cause)])
    if view.phase in ("failed", "stopped", "lost") and view.step:
        where = ", on the service's machine" if view.owner else ""
        remedies.append(f"It goes on after its last committed step with: {resume_command(view.folder)}{where}")
    return remedies


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")
