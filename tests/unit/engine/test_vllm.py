"""What only the vLLM engine has beside the contract of all rollout engines. Needs an environment with vLLM."""

import gc
import importlib.util
import random
import weakref

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra, OutOfDeviceMemory, WeightSyncError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import RolloutSettings, SamplingParams
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.registry import ROLLOUT, engine_class
from dlrover.python.rl.engine.torch.loading import load_causal_lm
from dlrover.python.rl.engine.torch.rollout import TorchRolloutEngine
from dlrover.python.rl.engine.weights import take_snapshot
from dlrover.python.rl.recipe.tiny import write_tiny_model

ABSENT = importlib.util.find_spec("vllm") is None
needs_vllm = pytest.mark.skipif(ABSENT, reason="'vllm' is not installed here")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM warns of what it uses itself


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=128, layers=2, max_positions=128)


@pytest.fixture(scope="module")
def engine(model_path):
    made = engine_class(ROLLOUT, "vllm")(model_path, RolloutSettings(max_batch=8))
    yield made
    made.close()


def snapshot(path, version, scale=1.0):
    return take_snapshot(((name, tensor * scale) for name, tensor in load_causal_lm(path).named_weights()), version)


def prompts(texts=("a", "what is it?", "37+45=")):
    rows = [list(text.encode()) for text in texts]
    return Batch({"prompt_id": np.arange(len(rows)), "tokens": Ragged.from_rows(rows)})


@pytest.mark.skipif(not ABSENT, reason="'vllm' is installed here")
def test_014_without_vllm_the_extra_is_named():
    with pytest.raises(MissingExtra, match=r"dlrover-rl\[vllm\]"):
        engine_class(ROLLOUT, "vllm")


@needs_vllm
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=40, samples_per_prompt=6),
        SamplingParams(max_new_tokens=20, samples_per_prompt=6, temperature=0.7, top_k=9, top_p=0.8),
        SamplingParams(max_new_tokens=20, samples_per_prompt=6, top_p=0.5, logprobs="sampled"),
    ],
    ids=["whole", "cut", "sampled"],
)
def test_it_draws_what_the_torch_engine_draws(engine, model_path, sampling):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    other = TorchRolloutEngine(model_path, RolloutSettings(max_batch=8))
    other.receive(snapshot(model_path, 0))
    mine, theirs = (drawer.generate(prompts(), sampling, (3, 1)) for drawer in (engine, other))
    assert mine.ragged("tokens").values.tolist() == theirs.ragged("tokens").values.tolist()
    assert np.allclose(mine.ragged("logprobs").values, theirs.ragged("logprobs").values, atol=1e-5)
    assert mine.objects("completion") == theirs.objects("completion")
    assert mine["finished"].tolist() == theirs["finished"].tolist()


@needs_vllm
def test_104_what_is_read_back_is_what_is_served(engine, model_path):
    """The head that is tied to the embeddings among it: on a CPU, vLLM itself keeps the old one."""
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    call = engine._resident.runner.llm.collective_rpc
    other = snapshot(model_path, 1, scale=1.02)
    (faults,) = call("read_back", args=(other,))
    assert faults == [f"'{name}' has other values" for name in sorted(other.buffers) if np.any(other.buffers[name])]
    call("take_weights", args=(other,))
    assert call("read_back", args=(other,)) == [[]]
    name = "model.layers.1.mlp.up_proj.weight"
    partly = {key: other.tensor(key) for key in other.buffers} | {name: other.tensor(name) + 1}
    assert call("read_back", args=(take_snapshot(partly.items(), 1),)) == [[f"'{name}' has other values"]]
    fewer = {key: other.tensor(key) for key in other.buffers if key != "model.norm.weight"}
    assert call("read_back", args=(take_snapshot(fewer.items(), 1),)) == [
        ["vLLM's 'model.norm.weight' is written by nothing"]
    ]


