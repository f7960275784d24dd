# SPDX-License-Identifier: Apache-2.0
"""Mistakes of newcomers: ``check`` answers each, and a command in its own process shows no frame of the package."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import yaml
from transformers import GptOssConfig, Qwen2_5_VLConfig, Qwen3NextConfig

from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, write_tiny_model
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from tests.support.commands import run_here
from tests.support.held_job import wait_for

WORKLOADS = "dlrover.python.rl.recipe.workloads"
CLASSES = {"actor": "ActorWorkload", "rollout": "RolloutWorkload", "reward": "RewardWorkload"}
OFFLINE = {"sft": "SFTTrainer", "dpo": "DPOTrainer"}


class PickyEngine(TorchRolloutEngine):
    """An engine of a user, which states what it cannot have."""

    info = EngineInfo(find_model_fault=lambda content, head: f"it is a {content['model_type']} with a {head} head")


def judge_nothing():
    return 0.0


def job(recipe):
    roles = {"grpo": list(CLASSES), "dpo": ["actor", "reference"]}.get(recipe, ["actor"])
    classes = {**CLASSES, "reference": "ReferenceWorkload"}
    trainer = {"module": f"dlrover.python.rl.recipe.{recipe}", "class": OFFLINE.get(recipe, "GRPOTrainer")}
    return {
        "trainer": {**trainer, "device_type": "CPU", "device_per_node": 4},
        "workload": {role: {"module": WORKLOADS, "class": classes[role]} for role in roles},
        "config": {"model": "model", "data": {"train": "good.jsonl"}},
    }


LONG = "12 + 34 = " * 30
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
    "pairs": [{"prompt": f"{row:02}", "chosen": "2" * 300, "rejected": "3"} for row in range(40)],
}


CONFIGS = {
    "new": '{"model_type": "llama9"}', "broken": "{", "untyped": '{"hidden_size": 8}', "runs/tiny": "{}",
    "bare": '{"model_type": "llama"}',
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs")
    write_tiny_model(path / "model", hidden=32, layers=1, max_positions=256)
    kinds = {"gptoss": GptOssConfig, "qwen3next": Qwen3NextConfig, "qwen2.5vl": Qwen2_5_VLConfig}
    for name, kind in kinds.items():
        make_byte_tokenizer().save_pretrained(path / name)
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_local_experts": 2, "num_experts": 2}
        config = kind(text_config=sizes) if name == "qwen2.5vl" else kind(**sizes)
        config.save_pretrained(path / name)
        (path / name / "model.safetensors").write_bytes((path / "model" / "model.safetensors").read_bytes())
    for name, content in CONFIGS.items():
        (path / name).mkdir(parents=True)
        for file in ("tokenizer.json", "model.safetensors") if name != "bare" else ():
            (path / name / file).write_bytes((path / "model" / file).read_bytes())
        (path / name / "config.json").write_text(content)
    for name, rows in FILES.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "mixed.jsonl").write_text('{"prompt": "1", "answer": \n{"promt": "1", "answer": "9"}\n')
    return path


@pytest.fixture
def check(folder, monkeypatch, capfd, kept_logger):
    """Check a job in this process; gives the exit code and what is printed. Nothing is left in the folder."""
    monkeypatch.chdir(folder)

    def run(content, *overrides):
        Path("job.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        before = sorted(os.listdir())
        code, out, err = run_here(monkeypatch, capfd, "check", "--local", "job.yaml", *overrides)
        assert sorted(os.listdir()) == before
        return code, out + err

    return run


VLLM_LIMIT = "engine.rollout=vllm +engine.rollout_options.max_model_len=100"
VERIFIERS = "dlrover.python.rl.environment.verifiers"
NEEDS = f"has no 'answer', which reward.function '{VERIFIERS}:{{}}' needs"
SHARE_GPT = "its 'conversations' are ShareGPT's, which no key reads: write 'messages' with 'role' and 'content' instead"
WRONG = [
    # keys and values
    ("grpo", "optimiser.lr=1", "config.optimiser: unknown key 'optimiser'; did you mean 'optimizer'?"),
    ("grpo", "actor_rollout_ref.actor.clip_ratio=0.2", "here it is algorithm.clip_low and algorithm.clip_high"),
    ("grpo", "train_data.path=other.jsonl", "other.jsonl: no such file"),
    ("grpo", "algorithm.name=dpoo", "did you mean 'dapo'?"),
    ("grpo", "algorithm=dapo", "algorithm.name=dapo"),
    ("grpo", "name=a/b_c", "such as 'a-b-c'"),
    # models
    ("grpo", "model=modell", "config.model: no such folder: modell; did you mean 'model'?"),
    ("grpo", "model=runs/teacher", "no such folder: runs/teacher; 'runs' is a folder here: to use the hub's, do"),
    ("grpo", "model=tiny.gguf", "config.model: no such folder: tiny.gguf"),
    ("grpo", "model=bare", "config.model: bare holds no tokenizer: it has none of tokenizer.json, "),
    ("grpo", "model=broken", "broken/config.json is empty or no JSON object"),
    ("grpo", "model=untyped", "config.model: its config.json has no 'model_type'"),
    ("grpo", "model=new", "has no model of type 'llama9'"),
    ("grpo", "model=qwen2.5vl", "config.model: Transformers has no AutoModelForCausalLM of type 'qwen2_5_vl': choose"),
    ("grpo", "model=qwen3next", "of type 'qwen3_next' keeps a state, not keys and values: the rollout"),
    ("grpo", "model=gptoss engine.train=megatron", "megatron cannot run this model: its type is 'gpt_oss'"),
    ("grpo", "engine.rollout=test_wrong_inputs:PickyEngine", "config.model: it is a qwen2 with a causal head"),
    # data
    ("grpo", "data.train=worked.jsonl", "has problem, solution, answer: write data.keys.prompt=problem (the same"),
    ("grpo", "data.train=verl.jsonl", "copy verl's reward_model.ground_truth to a column 'answer'"),
    ("grpo", "data.train=question.jsonl", ":1: has no 'prompt' or 'messages'; it has question, solution: write data.k"),
    ("grpo", "data.train=sharegpt.jsonl", f"{SHARE_GPT} of 'from' (human: user, gpt: assistant) and 'value' (the same"),
    ("grpo", "data.train=openai.jsonl", "it has conversations: write data.keys.messages=conv"),
    ("grpo", "data.train=alpaca.jsonl", "write data.keys.prompt=instruction data.keys.answer=output, and join"),
    ("grpo", "data.train=bare.jsonl", f"{NEEDS.format('exact')}; it has prompt, solution: write data.keys.ans"),
    ("grpo", "data.train=partly.jsonl", f"partly.jsonl:7: {NEEDS.format('exact')}"),
    ("grpo", f"reward.function={VERIFIERS}.code:python_tests", "has no 'tests', which reward.function"),
    ("grpo", "reward.function=test_wrong_inputs:judge_nothing", "takes no completion: it is called as (completion, an"),
    # lengths
    ("grpo", "data.train=long.jsonl", "long.jsonl:2: 300 tokens leave no space for new ones: a sequence of 301"),
    ("grpo", f"data.train=talk.jsonl reward.function={VERIFIERS}:unjudged", "talk.jsonl:2: 2"),
    ("grpo", "data.train=long.jsonl data.max_prompt_tokens=200", ":2: 300 tokens, 200 at most"),
    ("grpo", "rollout.max_new_tokens=100000", "100000, but a sequence has at most 256 tokens with its prompt: write"),
    ("grpo", f"{VLLM_LIMIT} rollout.max_new_tokens=100", "100, but a sequence has at most 100 tokens"),
    ("sft", "data.train=question.jsonl", "write data.keys.prompt=question data.keys.response=solution"),
    ("sft", "data.train=alpaca.jsonl", "write data.keys.prompt=instruction data.keys.response=output, and"),
    ("sft", "data.max_length=4096", "4096, but the model has 256 positions: write at mo"),
    ("sft", "data.train=long.jsonl", "config.data.max_length: 512, but the model has 256 positions: write"),
    ("sft", "data.train=long.jsonl data.max_length=99 data.over_long=refuse", ":2: 302 tokens, 99 at most"),
    ("dpo", "data.train=pairs.jsonl data.max_length=256 data.over_long=refuse", "pairs.jsonl:1: 303 tokens, 256 at"),
]


@pytest.mark.parametrize(("recipe", "overrides", "expected"), WRONG)
def test_check_refuses_a_wrong_input_in_one_line(check, recipe, overrides, expected):
    code, message = check(job(recipe), *overrides.split())
    assert code == 2, message
    (line,) = [line for line in message.splitlines() if expected in line]
    if not ("megatron" in overrides or VLLM_LIMIT in overrides):  # neither backend is installed everywhere
        assert message.splitlines()[0] == "1 error in the job:", message


GOOD = [
    ("grpo", "data.train=one.jsonl", "prompts_per_step=16 exceeds the 1 rows of one.jsonl: 16.0 uses of each per step"),
    ("grpo", "prompts_per_step=100", "prompts_per_step=100 exceeds the 40 rows of good.jsonl: 2.5 uses of each per"),
    ("grpo", "data.train=long.jsonl data.max_prompt_tokens=200 data.over_long=drop", "each step"),
    ("grpo", "data.train=question.jsonl data.keys.prompt=question data.keys.answer=solution", "each step"),
    ("grpo", f"data.train=bare.jsonl reward.function={VERIFIERS}:unjudged", "each step"),
    ("sft", "data.train=long.jsonl data.max_length=99", "1 rows above data.max_length=99 are cut; long.jsonl:2"),
    ("sft", "model=qwen3next", "each step"),
    ("grpo", "model=gptoss", "each step"),
]


@pytest.mark.parametrize(("recipe", "overrides", "expected"), GOOD)
def test_check_usable_input_passes_with_a_note(check, recipe, overrides, expected):
    code, message = check(job(recipe), *overrides.split())
    assert code == 0, message
    assert expected in message


@pytest.mark.parametrize("variable", ["${HOME}", "$HOME"])
def test_check_variable_of_a_shell_is_answered_with_its_resolver(check, variable):
    code, message = check(yaml.safe_dump(job("grpo")).replace("train: good", f"train: {variable}/good"))
    assert code == 2
    assert "${oc.env:HOME}" in message


def test_check_finds_problems_of_every_kind_at_once(check):
    content = job("grpo")
    content["trainer"]["nod_number"] = 2
    content["workload"]["reward"]["class"] = "RewardWorkloads"
    content["workload"]["rollout"]["num"] = 9
    content["workload_group"] = [{"actor": 1, "refrence": 1}]
    overrides = "prompts_per_step=-3 data.train=mixed.jsonl data.eval=goood.jsonl model=./none"
    code, message = check(content, *overrides.split(), "+stepss=3", "+rollout.temperature=0")
    assert code == 2
    lines = (
        "trainer.nod_number: ", "workload_group.0.refrence: ", "has no class 'RewardWorkloads'; did you mean",
        "impossible placement: ACTOR x 1, REWARD x 1, ROLLOUT x 9 do not fit 1 node(s) x 4 CPU = 4",
        "config.prompts_per_step: ", "config.stepss: ", "config.rollout.temperature: ", "mixed.jsonl:1: not JSON",
        "goood.jsonl: no such file; did you mean 'good.jsonl'?", "mixed.jsonl:2: unknown key 'promt'",
        "config.model: no such folder: ./none",
    )  # fmt: skip
    assert [line for line in lines if line not in message] == [], message


def test_check_shows_overridden_keys_and_with_full_all(check):
    keys = ("seed=7", "keep.save_every=3", "learning_rate=0.5", "kl.type=reward")  # the last two of other libraries
    code, message = check(job("grpo"), *keys)
    assert code == 0
    assert "  seed: 7\n" in message and "save_every: 3" in message
    assert "max_staleness" not in message
    code, message = check(job("grpo"), "--full", *keys)
    assert code == 0
    lines = (
        "  seed: 7\n", "    max_staleness: 0\n", "    device: cpu\n", "    lr: 0.5\n", "    kl_in: reward\n",
        "algorithm:\n    name: grpo\n    clip_low: 0.2\n", "engines: train fsdp2, rollout torch, on cpu in fp32",
        "model: model, 20.7 k parameters; 82.9 kB of weights to generate, 332 kB to train, activations not counted",
        "each step: 16 prompts x 8 samples = 128 of up to 64 new tokens; 1 update of 128",
    )  # fmt: skip
    assert [line for line in lines if line not in message] == []


@pytest.mark.parametrize(("overrides", "is_warned"), [("", True), ("engine.device=cpu", False)])
def test_check_warns_of_a_gpu_job_without_a_gpu(check, overrides, is_warned):
    code, message = check(job("grpo"), "trainer.device_type=GPU", *overrides.split())
    assert code == 0
    assert ("trainer.device_type is GPU, but this process has no GPU and computes on the CPU" in message) is is_warned


# -- from outside -----------------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[3]
CLI = "from dlrover.python.rl.cli.entry import main; main()"
NO_HUB = "http://127.0.0.1:9"
DEADLINE_S = 200.0
OWN_FRAME = re.compile(r'File ".*dlrover/python/rl/')
slow = pytest.mark.slow

REWARDS = """
def raises(completion, answer, extra_info):
    return {}[answer]

