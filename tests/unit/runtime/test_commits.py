# SPDX-License-Identifier: Apache-2.0
"""Commits on several nodes: losses, damage, full disks, and the distance between two of them."""

import builtins
import errno
import logging
import os
import threading
from dataclasses import replace
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
from tests.support.durable_toys import CLASSES, Policy, Stage

ACTORS = [("ACTOR", 0), ("ACTOR", 1)]


class Loner(Policy):
    """Its ranks restart one by one."""

    needs_own_process = False


def stage_on(path, nodes, **options):
    return Stage(path, nodes=dict(zip([*ACTORS, "trainer"], nodes, strict=True)), **options)


def run_through(path, nodes, lost, at_update=4, **options):
    """An undisturbed run's outcome, one's that loses a node in the middle of step ``at_update``, and its stage."""
    reference = stage_on(path / "undisturbed", nodes, **options)
    expected = reference.run()
    updates = [number for number, call in enumerate(reference.port.calls) if call == ("ACTOR", 0, "update")]
    stage = stage_on(path / "job", nodes, **options)
    return expected, stage.run({(updates[at_update - 1], "before"): stage.lose(lost)}), stage


def steps_gone_on_from(stage):
    return [trainer.restart_info.step for trainer in stage.attempts]


# -- in the nodes' memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "lost"), [("aba", "b"), ("abb", "b"), ("aaa", "a"), ("bba", "b"), ("aba", "a")])
def test_without_a_copy_a_lost_node_costs_all_steps_and_that_is_said(tmp_path, caplog, nodes, lost):
    with caplog.at_level(logging.WARNING, "dlrover"):
        expected, outcome, stage = run_through(tmp_path, nodes, lost, steps=5, every=100)
    assert outcome == expected
    assert steps_gone_on_from(stage)[-1] == 0
    assert "all stateful workers are new: the job begins again at step 1" in caplog.text


@pytest.mark.parametrize(("nodes", "lost"), [("aba", "b"), ("abb", "b"), ("aaa", "a"), ("bba", "b"), ("aba", "a")])
def test_with_a_copy_it_costs_the_steps_after_it(tmp_path, caplog, nodes, lost):
    with caplog.at_level(logging.WARNING, "dlrover"):
        expected, outcome, stage = run_through(tmp_path, nodes, lost, at_update=6, steps=7, every=3)
    assert outcome == expected
    assert steps_gone_on_from(stage)[-1] == 3
    assert "continuing from its copy in" in caplog.text
    assert "begins again" not in caplog.text


def test_a_survivor_of_a_later_state_is_not_thrown_away_in_silence(tmp_path):
    with pytest.raises(CheckpointMissing) as caught:
        run_through(tmp_path, "aba", "b", steps=5, every=100, classes={**CLASSES, "ACTOR": Loner})
    assert caught.value.retryable is False
    assert "the steps up to 3 are lost, and ACTOR[0] cannot begin again: they hold a later state" in str(caught.value)


# -- where all nodes see them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "lost"), [("aba", "b"), ("abb", "b"), ("aaa", "a"), ("bba", "b"), ("aab", "b")])
def test_in_the_jobs_directory_no_committed_step_is_lost(tmp_path, nodes, lost):
    expected, outcome, stage = run_through(tmp_path, nodes, lost, steps=5, every=100, shared=True)
    assert outcome == expected
    assert steps_gone_on_from(stage) == ([0, 3] if nodes[2] == lost else [0])
    (newest, *_) = stage.attempts and StoreCheckpoints(replace(stage.roots(), epoch=9))._commits.manifests()
    assert {file.node for file in newest.files.values()} == {""}, "nothing is taken on trust"


JOB = """
job_dir: {folder}
trainer: {{module: m, class: c, node_number: {nodes}}}
workload: {{actor: {{module: m, class: c}}}}
scheduling_strategy: {strategy}
checkpoint: {{commit_to: {commit_to}}}
"""


