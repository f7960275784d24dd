# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: all metrics of a job and of the service, and the endpoint from which Prometheus reads them.
"""The metrics of one job, from its journal's events and its trainer's step reports; ``GET /metrics`` for Prometheus.

Goodput is the share of a job's time in which it makes progress. Each moment of a job has one use:

- ``start``: from its submission until its trainer enters ``steps()`` for the first time;
- ``useful``: steps run, and nothing is being recovered;
- ``recovery``: from a loss within ``steps()`` until the next progress, including the steps that are repeated;
- ``resize``: from the end of a role's workers until the next progress, which the role makes with its new size;
- ``restart``: from a failure that ends all processes until the next progress;
- ``ending``: from the decided outcome until everything is released.

A recovery, a restart, and the end of a failed job have the cause of the failure that began them. All of it follows from
the journal, so it can be checked afterwards.

On loopback the endpoint needs no token, since Prometheus sends none by default; the check of the ``Host`` header keeps
out pages whose names were rebound to loopback. Beyond loopback it needs a bearer token and TLS.
"""

import hmac
import json
import re
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, islice
from math import isfinite, nan
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from dlrover.python.rl.common.errors import CallError
from dlrover.python.rl.common.names import TRAINER_ID, ProcessId, package_version
from dlrover.python.rl.common.sockets import is_loopback
from dlrover.python.rl.control import events
from dlrover.python.rl.control.events import CauseKind, Event
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState, MemberPhase, Phase
from dlrover.python.rl.trainer.port import BUCKETS_S
from dlrover.python.rl.trainer.trainer import StepReport

ADDRESS = "metrics.json"
"""The file in a run's folder with the address of its metrics."""

MAX_CALL_SERIES = 200
"""Pairs of role and method; further ones count as the method ``other``."""

MAX_MEMBER_SERIES = 1000
"""Workers with separate series; of a larger job the first ones."""

STEP_METRICS = {
    "reward": ("reward/mean", "reward"),
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "kl": ("policy/kl", "policy/approx_kl"),
    "entropy": ("policy/entropy",),
    "completion_tokens": ("completions/length_mean",),
    "truncated_ratio": ("completions/truncated",),
    "learning_rate": ("lr",),
    "device_memory_gib": ("memory/peak_gib",),
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
"""Gauges of the last step that has them: the end of the name, and the metrics of a step that may give its value."""

_EVALUATION = re.compile("eval/(?:(.+)/)?reward")
"""The mean reward of an evaluation: of a set with a name, or of the only set."""

COMMIT_SECONDS, SYNC_BYTES = "time/commit", "weights/sync_bytes"
SANDBOX_LEVELS = ("bubblewrap", "external", "namespaces", "limits", "none")
"""The levels of ``sandbox/<level>`` in a step's metrics."""

_RECOVERY_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

_TIMEOUT_S = 10.0
_MAX_CLIENTS = 20
_CLOSING_S = 0.05  # it sees within this time that it is closed

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


_FAMILIES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "phase": (GaugeMetricFamily, "1 for the phase that the job is in.", ("phase",)),
    "step": (GaugeMetricFamily, "The last reported step.", ()),
    "total_steps": (GaugeMetricFamily, "Steps that the job is to take, 0: unknown.", ()),
    "committed_step": (GaugeMetricFamily, "The last step that the journal knows to be committed.", ()),
    "last_report_timestamp_seconds": (GaugeMetricFamily, "When the last step was reported.", ()),
    "members": (GaugeMetricFamily, "Workers that are up.", ("role",)),
    "members_wanted": (GaugeMetricFamily, "Workers that the job has.", ("role",)),
    "member_up": (GaugeMetricFamily, "1 for a worker that is up.", ("role", "rank")),
    "member_heartbeat_age_seconds": (GaugeMetricFamily, "Seconds since the last heartbeat.", ("role", "rank")),
    "member_call_seconds": (GaugeMetricFamily, "Since its call began or progressed, 0: it has none.", ("role", "rank")),
    "pending_calls": (GaugeMetricFamily, "Calls under way.", ("role",)),
    "restarts": (CounterMetricFamily, "Restarts of the whole job.", ("cause",)),
    "moved_bytes": (CounterMetricFamily, "Weights that each rollout received, and commits written.", ("of",)),
    "master_starts": (CounterMetricFamily, "Processes that the master has had.", ()),
    "failures": (CounterMetricFamily, "Lost processes.", ("role", "cause")),
    "time_seconds": (CounterMetricFamily, "Time of the job by its use, and why it was lost.", ("use", "cause")),
    "goodput_ratio": (GaugeMetricFamily, "Useful time / wall time.", ()),
    "step_seconds": (HistogramMetricFamily, "Duration of steps.", ()),
    "commit_seconds": (HistogramMetricFamily, "Commits, as the trainer waits.", ()),
    "recovery_seconds": (HistogramMetricFamily, "From a loss to the replacement.", ("role",)),
    "call_seconds": (HistogramMetricFamily, "Calls to workers.", ("role", "method")),
    "evaluation_reward": (GaugeMetricFamily, "Of the last evaluation: eval/reward.", ("set",)),
    "sandbox_members": (GaugeMetricFamily, "Workers that confine programs of the model.", ("level",)),
    **{
        name: (GaugeMetricFamily, f"Of the last step: {' or '.join(sources)}.", ())
        for name, sources in STEP_METRICS.items()
    },
}
"""The metrics exported as ``rl_job_<name>``: kind, help, and labels in addition to the job's name."""


