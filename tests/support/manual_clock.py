# SPDX-License-Identifier: Apache-2.0
"""Time as a test sees fit."""


class ManualClock:
    """A clock in seconds, like ``time.monotonic``, that the test advances."""

    def __init__(self, start_s=0.0):
        self.now_s = start_s

    def __call__(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds
