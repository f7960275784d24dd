"""GRPO: sample groups of completions, judge them, push the policy towards the better ones of each group."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.common.errors import DataError, InvalidJob, Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.typed import require, salvage
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.jsonl import raise_problems
from dlrover.python.rl.engine.base import SamplingParams, StepResult
from dlrover.python.rl.recipe.checks import reward_problems, role_problems, template_problems
from dlrover.python.rl.recipe.config import GRPOConfig, model_problems
from dlrover.python.rl.recipe.held_out import before_and_after, step_metrics
from dlrover.python.rl.recipe.problems import ProblemSource, data_problems
from dlrover.python.rl.recipe.tracking import RunLog
from dlrover.python.rl.trainer.shard import Replicate, Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer

_LOGGED = ("prompt_id", "sample_index", "reward", "error", "version", "prompt", "completion", "answer")


class GRPOTrainer(BaseTrainer):
    """Roles ACTOR, ROLLOUT and REWARD, and REFERENCE where the algorithm has a KL penalty.

    ::

        problems -> ROLLOUT.generate -> REWARD.score -> annotate -> ACTOR.update -> weights -> ROLLOUT
                          '-----------> REFERENCE.logprobs -------------'

    Completions go from workload to workload; the trainer sees texts and a few numbers per row.
    """

    def init(self) -> None:
        """Load the problems; let every role load its model; give the rollouts the actor's weights.

        Raises:
            DataError: the model cannot complete some of the prompts; names each (20 at most).
        """
        self.cfg = cfg = require(GRPOConfig, self.config, "config")
        self.algorithm = algorithm_of(cfg)
        self.problems = ProblemSource(cfg)
        self.run_log = RunLog(self.job_dir)
        self.sampling = SamplingParams(
            cfg.rollout.max_new_tokens, cfg.rollout.temperature, cfg.rollout.samples_per_prompt
        )
        loading = [
            self.RG_ACTOR.init_model.options(blocking=False)(cfg.model, cfg.engine, cfg.optimizer, self.algorithm),
            self.RG_ROLLOUT.init_model.options(blocking=False)(cfg.model, cfg.engine),
            self.RG_REWARD.init_verifier.options(blocking=False)(cfg.reward),
        ]
        if self._uses_reference:
            loading.append(self.RG_REFERENCE.init_model.options(blocking=False)(cfg.model, cfg.engine))
        for pending in loading:
            pending.result()
        self.check_prompts()
        self.sync_weights()

    def fit(self) -> None:
        """The whole training."""
        before = self.evaluate(0)
        for step in self.steps(self.cfg.steps):
            began_s = time.monotonic()
            rollouts = self.RG_ROLLOUT.generate(Shard(self.problems.next()), self.sampling, self.seed_of(step))
            reference = self.reference_logprobs(rollouts)
            scored = self.score(step, rollouts)
            rows = self.algorithm.annotate(scored)
            trained = self.RG_ACTOR.update(
                Shard(rollouts), reference, Shard(rows.select("advantage", "weight")), self.cfg.rollout.temperature
            )
            self.sync_weights()
            self.record(step, scored, trained[0], time.monotonic() - began_s)
        self.finish(before, self.evaluate(self.cfg.steps))

    def check_prompts(self) -> None:
        """Refuse prompts that do not fit the model now, by their rows, rather than in the step that draws them."""
        found = self.RG_ROLLOUT.check_prompts(Shard(self.problems.places), self.sampling)
        if problems := [problem for part in found for problem in part]:
            raise_problems(problems)

    def score(self, step: int, rollouts: Any) -> Batch:
        """Judge a step's samples.

        Raises:
            DataError: not one of them could be judged: the step would teach nothing, and the next ones neither.
        """
        scored = Batch.concat(self.RG_REWARD.score(Shard(rollouts)))
        if np.isnan(scored.dense("reward")).all():
            self.run_log.samples(step, texts(scored, self.problems.rows))
            what = f"the reward function failed on all {len(scored)} samples, last with: {scored.objects('error')[-1]}"
            raise DataError([Problem(f"step {step}", what)])
        return scored

    def reference_logprobs(self, rollouts: Any) -> Any:
        """The reference's log-probs of the rollouts, as the update takes them."""
        if not self._uses_reference:
            return Replicate(None)
        return Shard(self.RG_REFERENCE.logprobs(Shard(rollouts), self.cfg.rollout.temperature))

    def seed_of(self, step: int) -> Replicate:
        """What a step's samples depend on, besides prompt and index."""
        return Replicate((self.cfg.seed, step))

    def sync_weights(self) -> None:
        """Give the actor's weights to every rollout member; returns once all of them serve them."""
        (weights,) = self.RG_ACTOR.publish_weights()
        self.RG_ROLLOUT.receive_weights(Replicate(weights))

    def evaluate(self, step: int) -> Batch:
        """Greedy answers to the held-out problems, judged."""
        greedy = SamplingParams(self.cfg.rollout.max_new_tokens, temperature=0.0, samples_per_prompt=1)
        answers = self.RG_ROLLOUT.generate(Shard(self.problems.held_out), greedy, self.seed_of(step))
        return Batch.concat(self.RG_REWARD.score(Shard(answers)))

    def record(self, step: int, scored: Batch, trained: StepResult, seconds: float) -> None:
        """Log a step."""
        metrics = {**scores(scored), **figures(trained), "step_s": seconds}
        metrics["tokens_per_s"] = float(scored.dense("token_count").sum()) / seconds
        if self.cfg.eval_every and step % self.cfg.eval_every == 0:
            metrics |= step_metrics(self.evaluate(step).dense("reward"))
        self.run_log.step(step, metrics)
        self.run_log.samples(step, texts(scored, self.problems.rows))
        self.log(step, metrics)

    def finish(self, before: Batch, after: Batch) -> None:
        """Save the model and what there is to know of the run."""
        self.RG_ACTOR.save(self.job_dir / "model")
        self.run_log.curve("reward", "reward.png")
        self.run_log.held_out(texts(after, self.problems.held_out_rows))
        self.run_log.summary(
            {
                "held-out problems": len(self.problems.held_out),
                **before_and_after(before.dense("reward"), after.dense("reward")),
                "model": str(self.job_dir / "model"),
            }
        )
        self.run_log.close()

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
        further += _algorithm_problems(cfg, roles)
        said = {problem.where for problem in problems}
        return [*problems, *(problem for problem in further if problem.where not in said)]


