# SPDX-License-Identifier: Apache-2.0
"""The gate in front of a workload: refused, repeated and kept calls, and their arguments."""

import asyncio
import json
import threading
import time
import traceback

import numpy as np
import pytest

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.common.spans import SpanFile, phase
from dlrover.python.rl.runtime.checkpoint.member_state import CommitRequest, GenerationRequest
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.store import Piece, folder_name
from dlrover.python.rl.runtime.member.arguments import CallHeader, decode, encode
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import COMMIT, FORGET, RAW_CALL, RESTORE, WHERE, Call, Ref, Standing
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext
from tests.support.manual_clock import ManualClock


class Work(BaseWorkload):
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.total = np.zeros(3)
        self.entered, self.may_end = threading.Event(), threading.Event()

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
            raise errors.ResultLost("it is gone", role=self.role, rank=self.rank, method="fetch")
        return ticket

    def wait(self):
        self.entered.set()
        assert self.may_end.wait(30)

    def steps(self, count, each_s):
        for _ in range(count):
            time.sleep(each_s)
            self.report_progress()
        time.sleep(0.5)

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def started(workload, context, **options):
    host = MemberHost(**{"incarnation": 1, **options})
    host.start(workload, context, None, {})
    return host


@pytest.fixture
def host():
    host = started(Work, MemberContext(role=RLRoleType.ACTOR, rank=1), incarnation=3, now_s=ManualClock())
    yield host
    host.close()


def call(host, step, n, method="add", *args, **terms):
    header = CallHeader((step, n), method, keep=True, **terms)
    return host.invoke(header, lambda: (args, {}))


def ask(host, verb, *args, **terms):
    return host.invoke(CallHeader(RAW_CALL, verb, **terms), lambda: (args, {}))


def test_repeated_call_has_the_same_answer_and_does_not_run(host):
    first = call(host, 1, 0, "add", 2)
    call(host, 1, 1, "add", 5)
    again = host.invoke(CallHeader((1, 0), "add", keep=True), lambda: pytest.fail("the arguments are not needed"))
    assert again.tolist() == [2.0] * 3  # as it was given, not what has become of the array since
    assert first.tolist() == [7.0] * 3
    assert host.executed == {"add": 2}


def test_call_whose_argument_is_gone_has_not_run(host):
    with pytest.raises(errors.ResultLost, match=r"ACTOR\[1\].fetch: it is gone"):
        call(host, 1, 0, "fetch", "old")
    with pytest.raises(errors.CallSkipped):
        call(host, 1, 1, "add", 2, after=(1, 0))
    assert call(host, 1, 0, "fetch", "new") == "new"
    assert call(host, 1, 1, "add", 2, after=(1, 0)).tolist() == [2.0] * 3


class TwoPartError(Exception):
    """It can be pickled, but not read again."""

    def __init__(self, name, reason):
        super().__init__(f"{name}: {reason}")


@pytest.mark.parametrize(
    ("error", "words"),
    [(ValueError("\ud83d"), "ValueError: ?"), (TwoPartError("disk", "gone"), "TwoPartError: disk: gone")],
)
def test_unsendable_error_has_its_words(host, error, words):
    error.__cause__ = OSError("no room for \ud83d")
    failure = host.failure("act", error)
    assert words in str(failure)
    assert failure.original is None
    assert "OSError: no room for ?" in failure.remote_traceback
    "".join(traceback.format_exception(failure)).encode()


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


def test_host_keeps_one_loop_and_survives_exits():
    host = started(Restless, MemberContext(role=RLRoleType.ROLLOUT))
    assert [call(host, 1, n, "use_loop") for n in range(2)] == [True, True]
    with pytest.raises(errors.InvocationError, match="SystemExit: 3"):
        call(host, 1, 2, "exit")
    with pytest.raises(OSError, match="the device is busy"):
        host.close()
    assert host.workload is None


class Once(BaseWorkload):
    """Has no state; each of its calls fails once."""

    failed: list

    def act(self, number):
        if number not in self.failed:
            self.failed.append(number)
            raise RuntimeError("the service answered 503")
        return number


def test_failed_call_without_a_state_runs_again_in_a_later_epoch():
    host = started(Once, MemberContext(role=RLRoleType.ROLLOUT))
    host.workload.failed = []
    for _ in range(2):
        with pytest.raises(errors.InvocationError, match="503"):
            call(host, 1, 0, "act", 7, epoch=1)
    with pytest.raises(errors.InvocationError, match="503"):
        call(host, 1, 1, "act", 8, epoch=1)
    assert host.executed == {"act": 2}
    assert [call(host, 1, n, "act", 7 + n, epoch=2) for n in range(2)] == [7, 8]


def test_failed_call_of_a_stateful_worker_does_not_run_again(host):
    for epoch in (1, 2):
        with pytest.raises(errors.InvocationError, match="the user's own words"):
            call(host, 1, 0, "refuse", epoch=epoch)
    assert host.executed == {"refuse": 1}


def test_results_are_kept_until_the_commit_and_of_init_for_ever(host):
    call(host, 0, 0, "add", 1)
    call(host, 1, 0, "add", 1)
    call(host, 2, 0, "add", 1, settled=1)
    assert call(host, 0, 0, "add", 1).tolist() == [1.0] * 3
    assert call(host, 2, 0, "add", 1).tolist() == [3.0] * 3
    with pytest.raises(errors.ReplayDiverged, match=r"call \(1, 0\) is too late: call \(2, 0\) has already run"):
        call(host, 1, 0, "add", 1)
    assert host.executed == {"add": 3}


