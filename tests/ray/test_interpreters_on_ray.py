# SPDX-License-Identifier: Apache-2.0
"""Roles in the interpreter of another environment, on Ray."""

import sys

import pytest
import yaml

from tests.support.commands import Desk
from tests.support.other_environments import make_environment

pytestmark = pytest.mark.ray

TRAINER = """
import os, signal, sys
from dlrover.rl import BaseTrainer

class Loop(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        for step in self.steps(2):
            (here,), (elsewhere,) = self.RG_ACTOR.prefix(), self.RG_REWARD.prefix(step)
            print("step", step, here, elsewhere, sys.prefix, flush=True)
"""
HERE = """
import sys
from dlrover.rl import BaseWorkload

class Here(BaseWorkload):
    def prefix(self):
        return sys.prefix
"""
ELSEWHERE = """
import os, sys
from dlrover.rl import BaseWorkload

class Elsewhere(BaseWorkload):
    def prefix(self, step):
        import only_there

        if step == 2 and self.restart_info.count == 0:
            os.kill(os.getpid(), 9)
        return f"{sys.prefix} {only_there.NUMBER} start {self.restart_info.count}"
"""


def test_role_runs_in_its_environment_and_comes_back(tmp_path):
    python = make_environment(tmp_path / "other environment")
    for name, text in {"loop": TRAINER, "here": HERE, "elsewhere": ELSEWHERE}.items():
        (tmp_path / f"{name}_module.py").write_text(text)
    roles = {
        "actor": {"module": "here_module", "class": "Here"},
        "reward": {"module": "elsewhere_module", "class": "Elsewhere", "python": "other environment/bin/python"},
    }
    trainer = {"module": "loop_module", "class": "Loop", "device_type": "CPU", "device_per_node": 2}
    job = {"trainer": trainer, "workload": roles, "restart": {"backoff_s": 0.0}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with Desk(tmp_path) as desk:
        output = desk.run("run", "job.yaml")
    prefix = python.parents[1]
    assert f"step 1 {sys.prefix} {prefix} 41 start 0 {sys.prefix}" in output, output
    assert f"step 2 {sys.prefix} {prefix} 41 start 1 {sys.prefix}" in output, output
