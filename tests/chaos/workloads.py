# SPDX-License-Identifier: Apache-2.0
"""The recipe's workloads with what a chaos run adds: every finished call is noted, and faults can be made to strike.

A call is noted when it ends, in the process that ran it: what stands there twice was done twice.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.recipe.workloads import ActorWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.trainer.workload import trainer_invocation
from tests.chaos.gates import FOLDER, Gates

EXECUTIONS = "executions.jsonl"

_MIDST = 5
"""Tensors that are published before the rest, of more than twenty."""


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
    """Once its loss is poisoned, and it can be killed with half of its weights published."""

    def init_model(self, *arguments):
        super().init_model(*arguments)
        whole = self._engine.named_weights

        def in_the_midst(dtype=None):
            for number, named in enumerate(whole(dtype)):
                if number == _MIDST:
                    Gates.of_this_process().hold("publish_weights")
                yield named

        self._engine.named_weights = in_the_midst

    def update(self, rollouts, rows, *more):
        if Gates.of_this_process().take("nan_loss"):
            rows = rows.with_columns(advantage=np.full_like(rows.dense("advantage"), np.nan))
        result = super().update(rollouts, rows, *more)
        note(self, "update")
        return result

    @trainer_invocation(blocking=False)
    def publish_weights(self):
        published = super().publish_weights()
        note(self, "publish_weights")
        return published


class ChaosRollout(Warm, RolloutWorkload):
    """It can be killed when it has fetched weights and has not taken them over, and waits for the injector where that
    is behind. All but the first fetch as if the actor were on another host."""

    def init_model(self, *arguments):
        super().init_model(*arguments)
        if self.rank:
            self._weights = PullTransport(self._weights.settings, maps_pages=False)
        take_over = self._engine.receive

        def after_the_fetch(weights, rewind=False):
            Gates.of_this_process().hold("receive_weights")
            take_over(weights, rewind)

        self._engine.receive = after_the_fetch

    def receive_weights(self, ticket):
        received = super().receive_weights(ticket)
        note(self, "receive_weights")
        return received

    def sample(self, wanted, sampling, seed, enough, patience_s):
        if len(wanted):
            Gates.of_this_process().pace(int(wanted.dense("created_step").max()))
        return super().sample(wanted, sampling, seed, enough, patience_s)

    @trainer_invocation(blocking=False)
    def fetch(self, groups):
        fetched = super().fetch(groups)
        if len(groups):
            note(self, "generate", int(groups.dense("created_step").max()))
        return fetched

    @trainer_invocation(blocking=False)
    def generate(self, prompts, sampling, seed):
        Gates.of_this_process().pace(seed[-1])
        completions = super().generate(prompts, sampling, seed)
        note(self, "evaluate", seed[-1])
        return completions


class ChaosReward(Warm, RewardWorkload):
    """Judges, and is noted."""

    def score(self, rollouts):
        scored = super().score(rollouts)
        note(self, "score")
        return scored
