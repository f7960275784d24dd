# SPDX-License-Identifier: Apache-2.0
"""The room that a run's commits need, and the copies of its files in an object store."""

import os
from contextlib import suppress
from types import SimpleNamespace

import pytest

from dlrover.python.rl.common.errors import CheckpointMissing
from dlrover.python.rl.common.log import short_number
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.runtime.checkpoint.runs import RunFiles, describe_room, room_for, validate_room
from tests.support.durable_toys import Stage

GB = 10**9


def room_of(folder, members, nodes, state, settings=""):
    roles = f"actor: {{module: m, class: c, num: {members}}}, reward: {{module: m, class: c, resource: {{cpu: 0}}}}"
    trainer = f"{{module: m, class: c, node_number: {nodes}, device_per_node: 8, device_type: CPU}}"
    text = f"{{job_dir: {folder}, trainer: {trainer}, workload: {{{roles}}}, checkpoint: {{{settings}}}}}"
    job = load_job_text(text, "job")
    placement, errors = plan(job)
    assert not errors
    return job, room_for(job, placement, {"ACTOR": state})


@pytest.mark.parametrize(
    ("members", "nodes", "parameters", "settings", "memory", "disk"),
    [
        (8, 1, 7e9, "", 4 * 84, 3 * 84),
        (8, 1, 7e9, "keep: 1", 4 * 84, 2 * 84),
        (64, 8, 70e9, "", (4 + 3) * 105, 3 * 840),
        (64, 8, 70e9, "commit_to: job_dir", 0, (3 + 4) * 840),
    ],
)
def test_room_follows_from_the_states_and_the_plan(tmp_path, members, nodes, parameters, settings, memory, disk):
    state = int(12 * parameters / members)
    job, room = room_of(tmp_path, members, nodes, state, settings)
    assert (room.memory, room.disk) == (memory * GB, disk * GB)
    (line,) = describe_room(room)
    assert line.startswith(f"commits: ACTOR {members} x {short_number(state)}B; ")
    assert line.endswith(f"{short_number(disk * GB)}B in the job's directory")
    assert ("in the memory of a node" in line) == bool(memory)


@pytest.mark.parametrize(
    ("size_gb", "errors"), [(250, ["checkpoint.commit_to"]), (239, ["checkpoint.commit_to", "job_dir"]), (321, [])]
)
def test_validate_room_compares_it_with_the_disks(tmp_path, monkeypatch, size_gb, errors):
    job, room = room_of(tmp_path, 8, 1, 10 * GB, "commit_every: 1")
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_blocks=size_gb, f_frsize=GB))
    refusals = validate_room(job, room)
    assert [error.where for error in refusals] == errors
    if errors:
        message = refusals[0].what
        assert "commits need 320 GB in " in message and f"which has {size_gb} GB in all" in message
        assert message.endswith("checkpoint.commit_to: job_dir needs no memory")


def test_room_of_a_state_of_unknown_size_refuses_nothing(tmp_path):
    job, room = room_of(tmp_path, 1, 1, None)
    assert room is None and validate_room(job, room) == []
    assert describe_room(room) == ["commits: the size of a state is unknown until it is loaded"]
    assert describe_room(room_of(tmp_path, 1, 1, 0)[1]) == []


def sizes_of(paths):
    """The size of each file: one that is written over gets another name."""
    sizes = {}
    for path in paths:
        with suppress(FileNotFoundError):  # it has got its name
            status = path.stat()
            sizes[status.st_ino] = status.st_size
    return list(sizes.values())


@pytest.mark.parametrize("commit_every", [1, 2, 3])
@pytest.mark.parametrize("spread", [False, True])
def test_commits_take_no_more_memory_than_their_room(tmp_path, commit_every, spread):
    """Apart from copies, of which this job makes one: at its end, when the states are due anyway."""
    nodes = {("ACTOR", 0): "a", ("ACTOR", 1): "b", ("ROLLOUT", 1): "b", "trainer": "a"}
    stage = Stage(tmp_path / "job", steps=12, every=100, nodes=nodes, spread=spread, commit_every=commit_every)
    taken, one = [0], [0]
    submit = stage.port.submit

    def measuring(role, rank, call):
        for node in "ab":
            paths = (tmp_path / "job" / node).rglob("*ACTOR-*")
            sizes = sizes_of(path for path in paths if path.suffix in (".state", ".tmp"))
            taken.append(sum(sizes))
            one.extend(sizes)
        return submit(role, rank, call)

    stage.port.submit = measuring
    stage.run()
    states = max(one) * (2 if spread else 1)
    assert 2 * states < max(taken) <= 3 * states


class Changing(RunFiles):
    """Calls ``change`` before a file named ``where`` is uploaded."""

    where, change = "", staticmethod(lambda: None)

    def put(self, name):
        if name == self.where:
            self.change()
        super().put(name)


@pytest.fixture
def files(tmp_path):
    for folder in ("run", "store"):
        (tmp_path / folder / "logs").mkdir(parents=True)
    for name in ("logs/actor-0.log", "logs/trainer.log", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text(name)
    return Changing(tmp_path / "run", f"file://{tmp_path}/store")


def uploaded(folder):
    return sorted(str(path.relative_to(folder / "store")) for path in (folder / "store").rglob("*") if path.is_file())


def test_log_rotated_during_an_upload_is_left_for_the_next_one(files, tmp_path):
    log = tmp_path / "run" / "logs" / "actor-0.log"
    files.where, files.change = "logs/actor-0.log", lambda: log.rename(f"{log}.1")
    files.upload()
    assert uploaded(tmp_path) == ["logs/trainer.log", "metrics.jsonl"]
    files.upload()
    assert uploaded(tmp_path) == ["logs/actor-0.log.1", "logs/trainer.log", "metrics.jsonl"]


def test_failed_upload_of_a_file_is_an_error(files):
    def refuse():
        raise CheckpointMissing("the bucket is not there")

    files.where, files.change = "logs/trainer.log", refuse
    with pytest.raises(CheckpointMissing, match="the bucket"):
        files.upload()


def test_fetch_brings_missing_and_longer_files(files, tmp_path):
    remote = {"metrics.jsonl": "whole metrics", "job.yaml": "a job", "log": "old"}
    local = {"metrics.jsonl": "whole", "log": "newer here"}
    for folder, texts in (("store", remote), ("run", local)):
        for name, text in texts.items():
            (tmp_path / folder / name).write_text(text)
    files.fetch()
    texts = {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert texts == {**remote, "log": "newer here"}
