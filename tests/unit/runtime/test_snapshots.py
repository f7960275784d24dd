# SPDX-License-Identifier: Apache-2.0
"""States that are written while the members go on."""

import threading
import weakref

import numpy as np
import pytest
from durable_toys import wait_for_copies

from dlrover.python.rl.common.errors import DataError, InvocationError
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.runtime.checkpoint import member_state
from dlrover.python.rl.runtime.checkpoint.cadence import Cadence
from dlrover.python.rl.runtime.checkpoint.commits import StoreCheckpoints
from dlrover.python.rl.runtime.checkpoint.copying import Copying
from dlrover.python.rl.runtime.checkpoint.member_state import CommitAnswer, CommitRequest, Progress
from dlrover.python.rl.runtime.checkpoint.roots import Roots
from dlrover.python.rl.runtime.checkpoint.runs import TRAINER
from dlrover.python.rl.runtime.checkpoint.storage.state_file import StateFile
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore
from dlrover.python.rl.runtime.process.arguments import CallHeader
from dlrover.python.rl.runtime.process.host import MemberHost
from dlrover.python.rl.trainer.port import COMMIT, RAW_CALL
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext, trainer_invocation

ACTOR = ProcessId("ACTOR", 0)


class Adder(BaseWorkload):
    """Adds in place; what it has given to be written is the live array."""

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.total, self.wait_for_writing = np.zeros(100_000), lambda: None

    def add(self, number):
        self.total += number

    @trainer_invocation(changes_state=False)
    def look(self):
        return float(self.total[0])

    @trainer_invocation(changes_state=False)
    def move(self):
        self.wait_for_writing()
        self.total = self.total.copy()

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]

    def note_writing(self, wait):
        self.wait_for_writing = wait


@pytest.fixture
def roots(tmp_path):
    made = Roots("job", "run1", 1, tmp_path / "durable", tmp_path / "memory")
    made.commit_store("").claim(1)
    made.durable_store().claim(1)
    return made


@pytest.fixture
def host():
    made = MemberHost()
    made.start(Adder, MemberContext(role=RLRoleType.ACTOR, rank=0), None, {})
    yield made
    made.close()


@pytest.fixture
def disk(monkeypatch):
    """Writes of states wait until ``disk.set()``, or fail with ``disk.error``."""
    free, write = threading.Event(), CheckpointStore.write
    free.error = None

    def slowly(self, step, epoch, name, header, tree):
        if threading.current_thread().name.startswith("dlrover-copy"):
            assert free.wait(30)
            if free.error is not None:
                raise free.error
        return write(self, step, epoch, name, header, tree)

    monkeypatch.setattr(CheckpointStore, "write", slowly)
    yield free
    free.set()


def call(host, step, method="add", *args):
    number = call.number = getattr(call, "number", 0) + 1
    return host.invoke(CallHeader((step, number), method, keep=True), lambda: (args, {}))


def commit(host, roots, step, **terms):
    request = CommitRequest(step, roots, calls=step > 0, **terms)
    return host.invoke(CallHeader(RAW_CALL, COMMIT), lambda: ((request,), {}))


def begin(host, roots, **terms):
    """Step 1 is committed, and its state is being written."""
    commit(host, roots, 0)
    call(host, 1, "add", 1)
    return commit(host, roots, 1, snapshot=True, **terms)


def finished(host, roots):
    return commit(host, roots, 2, snapshotting=1)


def in_thread(act):
    done = threading.Event()

    def run():
        act()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done


def test_a_commit_and_calls_that_change_nothing_do_not_wait_for_the_state(host, roots, disk):
    answer = begin(host, roots)
    assert answer.file.name.endswith(".calls")
    assert call(host, 2, "look") == 1.0
    assert finished(host, roots).snapshot.running
    disk.set()
    wait_for_copies()
    assert commit(host, roots, 3, snapshotting=1).snapshot.file.name == "ACTOR-0.1.state"


@pytest.mark.parametrize("method", ["add", "move", "raw", "close", "state", "snapshot"])
def test_what_may_change_or_free_the_state_waits_until_it_is_written(host, roots, disk, method):
    begin(host, roots)
    acts = {
        "raw": lambda: host.run("add", (1,), {}),
        "close": host.close,
        "state": lambda: host._state.commit(host.workload, CommitRequest(2, roots), []),
        "snapshot": lambda: commit(host, roots, 2, snapshot=True),
        "move": lambda: call(host, 2, "move"),
    }
    done = in_thread(acts.get(method, lambda: call(host, 2, "add", 5)))
    assert not done.wait(0.2)
    disk.set()
    assert done.wait(30)
    state = roots.commits / "step-00000001.e1" / "ACTOR-0.1.state"
    assert np.frombuffer(state.read_bytes()[-8004:-4]).tolist() == [1.0] * 1000, "as it was after step 1"


def test_the_copy_in_the_jobs_directory_has_the_state_of_its_step(host, roots):
    begin(host, roots, persist=True)
    call(host, 2, "add", 5)
    wait_for_copies()
    answer = commit(host, roots, 2, snapshotting=1, copying=1)
    path = roots.durable / "step-00000001.e1" / answer.copy.file.name
    assert path.read_bytes() == (roots.commits / "step-00000001.e1" / "ACTOR-0.1.state").read_bytes()


