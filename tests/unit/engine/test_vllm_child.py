# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM's own process, here of a process without vLLM: each gets its own answer, also after Ctrl-C."""

import os
import signal

import pytest

from dlrover.python.rl.common.errors import EngineDied, EngineError
from dlrover.python.rl.engine.vllm import child
from dlrover.python.rl.engine.vllm.child import ChildRunner

STAND_IN = """
import sys, time
from multiprocessing.connection import Connection
from pathlib import Path
from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.vllm import child

class StandIn:
    has_weights = True
    runner = property(lambda self: self)

    def step(self):
        while not Path("go").exists():
            time.sleep(0.01)
        return [("the answer to step", 1, -0.5)]

    def abort(self, names):
        return None

    def cache_bytes(self):
        return 7

    def wake(self, kind):
        raise EngineError(f"no room for {kind}")

    def sleep(self, keep_weights):
        self.has_weights = keep_weights

    load = None

child.start_here = lambda *arguments: StandIn()
child.serve(Connection(int(sys.argv[1])))
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    (tmp_path / "stand_in_for_vllm.py").write_text(STAND_IN)
    monkeypatch.setattr(child, "_MODULE", "stand_in_for_vllm")
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = ChildRunner({}, on_cpu=True, env={**os.environ, "PYTHONPATH": path})
    yield made
    made.close()


def interrupt(runner):
    """Ctrl-C while a call waits for its answer."""

    def raise_interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            runner.step()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_after_an_interrupted_call_the_next_ones_get_their_own_answers(runner, tmp_path):
    interrupt(runner)
    (tmp_path / "go").touch()
    assert runner.abort(["0"]) is None
    with pytest.raises(EngineError, match="no room for weights"):
        runner.wake("weights")
    assert runner.cache_bytes() == 7
    runner.sleep(keep_weights=False)
    assert runner.has_weights is False
    assert runner.step() == [("the answer to step", 1, -0.5)]


def test_a_message_that_was_cut_ends_the_process(runner, monkeypatch):
    def interrupted(message):
        raise KeyboardInterrupt

    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(runner._connection, "send", interrupted)
        runner.cache_bytes()
    with pytest.raises(EngineDied):
        runner.cache_bytes()
    assert runner._process.poll() == -signal.SIGKILL
