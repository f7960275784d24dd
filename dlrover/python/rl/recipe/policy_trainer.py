"""The loop of all trainers that learn from samples: draw, judge, annotate, update."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.common.errors import EngineError, Problem
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.typed import require, salvage
from dlrover.python.rl.data.batch import Batch, Column
from dlrover.python.rl.recipe.checks import (
    algorithm_problems,
    environment_problems,
    filtering_problems,
    judge_problems,
    optimizer_problems,
    role_problems,
    rollout_engine_problems,
    template_problems,
    train_engine_problems,
)
from dlrover.python.rl.recipe.config import PolicyConfig, model_problems
from dlrover.python.rl.recipe.drawing import Drawing, over
from dlrover.python.rl.recipe.failures import Outage, failed, failure_metrics, trainable
from dlrover.python.rl.recipe.held_out import (
    EVALUATED,
    SCORED,
    Judged,
    before_and_after,
    judged,
    mean_reward,
    step_metrics,
)
from dlrover.python.rl.recipe.keeping import Keeping, keep_problems
from dlrover.python.rl.recipe.problems import ProblemSource, data_problems
from dlrover.python.rl.recipe.refusals import naming_samples
from dlrover.python.rl.recipe.speed import Machine
from dlrover.python.rl.recipe.step_samples import Drawn
from dlrover.python.rl.recipe.timing import TimedTrainer
from dlrover.python.rl.recipe.tracking import RunLog
from dlrover.python.rl.recipe.updates import UpdatePlan, figures, over_updates
from dlrover.python.rl.recipe.whole_samples import sample_of_row, whole_samples
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.role_group import RoleGroup
from dlrover.python.rl.trainer.shard import Replicate, Shard

_LOG = get_logger(__name__)

_LOGGED = (
    "prompt_id",
    "sample_index",
    "attempt",
    "trajectory",
    "reward",
    "score",
    "error",
    "version",
    "oldest",
    "staleness",
    "prompt",
    "completion",
    "answer",
)


@dataclass(frozen=True)
class Opinion:
    """What another role makes of a step's rows.

    Attributes:
        columns: which of the algorithm's needs it is for.
        told: pending batches with ragged columns of these names, which the trainer need not see.
    """

    columns: tuple[str, ...]
    told: Pending

    def is_for(self, needs: frozenset[str]) -> bool:
        """Whether some of these columns are needed."""
        return not needs.isdisjoint(self.columns)


class PolicyTrainer(TimedTrainer):
    """Roles ACTOR, ROLLOUT and REWARD, and REFERENCE where the algorithm looks at its log-probs.

    ::

        ACTOR weights -> ROLLOUT -> REWARD -> annotate -> ACTOR.update
        problems ----------^  '--> opinions --^-------------^

    Completions go from workload to workload; the trainer sees texts and a few numbers per row, and of single tokens
    what the algorithm's ``annotate`` needs. A step begins by giving the rollouts the weights, so that a rollout which
    comes back in the middle of it is given them too. What lasts from one step to the next is in the members and in
    ``self.state``, and nowhere else in the trainer.

    A subclass names its configuration and its algorithm; one with further roles loads their models in :meth:`loading`,
    asks them in :meth:`opinions`, and trains them in :meth:`update`.
    """

    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig
    algorithm_name: ClassVar[str] = "grpo"
    """The algorithm where the configuration names none."""

    given: ClassVar[frozenset[str]] = frozenset({"action_mask", "old_logprobs", "rollout_logprobs", "ref_logprobs"})
    """What algorithms can be given beside what the train engine makes itself."""

    def init(self) -> None:
        """Load the problems; let every role load its model."""
        self.cfg = cfg = require(self.config_class, self.config, "config")
        self.algorithm = self.algorithm_of(cfg)
        self.problems = self.state["problems"] = ProblemSource(cfg)
        self.samples = Drawing(self, cfg, self.problems)
        self.run_log = self.state["log"] = RunLog(self.job_dir, config=cfg.log, settings=asdict(cfg))
        self.keeping = self.state["keeping"] = Keeping(cfg.keep, self.job_dir, self.RG_ACTOR.save)
        self.outage = self.state["outage"] = Outage(cfg.reward)
        told = [pending.result() for pending in self.loading()]  # waits: for models, which the members' limits bound
        self.machine: Machine
        (self.machine,) = self.RG_ACTOR.machine()
        self.engines = {"train engine": told[0][0], "rollout engine": told[1][0]}

    def fit(self) -> None:
        """The whole training."""
        self.time_figures()  # what came before is of no step
        done = self.cfg.steps
        for step in self.steps(self.cfg.steps):
            if self.keeping.gives_up:
                done = step - 1
                break
            self.run_log.begin(step)
            self.samples.sync_weights()
            if step == 1:
                self.state["before"] = self.samples.first_look()
            drawn = self.samples.draw(step)
            self.run_log.samples(step, texts(drawn.everything, self.problems.rows))
            rows = self.judged(step, drawn)
            with naming_samples(step, self.run_log, named(drawn.scored), partial(self.to_blame, drawn)):
                trained = self.skipped(step) if failed(rows).all() else self.learn(step, drawn, rows)
            self.record(step, drawn, rows, trained)
        self.run_log.begin(done + 1)
        self.samples.sync_weights()
        self.finish(self.state["before"], self.samples.evaluate(done))

    # -- what a step is made of ---------------------------------------------------------------------------------------

    def loading(self) -> list[Pending]:
        """Let the roles load their models; the actor's answer comes first, the rollouts' second."""
        cfg = self.cfg
        loading = [
            self.RG_ACTOR.init_model.options(blocking=False)(
                cfg.model, cfg.engine, cfg.optimizer.over(self.update_count), self.algorithm, cfg.seed
            ),
            self.RG_ROLLOUT.init_model.options(blocking=False)(cfg.model, cfg.engine, cfg.rollout),
        ]
        if cfg.rollout.env_path is None:
            given = (cfg.reward,) if cfg.reward.model is None else (cfg.reward, cfg.engine)
            loading.append(self.RG_REWARD.init_verifier.options(blocking=False)(*given))
        if self.uses("ref_logprobs"):
            loading.append(self.RG_REFERENCE.init_model.options(blocking=False)(cfg.model, cfg.engine))
        return loading

    @property
    def update_count(self) -> int:
        """Optimizer steps of the whole run at most, over which a falling learning rate falls."""
        return self.cfg.steps * self.cfg.updates_per_step * self.cfg.epochs

    def check_vocabularies(self, roles: Iterable[str]) -> None:
        """Refuse models that are to judge the policy's token ids and mean others by them.

        Raises:
            EngineError: names the role.
        """
        marks = {role: self.group(role).vocabulary()[0] for role in ("actor", *roles)}
        for role, mark in marks.items():
            if mark != marks["actor"]:
                raise EngineError(f"the model of the role '{role}' has another vocabulary than the policy's")

    def group(self, role: str) -> RoleGroup:
        """The role group of a role by its name."""
        found: RoleGroup = getattr(self, f"RG_{RLRoleType(role)}")
        return found

    def judged(self, step: int, drawn: Drawn) -> Batch:
        """The rows as the algorithm shall see them: those that are not to be trained on have no reward.

        Raises:
            DataError: too many steps in a row had none at all.
        """
        self.outage.stepped(step, drawn.everything)
        return trainable(drawn.scored, self.cfg.reward)

    def learn(self, step: int, drawn: Drawn, judged: Batch) -> dict[str, float]:
        """Annotate the rows, and train on them; the figures of that."""
        opinions = self.opinions(drawn)
        rows = self.algorithm.annotate(self.with_tokens(judged, drawn, opinions))
        return self.update(step, drawn, rows, opinions) if rows.dense("weight").any() else self.skipped(step)

    def opinions(self, drawn: Drawn) -> Sequence[Opinion]:
        """Ask the other roles what the algorithm needs of them."""
        if not self.uses("ref_logprobs"):
            return []
        logprobs = over(self.RG_REFERENCE, "logprobs", len(drawn.scored))
        return [Opinion(("ref_logprobs",), logprobs(drawn.samples, self.cfg.rollout.temperature))]

    def with_tokens(self, judged: Batch, drawn: Drawn, opinions: Sequence[Opinion]) -> Batch:
        """The rows with the columns of single tokens that the algorithm has to see before it annotates them."""
        needed, columns = self.algorithm.needs.annotate, dict[str, Column]()
        if "action_mask" in needed and self.cfg.rollout.env_path is not None:
            needed |= {"token_rewards"}  # each action has its own; the sum over the row would credit later ones too
        for opinion in opinions:
            if not opinion.is_for(needed):
                continue
            told = Batch.concat(opinion.told.result())  # waits: for a pass over the rows, which a limit bounds
            columns |= {name: told[name] for name in told.columns if name in needed}
        if of_policy := sorted(needed - columns.keys()):
            temperature = self.cfg.rollout.temperature
            samples = drawn.in_order(self.RG_ACTOR.data_parallel_size)
            told = Batch.concat(self.RG_ACTOR.token_columns(samples, Replicate(of_policy), temperature))
            columns |= told.columns
        return judged.with_columns(**columns)

    def update(self, step: int, drawn: Drawn, rows: Batch, opinions: Sequence[Opinion]) -> dict[str, float]:
        """Train the actor on annotated rows; the figures of that."""
        dealt, plan = self.planned(rows)
        # The rest is not needed there, or is there already.
        there = {*drawn.scored.columns, *self.algorithm.needs.annotate, "token_rewards"} - {"digest", "old_logprobs"}
        told = dealt.select(*(name for name in dealt.columns if name not in there))
        parts = drawn.divided(self.RG_ACTOR.data_parallel_size, dealt.dense("update"))
        given = [Shard(opinion.told, rows=parts) for opinion in opinions if opinion.is_for(self.algorithm.needs.loss)]
        return figures(self.RG_ACTOR.update(drawn.samples_of(parts), Shard(told, rows=parts), plan, *given)[0])

    def planned(self, rows: Batch) -> tuple[Batch, UpdatePlan]:
        """How annotated rows become optimizer steps."""
        dealt, updates = over_updates(rows, self.cfg.updates_per_step)
        return dealt, UpdatePlan(self.cfg.rollout.temperature, updates, self.cfg.epochs)

    def to_blame(self, drawn: Drawn) -> list[dict[str, Any]]:
        """The samples with a value that is not finite, after an update was refused."""
        samples = drawn.in_order(self.RG_ACTOR.data_parallel_size)
        found = Batch.concat(self.RG_ACTOR.not_finite(samples, Replicate(("prompt_id", "sample_index"))))
        return [{**name, "text": text} for name, text in zip(named(found), found.objects("text"), strict=True)]

    def skipped(self, step: int) -> dict[str, float]:
        """No row counts: nothing is updated."""
        _LOG.warning("step %d: none of its samples counts, so nothing is updated", step)
        return {}

    def uses(self, column: str) -> bool:
        """Whether the algorithm needs a column."""
        return column in self.algorithm.needs.all

    # -- what is told of it -------------------------------------------------------------------------------------------

    def record(self, step: int, drawn: Drawn, rows: Batch, trained: Mapping[str, float]) -> None:
        """Log a step; evaluate and keep the model, if it is its turn."""
        everything = drawn.everything
        metrics = {**scores(everything), **drawn.figures, **failure_metrics(everything, rows), **self.outage.figures}
        metrics |= trained
        if self.cfg.eval_every and step % self.cfg.eval_every == 0:
            self.samples.sync_weights()
            evaluated = step_metrics(judged(self.samples.evaluate(step)))
            if not math.isnan(evaluated["held_out_reward"]):  # else nothing was judged: that says nothing of the model
                self.keeping.evaluated(step, evaluated)
            metrics |= evaluated
        self.keeping.stepped(step)
        times = self.time_figures()
        tokens = int(everything.dense("token_count").sum())
        metrics |= self.machine.figures(tokens, len(self.RG_ACTOR), times) | times
        self.run_log.step(step, metrics)
        self.log(step, metrics)

    def finish(self, before: Judged, after: Batch) -> None:
        """Save the model and what there is to know of the run."""
        self.RG_ACTOR.save(self.job_dir / "model")
        self.run_log.curve("reward", "reward.png")
        self.run_log.held_out(texts(after, self.problems.held_out_rows))
        self.run_log.summary(
            {
                **self.problems.told(),
                **before_and_after(before, judged(after)),
                **{name: told for name, told in self.engines.items() if told},
                **self.keeping.told(),
                "model": str(self.job_dir / "model"),
            }
        )

    # -- before the start ---------------------------------------------------------------------------------------------

    @classmethod
    def algorithm_of(cls, cfg: PolicyConfig) -> Algorithm:
        """The algorithm that a configuration names, with its options."""
        options = dict(cfg.algorithm)
        return make_algorithm(str(options.pop("name", cls.algorithm_name)), options)

    @classmethod
    def check_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[Problem]:
        """Everything wrong with the configuration, the data and the roles, before anything starts."""
        cfg, problems = salvage(cls.config_class, config, "config")
        if cfg is None:
            return problems
        further = [*model_problems(cfg.model), *template_problems(cfg), *data_problems(cfg)]
        further += role_problems(cls.__name__, cfg, roles)
        further += [*environment_problems(cfg.rollout), *filtering_problems(cfg)]
        further += judge_problems(cfg.reward, cfg.rollout.env_path)
        further += train_engine_problems(cfg.engine, roles.get(RLRoleType.ACTOR, 1))
        further += [*rollout_engine_problems(cfg.engine), *optimizer_problems(cfg.engine, cfg.optimizer)]
        further += algorithm_problems(lambda: cls.algorithm_of(cfg), cls.given, cfg, roles)
        known = EVALUATED if cfg.rollout.env_path is None else (*EVALUATED, SCORED)
        further += keep_problems(cfg.keep, cfg.eval_every, known)
        further += cls.own_problems(cfg, roles)
        said = {problem.where for problem in problems}
        return [*problems, *(problem for problem in further if problem.where not in said)]

    @classmethod
    def own_problems(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[Problem]:
        """What else is wrong for this trainer."""
        return []


def scores(scored: Batch) -> dict[str, float]:
    """Mean figures of a step's samples, with ``score`` where an environment gives one; failed samples are left out of
    what was said of them."""
    samples = whole_samples(scored)
    said = {name: mean_reward(samples.dense(name)) for name in ("reward", "score") if name in samples}
    lengths, finished = samples.dense("action_tokens"), samples.dense("finished")
    return {**said, "completion_tokens": float(lengths.mean()), "finished": float(finished.mean())}


def named(rows: Batch) -> list[dict[str, Any]]:
    """What each row's sample is called."""
    ids = zip(rows.dense("prompt_id").tolist(), rows.dense("sample_index").tolist(), strict=True)
    return [{"sample": f"sample {index} of prompt {prompt}"} for prompt, index in ids]


def texts(scored: Batch, rows: int) -> Iterator[dict[str, Any]]:
    """Samples as plain rows, for people: ``row`` is the prompt's number among the ``rows`` of its file, and rows with
    the same ``trajectory`` are one sample."""
    told = scored.with_columns(trajectory=sample_of_row(scored)).select(*(name for name in _LOGGED if name in scored))
    told = told.with_columns(row=scored.dense("prompt_id") % rows)
    return (_plain(told.row(row)) for row in range(len(told)))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