class JobMetrics:
    """The metrics of one job in ``registry``. Labels are its name, roles, ranks, methods and causes: all bounded."""

    def __init__(self, job: str, run: str, wall_s: Callable[[], float]) -> None:
        self._job, self._wall_s = job, wall_s
        self._state = JobState()
        self.account = TimeAccount()
        self._counts: dict[tuple[str, ...], float] = defaultdict(float)  # values by family and labels
        self._durations: dict[tuple[str, ...], list[float]] = {}  # likewise: counts of each bucket, and the sum
        self._gauges = {"step": 0.0, "total_steps": 0.0, "last_report_timestamp_seconds": 0.0}
        self._beats: dict[ProcessId, tuple[float, float | None]] = {}  # times of heartbeat and begin of the call
        self._recovering: dict[ProcessId, float] = {}
        self._pending: Mapping[str, int] = {}
        self._report: StepReport | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        about = Info("rl_job", "The job and its run.", ["job_name"], registry=self.registry)
        about.labels(job).info({"run": run, "version": package_version()})
        self.registry.register(self)

    # -- what happens -------------------------------------------------------------------------------------------------

    def replay(self, journal: Iterable[tuple[float, Event]]) -> None:
        """Count the events of the journal, from before this process."""
        for at_s, event in journal:
            before, (after, _) = self._state, step(self._state, event, at_s)
            self.take(at_s, before, after, event)

    def take(self, at_s: float, before: JobState, after: JobState, event: Event) -> None:
        """Count an event that was journalled."""
        self._state = after
        self.account.take(at_s, before, after, event)
        if after is before:
            return
        if isinstance(event, LOSSES):
            cause = event.cause
            self._counts["restarts", cause.kind.value] += after.restarts - before.restarts
            self._counts["failures", "job" if isinstance(event, events.Failed) else cause.role, cause.kind.value] += 1
        for process_id in after.members.changed_since(before.members) if before.members.up else ():
            now = after.members.get(process_id)
            is_up = now is not None and now.phase is MemberPhase.UP
            if before.members[process_id].phase is MemberPhase.UP and not is_up:
                self._recovering.setdefault(process_id, at_s)
        started = ProcessId(event.role, event.rank) if isinstance(event, events.MemberStarted) else None
        if started in self._recovering:
            self._time("recovery_seconds", started.role, seconds=at_s - self._recovering.pop(started))

    def beat(self, process_id: ProcessId, pending: Mapping[str, int], call_s: float | None = None) -> None:
        """Note a heartbeat; ``pending`` are the calls that a trainer waits for, by role; ``call_s`` are the seconds
        since a worker's call began or progressed, None without a call."""
        if process_id == TRAINER_ID:
            self._pending = pending
        elif process_id in self._state.members:
            now_s = self._wall_s()
            self._beats[process_id] = now_s, None if call_s is None else now_s - call_s

    def report(self, report: StepReport) -> None:
        metrics, now_s = report.metrics, self._wall_s()
        if self._report is not None and report.step > self._report.step:
            since_s = now_s - self._gauges["last_report_timestamp_seconds"]
            self._time("step_seconds", seconds=metrics.get("time/step", since_s))
        commit_s, sync_bytes = (metrics.get(name, nan) for name in (COMMIT_SECONDS, SYNC_BYTES))
        if isfinite(commit_s):
            self._time("commit_seconds", seconds=commit_s)
        self._counts["moved_bytes", "weights"] += max(sync_bytes, 0.0) if isfinite(sync_bytes) else 0.0
        self._counts["moved_bytes", "commits"] += report.commit_bytes
        self._report, self._pending = report, report.pending
        self._gauges |= {"step": report.step, "total_steps": report.total_steps, "last_report_timestamp_seconds": now_s}
        for name, sources in STEP_METRICS.items():
            value = next((metrics[source] for source in sources if source in metrics), nan)
            if isfinite(value):
                self._gauges[name] = value
        for name, value in metrics.items():
            if (match := _EVALUATION.fullmatch(name)) is not None and isfinite(value):
                self._counts["evaluation_reward", match[1] or ""] = value
        methods = sum(family == "call_seconds" for family, *_ in self._durations)
        for (role, method), counts in report.calls.items():
            if ("call_seconds", role, method) not in self._durations:
                methods += 1
                method = method if methods <= MAX_CALL_SERIES else "other"
            series = self._durations.setdefault(("call_seconds", role, method), [0.0] * len(counts))
            series[:] = map(add, series, counts)

    def _time(self, *series: str, seconds: float) -> None:
        bounds = _bounds(series[0])
        counts = self._durations.setdefault(series, [0.0] * (len(bounds) + 2))
        counts[sum(seconds > bound for bound in bounds)] += 1
        counts[-1] += seconds

    # -- what is exported ---------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        samples = self._samples()
        for name, (kind, text, labels) in _FAMILIES.items():
            if name in STEP_METRICS and name not in self._gauges:
                continue
            family = kind(f"rl_job_{name}", text, labels=["job_name", *labels])
            for values, amount in samples.get(name, {}).items():
                if kind is HistogramMetricFamily:
                    rows = zip([*map(str, _bounds(name)), "+Inf"], accumulate(amount[:-1]), strict=True)
                    family.add_metric([self._job, *values], list(rows), amount[-1])
                else:
                    family.add_metric([self._job, *values], amount)
            yield family

    def _samples(self) -> dict[str, dict[tuple[str, ...], Any]]:
        """Return the values of each family by their labels."""
        state, now_s = self._state, self._wall_s()
        roles = list(state.settings.roles) if state.settings is not None else []
        ids = {process_id: member.phase is MemberPhase.UP for process_id, member in state.members.items()}
        shown = {each: ids[each] for each in islice(sorted(ids), MAX_MEMBER_SERIES)}
        wanted, up = (Counter[str](dict.fromkeys(roles, 0)) for _ in range(2))
        wanted.update(each.role for each in ids)
        up.update(each.role for each, is_up in ids.items() if is_up)
        beats = {(each.role, str(each.rank)): self._beats[each] for each in shown if ids[each] and each in self._beats}
        account = replace(self.account, seconds=dict(self.account.seconds))
        account.book(now_s)
        times = {(use, ""): 0.0 for use in TimeUse} | account.seconds
        reported = self._report.metrics if self._report else {}
        samples: dict[str, dict[tuple[str, ...], Any]] = {
            "phase": {(phase.value,): float(phase is state.phase) for phase in Phase},
            "committed_step": {(): state.committed},
            "members": {(role,): up[role] for role in wanted},
            "members_wanted": {(role,): number for role, number in wanted.items()},
            "member_up": {(each.role, str(each.rank)): float(is_up) for each, is_up in shown.items()},
            "member_heartbeat_age_seconds": {each: max(now_s - at_s, 0.0) for each, (at_s, _) in beats.items()},
            "member_call_seconds": {
                each: 0.0 if since_s is None else max(now_s - since_s, 0.0) for each, (_, since_s) in beats.items()
            },
            "pending_calls": {(role,): self._pending.get(role, 0) for role in roles},
            "restarts": {(kind.value,): 0 for kind in CauseKind},
            "moved_bytes": {("weights",): 0, ("commits",): 0},
            "master_starts": {(): state.master_starts},
            "time_seconds": {(use.value, cause): seconds for (use, cause), seconds in times.items()},
            "goodput_ratio": {(): account.goodput},
            "step_seconds": {(): [0.0] * (len(BUCKETS_S) + 2)},
            "commit_seconds": {(): [0.0] * (len(BUCKETS_S) + 2)},
            "sandbox_members": {(level,): reported.get(f"sandbox/{level}", 0.0) for level in SANDBOX_LEVELS},
            **{name: {(): value} for name, value in dict(self._gauges).items()},
        }
        for counted in (self._counts, self._durations):
            for (name, *labels), value in list(counted.items()):
                samples.setdefault(name, {})[tuple(labels)] = value
        return samples


