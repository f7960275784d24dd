# SPDX-License-Identifier: Apache-2.0
"""A worker's files of commits: which it goes on from, which it keeps, and which it loads."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from dlrover.python.rl.common.errors import CheckpointCorrupt
from dlrover.python.rl.runtime.checkpoint.member_state import CommitRequest, GenerationRequest, MemberState
from dlrover.python.rl.runtime.checkpoint.neighbours import Part, store
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore, Piece, folder_name
from dlrover.python.rl.trainer.workload import BaseWorkload
from tests.support.durable_toys import wait_for_copies


class Total(BaseWorkload):
    def __init__(self, total=0):
        super().__init__(None, {})
        self.total = total

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


@pytest.fixture
def roots(tmp_path):
    """The trainer is on node a."""
    made = Roots("job", "run1", 1, tmp_path / "durable", tmp_path / "memory", node="a")
    made.commit_store("b").claim(1)
    made.durable_store().claim(1)
    return made


@pytest.fixture
def member():
    return MemberState("ACTOR", 0, 1, "b")


@pytest.fixture
def copied(roots):
    """The state after step 1 in the job's directory; the worker that wrote it is gone."""
    file = MemberState("ACTOR", 0, 1, "b").commit(Total(5), CommitRequest(1, roots, persist=True)).file
    wait_for_copies()
    return Piece(f"{roots.durable}/{folder_name(1, 1)}", file)


def restore(member, roots, step, *pieces):
    """The total in the first of the pieces that can be read."""
    workload = Total()
    member.restore(workload, GenerationRequest(step, tuple({"ACTOR-0": piece} for piece in pieces), roots))
    return workload.total


def steps_in(roots):
    return sorted(int(path.name[5:13]) for path in roots.commits.glob("step-*"))


@pytest.mark.parametrize(("rank", "step"), [(1, 2), (0, 1)], ids=["another worker's", "another step's"])
def test_an_intact_file_of_another_member_or_step_is_not_loaded(roots, member, rank, step):
    file = MemberState("ACTOR", rank, 1, "b").commit(Total(5), CommitRequest(step, roots)).file
    with pytest.raises(CheckpointCorrupt):
        restore(member, roots, 2, Piece(folder_name(step, 1), file))


def test_persist_answers_with_the_copy_of_its_step(roots, member):
    member.commit(Total(1), CommitRequest(1, roots, persist=True))
    wait_for_copies()
    file = member.commit(Total(2), CommitRequest(2, roots)).file
    pieces = {"ACTOR-0": Piece(folder_name(2, 1), file)}
    copy = member.persist(GenerationRequest(2, (pieces,), roots))
    assert copy.checksum == file.checksum
    assert (roots.durable / folder_name(2, 1) / file.name).exists()


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_what_cannot_be_read_in_one_place_is_read_in_the_next(roots, member, copied, what):
    near = copied._replace(folder=folder_name(1, 1))
    path = roots.commits / near.folder / near.file.name
    path.unlink() if what == "gone" else path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert restore(member, roots, 1, near, copied) == 5


def test_a_node_without_the_trainer_keeps_the_last_commit_and_removes_what_is_older(roots, member):
    for step in (1, 2, 3):
        member.commit(Total(step), CommitRequest(step, roots, first_kept=step - 1))
    assert steps_in(roots) == [2, 3]


def test_a_neighbours_file_does_not_take_the_place_of_what_is_being_copied(roots, member):
    file = member.commit(Total(1), CommitRequest(1, roots)).file
    content = np.fromfile(roots.commits / folder_name(1, 1) / file.name, np.uint8)
    neighbours_file = Piece(folder_name(3, 1), replace(file, name="ACTOR-1.1.state"))
    for copying, left in ((1, [1, 3]), (None, [3])):
        assert store(Part(roots, neighbours_file, 0, first_kept=3, copying=copying), content, "b")
        assert steps_in(roots) == left


@pytest.mark.parametrize("copying", [1, None], ids=["the trainer says so", "another trainer does not know"])
def test_what_is_being_copied_is_kept_until_it_is(roots, member, monkeypatch, copying):
    go_on, put = threading.Event(), CheckpointStore.put
    monkeypatch.setattr(CheckpointStore, "put", lambda *args: go_on.wait(30) and put(*args))
    member.commit(Total(1), CommitRequest(1, roots, persist=True))
    member.commit(Total(2), CommitRequest(2, roots, first_kept=2, copying=copying))
    meanwhile = steps_in(roots)
    go_on.set()
    wait_for_copies()
    assert meanwhile == [1, 2]
    assert (roots.durable / folder_name(1, 1) / "ACTOR-0.1.state").exists()
    member.commit(Total(3), CommitRequest(3, roots, first_kept=3))
    assert steps_in(roots) == [3]
