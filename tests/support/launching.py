# SPDX-License-Identifier: Apache-2.0
"""Command lines under launchers: real processes, of which none outlives its test."""

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers import AutoModelForCausalLM

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.launch import launch
from tests.support.commands import ROOT

GUIDE = ROOT / "docs" / "guides" / "torchrun.md"
DEADLINE_S = 240.0
TORCHRUN = "-m torch.distributed.run"
TWO = f"{TORCHRUN} --nproc_per_node=2"

TOY = """
trainer: {module: tests.support.launched_toys, class: AddingTrainer}
workload:
  actor: {module: tests.support.launched_toys, class: Adder}
  rollout: {module: tests.support.launched_toys, class: Listener}
checkpoint: {every: 2}
config: {steps: 5, pause_s: 0, fault: {where: "", rank: 1, step: 3, once: nothing}}
"""


def write_desk(folder):
    """A working directory with a tiny model, data, and the toy job."""
    write_tiny_model(folder / "model", hidden=32, layers=2, heads=4, kv_heads=2, max_positions=32)
    write_tiny_model(folder / "teacher", hidden=32, layers=2, heads=4, kv_heads=2, max_positions=32, seed=1)
    rows = [(a, b) for a in range(1, 10) for b in range(1, 6)]
    problems = [json.dumps({"prompt": f"{a}+{b}=", "answer": a + b}) for a, b in rows]
    examples = [json.dumps({"prompt": f"{a}+{b}=", "response": f"{a + b}"}) for a, b in rows]
    (folder / "problems.jsonl").write_text("\n".join(problems))
    (folder / "examples.jsonl").write_text("\n".join(examples))
    pairs = [json.dumps({"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a}"}) for a, b in rows[:7]]
    (folder / "pairs.jsonl").write_text("\n".join(pairs))
    (folder / "toy.yaml").write_text(TOY)
    return folder


MODEL = "model=model engine.threads=1"
SFT = f"-m dlrover.python.rl.recipe.sft {MODEL} data.train=examples.jsonl batch_size=15 optimizer.lr=1e-3"
PAIRS = f"{MODEL} data.train=pairs.jsonl batch_size=3 epochs=2 optimizer.lr=1e-3"
JUMBLED = "reward.function=tests.support.policy_rewards:jumble "
GRPO = f"-m dlrover.python.rl.recipe.grpo {MODEL} data.train=problems.jsonl data.eval_rows=8 prompts_per_step=4 steps=2"
GRPO += f" eval_every=1 {JUMBLED}rollout.samples_per_prompt=4 rollout.max_new_tokens=4"
WITH_CRITIC = "optimizer.lr=1e-3 critic.optimizer.lr=1e-3"
PPO = GRPO.replace("recipe.grpo", "recipe.ppo").replace("prompts_per_step=4", f"prompts_per_step=8 {WITH_CRITIC}")
DISTILL = f"{GRPO} teachers.teacher.model=teacher".replace("recipe.grpo", "recipe.distill").replace(JUMBLED, "")
TWO_STEPS = {
    "sft": f"{SFT} epochs=0.6",
    "rm": f"-m dlrover.python.rl.recipe.rm {PAIRS} batch_size=4 epochs=1",
    "dpo": f"-m dlrover.python.rl.recipe.dpo {PAIRS} batch_size=4 epochs=1",
    "grpo": GRPO,
    "ppo": PPO,
    "distill": DISTILL,
}
ADD = "-m dlrover.python.rl.recipe.launch --config toy.yaml"


@contextmanager
def started(desk, *lines, **env):
    """Processes of these command lines, all killed in the end, with whatever they have started."""
    paths = str(ROOT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER"))}
    children = [
        subprocess.Popen(
            [sys.executable, *shlex.split(line)],
            cwd=desk,
            env={**environment, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for line in lines
    ]
    try:
        yield children
    finally:
        for pid in _working_in(desk):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in children:
            child.communicate(timeout=10)


def _working_in(folder):
    """The processes that work there: torchrun's children have sessions of their own."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if entry.readlink() == folder:
                pids.append(int(entry.parent.name))
    return pids


def run(desk, *lines, code=0, **env):
    """The output of command lines that are to end with ``code``, one after the other."""
    with started(desk, *lines, **env) as children:
        outputs = [child.communicate(timeout=DEADLINE_S)[0] for child in children]
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == code, output
    return "\n".join(outputs)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


def differ(one, other):
    """The largest difference between two models."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def launched_rank(rank, world_size, port, desk, line):
    """Run a rank as a launcher would, in a process that has imported torch already."""
    os.chdir(desk)
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _, recipe, *overrides = shlex.split(line)
    return launch(recipe.rpartition(".")[2], None, overrides)
