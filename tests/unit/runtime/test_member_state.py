# SPDX-License-Identifier: Apache-2.0
"""A worker's files of commits, and their writing while it continues."""

import threading
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dlrover.python.rl.common.errors import CheckpointCorrupt, DataError, InvocationError
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.runtime.checkpoint import member_state
from dlrover.python.rl.runtime.checkpoint.commits import Copying
from dlrover.python.rl.runtime.checkpoint.member_state import CommitRequest, MemberState, WrittenRequest
from dlrover.python.rl.runtime.checkpoint.neighbours import Part, store
from dlrover.python.rl.runtime.checkpoint.runs import TRAINER, Roots
from dlrover.python.rl.runtime.checkpoint.state_file import StateFile
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore, Piece, folder_name
from dlrover.python.rl.runtime.member.arguments import CallHeader
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import COMMIT, RAW_CALL, WRITTEN
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext
from tests.support.disks import damage_byte
from tests.support.durable_toys import Stage, kill, kill_trainer, wait_for_copies

STATE = "ACTOR-0.1.state"
STEPS = 5


class Adder(BaseWorkload):
    """Adds in place: the state that it has given to be written is the live array."""

    guards_state = True

    def __init__(self, master_handle=None, config=None, total=0.0):
        super().__init__(master_handle, config)
        self.total = np.full(1000, total)

    def look(self):
        return float(self.total[0])

    def move(self):
        self.wait_until_written()
        self.total = self.total.copy()

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class UsersAdder(Adder):
    def add(self, number):
        self.total += number


@pytest.fixture
def roots(tmp_path):
    """The trainer is on node a."""
    roots = Roots("job", "run1", 1, tmp_path / "durable", tmp_path / "memory", node="a")
    roots.commit_store("b").claim(1)
    roots.durable_store().claim(1)
    return roots


def held_up(write):
    """``write`` in the threads that write states: it waits for the event, and fails with the event's ``error``."""
    event = threading.Event()
    event.error = None

    def slowly(*arguments):
        if threading.current_thread().name.startswith("dlrover-copy"):
            assert event.wait(30)
            if event.error is not None:
                raise event.error
        return write(*arguments)

    return event, slowly


@pytest.fixture
def member():
    return MemberState("ACTOR", 0, 1, "b")


def commit(member, roots, step, total=5.0, **terms):
    return member.commit(Adder(total=total), CommitRequest(step, roots, **terms)).file


def restore(member, roots, step, *pieces):
    """The total in the first of the pieces that can be read."""
    workload = Adder()
    member.restore(workload, member_state.GenerationRequest(step, tuple({"ACTOR-0": piece} for piece in pieces), roots))
    return workload.look()


def steps_in(roots):
    return sorted(int(path.name[5:13]) for path in roots.commits.glob("step-*"))


@pytest.mark.parametrize(("rank", "step"), [(1, 2), (0, 1)], ids=["another worker's", "another step's"])
def test_restore_refuses_an_intact_file_of_another_state(roots, member, rank, step):
    file = commit(MemberState("ACTOR", rank, 1, "b"), roots, step)
    with pytest.raises(CheckpointCorrupt):
        restore(member, roots, 2, Piece(folder_name(step, 1), file))


def test_persist_answers_with_the_copy_of_its_step(roots, member):
    commit(member, roots, 1, persist=True)
    wait_for_copies()
    file = commit(member, roots, 2)
    pieces = {"ACTOR-0": Piece(folder_name(2, 1), file)}
    copy = member.persist(member_state.GenerationRequest(2, (pieces,), roots))
    assert copy.checksum == file.checksum
    assert (roots.durable / folder_name(2, 1) / file.name).exists()


@pytest.mark.parametrize("harm", [damage_byte, lambda path: path.unlink()], ids=["damaged", "gone"])
def test_restore_reads_the_copy_of_a_lost_file(roots, member, harm):
    file = commit(MemberState("ACTOR", 0, 1, "b"), roots, 1, persist=True)
    wait_for_copies()
    near, copied = Piece(folder_name(1, 1), file), Piece(f"{roots.durable}/{folder_name(1, 1)}", file)
    harm(roots.commits / near.folder / near.file.name)
    assert restore(member, roots, 1, near, copied) == 5.0


def test_node_without_the_trainer_keeps_the_last_commit(roots, member):
    for step in (1, 2, 3):
        commit(member, roots, step, first_kept=step - 1)
    assert steps_in(roots) == [2, 3]


