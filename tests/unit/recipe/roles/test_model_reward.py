# SPDX-License-Identifier: Apache-2.0
"""A trained reward model scores completions."""

from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.pairs import encode_pair
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.master.job import check_job
from dlrover.python.rl.recipe.base.config import EngineConfig, RewardConfig
from dlrover.python.rl.recipe.roles.reward import ModelRewardWorkload
from tests.support.example_jobs import PAIRS, stage
from tests.support.policy_jobs import policy_job, swap_tokens, write_inputs
from tests.support.run_files import write_rows

SHAPE = {"heads": 4, "kv_heads": 2, "max_positions": 32}
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A model that recipe.rm has trained, with its own token ids and a chat template."""
    folder = tmp_path_factory.mktemp("rm")
    base = write_tiny_model(folder / "base", hidden=16, layers=1, seed=1, **SHAPE)
    swap_tokens(base, "1", "A")
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


@pytest.fixture
def judge(reward_model):
    workload = ModelRewardWorkload(None, {})
    workload.init_verifier(RewardConfig(model=str(reward_model)), EngineConfig(threads=1))
    with closing(workload):
        yield workload


@pytest.mark.feature(109)
def test_score_is_the_same_alone_and_beside_longer_ones(judge, reward_model):
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


def test_reward_model_sees_the_tools_of_a_row(judge):
    template = "{% if tools %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    judge._engine.tokenizer.chat_template = template
    talk, info = [{"role": "user", "content": "1+1="}], {"chat_template_kwargs": {"tools": [{"name": "add"}]}}
    texts = [judge._engine.tokenizer.decode(judge._encode(talk, "2", extra)) for extra in (info, {}, None)]
    assert texts == ["T1+1=2", "1+1=2", "1+1=2"]


@pytest.mark.feature(109)
def test_completion_too_long_for_the_reward_model_fails_alone(judge):
    scored = judge.score(rollouts(["1+1=", "1+1="], ["2" * 40, "2"]))
    assert scored.objects("error") == ["the reward model reads 32 tokens at most, not 45", None]
    assert np.isnan(scored.dense("reward")).tolist() == [True, False]
    infinite = lambda tokens: tokens.like(np.full(len(tokens.values), np.inf, dtype=np.float32))  # noqa: E731
    judge._engine.evaluate = lambda batch: batch.with_columns(scores=infinite(batch.ragged("tokens")))
    scored = judge.score(rollouts(["1+1="], ["2"]))
    assert scored.objects("error") == ["the reward model's score is inf"]
    assert np.isnan(scored.dense("reward")).all()


LOW = "tests.support.policy_rewards:low"


@pytest.mark.parametrize(
    ("config", "where", "message"),
    [
        ({"reward": {"function": LOW}}, "reward.model", "is required by ModelRewardWorkload"),
        ({"reward": {"model": "{folder}/model"}}, "reward.model", "holds Qwen2ForCausalLM, which gives no score"),
        ({"reward": {"model": "./none"}}, "reward.model", "no such folder: ./none"),
        ({"reward": {"model": "{model}", "function": LOW}}, "reward.function", "is not called if there is a reward.m"),
        ({"reward": {"model": "{model}"}, "engine": {"train": "megatron"}}, "engine.train", "a reward model must not"),
    ],
)
def test_unfit_reward_model_is_refused(reward_model, tmp_path, config, where, message):
    write_inputs(tmp_path)
    reward = {key: text.format(folder=tmp_path, model=reward_model) for key, text in config["reward"].items()}
    with pytest.raises(InvalidJob) as caught:
        check_job(judged_by_model(tmp_path, reward_model, **{**config, "reward": reward}), local=True)
    assert message in {problem.where: problem.what for problem in caught.value.errors}[f"config.{where}"]


def test_reward_model_needs_its_own_workload(reward_model, tmp_path):
    with pytest.raises(InvalidJob, match=r"workload\.reward\.class: RewardWorkload calls reward\.function: with"):
        check_job(policy_job(tmp_path, "grpo", reward={"model": str(reward_model)}), local=True)
