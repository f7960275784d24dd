# SPDX-License-Identifier: Apache-2.0
"""The file of a journal: appended lines stay, damage is noticed, and one process writes."""

import os
import random
from contextlib import contextmanager

import pytest

from dlrover.python.rl.common.errors import JournalCorrupt
from dlrover.python.rl.runtime.checkpoint import journal_store
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore, StateStore, read_lines
from tests.support.disks import DAMAGES, frozen, largest_file, reports_of_a_killed_writer, system_calls, thaw


@contextmanager
def opened(path, **options):
    store = FileStateStore(path, **options)
    try:
        yield store
    finally:
        store.close()


def some_lines(count, seed=0):
    rng = random.Random(seed)
    return [b'%d {"event": "%s"}' % (index, b"x" * rng.randrange(300)) for index in range(count)]


def written(path, lines, is_killed=False):
    """A journal whose writer closed it, or was killed after the last append."""
    with opened(path) as store:
        for line in lines:
            store.append(line)
        content = path.read_bytes()
    if is_killed:
        path.write_bytes(content)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job" / "journal.jsonl"


@pytest.mark.parametrize("make", [lambda path: StateStore(), FileStateStore], ids=["memory", "file"])
def test_lines_are_read_in_the_order_of_their_appends(make, path):
    store = make(path)
    assert store.read() == []
    for line in some_lines(5):
        store.append(line)
    store.read().clear()
    assert store.read() == some_lines(5)
    store.close()
    store.close()


def test_journal_opened_again_has_its_lines_for_its_owner_only(path):
    lines = [*some_lines(3), b"", b"\r", b" ", b"\x00\xff\x0b\x0c\x1c\x85", b"trailing \r"]
    written(path, lines[:2])
    written(path, lines[2:])
    assert read_lines(path) == lines
    with opened(path, must_exist=True) as store:
        assert store.read() == lines
    assert os.listdir(path.parent) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_append_syncs_its_lines_once_before_it_returns(path):
    with system_calls("fsync", "link") as called, opened(path) as store:
        del called[:]
        store.append(b"1")
        store.append(*some_lines(100))
        assert len(read_lines(path)) == 101, "a journal in use can be read"
    assert called == ["fsync", "fsync"]
    path.unlink()
    with system_calls("fsync", "link") as called:
        FileStateStore(path).close()
    assert called == ["fsync", "link", "fsync", "fsync", "fsync"], "file, name, folder; the takeover"


def test_line_with_a_newline_is_refused(path):
    with opened(path) as store, pytest.raises(ValueError, match="newline"):
        store.append(b"a\nb")
    assert read_lines(path) == []


