# SPDX-License-Identifier: Apache-2.0
"""The loop of all trainers that learn from samples: sync weights, generate, score, train, record."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.common.errors import EngineError, InvalidJob
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.data.batch import Batch, Column
from dlrover.python.rl.recipe.base.config import PolicyConfig, SenderConfig
from dlrover.python.rl.recipe.base.updates import (
    UpdatePlan,
    annotate_errors_with_samples,
    assign_updates,
    average_metrics,
    cast_columns,
    means_by_weight,
)
from dlrover.python.rl.recipe.online.batch import AuxOutput, SampleLog, StepBatch, name_samples
from dlrover.python.rl.recipe.online.collector import SampleCollector, bind_method
from dlrover.python.rl.recipe.online.prompts import PromptSource
from dlrover.python.rl.recipe.reporting import rewards
from dlrover.python.rl.recipe.trainers.policy_plan import PolicyPlan
from dlrover.python.rl.recipe.trainers.recipe_trainer import RecipeTrainer
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.role_group import RoleGroup
from dlrover.python.rl.trainer.shard import Replicate, Shard

_LOG = get_logger(__name__)

AuxResults: TypeAlias = Sequence[tuple[AuxOutput, Pending]]
"""Auxiliary outputs with their pending batches, which cover the rows of a step; the trainer need not read them."""


class PolicyTrainer(RecipeTrainer):
    """Roles ACTOR, ROLLOUT and REWARD, and the roles of :meth:`aux_outputs` that the algorithm needs.

    ::

        ACTOR weights -> ROLLOUT -> REWARD -> annotate -> ACTOR.update
        prompts -----------^  '--> aux outputs --^-----------^

    Completions go from workload to workload; the trainer sees a few numbers per row, and the columns that the
    algorithm's ``annotate`` needs. Only the workers and ``self.state`` last from one step to the next.

    A subclass names its configuration and its algorithm. If it has further roles, it lists their columns in
    :meth:`aux_outputs` and their models in :meth:`further_models`; to train them too, it extends :meth:`load_models`
    and :meth:`update`.
    """

    config_class = PolicyConfig
    curve = "reward/mean"
    evaluates_first = True
    algorithm_name = "grpo"
    plan = PolicyPlan
    cfg: PolicyConfig

    own_columns: ClassVar[frozenset[str]] = frozenset({"action_mask", "old_logprobs", "rollout_logprobs"})
    """The columns that an algorithm may use in every job, beside those that the train engine computes."""

    @classmethod
    def algorithm_of(cls, cfg: PolicyConfig) -> Algorithm:
        options = dict(cfg.algorithm)
        return make_algorithm(str(options.pop("name", cls.algorithm_name)), options)

    @classmethod
    def needs_of(cls, cfg: PolicyConfig) -> frozenset[str]:
        """The columns that the algorithm needs; empty if the algorithm does not exist."""
        try:
            return cls.algorithm_of(cfg).needs.all
        except InvalidJob as error:
            return frozenset() if error.salvaged is None else error.salvaged.needs.all

    @classmethod
    def evaluation_names(cls, cfg: Any, roles: Collection[RLRoleType]) -> list[str]:
        return rewards.evaluation_metrics(cfg.data.eval_sets, cfg.eval.samples, cfg.has_environment)

    @classmethod
    def aux_outputs(cls, cfg: Any) -> list[AuxOutput]:
        """The columns that further roles can compute for the algorithm, in the order of the calls."""
        args, init = (cfg.rollout.temperature,), (cfg.model, cfg.engine)
        return [AuxOutput("reference", "logprobs", {"ref_logprobs": "float32"}, args, init)]

    def init(self) -> None:
        super().init()
        cfg = self.cfg
        self.needed_outputs = [each for each in self.aux_outputs(cfg) if each.is_needed(self.algorithm.needs.all)]
        if RLRoleType.REFERENCE not in self.actor_handles:  # the reference is the actor without its adapters
            actor: dict[str, Any] = {"role": "actor", "method": "reference_logprobs", "init": None, "collective": True}
            outputs = self.needed_outputs
            self.needed_outputs = [replace(each, **actor) if each.role == "reference" else each for each in outputs]
        self.prompts = self.state["prompts"] = PromptSource(cfg)
        self.model_saver.evaluated = self.prompts.evaluated
        self.collector = SampleCollector(self, cfg, self.prompts)
        self.sample_log = self.state["samples"] = SampleLog(self, self.prompts)
        self.reward_failures = self.state["reward_failures"] = rewards.RewardFailures(cfg.reward)
        self.announce("loading the models")
        names = [pending.result() for pending in self.load_models()]  # waits: for models; the workers' limits bound it
        (self.machine,) = self.RG_ACTOR.machine()
        compares = getattr(self.algorithm, "compares_samples", False)
        self.warnings = rewards.StepWarnings(compares, cfg.rollout.max_new_tokens)
        self.engines = {"train_engine": names[0][0] or None, "rollout_engine": names[1][0] or None}
        levels = names[2] if not cfg.has_environment and cfg.reward.model is None else []
        self.sandbox = {f"sandbox/{level}": float(count) for level, count in Counter(filter(None, levels)).items()}

    def fit(self) -> None:
        if self.cfg.eval_only:
            self.announce("evaluating")
            self.collector.sync_weights()
            self.collector.check_prompts()
            answers = self.collector.evaluate(0)
            self.sample_log.write_held_out(0, answers)
            metrics = rewards.step_metrics(self.collector.collect_scores(answers))
            self.write_results({**self.prompts.summary(), **metrics})
            return
        for step in self.logged_steps(self.cfg.steps):
            self.collector.sync_weights()
            if step == 1:
                self.sample_log.remove_steps(1)
                self.announce("evaluating before the training")
                self.collector.check_prompts()
                self.state["before"] = before = self.evaluate(0)
                self.run_log.write_step(0, rewards.step_metrics(before))
                self.announce("step 1")
            self._renew_evaluation()
            batch = self.generate(step)
            batch = self.score(step, batch)
            self.record(step, batch, self.train(step, batch))
        self.sample_log.remove_steps(self.last_step + 1)
        self.announce("evaluating after the training")
        self.collector.sync_weights()
        self._renew_evaluation()
        self.finish(self.state["before"], self.collector.evaluate(self.last_step))

    def evaluate(self, step: int) -> Mapping[str, rewards.Scores]:
        """Answer the held-out prompts, write the answers, and return their scores."""
        answers = self.collector.evaluate(step)
        self.sample_log.write_held_out(step, answers)
        return self.collector.collect_scores(answers)

    def _renew_evaluation(self) -> None:
        """Drop the scores from before training of prompt sets that have changed since the last commit."""
        changed, before = self.prompts.changed_sets, self.state["before"]
        if changed:
            cause = "the evaluation prompts have changed since the run began"
            _LOG.warning("%s; there is no score from before training to compare with", cause)
            self.collector.check_prompts()
            self.state["before"] = {name: scores for name, scores in before.items() if name not in changed}

    def generate(self, step: int) -> StepBatch:
        return self.collector.collect(step)

    def score(self, step: int, batch: StepBatch) -> StepBatch:
        """Add the rows that the algorithm trains on. Raises DataError after too many steps without any reward."""
        self.count_failures(step, batch, batch.all_rows)
        rows = rewards.mask_rewards(batch.scored, self.cfg.reward)
        if self.cfg.rollout.mask_truncated:
            rows = rows.with_columns(masked=rewards.find_cut(rows))
        self.warnings.note_rewards(step, rows)
        return replace(batch, train_rows=rows)

    def count_failures(self, step: int, batch: StepBatch, rows: Batch) -> None:
        """Count the step if none of its ``rows`` has a reward. Writes the step's samples and raises DataError after too
        many such steps."""
        with self.sample_log.write_failed_step(step, batch):
            self.reward_failures.update(step, rows)

    def train(self, step: int, batch: StepBatch) -> dict[str, float]:
        """Annotate the rows and train on them; returns the metrics. Raises NonFiniteUpdate with the samples' names."""
        names, find_offending = name_samples(batch.scored), partial(self.offending_samples, batch)
        with annotate_errors_with_samples(step, self.run_log.write_refused, names, find_offending):
            if not rewards.is_unscored(batch.train_rows).all():
                with self.sample_log.write_failed_step(step, batch):
                    aux = self.compute_aux_outputs(batch)
                    rows = self.algorithm.annotate(self.add_token_columns(batch, aux))
                if rows.dense("weight").any():
                    return self.update_and_write(step, batch, rows, aux)
        self.sample_log.write_step(step, batch)
        _LOG.warning("step %d: no sample has a weight in the loss, so nothing is updated", step)
        return {}

    def update_and_write(self, step: int, batch: StepBatch, rows: Batch, aux: AuxResults) -> dict[str, float]:
        planned, _ = self.plan_updates(rows)
        with self.sample_log.writing_step(step, batch, planned, self.policy_ranks(step)):
            return self.update(step, batch, rows, aux)

    def load_models(self) -> list[Pending]:
        """Begin to load the models of all roles; the first result is the actor's, the second the rollouts'."""
        cfg = self.cfg
        optimizer = cfg.optimizer.over(self.update_count)
        engine = SenderConfig(**vars(cfg.engine), receivers=len(self.RG_ROLLOUT))
        pending = [
            self.begin_loading(self.RG_ACTOR, cfg.model, engine, optimizer, self.algorithm, cfg.seed),
            self.begin_loading(
                self.RG_ROLLOUT, cfg.model, cfg.engine, cfg.rollout, cfg.data.chat_template_kwargs, cfg.environment
            ),
        ]
        if not cfg.has_environment:
            argument = Replicate(self.prompts.columns) if cfg.reward.model is None else cfg.engine
            pending.append(self.RG_REWARD.init_verifier.options(blocking=False)(cfg.reward, argument))
        for role, init in {output.role: output.init for output in self.needed_outputs}.items():
            if init is not None:
                pending.append(self.begin_loading(self.group(role), *init))
        return pending

    @property
    def update_count(self) -> int:
        """Maximum optimizer steps of the run, over which a learning rate decays."""
        return self.cfg.steps * self.cfg.updates_per_step * self.cfg.epochs

    def check_vocabularies(self, roles: Iterable[str]) -> None:
        """Raise EngineError if the policy's token ids mean other tokens to the model of one of these roles."""
        marks = {role: self.group(role).vocabulary()[0] for role in ("actor", *roles)}
        for role, mark in marks.items():
            if mark != marks["actor"]:
                raise EngineError(f"the model of the role '{role}' has a different vocabulary from the policy")

    def group(self, role: str) -> RoleGroup:
        group: RoleGroup = getattr(self, f"RG_{RLRoleType(role)}")
        return group

    def uses(self, column: str) -> bool:
        return column in self.algorithm.needs.all

    def compute_aux_outputs(self, batch: StepBatch) -> AuxResults:
        results = []
        for output in self.needed_outputs:
            group = self.group(output.role)
            if output.collective or group.workload_class.needs_own_process:
                method = getattr(group, output.method).options(blocking=False)
                pending = method(batch.shard_evenly(group.data_parallel_size), *output.args)
                # Roles that meet in collectives may share devices, and so compute one after the other.
                pending.wait()  # waits: for a pass over the rows, which a limit bounds
            else:
                method = bind_method(group, output.method, len(batch.scored), blocking=False)
                pending = method(batch.samples, *output.args)
            results.append((output, pending))
        return results

    def add_token_columns(self, batch: StepBatch, aux: AuxResults) -> Batch:
        """Return the rows with the columns of tokens that the algorithm's ``annotate`` needs."""
        needed, columns = self.algorithm.needs.annotate, dict[str, Column]()
        if "action_mask" in needed and self.cfg.has_environment:
            needed |= {"token_rewards"}  # the reward of each action; a sum over the row would credit later actions too
        for output, pending in aux:
            if output.is_needed(needed):
                rows = Batch.concat(pending.result())  # waits: for a pass over the rows, which a limit bounds
                cast = cast_columns(rows, output.columns)
                columns |= {name: cast[name] for name in cast.columns if name in needed}
        if policy_columns := sorted(needed - columns.keys()):
            temperature = self.cfg.rollout.temperature
            samples = batch.shard_evenly(self.RG_ACTOR.data_parallel_size)
            parts = self.RG_ACTOR.token_columns(samples, Replicate(policy_columns), temperature)
            columns |= Batch.concat(parts).columns
        return batch.train_rows.with_columns(**columns)

    def update(self, step: int, batch: StepBatch, rows: Batch, aux: AuxResults) -> dict[str, float]:
        rows, plan = self.plan_updates(rows)
        # The actor has these columns already, or does not need them.
        excluded = {*batch.scored.columns, *self.algorithm.needs.annotate, "token_rewards", "masked"}
        excluded -= {"digest", "old_logprobs"}
        columns = rows.select(*(name for name in rows.columns if name not in excluded))
        parts = batch.balance(self.RG_ACTOR.data_parallel_size, rows.dense("update"))
        needs = self.algorithm.needs.loss
        shards = [Shard(pending, rows=parts) for output, pending in aux if output.is_needed(needs)]
        results = self.RG_ACTOR.update(batch.shard(parts), Shard(columns, rows=parts), plan, *shards)[0]
        metrics = average_metrics(results)
        first: Mapping[str, float] = next((means_by_weight(one.metrics) for one in results if not one.skipped), {})
        if "approx_kl" in first and not self.algorithm.needs.recomputes:
            metrics["mismatch_kl"] = first["approx_kl"]  # before the first update: the KL to the rollouts' policy
        return {_log_name(name): value for name, value in metrics.items()}

    def policy_ranks(self, step: int) -> range:
        """Return the first worker of each replica of the policy; empty if the step does not update the policy."""
        return range(0, len(self.RG_ACTOR), len(self.RG_ACTOR) // self.RG_ACTOR.data_parallel_size)

    def plan_updates(self, rows: Batch) -> tuple[Batch, UpdatePlan]:
        rows, updates = assign_updates(rows, self.cfg.updates_per_step)
        self.trained_tokens = self.cfg.epochs * int(rows.dense("token_count")[rows.dense("update") >= 0].sum())
        dtypes = {name: dtype for output in self.needed_outputs for name, dtype in output.columns.items()}
        return rows, UpdatePlan(self.cfg.rollout.temperature, updates, self.cfg.epochs, dtypes)

    def offending_samples(self, batch: StepBatch) -> list[dict[str, Any]]:
        samples = batch.shard_evenly(self.RG_ACTOR.data_parallel_size)
        rows = Batch.concat(self.RG_ACTOR.find_nonfinite(samples, Replicate(("prompt_id", "sample_index"))))
        return [{**name, "text": text} for name, text in zip(name_samples(rows), rows.objects("text"), strict=True)]

    def record(self, step: int, batch: StepBatch, train_metrics: Mapping[str, float]) -> None:
        metrics = {**rewards.sample_metrics(batch.all_rows), **batch.metrics(), **self.reward_failures.metrics()}
        metrics |= {**rewards.failure_metrics(batch.all_rows, batch.train_rows), **train_metrics}
        metrics["groups/without_signal"] = rewards.uniform_share(batch.train_rows)
        metrics |= {"weights/sync_bytes": float(self.collector.synced_bytes), **self.sandbox}
        self.warnings.note_completions(step, metrics)
        if self.cfg.eval_every and step % self.cfg.eval_every == 0:
            self.collector.sync_weights()
            evaluation = rewards.step_metrics(self.evaluate(step))
            if not any(map(math.isnan, evaluation.values())):  # NaN: no answer of a set was scored
                self.model_saver.update(step, evaluation)
            metrics |= evaluation
        self.model_saver.save_step(step)
        samples = rewards.merge_rows(batch.all_rows)
        tokens, generated = (int(samples.dense(name).sum()) for name in ("token_count", "action_tokens"))
        self.report(step, metrics, len(samples), tokens, generated)

    def finish(self, before: Mapping[str, rewards.Scores], after: StepBatch) -> None:
        self.sample_log.write_held_out(self.last_step, after)
        names = self.evaluation_names(self.cfg, self.actor_handles)
        scores = rewards.summarize_evaluations(before, self.collector.collect_scores(after), names)
        self.write_results({**self.prompts.summary(), **scores, **self.engines})


def _log_name(name: str) -> str:
    return name if name in ("loss", "grad_norm", "lr") or "/" in name else f"policy/{name}"
