# SPDX-License-Identifier: Apache-2.0
"""A training call's arguments as a job."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.common.extensions import load_object
from dlrover.python.rl.config.load import load_job_with
from dlrover.python.rl.config.plain import to_plain
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.recipe import launch
from dlrover.python.rl.script.inputs import Inputs

ROWS = [{"prompt": "a", "size": 1}, {"prompt": "ä", "size": np.int64(2)}]
RECIPE = Path(launch.__file__).with_name("grpo.yaml")


def judge(completion):
    return 1.0


@dataclass(frozen=True)
class Milder(GRPO):
    by: float = 0.5


@pytest.fixture
def config(tmp_path):
    def make(keys=None, **given):
        given = {"model": "m", "train": "d.jsonl", "eval": None, **given}
        return Inputs(tmp_path / "inputs").config(keys or {}, given)

    return make


def test_rows_become_a_file_named_by_its_content(config):
    values = config(train=ROWS, eval=iter(ROWS[:1]))
    file = Path(values["data.train"])
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == [
        {"prompt": "a", "size": 1},
        {"prompt": "ä", "size": 2},
    ]
    assert config(train=ROWS)["data.train"] == str(file)
    assert config(train=ROWS[1:])["data.train"] != str(file)
    assert Path(values["data.eval"]).read_text(encoding="utf-8").count("\n") == 1
    assert config(train="org/name")["data.train"] == "org/name"


@pytest.mark.parametrize("kind", ["datasets", "pandas"])
def test_tables_of_other_libraries_are_rows(config, kind):
    library = pytest.importorskip(kind)
    made = library.Dataset.from_list(ROWS) if kind == "datasets" else library.DataFrame(ROWS)
    assert Path(config(train=made)["data.train"]).read_bytes() == Path(config(train=ROWS)["data.train"]).read_bytes()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train": 3}, "dataset: must be a file, a hub name or rows, not int"),
        ({"eval": [3]}, "eval_dataset: row 1 is int, not a dict"),
        ({"train": {"train": ROWS}}, r"has the splits train: give one of them, dataset\['train'\]"),
        ({"train": [{"prompt": object()}]}, "dataset: row 1: object is not JSON"),
    ],
)
def test_what_is_no_rows_is_said(config, given, said):
    with pytest.raises(InvalidJob, match=said):
        config(**given)


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
    assert config(reward={"function": judge, "timeout_s": 9})["reward"] == {
        "function": f"{__name__}:judge",
        "timeout_s": 9,
    }
    values = config(reward={"model": "rm"})
    assert values["reward"] == {"model": "rm"}
    assert values["workload.reward"]["class"] == "ModelRewardWorkload"


@pytest.mark.parametrize(
    ("algorithm", "options"), [(Milder, {}), (Milder(by=2.0), {"by": 2.0}), ({"name": Milder, "by": 3.0}, {"by": 3.0})]
)
def test_an_algorithm_may_be_a_class_or_made(config, algorithm, options):
    found = config({"algorithm": algorithm})["algorithm"]
    assert found["name"] == f"{__name__}:Milder"
    assert {name: found[name] for name in options} == options
    assert config({"algorithm": "dapo"})["algorithm"] == {"name": "dapo"}


def test_keys_are_the_recipes_or_the_layouts(config):
    local = config(
        {
            "steps": 3,
            "name": "mine",
            "rollout": {"max_new_tokens": 7},
            "rollout.temperature": 0.5,
            "optimizer": OptimizerConfig(lr=2e-3),
            "workload": {"rollout": {"num": 2}},
            "log": {"trackers": [Milder]},
            "seed": 4,
        },
        env=lambda: None,
    )
    job = load_job_with(RECIPE, local, ())
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