def raises_a_lot(completion, answer):
    raise ValueError("\\n".join(40 * str(line) for line in range(20_000)))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A working directory: a job, its data and its model."""
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model", hidden=32, layers=1)
    rows = [json.dumps({"prompt": f"1+{row}=", "answer": str(row + 1)}) for row in range(20)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    sizes = {"steps": 1, "prompts_per_step": 4, "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4}}
    described = job("grpo")
    described["config"] |= {**sizes, "data": {"train": "train.jsonl", "eval_rows": 4}}
    (folder / "job.yaml").write_text(yaml.safe_dump(described))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def start(folder, *command):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_ENDPOINT": NO_HUB}
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=env, stdout=PIPE, stderr=STDOUT, text=True)


def answer(folder, *command):
    """The exit code, and all that is printed; never a frame of the package's own."""
    process = start(folder, *command)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert not OWN_FRAME.search(printed), printed
    return process.returncode, printed


def cli(folder, line):
    return answer(folder, "-c", CLI, *line.split(" "))


def recipe(folder, line, *launcher):
    data = "model=model data.train=train.jsonl data.eval_rows=4 steps=1 prompts_per_step=4"
    sizes = "rollout.samples_per_prompt=2 rollout.max_new_tokens=4"
    return answer(folder, *launcher, "-m", "dlrover.python.rl.recipe.grpo", *f"{data} {sizes} {line}".split())


