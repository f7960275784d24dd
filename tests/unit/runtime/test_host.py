# SPDX-License-Identifier: Apache-2.0
"""The gate in front of a workload: refused, repeated and kept calls, and their arguments."""

import asyncio
import threading
import time
import traceback

import numpy as np
import pytest

from dlrover.python.rl.common.errors import (
    CallSkipped,
    CheckpointCorrupt,
    CheckpointMissing,
    InvocationError,
    ReplayDiverged,
    ResultLost,
    StaleCall,
    WorkloadDied,
)
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.runtime.checkpoint.member_state import CommitRequest, GenerationRequest
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.store import Piece
from dlrover.python.rl.runtime.member.arguments import CallHeader, decode, encode
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import COMMIT, FORGET, PERSIST, RAW_CALL, RESTORE, WHERE, Call, Ref, Standing
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext
from tests.support.manual_clock import ManualClock


class Work(BaseWorkload):
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.total = np.zeros(3)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def add(self, number):
        self.total += number
        return self.total

    async def later(self, number):
        return number

    async def cancelled(self):
        raise asyncio.CancelledError("by itself")

    def refuse(self):
        raise LookupError("the user's own words")

    def fetch(self, ticket):
        if ticket == "old":
            raise ResultLost("it is gone", role=self.role, rank=self.rank, method="fetch")
        return ticket

    def generator(self):
        return (item for item in "unpicklable")

    def wait(self):
        self.entered.set()
        assert self.go_on.wait(30)

    def steps(self, count, each_s):
        for _ in range(count):
            time.sleep(each_s)
            self.report_progress()
        time.sleep(0.5)

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


@pytest.fixture
def host():
    made = MemberHost(incarnation=3, now_s=ManualClock())
    made.start(Work, MemberContext(role=RLRoleType.ACTOR, rank=1), None, {})
    yield made
    made.close()


def call(host, step, n, method="add", *args, **terms):
    header = CallHeader((step, n), method, keep=True, **terms)
    return host.invoke(header, lambda: (args, {}))


def ask(host, verb, *args, **terms):
    return host.invoke(CallHeader(RAW_CALL, verb, **terms), lambda: (args, {}))


def test_a_repeated_id_has_the_same_answer_and_is_not_carried_out(host):
    first = call(host, 1, 0, "add", 2)
    call(host, 1, 1, "add", 5)
    again = host.invoke(CallHeader((1, 0), "add", keep=True), lambda: pytest.fail("the arguments are not needed"))
    assert again.tolist() == [2.0] * 3  # as it was given, not what has become of the array since
    assert first.tolist() == [7.0] * 3
    assert host.executed == {"add": 2}


def test_a_call_that_finds_what_its_argument_stands_for_gone_has_not_run(host):
    with pytest.raises(ResultLost, match=r"ACTOR\[1\].fetch: it is gone"):
        call(host, 1, 0, "fetch", "old")
    with pytest.raises(CallSkipped):
        call(host, 1, 1, "add", 2, after=(1, 0))
    assert call(host, 1, 0, "fetch", "new") == "new"
    assert call(host, 1, 1, "add", 2, after=(1, 0)).tolist() == [2.0] * 3


class Halved(BaseWorkload):
    """Its errors have half of an emoji."""

    def act(self, *_):
        try:
            raise OSError("no room for \ud83d")
        except OSError as error:
            raise ValueError("the model wrote it") from error


@pytest.mark.parametrize("make_call", [lambda host: call(host, 1, 0, "act"), lambda host: ask(host, COMMIT, None)])
def test_the_text_of_an_error_can_be_sent(make_call):
    host = MemberHost(incarnation=1)
    host.start(Halved, MemberContext(role=RLRoleType.ACTOR), None, {})
    host._commit = lambda request: host.workload.act()
    with pytest.raises(InvocationError, match="ValueError: the model wrote it") as caught:
        make_call(host)
    "".join(traceback.format_exception(caught.value)).encode()
    assert "OSError: no room for ?" in caught.value.remote_traceback


