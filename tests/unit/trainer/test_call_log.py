# SPDX-License-Identifier: Apache-2.0
"""The states of a logged call."""

import pytest

from dlrover.python.rl.common.errors import InvocationError
from dlrover.python.rl.trainer.call_log import CallLog, CallState, LoggedCall
from dlrover.python.rl.trainer.port import Call, Ref

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
