# SPDX-License-Identifier: Apache-2.0
"""A reference of which each worker holds a part."""

import numpy as np
import pytest

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.workloads import (
    ReferenceWorkload,
    ShardedReferenceWorkload,
    ShardedTeacherWorkload,
    TeacherWorkload,
)
from dlrover.python.rl.trainer.workload import MemberContext, member_context
from tests.support.processes import run

ENGINE = EngineConfig(device="cpu", threads=1, shard_frozen=True)


def batch_of(rows):
    generator = np.random.default_rng(0)
    tokens = Ragged.from_rows([generator.integers(0, 256, 12) for _ in range(rows)])
    return Batch({"tokens": tokens, "action_mask": Ragged.from_rows([np.arange(12) >= 4] * rows)})


def made(kind, model, rank=0, world_size=1, port=0):
    context = MemberContext(
        "reference", RLRoleType.REFERENCE, rank, world_size, master_addr="127.0.0.1", master_port=port
    )
    with member_context(context):
        workload = kind(None, {})
    workload.init_model(model, ENGINE)
    return workload


def _part(rank, world_size, port, model, shares):
    workload, rows = made(ShardedReferenceWorkload, model, rank, world_size, port), batch_of(sum(shares))
    mine = rows.take(list(range(sum(shares[:rank]), sum(shares[: rank + 1]))))
    found = workload.logprobs(mine, 0.7).ragged("ref_logprobs").values
    held = sum(shard.master.numel() for shard in workload._engine._model.shards)
    workload.close()
    return found, held


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(3, 2), (3, 0)], ids=["rows for both", "a rank without rows"])
def test_ranks_hold_a_part_each_and_compute_what_a_copy_does(tmp_path, shares):
    model = str(write_tiny_model(tmp_path / "T", hidden=32, layers=2, max_positions=64))
    whole = made(ReferenceWorkload, model)
    expected = whole.logprobs(batch_of(sum(shares)), 0.7).ragged("ref_logprobs").values
    found = run(2, _part, model, shares)
    np.testing.assert_allclose(np.concatenate([values for values, _ in found]), expected, rtol=0, atol=1e-5)
    parameters = whole._engine.parameter_count
    assert sum(held for _, held in found) == parameters
    assert max(held for _, held in found) < 0.6 * parameters


@pytest.mark.parametrize(
    ("kind", "shards", "error"),
    [
        (ReferenceWorkload, False, ""),
        (ShardedTeacherWorkload, True, ""),
        (ReferenceWorkload, True, "needs the class ShardedReferenceWorkload"),
        (TeacherWorkload, True, "needs the class ShardedTeacherWorkload"),
        (ShardedReferenceWorkload, False, "has to be true for ShardedReferenceWorkload"),
    ],
)
def test_the_class_and_the_setting_go_together(kind, shards, error):
    found = list(kind.check_config({"engine": {"shard_frozen": shards}}))
    assert [str(fault) for fault in found] == ([f"config.engine.shard_frozen: {error}"] if error else [])
