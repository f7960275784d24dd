# SPDX-License-Identifier: Apache-2.0
"""How long calls to members took, as counts in buckets: small enough to travel with each step report."""

from collections.abc import Mapping

BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds in seconds; one bucket more is unbounded."""

CallCounts = Mapping[tuple[str, str], tuple[float, ...]]
"""(role, method) to the count of each bucket, and the sum of seconds as the last value."""
