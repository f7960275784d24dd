# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: all that Prometheus reads of a job and of the service, and the endpoint that it reads.
"""The metrics of one job, from its journal's events and its trainer's step reports; ``GET /metrics`` for Prometheus.

Goodput is the share of a job's time in which it makes progress. Each moment of a job has one use:

- ``start``: from its submission until its trainer enters ``steps()`` for the first time;
- ``useful``: steps run, and nothing is being recovered;
- ``recovery``: from a loss within ``steps()`` until the next progress; it has the steps that are done again;
- ``restart``: from a failure that ends all processes until the next progress;
- ``ending``: from the decided outcome until everything is released.

A recovery, a restart, and the end of a job that failed have a cause, which is the one of the failure that began them.
The journal alone decides it, so that anybody can check the figure afterwards.

On loopback the endpoint needs no token, since Prometheus has none by default; the check of the ``Host`` header keeps
out pages whose names were rebound to loopback. Beyond loopback it needs a bearer token and TLS.
"""

import hmac
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from math import isfinite, nan
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId, package_version
from dlrover.python.rl.common.sockets import is_loopback
from dlrover.python.rl.control.events import (
    CauseKind,
    Event,
    Failed,
    MemberLost,
    MemberStarted,
    NodeLost,
    Progressed,
    StandbyLost,
    StepsOpened,
    TrainerLost,
    TrainerStarted,
    Unplaced,
)
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState, MemberPhase, Phase
from dlrover.python.rl.trainer.call_counts import BUCKETS_S
from dlrover.python.rl.trainer.trainer import StepReport

MAX_CALL_SERIES = 200
"""Pairs of role and method; further ones count as the method ``other``."""

MAX_MEMBER_SERIES = 1000
"""Members that have series of their own; of a larger job the first ones."""

STEP_METRICS = {
    "reward": ("reward/mean", "reward"),
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "kl": ("policy/kl", "policy/approx_kl"),
    "entropy": ("policy/entropy",),
    "mismatch_kl": ("policy/mismatch_kl",),
    "staleness_steps": ("samples/staleness_max",),
    "failed_samples": ("samples/failed",),
    "tokens_per_second": ("speed/tokens_per_s",),
    "rollout_tokens_per_second": ("speed/rollout_tokens_per_s",),
    "weight_sync_seconds": ("time/sync",),
    "weight_sync_bytes": ("weights/sync_bytes",),
    "generation_seconds": ("time/generation",),
    "update_seconds": ("time/update",),
}
"""Gauges of the last step: the end of the name, and the metrics of a step that it is taken from."""

COMMIT_SECONDS, SYNC_BYTES = "time/commit", "weights/sync_bytes"
SANDBOX_LEVELS = ("bubblewrap", "namespaces", "limits", "none")
"""Of ``sandbox/<level>`` in a step's metrics."""

_RECOVERY_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

