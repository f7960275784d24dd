# SPDX-License-Identifier: Apache-2.0
"""How much one caller, or one address, can take."""

import pytest

from dlrover.python.rl.common.errors import ServiceBusy
from dlrover.python.rl.service.jobs.submissions import CallLimit
from dlrover.python.rl.service.server import FailureLimit
from tests.support.manual_clock import ManualClock


def test_an_address_fails_ten_times_at_once_and_then_once_in_a_second():
    clock = ManualClock()
    limit = FailureLimit(now_s=clock)
    assert [limit.take("a") for _ in range(12)] == [True] * 10 + [False] * 2
    clock.advance(0.9)
    assert not limit.take("a")
    clock.advance(0.2)  # refusals cost nothing
    assert limit.take("a") and not limit.take("a")
    clock.advance(3600)
    assert [limit.take("a") for _ in range(12)] == [True] * 10 + [False] * 2


def test_addresses_do_not_share_their_failures():
    limit = FailureLimit(burst=1, now_s=ManualClock())
    assert limit.take("a") and limit.take("b") and not limit.take("a")


def test_many_addresses_take_no_more_memory_than_some():
    limit = FailureLimit(burst=1, most=3, now_s=ManualClock())
    for number in range(100):
        assert limit.take(f"address-{number}")
        limit.take("steady")
    assert len(limit._left) == 3
    assert not limit.take("steady")  # one that goes on failing is not forgotten


def test_places_are_those_of_a_caller_and_come_back():
    limit = CallLimit(2, "calls")
    with limit.hold("ann"), limit.hold("bob"):
        with limit.hold("ann"), pytest.raises(ServiceBusy, match="'ann' has 2 calls, the limit"):
            limit.hold("ann").__enter__()
        with limit.hold("ann"):
            pass
    assert not limit._held


def test_the_address_that_failed_longest_ago_is_forgotten():
    limit = FailureLimit(burst=1, most=2, now_s=ManualClock())
    assert [limit.take(address) for address in "abac"] == [True, True, False, True]
    assert not limit.take("a") and limit.take("b")
