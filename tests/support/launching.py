# SPDX-License-Identifier: Apache-2.0
"""Command lines under launchers: real processes, of which none outlives its test."""

import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
from safetensors.torch import load_file

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.launch import launch
from tests.support.commands import ROOT, kill_processes
from tests.support.run_files import write_rows

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
    for seed, name in enumerate(("model", "teacher")):
        write_tiny_model(folder / name, hidden=32, layers=2, heads=4, kv_heads=2, max_positions=32, seed=seed)
    rows = [(f"{a}+{b}=", a, a + b) for a in range(1, 10) for b in range(1, 6)]
    write_rows(folder / "problems.jsonl", [{"prompt": prompt, "answer": total} for prompt, _, total in rows])
    write_rows(folder / "examples.jsonl", [{"prompt": prompt, "response": str(total)} for prompt, _, total in rows])
    pairs = [{"prompt": prompt, "chosen": str(total), "rejected": str(a)} for prompt, a, total in rows[:7]]
    write_rows(folder / "pairs.jsonl", pairs)
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
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    commands = [[sys.executable, *shlex.split(line)] for line in lines]
    children = [subprocess.Popen(command, cwd=desk, env=environment, **options) for command in commands]
    try:
        yield children
    finally:
        # torchrun's children have their own sessions.
        processes = psutil.process_iter(["cwd"])
        kill_processes(process.pid for process in processes if process.info["cwd"] == str(desk))
        for child in children:
            child.communicate(timeout=10)


def run(desk, *lines, code=0, **env):
    """The output of command lines that are to end with ``code``, one after the other."""
    with started(desk, *lines, **env) as children:
        outputs = [child.communicate(timeout=DEADLINE_S)[0] for child in children]
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == code, output
    return "\n".join(outputs)


def distance(one, other):
    """The largest difference between the models in two folders."""
    first, second = (load_file(Path(folder) / "model.safetensors") for folder in (one, other))
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
