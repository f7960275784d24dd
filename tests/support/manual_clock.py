# SPDX-License-Identifier: Apache-2.0
"""Time as a test sees fit."""

import time
from contextlib import contextmanager


class ManualClock:
    """A clock in seconds, like ``time.monotonic``, that the test advances."""

    def __init__(self, start_s=0.0):
        self.now_s = start_s

    def __call__(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds


@contextmanager
def within(seconds, clock=time.monotonic):
    """The block takes less time than this, by ``clock``."""
    began_s = clock()
    yield
    assert clock() - began_s < seconds
