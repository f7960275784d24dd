# SPDX-License-Identifier: Apache-2.0
"""States that are written while the workers and the trainer continue."""

import threading
import weakref
from itertools import pairwise

import numpy as np
import pytest

from dlrover.python.rl.common.errors import DataError, InvocationError
from dlrover.python.rl.common.names import ProcessId, RLRoleType
from dlrover.python.rl.runtime.checkpoint import member_state
from dlrover.python.rl.runtime.checkpoint.commits import Copying
from dlrover.python.rl.runtime.checkpoint.member_state import CommitAnswer, CommitRequest, WrittenRequest
from dlrover.python.rl.runtime.checkpoint.runs import TRAINER, Roots
from dlrover.python.rl.runtime.checkpoint.state_file import StateFile
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore
from dlrover.python.rl.runtime.member.arguments import CallHeader
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import COMMIT, RAW_CALL, WRITTEN
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext
from tests.support.durable_toys import Stage, kill, kill_trainer, wait_for_copies

ACTOR = ProcessId("ACTOR", 0)


class Adder(BaseWorkload):
    """Adds in place: what it has given to be written is the live array."""

    guards_state = True

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.total = np.zeros(1000)

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
    made = Roots("job", "run1", 1, tmp_path / "durable", tmp_path / "memory")
    made.commit_store("").claim(1)
    made.durable_store().claim(1)
    return made


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(member_state, "AT_ONCE_BYTES", 0)
    made = MemberHost()
    made.start(UsersAdder, MemberContext(role=RLRoleType.ACTOR, rank=0), None, {})
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


def ask(host, verb, request):
    return host.invoke(CallHeader(RAW_CALL, verb), lambda: ((request,), {}))


def begin(host, roots, **terms):
    """The state after step 1 is being written."""
    call(host, 1, "add", 1)
    return ask(host, COMMIT, CommitRequest(1, roots, **terms))


def in_thread(act):
    done = threading.Event()

    def run():
        act()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done


def test_guarded_methods_run_while_the_state_is_written(host, roots, disk):
    assert begin(host, roots).file is None
    assert call(host, 2, "look") == 1.0
    assert ask(host, WRITTEN, WrittenRequest()).file is None
    disk.set()
    wait_for_copies()
    assert ask(host, WRITTEN, WrittenRequest()).file.name == "ACTOR-0.1.state"


@pytest.mark.parametrize("method", ["add", "move", "raw", "close", "commit", "written"])
def test_state_changes_wait_until_it_is_written(host, roots, disk, method):
    begin(host, roots)
    acts = {
        "raw": lambda: host.run("add", (1,), {}),
        "close": host.close,
        "commit": lambda: ask(host, COMMIT, CommitRequest(2, roots)),
        "written": lambda: ask(host, WRITTEN, WrittenRequest(waits=True)),
        "move": lambda: call(host, 2, "move"),
    }
    done = in_thread(acts.get(method, lambda: call(host, 2, "add", 5)))
    assert not done.wait(0.2)
    disk.set()
    assert done.wait(30)
    state = roots.commits / "step-00000001.e1" / "ACTOR-0.1.state"
    assert np.frombuffer(state.read_bytes()[-8004:-4]).tolist() == [1.0] * 1000, "as it was after step 1"


def test_small_states_are_written_within_the_call(host, roots, monkeypatch):
    monkeypatch.setattr(member_state, "AT_ONCE_BYTES", 8000)
    assert begin(host, roots).file.name == "ACTOR-0.1.state"


def test_copy_has_the_state_of_its_step(host, roots, disk):
    begin(host, roots, persist=True)
    assert ask(host, WRITTEN, WrittenRequest(copying=1)).is_copying, "it waits for the state"
    disk.set()
    call(host, 2, "add", 5)
    wait_for_copies()
    answer = ask(host, WRITTEN, WrittenRequest(copying=1))
    path = roots.durable / "step-00000001.e1" / answer.copy.name
    assert path.read_bytes() == (roots.commits / "step-00000001.e1" / "ACTOR-0.1.state").read_bytes()
    other = ask(host, WRITTEN, WrittenRequest(copying=7))
    assert (other.copy, other.is_copying) == (None, False)


def test_failed_write_is_raised_where_its_file_is_asked_for(host, roots, disk):
    disk.error = OSError("no such luck")
    begin(host, roots)
    disk.set()
    call(host, 2, "add", 5)
    with pytest.raises(InvocationError, match="no such luck"):
        ask(host, WRITTEN, WrittenRequest())


