# SPDX-License-Identifier: Apache-2.0
"""The arguments of a training call as a job, and the result that its folder has."""

import json
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.common.errors import DataError, InvalidJob
from dlrover.python.rl.common.extensions import load_object
from dlrover.python.rl.config.load import load_job_with
from dlrover.python.rl.config.plain import to_plain
from dlrover.python.rl.data.prompts import load_prompts
from dlrover.python.rl.data.source import scan_rows
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.recipe import launch
from dlrover.rl.result import TrainResult
from dlrover.rl.train import write_inputs
from tests.support.run_files import read_lines, write_rows

ROWS = [{"prompt": "a", "size": 1}, {"prompt": "ä", "size": np.int64(2)}]
RECIPE = Path(launch.__file__).with_name("grpo.yaml")


def judge(completion):
    return 1.0


@dataclass(frozen=True)
class Milder(GRPO):
    by: float = 0.5


@pytest.fixture
def config(tmp_path):
    def make(keys=None, **arguments):
        arguments = {"model": "m", "train": "d.jsonl", "eval": None, **arguments}
        return write_inputs(tmp_path / "inputs", keys or {}, arguments)

    return make


def test_rows_become_a_file_named_by_its_content(config):
    values = config(train=ROWS, eval=iter(ROWS[:1]))
    file = Path(values["data.train"])
    assert read_lines(file) == [{"prompt": "a", "size": 1}, {"prompt": "ä", "size": 2}]
    assert config(train=ROWS)["data.train"] == str(file)
    assert config(train=ROWS[1:])["data.train"] != str(file)
    assert Path(values["data.eval"]).read_text(encoding="utf-8").count("\n") == 1
    assert config(train="org/name")["data.train"] == "org/name"


def calling(name, **arguments):
    call = {"function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


CALLS = [{"talk": calling("at", place="x")}, {"talk": calling("add", first=1, second=[{"of": 2}])}]
OTHERS = [
    {"prompt": "a", "score": 0.5, "on": datetime(2024, 1, 2, 3), "price": Decimal("1.50")},
    {"prompt": "b", "score": None, "on": None, "price": None},
]


def rows_of(source, keys=None):
    rows, errors = scan_rows(source, keys)
    assert errors == []
    return list(rows)


@pytest.mark.parametrize("kind", ["datasets", "pandas"])
@pytest.mark.parametrize(("rows", "keys"), [(CALLS, {"messages": "talk"}), (OTHERS, None)], ids=["calls", "others"])
def test_a_table_is_as_its_file(config, tmp_path, kind, rows, keys):
    library = pytest.importorskip(kind)
    table = library.Dataset.from_list(rows) if kind == "datasets" else library.DataFrame(rows)
    table.to_parquet(str(tmp_path / "table.parquet"))
    rows_of_table = rows_of(config(train=table)["data.train"], keys)
    assert rows_of_table == rows_of(tmp_path / "table.parquet", keys)
    if kind == "pandas":
        again = library.read_parquet(tmp_path / "table.parquet")
        assert rows_of(config(train=again)["data.train"], keys) == rows_of_table
    if keys:
        last = rows_of_table[1]["messages"][1]["tool_calls"][0]["function"]
        assert last == {"name": "add", "arguments": {"first": 1, "second": [{"of": 2}]}}
    else:
        assert rows_of_table[0] == {"prompt": "a", "score": 0.5, "on": "2024-01-02T03:00:00", "price": "1.50"}
        assert rows_of_table[1] == {"prompt": "b"}


def test_nan_in_a_table_is_nothing(config):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "score": [1.0, float("nan")]})
    assert rows_of(config(train=table)["data.train"]) == [{"prompt": "a", "score": 1.0}, {"prompt": "b"}]


def test_nulls_of_plain_rows_stay(config):
    (row,) = rows_of(config(train=[{"messages": calling("at", place=None)}])["data.train"])
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"place": None}


def test_values_of_python_are_text_as_in_files(config):
    values = [date(2024, 1, 2), time(3, 4), timedelta(hours=1), Decimal("1.50"), UUID(int=7)]
    (row,) = rows_of(config(train=[{"prompt": "a", "more": [{"of": values}]}])["data.train"])
    assert row["more"] == [{"of": ["2024-01-02", "03:04:00", "1:00:00", "1.50", str(UUID(int=7))]}]


