"""A full disk: what can be spared goes, then there is a wait, then an error with the figures."""

import errno
import logging

import pytest

from dlrover.python.rl.runtime.room import Patience, no_room, with_room


def writer(*errors):
    left = list(errors)

    def write():
        if left:
            raise left.pop(0)
        return "written"

    return write


def full(number=errno.ENOSPC):
    return OSError(number, "full", "/where")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_can_be_spared_goes_first(number, caplog):
    spared = [True, False]
    assert with_room(writer(full(number)), lambda pinned: spared.pop(0), Patience(0.0)) == "written"
    assert spared == [False]
    assert not caplog.records


def test_then_room_is_waited_for_with_one_word(caplog):
    with caplog.at_level(logging.WARNING, "dlrover"):
        assert with_room(writer(*[full() for _ in range(5)]), lambda pinned: False, Patience(60.0, 0.001)) == "written"
    assert [record.getMessage() for record in caplog.records] == [
        "waiting up to 60 s for room: [Errno 28] full: '/where'"
    ]


def test_then_what_somebody_still_uses_goes_and_then_the_error_is_raised():
    used = ["a copy", "another"]

    def make_room(pinned):
        return pinned and bool(used) and bool(used.pop())

    with pytest.raises(OSError, match="full"):
        with_room(writer(*[full() for _ in range(500)]), make_room, Patience(0.02, 0.001))
    assert used == []


def test_other_errors_are_raised_at_once():
    with pytest.raises(OSError, match="broken"):
        with_room(writer(OSError(errno.EIO, "broken")), lambda pinned: True)


def test_the_error_names_folder_and_figures(tmp_path):
    error = no_room(errno.EDQUOT, tmp_path, 77)
    assert error.errno == errno.EDQUOT
    assert f"{tmp_path}" in str(error)
    assert "77 bytes do not fit, " in str(error)
    assert str(error).count("bytes are free") == 1