def _bounds(family: str) -> tuple[float, ...]:
    return _RECOVERY_BUCKETS_S if family == "recovery_seconds" else BUCKETS_S


LOSSES = (events.MemberLost, events.StandbyLost, events.TrainerLost, events.NodeLost, events.Unplaced, events.Failed)
"""Events that have a cause."""


class TimeUse(StrEnum):
    START = "start"
    USEFUL = "useful"
    RECOVERY = "recovery"
    RESIZE = "resize"
    RESTART = "restart"
    ENDING = "ending"


@dataclass
class TimeAccount:
    """Seconds by use and cause, a CauseKind or "". They are booked up to the Unix time ``since_s``, 0 before the first
    event."""

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
            self.use, self.cause = use, ""
            if use is TimeUse.ENDING and after.failure is not None:
                self.cause = after.failure.kind.value
            elif use in (TimeUse.RECOVERY, TimeUse.RESTART) and isinstance(event, LOSSES):
                self.cause = event.cause.kind.value
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
        """The useful share, from 0 to 1; 0 before any time has passed."""
        total = sum(self.seconds.values())
        return self.spent_s(TimeUse.USEFUL) / total if total else 0.0


def _next_use(use: TimeUse, before: JobState, after: JobState, event: Event) -> TimeUse:
    if after.phase is Phase.ENDING or after.phase.terminal:
        return TimeUse.ENDING
    if after.phase is Phase.RESTARTING and before.phase is not Phase.RESTARTING:
        return TimeUse.RESTART
    match event:
        case events.StepsOpened() if use is TimeUse.START and after.incarnation <= 1:
            return TimeUse.USEFUL
        case events.Progressed() if use is not TimeUse.START and event.epoch == after.epoch:
            return TimeUse.USEFUL
        case events.Resized() if after is not before and use is TimeUse.USEFUL:
            return TimeUse.RESIZE
        case events.MemberLost() | events.TrainerLost() | events.NodeLost():
            if after is not before and use in (TimeUse.USEFUL, TimeUse.RESIZE):
                return TimeUse.RECOVERY
    return use


