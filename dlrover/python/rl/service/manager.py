# SPDX-License-Identifier: Apache-2.0
"""The jobs of the service: operations are decided one after another, saved in groups, answered once they are saved.

::

    requests, runner --Operation--> queue -> draft of the ledger -> store -> ledger -> answers, watchers, runner

One task takes all operations that have arrived, decides each on top of the one before, and saves them in one
transaction, so that a disk that syncs slowly delays requests but does not limit their rate. Nobody sees what is not
saved: after a failed write nothing has happened. What the runner has to do follows from the saved jobs alone, and is
done again by the next process of the service.
"""

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeAlias

from dlrover.python.rl.common.errors import CallError, DLRoverRLError, ServiceUnavailable
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.master.process.brain import check_new_size
from dlrover.python.rl.service.jobs.ledger import Answer, Draft, Ledger, QueueLimits
from dlrover.python.rl.service.jobs.records import (
    JobDescription,
    JobEvent,
    JobPhase,
    JobRecord,
    Observed,
    Operation,
    Schedule,
    StopJob,
    SubmitJob,
)
from dlrover.python.rl.service.jobs.store import SqliteJobStore
from dlrover.python.rl.service.runner import JobRunner

_LOG = get_logger(__name__)

_BATCH = 500
_PAGE = 1000
_RECENT = 10_000
_RETRY_S = 0.5
_GATHER_S = 0.02  # for a watcher, who then gets more events in fewer messages
_MAX_WAITING = 5000


_Request: TypeAlias = tuple[Operation, asyncio.Future[Answer] | None]
"""An operation, and its answer; None: nothing waits for one."""


class EventFeed:
    """The events of all jobs, and who waits for more. The last ones are in memory, without gaps; the store has all."""

    def __init__(self, store: SqliteJobStore, last_event: int) -> None:
        self._store, self.last = store, last_event
        self._recent: list[JobEvent] = []
        self._listeners: dict[str, set[asyncio.Event]] = {}

    def add(self, events: list[JobEvent]) -> None:
        """Add saved events, and wake the listeners to their jobs."""
        if events:
            self._recent += events
            self.last = events[-1].number
            self.wake(event.name for event in events)
        if len(self._recent) > 2 * _RECENT:
            del self._recent[:-_RECENT]

    def wake(self, names: Iterable[str] | None = None) -> None:
        """Wake the listeners to these jobs and those to all of them; by default everybody."""
        for name in {"", *(self._listeners if names is None else names)}:
            for news in self._listeners.get(name, ()):
                news.set()

    @contextmanager
    def listening(self, name: str) -> Iterator[asyncio.Event]:
        """Set at each event of a job, of all jobs for ""; to wake all listeners at each event would take the most
        time."""
        news = asyncio.Event()
        self._listeners.setdefault(name, set()).add(news)
        try:
            yield news
        finally:
            self._listeners[name].discard(news)
            if not self._listeners[name]:
                del self._listeners[name]

    async def page(self, after: int, name: str) -> tuple[list[JobEvent], int]:
        """Some events above ``after``, and the number up to which there is none but those."""
        last = self.last
        if after >= last:
            return [], after
        if self._recent and self._recent[0].number <= after + 1:
            fresh = self._recent[after + 1 - self._recent[0].number :]
            return [event for event in fresh if name in ("", event.name)], last
        page = await asyncio.to_thread(self._store.events, after, name, _PAGE)
        return [event for event in page if event.number <= last], last if len(page) < _PAGE else page[-1].number


