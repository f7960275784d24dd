# SPDX-License-Identifier: Apache-2.0
"""Limits of what one caller, one address, or connections without a call take of the service."""

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dlrover.python.rl.common.errors import ServiceBusy

_SILENT_S = 10.0
"""Time for a connection to agree on TLS and HTTP/2, and then between its calls. A stream, such as one that watches,
keeps its connection."""

_RESERVE = 256
"""Descriptors for the store, files of runs, Ray and child processes; half of them all where that is less."""


class CallLimit:
    """How many calls of one caller are answered at the same time."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, caller: str) -> Iterator[None]:
        """Raises ServiceBusy."""
        if self._held[caller] >= self._most:
            raise ServiceBusy(f"'{caller}' has {self._most} {self._what}, as many as allowed: end some, or wait")
        self._held[caller] += 1
        try:
            yield
        finally:
            self._held[caller] -= 1
            if not self._held[caller]:
                del self._held[caller]


class FailureLimit:
    """How often an address may fail: ``burst`` times at once, then ``per_s``. Of all addresses the ``most`` that failed
    last are remembered."""

    def __init__(
        self, burst: float = 10.0, per_s: float = 1.0, most: int = 10_000, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._per_s, self._most, self._now_s = burst, per_s, most, now_s
        self._left: dict[str, tuple[float, float]] = {}  # failures that are left, and when; the latest address last

    def take(self, address: str) -> bool:
        """Count a failure; False if there was none left."""
        now_s = self._now_s()
        left, at_s = self._left.pop(address, (self._burst, now_s))
        left = min(left + (now_s - at_s) * self._per_s, self._burst)
        has_room = left >= 1.0
        self._left[address] = (left - has_room, now_s)
        if len(self._left) > self._most:
            del self._left[next(iter(self._left))]
        return has_room


def connection_options() -> tuple[tuple[str, int], ...]:
    """Raise this process's limit of open files as far as it may, and return gRPC's options that fit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    silent_ms = round(_SILENT_S * 1000)
    return (
        ("grpc.server_handshake_timeout_ms", silent_ms),
        ("grpc.max_connection_idle_ms", silent_ms),
        ("grpc.max_allowed_incoming_connections", hard - min(_RESERVE, hard // 2)),
    )
