# SPDX-License-Identifier: Apache-2.0
"""A job that has secrets, and tells by files whether they have reached it."""

import os
import time
from pathlib import Path

from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload


class Holder(BaseWorkload):
    def held(self):
        return [os.environ["API_KEY"], os.environ["MEMBER_TOKEN"], self.config.judge.api_key]


class HoldingTrainer(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        folder = Path(self.config.folder)
        for step in self.steps(self.config.steps):
            held = [*self.RG_ACTOR.held()[0], self.config.judge.password]
            (folder / "held").write_text("\n".join(held))
            self.log(step, reward=1.0)
            time.sleep(0.1)
        if self.config.fails:
            raise RuntimeError("it fails as it was told to")