_TIMEOUT_S = 10.0
_MAX_CLIENTS = 20
_CLOSING_S = 0.05
"""How soon it sees that it is closed."""

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class _Buckets:
    """Counts of a histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0.0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        at = sum(value > bound for bound in self._bounds)
        self._counts[at] += 1
        self._sum += value

    def merge(self, counts: tuple[float, ...]) -> None:
        """Counts of each bucket, and the sum as the last value."""
        for at, count in enumerate(counts[:-1]):
            self._counts[at] += count
        self._sum += counts[-1]

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        total, rows = 0.0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            rows.append((bound, total))
        family.add_metric(labels, rows, self._sum)


class JobMetrics:
    """Collected by ``registry``. Labels are the job's name, roles, ranks, methods and causes: a bounded number."""

    def __init__(self, job: str, run: str, wall_s: Any) -> None:
        self._job, self._run, self._wall_s = job, run, wall_s
        self._state = JobState()
        self.account = TimeAccount()
        self.failures: dict[tuple[str, str], int] = {}  # (role, cause)
        self._restarts = dict.fromkeys(CauseKind, 0)
        self._moved = {"weights": 0.0, "commits": 0.0}  # bytes
        self._beats: dict[ProcessId, float] = {}  # when each process was heard last
        self._pending: Mapping[str, int] = {}
        self._commits = _Buckets(BUCKETS_S)
        self._recovering: dict[ProcessId, float] = {}
        self._recovery = dict[str, _Buckets]()
        self._calls: dict[tuple[str, str], _Buckets] = {}
        self._steps = _Buckets(BUCKETS_S)
        self._report: StepReport | None = None
        self._reported_s = 0.0
        self._values: dict[str, float] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    # -- what happens -------------------------------------------------------------------------------------------------

    def replay(self, events: Iterable[tuple[float, Event]]) -> None:
        """What the journal says of the time before this process."""
        for at_s, event in events:
            before, (after, _) = self._state, step(self._state, event, at_s)
            self.take(at_s, before, after, event)

    def take(self, at_s: float, before: JobState, after: JobState, event: Event) -> None:
        """An event that was journalled."""
        self._state = after
        self.account.take(at_s, before, after, event)
        if after is before:
            return
        if isinstance(event, LOSSES):
            self._restarts[event.cause.kind] += after.restarts - before.restarts
            key = (event.cause.role if not isinstance(event, Failed) else "job", event.cause.kind.value)
            self.failures[key] = self.failures.get(key, 0) + 1
        for process_id in _lost(before, after):
            self._recovering.setdefault(process_id, at_s)
        started = _started(event)
        if started in self._recovering:
            took_s = at_s - self._recovering.pop(started)
            self._recovery.setdefault(started.role, _Buckets(_RECOVERY_BUCKETS_S)).add(took_s)

    def beat(self, process_id: ProcessId, pending: Mapping[str, int]) -> None:
        """A process was heard; ``pending`` are the calls that a trainer waits for, by role."""
        if process_id == TRAINER_ID:
            self._pending = pending
        elif process_id in self._state.members:
            self._beats[process_id] = self._wall_s()

    def report(self, report: StepReport) -> None:
        now_s = self._wall_s()
        if self._report is not None and report.step > self._report.step:
            self._steps.add(report.metrics.get("time/step", now_s - self._reported_s))
        commit_s, sync_bytes = (report.metrics.get(name, nan) for name in (COMMIT_SECONDS, SYNC_BYTES))
        if isfinite(commit_s):
            self._commits.add(commit_s)
        self._moved["weights"] += max(sync_bytes, 0.0) if isfinite(sync_bytes) else 0.0
        self._moved["commits"] += report.commit_bytes
        self._report, self._reported_s, self._pending = report, now_s, report.pending
        for name, sources in STEP_METRICS.items():
            value = next((report.metrics[source] for source in sources if source in report.metrics), None)
            if value is not None and isfinite(value):
                self._values[name] = value
        for key, counts in report.calls.items():
            known = key in self._calls or len(self._calls) < MAX_CALL_SERIES
            self._calls.setdefault(key if known else (key[0], "other"), _Buckets(BUCKETS_S)).merge(counts)

    # -- what is exported ---------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        state, job = self._state, [self._job]
        info = InfoMetricFamily("rl_job", "The job and its run.", labels=["job_name"])
        info.add_metric(job, {"run": self._run, "version": package_version()})
        yield info
        yield self._gauge(
            "phase", "1 for the phase that the job is in.", {p.value: float(p is state.phase) for p in Phase}, "phase"
        )
        step_now, total = (self._report.step, self._report.total_steps) if self._report else (0, 0)
        yield self._gauge("step", "The last reported step.", float(step_now))
        yield self._gauge("total_steps", "Steps that the job is to take, 0: unknown.", float(total))
        yield self._gauge(
            "committed_step", "The last step that the journal knows to be committed.", float(state.committed)
        )
        yield self._gauge("last_report_timestamp_seconds", "When the last step was reported.", self._reported_s)
        yield self._gauge("members", "Members that are up.", _members(state, up=True), "role")
        yield self._gauge("members_wanted", "Members that the job has.", _members(state, up=False), "role")
        yield from self._of_members()
        pending = {role: float(self._pending.get(role, 0)) for role in self._roles()}
        yield self._gauge("pending_calls", "Calls under way.", pending, "role")
        restarts = {kind.value: float(count) for kind, count in self._restarts.items()}
        yield self._counter("restarts", "Restarts of the whole job.", restarts, "cause")
        yield self._counter(
            "moved_bytes", "Weights that each rollout received, and commits written.", self._moved, "of"
        )
        yield self._counter("master_starts", "Processes that the master has had.", float(state.master_starts))
        failures = CounterMetricFamily("rl_job_failures", "Lost processes.", labels=["job_name", "role", "cause"])
        for (role, cause), count in self.failures.items():
            failures.add_metric([self._job, role, cause], count)
        yield failures
        yield from self._times()
        yield from self._histograms()
        reported = self._report.metrics if self._report else {}
        levels = {level: reported.get(f"sandbox/{level}", 0.0) for level in SANDBOX_LEVELS}
        yield self._gauge("sandbox_members", "Members that confine programs of the model.", levels, "level")
        for name, value in self._values.items():
            yield self._gauge(name, f"Of the last step: {' or '.join(STEP_METRICS[name])}.", value)

    def _roles(self) -> list[str]:
        return list(self._state.settings.roles) if self._state.settings is not None else []

    def _times(self) -> Iterator[Metric]:
        account = replace(self.account, seconds=dict(self.account.seconds))
        account.book(self._wall_s())
        family = CounterMetricFamily(
            "rl_job_time_seconds",
            "Time of the job by its use, and why it was lost.",
            labels=["job_name", "use", "cause"],
        )
        for (use, cause), seconds in ({(use, ""): 0.0 for use in TimeUse} | account.seconds).items():
            family.add_metric([self._job, use.value, cause], seconds)
        yield family
        yield self._gauge("goodput_ratio", "Useful time / wall time.", account.goodput)

    def _of_members(self) -> Iterator[Metric]:
        labels, now_s = ["job_name", "role", "rank"], self._wall_s()
        up = GaugeMetricFamily("rl_job_member_up", "1 for a member that is up.", labels=labels)
        age = GaugeMetricFamily(
            "rl_job_member_heartbeat_age_seconds", "Since a member that is up was heard.", labels=labels
        )
        for process_id, member in islice(sorted(self._state.members.items()), MAX_MEMBER_SERIES):
            names = [self._job, process_id.role, str(process_id.rank)]
            is_up = member.phase is MemberPhase.UP
            up.add_metric(names, float(is_up))
            if is_up and process_id in self._beats:
                age.add_metric(names, max(now_s - self._beats[process_id], 0.0))
        yield from (up, age)

    def _histograms(self) -> Iterator[Metric]:
        steps = HistogramMetricFamily("rl_job_step_seconds", "Duration of steps.", labels=["job_name"])
        self._steps.add_to(steps, [self._job])
        yield steps
        commits = HistogramMetricFamily("rl_job_commit_seconds", "Commits, as the trainer waits.", labels=["job_name"])
        self._commits.add_to(commits, [self._job])
        yield commits
        recovery = HistogramMetricFamily(
            "rl_job_recovery_seconds", "From a loss to the replacement.", labels=["job_name", "role"]
        )
        for role, buckets in self._recovery.items():
            buckets.add_to(recovery, [self._job, role])
        yield recovery
        calls = HistogramMetricFamily("rl_job_call_seconds", "Calls to members.", labels=["job_name", "role", "method"])
        for (role, method), buckets in list(self._calls.items()):
            buckets.add_to(calls, [self._job, role, method])
        yield calls

    def _gauge(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._family(GaugeMetricFamily, name, text, value, label)

    def _counter(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._family(CounterMetricFamily, name, text, value, label)

    def _family(self, kind: Any, name: str, text: str, value: float | Mapping[str, float], label: str) -> Metric:
        labelled = value if isinstance(value, Mapping) else {"": value}
        family: Metric = kind(f"rl_job_{name}", text, labels=["job_name", label] if label else ["job_name"])
        for which, amount in labelled.items():
            family.add_metric([self._job, which] if label else [self._job], amount)  # type: ignore[attr-defined]
        return family


def _lost(before: JobState, after: JobState) -> Iterator[ProcessId]:
    """The processes that were up before and are not any more."""
    if not before.members.up:
        return
    for process_id in after.members.changed_since(before.members):
        now = after.members.get(process_id)
        if before.members[process_id].phase is MemberPhase.UP and (now is None or now.phase is not MemberPhase.UP):
            yield process_id


def _started(event: Event) -> ProcessId:
    match event:
        case MemberStarted(role=role, rank=rank):
            return ProcessId(role, rank)
        case TrainerStarted():
            return ProcessId("trainer", 0)
    return ProcessId("", 0)


def _members(state: JobState, up: bool) -> dict[str, float]:
    counts = {role: 0.0 for role in (state.settings.roles if state.settings else ())}
    for process_id, member in state.members.items():
        counts[process_id.role] = counts.get(process_id.role, 0.0) + float(not up or member.phase is MemberPhase.UP)
    return counts


LOSSES = (MemberLost, StandbyLost, TrainerLost, NodeLost, Unplaced, Failed)
"""Events that have a cause."""


class TimeUse(StrEnum):
    START = "start"
    USEFUL = "useful"
    RECOVERY = "recovery"
    RESTART = "restart"
    ENDING = "ending"


@dataclass
class TimeAccount:
    """Seconds by use and cause, a CauseKind or ""; ``since_s`` is the Unix time up to which they are booked, 0 before
    the first event."""

    use: TimeUse = TimeUse.START
    cause: str = ""
    since_s: float = 0.0
    over: bool = False
    seconds: dict[tuple[TimeUse, str], float] = field(default_factory=dict)

    def take(self, at_s: float, before: JobState, after: JobState, event: Event) -> None:
        if self.over:
            return
        self.book(at_s)
        use = _next_use(self.use, before, after, event)
        if use is not self.use:
            self.use, self.cause = use, _cause_of(use, after, event)
        self.over = after.phase.terminal

    def book(self, now_s: float) -> None:
        """Count the time up to now."""
        if self.since_s and not self.over:
            key = self.use, self.cause
            self.seconds[key] = self.seconds.get(key, 0.0) + max(now_s - self.since_s, 0.0)
        self.since_s = max(now_s, self.since_s)

    def spent_s(self, use: TimeUse) -> float:
        return sum(seconds for (booked, _), seconds in self.seconds.items() if booked is use)

    @property
    def goodput(self) -> float:
        """From 0 to 1; 0 before any time has passed."""
        total = sum(self.seconds.values())
        return self.spent_s(TimeUse.USEFUL) / total if total else 0.0


def _next_use(use: TimeUse, before: JobState, after: JobState, event: Event) -> TimeUse:
    if after.phase is Phase.ENDING or after.phase.terminal:
        return TimeUse.ENDING
    if after.phase is Phase.RESTARTING and before.phase is not Phase.RESTARTING:
        return TimeUse.RESTART
    if isinstance(event, StepsOpened) and use is TimeUse.START and after.incarnation <= 1:
        return TimeUse.USEFUL
    if isinstance(event, Progressed) and use in (TimeUse.RECOVERY, TimeUse.RESTART):
        return TimeUse.USEFUL
    if isinstance(event, MemberLost | TrainerLost | NodeLost) and after is not before and use is TimeUse.USEFUL:
        return TimeUse.RECOVERY
    return use


def _cause_of(use: TimeUse, after: JobState, event: Event) -> str:
    if use is TimeUse.ENDING:
        return after.failure.kind.value if after.failure is not None else ""
    is_loss = use in (TimeUse.RECOVERY, TimeUse.RESTART)
    return event.cause.kind.value if is_loss and isinstance(event, LOSSES) else ""


def tls_context(certificate: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """For a server; clients need a certificate of ``client_ca``, where there is one. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class MetricsEndpoint:
    """Serves ``registry`` in a thread until it is closed. Raises CallError beyond loopback without a token or without
    TLS, OSError if the address is taken."""

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        if not is_loopback(host) and (not token or tls is None):
            raise CallError(
                f"metrics at {host}, which is beyond loopback, need a token and TLS: set metrics_token_file,"
                " metrics_tls_cert and metrics_tls_key (serve: --metrics-token-file, --tls-cert, --tls-key), or keep"
                " them on loopback, behind a proxy"
            )
        self._server = _Server((host, port), _handler(registry, token, is_loopback(host)))
        if tls is not None:
            # The handshake is at the first read, in the client's own thread and within its time.
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.address = f"{host}:{self._server.server_address[1]}"
        self.url = f"{'https' if tls is not None else 'http'}://{self.address}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSING_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _MAX_CLIENTS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.BoundedSemaphore(_MAX_CLIENTS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _handler(registry: CollectorRegistry, token: str, is_local: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S
        server_version, sys_version = "dlrover-rl", ""

        def do_GET(self) -> None:
            refusal = self._refusal()
            body = b"" if refusal else generate_latest(registry)
            self.send_response(refusal or HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _refusal(self) -> HTTPStatus | None:
            host = (self.headers.get("Host") or "").rpartition(":")[0].strip("[]")
            if self.headers.get("Origin") is not None or (is_local and not is_loopback(host)):
                return HTTPStatus.FORBIDDEN
            if token and not hmac.compare_digest(
                (self.headers.get("Authorization") or "").encode("latin-1"), f"Bearer {token}".encode()
            ):
                return HTTPStatus.UNAUTHORIZED
            return None if self.path == "/metrics" else HTTPStatus.NOT_FOUND

        def _not_allowed(self) -> None:
            self.send_response(HTTPStatus.METHOD_NOT_ALLOWED)
            self.send_header("Allow", "GET")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _not_allowed

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes are not logged."""

    return Handler


@dataclass(frozen=True)
class ServiceCounts:
    jobs: Mapping[str, int]  # by phase, without those that have ended
    events: int = 0
    submissions: int = 0  # that made a job


class ServiceMetrics:
    """Collected by ``registry``. Methods and codes are those of the protocol: no client can add a series."""

    def __init__(self, counts: Callable[[], ServiceCounts]) -> None:
        self._counts = counts
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "rl_service_requests", "Requests that have ended.", ["method", "code"], registry=self.registry
        )
        self._seconds = Histogram(
            "rl_service_request_seconds",
            "Duration of requests that do not stream.",
            ["method"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(self)

    def count(self, method: str, code: str) -> None:
        self._requests.labels(method, code).inc()

    def time(self, method: str, seconds: float) -> None:
        self._seconds.labels(method).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        jobs = GaugeMetricFamily("rl_service_jobs", "Jobs that have not ended.", labels=["phase"])
        for phase, number in counts.jobs.items():
            jobs.add_metric([phase], number)
        yield jobs
        yield CounterMetricFamily("rl_service_events", "Events of all jobs.", value=counts.events)
        yield CounterMetricFamily("rl_service_submissions", "Accepted submissions.", value=counts.submissions)
