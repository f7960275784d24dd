# SPDX-License-Identifier: Apache-2.0
"""Signals that user code cannot lose."""

import gc
import os
import signal
import time

import pytest

from dlrover.python.rl.runtime.process.interrupts import Interrupts, insistent_interrupts


class Finalizer:
    """Gets a signal where Python drops the exception of its handler."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


def wait(limit_s):
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finalizer_swallows_comes_again():
    with pytest.raises(KeyboardInterrupt), insistent_interrupts():
        Finalizer()
        gc.collect()
        wait(10)
    wait(1)  # no more of them afterwards


def test_sigterm_interrupts_too_and_the_handlers_are_python_s_own_again():
    with pytest.raises(KeyboardInterrupt), insistent_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        wait(10)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_somebody_else_stays(monkeypatch):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with insistent_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_signals_are_counted():
    with Interrupts(signal.SIGINT, signal.SIGTERM) as interrupts:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert interrupts.count == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
