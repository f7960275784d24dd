# SPDX-License-Identifier: Apache-2.0
"""A trainer that waits in Ray's own functions is not taken for one whose own code hangs."""

import threading

import pytest

pytest.importorskip("ray")

from dlrover.python.rl.common.errors import MasterLost
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.commands import StartTrainer
from dlrover.python.rl.runtime.ray.processes import trainer
from dlrover.python.rl.runtime.ray.processes.port import CallWatch, WatchedPort
from dlrover.python.rl.runtime.ray.processes.trainer import RayRecovery, _is_waiting_in_ray


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("ray._private.worker", "get", True),
        ("ray._private.worker", "wait", True),
        ("ray._private.worker", "put", False),
        ("users.own", "get", False),
    ],
)
def test_a_thread_waits_while_it_is_in_a_call_of_ray(module, name, expected):
    entered, leave = threading.Event(), threading.Event()
    scope = {"__name__": module, "entered": entered, "leave": leave}
    exec(f"def {name}():\n    entered.set()\n    leave.wait(60)", scope)
    thread = threading.Thread(target=scope[name])
    thread.start()
    assert entered.wait(60)
    assert _is_waiting_in_ray(thread) is expected
    leave.set()
    thread.join(60)
    assert _is_waiting_in_ray(thread) is False


def test_a_dead_master_is_asked_for_a_replacement_with_pauses(monkeypatch):
    asked = []

    def ask(request, timeout_s):
        asked.append(timeout_s)
        raise MasterLost("the master is gone")

    monkeypatch.setattr(trainer, "ask", ask)
    recovery = RayRecovery(None, WatchedPort(CallWatch()), {}, StartTrainer(1, True), 0.7)
    with pytest.raises(MasterLost):
        recovery._wait_for_replacement(ProcessId("ACTOR", 0), 1, "it is gone")
    assert len(asked) <= 3
