# SPDX-License-Identifier: Apache-2.0
"""Examples over the workers of a job: about as many tokens each, pairs whole, and what comes back in its order."""

import math

import numpy as np
import pytest

from dlrover.python.rl.engine.api.base import UpdateResult
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.engine_workload import Machine
from dlrover.python.rl.recipe.rm import RMTrainer
from dlrover.python.rl.recipe.workloads import ActorWorkload, ReferenceWorkload, ScorerWorkload
from dlrover.python.rl.trainer.workload import trainer_invocation
from tests.support.example_jobs import PAIRS, metrics_of, stage, write_rows


class _Given:
    """Keeps what it is given to train on, without a model."""

    def init_model(self, *arguments):
        self.given = []

    @trainer_invocation(target="RANK0")
    def machine(self):
        return Machine(0)

    def train(self, batch):
        self.given.append(batch)
        return UpdateResult(0.0, 0.0, 0.0, dict.fromkeys(RMTrainer.metric_names, 0.0))

    def save(self, folder):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class GivenExamples(_Given, ActorWorkload):
    """ACTOR of SFT."""


class GivenPairs(_Given, ScorerWorkload):
    """ACTOR of a reward model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1, max_positions=64))


def lengths_of_32(seed):
    return np.random.default_rng(seed).lognormal(3.0, 0.8, 32).astype(int) + 1


@pytest.mark.feature(57, 60)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["sft", "rm"])
def test_ranks_get_about_as_many_tokens_and_whole_pairs(model, tmp_path, kind, seed):
    texts = ["x" * length for length in lengths_of_32(seed)]
    rows = [{"prompt": "A", "response": text, "chosen": text, "rejected": f"{text[1:]}y"} for text in texts]
    config = {"model": model, "data": {"train": write_rows(tmp_path / "rows.jsonl", rows)}, "batch_size": 32}
    job = stage(kind, tmp_path / "out", config, {"ACTOR": ({"sft": GivenExamples, "rm": GivenPairs}[kind], 8)})
    job.run()
    parts = [job.workload("ACTOR", rank).given[0] for rank in range(8)]
    each = 1 if kind == "sft" else 2
    assert sorted(line for part in parts for line in part.dense("line").tolist()) == sorted([*range(1, 33)] * each)
    loads = np.array([part.ragged("tokens").lengths.sum() for part in parts])
    assert loads.max() <= 1.06 * loads.mean()
    if kind == "rm":
        assert all((part.dense("line")[::2] == part.dense("line")[1::2]).all() for part in parts)


@pytest.mark.feature(60, 61)
@pytest.mark.parametrize("members", [3, 5])
def test_what_members_of_a_reference_say_comes_back_to_its_pairs(model, tmp_path, members):
    pairs = [{**row, "chosen": row["chosen"] * (1 + at), "rejected": "no"} for at, row in enumerate(PAIRS)]
    config = {"model": model, "data": {"train": write_rows(tmp_path / "pairs.jsonl", pairs)}, "batch_size": 4}
    roles = {"ACTOR": (ActorWorkload, 1), "REFERENCE": (ReferenceWorkload, members)}
    stage("dpo", tmp_path / "out", {**config, "engine": {"threads": 1}}, roles).run()
    first = metrics_of(tmp_path / "out")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/chosen"] == pytest.approx(0.0, abs=1e-6)
