# SPDX-License-Identifier: Apache-2.0
"""A train engine that counts its passes without gradient."""

from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine


class CountingTrainEngine(Fsdp2TrainEngine):
    evaluations = 0

    def evaluate(self, *args, **kwargs):
        self.evaluations += 1
        return super().evaluate(*args, **kwargs)