@pytest.mark.parametrize(
    ("nodes", "strategy", "commit_to", "shared"),
    [
        (1, "AUTO", "auto", False),
        (1, "GROUP", "auto", False),
        (1, "SIMPLE", "auto", True),
        (2, "AUTO", "auto", False),
        (2, "SIMPLE", "auto", True),
        (2, "AUTO", "memory", False),
        (1, "AUTO", "job_dir", True),
    ],
)
def test_one_function_says_where_commits_go(tmp_path, monkeypatch, nodes, strategy, commit_to, shared):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(tmp_path / "memory"))
    text = JOB.format(folder=tmp_path, nodes=nodes, strategy=strategy, commit_to=commit_to)
    job = load_job_text(text, "job")
    where = tmp_path / "commits" / "run1" if shared else tmp_path / "memory" / f"dlrover-rl-{os.geteuid()}" / "job-run1"
    roots = roots_of(job, "run1", 1, "n")
    assert checkpoints_of(job, "run1", 1, "n").roots == roots
    assert (roots.commit_root(), roots.shared) == (where, shared)


@pytest.mark.parametrize("later", [False, True])
def test_commits_of_an_ended_run_stay_only_if_they_go_beyond_its_copies(tmp_path, later):
    store = Store(tmp_path)
    store.commit(1)
    store.commit(2)
    store.copied()
    store.checkpoints.newest()
    if later:
        store.commit(3)
    forget_commits(tmp_path, "run1")
    assert (tmp_path / "commits").exists() == later
    found, manifest = newest_commit(tmp_path)
    assert (found.run, manifest.step) == ("run1", 3 if later else 2)


def test_a_run_that_has_committed_nothing_leaves_no_folder(tmp_path):
    Store(tmp_path).checkpoints.newest()
    assert (tmp_path / "checkpoints" / "run1").is_dir()
    forget_commits(tmp_path, "run1")
    assert not (tmp_path / "checkpoints").exists()
    forget_commits(tmp_path, "run1")


# -- damage -----------------------------------------------------------------------------------------------------------


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

    def __init__(self, path, size=80, disk_wait=DiskWait(0.02, 0.001), run="run1", shared=True):  # noqa: B008
        self.roots = Roots("job", run, 1, path / "checkpoints" / run, path / "commits" / run, shared=shared)
        self.checkpoints = StoreCheckpoints(self.roots, every=2, disk_wait=disk_wait)
        self.member, self.workload = MemberState("ACTOR", 0, 1, "", disk_wait=disk_wait), Weights(size)

    def commit(self, step):
        request = self.checkpoints.commit_request(step, last=False)
        answers = {ProcessId("ACTOR", 0): self.member.commit(self.workload, request)}
        self.checkpoints.save(step, {"step": step})
        self.checkpoints.commit(step, answers, {})

    def restore(self, step):
        self.member.restore(self.workload, self.checkpoints.restore_request(step))

    def copied(self):
        """Wait until the copy under way is made."""
        self.member._copy.thread.join(30)

    def damage(self, pattern):
        for path in self.roots.commits.glob(pattern):
            path.write_bytes(path.read_bytes()[:-1] + b"!")


def test_the_bytes_of_commits_are_counted_without_their_copies(tmp_path):
    store = Store(tmp_path)
    for step in (1, 2):
        store.commit(step)
    store.copied()
    files = [file for step in (1, 2) for file in store.roots.commits.glob(f"step-*{step}.e1/*.state")]
    assert len(files) == 4
    assert store.checkpoints.committed_bytes == sum(file.stat().st_size for file in files)


def test_an_unpublished_copy_is_published_rather_than_thrown_away(tmp_path):
    store = Store(tmp_path)
    store.commit(1)
    store.commit(2)
    store.copied()
    assert not list(store.roots.durable.glob("*/manifest.json"))
    store.damage("step-*2.e1/ACTOR*")
    store.checkpoints.discard(2, "a worker could not read it")
    assert store.checkpoints.newest() == 2
    assert store.checkpoints.load(2) == {"step": 2}
    store.restore(2)


