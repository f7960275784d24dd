# SPDX-License-Identifier: Apache-2.0
"""Signals that user code cannot lose."""

import fcntl
import gc
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

import pytest

from dlrover.python.rl.runtime.interrupts import hangup_terminates, insistent_interrupts, noted_signals, sigterm_unwinds


class Finalizer:
    """Gets a signal where Python drops the exception of its handler."""

    def __init__(self, number=signal.SIGINT):
        self.number = number

    def __del__(self):
        os.kill(os.getpid(), self.number)
        time.sleep(0.01)


def wait(limit_s):
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        time.sleep(0.01)


@contextmanager
def handled(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("interrupts", [insistent_interrupts, sigterm_unwinds])
def test_earlier_handler_stays(interrupts):
    signals = []
    with handled(signal.SIGTERM, lambda number, frame: signals.append(number)), interrupts() as take_back:
        if take_back:
            take_back()
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals == [signal.SIGTERM]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_swallowed_by_a_finalizer_comes_again():
    with pytest.raises(KeyboardInterrupt), insistent_interrupts():
        Finalizer()
        gc.collect()
        wait(10)
    wait(1)  # no more of them afterwards


def test_sigterm_interrupts_and_handlers_are_restored():
    with pytest.raises(KeyboardInterrupt), insistent_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        wait(10)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_are_counted():
    with noted_signals(signal.SIGINT, signal.SIGTERM) as interrupts:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert interrupts == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_unwinds_despite_the_handler_of_a_library():
    before, closed = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as ended, sigterm_unwinds() as take_back:
        signal.signal(signal.SIGTERM, lambda number, frame: closed.append("the library's"))
        take_back()
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # it is ending already
            closed.append("ours")
    assert (ended.value.code, closed) == (143, ["ours"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_swallowed_by_a_finalizer_comes_again_once():
    closed, hook = [], sys.unraisablehook
    with pytest.raises(SystemExit) as ended, sigterm_unwinds():
        try:
            Finalizer(signal.SIGTERM)
            gc.collect()
            wait(10)
        finally:
            wait(1)
            closed.append("ours")
    assert (ended.value.code, closed, sys.unraisablehook) == (143, ["ours"], hook)


def test_other_errors_of_finalizers_are_reported(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda swallowed: seen.append(type(swallowed.exc_value)))

    class Broken:
        def __del__(self):
            raise SystemExit(143)

    with sigterm_unwinds():
        Broken()
        gc.collect()
    assert seen == [SystemExit]


HUNG_UP = """
import sys, time
from dlrover.python.rl.runtime.interrupts import hangup_terminates, sigterm_unwinds
hangup_terminates()
with sigterm_unwinds():
    try:
        print("ready", flush=True)
        for _ in range(600):  # a signal just before a sleep does not cut it short
            time.sleep(0.1)
    finally:
        print("where nothing reads it", flush=True)
        open(sys.argv[1], "w").write("cleaned up")
"""


def hung_up(end, **streams):
    """A command that is to be hung up, also if the tests ignore that."""

    def prepare():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if "stdin" in streams:
            fcntl.ioctl(streams["stdin"], termios.TIOCSCTTY, 0)

    return subprocess.Popen([sys.executable, "-c", HUNG_UP, end], start_new_session=True, preexec_fn=prepare, **streams)


@pytest.mark.parametrize("has_terminal", [True, False], ids=["closed terminal", "signal and closed output"])
def test_hung_up_command_cleans_up(tmp_path, has_terminal):
    if has_terminal:
        window, terminal = pty.openpty()
        command = hung_up(tmp_path / "end", stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        assert os.read(window, 5) == b"ready"
        os.close(window)
    else:
        command = hung_up(tmp_path / "end", stdout=subprocess.PIPE)
        assert command.stdout.read(5) == b"ready"
        command.stdout.close()
        command.send_signal(signal.SIGHUP)
    assert command.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "end").read_text() == "cleaned up"


def test_command_under_nohup_ignores_a_closed_terminal():
    with handled(signal.SIGHUP, signal.SIG_IGN):
        hangup_terminates()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
