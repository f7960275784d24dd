# SPDX-License-Identifier: Apache-2.0
"""The port of durable steps over a port that the test plays, and the states of a logged call."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import CheckpointCorrupt, ResultLost, StepAbandoned, WorkloadDied
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.trainer.durable import DurablePort
from dlrover.python.rl.trainer.port import Call, Outcome, Pending, Ref, Renewed, RestartInfo, RoleTraits, gather
from dlrover.python.rl.trainer.shard import Rows
from dlrover.python.rl.trainer.steps import dump_state, load_state

AT = {"role": "A", "rank": 0, "method": "go"}


@dataclass
class Played:
    """Answers each call with what the test has put there: a value, an error, or what a function gives."""

    answers: list = field(default_factory=list)
    calls: list = field(default_factory=list)

    def put(self, value):
        return Ref(self, Outcome(np.copy(value)))

    def submit(self, role, rank, call):
        self.calls.append((role, rank, call))
        answer = self.answers.pop(0) if self.answers else "done"
        outcome = Outcome(error=answer) if isinstance(answer, errors.InvocationError) else Outcome(answer)
        return Ref(self, outcome, None, role, rank, call.method, 1)

    def wait(self, refs, timeout_s):
        return [ref.token for ref in refs]


@dataclass
class Replacing:
    """Replaces each worker by its next incarnation."""

    numbers: dict = field(default_factory=lambda: {ProcessId("A", 0): 1, ProcessId("A", 1): 1})
    requests: list = field(default_factory=list)
    epoch = 1
    fresh = True
    restart_info = RestartInfo()

    def incarnations(self):
        return self.numbers

    def renew(self, role, rank, incarnation, why):
        self.requests.append((role, rank, incarnation))
        self.numbers = {**self.numbers, ProcessId(role, rank): incarnation + 1}
        incarnations = {member.rank: number for member, number in self.numbers.items() if member.role == role}
        return Renewed(role, incarnations, {rank: "new"})


def died(rank=0, incarnation=1):
    error = WorkloadDied("killed", role="A", rank=rank, method="go")
    error.incarnation = incarnation
    return error


def failure(message, rank=0, method="go"):
    return errors.InvocationError(message, role="A", rank=rank, method=method)


LATE = errors.InvocationTimeout(role="A", method="slow", timeout_s=1.0, late=[0], arrived={})


def port_of(**traits):
    port = DurablePort(Played(), Replacing(), {"A": RoleTraits(2, **traits)}, opened=True)
    port.begin_step(1)
    return port


@pytest.fixture
def port():
    return port_of()


def submit(port, n, *args, method="go", rank=0):
    return port.submit("A", rank, Call((port.step, n), method, args, {}))


def sent(port):
    return [(rank, call.call_id, call.method) for _, rank, call in port.inner.calls]


def test_call_to_a_dead_member_is_made_to_its_replacement(port):
    handles = []
    port.renewed = handles.append
    port.inner.answers = ["first", died()]
    before, ref = submit(port, 0), submit(port, 1)
    assert (before.result(), ref.result()) == ("first", "done")
    assert sent(port) == [(0, (1, 0), "go"), (0, (1, 1), "go")] * 2  # the replacement gets the whole step again
    assert [call.after for _, _, call in port.inner.calls] == [None, (1, 0)] * 2
    assert port.recovery.requests == [("A", 0, 1)]
    assert handles[0].handles == {0: "new"}


def test_wait_without_the_value_recovers_a_dead_member(port):
    class Sized(Played):
        """Gives the row count of a sized call alone, as RayPort does."""

        def submit(self, role, rank, call):
            ref = super().submit(role, rank, call)
            ref.size = Outcome(error=ref.token.error) if ref.token.error else Outcome("its size")
            return ref

        def wait(self, refs, timeout_s):
            fetched.extend(ref.token.value for ref in refs if ref.token.error is None)
            return super().wait(refs, timeout_s)

    fetched = []
    port.inner = port._sender.inner = Sized(["value", died(), "again", "value"])
    pending = Pending([port.submit("A", 0, Call((1, n), "go", (), {}, sized=True)) for n in range(2)])
    pending.wait()
    assert set(fetched) == {"its size"}
    assert port.recovery.requests == [("A", 0, 1)]
    assert pending.result() == ["value", "value"]


def test_init_is_repeated_first(port):
    port.log.open(port.log.setup)
    submit(port, 0, method="prepare").result()
    port.begin_step(2)
    port.inner.answers = [died()]
    submit(port, 0).result()
    assert [method for _, _, method in sent(port)] == ["prepare", "go", "prepare", "go"]


def test_ref_stands_for_the_repeated_answer(port):
    port.inner.answers = [died(), died(0), died(0)]
    source = submit(port, 0)
    taker = submit(port, 1, source, [source, 5], Rows((source,), 0, 1), rank=1)
    assert taker.result() == "done"
    _, _, call = port.inner.calls[-1]
    assert [value.token.value for value in (call.args[0], call.args[1][0], call.args[2].parts[0])] == ["done"] * 3
    assert source.result() == "done"


def test_lost_result_is_asked_for_again(port):
    source = submit(port, 0)
    port.inner.answers = [ResultLost("gone", **AT)]
    assert submit(port, 1, source, rank=1).result() == "done"
    assert sent(port) == [(0, (1, 0), "go"), (1, (1, 1), "go")] * 2
    assert port.recovery.requests == []


def test_lost_result_of_an_ended_step_abandons_the_step(port):
    ref = submit(port, 0)
    port.end_step(1)
    ref.token.issue(Ref(port.inner, Outcome(error=ResultLost("gone", **AT))))
    with pytest.raises(StepAbandoned):
        ref.result()


def test_repeated_loss_abandons_the_step(port):
    port.inner.answers = [ResultLost("gone", **AT)] * 100
    with pytest.raises(StepAbandoned) as caught:
        submit(port, 0).result()
    assert isinstance(caught.value.cause, ResultLost)


def test_calls_before_the_first_step_are_kept_up_to_a_limit(port):
    port.log.open(port.log.setup)
    submit(port, 0)
    port.log.end_init()
    for _ in range(256):
        submit(port, 0)
    assert (len(port.log.setup), port.log.overflowed) == (257, False)
    submit(port, 0)
    submit(port, 0)
    assert (len(port.log.setup), port.log.overflowed) == (1, True)
    assert [call.keep for _, _, call in port.inner.calls[-2:]] == [True, False]


def test_call_after_one_with_a_failed_argument_is_made_again(port):
    port.opened = False
    port.log.open(port.log.setup)
    broken = failure("no answer today", 1, "fetch")
    skipped = [errors.CallSkipped(f"call (0, {number}) has not run", **AT) for number in (1, 2)]
    port.inner.answers = ["rows", broken, broken, *skipped, "pong", "ping"]
    fetched = [submit(port, 0, method="fetch", rank=rank) for rank in range(2)]
    submit(port, 1, fetched)  # the worker never hears of it
    after = [submit(port, number) for number in (2, 3)]
    assert [ref.result() for ref in reversed(after)] == ["ping", "pong"]
    assert [call.after for _, _, call in port.inner.calls] == [None, None, (1, 0), (1, 1), (1, 2), (1, 0), (1, 2)]
    port.inner.answers = [errors.CallSkipped("call (0, 3) has not run", **AT)] * 50
    with pytest.raises(errors.CallSkipped):
        submit(port, 4).result()  # nothing before it has failed


@pytest.mark.parametrize("waited", ["source", "taker"])
def test_failure_received_through_another_call_is_settled(port, waited):
    broken = failure("no answer today", 1, "fetch")
    other = failure("nor here", 0, "fetch")
    port.inner.answers = [other, broken, broken, broken]
    fetched = [submit(port, 0, method="fetch", rank=rank) for rank in range(2)]
    taken = [submit(port, 1, fetched, method="score", rank=rank) for rank in range(2)]
    with pytest.raises(errors.InvocationError):
        gather(fetched if waited == "source" else taken, None)
    if waited == "taker":
        port.settle()
        return
    with pytest.raises(errors.InvocationError, match="no answer today"):
        port.settle()  # the calls that took the results were not waited for


def test_failure_of_a_taker_does_not_settle_its_sources(port):
    own = failure("its own bug", 0, "score")
    unheard = failure("its state is broken", 1, "fetch")
    port.inner.answers = ["rows", unheard, own]
    fetched = [submit(port, 0, method="fetch", rank=rank) for rank in range(2)]
    with pytest.raises(errors.InvocationError, match="its own bug"):
        gather([submit(port, 1, fetched, method="score")], None)
    with pytest.raises(errors.InvocationError, match="its state is broken"):
        port.settle()


def test_failure_of_one_rank_settles_later_ones(port):
    class Slow(Played):
        """Rank 1 answers when it is asked again."""

        def wait(self, refs, timeout_s):
            late, self.late = self.late, False
            return [Outcome(late=True) if late and ref.rank else ref.token for ref in refs]

    slow = Slow([failure(f"from rank {rank}", rank) for rank in range(2)])
    slow.late, port.inner, port._sender.inner = True, slow, slow
    with pytest.raises(errors.InvocationError, match="from rank 0"):
        gather([submit(port, 0, rank=rank) for rank in range(2)], None)
    port.settle()


def test_arguments_stay_as_they_were_at_the_call(port):
    small, large = np.zeros(2), np.zeros(10_000)
    port.inner.answers = [died()]
    ref = submit(port, 0, small, large)
    small[:] = large[:] = 1.0
    ref.result()
    _, _, call = port.inner.calls[-1]
    assert call.args[0].tolist() == [0.0, 0.0]
    assert call.args[1].token.value.sum() == 0.0


def test_two_threads_recover_a_dead_member_once(port):
    port.inner.answers = [died(), died()]
    refs = [submit(port, 0), submit(port, 1)]
    barrier = threading.Barrier(2)

    def wait(ref):
        barrier.wait(10)
        return ref.result()

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(wait, refs))
    assert results == ["done", "done"]
    assert port.recovery.requests == [("A", 0, 1)]


def test_error_of_a_rank_may_echo_the_death_of_another():
    port = port_of(together=True)
    reset = failure("reset by peer")
    port.inner.answers = [reset, "done by the one that died since", died(rank=1)]
    refs = [submit(port, 0, rank=rank) for rank in (0, 1)]
    port.recovery.renew = lambda role, rank, incarnation, why: Renewed(role, {0: 2, 1: 2}, {})
    assert gather(refs, None) == ["done", "done by the one that died since"]


def test_known_death_replaces_no_member_again(port):
    port.inner.answers = [died()]
    submit(port, 0).result()
    port.inner.answers = [died()]
    assert submit(port, 1).result() == "done"
    assert port.recovery.requests == [("A", 0, 1)]


def test_further_death_repeats_no_calls_of_rebuilt_members(port):
    port.inner.answers = [died()]
    submit(port, 0).result()
    port.inner.answers = [died(rank=1)]
    submit(port, 1, rank=1).result()
    assert sent(port) == [(0, (1, 0), "go")] * 2 + [(1, (1, 1), "go")] * 2


def test_failure_of_a_repeated_call_abandons_the_step(port):
    port.inner.answers = ["first", died(), failure("not as before")]
    submit(port, 0).result()
    with pytest.raises(StepAbandoned) as caught:
        submit(port, 1).result()
    assert "not as before" in str(caught.value.cause)


def test_late_member_is_replaced_without_its_late_call(port):
    submit(port, 0).result()
    submit(port, 1, method="slow").token.issue(Ref(port.inner, Outcome(late=True)))
    port.inner.calls.clear()
    port.replace_late(LATE)
    assert port.recovery.requests == [("A", 0, 1)]
    assert sent(port) == [(0, (1, 0), "go")]


def test_loss_or_late_member_before_steps_is_raised(port):
    port.opened = False
    port.inner.answers = [died()]
    with pytest.raises(WorkloadDied):
        submit(port, 0).result()
    with pytest.raises(errors.CallError, match="from steps"):
        port.replace_late(LATE)
    assert port.recovery.requests == []


@dataclass
class Damaged:
    """Commits without a readable last one."""

    discarded: list = field(default_factory=list)
    spread = False

    def restore_request(self, step):
        return step

    def discard(self, step, why):
        self.discarded.append(step)


def test_commit_found_damaged_by_a_new_member_is_discarded(port):
    port.checkpoints, port.roles = Damaged(), {"A": RoleTraits(2, stateful=True)}
    port.resume_from(4)
    damage = failure("damaged", 0, "load")
    damage.original = CheckpointCorrupt("step-4", "its checksum differs")
    port.inner.answers = [died(), damage]
    with pytest.raises(StepAbandoned):
        submit(port, 0).result()
    assert port.checkpoints.discarded == [4]


def test_every_request_has_its_epoch_and_the_settled_step(port):
    port.resume_from(4)
    submit(port, 0)
    port.ask([ProcessId("A", 1)], "where")
    assert [(call.epoch, call.settled) for _, _, call in port.inner.calls] == [(1, 4)] * 2


def test_closed_port_sends_no_calls(port):
    port.close(StepAbandoned(1, ValueError("why")))
    with pytest.raises(StepAbandoned):
        submit(port, 0)


@dataclass
class Cursor:
    at: int

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        self.at = state["at"]


def test_state_of_a_trainer_is_values_and_loaded_objects():
    saved = dump_state({"cursor": Cursor(5), "mean": 0.5})
    assert saved == {"cursor": {"object": {"at": 5}}, "mean": {"value": 0.5}}
    cursor = Cursor(0)
    state = {"cursor": cursor, "mean": 0.0, "new": 1}
    load_state(state, saved)
    assert (cursor.at, state) == (5, {"cursor": cursor, "mean": 0.5, "new": 1})
    with pytest.raises(errors.CallError, match=r"self.state\['cursor'\] was saved from an object"):
        load_state({}, saved)
