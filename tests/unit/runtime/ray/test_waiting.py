# SPDX-License-Identifier: Apache-2.0
"""A trainer that waits in Ray's own functions is not taken for one whose own code hangs."""

import threading

import pytest

pytest.importorskip("ray")

from dlrover.python.rl.runtime.ray.processes.trainer import _is_waiting_in_ray


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