def algorithm_of(cfg: GRPOConfig) -> Algorithm:
    """The algorithm that a configuration names, with its options."""
    options = dict(cfg.algorithm)
    return make_algorithm(str(options.pop("name", "grpo")), options)


def uses_reference(algorithm: Algorithm) -> bool:
    """Whether the algorithm needs a reference's log-probs."""
    return getattr(algorithm, "kl_coef", 0.0) > 0


def _algorithm_problems(cfg: GRPOConfig, roles: Mapping[RLRoleType, int]) -> list[Problem]:
    try:
        algorithm = algorithm_of(cfg)
        algorithm.check_group_size(cfg.rollout.samples_per_prompt)
    except InvalidJob as error:
        return [Problem(f"config.{item.where}", item.what) for item in error.problems]
    except ValueError as error:
        return [Problem("config.rollout.samples_per_prompt", str(error))]
    if uses_reference(algorithm) and RLRoleType.REFERENCE not in roles:
        return [Problem("workload", "config.algorithm.kl_coef is above 0, which needs the role 'reference'")]
    return []


def scores(scored: Batch) -> dict[str, float]:
    """Mean figures of a step's samples. Failed ones are counted, and left out of the means."""
    reward, lengths = scored.dense("reward"), scored.dense("action_tokens")
    judged = ~np.isnan(reward)
    return {
        "reward": float(reward[judged].mean()) if judged.any() else float("nan"),
        "failed_samples": float((~judged).sum()),
        "completion_tokens": float(lengths.mean()),
        "finished": float(scored.dense("finished").mean()),
    }


def figures(trained: StepResult) -> dict[str, float]:
    """The figures of an optimizer step."""
    return {"loss": trained.loss, "grad_norm": trained.grad_norm, "lr": trained.lr, **trained.metrics}


def texts(scored: Batch, rows: int) -> Iterator[dict[str, Any]]:
    """Samples as plain rows, for people: ``row`` is the prompt's number among the ``rows`` of its file."""
    told = scored.select(*_LOGGED).with_columns(row=scored.dense("prompt_id") % rows)
    return (_plain(told.row(row)) for row in range(len(told)))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
