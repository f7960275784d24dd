"""``RLMaster``: the actor that runs one job.

Its loop takes one event at a time from a queue that the executor's tasks fill; it never waits for anything else, and
everything it is asked is answered on the same event loop, so an answer takes milliseconds whatever the job does.
"""

import asyncio
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from dlrover.python.rl.common.log import configure_logging, get_logger
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Cause, CauseKind, Event, Release, StopRequested
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.control.state import JobState, Phase
from dlrover.python.rl.master.brain import Brain, fresh_journal, submission
from dlrover.python.rl.master.status import JobStatus, Update, status_of
from dlrover.python.rl.runtime.executor import Executor
from dlrover.python.rl.runtime.ray.actors import current_actor
from dlrover.python.rl.runtime.ray.executor import RayExecutor
from dlrover.python.rl.runtime.state_store import FileStateStore, MemoryStateStore
from dlrover.python.rl.trainer.trainer import StepReport

_LOG = get_logger(__name__)

_KEPT_REPORTS = 10_000
_RELEASE_S = 30.0


class RLMaster:
    """Runs one job and answers for it.

    Args:
        job: what to run.
        placement: where its members go.
        methods: role to the public methods of its workload.
    """

    def __init__(self, job: JobSpec, placement: Placement, methods: Mapping[str, tuple[str, ...]]) -> None:
        configure_logging("master")
        self._job = job
        self._brain = Brain(MemoryStateStore())
        self._fallen: JobState | None = None
        self._executor: Executor = RayExecutor(job, placement, methods, current_actor())
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._news = asyncio.Condition()
        self._reports: list[StepReport] = []
        self._dropped = 0
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the journal, begin the job and return at once. A second call does nothing.

        Raises:
            OSError: the job's directory cannot be used.
        """
        if self._loop is None:
            self._brain = Brain(FileStateStore(fresh_journal(self._job)))
            self._events.put_nowait(submission(self._job, self._brain))
            self._loop = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while not self._state.phase.terminal:
                self._take(await self._events.get())
                await self._tell()
        except Exception as error:  # noqa: BLE001 -- whatever breaks the loop must not leave a job that looks alive
            _LOG.exception("the master's own loop failed")
            await self._fall(error)
        self._brain.close()

    def _take(self, event: Event) -> None:
        before = self._state.phase
        for command in self._brain.handle(event):
            self._executor.execute(command, self._events.put_nowait)
        if self._state.phase is not before:
            _LOG.info("%s is %s %s", self._job.name, self._state.phase.value, self._state.reason)

    async def _fall(self, error: Exception) -> None:
        """End the job when the loop itself cannot go on: release what it has, then say that it failed."""
        state = self._brain.state
        released = asyncio.Event()
        self._executor.execute(Release(state.incarnation), lambda event: released.set())
        with suppress(TimeoutError):  # what is left is logged by the executor; the failure is told all the same
            await asyncio.wait_for(released.wait(), _RELEASE_S)
        cause = Cause(CauseKind.INTERNAL, "master", f"{type(error).__name__}: {error}", traceback.format_exc())
        self._fallen = replace(
            state, phase=Phase.FAILED, outcome=Phase.FAILED, causes=(*state.causes, cause), reason=f"master: {error}"
        )
        await self._tell()

    @property
    def _state(self) -> JobState:
        return self._fallen or self._brain.state

    async def stop(self, reason: str) -> None:
        """Ask the job to end; returns at once."""
        self._events.put_nowait(StopRequested(reason))

    async def status(self) -> JobStatus:
        """How the job is."""
        return status_of(self._job.name, self._state, self._reports[-1] if self._reports else None)

    async def report(self, report: StepReport) -> None:
        """Take a step report of the trainer in."""
        self._reports.append(report)
        if len(self._reports) > _KEPT_REPORTS:
            del self._reports[0]
            self._dropped += 1
        await self._tell()

    async def follow(self, position: int, timeout_s: float) -> Update:
        """Wait for news after ``position`` (0: from the beginning), at most ``timeout_s`` seconds."""
        seen = self._state

        def news() -> bool:
            return self._state is not seen or self._end() > position or self._state.phase.terminal

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