class JobManager:
    def __init__(
        self,
        store: SqliteJobStore,
        runner: JobRunner,
        limits: QueueLimits | None = None,
        wall_s: Callable[[], float] = time.time,
        capacity_every_s: float = 5.0,
    ) -> None:
        self._store, self._runner, self._wall_s = store, runner, wall_s
        self._capacity_every_s = capacity_every_s
        records, last_event = store.load()
        self._ledger = Ledger(limits or QueueLimits(), records, last_event)
        self._feed = EventFeed(store, last_event)
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._unsaved: deque[_Request] = deque()  # what the runner has seen and could not be saved: before all requests
        self._known: dict[str, JobRecord] = {}  # what the runner has heard, by run
        self._tasks: list[asyncio.Task[None]] = []
        self._submissions = 0
        self._closed = False

    async def start(self) -> None:
        """Take up the jobs that run, and begin to serve."""
        self._runner.attach(self._note)
        self._ledger.capacity = await self._runner.capacity()
        for record in list(self._ledger.unfinished.values()):
            if record.phase.holds_resources:
                await self._tell_runner(record, {})
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._serve()), loop.create_task(self._watch_capacity())]
        self._note(Schedule())

    async def close(self) -> None:
        """Stop serving, after what is being saved; the jobs stay as they are."""
        self._closed = True
        self._requests.put_nowait((Schedule(), None))  # wakes the loop
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.close()
        while not self._requests.empty():
            self._settle(self._requests.get_nowait(), ServiceUnavailable("the service is ending"))
        self._feed.wake()
        self._store.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def ask(self, operation: SubmitJob | StopJob) -> JobRecord:
        """The job once the operation is saved. Raises JobConflict, ServiceBusy, ServiceUnavailable, UnknownJob, and
        CallError if the client token stands for another request, or the name for another run by now."""
        answer = await self._put(operation)
        if isinstance(answer, DLRoverRLError):
            raise answer
        assert answer is not None, "an operation on a job is answered with it"
        return answer

    async def resize(self, name: str, role: str, num: int) -> JobRecord:
        """Raises UnknownJob, InvalidJob, and CallError if the job does not run or its role cannot be resized."""
        record = self._ledger.get(name)
        check_new_size(name, role, num, record.roles)
        if record.phase is not JobPhase.RUNNING:
            raise CallError(f"'{name}' is {record.phase}: only a running job can be resized")
        await self._runner.resize(record, role, num)
        saved = await self._put(Schedule())  # after what the runner has reported
        if isinstance(saved, DLRoverRLError):
            raise saved
        return self._ledger.get(name)

    def get(self, name: str) -> JobRecord:
        """The newest run of a job. Raises UnknownJob."""
        return self._with_reason(self._ledger.get(name))

    def list_jobs(self, ended: bool = False) -> list[JobRecord]:
        """All runs that have not ended, then those that have ``ended``, each the newest first."""
        records = (self._ledger.records if ended else self._ledger.unfinished).values()
        ordered = sorted(records, key=lambda record: (record.phase.ended, -record.sequence))
        return [self._with_reason(record) for record in ordered]

    def counts(self) -> tuple[dict[str, int], int, int]:
        """The jobs of each phase that have not ended, all events, and the submissions that made a job."""
        jobs = Counter(record.phase for record in self._ledger.unfinished.values())
        by_phase = {phase.value: jobs[phase] for phase in JobPhase if not phase.ended}
        return by_phase, self._ledger.last_event, self._submissions

    def _with_reason(self, record: JobRecord) -> JobRecord:
        """A queued job says why it waits."""
        if record.phase is not JobPhase.QUEUED:
            return record
        return replace(record, reason=self._ledger.waiting_reasons().get(record.run, ""))

    async def wait(self, name: str, timeout_s: float) -> JobRecord:
        """The job once it has ended, or as it is after ``timeout_s``. Raises UnknownJob."""
        run = self._ledger.get(name).run
        with self._feed.listening(name) as news, suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while run in self._ledger.unfinished and not self._closed:
                    news.clear()
                    await news.wait()  # waits: for an event of the job
        return self._ledger.records.get(run) or self._ledger.get(name)

    async def watch(self, name: str = "", after: int = 0, follow: bool = True) -> AsyncIterator[list[JobEvent]]:
        """Pages of the events above ``after``, each once. Ends with the last one there is, or, if it is to ``follow``,
        when the named job has ended. Raises UnknownJob."""
        run = self._ledger.get(name).run if name else ""
        with self._feed.listening(name) as news:
            while True:
                news.clear()
                ended = bool(name) and run not in self._ledger.unfinished
                page, after = await self._feed.page(after, name)
                if page:
                    yield page
                if page or after < self._feed.last:
                    continue
                if not follow or ended or self._closed:
                    return
                await news.wait()  # waits: for news
                await asyncio.sleep(_GATHER_S)

    def _put(self, operation: Operation) -> asyncio.Future[Answer]:
        if self._closed:
            raise ServiceUnavailable("the service is ending")
        if self._requests.qsize() >= _MAX_WAITING:
            raise ServiceUnavailable("the service is overloaded: try again later")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((operation, answer))
        return answer

    def _note(self, operation: Observed | Schedule) -> None:
        if not self._closed:
            self._requests.put_nowait((operation, None))

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while not self._closed:
            if self._unsaved:
                batch = [self._unsaved.popleft() for _ in range(min(_BATCH, len(self._unsaved)))]
            else:
                batch = [await self._requests.get()]  # waits: for the next request
                while len(batch) < _BATCH and not self._requests.empty():
                    batch.append(self._requests.get_nowait())
            try:
                await self._take(batch)
            except Exception as error:  # noqa: BLE001 -- the service must go on serving
                _LOG.exception("a group of requests failed")
                for request in batch:
                    self._settle(request, ServiceUnavailable(f"internal error: {type(error).__name__}"))

    async def _take(self, batch: list[_Request]) -> None:
        """Decide all of a batch, save it, answer, and let the runner do what follows from it."""
        draft, at_s = Draft(self._ledger, lambda: os.urandom(4).hex()), self._wall_s()
        answers = [draft.decide(operation, at_s) for operation, _ in batch]
        draft.decide(Schedule(), at_s)
        if draft.changed:
            change = draft.changed.values(), draft.events, draft.descriptions, ()
            try:
                await asyncio.to_thread(self._store.write, *change)
            except ServiceUnavailable as error:
                # Refuse what people have asked by now; what the runner has seen is decided again later, in its order.
                _LOG.error("%s", error)
                waiting = [self._requests.get_nowait() for _ in range(self._requests.qsize())]
                for request in (*batch, *waiting):
                    self._settle(request, error)
                self._unsaved.extendleft(request for request in reversed(batch) if request[1] is None)
                self._unsaved.extend(request for request in waiting if request[1] is None)
                await asyncio.sleep(_RETRY_S)
                return
        forgotten = self._ledger.adopt(draft)
        self._feed.add(draft.events)
        self._submissions += sum(event.kind == "submitted" for event in draft.events)
        for request, answer in zip(batch, answers, strict=True):
            self._settle(request, answer)
        for record in draft.changed.values():
            await self._tell_runner(record, draft.descriptions)
        if forgotten:
            await asyncio.to_thread(self._store.write, (), (), {}, forgotten)

    @staticmethod
    def _settle(request: _Request, answer: Answer) -> None:
        _, future = request
        if future is not None and not future.done():
            future.set_result(answer)

    async def _tell_runner(self, record: JobRecord, descriptions: Mapping[str, JobDescription]) -> None:
        """Let the runner do what the saved state of a job asks for; ``descriptions`` are of new runs."""
        before = self._known.get(record.run)
        if record.phase.ended:
            self._known.pop(record.run, None)
            return
        if not record.phase.holds_resources:
            return
        self._known[record.run] = record
        if before is None:
            try:
                description = descriptions.get(record.run)
                if description is None:
                    description = await asyncio.to_thread(self._store.description, record.run)
            except DLRoverRLError as error:
                self._note(Observed(record.name, record.run, JobPhase.FAILED, str(error), cause="internal"))
                return
            self._runner.run(record, description)
        if record.phase is JobPhase.STOPPING and (
            before is None or before.phase is not JobPhase.STOPPING or record.hard > before.hard
        ):
            self._runner.stop(record)

    async def _watch_capacity(self) -> None:
        """Nodes come and go: what did not fit may fit now."""
        while True:
            await asyncio.sleep(self._capacity_every_s)
            try:
                capacity = await self._runner.capacity()
            except Exception as error:  # noqa: BLE001 -- the cluster may be away for a while
                _LOG.warning("the cluster does not tell its resources: %s", error)
                continue
            if capacity != self._ledger.capacity:
                self._ledger.capacity = capacity
                self._note(Schedule())