FROZEN = """
import os, sys
from pathlib import Path
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore
store = FileStateStore(Path(sys.argv[1]))
store.append(b"1")
fsync = os.fsync
def slow(handle):
    print("in the middle", flush=True)
    sys.stdin.readline()
    fsync(handle)
os.fsync = slow
store.append(b"2")
os.fsync = fsync
try:
    store.append(b"3")
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def test_process_frozen_in_an_append_neither_blocks_nor_harms(path, monkeypatch):
    monkeypatch.setattr(journal_store, "TAKE_OVER_S", 0.2)
    with frozen(FROZEN, path) as writer:
        with opened(path) as store:
            assert store.read() == [b"1", b"2"]
            store.append(b"4")
            thaw(writer)
            assert writer.stdout.readline() == "StaleEpoch\n"
            store.append(b"5")
        assert read_lines(path) == [b"1", b"2", b"4", b"5"]


def test_line_cut_short_at_the_end_never_counted(path):
    lines = some_lines(4)
    whole = written(path, lines, is_killed=True)
    for cut in range(len(lines[-1]) + 12, len(whole) + 1):
        path.write_bytes(whole[:-cut])
        with pytest.raises(JournalCorrupt):
            FileStateStore(path)
    for cut in range(2, len(lines[-1]) + 11):
        path.write_bytes(whole[:-cut])
        with opened(path) as store:
            assert store.read() == lines[:-1]
            store.append(lines[-1])
        assert read_lines(path) == lines


def test_crash_leaves_the_first_of_lines_appended_together(path):
    lines = some_lines(4)
    with opened(path) as store:
        store.append(lines[0])
        before = path.stat().st_size
        store.append(*lines[1:])
        content = path.read_bytes()
    for size in range(before, len(content) + 1, 7):
        path.write_bytes(content[:size])
        left = read_lines(path)
        assert left and left == lines[: len(left)]
    path.write_bytes(content)
    assert read_lines(path) == lines


@pytest.mark.parametrize("last", [b"", *(bytes([10 ^ 1 << bit]) for bit in range(8))], ids=repr)
def test_last_line_without_its_newline_is_kept(path, last):
    lines = some_lines(4)
    path.write_bytes(written(path, lines)[:-1] + last)
    with opened(path) as store:
        assert store.read() == lines
        store.append(b"more")
    assert read_lines(path) == [*lines, b"more"]


def test_killed_writer_loses_no_line_it_has_reported(path):
    def append_for_ever(report):
        store = FileStateStore(path)
        while True:
            index = len(store.read())
            store.append(b"line %d %s" % (index, b"x" * (index % 977)))
            report()

    rng = random.Random(5)
    for _ in range(25):
        before = len(read_lines(path)) if path.exists() else 0
        reports = reports_of_a_killed_writer(append_for_ever, rng.randrange(1, 20))
        with opened(path) as store:
            lines = store.read()
        assert len(lines) - before in (reports, reports + 1)
        assert lines == [b"line %d %s" % (index, b"x" * (index % 977)) for index in range(len(lines))]


def test_full_disk_leaves_no_half_line_and_no_begun_journal(path):
    with largest_file(10), pytest.raises(OSError, match="too large"):
        FileStateStore(path)
    assert os.listdir(path.parent) == []
    with opened(path) as store:
        store.append(b"first")
        before = path.read_bytes()
        for room in (0, 1, 7, 40, 99):
            with largest_file(len(before) + room), pytest.raises(OSError, match="too large"):
                store.append(b"y" * 100)
            assert path.read_bytes() == before
        assert store.read() == [b"first"]
        store.append(b"second")
    assert read_lines(path) == [b"first", b"second"]


def test_unreadable_journal_is_never_a_new_one(path):
    path.mkdir(parents=True)
    with pytest.raises(JournalCorrupt, match="cannot be read"):
        FileStateStore(path)
    path.rmdir()
    with pytest.raises(JournalCorrupt, match="is not there"):
        FileStateStore(path, must_exist=True)
    for content in (b"", b"\n", b"{}\n", b"rl-journal 1\n", bytes(4096)):
        path.write_bytes(content)
        with pytest.raises(JournalCorrupt, match="is no journal"):
            FileStateStore(path)
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes().replace(b"rl-journal", b"rl-Journal")),
    ],
    ids=["truncated", "removed", "rewritten"],
)
def test_journal_changed_while_it_is_open_is_noticed(path, change):
    with opened(path) as store:
        store.append(b"1")
        change(path)
        with pytest.raises(JournalCorrupt, match="changed or removed"):
            store.append(b"2")


def of_lines(change):
    """Damage of whole lines: ``change`` gets them and the numbers of two."""

    def damage(content, rng):
        lines = content.splitlines(keepends=True)
        return b"".join(change(lines, rng.randrange(len(lines)), rng.randrange(len(lines))))

    return damage


def exchange(lines, first, second):
    lines[first], lines[second] = lines[second], lines[first]
    return lines


def lines_of_another(lines, at, _):
    return [*lines[:at], *(line.replace(b"event", b"tneve") for line in lines[at:])]


KINDS = {
    **{kind.__name__: kind for kind in DAMAGES},
    "repeat": of_lines(lambda lines, at, _: [*lines[:at], lines[at], *lines[at:]]),
    "drop": of_lines(lambda lines, at, _: [*lines[:at], *lines[at + 1 :]]),
    "exchange": of_lines(exchange),
    "of another": of_lines(lines_of_another),
}


@pytest.mark.parametrize("is_killed", [True, False])
def test_damage_is_seen_or_costs_an_unfinished_line(path, is_killed):
    lines = some_lines(25, seed=3)
    whole = written(path, lines, is_killed)
    seen = dict.fromkeys(KINDS, 0)
    for seed in range(1000):
        rng = random.Random(seed)
        kind = rng.choice(list(KINDS))
        damaged = KINDS[kind](whole, rng)
        path.write_bytes(damaged)
        try:
            with opened(path) as store:
                left = store.read()
        except JournalCorrupt:
            seen[kind] += 1
            assert path.read_bytes() == damaged, "what is damaged stays as it is"
            continue
        assert left == lines or (is_killed and left == lines[:-1] and not damaged.startswith(whole[:-1])), seed
    assert all(seen.values()), seen
