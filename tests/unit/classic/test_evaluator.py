# SPDX-License-Identifier: Apache-2.0
"""The evaluator: its files, its engines, and what it does to neither model nor process."""

import json
import os
import time
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

WHO = ("Ada", "Emmy", "Sofia", "Grace", "Mary")


def evaluator(model, dataset, folder, **arguments):
    return Evaluator(model, dataset, folder, max_new_tokens=6, show_progress=False, **arguments)


def results(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.feature(131)
def test_there_is_a_record_of_each_sample_and_the_metrics_agree(model, tmp_path):
    told = evaluator(model, asked("Ada", "Grace", "Mary", kind=Length), tmp_path / "new", batch_size=2).evaluate()
    rows = results(tmp_path / "new")
    assert [row["prompt"][0]["content"] for row in rows] == ["Ada", "Grace", "Mary"]
    assert [row["answer"] for row in rows] == [3, 5, 4]
    rewards = [row["reward"] for row in rows]
    assert rewards == [len(row["generated_answer"]) for row in rows]
    assert told == json.loads((tmp_path / "new" / "metrics.json").read_text(encoding="utf-8"))
    assert (told["num_samples"], told["failed"]) == (3, 0)
    assert told["reward_mean"] == pytest.approx(np.mean(rewards))
    assert told["reward_std"] == pytest.approx(np.std(rewards))
    assert 1 <= told["completion_tokens_mean"] <= 6


@pytest.mark.slow
@pytest.mark.feature(131)
def test_a_reward_that_hangs_or_raises_is_counted_and_not_taken_for_a_number(model, tmp_path):
    began_s = time.monotonic()
    dataset = asked("Ada", "Emmy", "Sofia", "Grace", kind=Length)
    told = evaluator(model, dataset, tmp_path, reward_timeout_s=2.0).evaluate()
    assert time.monotonic() - began_s < 120
    rows = results(tmp_path)
    assert told["failed"] == 2
    assert told["reward_mean"] == pytest.approx((rows[0]["reward"] + rows[3]["reward"]) / 2)
    assert [row["reward"] for row in rows[1:3]] == [None, None]
    assert "within 2 s" in rows[1]["error"]
    assert "ArithmeticError: not this one" in rows[2]["error"]


@pytest.mark.feature(131)
def test_without_rewards_the_answers_are_written_all_the_same(model, tmp_path):
    told = evaluator(model, asked("Ada", "Grace"), tmp_path).evaluate()
    assert (told["reward_mean"], told["reward_std"], told["failed"]) == (None, None, 0)
    assert [row["reward"] for row in results(tmp_path)] == [None, None]


@pytest.mark.feature(131)
def test_answers_depend_on_seed_and_sample_and_on_no_batch(model, tmp_path):
    def said(seed, **arguments):
        evaluator(model, asked(*WHO), tmp_path, seed=seed, **arguments).evaluate()
        return [row["generated_answer"] for row in results(tmp_path)]

    first = said(1)
    assert said(1, batch_size=3) == first != said(2)
    assert said(1, num_batches=2, batch_size=2) == first[:4]
    greedy = said(1, do_sample=False)
    assert greedy == said(2, do_sample=False) == said(1, generation_args={"top_k": 1})


@pytest.mark.feature(131)
def test_another_model_and_one_in_memory(model, tmp_path):
    other = write_tiny_model(tmp_path / "other", hidden=32, layers=2, max_positions=96, seed=1)
    subject = evaluator(model, asked(*WHO), tmp_path, do_sample=False)

    def said():
        return [row["generated_answer"] for row in results(tmp_path)]

    subject.evaluate()
    of_first = said()
    subject.set_model(other)
    subject.evaluate()
    of_other = said()
    loaded = AutoModelForCausalLM.from_pretrained(model).train()
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    subject.evaluate_with_model(loaded, AutoTokenizer.from_pretrained(model))
    assert said() == of_first != of_other
    assert loaded.training
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.state_dict().items())


