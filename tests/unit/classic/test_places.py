# SPDX-License-Identifier: Apache-2.0
"""RLFusion's import lines work with the name replaced: ``sed s/rlfusion/dlrover.python.rl.classic/``."""

import subprocess
import sys

import dlrover.python.rl.classic as classic

RLFUSION = """
from rlfusion.envs import EnvBase
from rlfusion.datasets import MathDataset
from rlfusion.trainers.sft_trainer import SFTTrainer
from rlfusion.trainers.grpo_trainer import GRPOTrainer
from rlfusion.trainers.onpolicy_distillation_trainer import OnPolicyDistillationTrainer
"""


def test_every_place_of_rlfusion_is_there_under_the_new_name():
    found = {}
    exec(RLFUSION.replace("rlfusion", "dlrover.python.rl.classic"), found)
    names = {"EnvBase", "MathDataset", "SFTTrainer", "GRPOTrainer", "OnPolicyDistillationTrainer"}
    assert {name: found[name] for name in names} == {name: getattr(classic, name) for name in names}


def test_the_place_of_an_environment_imports_no_torch():
    code = "import sys; from dlrover.python.rl.classic.envs import EnvBase; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
