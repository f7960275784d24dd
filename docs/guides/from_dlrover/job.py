# SPDX-License-Identifier: Apache-2.0
import sys
from typing import Any

import ray
from omegaconf import DictConfig

from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, trainer_invocation
from dlrover.rl import RLJobBuilder


@ray.remote
class Policy(BaseWorkload):
    def __init__(self, master_handle: Any, config: DictConfig) -> None:
        super().__init__(master_handle, config)
        self.weight = config.start

    @trainer_invocation(blocking=False)
    def learn(self, rows: list[int]) -> int:
        self.weight += sum(rows)
        return int(self.weight)


class Trainer(BaseTrainer):
    def init(self) -> None:
        pass

    def fit(self) -> None:
        weights = ray.get(list(self.RG_ACTOR.learn([1, 2, 3, 4])))
        print("weights", weights)


if __name__ == "__main__":
    module = "docs.guides.from_dlrover.job"
    builder = RLJobBuilder().node_num(1).device_per_node(2).device_type("CPU").config({"start": 10})
    builder.trainer(module, "Trainer").actor(module, "Policy").total(2)
    builder.build().submit(sys.argv[1] if len(sys.argv) > 1 else "from-dlrover", master_cpu=1)