def test_one_that_cannot_be_written_is_neither_there_nor_awaited(host, roots, disk, caplog):
    disk.error = OSError("no such luck")
    begin(host, roots)
    disk.set()
    call(host, 2, "add", 5)
    answer = finished(host, roots)
    assert (answer.snapshot.file, answer.snapshot.running) == (None, False)
    assert "ACTOR-0: the state of step 1 is not written: no such luck" in caplog.text


def test_values_that_cannot_be_saved_are_refused_at_once(host, roots):
    commit(host, roots, 0)
    host.workload.state_dict = lambda: {"total": object()}
    with pytest.raises(InvocationError, match=r"state\['total'\]: a object cannot be saved") as caught:
        commit(host, roots, 1, snapshot=True)
    assert isinstance(caught.value.original, DataError)


def test_only_the_copy_and_the_state_that_are_asked_for_count(host, roots):
    begin(host, roots, persist=True)
    wait_for_copies()
    other = commit(host, roots, 2, snapshotting=7, copying=7)
    assert other.snapshot == other.copy == Progress()
    own = commit(host, roots, 3, snapshotting=1, copying=1)
    assert own.snapshot.file is not None and own.copy.file is not None


def test_ranks_that_have_their_calls_meet_those_that_have_not(host, roots):
    """A state may be gathered by all ranks together, and every rank is asked for its own next."""
    commit(host, roots, 0)
    host.run("add", (1,), {})
    met = []
    host.workload.state_dict = lambda: met.append("here") or {"total": host.workload.total}
    assert commit(host, roots, 1, snapshot=True).file is None
    assert met == ["here"]


def test_a_state_that_is_written_is_let_go(host, roots):
    begin(host, roots)
    wait_for_copies()
    total = weakref.ref(host.workload.total)
    host.workload.total = np.zeros(3)
    assert total() is None


def test_a_state_costs_what_waits_for_it_and_a_share_of_the_cores(monkeypatch):
    spent = iter([1.0, 5.0])
    monkeypatch.setattr(member_state.time, "thread_time", lambda: next(spent))
    monkeypatch.setattr(member_state.os, "cpu_count", lambda: 2)
    background = member_state._Background(7, lambda: None, "a test")
    assert background.thread.name == "dlrover-copy-7"
    background.finish()
    assert background.seconds == pytest.approx(2.0, abs=0.2)


# -- for the trainer --------------------------------------------------------------------------------------------------


def checkpoints_of(roots, **options):
    return StoreCheckpoints(roots, cadence=Cadence(2), **options)


def test_another_trainer_does_not_wait_for_the_states_of_the_last_one(host, roots):
    checkpoints = checkpoints_of(roots, every=100)
    for step in range(3):
        answer = host._state.commit(host.workload, checkpoints.commit_request(step, last=False), [])
        checkpoints.copies({ACTOR: answer}, {})
        checkpoints.commit(step, {ACTOR: answer}, {"step": step}, {})
    assert checkpoints.commit_request(3, last=False).snapshotting == 2
    assert checkpoints.newest() == 2
    assert checkpoints.commit_request(3, last=False).snapshotting is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_commit_leaves_alone_what_members_still_write_and_removes_what_they_left(host, roots, disk, fails):
    checkpoints = checkpoints_of(roots, every=100)
    disk.error = OSError("no such luck") if fails else None
    partial = roots.commits / "step-00000002.e1" / ".ACTOR-0.1.state.tmp"

    def commit_step(step):
        answer = host._state.commit(host.workload, checkpoints.commit_request(step, last=False), [])
        checkpoints.copies({ACTOR: answer}, {})
        if step == 2:
            partial.write_bytes(b"half of it")
        checkpoints.commit(step, {ACTOR: answer}, {"step": step}, {})

    for step in range(4):
        commit_step(step)
    assert partial.exists(), "step 3 is committed while the state of 2 is being written"
    disk.set()
    wait_for_copies()
    commit_step(4)
    assert partial.exists() != fails


@pytest.mark.parametrize("other", [Progress(running=True), Progress(), Progress(StateFile("ACTOR-1.1.state", 10, 0))])
def test_a_copy_is_published_once_all_members_have_made_theirs(tmp_path, roots, other):
    files = {f"ACTOR-{rank}": StateFile(f"ACTOR-{rank}.1.state", 10, 0) for rank in (0, 1)}
    trainers = roots.commit_store("").write(4, 1, "trainer.state", {}, {})
    for store in (roots.durable_store(), roots.commit_store("")):
        for file in files.values():
            (store.folder(4, 1) / file.name).write_bytes(bytes(10))
    manifest = roots.commit_store("").commit(4, 1, {**files, TRAINER: trainers})
    copying = Copying(roots.commit_store(""), roots.durable_store(), 1, None, {})
    copying.begin(manifest)
    answers = {ACTOR: Progress(files["ACTOR-0"]), ProcessId("ACTOR", 1): other}
    copying.note({member: CommitAnswer(None, copy=progress) for member, progress in answers.items()})
    assert [copy.step for copy in roots.durable_store().manifests()] == ([4] if other.file else [])
    assert (copying.step is None) == (not other.running), "one that failed is given up"
