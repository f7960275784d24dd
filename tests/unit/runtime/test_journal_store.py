# SPDX-License-Identifier: Apache-2.0
"""The journal's file: what was appended is there, damage is never taken for something else, and one process writes."""

import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from dlrover.python.rl.common.errors import JournalCorrupt, StaleEpoch
from dlrover.python.rl.runtime.checkpoint import journal_store
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore, StateStore, read_lines
from tests.support.disks import largest_file, system_calls

MUTATIONS = 1000


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


def crashed(path, lines):
    """A journal whose writer was killed after the last append."""
    with opened(path) as store:
        for line in lines:
            store.append(line)
        content = path.read_bytes()
    path.write_bytes(content)


def written(path, lines):
    """A journal whose writer closed it."""
    with opened(path) as store:
        for line in lines:
            store.append(line)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job" / "journal.jsonl"


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


def test_a_frozen_process_in_the_middle_of_an_append_holds_nobody_up_and_harms_nothing_later(path, monkeypatch):
    monkeypatch.setattr(journal_store, "TAKE_OVER_S", 0.2)
    frozen = subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert frozen.stdout.readline() == "in the middle\n"
        frozen.send_signal(signal.SIGSTOP)
        with opened(path) as store:
            assert store.read() == [b"1", b"2"]
            store.append(b"4")
            frozen.send_signal(signal.SIGCONT)
            frozen.stdin.write("\n")
            frozen.stdin.flush()
            assert frozen.stdout.readline() == "StaleEpoch\n"
            store.append(b"5")
        assert read_lines(path) == [b"1", b"2", b"4", b"5"]
    finally:
        frozen.kill()
        frozen.communicate()


# -- what a store is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda path: StateStore(), FileStateStore], ids=["memory", "file"])
def test_lines_are_read_in_the_order_they_were_appended(make, path):
    store = make(path)
    assert store.read() == []
    for line in some_lines(5):
        store.append(line)
    store.read().clear()
    assert store.read() == some_lines(5)
    store.close()
    store.close()


def test_lines_are_there_when_the_file_is_opened_again(path):
    lines = [*some_lines(3), b"", b"\r", b" ", b"\x00\xff\x0b\x0c\x1c\x85", b"trailing \r"]
    written(path, lines[:2])
    written(path, lines[2:])
    assert read_lines(path) == lines
    with opened(path, must_exist=True) as store:
        assert store.read() == lines
    assert os.listdir(path.parent) == [path.name]


def test_nobody_else_can_read_it(path):
    written(path, some_lines(1))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_is_on_disk_before_append_returns(path):
    with system_calls("fsync", "link") as called, opened(path) as store:
        del called[:]
        store.append(b"1")
        store.append(b"2")
    assert called == ["fsync", "fsync"]
    path.unlink()
    with system_calls("fsync", "link") as called:
        FileStateStore(path).close()
    assert called == ["fsync", "link", "fsync", "fsync", "fsync"], "file, name, folder; the takeover"


def test_a_line_with_a_newline_is_refused(path):
    with opened(path) as store, pytest.raises(ValueError, match="newline"):
        store.append(b"a\nb")
    assert read_lines(path) == []


def test_a_journal_in_use_can_be_looked_at(path):
    with opened(path) as store:
        for count, line in enumerate(some_lines(5), 1):
            store.append(line)
            assert len(read_lines(path)) == count
        store.append(b"still mine")


# -- one writer -------------------------------------------------------------------------------------------------------


def test_a_newer_process_takes_the_journal_over(path):
    with opened(path) as old:
        old.append(b"1")
        with opened(path) as new:
            new.append(b"2")
            with pytest.raises(StaleEpoch, match="taken over"):
                old.append(b"3")
            old.close()
            new.append(b"4")
        assert read_lines(path) == [b"1", b"2", b"4"]


