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
from dlrover.python.rl.runtime.ray.processes import port as call_times
from dlrover.python.rl.runtime.ray.processes import port as module
from dlrover.python.rl.runtime.ray.processes import trainer
from dlrover.python.rl.runtime.ray.processes.port import CallWatch, RayPort, WatchedPort
from dlrover.python.rl.runtime.ray.processes.trainer import RayRecovery, _is_waiting_in_ray
from dlrover.python.rl.trainer.port import BUCKETS_S, Ref

ID = bytes(range(16))


@pytest.fixture
def answered(monkeypatch):
    """What an unavailable worker's pings are answered with, one after the other; and the error of a call to it."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_BACK_S", 0.2)

    def answered(*outcomes):
        pings = iter(outcomes)

        def get(ref, timeout):
            assert ref == "ping"
            outcome = next(pings)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(ray, "get", get)
        ping = SimpleNamespace(remote=lambda: "ping")
        handle = SimpleNamespace(_actor_id=SimpleNamespace(hex=ID.hex), dlrover_ping=ping)
        port = RayPort({"ACTOR": [handle]})
        error = port._as_invocation_error(unavailable(), Ref(port, None, None, "ACTOR", 0, "update", 1))
        return type(error), next(pings, None)

    return answered


def unavailable():
    return ActorUnavailableError("the actor is temporarily unavailable", ID)


@pytest.mark.parametrize("answer", [True, GetTimeoutError()], ids=["idle", "busy"])
def test_one_that_comes_back_is_only_asked_again(answered, answer):
    assert answered(unavailable(), unavailable(), answer) == (ResultLost, None)


def test_one_that_is_found_dead_meanwhile_is_replaced(answered):
    assert answered(unavailable(), ActorDiedError()) == (WorkloadDied, None)


def test_one_that_stays_away_is_replaced(answered):
    assert answered(*[unavailable()] * 1000)[0] is WorkloadDied


def test_the_death_of_a_member_whose_result_is_an_argument_names_no_method_of_it():
    port = RayPort({"ROLLOUT": [SimpleNamespace(_actor_id=SimpleNamespace(hex=ID.hex))]})
    died = ActorDiedError()
    died.actor_id = ID.hex()
    error = port._as_invocation_error(died, Ref(port, None, None, "ACTOR", 0, "update", 1))
    assert (type(error), error.role, error.rank) == (WorkloadDied, "ROLLOUT", 0)
    assert str(error).startswith("ROLLOUT[0]: its result, which ACTOR[0].update needs, is lost: The actor died")


@pytest.mark.parametrize(
    ("original", "rank", "kind"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), 0, WorkloadDied),
        (RuntimeError("NCCL communicator was aborted on rank 1."), 0, WorkloadDied),
        (EngineDied("the server of the engine has ended"), 0, WorkloadDied),
        (ValueError("wrong"), 0, InvocationError),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), 1, InvocationError),  # of an argument
    ],
)
def test_error_that_breaks_a_process_replaces_its_member(original, rank, kind):
    port = RayPort({"ACTOR": [SimpleNamespace(_actor_id=SimpleNamespace(hex=ID.hex))]})
    failure = InvocationError(f"{type(original).__name__}: {original}", role="ACTOR", rank=0, method="update")
    failure.original = original
    error = port._as_invocation_error(
        RayTaskError("update", "trace", failure), Ref(port, None, None, "ACTOR", rank, "update", 1)
    )
    assert type(error) is kind


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


def test_calls_are_counted_once_in_their_bucket_and_drained():
    now_s = [10.0]
    watch = CallWatch(lambda: now_s[0])
    watch.begin(b"a", "ROLLOUT", "generate")
    watch.begin(b"b", "ROLLOUT", "generate")
    watch.begin(b"c", "ACTOR", "train")
    assert watch.pending() == {"ROLLOUT": 2, "ACTOR": 1}
    now_s[0] = 10.05
    watch.end([b"a"])
    now_s[0] = 5000.0
    watch.end([b"a", b"c"])  # the first one's result is read again
    assert watch.pending() == {"ROLLOUT": 1}
    counts = watch.drain()
    generate, train = counts["ROLLOUT", "generate"], counts["ACTOR", "train"]
    assert generate[BUCKETS_S.index(0.1)] == 1 and sum(generate[:-1]) == 1 and generate[-1] == pytest.approx(0.05)
    assert train[len(BUCKETS_S)] == 1
    assert watch.drain() == {}


def test_results_that_nobody_reads_are_forgotten(monkeypatch):
    monkeypatch.setattr(call_times, "_MOST_PENDING", 3)
    watch = CallWatch()
    for number in range(10):
        watch.begin(b"%d" % number, "ACTOR", "log")
    assert watch.pending() == {"ACTOR": 3}
