# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder may be coroutine functions, and enter a time zone."""

import time

import pytest

from tests.support.async_tests import pytest_pyfunc_call  # noqa: F401


@pytest.fixture
def in_zone(monkeypatch):
    """Puts this process into a time zone."""

    def enter(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield enter
    monkeypatch.undo()
    time.tzset()
