# SPDX-License-Identifier: Apache-2.0
"""A disk that is full for a while: a run waits, and leaves no half line."""

import logging
import os
import shutil
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrover.python.rl.common.disk_space import DiskWait, append, replace
from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base import engine_workload
from dlrover.python.rl.recipe.reporting.run_log import RunLog
from dlrover.python.rl.runtime.run.progress import redraw
from tests.support.disks import small_disk
from tests.support.rollout_member import actor
from tests.support.run_files import read_json, read_lines

QUICK = DiskWait(limit_s=20.0, pause_s=0.01)
NONE = DiskWait(limit_s=0.05, pause_s=0.01)


class SmallDisk:
    """A disk of 2 MB that something else fills up, and leaves when the run says that it waits."""

    def __init__(self, folder):
        self.folder, self._filler = folder, folder / "filler"

    def fill(self, left=0):
        """Let just ``left`` bytes remain, rounded down to whole pages."""
        with open(self._filler, "wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    break
            file.truncate(max(0, file.tell() - left // 4096 * 4096))

    def relieve(self):
        self._filler.unlink(missing_ok=True)


class Relief(logging.Handler):
    """Makes room as soon as a warning of the full disk is logged."""

    def __init__(self, disk):
        super().__init__(logging.WARNING)
        self.disk, self.messages = disk, []

    def emit(self, record):
        self.messages.append(record.getMessage())
        self.disk.relieve()


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as folder:
        yield SmallDisk(folder)


@pytest.fixture
def relief(disk):
    handler, logger = Relief(disk), logging.getLogger("dlrover.python.rl.common.disk_space")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def make_actor(folder):
    model = write_tiny_model(folder / "T", hidden=32, layers=1, max_positions=16)
    return actor(str(model)), (model / "model.safetensors").read_bytes()


def test_file_on_a_full_disk_is_unchanged(disk):
    for write, name in ((append, "lines"), (replace, "whole")):
        write(disk.folder / name, b"before\n", NONE)
    disk.fill(left=8192)
    for write, name in ((append, "lines"), (replace, "whole")):
        with pytest.raises(OSError, match="No space left"):
            write(disk.folder / name, bytes(100_000), NONE)
        assert (disk.folder / name).read_bytes() == b"before\n"
    assert sorted(os.listdir(disk.folder)) == ["filler", "lines", "whole"]


def test_log_is_written_whole_through_full_disks(disk, relief):
    log, steps = RunLog(disk.folder, QUICK), (1, 2, 3)
    disk.fill()
    log.begin_step(1)
    for step in steps:
        log.begin_step(step)
        disk.fill(left=4096)
        log.write_samples(step, [{"prompt": "x" * 2000, "row": row} for row in range(5)])
        disk.fill()
        log.write_step(step, {f"figure_{number}": number + step / 10 for number in range(80)})
    for close in (
        lambda: log.write_curve("reward/mean"),
        lambda: log.write_held_out(1, [{"prompt": "x" * 9000}]),
        lambda: log.write_summary({"what": "x" * 9000}),
    ):
        disk.fill()
        close()
    samples, metrics = (read_lines(disk.folder / name) for name in ("samples.jsonl", "metrics.jsonl"))
    assert [(row["step"], row["row"]) for row in samples] == [(step, row) for step in steps for row in range(5)]
    assert [row["step"] for row in metrics] == [1, 2, 3]
    events = EventAccumulator(str(disk.folder / "tensorboard"))
    events.Reload()
    values = {event.step: event.value for event in events.Scalars("figure_79")}
    assert values == pytest.approx({step: 79 + step / 10 for step in steps}, abs=1e-3)
    assert (disk.folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert read_json(disk.folder / "summary.json")["what"] == "x" * 9000
    waited = {line.split()[4].rstrip(";").rpartition("/")[2] for line in relief.messages}
    assert {"samples.jsonl", "metrics.jsonl", "step-000001.jsonl", "summary.json", "reward.png"} <= waited


def test_model_is_saved_once_there_is_room(disk, relief, tmp_path):
    member, content = make_actor(tmp_path)
    disk.fill(left=20_000)
    gathered, named_weights = [], member._engine.named_weights
    member._engine.named_weights = lambda: gathered.append(1) or named_weights()
    member.save(disk.folder / "model")
    assert gathered == [1], "the other ranks take part once"
    assert sorted(os.listdir(disk.folder)) == ["model"]
    assert (disk.folder / "model" / "model.safetensors").read_bytes() == content
    (message,) = relief.messages
    assert message.startswith(f"no disk space for {disk.folder / 'model'}; waiting up to 60 s: ")


def test_curve_of_a_failed_run_is_not_waited_for(disk, relief, caplog):
    (disk.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    disk.fill()
    with caplog.at_level(logging.WARNING, "dlrover"):
        redraw(disk.folder)
    assert relief.messages == []
    assert "continuing without loss.png: [Errno 28] No space left on device" in caplog.text
    assert not (disk.folder / "loss.png").exists()


def test_model_is_written_whole_again_after_a_failed_upload(tmp_path, monkeypatch):
    failures = [OSError(5, "upload")]

    @contextmanager
    def uploaded(place):
        yield place
        if failures:
            shutil.rmtree(place)
            raise failures.pop()

    monkeypatch.setattr(engine_workload, "local_folder", uploaded)
    member, content = make_actor(tmp_path)
    member.save(tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").read_bytes() == content
    with pytest.raises(EngineError, match=r"save\(\) was not called"):
        member._engine.save_again(tmp_path / "again")