def test_file_of_a_neighbour_spares_the_copied_step(roots, member):
    file = commit(member, roots, 1)
    content = np.fromfile(roots.commits / folder_name(1, 1) / file.name, np.uint8)
    neighbours_file = Piece(folder_name(3, 1), replace(file, name="ACTOR-1.1.state"))
    for copying, left in ((1, [1, 3]), (None, [3])):
        assert store(Part(roots, neighbours_file, 0, first_kept=3, copying=copying), content, "b")
        assert steps_in(roots) == left


@pytest.mark.parametrize("copying", [1, None], ids=["the trainer knows", "another trainer does not know"])
def test_copied_step_stays_until_the_copy_is_there(roots, member, monkeypatch, copying):
    free, put = held_up(CheckpointStore.put)
    monkeypatch.setattr(CheckpointStore, "put", put)
    commit(member, roots, 1, persist=True)
    commit(member, roots, 2, first_kept=2, copying=copying)
    steps = steps_in(roots)
    free.set()
    wait_for_copies()
    assert steps == [1, 2]
    assert (roots.durable / folder_name(1, 1) / STATE).exists()
    commit(member, roots, 3, first_kept=3)
    assert steps_in(roots) == [3]


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(member_state, "AT_ONCE_BYTES", 0)
    host = MemberHost()
    host.start(UsersAdder, MemberContext(role=RLRoleType.ACTOR, rank=0), None, {})
    yield host
    host.close()


@pytest.fixture
def disk(monkeypatch):
    """Writes of states wait until ``disk.set()``, or fail with ``disk.error``."""
    free, write = held_up(CheckpointStore.write)
    monkeypatch.setattr(CheckpointStore, "write", write)
    yield free
    free.set()


def call(host, step, method="add", *args):
    number = call.number = getattr(call, "number", 0) + 1
    return host.invoke(CallHeader((step, number), method, keep=True), lambda: (args, {}))


def ask(host, verb, request):
    return host.invoke(CallHeader(RAW_CALL, verb), lambda: ((request,), {}))


def begin(host, roots, **terms):
    """The state after step 1 is being written."""
    call(host, 1, "add", 1)
    return ask(host, COMMIT, CommitRequest(1, roots, **terms))


def test_guarded_methods_run_while_the_state_is_written(host, roots, disk):
    assert begin(host, roots).file is None
    assert call(host, 2, "look") == 1.0
    assert ask(host, WRITTEN, WrittenRequest()).file is None
    disk.set()
    wait_for_copies()
    assert ask(host, WRITTEN, WrittenRequest()).file.name == STATE


ACTS = {
    "add": lambda host, roots: call(host, 2, "add", 5),
    "move": lambda host, roots: call(host, 2, "move"),
    "raw": lambda host, roots: host.run("add", (1,), {}),
    "close": lambda host, roots: host.close(),
    "commit": lambda host, roots: ask(host, COMMIT, CommitRequest(2, roots)),
    "written": lambda host, roots: ask(host, WRITTEN, WrittenRequest(waits=True)),
}


@pytest.mark.parametrize("act", ACTS)
def test_state_changes_wait_until_it_is_written(host, roots, disk, act):
    done = threading.Event()

    def run():
        ACTS[act](host, roots)
        done.set()

    begin(host, roots)
    threading.Thread(target=run, daemon=True).start()
    assert not done.wait(0.2)
    disk.set()
    assert done.wait(30)
    state = roots.commits / folder_name(1, 1) / STATE
    assert np.frombuffer(state.read_bytes()[-8004:-4]).tolist() == [1.0] * 1000, "as it was after step 1"


def test_small_states_are_written_within_the_call(host, roots, monkeypatch):
    monkeypatch.setattr(member_state, "AT_ONCE_BYTES", 8000)
    assert begin(host, roots).file.name == STATE


def test_copy_has_the_state_of_its_step(host, roots, disk):
    begin(host, roots, persist=True)
    assert ask(host, WRITTEN, WrittenRequest(copying=1)).is_copying, "it waits for the state"
    disk.set()
    call(host, 2, "add", 5)
    wait_for_copies()
    copy = ask(host, WRITTEN, WrittenRequest(copying=1)).copy
    copied, committed = (root / folder_name(1, 1) for root in (roots.durable, roots.commits))
    assert (copied / copy.name).read_bytes() == (committed / STATE).read_bytes()
    other = ask(host, WRITTEN, WrittenRequest(copying=7))
    assert (other.copy, other.is_copying) == (None, False)


