# SPDX-License-Identifier: Apache-2.0
"""The evaluator: its files, its engines, and what it does to neither model nor process."""

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlrover.python.rl.classic import Evaluator, MathDataset
from dlrover.python.rl.common.errors import MissingExtra
from dlrover.python.rl.engine.api.base import RolloutSettings
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from tests.support.judging_envs import Length, asked
from tests.support.manual_clock import within
from tests.support.run_files import read_json, read_lines

NAMES = ("Ada", "Emmy", "Sofia", "Grace", "Mary")


def evaluator(model, dataset, folder, **arguments):
    return Evaluator(model, dataset, folder, max_new_tokens=6, show_progress=False, **arguments)


def results(folder):
    return read_lines(folder / "results.jsonl")


@pytest.mark.feature(131)
def test_evaluate_writes_samples_and_matching_metrics(model, tmp_path):
    figures = evaluator(model, asked("Ada", "Grace", "Mary", kind=Length), tmp_path / "new", batch_size=2).evaluate()
    rows = results(tmp_path / "new")
    assert [row["prompt"][0]["content"] for row in rows] == ["Ada", "Grace", "Mary"]
    assert [row["answer"] for row in rows] == [3, 5, 4]
    rewards = [row["reward"] for row in rows]
    assert rewards == [len(row["generated_answer"]) for row in rows]
    assert figures == read_json(tmp_path / "new" / "metrics.json")
    assert (figures["num_samples"], figures["failed"]) == (3, 0)
    assert figures["reward_mean"] == pytest.approx(np.mean(rewards))
    assert figures["reward_std"] == pytest.approx(np.std(rewards))
    assert 1 <= figures["completion_tokens_mean"] <= 6


@pytest.mark.slow
@pytest.mark.feature(131)
def test_hanging_or_raising_reward_counts_as_failed(model, tmp_path):
    with within(120):
        dataset = asked("Ada", "Emmy", "Sofia", "Grace", kind=Length)
        figures = evaluator(model, dataset, tmp_path, reward_timeout_s=2.0).evaluate()
    rows = results(tmp_path)
    assert figures["failed"] == 2
    assert figures["reward_mean"] == pytest.approx((rows[0]["reward"] + rows[3]["reward"]) / 2)
    assert [row["reward"] for row in rows[1:3]] == [None, None]
    assert "within 2 s" in rows[1]["error"]
    assert "ArithmeticError: not this one" in rows[2]["error"]


@pytest.mark.feature(131)
def test_evaluate_without_rewards_writes_the_answers(model, tmp_path):
    """The random state of the process stays."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    figures = evaluator(model, asked("Ada", "Grace"), tmp_path).evaluate()
    assert (figures["reward_mean"], figures["reward_std"], figures["failed"]) == (None, None, 0)
    assert [row["reward"] for row in results(tmp_path)] == [None, None]
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.feature(131)
def test_answers_depend_on_seed_and_sample_not_on_the_batch(model, tmp_path):
    def answers(seed, **arguments):
        evaluator(model, asked(*NAMES), tmp_path, seed=seed, **arguments).evaluate()
        return [row["generated_answer"] for row in results(tmp_path)]

    first = answers(1)
    assert answers(1, batch_size=3) == first != answers(2)
    assert answers(1, num_batches=2, batch_size=2) == first[:4]
    greedy = answers(1, do_sample=False)
    assert greedy == answers(2, do_sample=False) == answers(1, generation_args={"top_k": 1})


@pytest.mark.feature(131)
def test_evaluator_takes_another_model_and_one_in_memory(model, tmp_path):
    other = write_tiny_model(tmp_path / "other", hidden=32, layers=2, max_positions=96, seed=1)
    subject = evaluator(model, asked(*NAMES), tmp_path, do_sample=False)

    def answers():
        return [row["generated_answer"] for row in results(tmp_path)]

    subject.evaluate()
    of_first = answers()
    subject.set_model(other)
    subject.evaluate()
    of_other = answers()
    loaded = AutoModelForCausalLM.from_pretrained(model).train()
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    subject.evaluate_with_model(loaded, AutoTokenizer.from_pretrained(model))
    assert answers() == of_first != of_other
    assert loaded.training
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.state_dict().items())


class NotVllm(TorchRolloutEngine):
    """Takes vLLM's place, and notes its arguments."""

    calls: list = []

    def __init__(self, model, settings):
        NotVllm.calls.append((model, settings, {name: os.environ.get(name) for name in VARIABLES}))
        super().__init__(model, RolloutSettings())


VARIABLES = ("VLLM_ATTENTION_BACKEND", "VLLM_WORKER_MULTIPROC_METHOD")


@pytest.mark.feature(132)
@pytest.mark.parametrize("backend", [None, "TRITON_ATTN"])
def test_arguments_and_missing_variables_reach_vllm(model, tmp_path, monkeypatch, backend):
    monkeypatch.setitem(ROLLOUT_ENGINES.builtin, "vllm", f"{__name__}:NotVllm")
    monkeypatch.setattr(NotVllm, "calls", [])
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    if backend:
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", backend)
    arguments = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "max_model_len": 64, "swap_space": 1}
    figures = evaluator(model, asked("Ada"), tmp_path, engine="vllm", vllm_args=arguments, batch_size=3).evaluate()
    assert figures["num_samples"] == 1
    ((folder, settings, variables),) = NotVllm.calls
    assert folder == model
    assert (settings.tensor_parallel_size, settings.gpu_memory_utilization, settings.max_batch) == (2, 0.5, 3)
    assert settings.backend == {"engine_args": {"max_model_len": 64, "swap_space": 1}}
    assert variables == {VARIABLES[0]: backend or "FLASH_ATTN", VARIABLES[1]: "spawn"}


@pytest.mark.feature(14)
def test_without_vllm_the_extra_is_named(model, tmp_path):
    if find_spec("vllm"):
        pytest.skip("vLLM is here")
    with pytest.raises(MissingExtra, match="vllm"):
        evaluator(model, asked("Ada"), tmp_path, engine="vllm").evaluate()


COUNTS = ("max_new_tokens", "batch_size", "num_batches", "sampling_temperature")
OWN = {"max_model_len": 64, "logprobs_mode": "raw_logprobs", "enable_sleep_mode": True}


@pytest.mark.feature(147)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({name: n}, f"^{name}: input should be greater than 0, got {n}") for name in COUNTS for n in (0, -1)),
        ({"batchsize": 2}, "Evaluator: .* argument 'batchsize'; did you mean 'batch_size'"),
        ({"engine": "sglang"}, "engine: input should be 'hf' or 'vllm', got 'sglang'"),
        ({"generation_args": {"topk": 3}}, "generation_args has no 'topk'; did you mean 'top_k'"),
        ({"vllm_args": {"dtype": "auto"}}, "vllm_args need engine='vllm'"),
        ({"engine": "vllm", "vllm_args": OWN}, "cannot be given: enable_sleep_mode, logprobs_mode"),
    ],
)
def test_evaluator_refuses_a_wrong_argument(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Evaluator("model", MathDataset(1), **arguments)
