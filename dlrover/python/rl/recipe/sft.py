"""SFT: teach a model to continue prompts as the examples do."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dlrover.python.rl.algorithm.base import added
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.typed import require, salvage
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.cursor import PromptCursor
from dlrover.python.rl.data.examples import check_sft
from dlrover.python.rl.engine.base import StepResult
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.recipe.checks import train_engine_problems
from dlrover.python.rl.recipe.config import SFTConfig, model_problems
from dlrover.python.rl.recipe.tracking import RunLog
from dlrover.python.rl.trainer.shard import Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer


class SFTTrainer(BaseTrainer):
    """Role ACTOR alone; several members are data-parallel ranks.

    What lasts from one step to the next is in the actors and in ``self.state``.
    """

    def init(self) -> None:
        """Let the actor load the model and encode the examples."""
        self.cfg = cfg = require(SFTConfig, self.config, "config")
        self.algorithm = SFT(averaging=cfg.averaging)
        self.run_log = RunLog(self.job_dir)
        self.RG_ACTOR.init_model(cfg.model, cfg.engine, cfg.optimizer, self.algorithm, cfg.seed)
        ((self.examples, self.counts),) = self.RG_ACTOR.encode.options(target="RANK0")(cfg.data)
        self.cursor = self.state["cursor"] = PromptCursor(len(self.examples), cfg.batch_size, cfg.seed)

    def fit(self) -> None:
        """The whole training."""
        for step in self.steps(self.total_steps):
            began_s = time.monotonic()
            self.run_log.begin(step)
            batch = annotated(self.algorithm, self.examples.take(self.cursor.next()))
            trained = self.RG_ACTOR.train(Shard(batch, by="tokens"))
            self.record(step, batch, trained[0], time.monotonic() - began_s)
        self.run_log.begin(self.total_steps + 1)
        self.RG_ACTOR.save(self.job_dir / "model")
        self.run_log.curve("loss", "loss.png")
        self.run_log.summary(
            {
                "examples": len(self.examples),
                "cut rows": self.counts.cut,
                "dropped rows": self.counts.dropped,
                "model": str(self.job_dir / "model"),
            }
        )

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs, the last batch rounded up."""
        return math.ceil(self.cfg.epochs * len(self.examples) / self.cfg.batch_size)

    def record(self, step: int, batch: Batch, trained: StepResult, seconds: float) -> None:
        """Log a step."""
        metrics = {
            "loss": trained.loss,
            "grad_norm": trained.grad_norm,
            "lr": trained.lr,
            "tokens_per_s": float(len(batch.ragged("tokens").values)) / seconds,
            "step_s": seconds,
        }
        self.run_log.step(step, metrics)
        self.log(step, metrics)

    @classmethod
    def check_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[Problem]:
        """Everything wrong with the configuration and the data, before anything starts."""
        cfg, problems = salvage(SFTConfig, config, "config")
        if cfg is None:
            return problems
        actors, replica = roles.get(RLRoleType.ACTOR, 1), (cfg.engine.parallel or ParallelSizes()).replica_size
        if actors > cfg.batch_size * replica:
            what = f"{actors} actor members cannot share a batch of {cfg.batch_size}"
            problems.append(Problem("config.batch_size", what))
        problems += [*train_engine_problems(cfg.engine, actors), *model_problems(cfg.model)]
        return [*problems, *(check_sft(cfg.data.train, cfg.data.keys) if cfg.data.train else ())]


def annotated(algorithm: SFT, batch: Batch) -> Batch:
    """``batch`` with the weight of each row's trained tokens."""
    trained = np.array([int(mask.sum()) for mask in batch.ragged("action_mask")], dtype=np.int64)
    rows = Batch({"action_tokens": trained})
    return batch.with_columns(**added(rows, algorithm.annotate(rows)).columns)


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("sft")