@pytest.mark.parametrize("file", ["trainer", "ACTOR"])
def test_a_valid_copy_of_the_same_step_is_used_and_stays(tmp_path, file):
    store = Store(tmp_path)
    for step in (1, 2):
        store.commit(step)
    store.copied()
    store.commit(3)
    assert store.checkpoints.newest() == 3
    store.checkpoints.discard(3, "a test")
    store.damage(f"step-*2.e1/{file}*")
    assert store.checkpoints.newest() == 2
    assert store.checkpoints.load(2) == {"step": 2}
    store.restore(2)
    assert [path.name for path in store.roots.durable.glob("step-*")] == ["step-00000002.e1"]


def test_a_run_goes_on_from_the_commit_rather_than_from_its_copy(tmp_path, caplog):
    store = Store(tmp_path)
    for step in (1, 2):
        store.commit(step)
    store.copied()
    with caplog.at_level(logging.WARNING, "dlrover"):
        assert store.checkpoints.newest() == 2
    assert list(store.roots.durable.glob("*2.e1/manifest.json"))
    assert "continuing from its copy" not in caplog.text


def test_a_slow_copy_is_finished_however_many_commits_there_are_meanwhile(tmp_path, monkeypatch):
    store, free, put = Store(tmp_path), threading.Event(), CheckpointStore.put

    def slowly(*arguments):
        assert free.wait(30)
        return put(*arguments)

    monkeypatch.setattr(CheckpointStore, "put", slowly)
    for step in range(1, 6):
        store.commit(step)
    free.set()
    store.copied()
    assert store.checkpoints.newest() == 5
    assert [manifest.step for manifest in store.roots.durable_store().manifests()] == [2]


def test_copy_that_failed_is_not_waited_for(tmp_path, monkeypatch):
    store, put = Store(tmp_path), CheckpointStore.put

    def fail(*arguments):
        raise OSError(errno.EIO, "no answer")

    for step in range(1, 5):
        monkeypatch.setattr(CheckpointStore, "put", fail if step == 2 else put)
        store.commit(step)
        if step % 2 == 0:
            store.copied()
    store.checkpoints.newest()
    assert [manifest.step for manifest in store.roots.durable_store().manifests()] == [4]


def test_commit_that_is_given_up_is_not_copied(tmp_path, monkeypatch):
    store, free = Store(tmp_path), threading.Event()
    monkeypatch.setattr(CheckpointStore, "put", lambda *arguments: free.wait(30) and None)
    store.commit(1)
    store.commit(2)
    assert store.checkpoints.newest() == 2
    store.checkpoints.discard(2, "a test")
    assert store.checkpoints.newest() == 1
    assert store.checkpoints.commit_request(2, last=False).persist, "the next commit of the step is"
    free.set()
    store.copied()


def test_copy_is_published_after_the_files_of_its_step(tmp_path):
    class Files:
        uploads = []

        def upload(self):
            self.uploads.append(list(store.roots.durable.glob("*/manifest.json")))

    store = Store(tmp_path)
    store.checkpoints.copying.files = Files()
    store.commit(1)
    store.commit(2)
    store.copied()
    store.checkpoints.newest()
    assert Files.uploads == [[]] and list(store.roots.durable.glob("*/manifest.json"))


def test_last_known_commit_has_the_latest_writer_of_each_member(tmp_path):
    store = Store(tmp_path)
    store.commit(1)
    store.member = MemberState("ACTOR", 0, 2, "", disk_wait=store.checkpoints.disk_wait)
    store.commit(2)
    again = Store(tmp_path).checkpoints
    assert again.newest() == 2
    assert again.last_known.incarnations == {ProcessId("ACTOR", 0): 2}


def test_run_whose_only_commit_is_damaged_does_not_begin_again(tmp_path):
    store = Store(tmp_path)
    store.commit(1)
    store.damage("step-*1.e1/manifest.json")
    with pytest.raises(CheckpointMissing, match="no commit of run run1 is left: step-00000001.e1.bad.1"):
        Store(tmp_path).checkpoints.newest()


