"""GRPO: sample groups of completions, judge them, push the policy towards the better ones of each group."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dlrover.python.rl.algorithm.base import Algorithm, added
from dlrover.python.rl.algorithm.policy import PolicyGradient
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.typed import require, salvage
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import StepResult
from dlrover.python.rl.recipe.checks import (
    reward_problems,
    role_problems,
    rollout_engine_problems,
    template_problems,
    train_engine_problems,
)
from dlrover.python.rl.recipe.config import GRPOConfig, model_problems
from dlrover.python.rl.recipe.drawing import Drawing
from dlrover.python.rl.recipe.failures import failure_metrics, trainable
from dlrover.python.rl.recipe.held_out import before_and_after, step_metrics
from dlrover.python.rl.recipe.problems import ProblemSource, data_problems
from dlrover.python.rl.recipe.tracking import RunLog
from dlrover.python.rl.trainer.shard import Replicate, Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer

_GIVEN = {"old_logprobs", "ref_logprobs", "entropy"}
"""What the actor gives to a loss; the trainer itself sees nothing of single tokens."""

_LOGGED = ("prompt_id", "sample_index", "attempt", "reward", "error", "version", "prompt", "completion", "answer")


class GRPOTrainer(BaseTrainer):
    """Roles ACTOR, ROLLOUT and REWARD, and REFERENCE where the algorithm has a KL penalty.

    ::

        ACTOR weights -> ROLLOUT.generate -> REWARD.score -> annotate -> ACTOR.update
        problems -----------^      '-----> REFERENCE.logprobs -------------^

    Completions go from workload to workload; the trainer sees texts and a few numbers per row. A step begins by giving
    the rollouts the weights, so that a rollout which comes back in the middle of it is given them too. What lasts from
    one step to the next is in the actors and in ``self.state``, and nowhere else in the trainer.
    """

    def init(self) -> None:
        """Load the problems; let every role load its model."""
        self.cfg = cfg = require(GRPOConfig, self.config, "config")
        self.algorithm = algorithm_of(cfg)
        self.problems = self.state["problems"] = ProblemSource(cfg)
        self.samples = Drawing(self, cfg, self.problems, self._uses_reference)
        self.run_log = RunLog(self.job_dir)
        loading = [
            self.RG_ACTOR.init_model.options(blocking=False)(
                cfg.model, cfg.engine, cfg.optimizer, self.algorithm, cfg.seed
            ),
            self.RG_ROLLOUT.init_model.options(blocking=False)(cfg.model, cfg.engine),
            self.RG_REWARD.init_verifier.options(blocking=False)(cfg.reward),
        ]
        if self._uses_reference:
            loading.append(self.RG_REFERENCE.init_model.options(blocking=False)(cfg.model, cfg.engine))
        told = [pending.result() for pending in loading]  # waits: for models, which the members' limits bound
        actors, rollouts, *_ = told
        self.engines = {"train engine": actors[0], "rollout engine": rollouts[0]}

    def fit(self) -> None:
        """The whole training."""
        for step in self.steps(self.cfg.steps):
            began_s = time.monotonic()
            self.run_log.begin(step)
            self.samples.sync_weights()
            if step == 1:
                self.state["rewards before"] = self.samples.first_look()
            drawn = self.samples.draw(step)
            self.run_log.samples(step, texts(drawn.scored, self.problems.rows))
            judged = trainable(step, drawn.scored, self.cfg.reward)
            rows = self.algorithm.annotate(judged)
            trained = self.RG_ACTOR.update(
                Shard(drawn.rollouts),
                Shard(drawn.reference) if drawn.reference else Replicate(None),
                Shard(added(judged, rows)),
                self.cfg.rollout.temperature,
            )
            self.record(step, drawn.scored, rows, trained[0], time.monotonic() - began_s)
        self.run_log.begin(self.cfg.steps + 1)
        self.samples.sync_weights()
        self.finish(self.state["rewards before"], self.samples.evaluate(self.cfg.steps))

    def record(self, step: int, scored: Batch, rows: Batch, trained: StepResult, seconds: float) -> None:
        """Log a step."""
        metrics = {**scores(scored), **failure_metrics(scored, rows), **figures(trained), "step_s": seconds}
        metrics["tokens_per_s"] = float(scored.dense("token_count").sum()) / seconds
        if self.cfg.eval_every and step % self.cfg.eval_every == 0:
            self.samples.sync_weights()
            metrics |= step_metrics(self.samples.evaluate(step).dense("reward"))
        self.run_log.step(step, metrics)
        self.log(step, metrics)

    def finish(self, before: Any, after: Batch) -> None:
        """Save the model and what there is to know of the run."""
        self.RG_ACTOR.save(self.job_dir / "model")
        self.run_log.curve("reward", "reward.png")
        self.run_log.held_out(texts(after, self.problems.held_out_rows))
        self.run_log.summary(
            {
                "held-out problems": len(self.problems.held_out),
                **before_and_after(before, after.dense("reward")),
                **{name: told for name, told in self.engines.items() if told},
                "model": str(self.job_dir / "model"),
            }
        )

    @property
    def _uses_reference(self) -> bool:
        return uses_reference(self.algorithm)

    @classmethod
    def check_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[Problem]:
        """Everything wrong with the configuration, the data and the roles, before anything starts."""
        cfg, problems = salvage(GRPOConfig, config, "config")
        if cfg is None:
            return problems
        further = [*model_problems(cfg.model), *template_problems(cfg), *data_problems(cfg)]
        further += [*role_problems(cfg, roles), *reward_problems(cfg.reward.function)]
        further += train_engine_problems(cfg.engine, roles.get(RLRoleType.ACTOR, 1))
        further += rollout_engine_problems(cfg.engine)
        further += _algorithm_problems(cfg, roles)
        said = {problem.where for problem in problems}
        return [*problems, *(problem for problem in further if problem.where not in said)]


def algorithm_of(cfg: GRPOConfig) -> Algorithm:
    """The algorithm that a configuration names, with its options."""
    options = dict(cfg.algorithm)
    return make_algorithm(str(options.pop("name", "grpo")), options)


def uses_reference(algorithm: Algorithm) -> bool:
    """Whether the algorithm needs a reference's log-probs."""
    return "ref_logprobs" in algorithm.needs.all