def test_a_hundred_owners_after_each_other_lose_nothing(path):
    stores = []
    for index in range(100):
        stores.append(FileStateStore(path))
        if index:
            with pytest.raises(StaleEpoch):
                stores[-2].append(b"old")
        stores[-1].append(b"%d" % index)
    for store in stores:
        store.close()
    assert read_lines(path) == [b"%d" % index for index in range(100)]


def test_two_processes_that_race_never_both_write(path):
    for seed in range(20):
        child = os.fork()
        if child == 0:
            _append_until_refused(path, b"child %d" % seed, 30 + seed)
        _append_until_refused_here(path, b"parent %d" % seed, 30)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines = read_lines(path)
    writers = [line.rpartition(b" ")[0] for line in lines]
    turns = [writer for index, writer in enumerate(writers) if index == 0 or writers[index - 1] != writer]
    assert len(turns) == len(set(turns)), "whoever was taken over from wrote again"


def _append_until_refused_here(path, name, count):
    store = FileStateStore(path)
    try:
        for index in range(count):
            store.append(b"%s %d" % (name, index))
    except StaleEpoch:
        pass
    finally:
        store.close()


def _append_until_refused(path, name, count):
    code = 1
    try:
        _append_until_refused_here(path, name, count)
        code = 0
    finally:
        os._exit(code)


# -- crashes ----------------------------------------------------------------------------------------------------------


def test_a_last_line_that_was_cut_short_never_counted(path):
    lines = some_lines(4)
    crashed(path, lines)
    whole = path.read_bytes()
    for cut in range(2, len(lines[-1]) + 11):
        path.write_bytes(whole[:-cut])
        with opened(path) as store:
            assert store.read() == lines[:-1]
            store.append(lines[-1])
        assert read_lines(path) == lines


def test_of_lines_that_were_appended_together_a_crash_leaves_the_first_ones(path):
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


def test_lines_that_are_appended_together_are_synced_once(path, monkeypatch):
    synced = []
    with opened(path) as store:
        monkeypatch.setattr(journal_store.os, "fsync", synced.append)
        store.append(*some_lines(100))
        assert len(synced) == 1
    assert len(read_lines(path)) == 100


@pytest.mark.parametrize("last", [b"", *(bytes([10 ^ 1 << bit]) for bit in range(8))], ids=repr)
def test_a_last_line_that_is_whole_but_for_its_newline_is_kept(path, last):
    lines = some_lines(4)
    written(path, lines)
    path.write_bytes(path.read_bytes()[:-1] + last)
    with opened(path) as store:
        assert store.read() == lines
        store.append(b"more")
    assert read_lines(path) == [*lines, b"more"]


def test_a_journal_that_lost_more_than_its_last_line_is_refused(path):
    lines = some_lines(4)
    crashed(path, lines)
    whole = path.read_bytes()
    for cut in range(len(lines[-1]) + 12, len(whole) + 1):
        path.write_bytes(whole[:-cut])
        with pytest.raises(JournalCorrupt):
            FileStateStore(path)


def test_a_killed_writer_loses_no_line_that_it_was_told_is_safe(path):
    rng = random.Random(5)
    for _ in range(25):
        before = len(read_lines(path)) if path.exists() else 0
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _append_for_ever(path, writer)
        os.close(writer)
        told = 0
        for _ in range(rng.randrange(1, 20)):
            told += len(os.read(reader, 1))
        os.kill(child, 9)
        os.waitpid(child, 0)
        while more := os.read(reader, 4096):
            told += len(more)
        os.close(reader)
        with opened(path) as store:
            lines = store.read()
        assert len(lines) - before in (told, told + 1)
        assert lines == [b"line %d %s" % (index, b"x" * (index % 977)) for index in range(len(lines))]


def _append_for_ever(path, writer):
    try:
        store = FileStateStore(path)
        while True:
            index = len(store.read())
            store.append(b"line %d %s" % (index, b"x" * (index % 977)))
            os.write(writer, b".")
    finally:
        os._exit(1)


