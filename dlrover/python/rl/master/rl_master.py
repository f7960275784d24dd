"""``RLMaster``: the actor that runs one job.

Its loop takes one event at a time from a queue that the executor's tasks fill; it never waits for anything else, and
everything it is asked is answered on the same event loop, so an answer takes milliseconds whatever the job does.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dlrover.python.rl.common.log import configure_logging, get_logger
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Event, StopRequested
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.master.brain import Brain, submission
from dlrover.python.rl.master.status import JobStatus, Update, status_of
from dlrover.python.rl.runtime.executor import Executor
from dlrover.python.rl.runtime.ray.actors import current_actor
from dlrover.python.rl.runtime.ray.executor import RayExecutor
from dlrover.python.rl.runtime.state_store import FileStateStore
from dlrover.python.rl.trainer.trainer import StepReport

_LOG = get_logger(__name__)

_KEPT_REPORTS = 10_000


class RLMaster:
    """Runs one job and answers for it.

    Args:
        job: what to run.
        placement: where its members go.
        methods: role to the public methods of its workload.
        journal: the file its events are written to.

    Raises:
        JobConflict: the journal already holds a job.
        JournalCorrupt: the journal cannot be trusted.
    """

    def __init__(
        self, job: JobSpec, placement: Placement, methods: Mapping[str, tuple[str, ...]], journal: Path
    ) -> None:
        configure_logging("master")
        self._job = job
        self._brain = Brain(FileStateStore(journal))
        self._submission = submission(job, self._brain)
        self._executor: Executor = RayExecutor(job, placement, methods, current_actor())
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._news = asyncio.Condition()
        self._reports: list[StepReport] = []
        self._dropped = 0
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin the job and return at once. A second call does nothing."""
        if self._loop is None:
            self._events.put_nowait(self._submission)
            self._loop = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._brain.state.phase.terminal:
            event = await self._events.get()
            before = self._brain.state.phase
            for command in self._brain.handle(event):
                self._executor.execute(command, self._events.put_nowait)
            if self._brain.state.phase is not before:
                _LOG.info("%s is %s %s", self._job.name, self._brain.state.phase.value, self._brain.state.reason)
            await self._tell()
        self._brain.close()

    async def stop(self, reason: str) -> None:
        """Ask the job to end; returns at once."""
        self._events.put_nowait(StopRequested(reason))

    async def status(self) -> JobStatus:
        """How the job is."""
        return status_of(self._job.name, self._brain.state, self._reports[-1] if self._reports else None)

    async def report(self, report: StepReport) -> None:
        """Take a step report of the trainer in."""
        self._reports.append(report)
        if len(self._reports) > _KEPT_REPORTS:
            del self._reports[0]
            self._dropped += 1
        await self._tell()

    async def follow(self, position: int, timeout_s: float) -> Update:
        """Wait for news after ``position`` (0: from the beginning), at most ``timeout_s`` seconds."""
        seen = self._brain.state

        def news() -> bool:
            return self._brain.state is not seen or self._end() > position or self._brain.state.phase.terminal

        async with self._news:
            with suppress(TimeoutError):  # no news is an answer too
                await asyncio.wait_for(self._news.wait_for(news), timeout_s)
        fresh = self._reports[max(position - self._dropped, 0) :]
        return Update(await self.status(), tuple(fresh), self._end())

    def _end(self) -> int:
        return self._dropped + len(self._reports)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
