# SPDX-License-Identifier: Apache-2.0
"""The journal's lines: every event there and back with its time, no flipped bit unseen."""

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common import log
from dlrover.python.rl.common.errors import JournalCorrupt
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.control import events
from dlrover.python.rl.control.journal import decode, encode

GONE = events.Cause(events.CauseKind.PROCESS_DIED, "ROLLOUT[1]", "words ü \u2028", "line 1\nline 2")
WHERE = events.Process("f00d", 42, "host", "10.0.0.1", 29500, 3)
ROLES = {RLRoleType.ACTOR: events.RoleSettings(2, events.RecoveryScope.GROUP, 1, 5), "JUDGE": events.RoleSettings(1)}
EVENTS = [
    events.Submitted("job", ROLES, "0a1b", 3, 2, 0.25, 60.0, 2),
    events.MasterStarted("node", 7),
    events.Placed(1),
    events.MemberStarted(RLRoleType.ROLLOUT, 3, 2, WHERE, 4),
    events.MemberLost("ROLLOUT", 3, 2, GONE, "f00d"),
    events.StandbyReady("ROLLOUT", 4, WHERE),
    events.StandbyLost("ROLLOUT", 4, GONE),
    events.TrainerStarted(1, WHERE),
    events.StepsOpened(1),
    events.Progressed(1, 10),
    events.TrainerFinished(1),
    events.TrainerLost(1, GONE),
    events.NodeLost("f00d", GONE),
    *(events.Failed(2, events.Cause(kind, "job", "words")) for kind in events.CauseKind),
    events.Released(2),
    events.WaitOver("ROLLOUT[1]#3"),
    events.Resized("ROLLOUT", 3),
    events.Unplaced("ROLLOUT", 1, 2, GONE),
    events.StopRequested("enough\n"),
]


def line_of(fields):
    body = json.dumps(fields).encode()
    return b"%08x %s" % (zlib.crc32(body), body)


def test_every_kind_of_event_is_tried_here():
    assert {type(event) for event in EVENTS} == set(events.Event.__subclasses__())


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_is_one_line_there_and_back(event):
    line = encode(12.5, event)
    assert b"\n" not in line
    ((at_s, back),) = decode([line])
    assert (at_s, back) == (12.5, event)
    assert type(back) is type(event)


def test_event_fields_decoded_have_their_types():
    ((_, submitted), (_, lost), (_, up)) = decode(encode(1.0, event) for event in (EVENTS[0], EVENTS[4], EVENTS[3]))
    assert submitted.roles["ACTOR"].scope is events.RecoveryScope.GROUP
    assert (lost.cause.kind, lost.cause.retryable) == (events.CauseKind.PROCESS_DIED, True)
    assert type(up.process) is events.Process


def test_cause_with_a_secret_hides_it():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_secrets", ())
        log.hide_values(["hunter2000"])
        cause = events.Cause(events.CauseKind.USER_ERROR, "trainer", "of hunter2000", "key = 'hunter2000'")
        line = encode(1.0, events.Failed(1, cause))
    assert b"hunter2000" not in line


@given(st.text(), st.text(), st.text(), st.integers(0), st.sampled_from(events.CauseKind), st.floats(0, 1e12))
def test_any_words_survive(name, message, detail, number, kind, at_s):
    event = events.Failed(number, events.Cause(kind, name, message, detail))
    line = encode(at_s, event)
    assert line.splitlines() == [line]
    assert decode([line]) == [(at_s, event)]


def test_of_long_details_the_beginning_and_the_end_are_kept():
    cause = events.Cause(events.CauseKind.HUNG, "ACTOR[0]", "hangs", "first" + "x" * 5 * events.MOST_DETAIL + "last")
    assert len(cause.detail) <= events.MOST_DETAIL
    long = events.Cause(events.CauseKind.USER_ERROR, "ACTOR[0]", "first\n" + "x" * 10_000 + "last")
    assert long.message.startswith("first x") and long.message.endswith("last")
    assert len(long.message) <= 600 and "\n" not in long.message
    assert (cause.detail[:5], cause.detail[-4:]) == ("first", "last")
    assert "[...]" in cause.detail
    assert decode([encode(1.0, events.Failed(1, cause))]) == [(1.0, events.Failed(1, cause))]


def test_encode_of_nan_time_raises():
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(float("nan"), events.Placed(1))


@pytest.mark.parametrize("event", EVENTS[:8], ids=lambda event: type(event).__name__)
def test_one_flipped_bit_anywhere_is_seen(event):
    lines = [encode(1.0, events.Placed(1)), encode(2.0, event)]
    for bit in range(8 * len(lines[1])):
        flipped = bytearray(lines[1])
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(JournalCorrupt, match="line 2"):
            decode([lines[0], bytes(flipped)])


WHOLE = {"v": 2, "at_s": 1.0, "event": "Placed", "incarnation": 1}
CAUSE = {"kind": "internal", "who": "x", "message": "y", "detail": ""}


@pytest.mark.parametrize(
    "fields",
    [
        *({**WHOLE, "v": version} for version in (1, 3)),
        *({field: WHOLE[field] for field in WHOLE if field != missing} for missing in ("v", "at_s", "incarnation")),
        *({**WHOLE, "event": name} for name in ("Replaced", ["Placed"], "Failed")),
        *({**WHOLE, "incarnation": value} for value in ("1", 1.0, True)),
        *({**WHOLE, "at_s": "now"}, {**WHOLE, "more": 1}, [], None),
        *(
            {**WHOLE, "event": "Failed", "cause": cause}
            for cause in ({**CAUSE, "kind": "magic"}, {**CAUSE, "more": 1}, "internal")
        ),
    ],
    ids=str,
)
def test_a_line_of_another_format_is_never_taken_for_an_event(fields):
    with pytest.raises(JournalCorrupt, match="journal line 1 holds no event of format 2"):
        decode([line_of(fields)])


def test_a_line_of_an_older_format_says_which():
    with pytest.raises(JournalCorrupt, match="line 2 .* it is of format 1"):
        decode([line_of(WHOLE), line_of({"v": 1, "event": "Placed", "incarnation": 1})])


@pytest.mark.parametrize("line", [b"", b" ", b"{}", b"00000000 {}", encode(1.0, events.Placed(1))[:-1]])
def test_a_line_without_its_checksum_is_refused(line):
    with pytest.raises(JournalCorrupt, match="line 1 does not match its checksum"):
        decode([line])
