# SPDX-License-Identifier: Apache-2.0
"""The package where nothing is installed that it can do without: no Ray, and no engine of anybody else's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

WITHOUT = """
import sys
from importlib.machinery import PathFinder

ABSENT = {"ray", "vllm", "sglang", "flash_attn", "deepspeed", "megatron", "peft", "liger_kernel", "accelerate"}


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)


sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
assert not ABSENT & {name.partition(".")[0] for name in sys.modules}
"""

IMPORTS = """
import importlib, json, pkgutil
import dlrover.rl as rl
import dlrover.python.rl as house
from dlrover.python.rl.common.errors import MissingExtra

names = [name for name in rl.__all__ if name not in ("RLJob", "RLJobBuilder")]
for name in names:
    getattr(rl, name)

failed = {}
for found in pkgutil.walk_packages(house.__path__, house.__name__ + ".", onerror=lambda name: None):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except (ImportError, MissingExtra) as error:
        failed[found.name.removeprefix(house.__name__ + ".")] = getattr(error, "name", "extra")
print(json.dumps(failed))
"""

WORKS = """
import json
import torch
import dlrover.rl as rl
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.session_toys import Policy

with rl.init(local=True):
    model = write_tiny_model("T", hidden=32, layers=2, max_positions=128)
    inference = rl.InferenceEngine(model).build()
    rows = [output.outputs[0].token_ids for output in inference.generate(["a", "b"], {"max_new_tokens": 4})]
    train = rl.TrainEngine(Policy.from_pretrained(model)).build(colocate_with=inference)
    train.train_step(rl.NeedParallel(rows))
    train.optimizer_step()
    print(json.dumps(train.p2p_weight_sync(inference).stamp.version))
"""


@pytest.mark.slow
@pytest.mark.feature(2)
def test_package_works_without_extras(tmp_path):
    command = [sys.executable, "-c", WITHOUT + IMPORTS + WORKS]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": "/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    failed, version = map(json.loads, done.stdout.splitlines()[-2:])
    homes = ("runtime.ray", "master", "cli", "service.ray_runner", "engine.vllm", "engine.deepspeed", "engine.megatron")
    assert {name for name in failed if not name.startswith((*homes, "environment.agents"))} == set()
    assert {"runtime.ray.hosting", "engine.vllm.engine"} <= failed.keys(), "the absent packages were there"
    agents = {"openenv", "reasoning_gym", "mcp", "verifiers"}
    assert {name.partition(".")[0] for name in failed.values()} <= {
        "ray",
        "vllm",
        "deepspeed",
        "megatron",
        "extra",
        *agents,
    }
    assert version == 1
