# SPDX-License-Identifier: Apache-2.0
"""Errors of the operating system about the folder of weights on disk reach users with the folder's name."""

import errno
import os

import pytest

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from tests.support.sync_sides import ToySource, Wire, toy_weights, transport


def refusal_of(call, *arguments, lasts=False):
    """The message of the error of a call, which has one of the operating system as its cause; a step is not repeated
    after one that ``lasts``."""
    with pytest.raises(EngineError) as caught:
        call(*arguments)
    assert caught.value.retryable is not lasts
    assert isinstance(caught.value.__cause__, OSError)
    return str(caught.value)


def test_a_folder_that_cannot_be_made_or_used_is_named_with_the_reason(tmp_path):
    source = ToySource(toy_weights(), version=1)
    (tmp_path / "file").touch()
    below_file = transport("disk", tmp_path / "file/weights")
    refusal = refusal_of(below_file.send, below_file.offer(source), source, lasts=True)
    assert refusal == f"weights cannot be written to {tmp_path}/file/weights: Not a directory"

    taken = transport("disk", tmp_path / "taken")
    ticket = taken.offer(source)
    (tmp_path / f"taken/ACTOR.{ticket.id}.part").mkdir(parents=True)
    refusal = refusal_of(taken.send, ticket, source)
    assert refusal == f"weights cannot be written to {tmp_path}/taken: Is a directory"
    (tmp_path / f"taken/ACTOR.{ticket.id}.weights").mkdir()
    assert refusal_of(taken.receive, ticket) == f"weights cannot be read from {tmp_path}/taken: Is a directory"


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, WeightSyncError), (errno.EROFS, EngineError), (errno.ENOSPC, OSError), (errno.EDQUOT, OSError)],
)
def test_a_write_that_fails_names_the_folder_and_a_full_disk_stays_what_it_is(tmp_path, monkeypatch, number, kind):
    wire = Wire("disk", tmp_path)
    source = ToySource(toy_weights(), version=1)
    ticket = wire.source.offer(source)
    write = os.pwrite

    def fail(descriptor, data, offset):
        if "part" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(kind, match=os.strerror(number)) as caught:
        wire.source.send(ticket, source)
    assert (f"cannot be written to {tmp_path}: " in str(caught.value)) == (kind is not OSError)
    assert isinstance(caught.value, WeightSyncError) == (kind is WeightSyncError)
    monkeypatch.undo()
    assert wire.source.send(ticket, source) == wire.sinks[0].receive(ticket).stamp == source.stamp()
    wire.close()
