# SPDX-License-Identifier: Apache-2.0
"""Models of every architecture that megatron takes: five steps of each end where the library's own model ends."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dlrover.python.rl.engine.api.settings import ParallelSizes
from tests.support.plain_engine import assert_close, model_config, plain_model, plain_run, reported, write_random
from tests.support.processes import run
from tests.support.train_cases import Case
from tests.support.train_exercise import STEPS, make_engine, train, weights_of

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = {
    "llama": lambda: model_config(LlamaConfig, tie_word_embeddings=False),
    "llama3": lambda: model_config(LlamaConfig, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "mistral": lambda: model_config(MistralConfig, tie_word_embeddings=False, sliding_window=None),
    "qwen2": lambda: model_config(Qwen2Config, tie_word_embeddings=False),
    "qwen3": lambda: model_config(Qwen3Config, tie_word_embeddings=True, head_dim=16),
}
SHIM = {"cpu_shim": True}
CASES = [
    Case("megatron", 1, ParallelSizes(), SHIM),
    Case("megatron", 4, ParallelSizes(tensor_parallel_size=2, pipeline_parallel_size=2), SHIM),
]

pytestmark = pytest.mark.needs("megatron")


@pytest.fixture(scope="module", params=CONFIGS)
def model_path(request, tmp_path_factory):
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    return write_random(tmp_path_factory.mktemp("models") / request.param, model)


@pytest.fixture(scope="module")
def expected(model_path):
    return plain_run(model_path)


def five_steps(rank, world_size, port, case, path):
    engine = make_engine(case, rank, port, path)
    frequencies = engine._model.module.rotary_pos_emb.inv_freq.tolist()
    result = train(engine, rank, range(STEPS)), weights_of(engine), frequencies
    engine.close()
    return result


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_five_steps_end_in_the_weights_of_the_plain_loop(case, model_path, expected):
    reports, weights = expected
    # At the few positions of a test the weights would not show that the slowest of them are wrong.
    frequencies = plain_model(model_path).model.rotary_emb.inv_freq.tolist()
    for steps, weights_here, turning in run(case.world_size, five_steps, case, model_path):
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


def test_ranks_that_split_matrices_share_the_tokens_of_everything_else(model_path):
    alone = Case("megatron", 1, ParallelSizes(), SHIM)
    shared = Case("megatron", 2, ParallelSizes(tensor_parallel_size=2), SHIM)
    (whole,) = run(1, shared_tokens, alone, model_path)
    for parts in run(2, shared_tokens, shared, model_path):
        assert parts == {name: [-(-tokens // 2) for tokens in counts] for name, counts in whole.items()}
    assert any(tokens % 2 for counts in whole.values() for tokens in counts)  # some rows are filled up