def test_an_error_that_no_text_stands_for_has_its_words(host):
    error = ValueError("the model wrote \ud83d")
    failure = host.failure("act", error)
    assert "ValueError: the model wrote ?" in str(failure)
    assert failure.original is None


class TwoPartError(Exception):
    """It can be pickled, but not read again."""

    def __init__(self, name, reason):
        super().__init__(f"{name}: {reason}")


def test_error_that_cannot_be_unpickled_travels_as_its_text(host):
    failure = host.failure("act", TwoPartError("disk", "it is gone"))
    assert "TwoPartError: disk: it is gone" in str(failure)
    assert failure.original is None


class Restless(BaseWorkload):
    """It keeps to its first event loop, exits, and fails to close."""

    async def use_loop(self):
        loop = asyncio.get_running_loop()
        self.loop = getattr(self, "loop", loop)
        return self.loop is loop

    def exit(self):
        raise SystemExit(3)

    def close(self):
        raise OSError("the device is busy")


def test_host_of_a_restless_workload_keeps_its_promises():
    host = MemberHost(incarnation=1)
    host.start(Restless, MemberContext(role=RLRoleType.ROLLOUT), None, {})
    assert [call(host, 1, n, "use_loop") for n in range(2)] == [True, True]
    with pytest.raises(InvocationError, match="SystemExit: 3"):
        call(host, 1, 2, "exit")
    with pytest.raises(OSError, match="the device is busy"):
        host.close()
    assert host.workload is None


class Once(BaseWorkload):
    """Without a state: its calls fail once each."""

    failed: list

    def act(self, number):
        if number not in self.failed:
            self.failed.append(number)
            raise RuntimeError("the service answered 503")
        return number


def test_what_has_failed_in_a_member_without_a_state_is_tried_again_for_another_trainer():
    host = MemberHost(incarnation=1)
    host.start(Once, MemberContext(role=RLRoleType.ROLLOUT), None, {})
    host.workload.failed = []
    for _ in range(2):
        with pytest.raises(InvocationError, match="503"):
            call(host, 1, 0, "act", 7, epoch=1)
    with pytest.raises(InvocationError, match="503"):
        call(host, 1, 1, "act", 8, epoch=1)
    assert host.executed == {"act": 2}
    assert [call(host, 1, n, "act", 7 + n, epoch=2) for n in range(2)] == [7, 8]


def test_what_has_failed_may_have_damaged_a_state_and_is_not_tried_again(host):
    for epoch in (1, 2):
        with pytest.raises(InvocationError, match="the user's own words"):
            call(host, 1, 0, "refuse", epoch=epoch)
    assert host.executed == {"refuse": 1}


def test_results_are_kept_until_their_step_is_committed_and_those_of_init_for_ever(host):
    call(host, 0, 0, "add", 1)
    call(host, 1, 0, "add", 1)
    call(host, 2, 0, "add", 1, settled=1)
    assert call(host, 0, 0, "add", 1).tolist() == [1.0] * 3
    assert call(host, 2, 0, "add", 1).tolist() == [3.0] * 3
    with pytest.raises(ReplayDiverged, match=r"call \(1, 0\) comes after call \(2, 0\) has run"):
        call(host, 1, 0, "add", 1)
    assert host.executed == {"add": 3}


def test_what_is_refused(host):
    call(host, 1, 0, "add", 1, epoch=2)
    with pytest.raises(StaleCall, match=r"ACTOR\[1\].add: attempt 1 of the trainer has been replaced"):
        call(host, 1, 1, "add", 1, epoch=1)
    with pytest.raises(StaleCall, match="meant for attempt 4 of the worker, this is 3"):
        call(host, 1, 1, "add", 1, incarnation=4)
    with pytest.raises(WorkloadDied, match="joins them") as died:
        call(host, 1, 1, "add", 1, incarnation=2)
    assert died.value.incarnation == 2
    with pytest.raises(ReplayDiverged, match=r"call \(1, 0\) was add before"):
        call(host, 1, 0, "later", 1)
    with pytest.raises(CallSkipped, match=r"call \(1, 3\) has not run"):
        call(host, 1, 4, "add", 1, after=(1, 3))
    assert host.executed == {"add": 1}