def test_failed_write_is_raised_where_its_file_is_asked_for(host, roots, disk):
    disk.error = OSError("no such luck")
    begin(host, roots)
    disk.set()
    call(host, 2, "add", 5)
    with pytest.raises(InvocationError, match="no such luck"):
        ask(host, WRITTEN, WrittenRequest())


def test_values_of_an_unknown_type_are_refused_at_once(host, roots):
    host.workload.state_dict = lambda: {"total": object()}
    with pytest.raises(InvocationError, match=r"state\['total'\]: a object cannot be saved") as caught:
        ask(host, COMMIT, CommitRequest(1, roots))
    assert isinstance(caught.value.original, DataError)


def test_written_state_is_not_kept_in_memory(host, roots):
    begin(host, roots)
    wait_for_copies()
    total = weakref.ref(host.workload.total)
    host.workload.total = np.zeros(3)
    assert total() is None


@pytest.mark.parametrize("terms", [{"is_copying": True}, {}, {"copy": StateFile("ACTOR-1.1.state", 10, 0)}])
def test_copy_is_published_once_all_members_have_made_theirs(roots, terms):
    files = {f"ACTOR-{rank}": StateFile(f"ACTOR-{rank}.1.state", 10, 0) for rank in (0, 1)}
    commits, copies = roots.commit_store(""), roots.durable_store()
    trainers = commits.write(4, 1, "trainer.state", {}, {})
    for generations in (copies, commits):
        for file in files.values():
            (generations.folder(4, 1) / file.name).write_bytes(bytes(10))
    copying = Copying(commits, copies, 1, None, {})
    copying.at = commits.commit(4, 1, {**files, TRAINER: trainers})
    first, other = (member_state.CommitAnswer(None, **each) for each in ({"copy": files["ACTOR-0"]}, terms))
    copying.note({ProcessId("ACTOR", 0): first, ProcessId("ACTOR", 1): other})
    assert [copy.step for copy in copies.manifests()] == ([4] if other.copy else [])
    assert (copying.step is None) == (not other.is_copying), "one that failed is given up"


@pytest.fixture
def slow_writes(monkeypatch):
    """Each state takes 20 ms to write, so that workers and the trainer continue before it is there."""
    monkeypatch.setattr(member_state, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr("tests.support.durable_toys.wait_for_copies", lambda: None)
    write, may_write = CheckpointStore.write, threading.Event()

    def slowly(*arguments):
        if threading.current_thread().name.startswith("dlrover-copy"):
            may_write.wait(0.02)
        return write(*arguments)

    monkeypatch.setattr(CheckpointStore, "write", slowly)


def results_of(outcome):
    """Leave out workers without a state: one may be lost after its last call."""
    return {**outcome, "members": {name: state for name, state in outcome["members"].items() if state is not None}}


@pytest.mark.parametrize("commit_every", [1, 2, 8])
@pytest.mark.parametrize("lost", [kill("ACTOR", 1), kill("ROLLOUT", 0), kill_trainer], ids=["actor", "rollout", "all"])
def test_loss_at_any_call_ends_in_the_same_bits(tmp_path, slow_writes, commit_every, lost):
    stage = Stage(tmp_path / "calm", steps=STEPS, every=100)
    expected = results_of(stage.run())
    for at in range(12, len(stage.port.calls), 7):
        faulty = Stage(tmp_path / f"{at}", steps=STEPS, every=100, commit_every=commit_every)
        assert results_of(faulty.run({(at, "before"): lost})) == expected
        assert all(later > earlier for earlier, later in pairwise(faulty.progress))


def test_stride_counts_from_the_begin_of_a_commit(tmp_path, slow_writes):
    stage = Stage(tmp_path / "job", steps=6, every=100, commit_every=2)
    stage.run()
    assert len(stage.calls_of("ACTOR", "!commit", rank=0)) == 4, "of the steps 0, 2, 4 and 6"


def test_lost_rank_goes_back_with_all_roles(tmp_path):
    calm = Stage(tmp_path / "calm", steps=STEPS, every=100, commit_every=3)
    expected = calm.run()
    stage = Stage(tmp_path / "job", steps=STEPS, every=100, commit_every=3)
    assert stage.run({(calm.calls_of("ACTOR", "update", rank=0)[4], "before"): kill("ACTOR", 0)}) == expected
    assert stage.restarted_after() == [0, 3]
    assert stage.progress == [3, 5]