def test_copies_of_all_runs_are_as_many_as_are_kept(tmp_path):
    for run, last in (("run1", 4), ("run2", 2), ("run3", 2)):
        store = Store(tmp_path, run=run)
        for step in range(1, last + 1):
            store.commit(step)
            if step % 2 == 0:
                store.copied()
                store.checkpoints.newest()
    copies = [path.parent.relative_to(tmp_path) for path in tmp_path.glob("checkpoints/*/*/manifest.json")]
    assert sorted(map(str, copies)) == [f"checkpoints/run{number}/step-00000002.e1" for number in (2, 3)]
    assert [path.name for path in (tmp_path / "commits").iterdir()] == ["run3"]


def test_what_a_member_can_read_in_no_place_is_not_offered_again(tmp_path):
    store = Store(tmp_path)
    for step in (1, 2):
        store.commit(step)
    store.copied()
    assert store.checkpoints.newest() == 2
    store.checkpoints.restore_request(2)
    store.checkpoints.discard(2, "a test")
    assert store.checkpoints.newest() == 1


def test_a_store_out_of_reach_does_not_matter_while_the_commits_are_there(tmp_path, monkeypatch, caplog):
    store = Store(tmp_path, disk_wait=DiskWait(0.02, 0.001, 0.02))
    for step in (1, 2):
        store.commit(step)
    store.copied()
    store.commit(3)

    def out_of_reach():
        raise OSError(errno.ETIMEDOUT, "no answer")

    monkeypatch.setattr(store.checkpoints._durable, "manifests", out_of_reach)
    with caplog.at_level(logging.WARNING, "dlrover"):
        assert store.checkpoints.newest() == 3
        assert store.checkpoints.load(3) == {"step": 3}
        store.restore(3)
    assert "going back to step 3; later copies were not sought" in caplog.text
    store.damage("step-*/trainer*")
    with pytest.raises(OSError, match="no answer"):
        store.checkpoints.newest()


def test_a_trainer_begins_without_a_store_out_of_reach_and_copies_once_it_is_back(tmp_path, monkeypatch):
    store = Store(tmp_path, disk_wait=DiskWait(0.02, 0.001, 0.02))
    store.checkpoints.every = 100
    for step in (1, 2):
        store.commit(step)
    claim, is_away = CheckpointStore.claim, [True]

    def away(each, epoch):
        if each.root == store.roots.durable and is_away:
            raise OSError(errno.ETIMEDOUT, "no answer")
        claim(each, epoch)

    monkeypatch.setattr(CheckpointStore, "claim", away)
    with pytest.raises(OSError, match="no answer"):
        StoreCheckpoints(
            replace(store.roots, commits=tmp_path / "none"), every=2, disk_wait=store.checkpoints.disk_wait
        )
    store.checkpoints = StoreCheckpoints(store.roots, every=2, disk_wait=store.checkpoints.disk_wait)
    assert store.checkpoints.newest() == 2
    store.restore(2)
    for step in (3, 4):
        store.commit(step)
    assert store.checkpoints.copying.at is None
    is_away.clear()
    for step in (5, 6):
        store.commit(step)
    store.copied()
    assert store.checkpoints.newest() == 6
    assert [manifest.step for manifest in store.roots.durable_store().manifests()] == [6]


def test_a_file_that_the_disk_has_lost_costs_its_commit_and_no_other(tmp_path, monkeypatch):
    store = Store(tmp_path, disk_wait=DiskWait(0.02, 0.001, 0.02))
    store.checkpoints.every = 100
    for step in (1, 2):
        store.commit(step)
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


