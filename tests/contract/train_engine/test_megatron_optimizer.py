# SPDX-License-Identifier: Apache-2.0
"""Parts of megatron's optimizer on each data-parallel rank, and when the ranks exchange what they have stepped."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dlrover.python.rl.data import state_tree
from tests.support.plain_engine import write_model
from tests.support.processes import run
from tests.support.train_cases import Case, sizes
from tests.support.train_exercise import make_engine, share, train, weights_of

pytestmark = [
    pytest.mark.needs("megatron"),
    pytest.mark.parametrize("precision", ["fp32", "bf16"]),
]

SHIM = {"cpu_shim": True}
ALONE = Case("megatron", 1, sizes(1, 1), SHIM)
LAYOUTS = [
    pytest.param(Case("megatron", 2, sizes(1, 1), SHIM), id="2 ranks"),
    pytest.param(Case("megatron", 4, sizes(1, 2), SHIM), id="2 stages of 2 ranks", marks=pytest.mark.slow),
    pytest.param(Case("megatron", 3, sizes(1, 1), SHIM), id="3 ranks", marks=pytest.mark.slow),
]


def saved(state):
    skeleton, buffers = state_tree.dump(state)
    return state_tree.load(bytes(skeleton), [memoryview(bytes(buffer)) for buffer in buffers])


def two_steps(rank, world_size, port, case, path, precision, checkpoint):
    engine = make_engine(case, rank, port, path, precision=precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    train(engine, rank, range(2))
    masters = [(shard.master.numel(), shard.tensor.numel()) for shard in engine._model.shards]
    passes, counts = engine._model.passes, []
    for _ in range(2):
        with (
            patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast,
            patch.object(passes, "start_param_sync", wraps=passes.start_param_sync) as gather,
        ):
            sent = {name: tensor.clone() for name, tensor in engine.named_weights(dtype)}
            counts.append((broadcast.call_count, gather.call_count))
    weights, footprint = weights_of(engine), engine.footprint()
    assert all(torch.equal(torch.from_numpy(weights[name]).to(dtype), sent[name]) for name in sent)
    engine.save_checkpoint(checkpoint)
    state = saved(engine.state_dict())
    steps, ends = train(engine, rank, [2]), [weights_of(engine)]
    engine.cpu()
    engine.load_state_dict(state)
    on_host = weights_of(engine)
    assert all((on_host[name] == weights[name]).all() for name in weights)
    engine.cuda()
    steps, ends = steps + train(engine, rank, [2]), [*ends, weights_of(engine)]
    engine.load_checkpoint(checkpoint)
    steps, ends = steps + train(engine, rank, [2]), [*ends, weights_of(engine)]
    engine.meta()
    engine.load_state_dict(state)
    steps, ends = steps + train(engine, rank, [2]), [*ends, weights_of(engine)]
    frozen = make_engine(case, rank, port, path, frozen=True, precision=precision)
    before = {name: tensor.clone() for name, tensor in frozen.named_weights()}
    frozen.load_state_dict(saved(frozen.state_dict()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.named_weights())
    frozen.evaluate(share(frozen, rank, 0))
    frozen.close()
    engine.close()
    return masters, footprint, counts, steps, ends


@pytest.mark.parametrize("case", LAYOUTS)
def test_each_rank_steps_its_part_and_all_have_the_weights(case, precision, tmp_path):
    path = write_model(tmp_path / "model")
    ((_, alone, *_),) = run(1, two_steps, ALONE, path, precision, tmp_path / "alone")
    stages = case.sizes.pipeline_parallel_size
    ranks = run(case.world_size, two_steps, case, path, precision, tmp_path / "checkpoint")
    for stage in range(stages):
        of_stage = [masters for rank, (masters, *_) in enumerate(ranks) if rank % stages == stage]
        for parts in zip(*of_stage, strict=True):  # of one parameter
            assert sum(own for own, _ in parts) == parts[0][1]
        sizes_of_ranks = [sum(own for own, _ in masters) for masters in of_stage]
        assert max(sizes_of_ranks) - min(sizes_of_ranks) < 2000  # what fills up the buckets
    optimizers = sum(footprint["optimizer"] for _, footprint, *_ in ranks)
    tied_twice = 2 * 4 * 260 * 32 * (stages > 1)
    assert optimizers == pytest.approx(alone["optimizer"] + tied_twice, rel=0.01)
    for _, _, counts, steps, ends in ranks:
        of_stages = counts[0][0]  # from the stage that has a tensor
        assert counts == [(of_stages, 1), (of_stages, 0)] and bool(of_stages) == (stages > 1)
        assert len({step.loss for step in steps}) == len({step.grad_norm for step in steps}) == 1
        for end in ends:
            assert all((end[name] == ends[0][name]).all() for name in end)
