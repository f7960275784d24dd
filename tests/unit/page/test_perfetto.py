# SPDX-License-Identifier: Apache-2.0
"""Traces for Perfetto, read by a decoder of their own and by Perfetto's classes."""

from collections import defaultdict

import pytest

from dlrover.python.rl.page.perfetto import trace
from dlrover.python.rl.page.spans import read_steps
from tests.support.recorded_spans import Recording


def fields_of(data):
    """Return the fields of a protobuf message: number to values, numbers or bytes."""
    fields, at = defaultdict(list), 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            value, shift, at = value | (data[at] & 0x7F) << shift, shift + 7, at + 1
            if data[at - 1] < 0x80:
                return value

    while at < len(data):
        key = varint()
        value = varint()
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        fields[key >> 3].append(value)
    return fields


@pytest.fixture
def steps(tmp_path):
    return read_steps(Recording(tmp_path).step(1, [0.2, 0.4]).step(2).write(), 1, 2)


def test_trace_has_a_balanced_track_of_each_process(steps):
    tracks, open_slices, covered = {}, defaultdict(list), defaultdict(int)
    for packet in map(fields_of, fields_of(trace(steps))[1]):
        assert packet[10] == [1]
        for track in map(fields_of, packet[60]):
            tracks[track[1][0]] = track[2][0].decode()
        for event in map(fields_of, packet[11]):
            (track,), (at_ns,) = event[11], packet[8]
            if event[9] == [1]:
                open_slices[track].append((event[23][0].decode(), at_ns))
            else:
                name, began_ns = open_slices[track].pop()
                assert event[9] == [2] and began_ns <= at_ns
                covered[tracks[track]] += (at_ns - began_ns) * (not open_slices[track])
    assert list(tracks.values()) == ["steps", "trainer", "ACTOR[0]", "ROLLOUT[0]", "ROLLOUT[1]"]
    assert not any(open_slices.values()) and set(covered.values()) == {2_000_000_000}


def test_trace_is_read_by_perfettos_classes(steps):
    pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    message = pb2.Trace()
    message.ParseFromString(trace(steps))
    events = [packet.track_event for packet in message.packet if packet.HasField("track_event")]
    assert {"step 1", "step 2", "sample", "decode", "waits for ACTOR.update"} <= {event.name for event in events}
    begins = [event for event in events if event.type == pb2.TrackEvent.TYPE_SLICE_BEGIN]
    assert 2 * len(begins) == len(events)
    assert {"ROLLOUT[1]"} <= {note.string_value for event in events for note in event.debug_annotations}


def test_trace_of_no_step_is_only_the_track_of_steps():
    assert len(fields_of(trace([]))[1]) == 2
