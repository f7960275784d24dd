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
from dataclasses import dataclass, replace
from itertools import islice

from dlrover.python.rl.common.errors import CallError, DLRoverRLError, ServiceUnavailable
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.master.process.brain import check_new_size
from dlrover.python.rl.master.process.metrics import ServiceCounts
from dlrover.python.rl.service.jobs.ledger import Answer, Draft, Ledger, QueueLimits, Refused
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
from dlrover.python.rl.service.jobs.store import JobStore
from dlrover.python.rl.service.runner import JobRunner

_LOG = get_logger(__name__)

_BATCH = 500
_PAGE = 1000
_RECENT = 10_000
_MOST_FRESH = 1000
_RETRY_S = 0.5
_GATHER_S = 0.02  # for a watcher, who then gets more events in fewer messages
_MAX_WAITING = 5000


@dataclass
class _Request:
    operation: Operation
    answer: asyncio.Future[Answer] | None = None  # None: nobody waits


class JobManager:
    def __init__(
        self,
        store: JobStore,
        runner: JobRunner,
        limits: QueueLimits | None = None,
        wall_s: Callable[[], float] = time.time,
        capacity_every_s: float = 5.0,
    ) -> None:
        self._store, self._runner, self._wall_s = store, runner, wall_s
        self._capacity_every_s = capacity_every_s
        records, last_event = store.load()
        self._ledger = Ledger(limits or QueueLimits(), records, last_event)
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._unsaved: deque[_Request] = deque()  # what the runner has seen and could not be saved: before all requests
        self._recent: list[JobEvent] = []  # the last ones, without gaps
        self._news = asyncio.Condition()
        self._listeners: dict[str, set[asyncio.Event]] = {}
        self._fresh: dict[str, JobDescription] = {}  # of the last submissions, which often run at once
        self._known: dict[str, JobRecord] = {}  # what the runner was told, by run
        self._reasons: Mapping[str, str] = {}  # why queued runs wait
        self._reasons_at = -1  # the number of the event after which they were found
        self._tasks: list[asyncio.Task[None]] = []
        self._submissions = 0
        self._closed = False

    async def start(self) -> None:
        """Take up the jobs that run, and begin to serve."""
        self._runner.attach(self._note)
        self._ledger.capacity = await self._runner.capacity()
        for record in list(self._ledger.unfinished()):
            if record.phase.holds_resources:
                await self._tell_runner(record)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._serve()), loop.create_task(self._watch_capacity())]
        self._note(Schedule())

    async def close(self) -> None:
        """Stop serving, after what is being saved; the jobs go on."""
        self._closed = True
        self._requests.put_nowait(_Request(Schedule()))  # wakes the loop
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.close()
        while not self._requests.empty():
            self._settle(self._requests.get_nowait(), Refused(ServiceUnavailable("the service is ending")))
        async with self._news:
            self._news.notify_all()
        self._tell_listeners(self._listeners)
        self._store.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def submit(self, operation: SubmitJob) -> JobRecord:
        """Raises JobConflict, ServiceBusy, ServiceUnavailable, and CallError if the client token stands for another
        request."""
        return _record(await self._ask(operation))

    async def stop(self, operation: StopJob) -> JobRecord:
        """Raises UnknownJob, ServiceUnavailable, and CallError if the name stands for another run by now."""
        return _record(await self._ask(operation))

    async def resize(self, name: str, role: str, num: int) -> JobRecord:
        """Raises UnknownJob, InvalidJob, and CallError if the job does not run or its role cannot be resized."""
        record = self._ledger.get(name)
        check_new_size(name, role, num, record.roles)
        if record.phase is not JobPhase.RUNNING:
            raise CallError(f"'{name}' is {record.phase}: only a running job can be resized")
        await self._runner.resize(record, role, num)
        await self._ask(Schedule())  # after what the runner has reported
        return self._ledger.get(name)

    def get(self, name: str) -> JobRecord:
        """The newest run of a job. Raises UnknownJob."""
        return self._with_reason(self._ledger.get(name))

    def list_jobs(self, ended: bool = False, limit: int = 100) -> list[JobRecord]:
        """All runs that have not ended, then ``limit`` of those that have ``ended``, each the newest first."""
        count = self._ledger.count(ended=False) + limit
        return [self._with_reason(record) for record in islice(self._ledger.newest_first(ended), count)]

    def count_jobs(self, ended: bool) -> int:
        """The number of runs; those that have ``ended`` too."""
        return self._ledger.count(ended)

    def counts(self) -> ServiceCounts:
        jobs = Counter(record.phase for record in self._ledger.unfinished())
        by_phase = {phase.value: jobs[phase] for phase in JobPhase if not phase.ended}
        return ServiceCounts(by_phase, self._ledger.last_event, self._submissions)

    def _with_reason(self, record: JobRecord) -> JobRecord:
        """A queued job says why it waits."""
        if record.phase is not JobPhase.QUEUED:
            return record
        if self._reasons_at != self._ledger.last_event:
            self._reasons_at, self._reasons = self._ledger.last_event, self._ledger.waiting_reasons()
        return replace(record, reason=self._reasons.get(record.run, ""))

    async def wait(self, name: str, timeout_s: float) -> JobRecord:
        """The job once it has ended, or as it is after ``timeout_s``. Raises UnknownJob."""
        run = self._ledger.get(name).run

        def current() -> JobRecord:
            return self._ledger.by_run(run) or self._ledger.get(name)

        async with self._news:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait_for(lambda: current().phase.ended or self._closed)
        return current()

    async def watch(self, name: str = "", after: int = 0, follow: bool = True) -> AsyncIterator[list[JobEvent]]:
        """Pages of the events above ``after``, each once. Ends with the last one there is, or, if it is to ``follow``,
        when the named job has ended. Raises UnknownJob."""
        run = self._ledger.get(name).run if name else ""
        with self._listening(name) as news:
            while True:
                news.clear()
                ended = bool(name) and ((record := self._ledger.by_run(run)) is None or record.phase.ended)
                page, after = await self._events(after, name)
                if page:
                    yield page
                if page or after < self._ledger.last_event:
                    continue
                if not follow or ended or self._closed:
                    return
                await news.wait()  # waits: for news
                await asyncio.sleep(_GATHER_S)

    @contextmanager
    def _listening(self, name: str) -> Iterator[asyncio.Event]:
        """Set at each event of a job, of all jobs for ""; to wake everybody at each event would take the most time."""
        news = asyncio.Event()
        self._listeners.setdefault(name, set()).add(news)
        try:
            yield news
        finally:
            self._listeners[name].discard(news)
            if not self._listeners[name]:
                del self._listeners[name]

    def _tell_listeners(self, names: Iterable[str]) -> None:
        for name in {"", *names}:
            for news in self._listeners.get(name, ()):
                news.set()

    async def _events(self, after: int, name: str) -> tuple[list[JobEvent], int]:
        """A page of the saved events, and the number up to which there is none but those. From memory, if all of them
        are there."""
        last = self._ledger.last_event
        if after >= last:
            return [], after
        if self._recent and self._recent[0].number <= after + 1:
            fresh = self._recent[after + 1 - self._recent[0].number :]
            return [event for event in fresh if name in ("", event.name)], last
        page = await asyncio.to_thread(self._store.events, after, name, _PAGE)
        return [event for event in page if event.number <= last], last if len(page) < _PAGE else page[-1].number

    async def _ask(self, operation: Operation) -> JobRecord | None:
        if self._closed:
            raise ServiceUnavailable("the service is ending")
        if self._requests.qsize() >= _MAX_WAITING:
            raise ServiceUnavailable("the service is overloaded: try again later")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(_Request(operation, future))
        answer = await future
        if isinstance(answer, Refused):
            raise answer.error
        return answer

    def _note(self, operation: Observed | Schedule) -> None:
        if not self._closed:
            self._requests.put_nowait(_Request(operation))

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while not self._closed:
            batch = await self._next_batch()
            try:
                await self._take(batch)
            except Exception as error:  # noqa: BLE001 -- the service must go on serving
                _LOG.exception("a group of requests failed")
                for request in batch:
                    self._settle(request, Refused(ServiceUnavailable(f"internal error: {type(error).__name__}")))

    async def _next_batch(self) -> list[_Request]:
        if self._unsaved:
            return [self._unsaved.popleft() for _ in range(min(_BATCH, len(self._unsaved)))]
        batch = [await self._requests.get()]  # waits: for the next request
        while len(batch) < _BATCH and not self._requests.empty():
            batch.append(self._requests.get_nowait())
        return batch

    async def _take(self, batch: list[_Request]) -> None:
        draft, at_s = Draft(self._ledger, lambda: os.urandom(4).hex()), self._wall_s()
        answers = [draft.decide(request.operation, at_s) for request in batch]
        draft.decide(Schedule(), at_s)
        if draft.changed:
            try:
                await self._save(draft)
            except ServiceUnavailable as error:
                await self._put_off(batch, error)
                return
        forgotten = self._ledger.adopt(draft)
        self._recent += draft.events
        self._submissions += sum(event.kind == "submitted" for event in draft.events)
        if len(self._recent) > 2 * _RECENT:
            del self._recent[:-_RECENT]
        for request, answer in zip(batch, answers, strict=True):
            self._settle(request, answer)
        self._fresh |= draft.descriptions
        for record in draft.changed.values():
            await self._tell_runner(record)
        for run in list(self._fresh)[:-_MOST_FRESH]:
            del self._fresh[run]
        if forgotten:
            await asyncio.to_thread(self._store.write, (), (), {}, forgotten)
        self._tell_listeners(event.name for event in draft.events)
        if draft.changed:
            async with self._news:
                self._news.notify_all()

    async def _save(self, draft: Draft) -> None:
        await asyncio.to_thread(self._store.write, draft.changed.values(), draft.events, draft.descriptions, ())

    async def _put_off(self, batch: list[_Request], error: ServiceUnavailable) -> None:
        """Refuse what people have asked by now; what the runner has seen is decided again later, in its order."""
        _LOG.error("%s", error)
        waiting = [self._requests.get_nowait() for _ in range(self._requests.qsize())]
        for request in (*batch, *waiting):
            self._settle(request, Refused(error))
        self._unsaved.extendleft(request for request in reversed(batch) if request.answer is None)
        self._unsaved.extend(request for request in waiting if request.answer is None)
        await asyncio.sleep(_RETRY_S)

    @staticmethod
    def _settle(request: _Request, answer: Answer) -> None:
        if request.answer is not None and not request.answer.done():
            request.answer.set_result(answer)

    async def _tell_runner(self, record: JobRecord) -> None:
        """Let the runner do what the saved state of a job asks for."""
        before = self._known.get(record.run)
        if record.phase.ended:
            self._known.pop(record.run, None)
            return
        if not record.phase.holds_resources:
            return
        self._known[record.run] = record
        if before is None:
            try:
                description = self._fresh.pop(record.run, None) or await self._saved_description(record.run)
            except DLRoverRLError as error:
                self._note(Observed(record.name, record.run, JobPhase.FAILED, str(error), cause="internal"))
                return
            self._runner.run(record, description)
        if record.phase is JobPhase.STOPPING and (
            before is None or before.phase is not JobPhase.STOPPING or record.hard > before.hard
        ):
            self._runner.stop(record)

    async def _saved_description(self, run: str) -> JobDescription:
        return await asyncio.to_thread(self._store.description, run)

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
                self._ledger.capacity, self._reasons_at = capacity, -1
                self._note(Schedule())


def _record(answer: JobRecord | None) -> JobRecord:
    assert answer is not None, "what people ask about a job is answered with it"
    return answer
