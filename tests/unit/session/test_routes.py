"""Which way weights take from one engine of a script to another, and why not another one."""

from dataclasses import dataclass, field

import pytest

from dlrover.python.rl.common.errors import SessionError
from dlrover.python.rl.control.events import Process
from dlrover.python.rl.runtime.hosting import Device
from dlrover.python.rl.session.routes import Route, Routes, route_between
from dlrover.python.rl.session.session import Crew

TRAIN, ROLLOUT = "TRAIN_1", "INFERENCE_1"


@dataclass
class Place:
    """What a route has to know of a session: four slots of a kind, two on each node."""

    kind: str = "cuda"
    separate: bool = True
    id: str = "session"
    hosting: "Place" = field(init=False)

    def __post_init__(self):
        self.hosting = self
        self.slots = tuple(Device(f"node{slot // 2}", f"10.0.0.{slot // 2}", self.kind) for slot in range(4))

    def crew(self, name, *seats):
        at = [self.slots[seat[0]] for seat in seats]
        return Crew(name, seats, seats, tuple(Process(one.node, 1, one.node, one.address) for one in at))


def chosen(place, source, target, way=None, folder=None):
    return route_between(place.crew(TRAIN, *source), place.crew(ROLLOUT, *target), place, way, folder)


@pytest.mark.parametrize(
    ("place", "target", "way"),
    [
        (Place(), [(0,)], "device memory"),
        (Place(), [(0, 1)], "device memory"),
        (Place(), [(1,)], "shared memory"),
        (Place(), [(0,), (1,)], "shared memory"),
        (Place(), [(2,)], "object store"),
        (Place("cpu"), [(0,)], "shared memory"),
        (Place(separate=False), [(0,)], "process"),
    ],
)
def test_101_the_shortest_way_is_taken(place, target, way):
    assert chosen(place, [(0,), (1,)], target).way == way


@pytest.mark.parametrize(
    ("place", "target", "at", "by_host"),
    [
        (Place(), [(2,), (3,)], "10.0.0.0", False),
        (Place(), [(1,)], "10.0.0.0", True),
        (Place("cpu"), [(2,)], "10.0.0.0", True),
    ],
)
def test_102_a_broadcast_is_nccls_where_each_device_is_in_it_once(place, target, at, by_host):
    route = chosen(place, [(0,), (1,)], target, "broadcast")
    assert route == Route("broadcast", "session", "TRAIN_1-INFERENCE_1", len(target), at, by_host)


@pytest.mark.parametrize(
    ("place", "target", "way", "why"),
    [
        (Place(), [(1,)], "device memory", r"TRAIN_1\[0\] has not the first device of INFERENCE_1"),
        (Place(), [(1, 0)], "device memory", r"TRAIN_1\[0\] has not the first device of INFERENCE_1"),
        (Place(), [(2,)], "device memory", "they are on 2 nodes"),
        (Place(), [(2,)], "shared memory", "they are on 2 nodes"),
        (Place(), [(1,)], "process", "their ranks are processes of their own"),
        (Place(separate=False), [(0,)], "broadcast", r"init\(local=True\) has one process"),
        (Place(separate=False), [(0,)], "device memory", r"init\(local=True\) has one process"),
        (Place(), [(1,)], "disk", "it takes a folder that both see"),
    ],
)
def test_a_way_that_cannot_be_gone_is_refused_with_the_reason(place, target, way, why):
    with pytest.raises(SessionError, match=f"cannot go from TRAIN_1 to INFERENCE_1 by '{way}': {why}"):
        chosen(place, [(0,)], target, way)


def test_a_misspelt_way_is_refused_with_the_nearest():
    with pytest.raises(SessionError, match="weights have no way 'brodcast'; did you mean 'broadcast'"):
        chosen(Place(), [(0,)], [(1,)], "brodcast")


def test_an_end_is_kept_until_the_way_between_the_same_engines_changes(tmp_path):
    ends = Routes("TRAIN_1[0]", True, "cpu", None)
    files, broadcast = (chosen(Place("cpu"), [(0,)], [(1,)], way, tmp_path) for way in ("disk", "broadcast"))
    first = ends.end(files)
    assert ends.end(files) is first
    assert type(ends.end(broadcast)) is not type(first)
    assert ends.end(files) is not first
    ends.close()