def test_arguments_that_cannot_be_had_leave_the_call_undone(host):
    def gone():
        raise KeyError("lost")

    with pytest.raises(KeyError):
        host.invoke(CallHeader((1, 0), "add", keep=True), gone)
    assert call(host, 1, 0, "add", 4).tolist() == [4.0] * 3


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("refuse", "LookupError: the user's own words"),
        ("generator", "its result cannot be sent: TypeError: cannot pickle"),
        ("cancelled", "CancelledError: by itself"),
    ],
)
def test_errors_carry_who_and_what_and_are_kept(host, method, said):
    for _ in range(2):
        with pytest.raises(InvocationError, match=said) as caught:
            call(host, 1, 0, method)
        assert (caught.value.role, caught.value.rank, caught.value.method) == ("ACTOR", 1, method)
        assert "Traceback" in caught.value.remote_traceback
    assert host.executed == {method: 1}


def test_a_call_with_other_arguments_is_told_by_the_trainers_line_alone(host):
    with pytest.raises(InvocationError, match=r"add\(\) takes .* positional arguments but .* were given") as caught:
        call(host, 1, 0, "add", 4, 5, 6)
    assert not caught.value.remote_traceback


def test_coroutines_are_run_to_their_end_and_raw_calls_raise_as_they_are(host):
    assert call(host, 1, 0, "later", 3) == 3
    with pytest.raises(LookupError):
        host.run("refuse", (), {})


def test_what_it_is_doing_can_be_asked_meanwhile(host):
    assert host.current_call() is None
    thread = threading.Thread(target=lambda: call(host, 4, 2, "wait"))
    thread.start()
    assert host.workload.entered.wait(30)
    host._now_s.advance(7.0)
    assert host.current_call() == ("wait", (4, 2), 7.0)
    host.workload.report_progress()
    assert host.current_call() == ("wait", (4, 2), 0.0)
    host._now_s.advance(2.0)
    assert host.current_call() == ("wait", (4, 2), 2.0)
    host.workload.go_on.set()
    thread.join(30)
    assert host.current_call() is None


def test_the_work_of_a_call_ends_with_its_last_progress():
    host = MemberHost()
    host.start(Work, MemberContext(), None, None)
    begun = host.work
    host.run("steps", (3, 0.05), {})
    assert host.work.units == begun.units + 3
    assert 0.1 <= host.work.busy_s - begun.busy_s < 0.3  # without the wait at the end, which is for others
    host.run("add", (1,), {})
    assert host.work.units == begun.units + 4


