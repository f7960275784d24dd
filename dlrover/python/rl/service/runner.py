# SPDX-License-Identifier: Apache-2.0
"""What the service needs of the place where jobs run, as a protocol, and its twin in memory."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.service.jobs.records import JobDescription, JobPhase, JobRecord, Observed

Sink = Callable[[Observed], None]


class JobRunner(Protocol):
    """All methods are called on the service's event loop and return soon; what happens is reported to the sink."""

    def attach(self, sink: Sink) -> None: ...

    async def capacity(self) -> Mapping[str, float]:
        """The resources of the whole cluster."""
        ...

    def run(self, record: JobRecord, description: JobDescription) -> None:
        """Start this run of a job and report on it, or, when it was started before, only report on it. Called once in
        each life of the service for each job that holds resources."""
        ...

    def stop(self, record: JobRecord) -> None:
        """End a run in good order, or at once if ``record.hard``; repeated when that changes."""
        ...

    async def resize(self, record: JobRecord, role: str, num: int) -> None:
        """Raises CallError when the role cannot be resized."""
        ...

    async def close(self) -> None:
        """Leave all jobs as they are."""
        ...


class MemoryRunner:
    """Runs jobs that do nothing: ``steps`` steps of ``step_s`` seconds each."""

    def __init__(self, steps: int = 3, step_s: float = 0.01, cpus: float = 16.0) -> None:
        self._steps, self._step_s, self._cpus = steps, step_s, cpus
        self._sink: Sink = lambda observed: None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.begun: list[str] = []
        """The runs that were started here, in order: for tests of "once"."""

    def attach(self, sink: Sink) -> None:
        self._sink = sink

    async def capacity(self) -> Mapping[str, float]:
        return {"cpu": self._cpus}

    def run(self, record: JobRecord, description: JobDescription) -> None:
        self.begun.append(record.run)
        task = asyncio.get_running_loop().create_task(self._run(record))
        self._tasks[record.run] = task
        task.add_done_callback(lambda task: self._done(record, task))

    def _done(self, record: JobRecord, task: asyncio.Task[None]) -> None:
        self._tasks.pop(record.run, None)
        if task.cancelled():  # maybe before it had begun
            self._report(record, JobPhase.STOPPED, 0, "stopped")

    async def _run(self, record: JobRecord) -> None:
        for step in range(record.step, self._steps + 1):
            self._report(record, JobPhase.RUNNING, step)
            await asyncio.sleep(self._step_s)
        self._report(record, JobPhase.FINISHED, self._steps, "all steps done")

    def _report(self, record: JobRecord, phase: JobPhase, step: int, reason: str = "") -> None:
        metrics = {"reward": step / self._steps} if step else {}
        self._sink(Observed(record.name, record.run, phase, reason, "", "", step, self._steps, metrics=metrics))

    def stop(self, record: JobRecord) -> None:
        task = self._tasks.get(record.run)
        if task is not None:
            task.cancel()
        else:
            self._sink(Observed(record.name, record.run, JobPhase.STOPPED, "stopped"))

    async def resize(self, record: JobRecord, role: str, num: int) -> None:
        if record.run not in self._tasks:
            raise CallError(f"'{record.name}' does not run")
        self._sink(Observed(record.name, record.run, record.phase, roles={**record.roles, role: num}))

    async def close(self) -> None:
        self._sink = lambda observed: None
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