def test_a_lone_surrogate_is_an_error_of_its_row(config):
    values = config(train=[{"prompt": "ä"}, {"prompt": "b\ud83d"}])
    with pytest.raises(DataError, match=r"jsonl:2: 'prompt' has a lone surrogate at character 2"):
        load_prompts(values["data.train"])
    (row,) = rows_of(config(train=[{"prompt": "\ud83d\ude00"}])["data.train"])
    assert row == {"prompt": "\U0001f600"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": 3}, "dataset: must be a file, a hub name or rows, not int"),
        ({"eval": [3]}, "eval_dataset: row 1 is int, not a dict"),
        ({"train": {"train": ROWS, "test": "test.jsonl"}}, "a dict of train, test: give a list of rows, .*its splits"),
        ({"eval": {"extra_info": [{}], "a": np.ones(2)}}, r"of extra_info, a: .*Dataset.from_dict\(eval_dataset\)"),
        ({"train": [{"prompt": object()}]}, "dataset: row 1: object is not JSON"),
        ({"model": None}, "model: is None, but must be a folder or a hub name"),
        ({"model": GRPO()}, "model: is a GRPO, but must be a folder or a hub name"),
    ],
)
def test_argument_of_a_wrong_type_is_refused(config, arguments, message):
    with pytest.raises(InvalidJob, match=message):
        config(**arguments)


@pytest.mark.parametrize(
    ("reward", "function"),
    [
        ("gsm8k", "gsm8k"),
        (judge, f"{__name__}:judge"),
        ([judge, "gsm8k"], {f"{__name__}:judge": 1.0, "gsm8k": 1.0}),
        ({judge: 0.5, "gsm8k": 2}, {f"{__name__}:judge": 0.5, "gsm8k": 2}),
    ],
)
def test_rewards_are_named(config, reward, function):
    assert config(reward=reward)["reward"] == {"function": function}


def test_a_reward_may_be_its_keys(config):
    reward = {"function": f"{__name__}:judge", "timeout_s": 9}
    assert config(reward={**reward, "function": judge})["reward"] == reward
    values = config(reward={"model": "rm"})
    assert values["reward"] == {"model": "rm"}
    assert values["workload.reward"]["class"] == "ModelRewardWorkload"


@pytest.mark.parametrize(
    ("algorithm", "options"), [(Milder, {}), (Milder(by=2.0), {"by": 2.0}), ({"name": Milder, "by": 3.0}, {"by": 3.0})]
)
def test_an_algorithm_may_be_a_class_or_made(config, algorithm, options):
    values = config({"algorithm": algorithm})["algorithm"]
    assert values["name"] == f"{__name__}:Milder"
    assert {name: values[name] for name in options} == options
    assert config({"algorithm": "dapo"})["algorithm"] == {"name": "dapo"}


def test_keys_are_the_recipes_or_the_layouts(config):
    keys = {"steps": 3, "name": "mine", "rollout": {"max_new_tokens": 7}, "rollout.temperature": 0.5, "seed": 4}
    more = {"optimizer": OptimizerConfig(lr=2e-3), "workload": {"rollout": {"num": 2}}, "log": {"trackers": [Milder]}}
    job = load_job_with(RECIPE, config({**keys, **more}, env=lambda: None), ())
    plain = to_plain(job.config)
    assert (job.name, job.workloads["ROLLOUT"].num, plain["steps"], plain["seed"]) == ("mine", 2, 3, 4)
    assert job.workloads["ROLLOUT"].class_ == "RolloutWorkload"
    assert {"max_new_tokens": 7, "temperature": 0.5}.items() <= plain["rollout"].items()
    assert load_object(plain["rollout"]["env_path"])() is None
    assert plain["optimizer"]["lr"] == 2e-3
    assert plain["log"]["trackers"] == [f"{__name__}:Milder"]


def test_text_is_literal(config):
    job = load_job_with(RECIPE, config({"rollout": {"stop": ["${x}", "1e3"]}}), ())
    assert to_plain(job.config)["rollout"]["stop"] == ["${x}", "1e3"]


# -- its result -------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    def write(model, steps=None):
        (tmp_path / "summary.json").write_text(json.dumps({"eval/reward": 0.5, "model": str(model)}))
        if steps is not None:
            write_rows(tmp_path / "metrics.jsonl", steps)
        return TrainResult(tmp_path)

    return write


def test_a_run_has_its_model_and_steps(written, tmp_path):
    (tmp_path / "model").mkdir()
    steps = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    result = written(tmp_path / "moved" / "model", [{"step": 0, "eval/reward": 0.25}, *steps])
    assert (result.model, result.steps) == (tmp_path / "model", steps)
    pytest.importorskip("pandas")
    assert list(result.metrics["loss"].index) == [0, 1, 2]
    assert result.metrics["eval/reward"].dropna().to_dict() == {0: 0.25}


def test_evaluation_has_no_steps_and_the_evaluated_model(written):
    result = written("org/name")
    assert str(result.model) == "org/name"
    assert (result.steps, result.samples, result.summary["eval/reward"]) == ([], [], 0.5)
    pytest.importorskip("pandas")
    assert (len(result.metrics), result.metrics.index.name) == (0, "step")


def test_a_folder_of_no_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        _ = TrainResult(tmp_path).steps
