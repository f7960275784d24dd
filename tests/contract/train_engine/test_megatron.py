# SPDX-License-Identifier: Apache-2.0
"""Models of every architecture that megatron takes, and parts of its optimizer on each data-parallel rank."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.support.plain_engine import assert_close, model_config, plain_model, plain_run, reported, write_random
from tests.support.processes import run
from tests.support.train_cases import SHIM, Case, as_parameter, sizes
from tests.support.train_exercise import STEPS, make_engine, saved, share, train, weights_of

pytestmark = pytest.mark.needs("megatron")


def megatron(world_size, tensor=1, pipeline=1):
    return Case("megatron", world_size, sizes(tensor, pipeline), SHIM)


ALONE = megatron(1)

# -- architectures ----------------------------------------------------------------------------------------------------
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
CONFIGS = {
    "llama": lambda: model_config(LlamaConfig, tie_word_embeddings=False),
    "llama3": lambda: model_config(LlamaConfig, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "mistral": lambda: model_config(MistralConfig, tie_word_embeddings=False, sliding_window=None),
    "qwen2": lambda: model_config(Qwen2Config, tie_word_embeddings=False),
    "qwen3": lambda: model_config(Qwen3Config, tie_word_embeddings=True, head_dim=16),
}


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    return write_random(tmp_path_factory.mktemp("models") / request.param, model)


@pytest.fixture(scope="module")
def family_steps(family):
    return plain_run(family)


def five_steps(rank, world_size, port, case, path):
    engine = make_engine(case, rank, port, path)
    frequencies = engine._model.module.rotary_pos_emb.inv_freq.tolist()
    result = train(engine, rank, range(STEPS)), weights_of(engine), frequencies
    engine.close()
    return result


@pytest.mark.parametrize("case", [as_parameter(case) for case in (ALONE, megatron(4, 2, 2))])
def test_five_steps_of_a_family_are_the_plain_loops(case, family, family_steps):
    reports, weights = family_steps
    # At the few positions of a test the weights would not show that the slowest of them are wrong.
    frequencies = plain_model(family).model.rotary_emb.inv_freq.tolist()
    for steps, weights_here, turning in run(case.world_size, five_steps, case, family):
        assert turning == pytest.approx(frequencies, rel=1e-6)
        assert_close(weights_here, weights)
        for step, plain in zip(steps, reports, strict=True):
            assert reported(step) == pytest.approx(plain, rel=1e-5)


def shared_tokens(rank, world_size, port, case, path):
    """Return the number of tokens that each norm gets in the passes of a step."""
    engine, counts = make_engine(case, rank, port, path), {}
    for name, module in engine._model.module.named_modules():
        if isinstance(module, torch.nn.RMSNorm) and "self_attention" not in name:
            sizes = counts.setdefault(name, [])
            module.register_forward_pre_hook(lambda _, arguments, sizes=sizes: sizes.append(arguments[0].shape[0]))
    train(engine, rank, range(1))
    engine.close()
    return counts


def test_tensor_parallel_ranks_share_tokens_outside_matrices(family):
    (whole,) = run(1, shared_tokens, ALONE, family)
    for parts in run(2, shared_tokens, megatron(2, 2), family):
        assert parts == {name: [-(-tokens // 2) for tokens in counts] for name, counts in whole.items()}
    assert any(tokens % 2 for counts in whole.values() for tokens in counts)  # some rows are filled up


# -- the optimizer ----------------------------------------------------------------------------------------------------
LAYOUTS = [
    pytest.param(megatron(2), id="2 ranks"),
    pytest.param(megatron(4, pipeline=2), id="2 stages of 2 ranks", marks=pytest.mark.slow),
    pytest.param(megatron(3), id="3 ranks", marks=pytest.mark.slow),
]


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

    def from_host():
        engine.cpu()
        engine.load_state_dict(state)
        on_host = weights_of(engine)
        assert all((on_host[name] == weights[name]).all() for name in weights)
        engine.cuda()

    def from_nothing():
        engine.meta()
        engine.load_state_dict(state)

    for bring_back in (from_host, lambda: engine.load_checkpoint(checkpoint), from_nothing):
        bring_back()
        steps += train(engine, rank, [2])
        ends.append(weights_of(engine))
    frozen = make_engine(case, rank, port, path, frozen=True, precision=precision)
    before = {name: tensor.clone() for name, tensor in frozen.named_weights()}
    frozen.load_state_dict(saved(frozen.state_dict()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.named_weights())
    frozen.evaluate(share(frozen, rank, 0))
    frozen.close()
    engine.close()
    return masters, footprint, counts, steps, ends


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_each_rank_steps_its_part_and_all_have_all_weights(case, precision, model_path, tmp_path):
    ((_, alone, *_),) = run(1, two_steps, ALONE, model_path, precision, tmp_path / "alone")
    stages = case.sizes.pipeline_parallel_size
    ranks = run(case.world_size, two_steps, case, model_path, precision, tmp_path / "checkpoint")
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
