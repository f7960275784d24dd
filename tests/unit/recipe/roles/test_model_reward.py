# SPDX-License-Identifier: Apache-2.0
"""A trained reward model scores completions."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import encode_raw
from dlrover.python.rl.data.pairs import encode_pair
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.job import check_job
from dlrover.python.rl.recipe.base.config import EngineConfig, RewardConfig
from dlrover.python.rl.recipe.roles.reward import ModelRewardWorkload
from tests.support.example_jobs import PAIRS, stage
from tests.support.policy_jobs import finished, policy_job, write_inputs
from tests.support.run_files import read_json, read_lines, write_rows

SHAPE = {"heads": 4, "kv_heads": 2, "max_positions": 32}
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A model that recipe.rm has trained, with its own token ids and a chat template."""
    folder = tmp_path_factory.mktemp("rm")
    base = write_tiny_model(folder / "base", hidden=16, layers=1, seed=1, **SHAPE)
    tokenizer = read_json(base / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["A"] = vocabulary["A"], vocabulary["1"]
    (base / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    data = write_rows(folder / "pairs.jsonl", PAIRS)
    config = {"model": str(base), "data": {"train": data}, "batch_size": 4, "epochs": 10.0, "optimizer": {"lr": 1e-2}}
    stage("rm", folder, config).run()
    return folder / "model"


def judged_by_model(folder, model, **config):
    job = policy_job(folder, "grpo", **({"reward": {"model": str(model)}} | config))
    object.__setattr__(job.workloads["REWARD"], "class_", "ModelRewardWorkload")
    return job


@torch.no_grad()
def plain_score(model, tokens):
    """A score that transformers alone computes."""
    module = AutoModelForSequenceClassification.from_pretrained(model)
    return float(module(torch.tensor([tokens])).logits[0, 0])


def rollouts(prompts, completions):
    tokens = Ragged.from_rows([[1, 2]] * len(prompts), dtype=np.int64)
    mask = tokens.like(np.array([False, True] * len(prompts)))
    answers = [None] * len(prompts)
    columns = {"prompt": prompts, "completion": completions, "answer": answers, "extra_info": answers}
    return Batch({"tokens": tokens, "action_mask": mask, **columns})


def workload(model):
    judge = ModelRewardWorkload(None, {})
    judge.init_verifier(RewardConfig(model=str(model)), EngineConfig(threads=1))
    return judge


@pytest.mark.slow
@pytest.mark.feature(109)
def test_run_has_the_rewards_of_its_reward_model(reward_model, tmp_path):
    folder, steps = finished(judged_by_model(tmp_path, reward_model, steps=2))
    assert all(step["samples/failed"] == 0 for step in steps)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    samples = read_lines(folder / "samples.jsonl")
    assert len({sample["reward"] for sample in samples}) > 8
    for sample in samples[:16]:
        encoded = encode_raw(tokenizer, sample["prompt"], sample["completion"])
        assert sample["reward"] == pytest.approx(plain_score(reward_model, encoded.tokens), abs=1e-5)


@pytest.mark.feature(109)
def test_score_is_the_same_alone_and_beside_longer_ones(reward_model):
    judge = workload(reward_model)
    talk = [{"role": "user", "content": "1+1="}]
    prompts, completions = ["1+1=", talk, "10+10=", talk], ["2", "2", "20, or so it seems", "it is 2"]
    scored = judge.score(rollouts(prompts, completions))
    assert scored.objects("error") == [None] * 4
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        alone = judge.score(rollouts([prompt], [completion])).dense("reward")
        np.testing.assert_allclose(scored.dense("reward")[row], alone[0], atol=1e-5)
        side = "messages" if isinstance(prompt, list) else "prompt"
        chosen, _ = encode_pair(judge._engine.tokenizer, {side: prompt, "chosen": completion, "rejected": "no"})
        assert alone[0] == pytest.approx(plain_score(reward_model, chosen.tokens), abs=1e-5)
    judge.close()


def test_reward_model_sees_the_tools_of_a_row(reward_model):
    judge = workload(reward_model)
    judge._engine.tokenizer.chat_template = (
        "{% if tools %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    talk, info = [{"role": "user", "content": "1+1="}], {"chat_template_kwargs": {"tools": [{"name": "add"}]}}
    texts = [judge._engine.tokenizer.decode(judge._encode(talk, "2", extra)) for extra in (info, {}, None)]
    assert texts == ["T1+1=2", "1+1=2", "1+1=2"]
    judge.close()


@pytest.mark.feature(109)
def test_completion_too_long_for_the_reward_model_fails_alone(reward_model):
    judge = workload(reward_model)
    scored = judge.score(rollouts(["1+1=", "1+1="], ["2" * 40, "2"]))
    assert scored.objects("error") == ["the reward model reads 32 tokens at most, not 45", None]
    assert np.isnan(scored.dense("reward")).tolist() == [True, False]
    judge._engine.evaluate = lambda batch: batch.with_columns(
        scores=batch.ragged("tokens").like(np.full(len(batch.ragged("tokens").values), np.inf, dtype=np.float32))
    )
    scored = judge.score(rollouts(["1+1="], ["2"]))
    assert scored.objects("error") == ["the reward model's score is inf"]
    assert np.isnan(scored.dense("reward")).all()
    judge.close()


def problems_of(job):
    with pytest.raises(InvalidJob) as caught:
        check_job(job, local=True)
    return {problem.where: problem.what for problem in caught.value.errors}


def test_unfit_reward_model_is_refused(reward_model, tmp_path):
    write_inputs(tmp_path)
    problems = problems_of(policy_job(tmp_path, "grpo", reward={"model": str(reward_model)}))
    assert problems["workload.reward.class"] == (
        "RewardWorkload calls reward.function: with reward.model it has to be ModelRewardWorkload"
    )
    problems = problems_of(
        judged_by_model(tmp_path, reward_model, reward={"function": "tests.support.policy_rewards:low"})
    )
    assert "is required by ModelRewardWorkload" in problems["config.reward.model"]
    problems = problems_of(judged_by_model(tmp_path, tmp_path / "model"))
    assert "holds Qwen2ForCausalLM, which gives no score" in problems["config.reward.model"]
    assert "no such folder: ./none" in problems_of(judged_by_model(tmp_path, "./none"))["config.reward.model"]
    both = {"model": str(reward_model), "function": "tests.support.policy_rewards:low"}
    problems = problems_of(judged_by_model(tmp_path, reward_model, reward=both))
    assert "is not called if there is a reward.model" in problems["config.reward.function"]
    problems = problems_of(judged_by_model(tmp_path, reward_model, engine={"train": "megatron"}))
    assert "a reward model must not have" in problems["config.engine.train"]