def test_values_that_cannot_be_saved_are_refused_at_once(host, roots):
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


def test_seconds_are_waits_and_a_share_of_the_cores(monkeypatch):
    spent = iter([1.0, 5.0])
    monkeypatch.setattr(member_state.time, "thread_time", lambda: next(spent))
    monkeypatch.setattr(member_state.os, "cpu_count", lambda: 2)
    background = member_state._Background(7, lambda: None)
    background.finish()
    assert background.seconds == pytest.approx(2.0, abs=0.2)


@pytest.mark.parametrize(
    "other",
    [
        CommitAnswer(None, is_copying=True),
        CommitAnswer(None),
        CommitAnswer(None, copy=StateFile("ACTOR-1.1.state", 10, 0)),
    ],
)
def test_copy_is_published_once_all_members_have_made_theirs(roots, other):
    files = {f"ACTOR-{rank}": StateFile(f"ACTOR-{rank}.1.state", 10, 0) for rank in (0, 1)}
    trainers = roots.commit_store("").write(4, 1, "trainer.state", {}, {})
    for store in (roots.durable_store(), roots.commit_store("")):
        for file in files.values():
            (store.folder(4, 1) / file.name).write_bytes(bytes(10))
    manifest = roots.commit_store("").commit(4, 1, {**files, TRAINER: trainers})
    copying = Copying(roots.commit_store(""), roots.durable_store(), 1, None, {})
    copying.at = manifest
    copying.note({ACTOR: CommitAnswer(None, copy=files["ACTOR-0"]), ProcessId("ACTOR", 1): other})
    assert [copy.step for copy in roots.durable_store().manifests()] == ([4] if other.copy else [])
    assert (copying.step is None) == (not other.is_copying), "one that failed is given up"


# -- whole jobs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_writes(monkeypatch):
    """Each state takes 20 ms to write, so that workers and the trainer continue before it is there."""
    monkeypatch.setattr(member_state, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr("tests.support.durable_toys.wait_for_copies", lambda: None)
    write, may_write = CheckpointStore.write, threading.Event()

    def slowly(self, step, epoch, name, header, tree):
        if threading.current_thread().name.startswith("dlrover-copy"):
            may_write.wait(0.02)
        return write(self, step, epoch, name, header, tree)

    monkeypatch.setattr(CheckpointStore, "write", slowly)


STEPS = 5


def results_of(outcome):
    """Leave out workers without a state: one may be lost after its last call."""
    return {**outcome, "members": {name: state for name, state in outcome["members"].items() if state is not None}}


@pytest.mark.parametrize("commit_every", [1, 2, 8])
@pytest.mark.parametrize("lost", [kill("ACTOR", 1), kill("ROLLOUT", 0), kill_trainer], ids=["actor", "rollout", "all"])
def test_a_loss_at_any_call_ends_in_the_same_bits(tmp_path, slow_writes, commit_every, lost):
    stage = Stage(tmp_path / "calm", steps=STEPS, every=100)
    expected = results_of(stage.run())
    for at in range(12, len(stage.port.calls), 7):
        faulty = Stage(tmp_path / f"{at}", steps=STEPS, every=100, commit_every=commit_every)
        assert results_of(faulty.run({(at, "before"): lost})) == expected
        assert all(later > earlier for earlier, later in pairwise(faulty.progress))


def test_a_stride_counts_from_commits_that_have_begun(tmp_path, slow_writes):
    stage = Stage(tmp_path / "job", steps=6, every=100, commit_every=2)
    stage.run()
    assert [call for call in stage.port.calls if call[:2] == ("ACTOR", 0) and call[2] == "!commit"] == [
        ("ACTOR", 0, "!commit")
    ] * 4, "of the steps 0, 2, 4 and 6"


def test_a_lost_rank_goes_back_with_all_roles(tmp_path):
    calm = Stage(tmp_path / "calm", steps=STEPS, every=100, commit_every=3)
    expected = calm.run()
    updates = [number for number, (_, rank, method) in enumerate(calm.port.calls) if (rank, method) == (0, "update")]
    stage = Stage(tmp_path / "job", steps=STEPS, every=100, commit_every=3)
    assert stage.run({(updates[4], "before"): kill("ACTOR", 0)}) == expected
    assert [trainer.restart_info.step for trainer in stage.attempts] == [0, 3]
    assert stage.progress == [3, 5]
