# SPDX-License-Identifier: Apache-2.0
"""RL2's README: its rows, its environment, its presets and its command lines."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.data.conversation import SFT_ROWS
from dlrover.python.rl.data.pairs import PAIR_ROWS
from dlrover.python.rl.data.prompts import load_prompts
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "from-rl2.md"
DATA = ROOT / "docs" / "guides" / "from_rl2"
COMMANDS = re.findall(r"^torchrun (.*)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
DEADLINE_S = 250.0


@pytest.mark.feature(66, 74)
def test_the_rows_of_the_readme_are_read():
    assert [row["response"] for row in SFT_ROWS.read(DATA / "sft.json")] == ["Beijing.", "Paris."]
    assert [len(row["messages"]) for row in SFT_ROWS.read(DATA / "sft_messages.json")] == [2, 2]
    assert [len(PAIR_ROWS.read(DATA / name)) for name in ("pairs.json", "pairs_messages.json")] == [2, 2]
    for name in ("ppo.json", "ppo_messages.json"):
        assert [row.extra_info for row in load_prompts(DATA / name)] == [{"answer": "Beijing"}, {"answer": "Paris"}]


@pytest.mark.feature(111, 112, 114)
def test_the_presets_are_what_the_readme_says_of_them():
    ppo = make_algorithm("openai_ppo")
    assert (ppo.kl_in, ppo.kl_estimator, type(ppo)) == ("reward", "k1", type(make_algorithm("ppo")))
    grpo = make_algorithm("deepseek_grpo")
    assert (grpo.averaging, grpo.kl_in, grpo.kl_estimator, grpo.normalize) == ("sequence", "loss", "k3", "std")
    spelled = {"averaging": "sequence", "kl_in": "loss", "kl_estimator": "k3", "normalize": "std", "kl_coef": 0.04}
    assert make_algorithm("grpo", spelled) == grpo
    assert make_algorithm("dr_grpo").averaging == "token"


@pytest.mark.feature(4)
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.split("recipe.")[1].split()[0])
def test_each_command_of_the_guide_runs_twice_in_one_folder(tmp_path, command):
    write_tiny_model(tmp_path / "runs" / "tiny", hidden=32, layers=2)
    shutil.copytree(DATA, tmp_path / "docs" / "guides" / "from_rl2")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": DEADLINE_S, "check": False}
    for count in (1, 2):
        line = [sys.executable, "-m", "torch.distributed.run", f"--master_port={free_port()}", *shlex.split(command)]
        done = subprocess.run(line, **options)
        assert done.returncode == 0, done.stderr
        assert len(list((tmp_path / "runs").glob("*/*/model/*.safetensors"))) == count


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_number_of_rows_trains_on_any_number_of_processes(tmp_path, processes, rows):
    write_tiny_model(tmp_path / "model", hidden=32, layers=1)
    sft = [{"prompt": f"{row}: ", "response": f"{row}."} for row in range(rows)]
    ppo = [{"prompt": f"{row}? ", "extra_info": {"answer": str(row)}} for row in range(rows)]
    (tmp_path / "sft.json").write_text(json.dumps(sft))
    (tmp_path / "ppo.json").write_text(json.dumps(ppo))
    sizes = "rollout.samples_per_prompt=2 rollout.max_new_tokens=4"
    for arguments in (
        f"sft model=model data.train=sft.json batch_size={rows} steps=2",
        f"ppo model=model data.train=ppo.json prompts_per_step={rows} steps=1 {sizes}",
        f"grpo model=model data.train=ppo.json prompts_per_step={rows} steps=1 {sizes}",
    ):
        launcher = f"-m torch.distributed.run --nproc_per_node={processes} --master_port={free_port()}"
        line = [sys.executable, *f"{launcher} -m dlrover.python.rl.recipe.{arguments}".split()]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