def tls_context(certificate: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """Return a server's context; clients need a certificate of ``client_ca`` if there is one. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class MetricsEndpoint(ThreadingHTTPServer):
    """Serves ``registry`` at ``/metrics`` in a thread until it is closed, and ``targets``, for Prometheus's discovery
    by HTTP, at ``/sd``. Raises CallError beyond loopback without a token or without TLS, OSError if the address is
    taken."""

    daemon_threads = True
    request_queue_size = _MAX_CLIENTS

    def __init__(
        self,
        registry: CollectorRegistry,
        address: tuple[str, int],
        token: str = "",
        tls: ssl.SSLContext | None = None,
        targets: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        host, port = address
        if not is_loopback(host) and (not token or tls is None):
            raise CallError(
                f"metrics at {host}, which is beyond loopback, need a token and TLS: set metrics_token_file,"
                " metrics_tls_cert and metrics_tls_key (serve: --metrics-token-file, --tls-cert, --tls-key), or keep"
                " them on loopback, behind a proxy"
            )
        self._slots = threading.BoundedSemaphore(_MAX_CLIENTS)
        super().__init__((host, port), _handler(registry, token, is_loopback(host), targets))
        if tls is not None:
            # The handshake is at the first read, in the client's thread and within its timeout.
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.address = f"{host}:{self.server_address[1]}"
        self.url = f"{'https' if tls is not None else 'http'}://{self.address}/metrics"
        threading.Thread(target=self.serve_forever, args=(_CLOSING_S,), name="metrics", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

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
        """Ignore a client that went away."""


def _handler(
    registry: CollectorRegistry, token: str, is_local: bool, targets: Callable[[], list[dict[str, Any]]] | None
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S
        server_version, sys_version = "dlrover-rl", ""

        def do_GET(self) -> None:
            refusal = self._refusal()
            list_targets = targets if self.path == "/sd" else None
            body, kind = b"", CONTENT_TYPE_LATEST
            if not refusal and list_targets is not None:
                body, kind = json.dumps(list_targets()).encode(), "application/json"
            elif not refusal:
                body = generate_latest(registry)
            self.send_response(refusal or HTTPStatus.OK)
            self.send_header("Content-Type", kind)
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
            is_known = self.path == "/metrics" or (self.path == "/sd" and targets is not None)
            return None if is_known else HTTPStatus.NOT_FOUND

        def _not_allowed(self) -> None:
            self.send_response(HTTPStatus.METHOD_NOT_ALLOWED)
            self.send_header("Allow", "GET")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _not_allowed

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes are not logged."""

    return Handler


MAX_ENDED_SERIES, _RECENT_S = 200, 3600.0


class EndedJob(NamedTuple):
    job_name: str
    owner: str
    phase: str
    cause: str
    at_s: float


class ServiceMetrics:
    """The metrics of the service in ``registry``. Methods and codes are from the protocol: no client can add a series.
    ``counts`` returns the running jobs by phase, all events, and the submissions that made a job; ``ended`` the jobs
    that have ended, the newest last."""

    def __init__(
        self,
        counts: Callable[[], tuple[Mapping[str, int], int, int]],
        ended: Callable[[], Iterable[EndedJob]] = tuple,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._counts, self._ended, self._wall_s = counts, ended, wall_s
        self.registry = CollectorRegistry(auto_describe=False)
        self._requests = prometheus_client.Counter(
            "rl_service_requests", "Requests that have ended.", ["method", "code"], registry=self.registry
        )
        duration = "rl_service_request_seconds", "Duration of requests that do not stream.", ["method"]
        self._seconds = Histogram(*duration, buckets=_BUCKETS_S, registry=self.registry)
        self.registry.register(self)

    def count(self, method: str, code: str) -> None:
        self._requests.labels(method, code).inc()

    def time(self, method: str, seconds: float) -> None:
        self._seconds.labels(method).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        by_phase, events, submissions = self._counts()
        jobs = GaugeMetricFamily("rl_service_jobs", "Jobs that have not ended.", labels=["phase"])
        for phase, number in by_phase.items():
            jobs.add_metric([phase], number)
        yield jobs
        yield CounterMetricFamily("rl_service_events", "Events of all jobs.", value=events)
        yield CounterMetricFamily("rl_service_submissions", "Accepted submissions.", value=submissions)
        ended = list(self._ended())
        numbers = Counter((job.phase, job.owner, job.cause) for job in ended)
        total = CounterMetricFamily("rl_service_jobs_ended", "Ended jobs.", labels=["phase", "owner", "cause"])
        for labels, number in numbers.items():
            total.add_metric(labels, number)
        yield total
        # A counter that appears with 1 has no increase: alerts read when each job has ended.
        text = "When a job of the last hour has ended."
        recent = GaugeMetricFamily("rl_service_job_ended_timestamp_seconds", text, labels=list(EndedJob._fields[:-1]))
        newest = {job[:-1]: job.at_s for job in ended[-MAX_ENDED_SERIES:] if self._wall_s() - job.at_s < _RECENT_S}
        for about, at_s in newest.items():
            recent.add_metric(about, at_s)
        yield recent