def test_calls_out_of_place_are_refused(host):
    call(host, 1, 0, "add", 1, epoch=2)
    with pytest.raises(errors.StaleCall, match=r"ACTOR\[1\].add: attempt 1 of the trainer has been replaced"):
        call(host, 1, 1, "add", 1, epoch=1)
    with pytest.raises(errors.StaleCall, match="meant for attempt 4 of the worker, this is 3"):
        call(host, 1, 1, "add", 1, incarnation=4)
    with pytest.raises(errors.WorkloadDied, match="joins them") as died:
        call(host, 1, 1, "add", 1, incarnation=2)
    assert died.value.incarnation == 2
    with pytest.raises(errors.ReplayDiverged, match=r"call \(1, 0\) was 'add' the first time"):
        call(host, 1, 0, "later", 1)
    with pytest.raises(errors.CallSkipped, match=r"call \(1, 3\) has not run"):
        call(host, 1, 4, "add", 1, after=(1, 3))
    assert host.executed == {"add": 1}


def test_call_that_cancels_itself_has_an_error_with_its_origin(host):
    with pytest.raises(errors.InvocationError, match="CancelledError: by itself") as caught:
        call(host, 1, 0, "cancelled")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("ACTOR", 1, "cancelled")
    assert "Traceback" in caught.value.remote_traceback


def test_wrong_arguments_have_no_traceback_of_the_worker(host):
    message = r"add\(\) takes .* positional arguments but .* were given"
    with pytest.raises(errors.InvocationError, match=message) as caught:
        call(host, 1, 0, "add", 4, 5, 6)
    assert not caught.value.remote_traceback


def test_current_call_can_be_asked_while_it_runs(host):
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
    host.workload.may_end.set()
    thread.join(30)
    assert host.current_call() is None


def test_work_of_a_call_ends_with_its_last_progress():
    host = started(Work, MemberContext())
    before = host.work
    host.run("steps", (3, 0.05), {})
    assert host.work.units == before.units + 3
    assert 0.1 <= host.work.busy_s - before.busy_s < 0.3  # without the wait at the end, which is for others
    host.run("add", (1,), {})
    assert host.work.units == before.units + 4


def test_decode_resolves_the_results_in_a_list():
    results = {"first": 1, "second": 2}
    first, second = (Ref(None, name, None, "ACTOR", 0, "update", 1) for name in results)
    assert decode(encode([first, "plain", second]), lambda names: [*map(results.get, names)]) == [1, "plain", 2]


def test_header_of_a_call_has_all_but_its_arguments():
    call = Call((3, 7), "update", (1,), {"lr": 2.0}, True, epoch=2, settled=1, keep=True, after=(3, 6))
    header = CallHeader.unpack(CallHeader.of(call, incarnation=4).pack())
    assert header == ((3, 7), "update", ("lr",), True, 2, 4, 1, True, (3, 6))


@pytest.fixture
def roots(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "durable").mkdir()
    return Roots("job", "run1", 1, tmp_path / "durable", tmp_path / "memory")


def commit(host, roots, step, **terms):
    return ask(host, COMMIT, CommitRequest(step, roots, **terms))


def test_standing_names_the_commits_of_its_state(host, roots):
    call(host, 0, 0, "add", 1)
    call(host, 1, 0, "add", 1)
    assert ask(host, WHERE) == Standing(0, 0, 1)
    commit(host, roots, 1)
    assert ask(host, WHERE) == Standing(0, 1, 1)  # without word that 1 is committed it may begin at 0 or 1
    call(host, 2, 0, "add", 1, settled=1)
    assert ask(host, WHERE) == Standing(1, 1, 2)
    host.run("add", (1,), {})
    assert not ask(host, WHERE).agrees_with(1)
    commit(host, roots, 2)
    assert ask(host, WHERE) == Standing(2, 2, 2)
    ask(host, FORGET)
    assert ask(host, WHERE) == Standing(None, None, 0)


def test_restore_forgets_the_answers_of_later_steps(host, roots):
    call(host, 0, 0, "add", 1)
    file = commit(host, roots, 1).file
    call(host, 2, 0, "add", 5)
    ask(host, RESTORE, GenerationRequest(1, ({"ACTOR-1": Piece(folder_name(1, 1), file)},), roots))
    assert call(host, 0, 0, "add", 1).tolist() == [1.0] * 3  # init's answer stays
    assert call(host, 2, 0, "add", 5).tolist() == [6.0] * 3
    assert host.executed == {"add": 3}


def test_calls_are_recorded_with_their_phases_and_errors(tmp_path):
    """A repeated answer is no call, and a call that is refused is none."""
    clock = ManualClock()
    spans = SpanFile(tmp_path, ProcessId("ACTOR", 1), 1, most_mb=1)

    class Phased(Work):
        def train(self):
            clock.advance(2.0)
            with phase("forward"):
                pass
            return 1

    host = started(Phased, MemberContext(role=RLRoleType.ACTOR, rank=1), now_s=clock, spans=spans)
    assert [call(host, 4, 0, "train"), call(host, 4, 0, "train")] == [1, 1]
    with pytest.raises(errors.InvocationError):
        call(host, 4, 1, "missing")
    with pytest.raises(errors.CallSkipped):
        call(host, 4, 3, "train", after=(4, 2))
    host.close()
    lines = [json.loads(line) for line in (tmp_path / "spans" / "actor-1.jsonl").read_text().splitlines()]
    assert [line[1:4] + line[7:] for line in lines[1:]] == [
        [-1, -1, "__init__", ""],
        [4, 0, "train", ""],
        [4, 1, "missing", "AttributeError"],
    ]
    assert lines[2][5] - lines[2][4] == pytest.approx(2.0) and list(lines[2][6]) == ["forward"]
