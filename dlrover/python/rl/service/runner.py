# SPDX-License-Identifier: Apache-2.0
"""The port that runs the service's jobs, and its twin in memory."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.service.jobs.records import JobDescription, JobPhase, JobRecord, Observed


class JobRunner(ABC):
    """All methods are called on the service's event loop and return soon; the sink gets the reports."""

    def __init__(self) -> None:
        self._sink: Callable[[Observed], None] = lambda observed: None
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, sink: Callable[[Observed], None]) -> None:
        self._sink = sink

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        """Start a task, which ends with the service."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Leave all jobs as they are."""
        self._sink = lambda observed: None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @abstractmethod
    async def capacity(self) -> Mapping[str, float]:
        """Return the resources of the whole cluster."""

    @abstractmethod
    def run(self, record: JobRecord, description: JobDescription) -> None:
        """Start a run unless it was started before, and report on it; called once for each job that holds resources."""

    @abstractmethod
    def stop(self, record: JobRecord) -> None:
        """End a run after a grace period, or at once if ``record.hard``; called again when that changes."""

    @abstractmethod
    async def resize(self, record: JobRecord, role: str, num: int) -> None:
        """Raises CallError when the role cannot be resized."""


class MemoryRunner(JobRunner):
    """Runs jobs that do nothing: ``steps`` steps of ``step_s`` seconds each."""

    def __init__(self, steps: int = 3, step_s: float = 0.01, cpus: float = 16.0) -> None:
        super().__init__()
        self._steps, self._step_s, self._cpus = steps, step_s, cpus
        self._running: dict[str, asyncio.Task[None]] = {}
        self.begun: list[str] = []  # the runs that were started here, in order

    async def capacity(self) -> Mapping[str, float]:
        return {"cpu": self._cpus}

    def run(self, record: JobRecord, description: JobDescription) -> None:
        self.begun.append(record.run)
        task = self._running[record.run] = self._spawn(self._run(record))

        def note_end(task: asyncio.Task[None]) -> None:
            del self._running[record.run]
            if task.cancelled():  # maybe before it had begun
                self._report(record, JobPhase.STOPPED, 0, "stopped")

        task.add_done_callback(note_end)

    async def _run(self, record: JobRecord) -> None:
        for step in range(record.step, self._steps + 1):
            self._report(record, JobPhase.RUNNING, step)
            await asyncio.sleep(self._step_s)
        self._report(record, JobPhase.FINISHED, self._steps, "all steps done")

    def _report(self, record: JobRecord, phase: JobPhase, step: int, reason: str = "") -> None:
        metrics = {"reward": step / self._steps} if step else {}
        self._sink(Observed(record.name, record.run, phase, reason, "", "", step, self._steps, metrics=metrics))

    def stop(self, record: JobRecord) -> None:
        if (task := self._running.get(record.run)) is not None:
            task.cancel()
        else:
            self._sink(Observed(record.name, record.run, JobPhase.STOPPED, "stopped"))

    async def resize(self, record: JobRecord, role: str, num: int) -> None:
        if record.run not in self._running:
            raise CallError(f"'{record.name}' is not running")
        self._sink(Observed(record.name, record.run, record.phase, roles={**record.roles, role: num}))
