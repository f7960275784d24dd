# SPDX-License-Identifier: Apache-2.0
"""What a run has left, read from its folder."""

import json

import pytest

from dlrover.rl.result import TrainResult


@pytest.fixture
def written(tmp_path):
    def write(model, steps=None):
        (tmp_path / "summary.json").write_text(json.dumps({"eval/reward": 0.5, "model": str(model)}))
        if steps is not None:
            (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
        return TrainResult(tmp_path)

    return write


def test_a_run_has_its_model_and_steps(written, tmp_path):
    (tmp_path / "model").mkdir()
    steps = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    result = written(tmp_path / "moved" / "model", [{"step": 0, "eval/reward": 0.25}, *steps])
    assert result.model == tmp_path / "model"
    assert result.steps == steps
    pytest.importorskip("pandas")
    assert list(result.metrics["loss"].index) == [0, 1, 2]
    assert result.metrics["eval/reward"].dropna().to_dict() == {0: 0.25}


def test_an_evaluation_has_no_steps_and_its_model_is_the_one_it_was_of(written):
    result = written("org/name")
    assert str(result.model) == "org/name"
    assert (result.steps, result.samples, result.summary["eval/reward"]) == ([], [], 0.5)
    pytest.importorskip("pandas")
    assert (len(result.metrics), result.metrics.index.name) == (0, "step")


def test_a_folder_of_no_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        _ = TrainResult(tmp_path).steps