# -- full and read-only disks -----------------------------------------------------------------------------------------


def test_a_full_disk_leaves_no_half_line_and_writing_goes_on_later(path):
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


def test_a_journal_that_cannot_be_begun_leaves_nothing(path):
    with largest_file(10), pytest.raises(OSError, match="too large"):
        FileStateStore(path)
    assert os.listdir(path.parent) == []
    with opened(path) as store:
        assert store.read() == []


# -- damage -----------------------------------------------------------------------------------------------------------


def test_an_unreadable_journal_is_never_a_new_one(path):
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


def test_a_flipped_bit_is_seen_in_every_byte_but_the_last(path):
    written(path, [b"first", b"second"])
    whole = path.read_bytes()
    for position in range(len(whole) - 1):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 4  # a digit often stays a digit
        path.write_bytes(damaged)
        with pytest.raises(JournalCorrupt):
            FileStateStore(path)


def test_a_journal_changed_or_removed_while_it_is_open_is_noticed(path):
    changes = {
        "truncated": lambda: os.truncate(path, path.stat().st_size - 1),
        "longer": lambda: os.truncate(path, path.stat().st_size + 1),
        "removed": path.unlink,
        "emptied": lambda: path.write_bytes(b""),
        "rewritten": lambda: path.write_bytes(path.read_bytes().replace(b"rl-journal", b"rl-Journal")),
    }
    for change in changes.values():
        path.unlink(missing_ok=True)
        with opened(path) as store:
            store.append(b"1")
            change()
            with pytest.raises(JournalCorrupt, match="changed or removed"):
                store.append(b"2")


def flip_bit(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def truncate(content, rng):
    return content[: rng.randrange(len(content))]


def extend(content, rng):
    return content + rng.choice([rng.randbytes(rng.randrange(1, 200)), bytes(512), content[-50:], b"\n", b"x\n"])


def zero_block(content, rng):
    size = rng.choice([1, 16, 64, 512])
    at = rng.randrange(len(content)) // size * size
    return content[:at] + bytes(min(size, len(content) - at)) + content[at + size :]


def repeat_block(content, rng):
    size = rng.choice([16, 64, 512])
    at = rng.randrange(len(content)) // size * size
    return content[: at + size] + content[at:]


def cut_block(content, rng):
    size = rng.choice([1, 16, 64, 512])
    at = rng.randrange(len(content))
    return content[:at] + content[at + size :]


def repeat_line(content, rng):
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join([*lines[:at], lines[at], *lines[at:]])


def drop_line(content, rng):
    lines = content.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def exchange_lines(content, rng):
    lines = content.splitlines(keepends=True)
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


def lines_of_another(content, rng):
    """The second half of another journal, from a whole line on."""
    other = content.replace(b"event", b"tneve").splitlines(keepends=True)
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join([*lines[:at], *other[at:]])


KINDS = [flip_bit, truncate, extend, zero_block, repeat_block, cut_block, repeat_line, drop_line, exchange_lines]
KINDS += [lines_of_another]


@pytest.mark.parametrize("end", [crashed, written], ids=["killed", "closed"])
def test_a_thousand_kinds_of_damage_are_seen_or_cost_at_most_an_unfinished_line(end, path):
    lines = some_lines(25, seed=3)
    end(path, lines)
    whole = path.read_bytes()
    seen = {kind.__name__: 0 for kind in KINDS}
    for seed in range(MUTATIONS):
        rng = random.Random(seed)
        kind = rng.choice(KINDS)
        damaged = kind(whole, rng)
        path.write_bytes(damaged)
        try:
            with opened(path) as store:
                found = store.read()
        except JournalCorrupt:
            seen[kind.__name__] += 1
            assert path.read_bytes() == damaged, "what is damaged stays as it is"
            continue
        assert found == lines or (end is crashed and found == lines[:-1] and not damaged.startswith(whole[:-1])), seed
    assert all(seen.values()), seen
