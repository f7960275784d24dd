# SPDX-License-Identifier: Apache-2.0
"""Commits on several nodes: losses, damage, full disks, and the distance between two of them."""

import builtins
import errno
import logging
import os
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.common.disk_space import DiskWait
from dlrover.python.rl.common.errors import CheckpointMissing
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.runtime.checkpoint.commits import StoreCheckpoints, Stride, checkpoints_of
from dlrover.python.rl.runtime.checkpoint.member_state import MemberState
from dlrover.python.rl.runtime.checkpoint.runs import Roots, forget_commits, newest_commit, roots_of
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore
from tests.support import disks
from tests.support.durable_toys import ALONE, Stage

ACTORS = [("ACTOR", 0), ("ACTOR", 1)]
BRIEF = DiskWait(0.02, 0.001, 0.02)


def stage_on(path, nodes, **options):
    """A stage with two workers and the trainer on these nodes."""
    return Stage(path, nodes=dict(zip([*ACTORS, "trainer"], nodes, strict=True)), **options)


def run_through(path, nodes, lost, at_update=4, **options):
    """An undisturbed run's outcome, one's that loses a node in the middle of step ``at_update``, and its stage."""
    reference = stage_on(path / "undisturbed", nodes, **options)
    expected = reference.run()
    updates = [number for number, call in enumerate(reference.port.calls) if call == ("ACTOR", 0, "update")]
    stage = stage_on(path / "job", nodes, **options)
    return expected, stage.run({(updates[at_update - 1], "before"): stage.lose(lost)}), stage


@pytest.mark.parametrize(("nodes", "lost"), [("aba", "b"), ("abb", "b"), ("aaa", "a"), ("bba", "b"), ("aba", "a")])
@pytest.mark.parametrize(
    ("steps", "every", "restart", "message"),
    [
        (5, 100, 0, "all stateful workers are new: the job begins again at step 1"),
        (7, 3, 3, "continuing from the copy of that step in"),
    ],
)
def test_lost_node_costs_the_steps_after_the_copy(tmp_path, caplog, nodes, lost, steps, every, restart, message):
    with caplog.at_level(logging.WARNING, "dlrover"):
        expected, outcome, stage = run_through(tmp_path, nodes, lost, at_update=steps - 1, steps=steps, every=every)
    assert outcome == expected
    assert stage.restarted_after()[-1] == restart
    assert message in caplog.text and ("begins again" in caplog.text) == (restart == 0)


def test_survivor_of_a_later_state_is_an_error(tmp_path):
    with pytest.raises(CheckpointMissing) as caught:
        run_through(tmp_path, "aba", "b", steps=5, every=100, classes=ALONE)
    assert caught.value.retryable is False
    assert "the steps up to 3 are lost; ACTOR[0], with a later state, cannot restart at step 1" in str(caught.value)


@pytest.mark.parametrize(("nodes", "lost"), [("aba", "b"), ("abb", "b"), ("aaa", "a"), ("bba", "b"), ("aab", "b")])
def test_commits_in_the_jobs_directory_lose_no_step(tmp_path, nodes, lost):
    expected, outcome, stage = run_through(tmp_path, nodes, lost, steps=5, every=100, shared=True)
    assert outcome == expected
    assert stage.restarted_after() == ([0, 3] if nodes[2] == lost else [0])
    (newest, *_) = stage.attempts and StoreCheckpoints(replace(stage.roots(), epoch=9))._commits.manifests()
    assert {file.node for file in newest.files.values()} == {""}, "each is looked at"


@pytest.mark.parametrize(
    ("nodes", "strategy", "commit_to", "shared"),
    [
        (1, "GROUP", "auto", False),
        (1, "SIMPLE", "auto", True),
        (2, "AUTO", "auto", False),
        (2, "AUTO", "memory", False),
        (1, "AUTO", "job_dir", True),
    ],
)
def test_commit_root_follows_from_strategy_and_setting(tmp_path, monkeypatch, nodes, strategy, commit_to, shared):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    text = f"trainer: {{module: m, class: c, node_number: {nodes}}}\nworkload: {{actor: {{module: m, class: c}}}}\n"
    text += f"job_dir: {tmp_path}\nscheduling_strategy: {strategy}\ncheckpoint: {{commit_to: {commit_to}}}\n"
    job = load_job_text(text, "job")
    where = tmp_path / "commits" / "run1" if shared else tmp_path / "memory" / f"dlrover-rl-{os.geteuid()}" / "job-run1"
    roots = roots_of(job, "run1", 1, "n")
    assert checkpoints_of(job, "run1", 1, "n").roots == roots
    assert (roots.commit_root(), roots.shared) == (where, shared)


