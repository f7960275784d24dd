# SPDX-License-Identifier: Apache-2.0
"""A worker whose connection broke is asked again before it is given up."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from dlrover.python.rl.common.errors import EngineDied, InvocationError, ResultLost, WorkloadDied
from dlrover.python.rl.runtime.ray.processes import port as module
from dlrover.python.rl.runtime.ray.processes.port import RayPort
from dlrover.python.rl.trainer.port import Ref

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