class TestState:
    @pytest.fixture
    def roots(self, tmp_path):
        (tmp_path / "memory").mkdir()
        (tmp_path / "durable").mkdir()
        return Roots("job", "run1", 1, tmp_path / "durable", tmp_path / "memory")

    def restore(self, host, roots, step, file):
        source = {"ACTOR-1": Piece(f"step-{step:08d}.e1", file)}
        return ask(host, RESTORE, GenerationRequest(step, (source,), roots))

    def test_committed_and_restored_in_another_process(self, host, roots):
        call(host, 1, 0, "add", 2)
        answer = ask(host, COMMIT, CommitRequest(1, roots))
        call(host, 2, 0, "add", 2)
        other = MemberHost(4)
        other.start(Work, MemberContext(role=RLRoleType.ACTOR, rank=1), None, {})
        assert ask(other, WHERE) == Standing(0, 0, 0)
        self.restore(other, roots, 1, answer.file)
        assert other.workload.total.tolist() == [2.0] * 3
        assert ask(other, WHERE) == Standing(1, 1, 1)
        other.close()

    def test_where_it_stands_says_which_commits_it_agrees_with(self, host, roots):
        call(host, 0, 0, "add", 1)
        call(host, 1, 0, "add", 1)
        assert ask(host, WHERE) == Standing(0, 0, 1)
        ask(host, COMMIT, CommitRequest(1, roots))
        assert ask(host, WHERE) == Standing(0, 1, 1)  # who never heard that 1 is committed may begin at 0 or 1
        call(host, 2, 0, "add", 1, settled=1)
        assert ask(host, WHERE) == Standing(1, 1, 2)
        host.run("add", (1,), {})
        assert not ask(host, WHERE).agrees_with(1)
        ask(host, COMMIT, CommitRequest(2, roots))
        assert ask(host, WHERE) == Standing(2, 2, 2)
        ask(host, FORGET)
        assert ask(host, WHERE) == Standing(None, None, 0)

    def test_what_it_kept_of_steps_goes_with_the_state_that_it_gives_up(self, host, roots):
        call(host, 0, 0, "add", 1)
        answer = ask(host, COMMIT, CommitRequest(1, roots))
        call(host, 2, 0, "add", 5)
        self.restore(host, roots, 1, answer.file)
        assert call(host, 0, 0, "add", 1).tolist() == [1.0] * 3  # init's answer stays
        assert call(host, 2, 0, "add", 5).tolist() == [6.0] * 3
        assert host.executed == {"add": 3}

    def test_a_damaged_or_missing_file_is_not_loaded(self, host, roots):
        answer = ask(host, COMMIT, CommitRequest(1, roots))
        path = roots.commits / "step-00000001.e1" / answer.file.name
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(InvocationError) as caught:
            self.restore(host, roots, 1, answer.file)
        assert isinstance(caught.value.original, CheckpointCorrupt)
        path.unlink()
        with pytest.raises(InvocationError) as caught:
            self.restore(host, roots, 1, answer.file)
        assert isinstance(caught.value.original, CheckpointMissing)
        with pytest.raises(InvocationError, match="step 1 has no ACTOR-1"):
            ask(host, RESTORE, GenerationRequest(1, (), roots))

    def test_a_copy_is_made_in_the_background_or_when_it_is_asked_for(self, host, roots):
        answer = ask(host, COMMIT, CommitRequest(2, roots, persist=True))
        request = GenerationRequest(2, ({"ACTOR-1": Piece("step-00000002.e1", answer.file)},), roots)
        copied = ask(host, PERSIST, request)
        durable = roots.durable / "step-00000002.e1" / copied.name
        assert durable.read_bytes() == (roots.commits / "step-00000002.e1" / copied.name).read_bytes()
        later = ask(host, COMMIT, CommitRequest(3, roots, copying=2))
        assert (later.copy, later.is_copying) == (copied, False)
        durable.unlink()
        other = MemberHost(4)
        other.start(Work, MemberContext(role=RLRoleType.ACTOR, rank=1), None, {})
        assert ask(other, PERSIST, request) == copied
        assert durable.exists()
        other.close()


RESULTS = {"first": 1, "second": 2}
REFS = {name: Ref(None, name, None, "ACTOR", 0, "update", 1) for name in RESULTS}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ([REFS["first"], "plain", REFS["second"]], [1, "plain", 2]),
        ([REFS["first"]], [1]),
        (["plain"], ["plain"]),
        ([], []),
    ],
)
def test_decode_resolves_the_results_in_a_list(argument, value):
    assert decode(encode(argument), RESULTS.__getitem__) == value


def test_header_of_a_call_says_everything_but_its_arguments():
    call = Call((3, 7), "update", (1,), {"lr": 2.0}, True, epoch=2, settled=1, keep=True, after=(3, 6))
    header = CallHeader.unpack(CallHeader.of(call, incarnation=4).pack())
    assert header == ((3, 7), "update", ("lr",), True, 2, 4, 1, True, (3, 6))
