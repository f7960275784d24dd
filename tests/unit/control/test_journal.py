"""The journal's lines: every event there and back, no flipped bit unseen."""

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import JournalCorrupt
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.control.events import (
    EVENT_TYPES,
    Cause,
    CauseKind,
    Failed,
    MemberStarted,
    Placed,
    Released,
    RestartDue,
    StopRequested,
    Submitted,
    TrainerFinished,
    TrainerStarted,
)
from dlrover.python.rl.control.journal import decode, encode
from dlrover.python.rl.runtime.state_store import FileStateStore

EVENTS = [
    Submitted("job", {RLRoleType.ACTOR: 2, "JUDGE": 1}, 3, 2, {"ACTOR": 0}, 0.25),
    Placed(1),
    MemberStarted(1, RLRoleType.ROLLOUT, 3, "host", 42),
    TrainerStarted(1, "host", 43),
    TrainerFinished(1),
    *(Failed(2, Cause(kind, "ROLLOUT[1]", "words ü \u2028", "line 1\nline 2")) for kind in CauseKind),
    Released(2),
    RestartDue(2),
    StopRequested("enough\n"),
]


def line_of(fields):
    body = json.dumps(fields).encode()
    return b"%08x %s" % (zlib.crc32(body), body)


def test_every_kind_of_event_is_tried_here():
    assert {type(event) for event in EVENTS} == set(EVENT_TYPES)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_is_one_line_there_and_back(event):
    line = encode(event)
    assert b"\n" not in line
    (back,) = decode([line])
    assert back == event
    assert type(back) is type(event)


@given(st.text(), st.text(), st.text(), st.integers(0), st.sampled_from(CauseKind))
def test_any_words_survive(who, message, detail, number, kind):
    event = Failed(number, Cause(kind, who, message, detail))
    line = encode(event)
    assert line.splitlines() == [line]
    assert decode([line]) == [event]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_one_flipped_bit_anywhere_is_seen(event):
    lines = [encode(Placed(1)), encode(event)]
    for bit in range(8 * len(lines[1])):
        flipped = bytearray(lines[1])
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(JournalCorrupt, match="line 2"):
            decode([lines[0], bytes(flipped)])


@pytest.mark.parametrize(
    "fields",
    [
        {"v": 2, "event": "Placed", "incarnation": 1},
        {"event": "Placed", "incarnation": 1},
        {"v": 1, "event": "Replaced", "incarnation": 1},
        {"v": 1, "event": "Placed"},
        {"v": 1, "event": "Placed", "incarnation": 1, "more": 1},
        {"v": 1, "event": "Failed", "incarnation": 1},
        {"v": 1, "event": "Failed", "incarnation": 1, "cause": {"kind": "magic", "who": "x", "message": "y"}},
        {"v": 1, "event": ["Placed"]},
        [],
        None,
    ],
)
def test_a_line_of_another_format_is_never_taken_for_an_event(fields):
    with pytest.raises(JournalCorrupt, match="journal line 1 holds no event of format 1"):
        decode([line_of(fields)])


@pytest.mark.parametrize("line", [b"", b" ", b"{}", b"00000000 {}", encode(Placed(1))[:-1]])
def test_a_line_without_its_checksum_is_refused(line):
    with pytest.raises(JournalCorrupt, match="line 1 does not match its checksum"):
        decode([line])


# -- in a file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path):
    """The path of a journal file that holds all EVENTS."""
    path = tmp_path / "journal.jsonl"
    store = FileStateStore(path)
    for event in EVENTS:
        store.append(encode(event))
    store.close()
    return path


def read(path):
    store = FileStateStore(path)
    try:
        return decode(store.read())
    finally:
        store.close()


def test_a_file_reads_back_as_it_was_written(journal):
    assert read(journal) == EVENTS


def test_a_truncated_last_line_is_dropped_and_writing_goes_on(journal):
    whole = journal.read_bytes()
    for cut in range(1, len(encode(EVENTS[-1])) + 2):
        journal.write_bytes(whole[:-cut])
        store = FileStateStore(journal)
        assert decode(store.read()) == EVENTS[:-1]
        store.append(encode(EVENTS[-1]))
        store.close()
        assert journal.read_bytes() == whole


def test_a_flipped_bit_in_the_middle_of_the_file_is_seen(journal):
    whole = journal.read_bytes()
    for position in range(len(encode(EVENTS[0])) + 40):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        journal.write_bytes(bytes(flipped))
        with pytest.raises(JournalCorrupt):
            read(journal)


def test_half_a_line_in_the_middle_is_seen(journal):
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], lines[1][:10], *lines[2:]]))
    with pytest.raises(JournalCorrupt, match="line 2"):
        read(journal)


def test_a_journal_that_cannot_be_read_is_never_an_empty_one(tmp_path):
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(JournalCorrupt, match="cannot be read"):
        FileStateStore(tmp_path / "journal.jsonl")
