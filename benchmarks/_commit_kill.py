# SPDX-License-Identifier: Apache-2.0
"""The actor is killed when most calls have to be repeated: what that costs, and that nothing is lost.

::

    commit of step   8         9         |          10
    follows from     state 0, 1-8        | kill     its members have written the state of 9
                               state 0, calls 1-9: all are repeated, and the open step's
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._live import Live
from benchmarks._raw_restart import RawRestart
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path
from dlrover.python.rl.runtime.checkpoint.runs import COPIES, TRAINER
from dlrover.python.rl.runtime.checkpoint.storage.manifest import Manifest, read_manifest
from dlrover.python.rl.runtime.ray.processes.actors import process_env
from dlrover.python.rl.runtime.run_folder import new_run
from dlrover.python.rl.trainer.trainer import StepReport

_ACTOR = "ACTOR-0"
_MOST = 10  # updates that a recovery may cost beyond the restart
_LONGEST_LOG = 9  # calls, unless a state is written for more than a step
_LEARNT_BY, _PATIENCE = 15, 3  # steps until the longest log is known, and until one that is shorter by a call will do
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
    """What a user of Ray alone would restart: the same engine on the same model."""

    def __init__(self, model: str) -> None:
        from dlrover.python.rl.engine.api.base import OptimizerConfig, TrainSettings
        from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine

        self._engine = Fsdp2TrainEngine(model, OptimizerConfig(), TrainSettings(device="cpu"))

    def work(self) -> int:
        """A call; returns the process id."""
        return os.getpid()


def kill_at_the_worst_moment(job: JobSpec, model: Path, rounds: int) -> dict[str, Any]:
    """Of ``rounds`` killed runs after an undisturbed one, interleaved with raw restarts."""
    expected, _ = _run(job, strikes=False)
    raw = RawRestart(process_env(job), RawTrainer, str(model))
    try:
        found = []
        for _ in range(rounds):
            raw_s = raw.measure()
            states, struck = _run(job, strikes=True)
            found.append({**struck, "raw_s": raw_s, "same_bits": states == expected})
    finally:
        raw.close()
    return {"rounds": found, "within": all(map(_is_within, found))}


def _is_within(one: dict[str, Any]) -> bool:
    limit_s = 1.15 * one["raw_s"] + _MOST * one["update_s"]
    return bool(one["recovery_s"] <= limit_s and one["same_bits"] and not one["lost"])


def _run(job: JobSpec, strikes: bool) -> tuple[dict[str, int], dict[str, Any]]:
    """Checksums of the last states, but not of the trainer (it has times), and what the kill has cost: the time of
    its step beyond that of others."""
    run = new_run()
    memory = memory_path(job.name, run)
    with Live(replace(job, run=run)) as live:
        live.reports = reports = _Timed()
        struck, calls = _strike(live, memory, run) if strikes else (0, 0)
        live.join(_LONGEST_S)
    newest = max((job.job_dir / COPIES / run).glob("step-*"), key=lambda folder: folder.name)
    states = {name: file.checksum for name, file in read_manifest(newest, run).files.items() if name != TRAINER}
    if not strikes:
        return states, {}
    step_s = [later - earlier for earlier, later in zip(reports.at_s, reports.at_s[1:], strict=False)]
    steps = [report.step for report in reports]
    return states, {
        "calls": calls,
        "recovery_s": max(step_s[struck - 1 : struck + 2]) - median(step_s),
        "update_s": median(report.metrics["time/update"] for report in reports),
        "lost": steps != list(range(1, len(steps) + 1)),
    }


def _strike(live: Live, memory: Path, run: str) -> tuple[int, int]:
    """Returns the step after whose commit it was, and how many calls follow the state in it."""

    seen = [1]

    def is_worst() -> bool:
        seen.append(_calls_in(memory, run))
        more = len(live.reports) - _LEARNT_BY
        return seen[-1] >= _LONGEST_LOG or (more >= 0 and seen[-1] >= max(seen) - more // _PATIENCE)

    live.until(is_worst, "commit of many calls", _LONGEST_S)
    os.kill(live.ledger.up["ACTOR[0]"].pid, signal.SIGKILL)
    return len(live.reports), seen[-1]


def _calls_in(memory: Path, run: str) -> int:
    """That the newest commit has after the state."""
    manifests: list[Manifest] = []
    for folder in memory.glob("step-*"):
        with suppress(CheckpointMissing, CheckpointCorrupt, OSError):
            manifests.append(read_manifest(folder, run))
    newest = max(manifests, key=lambda each: each.step, default=None)
    return len(newest.earlier.get(_ACTOR, ())) if newest is not None else 0
