# SPDX-License-Identifier: Apache-2.0
"""Workers of one process are as far from the trainer as other processes are; tests/contract has more of it."""

import os

import numpy as np
import pytest

from dlrover.python.rl.common.errors import InvocationError, InvocationTimeout, WorkloadStartError
from dlrover.python.rl.runtime.local import LocalHosting, LocalMember, LocalPort
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import Call, gather
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext
from tests.support.manual_clock import ManualClock


class Member(BaseWorkload):
    """Keeps a value; the config is a clock."""

    value = None

    def change(self, values):
        values["list"].append("changed")
        return values

    def keep(self, value):
        self.value = value
        return value

    def replace_first(self, value):
        self.value = self.value.copy()
        self.value[0] = value

    def kept_value(self):
        return self.value

    def address(self, array):
        return array.__array_interface__["data"][0], array.flags.writeable

    def write(self, array):
        array[0] = 1

    def take_s(self, seconds):
        self.config.advance(seconds)

    def environment(self):
        return os.environ.get("RANK"), os.environ.get("ONLY_HERE")


def port_of(**options):
    clock = ManualClock()
    group = [LocalMember(MemberHost(), {"ONLY_HERE": "yes", "RANK": str(rank)}) for rank in (0, 1)]
    for rank, member in enumerate(group):
        member.host.start(Member, MemberContext(rank=rank), None, clock)
    return LocalPort({"ACTOR": group}, now_s=clock, **options)


@pytest.fixture
def port():
    return port_of()


def submit(port, method, *args, rank=0):
    return port.submit("ACTOR", rank, Call((0, 0), method, args, {}))


def call(port, method, *args, rank=0, timeout=None):
    return submit(port, method, *args, rank=rank).result(timeout)


def test_changed_arguments_and_results_stay_as_they_were(port):
    values = {"list": [1]}
    stored = port.put(values)
    for argument, rank in ((values, 0), (stored, 0), (stored, 1)):
        assert call(port, "change", argument, rank=rank) == {"list": [1, "changed"]}
    assert values == stored.result() == {"list": [1]}
    call(port, "keep", [1, 2]).append("changed by the trainer")
    assert call(port, "kept_value") == [1, 2]


def test_big_array_is_shared_read_only(port):
    array = np.zeros(1_000_000)
    assert call(port, "address", array) == (array.__array_interface__["data"][0], False)
    with pytest.raises(InvocationError, match="read-only"):
        call(port, "write", array)
    array[0] = 2.0


def test_stored_arrays_and_results_do_not_change(port):
    array = np.zeros(1_000_000)
    stored = port.put(array)
    array[0] = 1.0
    assert stored.result()[0] == 0.0
    assert call(port, "address", stored) == call(port, "address", stored)
    result = submit(port, "keep", stored)
    call(port, "replace_first", 5.0)
    assert result.result()[0] == 0.0


def test_deadlines_hold_by_the_clock_unless_the_user_debugs(port):
    refs = [submit(port, "take_s", seconds, rank=rank) for rank, seconds in ((0, 1), (1, 3))]
    with pytest.raises(InvocationTimeout, match="from rank 1") as caught:
        gather(refs, 2.0)
    assert caught.value.arrived == {0: None}
    assert gather(refs, 3.0) == gather(refs, None) == [None, None]
    assert call(port_of(enforce_deadlines=False), "take_s", 100, timeout=1.0) is None


def test_member_alone_has_its_environment(port, monkeypatch):
    monkeypatch.setenv("RANK", "outside")
    assert [call(port, "environment", rank=rank) for rank in (0, 1)] == [("0", "yes"), ("1", "yes")]
    assert (os.environ["RANK"], os.environ.get("ONLY_HERE")) == ("outside", None)


class Failing(BaseWorkload):
    """The last rank cannot be created."""

    events = []

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        if self.rank == self.world_size - 1:
            raise ValueError("no memory")
        self.events.append(("created", self.rank))

    def close(self):
        self.events.append(("closed", self.rank))


def test_started_ranks_are_closed_if_a_later_one_fails():
    Failing.events.clear()
    hosting = LocalHosting(count=3)
    with pytest.raises(WorkloadStartError, match="no memory"):
        hosting.start("ACTOR", [[0], [1], [2]], f"{__name__}:Failing")
    assert Failing.events == [("created", 0), ("created", 1), ("closed", 1), ("closed", 0)]
    hosting.close()
