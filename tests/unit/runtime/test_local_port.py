# SPDX-License-Identifier: Apache-2.0
"""Workers of one process are as far from the trainer as other processes are."""

import os

import numpy as np
import pytest

from dlrover.python.rl.common.errors import InvocationError, InvocationTimeout, WorkloadDied, WorkloadStartError
from dlrover.python.rl.runtime.local import LocalHandle, LocalHosting, LocalMember, LocalPort
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import Call, gather
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext
from tests.support.manual_clock import ManualClock


class Member(BaseWorkload):
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.clock, self.kept = config, None

    def change(self, values):
        values["list"].append("changed")
        return values

    def keep(self, value):
        self.kept = value
        return value

    def replace_first(self, value):
        self.kept.setflags(write=True) if self.kept.flags.owndata else None
        self.kept = self.kept.copy()
        self.kept[0] = value

    def kept_value(self):
        return self.kept

    def address(self, array):
        return array.__array_interface__["data"][0], array.flags.writeable

    def write(self, array):
        array[0] = 1

    def take_s(self, seconds):
        self.clock.advance(seconds)

    def environment(self):
        return os.environ.get("RANK"), os.environ.get("ONLY_HERE")

    def lock(self):
        return (item for item in "unpicklable")


@pytest.fixture
def make():
    def port_of(members=2, **options):
        clock = ManualClock()
        env = {"ONLY_HERE": "yes"}
        group = [LocalMember(MemberHost(), {**env, "RANK": str(rank)}) for rank in range(members)]
        for rank, member in enumerate(group):
            member.host.start(Member, MemberContext(rank=rank), None, clock)
        return LocalPort({"ACTOR": group}, now_s=clock, **options)

    return port_of


def call(port, method, *args, rank=0, timeout=None):
    return port.submit("ACTOR", rank, Call((0, 0), method, args, {})).result(timeout)


def test_a_changed_argument_stays_as_it_was(make):
    values = {"list": [1]}
    assert call(make(), "change", values) == {"list": [1, "changed"]}
    assert values == {"list": [1]}


def test_a_changed_result_stays_as_it_was_in_the_member(make):
    port = make()
    call(port, "keep", [1, 2]).append("changed by the trainer")
    assert call(port, "kept_value") == [1, 2]


def test_each_taker_of_a_stored_value_has_its_own_copy(make):
    port = make()
    ref = port.put({"list": [1]})
    for rank in (0, 1):
        assert call(port, "change", ref, rank=rank) == {"list": [1, "changed"]}
    assert ref.result() == {"list": [1]}


def test_a_big_array_is_shared_read_only_and_not_copied(make):
    port, array = make(), np.zeros(1_000_000)
    where, writeable = call(port, "address", array)
    assert (where, writeable) == (array.__array_interface__["data"][0], False)
    with pytest.raises(InvocationError, match="read-only"):
        call(port, "write", array)
    array[0] = 2.0


def test_what_was_put_away_or_given_back_stays_what_it_was(make):
    port, array = make(), np.zeros(1_000_000)
    stored = port.put(array)
    array[0] = 1.0
    assert stored.result()[0] == 0.0
    assert call(port, "address", stored) == call(port, "address", stored)
    given = port.submit("ACTOR", 0, Call((0, 0), "keep", (stored,), {}))
    call(port, "replace_first", 5.0)
    assert given.result()[0] == 0.0


def test_deadlines_hold_by_the_clock_that_was_passed_in(make):
    port = make()
    refs = [port.submit("ACTOR", rank, Call((0, 0), "take_s", (seconds,), {})) for rank, seconds in ((0, 1), (1, 3))]
    with pytest.raises(InvocationTimeout, match="from rank 1") as caught:
        gather(refs, 2.0)
    assert caught.value.arrived == {0: None}
    assert gather(refs, 3.0) == gather(refs, None) == [None, None]


def test_deadlines_are_off_while_somebody_debugs(make):
    assert call(make(enforce_deadlines=False), "take_s", 100, timeout=1.0) is None


def test_a_killed_member_is_gone_with_its_state(make):
    port = make()
    call(port, "keep", 3)
    port.kill("ACTOR", 0)
    with pytest.raises(WorkloadDied, match=r"ACTOR\[0\].kept_value: the worker was killed") as caught:
        call(port, "kept_value")
    assert caught.value.retryable
    assert call(port, "kept_value", rank=1) is None


def test_a_member_sees_its_own_environment_and_nobody_else_does(make, monkeypatch):
    port = make()
    monkeypatch.setenv("RANK", "outside")
    assert [call(port, "environment", rank=rank) for rank in (0, 1)] == [("0", "yes"), ("1", "yes")]
    assert (os.environ["RANK"], os.environ.get("ONLY_HERE")) == ("outside", None)


def test_what_could_not_travel_between_processes_does_not_travel_here(make):
    with pytest.raises(InvocationError, match=r"ACTOR\[0\].lock on .*cannot pickle 'generator'"):
        call(make(), "lock")


def test_a_handle_calls_its_member_and_hides_private_names(make):
    handle = LocalHandle(make(), "ACTOR", 1)
    assert handle.keep.remote(5).result() == 5
    assert not hasattr(handle, "_keep")


calls = []


class Failing(BaseWorkload):
    """The last rank cannot be made."""

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        if self.rank == self.world_size - 1:
            raise ValueError("no memory")
        calls.append(("made", self.rank))

    def close(self):
        calls.append(("closed", self.rank))


def test_ranks_that_have_started_are_closed_when_a_later_one_cannot():
    calls.clear()
    hosting = LocalHosting(count=3)
    with pytest.raises(WorkloadStartError, match="no memory"):
        hosting.start("ACTOR", [[0], [1], [2]], f"{__name__}:Failing")
    assert calls == [("made", 0), ("made", 1), ("closed", 1), ("closed", 0)]
    hosting.close()
