# SPDX-License-Identifier: Apache-2.0
"""Writes on a full disk: free what is not needed, wait, free what is in use, then raise."""

import errno
import logging
import re
from pathlib import Path

import pytest

from dlrover.python.rl.common.disk_space import DiskWait, disk_full_error, is_disk_full, retry_io

FILE = Path("metrics.jsonl")
QUICK = DiskWait(limit_s=20.0, pause_s=0.001, transient_s=20.0)
SHORT = DiskWait(limit_s=0.02, pause_s=0.001, transient_s=0.02)


class FailingWrite:
    """Fails ``times`` times with ``error``, then returns 7."""

    def __init__(self, times, error):
        self.times, self.error = times, error

    def __call__(self):
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return 7


class RustError(Exception):
    """Libraries written in Rust raise errors without errno."""


FULL = [
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EDQUOT, "quota"),
    RustError("Error while serializing: I/O error: No space left on device (os error 28)"),
]
FALTERING = [OSError(number, "over soon") for number in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)]
NO_SPACE, AGAIN = "no disk space for metrics.jsonl; waiting up to 20 s", "metrics.jsonl; trying again for up to 20 s"
OTHERS = [OSError(errno.EACCES, "refused"), RustError("os error 280"), ValueError("28"), OSError("os error 28")]


@pytest.mark.parametrize(
    ("error", "message"), [*((error, NO_SPACE) for error in FULL), *((error, AGAIN) for error in FALTERING)], ids=str
)
def test_full_or_faltering_disk_is_waited_for_then_raised(error, message, caplog):
    with caplog.at_level(logging.WARNING, "dlrover"):
        assert retry_io(FailingWrite(5, error), FILE, QUICK) == 7
    assert [record.getMessage() for record in caplog.records] == [f"{message}: {error}"]
    with pytest.raises(OSError) as raised:
        retry_io(FailingWrite(1_000_000, error), FILE, SHORT)
    assert raised.value is error or is_disk_full(raised.value) and not isinstance(error, OSError)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_of_a_disk_are_raised_at_once(error, caplog):
    with pytest.raises(type(error)):
        retry_io(FailingWrite(1, error), FILE, QUICK, lambda in_use: True)
    assert not caplog.records


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_unneeded_files_are_freed_before_waiting(number, caplog):
    freed = [True, False]
    write = FailingWrite(1, OSError(number, "full"))
    assert retry_io(write, FILE, DiskWait(0.0), lambda in_use: freed.pop(0)) == 7
    assert freed == [False]
    assert not caplog.records


def test_files_in_use_are_freed_after_the_wait():
    in_use_files = ["a copy", "another"]

    def free_space(in_use):
        return in_use and bool(in_use_files) and bool(in_use_files.pop())

    with pytest.raises(OSError, match="full"):
        retry_io(FailingWrite(1_000, OSError(errno.ENOSPC, "full")), FILE, SHORT, free_space)
    assert in_use_files == []


def test_disk_errors_name_the_file_and_the_bytes(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for error in (OSError(errno.ENOSPC, "full"), OSError(errno.ENOSPC, "full", str(file))):
        with pytest.raises(OSError) as raised:
            retry_io(FailingWrite(1_000_000, error), file, DiskWait(0.0))
        assert str(raised.value) == f"[Errno {errno.ENOSPC}] full: '{file}'"
    full = disk_full_error(errno.EDQUOT, tmp_path, 77)
    assert full.errno == errno.EDQUOT
    assert re.search(rf"77 bytes do not fit, \d+ bytes are free.*{tmp_path}", str(full))
