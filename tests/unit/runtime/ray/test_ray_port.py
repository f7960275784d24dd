# SPDX-License-Identifier: Apache-2.0
"""The port to Ray: workers out of reach, waits in calls of Ray, and the times of calls."""

import threading
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from dlrover.python.rl.common.errors import EngineDied, InvocationError, MasterLost, ResultLost, WorkloadDied
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.commands import StartTrainer
from dlrover.python.rl.runtime.ray.processes import port as module
from dlrover.python.rl.runtime.ray.processes import trainer
from dlrover.python.rl.runtime.ray.processes.port import CallWatch, RayPort, WatchedPort
from dlrover.python.rl.runtime.ray.processes.trainer import RayRecovery, _is_waiting_in_ray
from dlrover.python.rl.trainer.port import BUCKETS_S, Ref
from tests.support.manual_clock import ManualClock

ID = bytes(range(16))
UNAVAILABLE = ActorUnavailableError("the actor is temporarily unavailable", ID)
BROKEN_DEVICE = RuntimeError("CUDA error: uncorrectable ECC error encountered")


def error_of(error, role="ACTOR", rank=0):
    """The error that a call to ``ACTOR[rank]`` fails with; ``role`` is the one whose first worker is known."""
    handle = SimpleNamespace(_actor_id=SimpleNamespace(hex=ID.hex), dlrover_ping=SimpleNamespace(remote=lambda: "ping"))
    port = RayPort({role: [handle]})
    return port._as_invocation_error(error, Ref(port, None, None, "ACTOR", rank, "update", 1))


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ([UNAVAILABLE, UNAVAILABLE, True], ResultLost),
        ([UNAVAILABLE, UNAVAILABLE, GetTimeoutError()], ResultLost),
        ([UNAVAILABLE, ActorDiedError()], WorkloadDied),
        ([UNAVAILABLE] * 1000, WorkloadDied),
    ],
    ids=["idle", "busy", "dead", "away"],
)
def test_unavailable_worker_is_asked_again_before_it_is_replaced(monkeypatch, answers, kind):
    pings = iter(answers)

    def get(ref, timeout):
        assert ref == "ping"
        answer = next(pings)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_BACK_S", 0.2)
    assert type(error_of(UNAVAILABLE)) is kind
    assert len(answers) == 1000 or next(pings, None) is None


def test_death_of_the_member_of_an_argument_names_its_taker():
    died = ActorDiedError()
    died.actor_id = ID.hex()
    error = error_of(died, role="ROLLOUT")
    assert (type(error), error.role, error.rank) == (WorkloadDied, "ROLLOUT", 0)
    assert str(error).startswith("ROLLOUT[0]: its result, which ACTOR[0].update needs, is lost: The actor died")


@pytest.mark.parametrize(
    ("original", "rank", "kind"),
    [
        (BROKEN_DEVICE, 0, WorkloadDied),
        (EngineDied("the server of the engine has ended"), 0, WorkloadDied),
        (ValueError("wrong"), 0, InvocationError),
        (BROKEN_DEVICE, 1, InvocationError),  # of an argument
    ],
)
def test_error_of_a_broken_process_replaces_its_member(original, rank, kind):
    failure = InvocationError(f"{type(original).__name__}: {original}", role="ACTOR", rank=0, method="update")
    failure.original = original
    assert type(error_of(RayTaskError("update", "trace", failure), rank=rank)) is kind


WORKER = "ray._private.worker"


@pytest.mark.parametrize(("module_name", "name"), [(WORKER, "get"), (WORKER, "put"), ("users.own", "get")])
def test_thread_waits_while_it_is_in_a_call_of_ray(module_name, name):
    entered, leave = threading.Event(), threading.Event()
    scope = {"__name__": module_name, "entered": entered, "leave": leave}
    exec(f"def {name}():\n    entered.set()\n    leave.wait(60)", scope)
    thread = threading.Thread(target=scope[name])
    thread.start()
    assert entered.wait(60)
    assert _is_waiting_in_ray(thread) is ((module_name, name) == (WORKER, "get"))
    leave.set()
    thread.join(60)
    assert _is_waiting_in_ray(thread) is False


def test_dead_master_is_asked_for_a_replacement_with_pauses(monkeypatch):
    requests = []

    def ask(request, timeout_s):
        requests.append(timeout_s)
        raise MasterLost("the master is gone")

    monkeypatch.setattr(trainer, "ask", ask)
    recovery = RayRecovery(None, WatchedPort(CallWatch()), {}, StartTrainer(1, True), 0.7)
    with pytest.raises(MasterLost):
        recovery._wait_for_replacement(ProcessId("ACTOR", 0), 1, "it is gone")
    assert len(requests) <= 3


def test_call_watch_counts_each_call_once_in_its_bucket():
    clock = ManualClock()
    watch = CallWatch(clock)
    for call_id in (b"a", b"b"):
        watch.begin(call_id, "ROLLOUT", "generate")
    watch.begin(b"c", "ACTOR", "train")
    assert watch.pending() == {"ROLLOUT": 2, "ACTOR": 1}
    clock.advance(0.05)
    watch.end([b"a"])
    clock.advance(5000.0)
    watch.end([b"a", b"c"])  # the first one's result is read again
    assert watch.pending() == {"ROLLOUT": 1}
    counts = watch.drain()
    generate, train = counts["ROLLOUT", "generate"], counts["ACTOR", "train"]
    assert generate[BUCKETS_S.index(0.1)] == 1 and sum(generate[:-1]) == 1 and generate[-1] == pytest.approx(0.05)
    assert train[len(BUCKETS_S)] == 1
    assert watch.drain() == {}


def test_call_watch_forgets_unread_results(monkeypatch):
    monkeypatch.setattr(module, "_MOST_PENDING", 3)
    watch = CallWatch()
    for number in range(10):
        watch.begin(b"%d" % number, "ACTOR", "log")
    assert watch.pending() == {"ACTOR": 3}
