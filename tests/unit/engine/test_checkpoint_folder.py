# SPDX-License-Identifier: Apache-2.0
"""A folder that several ranks write: there as a whole, or not at all, and all of them say why."""

import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import Rendezvous
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.training.backend import present, write_folder
from tests.support.processes import run


def write_twice(rank, world_size, port, path):
    """The second time rank 1 finds the disk full."""
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=60))
    told = []
    for content in ("first", "second"):

        def write(folder, content=content):
            if (rank, content) == (1, "second"):
                raise OSError(28, "No space left on device")
            (folder / str(rank)).write_text(content)

        try:
            write_folder(path, ranks, write)
        except EngineError as error:
            told.append(str(error))
        told.append(sorted((file.name, file.read_text()) for file in path.iterdir()))
    ranks.close()
    return told


@pytest.mark.slow
def test_a_rank_that_cannot_write_is_named_and_the_old_folder_stays(tmp_path):
    path = tmp_path / "kept"
    first = [("0", "first"), ("1", "first")]
    error = f"rank 1: the checkpoint '{path}' cannot be written: [Errno 28] No space left on device"
    assert run(2, write_twice, path) == [[first, error, first]] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_names_with_signs_of_patterns_are_names(tmp_path):
    write_folder(tmp_path / "a[1]*", Ranks(), lambda folder: None)
    (tmp_path / ".a1.old-0").mkdir()
    (tmp_path / "a[1]*").rename(tmp_path / ".a[1]*.old-1")
    assert present(tmp_path / "a[1]*").name == ".a[1]*.old-1"


def test_of_several_folders_that_were_moved_aside_the_last_one_is_it(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # killed before it removed anything
    for content in "0123456789":
        write_folder(path, Ranks(), lambda folder, content=content: (folder / "content").write_text(content))
    path.rename(tmp_path / "gone")
    assert (present(path) / "content").read_text() == "8"
