# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder may enter a time zone."""

import time

import pytest


@pytest.fixture
def in_zone(monkeypatch):
    """Puts this process into a time zone."""

    def enter(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield enter
    monkeypatch.undo()
    time.tzset()