def _algorithm_problems(cfg: GRPOConfig, roles: Mapping[RLRoleType, int]) -> list[Problem]:
    try:
        algorithm = algorithm_of(cfg)
    except InvalidJob as error:
        return [Problem(f"config.{item.where}", item.what) for item in error.problems]
    if not isinstance(algorithm, PolicyGradient):
        return [Problem("config.algorithm.name", "it does not learn from samples with rewards, as this trainer does")]
    try:
        algorithm.check_group_size(cfg.rollout.samples_per_prompt)
    except ValueError as error:
        return [Problem("config.rollout.samples_per_prompt", str(error))]
    absent = algorithm.needs.annotate | algorithm.needs.loss - _GIVEN
    if absent:
        return [Problem("config.algorithm", f"it needs {', '.join(sorted(absent))}, which this trainer does not have")]
    if uses_reference(algorithm) and RLRoleType.REFERENCE not in roles:
        return [Problem("workload", "config.algorithm.kl_coef is above 0, which needs the role 'reference'")]
    return []


def scores(scored: Batch) -> dict[str, float]:
    """Mean figures of a step's samples; failed ones are left out of the mean reward."""
    reward, lengths = scored.dense("reward"), scored.dense("action_tokens")
    judged = ~np.isnan(reward)
    return {
        "reward": float(reward[judged].mean()) if judged.any() else float("nan"),
        "completion_tokens": float(lengths.mean()),
        "finished": float(scored.dense("finished").mean()),
    }


def figures(trained: StepResult) -> dict[str, float]:
    """The figures of an optimizer step."""
    return {"loss": trained.loss, "grad_norm": trained.grad_norm, "lr": trained.lr, **trained.metrics}


def texts(scored: Batch, rows: int) -> Iterator[dict[str, Any]]:
    """Samples as plain rows, for people: ``row`` is the prompt's number among the ``rows`` of its file."""
    told = scored.select(*(name for name in _LOGGED if name in scored)).with_columns(
        row=scored.dense("prompt_id") % rows
    )
    return (_plain(told.row(row)) for row in range(len(told)))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}


if __name__ == "__main__":
    from dlrover.python.rl.recipe.launch import main

    main("grpo")
