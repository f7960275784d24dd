# SPDX-License-Identifier: Apache-2.0
"""The port of durable steps over a port that the test plays, and the states of a logged call."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from dlrover.python.rl.common.errors import (
    CallError,
    CallSkipped,
    CheckpointCorrupt,
    InvocationError,
    InvocationTimeout,
    JobFailed,
    ResultLost,
    StepAbandoned,
    WorkloadDied,
)
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.trainer.call_log import CallLog, CallState, LoggedCall
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
        outcome = Outcome(error=answer) if isinstance(answer, InvocationError) else Outcome(answer)
        return Ref(self, outcome, None, role, rank, call.method, 1)

    def wait(self, refs, timeout_s):
        return [ref.token for ref in refs]


@dataclass
class Replacing:
    """Gives every worker that is asked for its next incarnation."""

    numbers: dict = field(default_factory=lambda: {ProcessId("A", 0): 1, ProcessId("A", 1): 1})
    asked: list = field(default_factory=list)
    epoch = 1
    fresh = True
    restart_info = RestartInfo()

    def incarnations(self):
        return self.numbers

    def renew(self, role, rank, incarnation, why):
        self.asked.append((role, rank, incarnation))
        self.numbers = {**self.numbers, ProcessId(role, rank): incarnation + 1}
        incarnations = {member.rank: number for member, number in self.numbers.items() if member.role == role}
        return Renewed(role, incarnations, {rank: "new"})


def died(rank=0, incarnation=1):
    error = WorkloadDied("killed", role="A", rank=rank, method="go")
    error.incarnation = incarnation
    return error


@pytest.fixture
def port():
    made = DurablePort(Played(), Replacing(), {"A": RoleTraits(2)}, opened=True)
    made.begin_step(1)
    return made


def submit(port, n, *args, method="go", rank=0):
    return port.submit("A", rank, Call((port.step, n), method, args, {}))


def sent(port):
    return [(rank, call.call_id, call.method) for _, rank, call in port.inner.calls]


def test_a_call_to_a_member_that_died_is_made_to_its_replacement(port):
    handles = []
    port.renewed = handles.append
    port.inner.answers = ["first", died()]
    before, ref = submit(port, 0), submit(port, 1)
    assert (before.result(), ref.result()) == ("first", "done")
    assert sent(port) == [(0, (1, 0), "go"), (0, (1, 1), "go")] * 2  # the replacement gets the whole step again
    assert [call.after for _, _, call in port.inner.calls] == [None, (1, 0)] * 2
    assert port.recovery.asked == [("A", 0, 1)]
    assert handles[0].handles == {0: "new"}


def test_a_call_can_be_waited_for_without_its_value_and_is_recovered_then_too(port):
    class Sized(Played):
        """As RayPort: of a sized call the row count can be had alone."""

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
    assert port.recovery.asked == [("A", 0, 1)]
    assert pending.result() == ["value", "value"]


def test_init_is_repeated_first(port):
    port.log.open(port.log.setup)
    submit(port, 0, method="prepare").result()
    port.begin_step(2)
    port.inner.answers = [died()]
    submit(port, 0).result()
    assert [method for _, _, method in sent(port)] == ["prepare", "go", "prepare", "go"]


def test_a_ref_stands_for_the_answer_that_was_made_again(port):
    port.inner.answers = [died(), died(0), died(0)]
    source = submit(port, 0)
    taker = submit(port, 1, source, [source, 5], Rows((source,), 0, 1), rank=1)
    assert taker.result() == "done"
    _, _, call = port.inner.calls[-1]
    assert [value.token.value for value in (call.args[0], call.args[1][0], call.args[2].parts[0])] == ["done"] * 3
    assert source.result() == "done"


def test_a_lost_result_is_asked_for_again(port):
    source = submit(port, 0)
    port.inner.answers = [ResultLost("gone", **AT)]
    assert submit(port, 1, source, rank=1).result() == "done"
    assert sent(port) == [(0, (1, 0), "go"), (1, (1, 1), "go")] * 2
    assert port.recovery.asked == []


def test_what_comes_of_no_step_and_cannot_be_made_again_gives_the_step_up(port):
    ref = submit(port, 0)
    port.end_step(1)
    ref.token.issue(Ref(port.inner, Outcome(error=ResultLost("gone", **AT))))
    with pytest.raises(StepAbandoned):
        ref.result()


def test_a_loss_that_comes_again_and_again_comes_to_an_end(port):
    port.inner.answers = [ResultLost("gone", **AT)] * 100
    with pytest.raises(StepAbandoned) as caught:
        submit(port, 0).result()
    assert isinstance(caught.value.cause, ResultLost)


def test_when_nobody_takes_its_place_that_is_raised(port):
    def refuse(*asked):
        raise JobFailed("the limit is reached")

    port.recovery.renew = refuse
    port.inner.answers = [died()]
    with pytest.raises(JobFailed, match="the limit"):
        submit(port, 0).result()


def test_calls_before_the_first_step_are_kept_until_they_are_too_many(port):
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


def test_before_steps_a_loss_is_raised(port):
    port.opened = False
    port.inner.answers = [died()]
    with pytest.raises(WorkloadDied):
        submit(port, 0).result()


def test_before_steps_a_call_after_one_that_failed_on_its_argument_is_made_again(port):
    port.opened = False
    port.log.open(port.log.setup)
    broken = InvocationError("no answer today", role="A", rank=1, method="fetch")
    skipped = [CallSkipped(f"call (0, {number}) has not run", **AT) for number in (1, 2)]
    port.inner.answers = ["rows", broken, broken, *skipped, "pong", "ping"]
    fetched = [submit(port, 0, method="fetch", rank=rank) for rank in range(2)]
    submit(port, 1, fetched)  # the worker never hears of it
    after = [submit(port, number) for number in (2, 3)]
    assert [ref.result() for ref in reversed(after)] == ["ping", "pong"]
    assert [call.after for _, _, call in port.inner.calls] == [None, None, (1, 0), (1, 1), (1, 2), (1, 0), (1, 2)]
    port.inner.answers = [CallSkipped("call (0, 3) has not run", **AT)] * 50
    with pytest.raises(CallSkipped):
        submit(port, 4).result()  # nothing before it has failed


@pytest.mark.parametrize("waited", ["source", "taker"])
def test_a_failure_that_the_trainer_receives_through_another_call_lets_the_step_be_committed(port, waited):
    broken = InvocationError("no answer today", role="A", rank=1, method="fetch")
    other = InvocationError("nor here", role="A", rank=0, method="fetch")
    port.inner.answers = [other, broken, broken, broken]
    fetched = [submit(port, 0, method="fetch", rank=rank) for rank in range(2)]
    taken = [submit(port, 1, fetched, method="score", rank=rank) for rank in range(2)]
    with pytest.raises(InvocationError):
        gather(fetched if waited == "source" else taken, None)
    if waited == "taker":
        port.settle()
        return
    with pytest.raises(InvocationError, match="no answer today"):
        port.settle()  # the calls that took the results were not waited for


def test_a_call_that_fails_by_itself_does_not_stand_for_those_whose_results_it_takes(port):
    own = InvocationError("its own bug", role="A", rank=0, method="score")
    unheard = InvocationError("its state is broken", role="A", rank=1, method="fetch")
    port.inner.answers = ["rows", unheard, own]
    fetched = [submit(port, 0, method="fetch", rank=rank) for rank in range(2)]
    with pytest.raises(InvocationError, match="its own bug"):
        gather([submit(port, 1, fetched, method="score")], None)
    with pytest.raises(InvocationError, match="its state is broken"):
        port.settle()


def test_a_failure_of_one_rank_stands_for_those_of_the_others_that_come_later(port):
    class Slow(Played):
        """Rank 1 answers when it is asked again."""

        def wait(self, refs, timeout_s):
            late, self.late = self.late, False
            return [Outcome(late=True) if late and ref.rank else ref.token for ref in refs]

    slow = Slow([InvocationError(f"from rank {rank}", role="A", rank=rank, method="go") for rank in range(2)])
    slow.late, port.inner, port._sender.inner = True, slow, slow
    with pytest.raises(InvocationError, match="from rank 0"):
        gather([submit(port, 0, rank=rank) for rank in range(2)], None)
    port.settle()


def test_arguments_stay_what_they_were_when_the_call_was_made(port):
    small, large = np.zeros(2), np.zeros(10_000)
    port.inner.answers = [died()]
    ref = submit(port, 0, small, large)
    small[:] = large[:] = 1.0
    ref.result()
    _, _, call = port.inner.calls[-1]
    assert call.args[0].tolist() == [0.0, 0.0]
    assert call.args[1].token.value.sum() == 0.0


def test_threads_that_wait_for_one_dead_member_recover_it_once(port):
    port.inner.answers = [died(), died()]
    refs = [submit(port, 0), submit(port, 1)]
    barrier, results = threading.Barrier(2), []

    def wait(ref):
        barrier.wait(10)
        results.append(ref.result())

    threads = [threading.Thread(target=wait, args=(ref,)) for ref in refs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == ["done", "done"]
    assert port.recovery.asked == [("A", 0, 1)]


def test_an_error_of_a_rank_is_the_echo_of_anothers_death_where_ranks_meet():
    port = DurablePort(Played(), Replacing(), {"A": RoleTraits(2, together=True)}, opened=True)
    port.begin_step(1)
    reset = InvocationError("reset by peer", **AT)
    port.inner.answers = [reset, "done by the one that died since", died(rank=1)]
    refs = [submit(port, 0, rank=rank) for rank in (0, 1)]
    port.recovery.renew = lambda role, rank, incarnation, why: Renewed(role, {0: 2, 1: 2}, {})
    assert gather(refs, None) == ["done", "done by the one that died since"]


def test_the_user_hears_of_an_error_where_nobody_died():
    port = DurablePort(Played(), Replacing(), {"A": RoleTraits(2, together=True)}, opened=True)
    port.begin_step(1)
    port.inner.answers = [InvocationError("the user's own words", **AT)]
    with pytest.raises(InvocationError, match="the user's own words"):
        submit(port, 0).result()
    port.settle()  # it has been seen: the commit does not raise it again


def test_a_death_that_is_heard_of_again_replaces_nobody(port):
    port.inner.answers = [died()]
    submit(port, 0).result()
    port.inner.answers = [died()]
    assert submit(port, 1).result() == "done"
    assert port.recovery.asked == [("A", 0, 1)]


def test_a_further_death_does_not_repeat_the_calls_of_members_that_were_rebuilt(port):
    port.inner.answers = [died()]
    submit(port, 0).result()
    port.inner.answers = [died(rank=1)]
    submit(port, 1, rank=1).result()
    assert sent(port) == [(0, (1, 0), "go")] * 2 + [(1, (1, 1), "go")] * 2


def test_a_call_that_has_succeeded_and_fails_when_it_is_repeated_gives_the_step_up(port):
    port.inner.answers = ["first", died(), InvocationError("not as before", **AT)]
    submit(port, 0).result()
    with pytest.raises(StepAbandoned) as caught:
        submit(port, 1).result()
    assert "not as before" in str(caught.value.cause)


def test_a_member_that_is_late_is_replaced_and_the_late_call_is_not_made_again(port):
    submit(port, 0).result()
    submit(port, 1, method="slow").token.issue(Ref(port.inner, Outcome(late=True)))
    port.inner.calls.clear()
    late = InvocationTimeout(role="A", method="slow", timeout_s=1.0, late=[0], arrived={})
    port.replace_late(late)
    assert port.recovery.asked == [("A", 0, 1)]
    assert sent(port) == [(0, (1, 0), "go")]


def test_late_member_before_steps_is_not_replaced(port):
    port.opened = False
    with pytest.raises(CallError, match="from steps"):
        port.replace_late(InvocationTimeout(role="A", method="slow", timeout_s=1.0, late=[0], arrived={}))
    assert port.recovery.asked == []


@dataclass
class Damaged:
    """Commits of which the last one cannot be read."""

    discarded: list = field(default_factory=list)
    spread = False

    def restore_request(self, step):
        return step

    def discard(self, step, why):
        self.discarded.append(step)


def test_a_commit_that_a_new_member_finds_damaged_is_given_up(port):
    port.checkpoints, port.roles = Damaged(), {"A": RoleTraits(2, stateful=True)}
    port.resume_from(4)
    damage = InvocationError("damaged", role="A", rank=0, method="load")
    damage.original = CheckpointCorrupt("step-4", "its checksum differs")
    port.inner.answers = [died(), damage]
    with pytest.raises(StepAbandoned):
        submit(port, 0).result()
    assert port.checkpoints.discarded == [4]


def test_every_request_says_whose_it_is_and_what_is_committed(port):
    port.resume_from(4)
    submit(port, 0)
    port.ask([ProcessId("A", 1)], "where")
    assert [(call.epoch, call.settled) for _, _, call in port.inner.calls] == [(1, 4)] * 2


def test_another_trainer_object_goes_on_so_this_one_calls_nobody(port):
    port.close(StepAbandoned(1, ValueError("why")))
    with pytest.raises(StepAbandoned):
        submit(port, 0)


class Cursor:
    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_the_trainers_state_is_plain_values_and_objects_loaded_in_place():
    saved = dump_state({"cursor": Cursor(5), "mean": 0.5})
    assert saved == {"cursor": {"object": {"at": 5}}, "mean": {"value": 0.5}}
    cursor = Cursor(0)
    state = {"cursor": cursor, "mean": 0.0, "new": 1}
    load_state(state, saved)
    assert (cursor.at, state) == (5, {"cursor": cursor, "mean": 0.5, "new": 1})
    with pytest.raises(CallError, match=r"self.state\['cursor'\] was saved from an object"):
        load_state({}, saved)


ERROR = InvocationError("wrong", role="A", rank=0, method="go")


def run(name):
    return Ref(None, name)


@pytest.fixture
def call():
    logged = LoggedCall("A", 0, Call((1, 0), "go", (), {}))
    logged.issue(run("first"))
    return logged


def test_a_call_is_answered(call):
    assert call.is_running
    assert call.end(call.ref, None)
    assert (call.state, call.error, call.is_running) == (CallState.ANSWERED, None, False)


def test_an_error_is_failed_until_the_trainer_receives_it(call):
    assert call.end(call.ref, ERROR)
    assert (call.state, call.error) == (CallState.FAILED, ERROR)
    call.mark_raised()
    assert call.state is CallState.RAISED


def test_a_lost_answer_is_issued_again_and_its_second_error_is_raised_already(call):
    call.end(call.ref, ERROR)
    call.mark_raised()
    call.retry(call.ref, run("second"))
    assert (call.state, call.error, call.ref.token) == (CallState.ISSUED, None, "second")
    call.end(call.ref, ERROR)
    assert call.state is CallState.RAISED


@pytest.mark.parametrize(
    ("error", "replay_error", "agrees"), [(None, None, True), (None, ERROR, False), (ERROR, ERROR, True)]
)
def test_a_replay_leaves_the_answer_and_must_agree_with_it(call, error, replay_error, agrees):
    answer = call.ref
    call.end(answer, error)
    call.mark_raised() if error else None
    call.repeat(replay := run("replay"))
    assert call.is_running
    assert call.ref is answer
    assert call.latest_run is replay
    assert call.end(replay, replay_error) is agrees
    assert not call.is_running


@pytest.mark.parametrize("error", [ERROR, "running"])
def test_a_call_without_an_answer_is_issued_to_a_new_member(call, error):
    if error is ERROR:
        call.end(call.ref, error)
    old = call.ref
    call.repeat(run("again"))
    assert (call.state, call.ref.token, call.replay) == (CallState.ISSUED, "again", None)
    assert not call.is_current(old)


def test_retries_are_limited_and_start_again_with_a_new_member(call):
    for _ in range(20):
        assert call.can_retry
        call.retry(call.ref, run("again"))
    assert not call.can_retry
    call.repeat(run("new worker"))
    assert call.can_retry
    call.forget()
    assert not call.can_retry


def test_a_call_follows_the_last_one_to_its_member_that_has_not_failed():
    log, calls = CallLog(), []
    log.open(log.step)
    for number, rank in enumerate([0, 0, 1, 0]):
        logged = log.link("A", rank, Call((1, number), "go", (), {}))
        logged.issue(run(number))
        log.add(logged)
        calls.append(logged)
    calls[1].end(calls[1].ref, ERROR)
    assert [logged.predecessor_id() for logged in calls] == [None, (1, 0), None, (1, 0)]
    assert log.sort([calls[3], calls[0]]) == [calls[0], calls[3]]
