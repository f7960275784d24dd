# SPDX-License-Identifier: Apache-2.0
"""Jobs from outside, by the files in the folders of their runs.

Jobs are in three places: on a Ray cluster (``RayJobs``), in the folders of runs (``SavedRuns``), in the job service.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, JournalCorrupt
from dlrover.python.rl.common.names import is_job_name, resume_command
from dlrover.python.rl.common.private_files import open_file, with_real_parent
from dlrover.python.rl.config.plain import MAX_BYTES
from dlrover.python.rl.control.events import Failed, MemberLost, NodeLost, StandbyLost, TrainerLost
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.recovery import completed_recoveries
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.master.client.resume import SavedRun, find_saved_run
from dlrover.python.rl.master.client.views import JobHistory, JobView, log_of
from dlrover.python.rl.master.process.brain import JOURNAL
from dlrover.python.rl.master.process.status import line_of, reward_of
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.run.files import LogReader, RunFolder
from dlrover.python.rl.runtime.run.folder import CLUSTER, LAUNCHED, Owner, in_use, newest_owner
from dlrover.python.rl.runtime.run.names import DESCRIPTION, LOGS, METRICS, SUFFIX

_TAIL_BYTES = 64 * 1024
_POLL_S = 0.5
_TOTAL_STEPS = re.compile(rb"^  (?:total_)?steps: (\d{1,12})$", re.MULTILINE)
_FAILURES = (MemberLost, StandbyLost, TrainerLost, NodeLost, Failed)


def read_history(folder: Path) -> JobHistory | None:
    """Return the history of the run in ``folder``, None if it has no journal. Raises JournalCorrupt, OSError."""
    journal = folder / JOURNAL
    events = decode(read_lines(journal) if journal.exists() else [])
    if not events:
        return None
    state, since_s, failures = JobState(), events[0][0], list[tuple[float, str]]()
    for at_s, event in events:
        before, (state, _) = state, step(state, event, at_s)
        if state.phase is not before.phase:
            since_s = at_s
        if isinstance(event, _FAILURES):
            failures.append((at_s, line_of(event.cause)))
    log = folder / LOGS / f"{log_of(failures)}{SUFFIX}"
    where = str(log) if log.is_file() else ""
    return JobHistory(since_s, tuple(failures), str(journal), where, state, events[0][0], events[-1][0])


def view_of_folder(name: str, folder: Path, history: JobHistory, address: str = "") -> JobView:
    """Return the view of a run from its files; the cluster at ``address``, if any, does not know it."""
    state, (last, changed_s) = history.state, _last_metrics(folder)
    number, over = int(last.get("step", 0)), state.phase.terminal
    pace_s = (changed_s - history.began_s) / number if number else 0.0
    holder = None if over else holder_of(folder, address)
    is_lost = not over and holder is None
    settings = state.settings
    return JobView(
        name=name,
        phase="lost" if is_lost else state.phase.value,
        ended=holder is None,
        step=number,
        total_steps=total_steps_in(folder),
        step_s=float(last.get("time/step") or pace_s),
        last_step_s=changed_s,
        reward=float(reward_of(last)),
        started_s=history.began_s,
        elapsed_s=history.last_s - history.began_s,
        restarts=state.restarts,
        run=settings.run if settings else "",
        reason=f"its master is gone; to resume the run: {resume_command(folder)}" if is_lost else state.reason,
        cause=state.failure.kind.value if state.failure else "",
        detail=state.failure.detail if state.failure else "",
        folder=str(folder),
        roles={role: each.num for role, each in settings.roles.items()} if settings else {},
        recoveries=dict(state.recoveries) if over else completed_recoveries(state),
    )


def holder_of(folder: Path, address: str = "") -> Owner | None:
    """Return the live owner of the run in ``folder``, by its process here or a sign of life within its lease; but none
    if its master was on the cluster at ``address``, which does not know it."""
    owner = newest_owner(folder) if in_use(folder) else None
    is_gone = owner is not None and not owner.pid and address and address_in(folder) == address
    return None if is_gone else owner


def address_in(folder: Path) -> str:
    """Return the address of the cluster of the run in ``folder``; empty if unknown."""
    with suppress(OSError), open_file(folder / CLUSTER) as file:
        return file.read().decode()
    return ""


def total_steps_in(folder: Path) -> int:
    """Return the steps that the job's ``config`` asks for, without reading all settings; 0 if unknown."""
    with suppress(OSError), open_file(folder / DESCRIPTION) as file:
        match = _TOTAL_STEPS.search(file.read(MAX_BYTES))
        return int(match[1]) if match else 0
    return 0


def _last_metrics(folder: Path) -> tuple[dict[str, Any], float]:
    """Return the last whole line of ``metrics.jsonl`` and the time of its last change; empty and 0 without one."""
    with suppress(OSError, ValueError), open_file(folder / METRICS) as file:
        file.seek(max(file.seek(0, 2) - _TAIL_BYTES, 0))
        lines = file.read().rpartition(b"\n")[0].splitlines()
        last = json.loads(lines[-1]) if lines else {}
        return (last, os.fstat(file.fileno()).st_mtime) if isinstance(last, dict) and last else ({}, 0.0)
    return {}, 0.0


def is_run_folder(name_or_dir: str) -> bool:
    """Return True if the text names a run by its folder: it is no job name, or another job's run is there."""
    owner = newest_owner(Path(name_or_dir))
    return not is_job_name(name_or_dir) or (owner is not None and owner.job != name_or_dir)


def view_of_run(run: SavedRun, address: str = "") -> JobView:
    """Call :func:`view_of_folder`. Raises InvalidJob if there is no journal, or JournalCorrupt."""
    history = read_history(run.folder)
    if history is None:
        why = "a launcher began the run" if run.owner.runtime == LAUNCHED else "the run has not begun"
        raise InvalidJob([ConfigError(str(run.folder), f"has no journal: {why}")])
    return view_of_folder(run.owner.job, run.folder, history, address)


class SavedRuns:
    """Jobs by the files in the folders of their runs; ``name`` is a folder."""

    def get(self, name: str) -> JobView:
        return view_of_run(find_saved_run(name))

    def history(self, view: JobView) -> JobHistory | None:
        with suppress(JournalCorrupt, OSError):
            return read_history(Path(view.folder)) if view.folder else None
        return None

    def logs(self, name: str, process: str, follow: bool, tail: int) -> Iterator[tuple[str, str]]:
        view = self.get(name)
        reader = LogReader(RunFolder(with_real_parent(Path(view.folder))), process, tail)
        while True:
            reader.check(view.roles if follow and not view.ended else None)
            yield from reader.read()
            if view.ended or not follow:
                return
            time.sleep(_POLL_S)
            view = self.get(name)
