"""The loop of the recipes that learn from examples."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from dlrover.python.rl.algorithm.base import Algorithm, added
from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.typed import require, salvage
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.cursor import PromptCursor
from dlrover.python.rl.engine.base import StepResult
from dlrover.python.rl.engine.layout import ParallelSizes
from dlrover.python.rl.recipe.checks import optimizer_problems, train_engine_problems
from dlrover.python.rl.recipe.config import model_problems
from dlrover.python.rl.recipe.evaluating import Measured
from dlrover.python.rl.recipe.example_config import ExampleConfig
from dlrover.python.rl.recipe.examples import Examples, dealt, example_problems, units
from dlrover.python.rl.recipe.keeping import Keeping, keep_problems
from dlrover.python.rl.recipe.members import TRAINED
from dlrover.python.rl.recipe.refusals import naming_samples
from dlrover.python.rl.recipe.speed import Machine
from dlrover.python.rl.recipe.timing import TimedTrainer
from dlrover.python.rl.recipe.tracking import RunLog
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Replicate, Shard


class ExampleTrainer(TimedTrainer):
    """Role ACTOR, whose members are data-parallel ranks; and REFERENCE where the loss needs it.

    ::

        examples --> [REFERENCE.logprobs] --> ACTOR.train
        held out --> [REFERENCE.logprobs] --> ACTOR.measure

    A recipe says what its configuration, its loss and its figures are. What lasts from one step to the next is in the
    actors and in ``self.state``.
    """

    config_class: ClassVar[type[ExampleConfig]]
    """The dataclass of the job's ``config``; its ``data`` say how rows become tokens."""

    metric_names: ClassVar[Mapping[str, str]]
    """What the loss's metrics are called in the log; others are left out. Those of evaluations begin with ``eval_``."""

    bare_head: ClassVar[bool] = False
    """Whether the model gives scores, by a head without a bias."""

    @classmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        """The algorithm that a configuration asks for.

        Raises:
            InvalidJob: it asks for none of this recipe's.
        """
        raise NotImplementedError

    @classmethod
    def figures(cls, measured: Measured) -> dict[str, float]:
        """The figures of a step: the loss, and the metrics of :attr:`metric_names`."""
        return {"loss": measured.loss, **{told: measured.metrics[name] for name, told in cls.metric_names.items()}}

    @classmethod
    def evaluation_figures(cls, measured: Measured) -> dict[str, float]:
        """The figures of an evaluation."""
        return {f"eval_{name}": value for name, value in cls.figures(measured).items()}

    # -- the loop -----------------------------------------------------------------------------------------------------

    def init(self) -> None:
        """Encode the examples; let the roles load their models."""
        self.cfg = cfg = require(self.config_class, self.config, "config")
        self.algorithm = self.algorithm_of(cfg)
        self.run_log = self.state["log"] = RunLog(self.job_dir, config=cfg.log, settings=asdict(cfg))
        self.keeping = self.state["keeping"] = Keeping(cfg.keep, self.job_dir, self.RG_ACTOR.save)
        self.examples: Examples
        encode = self.RG_ACTOR.encode.options(target="RANK0")
        (self.examples,) = encode(cfg.model, cfg.data, cfg.eval_every > 0, cfg.seed)
        self.rows_in_all = math.ceil(cfg.epochs * self.unit_count)
        self.cursor = self.state["cursor"] = PromptCursor(
            self.unit_count, cfg.batch_size, cfg.seed, total=self.rows_in_all
        )
        for pending in self.loading():
            pending.result()  # waits: for models, which the members' limits bound
        self.machine: Machine
        (self.machine,) = self.RG_ACTOR.machine()

    def loading(self) -> list[Pending]:
        """Let the roles load their models."""
        cfg, optimizer = self.cfg, self.cfg.optimizer.over(self.total_steps)
        begin = self.RG_ACTOR.init_model.options(blocking=False)
        loading = [begin(cfg.model, cfg.engine, optimizer, self.algorithm, cfg.seed)]
        if _uses_reference(self.algorithm):
            loading.append(self.RG_REFERENCE.init_model.options(blocking=False)(cfg.model, cfg.engine))
        return loading

    def fit(self) -> None:
        """The whole training."""
        self.time_figures()  # what came before is of no step
        done = self.total_steps
        for step in self.steps(self.total_steps):
            if self.keeping.gives_up:
                done = step - 1
                break
            self.run_log.begin(step)
            batch = units(self.examples.train, self.cfg.data.unit_rows, self.cursor.next())
            trained = self.update(step, self.prepared(batch, self.algorithm))
            metrics = self.figures(Measured(trained.loss, trained.metrics))
            metrics |= {"grad_norm": trained.grad_norm, "lr": trained.lr}
            if self.evaluates_after(step):
                metrics |= self.evaluate(step)
            self.keeping.stepped(step)
            times = self.time_figures()
            metrics |= self.machine.figures(len(batch.ragged("tokens").values), len(self.RG_ACTOR), times) | times
            self.run_log.step(step, metrics)
            self.log(step, metrics)
        self.run_log.begin(done + 1)
        self.finish(done)

    @property
    def unit_count(self) -> int:
        """Examples, or pairs, to train on."""
        return len(self.examples.train) // self.cfg.data.unit_rows

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs; the last batch takes what is left."""
        return math.ceil(self.rows_in_all / self.cfg.batch_size)

    def prepared(self, batch: Batch, algorithm: Algorithm) -> Batch:
        """``batch`` with the columns of the loss, and no others but ``line``."""
        annotated = added(batch, algorithm.annotate(batch))
        ready = batch.select(*TRAINED, "line").with_columns(**annotated.columns)
        if not _uses_reference(algorithm):
            return ready
        judges = self.RG_REFERENCE
        plan = dealt(batch, self.cfg.data.unit_rows, judges.data_parallel_size)
        judged = judges.logprobs.options(blocking=True)(Shard(batch.select(*TRAINED), rows=plan.groups), 1.0)
        return ready.with_columns(ref_logprobs=plan.gather(judged)["ref_logprobs"])

    def update(self, step: int, batch: Batch) -> StepResult:
        """One optimizer step.

        Raises:
            NonFiniteUpdate: it was refused; names the rows.
        """
        shared = self._shared(batch)
        everything = [{"sample": self._place(line)} for line in batch.dense("line").tolist()]
        with naming_samples(step, self.run_log, everything, lambda: self._to_blame(shared)):
            trained: StepResult
            trained, *_ = self.RG_ACTOR.train(shared)
        return trained

    def _to_blame(self, shared: Shard) -> list[dict[str, Any]]:
        found = Batch.concat(self.RG_ACTOR.not_finite(shared, Replicate(("line",))))
        rows = zip(found.dense("line").tolist(), found.objects("text"), strict=True)
        return [{"sample": self._place(line), "text": text} for line, text in rows]

    def _place(self, line: int) -> str:
        return f"{self.cfg.data.train}:{line}"

    def _shared(self, batch: Batch) -> Shard:
        """What each model replica gets."""
        return Shard(batch, rows=dealt(batch, self.cfg.data.unit_rows, self.RG_ACTOR.data_parallel_size).groups)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluates_after(self, step: int) -> bool:
        """Whether the model is evaluated after a step."""
        return self.cfg.eval_every > 0 and (step % self.cfg.eval_every == 0 or step == self.total_steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """The figures of the held-out examples; keeps the model if it is the best so far."""
        assert self.examples.held_out is not None, "there are some where a run evaluates"
        batch = self.prepared(self.examples.held_out, self.algorithm_of_evaluation)
        figures = self.evaluation_figures(Measured.total(self.RG_ACTOR.measure(self._shared(batch))))
        figures |= self.further_figures(step)
        self.keeping.evaluated(step, figures)
        return figures

    def further_figures(self, step: int) -> dict[str, float]:
        """What else an evaluation says."""
        return {}

    @property
    def algorithm_of_evaluation(self) -> Algorithm:
        """Gives the weights of what is averaged over the held-out examples."""
        return self.algorithm

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self, steps: int) -> None:
        """Save the model and what there is to know of the run."""
        self.RG_ACTOR.save(self.job_dir / "model")
        self.run_log.curve("loss", "loss.png")
        examples = self.examples
        held_out = {} if examples.held_out is None else {"held-out rows": len(examples.held_out)}
        self.run_log.summary(
            {
                "examples": self.unit_count,
                **held_out,
                "cut rows": examples.counts.cut,
                "dropped rows": examples.counts.dropped,
                "steps": steps,
                **self.keeping.told(),
                "model": str(self.job_dir / "model"),
            }
        )

    # -- before the start ---------------------------------------------------------------------------------------------

    @classmethod
    def check_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[Problem]:
        """Everything wrong with the configuration, the data and the roles, before anything starts."""
        cfg, problems = salvage(cls.config_class, config, "config")
        if cfg is None:
            return problems
        actors, replica = roles.get(RLRoleType.ACTOR, 1), (cfg.engine.parallel or ParallelSizes()).replica_size
        further = []
        if actors > cfg.batch_size * replica:
            what = f"{actors} actor members cannot share a batch of {cfg.batch_size}"
            further.append(Problem("config.batch_size", what))
        further += [*train_engine_problems(cfg.engine, actors, cls.bare_head), *model_problems(cfg.model)]
        further += optimizer_problems(cfg.engine, cfg.optimizer)
        further += example_problems(cfg.data, cfg.eval_every > 0, cfg.seed)
        known = [
            *cls.evaluation_figures(Measured(0.0, dict.fromkeys(cls.metric_names, 0.0))),
            *cls.further_names(roles),
        ]
        further += [*keep_problems(cfg.keep, cfg.eval_every, known), *cls._algorithm_problems(cfg, roles)]
        further += cls.own_problems(cfg, roles)
        said = {problem.where for problem in problems}
        return [*problems, *(problem for problem in further if problem.where not in said)]

    @classmethod
    def further_names(cls, roles: Mapping[RLRoleType, int]) -> Sequence[str]:
        """The names of :meth:`further_figures` in a job with these roles."""
        return ()

    @classmethod
    def own_problems(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[Problem]:
        """What else is wrong for this trainer."""
        return []

    @classmethod
    def _algorithm_problems(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[Problem]:
        try:
            algorithm = cls.algorithm_of(cfg)
        except InvalidJob as error:
            return [Problem(f"config.{item.where}", item.what) for item in error.problems]
        if _uses_reference(algorithm) and RLRoleType.REFERENCE not in roles:
            return [Problem("workload", "the role 'reference' is required: the loss compares with it")]
        return []


def _uses_reference(algorithm: Algorithm) -> bool:
    return "ref_logprobs" in algorithm.needs.all
