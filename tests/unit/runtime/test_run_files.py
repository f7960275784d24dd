# SPDX-License-Identifier: Apache-2.0
"""The copies of a run's files in an object store, in place of which there is a folder."""

import pytest

from dlrover.python.rl.common.errors import CheckpointMissing
from dlrover.python.rl.runtime.checkpoint.runs import RunFiles


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


def test_a_log_that_is_rotated_during_an_upload_is_left_for_the_next_one(files, tmp_path):
    log = tmp_path / "run" / "logs" / "actor-0.log"
    files.where, files.change = "logs/actor-0.log", lambda: log.rename(f"{log}.1")
    files.upload()
    assert uploaded(tmp_path) == ["logs/trainer.log", "metrics.jsonl"]
    files.upload()
    assert uploaded(tmp_path) == ["logs/actor-0.log.1", "logs/trainer.log", "metrics.jsonl"]


def test_a_file_that_is_there_and_cannot_be_uploaded_is_an_error(files):
    def refuse():
        raise CheckpointMissing("the bucket is not there")

    files.where, files.change = "logs/trainer.log", refuse
    with pytest.raises(CheckpointMissing, match="the bucket"):
        files.upload()


def test_fetch_brings_files_that_are_missing_or_shorter_here(files, tmp_path):
    remote = {"metrics.jsonl": "whole metrics", "job.yaml": "a job", "log": "old"}
    local = {"metrics.jsonl": "whole", "log": "newer here"}
    for folder, texts in (("store", remote), ("run", local)):
        for name, text in texts.items():
            (tmp_path / folder / name).write_text(text)
    files.fetch()
    texts = {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert texts == {**remote, "log": "newer here"}
