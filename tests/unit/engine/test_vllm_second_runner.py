# SPDX-License-Identifier: Apache-2.0
"""vLLM's second model runner, which it takes on a CPU with Triton's interpreter only: see ``support/triton_on_cpu``."""

from contextlib import closing

import numpy as np
import pytest

from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from tests.support.rollout_cases import Kind, Reference, completions, drain, drawn, prompts, requests, sampling

pytestmark = [pytest.mark.needs("vllm", "interpreted triton"), pytest.mark.filterwarnings("default")]
VLLM = Kind("vllm", "vllm")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=128, layers=2, max_positions=128)
    return Reference(path)


@pytest.fixture(scope="module", params=["positions", "vllm"])
def engine(request, reference):
    with closing(VLLM.make(reference.path, backend={"sampler": request.param})) as engine:
        assert engine._server._llm.vllm_config.use_v2_model_runner
        engine.receive(reference.snapshot(0))
        yield engine


@pytest.fixture
def sampler(engine):
    return engine._options.sampler


CUT = {"temperature": 0.7, "top_k": 9, "top_p": 0.8}


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, CUT], ids=["whole", "cooled", "cut"])
def test_logprobs_are_the_models_and_tokens_the_samplers(engine, sampler, reference, changes):
    if sampler == "vllm" and "top_k" in changes:
        pytest.skip("Triton's interpreter does not run vLLM's kernel for top_k")
    params = sampling(max_new_tokens=10, **changes)
    output = engine.generate(prompts(), params, (3, 1))
    torch_engine = TorchRolloutEngine(reference.path, RolloutSettings(max_batch=8))
    torch_engine.receive(reference.snapshot(0))
    expected = torch_engine.generate(prompts(), params, (3, 1))
    assert (completions(output) == completions(expected)) is (sampler == "positions")
    columns = (output.ragged(name) for name in ("tokens", "action_mask", "logprobs"))
    for tokens, mask, logprobs in zip(*columns, strict=True):
        places = np.flatnonzero(mask)
        models = reference.logprobs(tokens, params.temperature)[places - 1, tokens[places]]
        assert np.allclose(logprobs[places], models, atol=1e-5)


def test_aborted_requests_continue_with_the_same_tokens(engine):
    params = sampling(max_new_tokens=20, temperature=0.9, ignore_eos=True)
    engine.add(requests(), params, (5,))
    whole = drawn(drain(engine))
    engine.add(requests(), params, (5,))
    engine.advance()
    ended = {item.request.key: item.request for item in engine.abort()}
    engine.add([request for request in ended.values() if len(request.done) < 20], params, (5,))
    assert all(tokens == whole[key] for key, tokens in drawn(drain(engine)).items())
    assert all(whole[key][: len(request.done)] == request.done.tolist() for key, request in ended.items())


def test_tokens_have_the_version_of_their_weights(engine, reference):
    params = sampling(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    engine.receive(reference.snapshot(0), rewind=True)
    engine.add(requests(), params, (6,))
    engine.advance()
    engine.receive(reference.snapshot(1, scale=1.02))
    versions = [item.request.versions.tolist() for item in drain(engine).values()]
    assert all(set(each) == {0, 1} and each == sorted(each) for each in versions)