def test_only_what_was_offered_is_set_aside(tmp_path):
    store = Store(tmp_path)
    store.commit(1)
    store.commit(2)
    store.checkpoints.restore_request(2)
    (tmp_path / "checkpoints" / "run1" / "step-00000002.e2").mkdir()
    store.copied()
    store.checkpoints.discard(2, "a test")
    left = {path.name for path in store.roots.durable.glob("step-*")}
    assert left == {"step-00000002.e2", "step-00000002.e1"}
    assert {path.name for path in store.roots.commits.glob("step-*")} == {"step-00000001.e1", "step-00000002.e1.bad.1"}


# -- no room ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    with disks.small_disk(tmp_path / "disk") as disk:
        if disk is None:
            pytest.skip("needs the right to mount a file system")
        (tmp_path / "commits").symlink_to(disk)
        yield disk


def fill(disk, leave):
    """Leave ``leave`` bytes free."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(free - leave))


@pytest.mark.parametrize("shared", [True, False])
def test_the_older_generation_makes_room_for_the_next(tmp_path, small, caplog, shared):
    store = Store(tmp_path, size=700_000, shared=shared)
    with caplog.at_level(logging.WARNING, "dlrover"):
        for step in range(1, 6):
            store.commit(step)
    assert "no space left in" in caplog.text
    assert store.checkpoints.newest() == 5
    store.restore(5)
    assert store.workload.saved == 5, "a state is asked for once, however often it is written"


@pytest.mark.parametrize("leave", [0, 300_000])
def test_without_room_there_is_an_error_with_the_figures_and_no_half_generation(tmp_path, small, leave):
    store = Store(tmp_path, size=400_000)
    store.commit(1)
    fill(small, leave)
    with pytest.raises(
        OSError, match=r"No space left on device: 40\d{4} bytes do not fit, \d+ bytes are free: '.*step-"
    ):
        store.commit(2)
    assert [path.name for path in Path(store.roots.commits).rglob("*2.e1/*")] == []
    assert store.checkpoints.newest() == 1
    (small / "filler").unlink()
    store.commit(2)
    assert store.checkpoints.newest() == 2
    store.copied()  # it reads from the disk that goes now


def test_a_trainers_file_that_does_not_fit_leaves_the_last_commit(tmp_path, small):
    store = Store(tmp_path, size=80)
    store.commit(1)
    store.checkpoints.commit_request(2, last=False)
    fill(small, 0)
    with pytest.raises(OSError, match="bytes do not fit, 0 bytes are free"):
        store.checkpoints.save(2, {"step": 2})
    assert store.checkpoints.newest() == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["replace", "fsync", "open", "stat"])
def test_a_disk_that_falters_once_at_any_point_costs_nothing(tmp_path, monkeypatch, call, number):
    """In the commits of the worker and of the trainer, in their reading, and where a folder is taken over."""
    patience = DiskWait(0.02, 0.001, 5.0)
    expected = Store(tmp_path / "expected", disk_wait=patience)
    expected.commit(1)
    fault = FaultyCalls(monkeypatch, call, number, "checkpoints", "commits")
    at = 0
    while True:
        at += 1
        store = None
        fault.at(at)
        folder = tmp_path / f"at-{at}"
        store = Store(folder, disk_wait=patience)
        for step in (1, 2):
            store.commit(step)
        again = Store(folder, disk_wait=patience)
        assert again.checkpoints.newest() == 2
        assert again.checkpoints.load(2) == {"step": 2}
        again.restore(2)
        assert not [path for path in folder.rglob("*") if ".bad." in path.name], "and nothing is taken for damaged"
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
    found = []
    for step in range(1, steps + 1):
        clock[0] += step_s
        if stride.is_due(step):
            found.append(step)
            stride.start_after(step)
            stride.note_commit(commit_s)
    return found


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


def test_stride_counts_from_the_commit_that_a_run_goes_back_to():
    clock = [0.0]
    stride = Stride(4, now_s=lambda: clock[0])
    assert committed(stride, clock, 1.0, 9, 0.1) == [4, 8]
    stride.start_after(6)
    assert [stride.is_due(step) for step in (7, 9, 10)] == [False, False, True]
