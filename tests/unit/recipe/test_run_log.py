"""What a run writes, and what it replaces."""

import json

from dlrover.python.rl.recipe.tracking import RunLog


def refuse(token):
    raise AssertionError(token)


def test_numbers_that_are_none_become_null(tmp_path):
    log = RunLog(tmp_path)
    log.step(1, {"reward": float("nan"), "loss": float("inf")})
    log.step(2, {"reward": 1.0, "loss": 0.5})
    log.samples(1, [{"reward": float("nan"), "prompt": "NaN"}])
    log.held_out([{"reward": float("nan")}])
    log.summary({"mean": float("nan")})
    log.curve("reward", "reward.png")
    log.close()
    read = {
        name: [json.loads(line, parse_constant=refuse) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl")
    }
    assert read["metrics.jsonl"][0] == {"step": 1, "reward": None, "loss": None}
    assert read["samples.jsonl"] == [{"step": 1, "reward": None, "prompt": "NaN"}]
    assert read["held_out.jsonl"] == [{"reward": None}]
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse) == {"mean": None}


def test_a_second_run_keeps_nothing_of_the_firsts_log_and_all_of_the_rest(tmp_path):
    first = RunLog(tmp_path)
    first.step(1, {"reward": 1.0, "loss": 1.0})
    first.held_out([{"reward": 1.0}])
    first.summary({})
    for name in ("reward", "loss"):
        first.curve(name, f"{name}.png")
    first.close()
    (tmp_path / "model").mkdir()
    for name in ("model/weights", "job.yaml", "mine.jsonl"):
        (tmp_path / name).write_text("kept")
    (earlier,) = (tmp_path / "tensorboard").iterdir()
    RunLog(tmp_path).close()
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    left = {name for name in names if not name.startswith("tensorboard/")}
    assert left == {"model/weights", "job.yaml", "mine.jsonl", "metrics.jsonl", "samples.jsonl"}
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert sum(path.stat().st_size for path in tmp_path.glob(f"tensorboard/{earlier.name}")) < 200