@pytest.mark.feature(131)
def test_evaluating_leaves_the_random_state_as_it_was(model, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    evaluator(model, asked("Ada"), tmp_path).evaluate()
    assert torch.equal(torch.rand(2), expected)


class NotVllm(TorchRolloutEngine):
    """Takes vLLM's place, and notes what it was told."""

    told: list = []

    def __init__(self, model, settings):
        NotVllm.told.append((model, settings, {name: os.environ.get(name) for name in VARIABLES}))
        super().__init__(model, RolloutSettings())


VARIABLES = ("VLLM_ATTENTION_BACKEND", "VLLM_WORKER_MULTIPROC_METHOD")


@pytest.mark.feature(132)
def test_arguments_reach_vllm_and_its_variables_are_set_where_they_are_not(model, tmp_path, monkeypatch):
    monkeypatch.setitem(ROLLOUT_ENGINES.builtin, "vllm", f"{__name__}:NotVllm")
    arguments = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "max_model_len": 64, "swap_space": 1}
    for given in (None, "TRITON_ATTN"):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        if given:
            monkeypatch.setenv("VLLM_ATTENTION_BACKEND", given)
        monkeypatch.setattr(NotVllm, "told", [])
        told = evaluator(model, asked("Ada"), tmp_path, engine="vllm", vllm_args=arguments, batch_size=3).evaluate()
        assert told["num_samples"] == 1
        ((where, settings, variables),) = NotVllm.told
        assert where == model
        assert (settings.tensor_parallel_size, settings.gpu_memory_utilization, settings.max_batch) == (2, 0.5, 3)
        assert settings.backend == {"engine_args": {"max_model_len": 64, "swap_space": 1}}
        assert variables == {VARIABLES[0]: given or "FLASH_ATTN", VARIABLES[1]: "spawn"}
        for name in VARIABLES:
            os.environ.pop(name, None)


def test_arguments_that_the_engine_sets_itself_are_refused_before_anything_is_loaded(model, tmp_path):
    arguments = {"max_model_len": 64, "logprobs_mode": "raw_logprobs", "async_scheduling": True}
    with pytest.raises(ValueError, match="cannot be given: async_scheduling, logprobs_mode"):
        evaluator(model, asked("Ada"), tmp_path, engine="vllm", vllm_args=arguments)


@pytest.mark.feature(14)
def test_without_vllm_the_extra_is_named(model, tmp_path):
    if find_spec("vllm"):
        pytest.skip("vLLM is here")
    with pytest.raises(MissingExtra, match="vllm"):
        evaluator(model, asked("Ada"), tmp_path, engine="vllm").evaluate()


@pytest.mark.feature(147)
@pytest.mark.parametrize("name", ["max_new_tokens", "batch_size", "num_batches", "sampling_temperature"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_that_is_not_positive_names_its_argument(name, value):
    with pytest.raises(ValueError, match=f"^{name}: input should be greater than 0, got {value}"):
        Evaluator("model", MathDataset(1), **{name: value})


@pytest.mark.feature(147)
def test_unknown_arguments_and_values_give_the_nearest():
    with pytest.raises(TypeError, match="Evaluator: .* argument 'batchsize'; did you mean 'batch_size'"):
        Evaluator("model", MathDataset(1), batchsize=2)
    with pytest.raises(ValueError, match="engine: input should be 'hf' or 'vllm', got 'sglang'"):
        Evaluator("model", MathDataset(1), engine="sglang")
    with pytest.raises(ValueError, match="generation_args has no 'topk'; did you mean 'top_k'"):
        Evaluator("model", MathDataset(1), generation_args={"topk": 3})
    with pytest.raises(ValueError, match="vllm_args need engine='vllm'"):
        Evaluator("model", MathDataset(1), vllm_args={"dtype": "auto"})