def errors_in(printed):
    """The lines of a refusal, which come last."""
    assert printed.count("in the job:\n") == 1, printed
    return printed.partition(" in the job:\n")[2].removesuffix("\n").split("\n")


NO_MODEL = "no folder 'some-org/none', and the hub cannot be reached: "
NO_DATA = "config.data.train: some-org/none: is no file or folder, and the hub cannot be reached: "


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("submit --job_name a --rl_config jop.yaml", "--rl_config: no such file: jop.yaml; did you mean 'job.yaml'?"),
        pytest.param("run job.yaml data.train=some-org/none", NO_DATA, marks=slow),
        pytest.param("check --hub job.yaml data.train=some-org/none", NO_DATA, marks=slow),
        pytest.param("check --hub job.yaml model=some-org/none", f"config.model: {NO_MODEL}", marks=slow),
    ],
)
def test_command_refuses_a_wrong_input_in_one_line(inputs, line, expected):
    code, printed = cli(inputs, line)
    assert code == 2, printed
    (error,) = errors_in(printed)
    assert error.startswith(f"  - {expected}")


@slow
def test_a_check_looks_up_no_name_on_the_hub(inputs):
    code, printed = cli(inputs, "check --local job.yaml model=some-org/none data.train=other/none")
    assert code == 0, printed
    for line in ("model: some-org/none", "data: other/none"):
        assert f"\n{line}, on the hub: not looked up (check --hub does)\n" in printed


