"""The recipe's workloads with what a chaos run adds: every finished call is noted, and faults can be made to strike.

A call is noted when it ends, in the process that ran it: what stands there twice was done twice.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from dlrover.python.rl.recipe.workloads import ActorWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.trainer.workload import trainer_invocation
from tests.chaos.gates import FOLDER, Gates

EXECUTIONS = "executions.jsonl"


def note(workload: Any, method: str, step: int = -1) -> None:
    """Add a finished call to the folder's list. One short write each: lines of several processes never mix."""
    line = {"who": f"{workload.role}[{workload.rank}]", "pid": os.getpid(), "at_s": time.time(), "method": method}
    file = os.open(Path(os.environ[FOLDER]) / EXECUTIONS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps({**line, "step": step}).encode() + b"\n")
    finally:
        os.close(file)


class Warm:
    """Imports what it needs when it is constructed, which may take long, instead of in a call, which would be taken to
    hang: patience is short here."""

    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.warm_up()


class ChaosActor(Warm, ActorWorkload):
    """Once its loss is poisoned, and it can be killed while it publishes its weights."""

    def update(self, rollouts, reference, rows, temperature):
        if Gates.of_this_process().take("nan_loss"):
            rows = rows.with_columns(advantage=np.full_like(rows.dense("advantage"), np.nan))
        result = super().update(rollouts, reference, rows, temperature)
        note(self, "update")
        return result

    @trainer_invocation(blocking=False, target="RANK0")
    def publish_weights(self):
        Gates.of_this_process().hold("publish_weights")
        published = super().publish_weights()
        note(self, "publish_weights")
        return published


class ChaosRollout(Warm, RolloutWorkload):
    """It can be killed while it receives weights, and waits for the injector where that is behind."""

    def receive_weights(self, weights):
        Gates.of_this_process().hold("receive_weights")
        received = super().receive_weights(weights)
        note(self, "receive_weights")
        return received

    @trainer_invocation(blocking=False)
    def generate(self, prompts, sampling, seed):
        Gates.of_this_process().pace(seed[-1])
        drawn = super().generate(prompts, sampling, seed)
        note(self, "generate" if sampling.temperature else "evaluate", seed[-1])
        return drawn


class ChaosReward(Warm, RewardWorkload):
    """Judges, and is noted."""

    def score(self, rollouts):
        scored = super().score(rollouts)
        note(self, "score")
        return scored
