# SPDX-License-Identifier: Apache-2.0
"""Which way weights take from one engine of a script to another, and why not another one."""

from dataclasses import dataclass, field, replace

import pytest

from dlrover.python.rl.common.errors import SessionError
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.member.loading import Device
from dlrover.python.rl.session.session import Members
from dlrover.python.rl.session.weight_sync import Endpoints, Route, choose_route

TRAIN, ROLLOUT = "TRAIN_1", "INFERENCE_1"


@dataclass
class FourSlots:
    """What a route has to know of a session: four slots of a kind, two on each node."""

    kind: str = "cuda"
    separate: bool = True
    id: str = "session"
    hosting: "FourSlots" = field(init=False)

    def __post_init__(self):
        self.hosting = self
        self.slots = tuple(Device(f"node{slot // 2}", f"10.0.0.{slot // 2}", self.kind) for slot in range(4))

    def members(self, name, *slots):
        devices = [self.slots[rank[0]] for rank in slots]
        processes = tuple(Process(device.node, 1, device.node, device.address) for device in devices)
        return Members(name, slots, slots, processes, None)


def choose(cluster, source, target, way=None, folder=None):
    return choose_route(cluster.members(TRAIN, *source), cluster.members(ROLLOUT, *target), cluster, way, folder)


@pytest.mark.feature(101)
@pytest.mark.parametrize(
    ("cluster", "target", "way"),
    [
        (FourSlots(), [(0,)], "shared memory"),
        (FourSlots(), [(1,)], "shared memory"),
        (FourSlots(), [(0,), (1,)], "shared memory"),
        (FourSlots(), [(2,)], "broadcast"),
        (FourSlots("cpu"), [(0,)], "shared memory"),
        (FourSlots(separate=False), [(0,)], "shared memory"),
    ],
)
def test_the_shortest_way_is_taken(cluster, target, way):
    assert choose(cluster, [(0,), (1,)], target).way == way


@pytest.mark.feature(102)
@pytest.mark.parametrize(
    ("cluster", "target", "at", "by_host"),
    [
        (FourSlots(), [(2,), (3,)], "10.0.0.0", False),
        (FourSlots(), [(1,)], "10.0.0.0", True),
        (FourSlots("cpu"), [(2,)], "10.0.0.0", True),
    ],
)
def test_a_broadcast_is_nccls_where_each_device_is_in_it_once(cluster, target, at, by_host):
    route = choose(cluster, [(0,), (1,)], target, "broadcast")
    assert route == Route("broadcast", "session", "TRAIN_1-INFERENCE_1", len(target), at, by_host)


@pytest.mark.parametrize(
    ("cluster", "target", "way", "why"),
    [
        (FourSlots(), [(1,)], "device memory", r"TRAIN_1\[0\] and INFERENCE_1 have different first devices"),
        (FourSlots(), [(1, 0)], "device memory", r"TRAIN_1\[0\] and INFERENCE_1 have different first devices"),
        (FourSlots(), [(2,)], "device memory", "they are on 2 nodes"),
        (FourSlots(), [(2,)], "shared memory", "they are on 2 nodes"),
        (FourSlots(separate=False), [(0,)], "broadcast", r"init\(local=True\) has one process"),
        (FourSlots(), [(1,)], "disk", "it needs a folder that both see"),
    ],
)
def test_a_way_that_cannot_be_gone_is_refused_with_the_reason(cluster, target, way, why):
    with pytest.raises(SessionError, match=f"cannot send weights from TRAIN_1 to INFERENCE_1 by '{way}': {why}"):
        choose(cluster, [(0,)], target, way)


def test_a_misspelt_way_is_refused_with_the_nearest():
    with pytest.raises(SessionError, match="unknown way '3' to send weights; known: "):
        choose(FourSlots(), [(0,)], [(1,)], 3)
    with pytest.raises(SessionError, match="unknown way 'brodcast' to send weights; did you mean 'broadcast'"):
        choose(FourSlots(), [(0,)], [(1,)], "brodcast")


def test_a_folder_is_the_way_by_disk_and_refused_with_any_other(tmp_path):
    assert choose(FourSlots(), [(0,)], [(1,)], folder=tmp_path) == choose(
        FourSlots(), [(0,)], [(1,)], "disk", folder=tmp_path
    )
    for way in ("shared memory", "broadcast", "device memory"):
        with pytest.raises(SessionError, match=f"folder='w' is an argument for 'disk', not for '{way}'"):
            choose(FourSlots(), [(0,)], [(0,)], way, folder="w")


def test_sessions_that_share_a_folder_have_files_of_their_own(tmp_path):
    channels = []
    for session in ("one", "two"):
        route = replace(choose(FourSlots("cpu"), [(0,)], [(1,)], "disk", tmp_path), session=session)
        ends = Endpoints("TRAIN_1[0]", True, "cpu", None)
        channels.append(ends.endpoint(route).settings.channel)
        ends.close()
    assert len(set(channels)) == 2


def test_an_end_is_kept_until_the_way_between_the_same_engines_changes(tmp_path):
    ends = Endpoints("TRAIN_1[0]", True, "cpu", None)
    files = choose(FourSlots("cpu"), [(0,)], [(1,)], "disk", tmp_path)
    broadcast = choose(FourSlots("cpu"), [(0,)], [(1,)], "broadcast")
    first = ends.endpoint(files)
    assert ends.endpoint(files) is first
    assert type(ends.endpoint(broadcast)) is not type(first)
    assert ends.endpoint(files) is not first
    ends.close()
