# SPDX-License-Identifier: Apache-2.0
"""A rollout worker with a tiny model's weights, and what it is asked for."""

import numpy as np

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig, SamplingParams
from dlrover.python.rl.recipe.base.config import EngineConfig, RolloutConfig
from dlrover.python.rl.recipe.base.updates import UpdatePlan
from dlrover.python.rl.recipe.workloads import ActorWorkload, RolloutWorkload

ENGINE = EngineConfig(threads=1)
SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0, samples_per_prompt=4)
FOREVER = 1e9


def actor(model, engine=ENGINE, optimizer=OptimizerConfig(lr=1e-2), algorithm=GRPO()):  # noqa: B008 -- frozen values
    workload = ActorWorkload(None, {})
    workload.init_model(model, engine, optimizer, algorithm)
    return workload


def member(model, ticket=None, engine=ENGINE, **rollout):
    """A rollout with these fields of its configuration."""
    workload = RolloutWorkload(None, {})
    workload.init_model(model, engine, RolloutConfig(**rollout))
    if ticket is not None:
        workload.receive_weights(ticket)
    return workload


def trained(actor):
    """A ticket for the weights after another step."""
    tokens = np.array([72, 101, 108, 108, 111, 33], dtype=np.int64)
    rows = Ragged.from_rows([tokens])
    mask = np.array([False] * 3 + [True] * 3)
    columns = {"tokens": rows, "action_mask": rows.like(mask), "logprobs": rows.like(np.full(6, -5.0, np.float32))}
    annotated = Batch({"advantage": np.ones(1, np.float32), "weight": np.full(1, 1 / 3, np.float32)})
    actor.update(Batch(columns), annotated, UpdatePlan(1.0))
    return actor.publish_weights()


def wanted(*ids, created_step=1, retry=0, **objects):
    """Groups of these prompts; ``objects`` are columns instead of the usual."""
    count = len(ids)
    texts = [f"{number}+{number + 1}=" * (1 + number % 3) for number in ids]
    columns = {"prompt": texts, "answer": ["1"] * count, "extra_info": [{} for _ in ids]} | objects
    numbers = {"prompt_id": ids, "created_step": [created_step] * count, "retry": [retry] * count}
    return Batch({name: np.array(values, dtype=np.int64) for name, values in numbers.items()} | columns)


def sample(member, groups, enough=None, patience_s=FOREVER, sampling=SAMPLING, seed=5):
    """All of them complete, unless told otherwise."""
    return member.sample(groups, sampling, seed, len(groups) if enough is None else enough, patience_s)