class Weights:
    """A workload of ``size`` bytes."""

    def __init__(self, size=80):
        self.weights, self.saved = np.zeros(size // 8), 0

    def state_dict(self):
        self.saved += 1
        return {"w": self.weights}

    def load_state_dict(self, state):
        self.weights = state["w"]


class Store:
    """One worker, and the trainer's side."""

    def __init__(self, path, size=80, disk_wait=DiskWait(0.02, 0.001), run="run1", shared=True, every=2):  # noqa: B008
        self.roots = Roots("job", run, 1, path / "checkpoints" / run, path / "commits" / run, shared=shared)
        self.checkpoints = StoreCheckpoints(self.roots, every=every, disk_wait=disk_wait)
        self.member, self.workload = MemberState("ACTOR", 0, 1, "", disk_wait=disk_wait), Weights(size)

    def commit(self, *steps):
        for step in steps:
            request = self.checkpoints.commit_request(step, last=False)
            answers = {ProcessId("ACTOR", 0): self.member.commit(self.workload, request)}
            self.checkpoints.save(step, {"step": step})
            self.checkpoints.commit(step, answers, {})

    def commit_and_copy(self, *steps):
        """Commit these steps, and wait until the copy under way is made."""
        self.commit(*steps)
        self.wait_for_copy()

    def wait_for_copy(self):
        self.member._copy.thread.join(30)

    def restore(self, step):
        self.member.restore(self.workload, self.checkpoints.restore_request(step))

    def continue_at(self, step):
        """The newest commit is of this step, and both can load it."""
        assert self.checkpoints.newest() == step
        assert self.checkpoints.load(step) == {"step": step}
        self.restore(step)

    def damage(self, pattern):
        for path in self.roots.commits.glob(pattern):
            disks.damage_byte(path)

    def copies(self):
        return [manifest.step for manifest in self.roots.durable_store().manifests()]

    def folders(self):
        """The names of the commits, and of their copies."""
        roots = self.roots.commits, self.roots.durable
        return tuple(sorted(path.name for path in root.glob("step-*")) for root in roots)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def fail_with(number):
    def fail(*arguments):
        raise OSError(number, "no answer")

    return fail


@pytest.mark.parametrize("later", [False, True])
def test_commits_of_an_ended_run_stay_if_later_than_its_copies(store, tmp_path, later):
    store.commit_and_copy(1, 2)
    store.checkpoints.newest()
    if later:
        store.commit(3)
    forget_commits(tmp_path, "run1")
    assert (tmp_path / "commits").exists() == later
    newest, manifest = newest_commit(tmp_path)
    assert (newest.run, manifest.step) == ("run1", 3 if later else 2)


def test_run_without_commits_leaves_no_folder(store, tmp_path):
    store.checkpoints.newest()
    assert (tmp_path / "checkpoints" / "run1").is_dir()
    for _ in range(2):
        forget_commits(tmp_path, "run1")
        assert not (tmp_path / "checkpoints").exists()


def test_committed_bytes_are_counted_without_copies(store):
    store.commit_and_copy(1, 2)
    files = list(store.roots.commits.glob("step-*.e1/*.state"))
    assert len(files) == 4
    assert store.checkpoints.committed_bytes == sum(file.stat().st_size for file in files)


def test_unpublished_copy_is_published_if_its_commit_is_damaged(store):
    store.commit_and_copy(1, 2)
    assert not list(store.roots.durable.glob("*/manifest.json"))
    store.damage("step-*2.e1/ACTOR*")
    store.checkpoints.discard(2, "a worker could not read it")
    store.continue_at(2)


@pytest.mark.parametrize("file", ["trainer", "ACTOR"])
def test_valid_copy_of_a_damaged_commit_is_used_and_stays(store, file):
    store.commit_and_copy(1, 2)
    store.commit(3)
    assert store.checkpoints.newest() == 3
    store.checkpoints.discard(3, "a test")
    store.damage(f"step-*2.e1/{file}*")
    store.continue_at(2)
    assert store.folders()[1] == ["step-00000002.e1"]


def test_slow_copy_is_finished_despite_later_commits(store, monkeypatch):
    free, put = threading.Event(), CheckpointStore.put
    monkeypatch.setattr(CheckpointStore, "put", lambda *arguments: free.wait(30) and put(*arguments))
    store.commit(*range(1, 6))
    free.set()
    store.wait_for_copy()
    assert (store.checkpoints.newest(), store.copies()) == (5, [2])


def test_failed_copy_is_not_waited_for(store, monkeypatch):
    put = CheckpointStore.put
    for steps, put_copy in (((1, 2), fail_with(errno.EIO)), ((3, 4), put)):
        monkeypatch.setattr(CheckpointStore, "put", put_copy)
        store.commit_and_copy(*steps)
    store.checkpoints.newest()
    assert store.copies() == [4]


def test_discarded_commit_is_not_copied(store, monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(CheckpointStore, "put", lambda *arguments: free.wait(30) and None)
    store.commit(1, 2)
    assert store.checkpoints.newest() == 2
    store.checkpoints.discard(2, "a test")
    assert store.checkpoints.newest() == 1
    assert store.checkpoints.commit_request(2, last=False).persist, "the next commit of the step is"
    free.set()
    store.wait_for_copy()


def test_copy_is_published_after_the_files_of_its_step(store, caplog):
    class Files:
        uploads = []

        def upload(self):
            self.uploads.append(list(store.roots.durable.glob("*/manifest.json")))

    store.checkpoints.copying.files = Files()
    store.commit_and_copy(1, 2)
    with caplog.at_level(logging.WARNING, "dlrover"):
        assert store.checkpoints.newest() == 2
    assert Files.uploads == [[]] and list(store.roots.durable.glob("*2.e1/manifest.json"))
    assert "continuing from the copy of that step" not in caplog.text


def test_last_known_commit_has_the_latest_writer_of_each_member(store, tmp_path):
    store.commit(1)
    store.member = MemberState("ACTOR", 0, 2, "", disk_wait=store.checkpoints.disk_wait)
    store.commit(2)
    again = Store(tmp_path).checkpoints
    assert again.newest() == 2
    assert again.last_known.incarnations == {ProcessId("ACTOR", 0): 2}


def test_run_whose_only_commit_is_damaged_does_not_begin_again(store, tmp_path):
    store.commit(1)
    store.damage("step-*1.e1/manifest.json")
    with pytest.raises(CheckpointMissing, match="no commit of run run1 is left: step-00000001.e1.bad.1"):
        Store(tmp_path).checkpoints.newest()


def test_copies_of_all_runs_are_as_many_as_are_kept(tmp_path):
    for run, steps in (("run1", (2, 4)), ("run2", (2,)), ("run3", (2,))):
        store = Store(tmp_path, run=run)
        for step in steps:
            store.commit_and_copy(step - 1, step)
            store.checkpoints.newest()
    copies = [path.parent.relative_to(tmp_path) for path in tmp_path.glob("checkpoints/*/*/manifest.json")]
    assert sorted(map(str, copies)) == [f"checkpoints/run{number}/step-00000002.e1" for number in (2, 3)]
    assert [path.name for path in (tmp_path / "commits").iterdir()] == ["run3"]


def test_copies_out_of_reach_matter_only_without_commits(tmp_path, monkeypatch, caplog):
    store = Store(tmp_path, disk_wait=BRIEF)
    store.commit_and_copy(1, 2)
    store.commit(3)
    monkeypatch.setattr(store.checkpoints._durable, "manifests", fail_with(errno.ETIMEDOUT))
    with caplog.at_level(logging.WARNING, "dlrover"):
        store.continue_at(3)
    assert "going back to step 3 without looking for a later copy" in caplog.text
    store.damage("step-*/trainer*")
    with pytest.raises(OSError, match="no answer"):
        store.checkpoints.newest()


def test_trainer_copies_once_the_store_is_within_reach(tmp_path, monkeypatch):
    store = Store(tmp_path, disk_wait=BRIEF, every=100)
    store.commit(1, 2)
    claim, is_away = CheckpointStore.claim, [True]

    def away(each, epoch):
        if each.root == store.roots.durable and is_away:
            raise OSError(errno.ETIMEDOUT, "no answer")
        claim(each, epoch)

    monkeypatch.setattr(CheckpointStore, "claim", away)
    with pytest.raises(OSError, match="no answer"):
        StoreCheckpoints(replace(store.roots, commits=tmp_path / "none"), every=2, disk_wait=BRIEF)
    store.checkpoints = StoreCheckpoints(store.roots, every=2, disk_wait=BRIEF)
    assert store.checkpoints.newest() == 2
    store.restore(2)
    store.commit(3, 4)
    assert store.checkpoints.copying.at is None
    is_away.clear()
    store.commit_and_copy(5, 6)
    assert (store.checkpoints.newest(), store.copies()) == (6, [6])


def test_file_lost_by_the_disk_costs_only_its_commit(tmp_path, monkeypatch):
    store = Store(tmp_path, disk_wait=BRIEF, every=100)
    store.commit(1, 2)
    (lost,) = store.roots.commits.glob("step-*2.e1/ACTOR*")
    opened = builtins.open

    def lose(path, *arguments, **options):
        if path == lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", lose)
    assert store.checkpoints.newest() == 1
    assert store.checkpoints.load(1) == {"step": 1}
    assert list(store.roots.commits.glob("step-*2.e1.bad.1"))


def test_discard_moves_only_offered_folders_away(store):
    store.commit(1, 2)
    store.checkpoints.restore_request(2)
    (store.roots.durable / "step-00000002.e2").mkdir()
    store.wait_for_copy()
    store.checkpoints.discard(2, "a test")
    commits, copies = store.folders()
    assert commits == ["step-00000001.e1", "step-00000002.e1.bad.1"]
    assert copies == ["step-00000002.e1", "step-00000002.e2"]


@pytest.fixture
def small(tmp_path):
    with disks.small_disk(tmp_path / "disk") as disk:
        (tmp_path / "commits").symlink_to(disk)
        yield disk


@pytest.mark.parametrize("shared", [True, False])
def test_older_generation_makes_room_for_the_next(tmp_path, small, caplog, shared):
    store = Store(tmp_path, size=700_000, shared=shared)
    with caplog.at_level(logging.WARNING, "dlrover"):
        store.commit(*range(1, 6))
    assert "no space left in" in caplog.text
    store.continue_at(5)
    assert store.workload.saved == 5, "a state is asked for once, however often it is written"


@pytest.mark.parametrize("leave", [0, 300_000])
def test_commit_without_room_has_an_error_with_the_figures(tmp_path, small, leave):
    store = Store(tmp_path, size=400_000)
    store.commit(1)
    free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
    (small / "filler").write_bytes(bytes(free - leave))
    figures = r"40\d{4} bytes do not fit, \d+ bytes are free"
    with pytest.raises(OSError, match=rf"No space left on device: {figures}: '.*step-"):
        store.commit(2)
    assert [path.name for path in Path(store.roots.commits).rglob("*2.e1/*")] == []
    assert store.checkpoints.newest() == 1
    (small / "filler").unlink()
    store.commit(2)
    assert store.checkpoints.newest() == 2
    store.wait_for_copy()  # it reads from the disk that goes now


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["replace", "fsync", "open", "stat"])
def test_one_failure_of_the_disk_at_any_call_costs_nothing(tmp_path, monkeypatch, call, number):
    patience = DiskWait(0.02, 0.001, 5.0)
    fault = FaultyCalls(monkeypatch, call, number, "checkpoints", "commits")
    for at in count(1):
        fault.at(at)
        folder = tmp_path / f"at-{at}"
        Store(folder, disk_wait=patience).commit(1, 2)
        Store(folder, disk_wait=patience).continue_at(2)
        assert not list(folder.rglob("*.bad.*")), "a fault that passes is no damage"
        if not fault.happened:
            break
    assert at > 3


class FaultyCalls:
    """The ``at``-th call of a function of ``os`` for a file in one of ``folders`` raises ``number``."""

    def __init__(self, monkeypatch, call, number, *folders):
        self.left, self.number, self.folders, self.happened = -1, number, folders, False
        real = getattr(os, call)

        def faulty(where, *arguments, **options):
            name = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
            if any(f"/{folder}/" in name for folder in self.folders) and not self.happened:
                self.left -= 1
                if self.left == 0:
                    self.happened = True
                    raise OSError(self.number, os.strerror(self.number), name)
            return real(where, *arguments, **options)

        monkeypatch.setattr(os, call, faulty)

    def at(self, count):
        self.left, self.happened = count, False


def committed(stride, clock, step_s, steps, commit_s):
    """The steps that are committed, each of which takes ``commit_s``."""
    commits = []
    for step in range(1, steps + 1):
        clock[0] += step_s
        if stride.is_due(step):
            commits.append(step)
            stride.start_after(step)
            stride.note_commit(commit_s)
    return commits


@pytest.mark.parametrize(
    ("every", "is_deterministic", "step_s", "commit_s", "apart"),
    [
        (None, True, 10.0, 0.09, 1),  # 0.9 % of a step
        (None, True, 1.0, 0.011, 2),
        (None, True, 1.0, 0.05, 5),
        (None, True, 1.0, 10.0, 8),  # at most eight steps
        (None, True, 3.0, 10.0, 3),  # at most 10 s
        (None, True, 60.0, 10.0, 1),
        (None, False, 1.0, 10.0, 1),
        (3, False, 1.0, 10.0, 3),
        (3, True, 100.0, 0.0, 3),
    ],
)
def test_stride_holds_its_share_and_limits(every, is_deterministic, step_s, commit_s, apart):
    clock = [0.0]
    stride = Stride(every, is_deterministic, lambda: clock[0])
    steps = committed(stride, clock, step_s, 60, commit_s)
    assert {later - earlier for earlier, later in zip(steps[2:], steps[3:], strict=False)} == {apart}


def test_stride_counts_from_the_commit_of_a_restart():
    clock = [0.0]
    stride = Stride(4, now_s=lambda: clock[0])
    assert committed(stride, clock, 1.0, 9, 0.1) == [4, 8]
    stride.start_after(6)
    assert [stride.is_due(step) for step in (7, 9, 10)] == [False, False, True]
