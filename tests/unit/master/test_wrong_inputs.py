# SPDX-License-Identifier: Apache-2.0
"""Mistakes of newcomers that the job, its data, the tokenizer and ``config.json`` decide: ``check`` answers each."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from transformers import (
    GptOssConfig,
    MambaConfig,
    Qwen2_5_VLConfig,
    Qwen3NextConfig,
)

from dlrover.python.rl.cli.commands import main
from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine

WORKLOADS = "dlrover.python.rl.recipe.workloads"
CLASSES = {"actor": "ActorWorkload", "rollout": "RolloutWorkload", "reward": "RewardWorkload"}
OFFLINE = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "rm": "RMTrainer"}


class PickyEngine(TorchRolloutEngine):
    """An engine of a user, which states what it cannot have."""

    info = EngineInfo(find_model_fault=lambda content, head: f"it is a {content['model_type']} with a {head} head")


def job(recipe, **config):
    roles = {"grpo": list(CLASSES), "dpo": ["actor", "reference"]}.get(recipe, ["actor"])
    classes = {**CLASSES, "reference": "ReferenceWorkload", **({"actor": "ScorerWorkload"} if recipe == "rm" else {})}
    trainer = {"module": f"dlrover.python.rl.recipe.{recipe}", "class": OFFLINE.get(recipe, "GRPOTrainer")}
    return {
        "trainer": {**trainer, "device_type": "CPU", "device_per_node": 4},
        "workload": {role: {"module": WORKLOADS, "class": classes[role]} for role in roles},
        "config": {"model": "model", "data": {"train": "good.jsonl"}, **config},
    }


LONG = "12 + 34 = " * 30
PAIRS = {"prompt": "1+1=", "chosen": "2" * 300, "rejected": "3"}
FILES = {
    "good": [{"prompt": f"1+{row}=", "answer": str(row + 1), "response": str(row + 1)} for row in range(40)],
    "one": [{"prompt": "1+1=", "answer": "2"}],
    "question": [{"question": f"1+{row}=", "solution": str(row + 1)} for row in range(40)],
    "sharegpt": [{"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]}] * 40,
    "openai": [{"conversations": [{"role": "user", "content": "1+1="}]}] * 40,
    "alpaca": [{"instruction": "Add.", "input": f"1 {row}", "output": str(row + 1)} for row in range(40)],
    "worked": [{"problem": f"1+{row}=", "solution": "So 2.", "answer": "2"} for row in range(40)],
    "verl": [{"prompt": f"1+{row}=", "reward_model": {"ground_truth": "2"}} for row in range(40)],
    "bare": [{"prompt": f"1+{row}=", "solution": "2"} for row in range(40)],
    "partly": [{"prompt": f"{row}", **({"answer": "2"} if row != 6 else {})} for row in range(40)],
    "long": [{"prompt": LONG if row == 1 else f"{row}", "answer": "2", "response": "2"} for row in range(40)],
    "talk": [{"messages": [{"role": "user", "content": LONG[:250] if row == 1 else "1"}]} for row in range(40)],
    "pairs": [{**PAIRS, "prompt": f"{row:02}"} for row in range(40)],
    "empty": [],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs")
    write_tiny_model(path / "model", hidden=32, layers=1, max_positions=256)
    kinds = {"gptoss": GptOssConfig, "qwen3next": Qwen3NextConfig, "qwen2.5vl": Qwen2_5_VLConfig, "mamba": MambaConfig}
    for name, kind in kinds.items():
        make_byte_tokenizer().save_pretrained(path / name)
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_local_experts": 2, "num_experts": 2}
        config = kind(text_config=sizes) if name == "qwen2.5vl" else kind(**sizes)
        config.save_pretrained(path / name)
        (path / name / "model.safetensors").write_bytes((path / "model" / "model.safetensors").read_bytes())
    (path / "new").mkdir()
    for name in ("tokenizer.json", "model.safetensors"):
        (path / "new" / name).write_bytes((path / "model" / name).read_bytes())
    (path / "new" / "config.json").write_text(json.dumps({"model_type": "llama9", "hidden_size": 8}))
    for name, content in {"broken": "{", "untyped": '{"hidden_size": 8}'}.items():
        (path / name).mkdir()
        for file in ("tokenizer.json", "model.safetensors"):
            (path / name / file).write_bytes((path / "model" / file).read_bytes())
        (path / name / "config.json").write_text(content)
    for name, rows in FILES.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "broken.jsonl").write_text('{"prompt": "1" "answer": "2"}\n')
    return path


@pytest.fixture
def check(folder, monkeypatch, capfd, kept_logger):
    """Check a job in this process; gives the exit code and what is printed. Nothing is left in the folder."""
    monkeypatch.chdir(folder)

    def run(content, *overrides):
        Path("job.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        before = sorted(os.listdir())
        monkeypatch.setattr(sys, "argv", ["dlrover-rl", "check", "--local", "job.yaml", *overrides])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
        assert sorted(os.listdir()) == before
        return code, "".join(capfd.readouterr())

    return run


NEEDS = "has no 'answer', which reward.function 'dlrover.python.rl.environment.verifiers:{}' needs"
VERIFIERS = "dlrover.python.rl.environment.verifiers"
WRONG = {
    "a section": (["optimiser.lr=1"], "config.optimiser: unknown key 'optimiser'; did you mean 'optimizer'?"),
    "TRL's name of a length": (["rollout.max_tokens=8"], "did you mean 'max_new_tokens'?"),
    "a key of PEFT": (["engine.lora.r=8"], "config.engine.lora.r: unknown key; here it is engine.lora.rank"),
    "text for a number": (["steps=many"], "config.steps: input should be a valid integer, got 'many'"),
    "an algorithm": (["algorithm.name=grp0"], "did you mean 'grpo'?"),
    "an algorithm of examples": (["algorithm.name=dpoo"], "did you mean 'dapo'?"),
    "an algorithm by its name alone": (["algorithm=dapo"], "algorithm.name=dapo"),
    "a model": (["model=modell"], "config.model: no such folder: modell; did you mean 'model'?"),
    "more than the machine has": (["workload.rollout.num=100"], "do not fit"),
    "a damaged configuration of a model": (["model=broken"], "broken/config.json is empty or no JSON object"),
    "a configuration without a type": (["model=untyped"], "config.model: its config.json has no 'model_type'"),
    "a worked solution": (
        ["data.train=worked.jsonl"],
        "it has problem, solution, answer: write data.keys.prompt=problem (the same",
    ),
    "verl's rows": (["data.train=verl.jsonl"], "copy verl's reward_model.ground_truth to a column 'answer'"),
    "question": (
        ["data.train=question.jsonl"],
        "question.jsonl:1: has no 'prompt' or 'messages'; it has question, solution: write data.keys.prompt=question"
        " data.keys.answer=solution (the same in 39 more rows)",
    ),
    "ShareGPT": (
        ["data.train=sharegpt.jsonl"],
        "its 'conversations' are ShareGPT's, which no key reads: write 'messages' with 'role' and 'content' instead"
        " of 'from' (human: user, gpt: assistant) and 'value' (the same in 39 more rows)",
    ),
    "conversations of roles": (["data.train=openai.jsonl"], "it has conversations: write data.keys.messages=conv"),
    "Alpaca": (["data.train=alpaca.jsonl"], "write data.keys.prompt=instruction data.keys.answer=output, and join"),
    "a column of another name": (
        ["+data.keys.prompt=quesion", "data.train=question.jsonl"],
        "did you mean 'question'?",
    ),
    "no rows": (["data.train=empty.jsonl"], "config.data.train: empty.jsonl: holds no rows"),
    "no JSON": (["data.train=broken.jsonl"], "broken.jsonl:1: not JSON: Expecting ',' delimiter at column 16"),
    "a file": (["data.train=goood.jsonl"], "no such file; did you mean 'good.jsonl'?"),
    "no answers": (["data.train=bare.jsonl"], NEEDS.format("exact") + "; it has prompt, solution: write data.keys.ans"),
    "no answers for exact": (["data.train=bare.jsonl", f"reward.function={VERIFIERS}:exact"], NEEDS.format("exact")),
    "no answers for gsm8k": (["data.train=bare.jsonl", f"reward.function={VERIFIERS}:gsm8k"], NEEDS.format("gsm8k")),
    "no answers for math": (["data.train=bare.jsonl", f"reward.function={VERIFIERS}:math"], NEEDS.format("math")),
    "a row without an answer": (["data.train=partly.jsonl"], "partly.jsonl:7: " + NEEDS.format("exact")),
    "no tests": ([f"reward.function={VERIFIERS}.code:python_tests"], "has no 'tests', which reward.function"),
    "a reward": (["reward.function=test_wrong_inputs:jobb"], "did you mean 'job'"),
    "a prompt beyond the model": (
        ["data.train=long.jsonl"],
        "long.jsonl:2: 300 tokens leave no space for new ones: a sequence of 301 tokens does not fit the model's 256",
    ),
    "a conversation beyond the model": (
        ["data.train=talk.jsonl", f"reward.function={VERIFIERS}:unjudged"],
        "talk.jsonl:2: 2",
    ),
    "a prompt beyond its limit": (
        ["data.train=long.jsonl", "data.max_prompt_tokens=200"],
        ":2: 300 tokens, 200 at most",
    ),
    "completions beyond the model": (
        ["rollout.max_new_tokens=100000"],
        "config.rollout.max_new_tokens: 100000, but a sequence has at most 256 tokens with its prompt: write",
    ),
    "an engine's limit": (
        ["engine.rollout=vllm", "+engine.rollout_options.max_model_len=100", "rollout.max_new_tokens=100"],
        "100, but a sequence has at most 100 tokens",
    ),
    "images": (
        ["model=qwen2.5vl"],
        "config.model: Transformers has no AutoModelForCausalLM of type 'qwen2_5_vl': choose",
    ),
    "linear attention": (
        ["model=qwen3next"],
        "of type 'qwen3_next' keeps a state, not keys and values: the rollout",
    ),
    "no attention": (["model=mamba"], "of type 'mamba' keeps a state"),
    "megatron": (["model=gptoss", "engine.train=megatron"], "megatron cannot run this model: its type is 'gpt_oss'"),
    "a type of later versions": (["model=new"], "has no model of type 'llama9'"),
    "a user's engine": (
        ["engine.rollout=test_wrong_inputs:PickyEngine"],
        "config.model: it is a qwen2 with a causal head",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_check_wrong_input_is_one_line_with_the_right_form(check, case):
    overrides, expected = WRONG[case]
    code, message = check(job("grpo"), *overrides)
    assert code == 2, message
    (line,) = [line for line in message.splitlines() if expected in line]
    if case not in ("an engine's limit", "megatron"):  # neither backend is installed everywhere
        assert message.splitlines()[0] == "1 error in the job:", message


OFFLINE_WRONG = [
    ("sft", {"data": {"train": "question.jsonl"}}, "write data.keys.prompt=question data.keys.response=solution"),
    ("sft", {"data": {"train": "alpaca.jsonl"}}, "write data.keys.prompt=instruction data.keys.response=output, and"),
    (
        "sft",
        {"data": {"train": "good.jsonl", "max_length": 4096}},
        "4096, but the model has 256 positions: write at mo",
    ),
    ("sft", {"data": {"train": "long.jsonl"}}, "config.data.max_length: 512, but the model has 256 positions: write"),
    ("sft", {"data": {"train": "long.jsonl", "max_length": 99, "over_long": "refuse"}}, ":2: 302 tokens, 99 at most"),
    (
        "dpo",
        {"data": {"train": "pairs.jsonl", "max_length": 256, "over_long": "refuse"}},
        "pairs.jsonl:1: 303 tokens, 256 at most (the same in 39 more rows)",
    ),
    ("rm", {"data": {"train": "pairs.jsonl"}}, "config.data.max_length: 512, but the model has 256 positions"),
]


@pytest.mark.parametrize(("recipe", "config", "expected"), OFFLINE_WRONG)
def test_check_wrong_examples_are_refused(check, recipe, config, expected):
    code, message = check(job(recipe, **config))
    assert (code, message.splitlines()[0]) == (2, "1 error in the job:"), message
    assert message.count(expected) == 1, message


GOOD = [
    (
        "grpo",
        {"data": {"train": "one.jsonl"}},
        "prompts_per_step=16 is above the 1 rows of one.jsonl, each 16.0 times",
    ),
    (
        "grpo",
        {"prompts_per_step": 100},
        "prompts_per_step=100 is above the 40 rows of good.jsonl, each 2.5 times in a",
    ),
    ("grpo", {"data": {"train": "long.jsonl", "max_prompt_tokens": 200, "over_long": "drop"}}, "each step"),
    ("grpo", {"data": {"train": "question.jsonl", "keys": {"prompt": "question", "answer": "solution"}}}, "each step"),
    ("grpo", {"data": {"train": "bare.jsonl"}, "reward": {"function": f"{VERIFIERS}:unjudged"}}, "each step"),
    (
        "sft",
        {"data": {"train": "long.jsonl", "max_length": 99}},
        "1 rows above data.max_length=99 are cut; long.jsonl:2",
    ),
    ("sft", {"model": "qwen3next"}, "each step"),
    ("grpo", {"model": "gptoss"}, "each step"),
]


@pytest.mark.parametrize(("recipe", "config", "expected"), GOOD)
def test_check_usable_input_passes_with_a_note(check, recipe, config, expected):
    code, message = check(job(recipe, **config))
    assert code == 0, message
    assert expected in message


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("config:\n", "config:\n\t", "tab"),
        ("train: good", "train: ${HOME}/good", "${oc.env:HOME}"),
        ("train: good", "train: $HOME/good", "${oc.env:HOME}"),
        ("  rollout:", "  rolout:", "the job has 'rolout'; did you mean 'rollout'?"),
    ],
)
def test_check_wrong_file_is_named(check, before, after, expected):
    text = yaml.safe_dump(job("grpo"))
    assert before in text
    code, message = check(text.replace(before, after))
    assert code == 2
    assert expected in message
