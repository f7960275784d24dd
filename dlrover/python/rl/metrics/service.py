# SPDX-License-Identifier: Apache-2.0
"""The metrics of the job service: its requests, its jobs by phase, its events."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


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
