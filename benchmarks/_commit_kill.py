# SPDX-License-Identifier: Apache-2.0
"""The actor is killed when most steps have to be taken again: what that costs, and that nothing is lost.

::

    step        8           9 ... 15    16 | kill     the next commit would be of 16
    committed   8                                     all roles go back to 8 and take 9 to 16 again
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks._live import Live
from benchmarks._raw_restart import RawRestart
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
from dlrover.python.rl.runtime.checkpoint.runs import COPIES, TRAINER
from dlrover.python.rl.runtime.checkpoint.store import read_manifest
from dlrover.python.rl.runtime.ray.processes.actors import process_env
from dlrover.python.rl.runtime.run.folder import new_run
from dlrover.python.rl.trainer.trainer import StepReport

_LEARNT_BY = 16  # steps until the most that lie between two commits are known
_LONGEST_S = 1800.0


class _Timed(list[StepReport]):
    """Reports, and when they came."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s: list[float] = []

    def append(self, report: StepReport) -> None:
        self.at_s.append(time.monotonic())
        super().append(report)


class RawTrainer:
    """The actor that a user of Ray alone would restart: the same engine on the same model."""

    def __init__(self, model: str) -> None:
        from dlrover.python.rl.engine.api.base import OptimizerConfig, TrainSettings
        from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine

        self._engine = Fsdp2TrainEngine(model, OptimizerConfig(), TrainSettings(device="cpu"))

    def work(self) -> int:
        """A call; returns the process id."""
        return os.getpid()


def kill_at_the_worst_moment(job: JobSpec, model: Path, rounds: int) -> dict[str, Any]:
    """Measure ``rounds`` killed runs after an undisturbed one, interleaved with raw restarts."""
    expected, _ = _run(job, strikes=False)
    raw = RawRestart(process_env(job), RawTrainer, str(model))
    try:
        runs = []
        for _ in range(rounds):
            raw_s = raw.measure()
            states, struck = _run(job, strikes=True)
            runs.append({**struck, "raw_s": raw_s, "same_bits": states == expected})
    finally:
        raw.close()
    return {"rounds": runs}


def _run(job: JobSpec, strikes: bool) -> tuple[dict[str, int], dict[str, Any]]:
    """Checksums of the last states, but not of the trainer (it has times), and what the kill has cost: the time of
    its step beyond the duration of other steps."""
    run = new_run()
    memory = memory_path(job.name, run)
    with Live(replace(job, run=run)) as live:
        live.reports = reports = _Timed()
        struck = _strike(live, memory, run) if strikes else _Struck(0.0, 0, 0, 0)
        live.join(_LONGEST_S)
    newest = max((job.job_dir / COPIES / run).glob("step-*"), key=lambda folder: folder.name)
    states = {name: file.checksum for name, file in read_manifest(newest, run).files.items() if name != TRAINER}
    if not strikes:
        return states, {}
    step_s = [later - earlier for earlier, later in zip(reports.at_s, reports.at_s[1:], strict=False)]
    return states, {
        "steps_again": struck.step - struck.committed,
        "recovery_s": _first_beyond(reports, struck) - struck.at_s - median(step_s),
        "step_s": median(step_s),
        "update_s": median(report.metrics["time/update"] for report in reports),
        "lost": any(report.step <= struck.committed for report in reports[struck.reports :]),
    }


class _Struck(NamedTuple):
    """When the actor was killed, after how many reports, in which step, and the last commit then."""

    at_s: float
    reports: int
    step: int
    committed: int


def _first_beyond(reports: _Timed, struck: _Struck) -> float:
    """When the first step after the open one had ended, which the kill had delayed."""
    later = zip(reports[struck.reports :], reports.at_s[struck.reports :], strict=True)
    return next(at_s for report, at_s in later if report.step >= struck.step)


def _strike(live: Live, memory: Path, run: str) -> _Struck:
    most, positions = [1], [(0, 0)]

    def is_worst() -> bool:
        step, committed = len(live.reports), _newest_step(memory, run)
        positions[0] = step, committed
        if step < _LEARNT_BY:
            most.append(step - committed)
        return step >= _LEARNT_BY and step - committed >= max(most)

    live.until(is_worst, "step far from a commit", _LONGEST_S)
    at_s = time.monotonic()
    os.kill(live.ledger.up["ACTOR[0]"].pid, signal.SIGKILL)
    step, committed = positions[0]
    return _Struck(at_s, step, step + 1, committed)


def _newest_step(memory: Path, run: str) -> int:
    steps = [0]
    for folder in memory.glob("step-*"):
        with suppress(CheckpointMissing, CheckpointCorrupt, OSError):
            steps.append(read_manifest(folder, run).step)
    return max(steps)
