# SPDX-License-Identifier: Apache-2.0
"""The jobs of the service: operations are decided one after another, saved in groups, answered once they are saved.

::

    requests, runner --Operation--> queue -> draft of the ledger -> store -> ledger -> answers, watchers, runner

One task takes all operations that have arrived, decides them one after another, and saves them in one transaction, so
that a slow disk delays requests but does not limit their rate. No change is visible before it is saved; a failed write
changes nothing. The runner's work follows from the saved jobs alone, and the next process of the service repeats it.
"""

import asyncio
import json
import os
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from dlrover.python.rl.common.errors import CallError, DLRoverRLError, ServiceUnavailable
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.private_files import open_file
from dlrover.python.rl.master.process.brain import check_new_size
from dlrover.python.rl.master.process.metrics import ADDRESS, EndedJob
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
_GATHER_S = 0.02  # a watcher then gets more events in fewer messages
_MAX_WAITING = 5000
_ADDRESS = re.compile(r"[\w.-]+:\d{1,5}|\[[0-9a-f:]+\]:\d{1,5}")  # a job may write anything to its folder

_Request: TypeAlias = tuple[Operation, asyncio.Future[Answer] | None]  # None: no answer is awaited


class EventFeed:
    """The events of all jobs, and their listeners. The last events are in memory, without gaps; the store has all."""

    def __init__(self, store: SqliteJobStore, last_event: int) -> None:
        self._store, self.last = store, last_event
        self._recent: list[JobEvent] = []
        self._listeners: dict[str, set[asyncio.Event]] = {}

    def add(self, events: list[JobEvent]) -> None:
        """Add saved events, and wake the listeners of their jobs."""
        if events:
            self._recent += events
            self.last = events[-1].number
            self.wake(event.name for event in events)
        if len(self._recent) > 2 * _RECENT:
            del self._recent[:-_RECENT]

    def wake(self, names: Iterable[str] | None = None) -> None:
        """Wake the listeners of these jobs and of all jobs; by default every listener."""
        for name in {"", *(self._listeners if names is None else names)}:
            for news in self._listeners.get(name, ()):
                news.set()

    @contextmanager
    def listening(self, name: str) -> Iterator[asyncio.Event]:
        """Give an event that is set at each event of a job, or of any job for ""."""
        news = asyncio.Event()
        self._listeners.setdefault(name, set()).add(news)
        try:
            yield news
        finally:
            self._listeners[name].discard(news)
            if not self._listeners[name]:
                del self._listeners[name]

    async def page(self, after: int, name: str) -> tuple[list[JobEvent], int]:
        """Return some events above ``after``, and the number of the last event that was considered."""
        last = self.last
        if after >= last:
            return [], after
        if self._recent and self._recent[0].number <= after + 1:
            newer = self._recent[after + 1 - self._recent[0].number :]
            return [event for event in newer if name in ("", event.name)], last
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
        self._store, self._runner, self._wall_s, self._capacity_every_s = store, runner, wall_s, capacity_every_s
        records, last_event = store.load()
        self._ledger = Ledger(limits or QueueLimits(), records, last_event)
        self._feed = EventFeed(store, last_event)
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._unsaved: deque[_Request] = deque()  # reports of the runner that could not be saved; they come first
        self._passed_on: dict[str, JobRecord] = {}  # what the runner has been given, by run
        self._tasks: list[asyncio.Task[None]] = []
        self._submissions = 0
        self._closed = False

    async def start(self) -> None:
        """Follow the running jobs, and begin to serve."""
        self._runner.attach(self._note)
        self._ledger.capacity = await self._runner.capacity()
        for record in list(self._ledger.unfinished.values()):
            if record.phase.holds_resources:
                await self._tell_runner(record, {})
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._serve()), loop.create_task(self._watch_capacity())]
        self._note(Schedule())

    async def close(self) -> None:
        """Stop serving, after the current write; the jobs stay as they are."""
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
        """Return the job once the operation is saved. Raises JobConflict, ServiceBusy, ServiceUnavailable, UnknownJob,
        and CallError if the client token belongs to another request, or the name to a newer run."""
        answer = await self._put(operation)
        if isinstance(answer, DLRoverRLError):
            raise answer
        assert answer is not None, "an operation on a job is answered with it"
        return answer

    async def resize(self, name: str, role: str, num: int) -> JobRecord:
        """Resize a role. Raises UnknownJob, InvalidJob, and CallError if the job or the role cannot be resized."""
        record = self._ledger.get(name)
        check_new_size(record.name, role, num, record.roles)
        if record.phase is not JobPhase.RUNNING:
            raise CallError(f"'{name}' is {record.phase}: only a running job can be resized")
        await self._runner.resize(record, role, num)
        saved = await self._put(Schedule())  # after the runner's report
        if isinstance(saved, DLRoverRLError):
            raise saved
        return self._ledger.get(name)

    def get(self, name: str) -> JobRecord:
        """Return the newest run of a name, or the run of NAME@RUN. Raises UnknownJob."""
        return self._with_reason(self._ledger.get(name))

    def list_jobs(self, ended: bool = False) -> list[JobRecord]:
        """Return all unfinished runs, then, if ``ended`` is True, the ended ones; each the newest first."""
        records = (self._ledger.records if ended else self._ledger.unfinished).values()
        ordered = sorted(records, key=lambda record: (record.phase.ended, -record.sequence))
        return [self._with_reason(record) for record in ordered]

    def counts(self) -> tuple[dict[str, int], int, int]:
        """Return the number of unfinished jobs by phase, of events, and of jobs submitted to this process."""
        jobs = Counter(record.phase for record in self._ledger.unfinished.values())
        by_phase = {phase.value: jobs[phase] for phase in JobPhase if not phase.ended}
        return by_phase, self._ledger.last_event, self._submissions

    def ended(self) -> list[EndedJob]:
        """Return the runs that have ended, the newest last."""
        records = sorted([*self._ledger.records.values()], key=lambda record: record.ended_s)
        return [
            EndedJob(each.name, each.owner, each.phase.value, each.cause, each.ended_s)
            for each in records
            if each.phase.ended
        ]

    def work_dirs(self) -> set[str]:
        """Return the folders, relative to the root, that the remembered runs need."""
        return {record.work_dir for record in self._ledger.records.values()}

    def owners(self, folder: str) -> set[str]:
        """Return the owners of the runs whose files are in ``folder``."""
        records = self._ledger.records.values() if folder else ()
        return {record.owner for record in records if folder in (record.folder, record.results)}

    def targets(self) -> list[dict[str, Any]]:
        """Return the metrics endpoints of running jobs, each with its job and owner, for Prometheus's discovery."""
        targets = []
        for record in [*self._ledger.unfinished.values()]:
            folder = record.folder or record.results
            with suppress(OSError, ValueError, TypeError, KeyError), open_file(Path(folder) / ADDRESS) as file:
                address = str(json.load(file)["address"])
                if _ADDRESS.fullmatch(address):
                    labels = {"job_name": record.name, "owner": record.owner}
                    targets.append({"targets": [address], "labels": labels})
        return targets

    def _with_reason(self, record: JobRecord) -> JobRecord:
        """Add to a queued job the reason why it waits."""
        if record.phase is not JobPhase.QUEUED:
            return record
        return replace(record, reason=self._ledger.waiting_reasons().get(record.run, ""))

    async def wait(self, name: str, timeout_s: float) -> JobRecord:
        """Return the job once it has ended, or as it is after ``timeout_s``. Raises UnknownJob."""
        record = self._ledger.get(name)
        run = record.run
        with self._feed.listening(record.name) as news, suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while run in self._ledger.unfinished and not self._closed:
                    news.clear()
                    await news.wait()  # waits: for an event of the job
        return self._ledger.records.get(run, record)

    async def watch(self, name: str = "", after: int = 0, follow: bool = True) -> AsyncIterator[list[JobEvent]]:
        """Yield pages of the events above ``after``, with ``follow`` until the named job ends; for NAME@RUN only of
        this run. Raises UnknownJob."""
        run, only = self._ledger.get(name).run if name else "", name.partition("@")[2]
        name = name.partition("@")[0]
        with self._feed.listening(name) as news:
            while True:
                news.clear()
                ended = bool(name) and run not in self._ledger.unfinished
                page, after = await self._feed.page(after, name)
                own = [event for event in page if only in ("", event.run)]
                if own:
                    yield own
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
            except Exception as error:  # noqa: BLE001 -- the service must continue
                _LOG.exception("a group of requests failed")
                for request in batch:
                    self._settle(request, ServiceUnavailable(f"internal error: {type(error).__name__}"))

    async def _take(self, batch: list[_Request]) -> None:
        """Decide and save a batch, answer its requests, and pass the changes on to the runner."""
        draft, at_s = Draft(self._ledger, lambda: os.urandom(4).hex()), self._wall_s()
        answers = [draft.decide(operation, at_s) for operation, _ in batch]
        draft.decide(Schedule(), at_s)
        if draft.changed:
            try:
                await asyncio.to_thread(self._store.write, draft.changed.values(), draft.events, draft.descriptions, ())
            except ServiceUnavailable as error:
                # Refuse the requests of callers; the runner's reports are decided again later, in their order.
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
        """Start or stop a run according to its saved state; ``descriptions`` are of new runs."""
        before = self._passed_on.pop(record.run, None)
        if not record.phase.holds_resources:
            return
        self._passed_on[record.run] = record
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
        """Schedule again when nodes join or leave the cluster."""
        while True:
            await asyncio.sleep(self._capacity_every_s)
            try:
                capacity = await self._runner.capacity()
            except Exception as error:  # noqa: BLE001 -- the cluster may be away for a while
                _LOG.warning("the cluster does not report its resources: %s", error)
                continue
            if capacity != self._ledger.capacity:
                self._ledger.capacity = capacity
                self._note(Schedule())