@needs_vllm
def test_104_weights_that_were_not_taken_are_not_served(engine, model_path, monkeypatch):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    worker = engine._resident.runner.llm.model_executor.driver_worker.worker
    monkeypatch.setattr(worker, "take_weights", lambda weights: None)
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' has other values"):
        engine.receive(snapshot(model_path, 1, scale=1.02))
    assert engine.version == -1
    with pytest.raises(EngineError, match="receive them again"):
        engine.generate(prompts(), SamplingParams(), (0,))
    monkeypatch.undo()
    engine.receive(snapshot(model_path, 1, scale=1.02))
    assert engine.version == 1


@needs_vllm
def test_broken_weights_are_an_error_not_a_sample(engine, model_path):
    engine.cuda()
    engine.receive(snapshot(model_path, 0, scale=torch.nan), rewind=True)
    with pytest.raises(EngineError, match="not numbers"):
        engine.generate(prompts(), SamplingParams(), (0,))
    assert engine.running == 0
    engine.receive(snapshot(model_path, 0))


@needs_vllm
def test_020_after_meta_no_weight_of_vllms_is_alive(engine, model_path):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    module = engine._resident.runner.llm.model_executor.driver_worker.worker.model_runner.model
    alive = [weakref.ref(tensor) for tensor in module.parameters()]
    assert len(alive) > 10
    del module
    engine.meta()
    gc.collect()
    assert [there for there in alive if there() is not None] == []
    engine.cuda()
    engine.receive(snapshot(model_path, 0))
    assert engine.generate(prompts(), SamplingParams(), (0,))["version"].tolist() == [0] * 3


@needs_vllm
def test_memory_is_accounted_for_and_what_does_not_fit_is_refused(model_path):
    weights = sum(tensor.nbytes for _, tensor in load_causal_lm(model_path).named_weights())
    with pytest.raises(OutOfDeviceMemory, match=f"vllm asks for {weights:,} bytes of weights on cpu"):
        engine_class(ROLLOUT, "vllm")(model_path, RolloutSettings(), DeviceMemory(capacity=weights - 1))


@needs_vllm
def test_settings_that_vllm_does_not_have_are_refused(model_path):
    make = engine_class(ROLLOUT, "vllm")
    with pytest.raises(EngineError, match="did you mean 'max_model_len'"):
        make(model_path, RolloutSettings(backend={"max_model_length": 9}))
    with pytest.raises(EngineError, match="no model"):
        make("/nowhere/at/all", RolloutSettings())


@needs_vllm
def test_starting_it_leaves_the_process_as_it_was(model_path):
    threads, python, array = torch.set_num_threads, random.getstate(), np.random.get_state()[1].tolist()
    random_state = torch.get_rng_state()
    made = engine_class(ROLLOUT, "vllm")(model_path, RolloutSettings(max_batch=2, backend={"max_model_len": 40}))
    try:
        with pytest.raises(EngineError, match="41 tokens does not fit the backend's limit of 40"):
            made.generate(prompts(["x" * 31]), SamplingParams(max_new_tokens=10), (0,))
    finally:
        made.close()
    assert torch.set_num_threads is threads
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python, array)
    assert not torch.distributed.is_initialized()


@needs_vllm
def test_two_engines_of_a_process_do_not_end_each_other(engine, model_path):
    engine.cuda()
    engine.receive(snapshot(model_path, 0), rewind=True)
    sampling = SamplingParams(max_new_tokens=8)
    expected = engine.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist()
    other = engine_class(ROLLOUT, "vllm")(model_path, RolloutSettings(max_batch=2))
    other.receive(snapshot(model_path, 0))
    assert other.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist() == expected
    other.close()
    assert engine.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist() == expected


@needs_vllm
@pytest.mark.slow
def test_two_ranks_draw_what_one_draws(engine, model_path):
    engine.cuda()
    engine.receive(snapshot(model_path, 1, scale=1.02), rewind=True)
    sampling = SamplingParams(max_new_tokens=20, samples_per_prompt=3)
    expected = engine.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist()
    engine.cpu()
    two = engine_class(ROLLOUT, "vllm")(model_path, RolloutSettings(max_batch=8, tensor_parallel_size=2))
    try:
        two.receive(snapshot(model_path, 1, scale=1.02))
        assert two.generate(prompts(), sampling, (2,)).ragged("tokens").values.tolist() == expected
    finally:
        two.close()