@slow
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model=some-org/none", "no model at 'some-org/none': it is not a folder, and the hub cannot be reached: "),
        ("data.max_prompt_tokens=1 data.over_long=drop", "DataError: config.data.max_prompt_tokens: leaves no prompt"),
        ("reward.function=rewards:raises", "DataError: step 1: the reward function failed on all 8 samples, last with"),
    ],
    ids=["model", "prompts", "reward"],
)
@pytest.mark.parametrize("runtime", ["dlrover-rl", "recipe"])
def test_run_with_wrong_inputs_fails_without_own_traceback(inputs, tmp_path, runtime, override, expected):
    settings = f"{override} job_dir={tmp_path}/out"
    code, printed = cli(inputs, f"run --local job.yaml {settings}") if runtime != "recipe" else recipe(inputs, settings)
    assert code == 1, printed
    assert printed.count(expected) == 1
    raised = override.startswith("reward")
    assert printed.count("Traceback") == raised
    assert printed.count("in raises\n    return {}[answer]\n") == raised
    assert printed.count("samples failed: rewards:raises raised KeyError: ") == 2 * raised, "once for each batch"


@slow
def test_a_long_message_of_a_reward_function_is_cut(inputs, tmp_path):
    code, printed = cli(inputs, f"run --local job.yaml reward.function=rewards:raises_a_lot job_dir={tmp_path}/out")
    assert code == 1
    assert "samples failed: rewards:raises_a_lot raised ValueError: 000" in printed and "in raises_a_lot\n" in printed
    assert len(printed) < 8000


@slow
@pytest.mark.parametrize(("line", "expected"), [("seed=x", "config.seed: "), ("job_dir=/proc/none/out", "job_dir: ")])
def test_refusal_ends_every_rank_of_torchrun_with_its_reason(inputs, line, expected):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    code, printed = recipe(inputs, line, *launcher)
    assert code == 1, "torchrun has no other code"
    assert f"  traceback : 1 error in the job:\n    - {expected}" in printed.partition("Root Cause")[2]
    assert printed.count("exitcode  : 2") == 2, printed


def test_ctrl_c_during_imports_is_answered_in_one_line(inputs):
    process = start(inputs, "-c", CLI, "run", "--local", "job.yaml")
    wait_for(lambda: "/_pydantic_core" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, printed.strip()) == (130, "interrupted before anything was started")


@slow
def test_run_on_a_full_disk_waits_then_fails_with_no_space(inputs, tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        (tmp_path / "others").write_bytes(bytes(2_000_000))
        code, printed = cli(inputs, f"run --local job.yaml job_dir={tmp_path}/out")
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert code == 1
    assert f"no disk space for {tmp_path}/out/model; waiting up to 60 s: " in printed
    assert "No space left on device: " in printed.partition("job: failed, ")[2]
    assert "(no_space is not retried)" in printed
    assert "Traceback" not in printed
