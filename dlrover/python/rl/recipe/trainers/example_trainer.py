# SPDX-License-Identifier: Apache-2.0
"""The training loop of the recipes that learn from examples."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from dlrover.python.rl.algorithm.base import Algorithm, select_added
from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.sampler import gather_parts, partition
from dlrover.python.rl.engine.api.base import OptimizerConfig, UpdateResult
from dlrover.python.rl.recipe.base.config import (
    ELSEWHERE,
    EXAMPLE_NAMES,
    EngineConfig,
    KeepConfig,
    LogConfig,
    NonNegative,
    Positive,
)
from dlrover.python.rl.recipe.base.model_files import validate_model, validate_vocabulary
from dlrover.python.rl.recipe.base.updates import TRAINED, annotate_errors_with_samples
from dlrover.python.rl.recipe.online.prompts import JobCursor
from dlrover.python.rl.recipe.trainers.examples import (
    ExampleData,
    Examples,
    Measured,
    select_segments,
    validate_examples,
    validate_lengths,
    warn_of_cuts,
)
from dlrover.python.rl.recipe.trainers.recipe_plan import RecipePlan
from dlrover.python.rl.recipe.trainers.recipe_trainer import RecipeTrainer
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Replicate, Shard

_LOG = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """Settings shared by recipes that learn from examples."""

    other_names: ClassVar[Mapping[str, str]] = EXAMPLE_NAMES
    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE

    model: str
    """Folder or hub name of a causal language model."""

    data: ExampleData
    epochs: Annotated[float, Gt(0.0)] = 1.0
    """Passes over the data."""

    steps: Positive | None = None
    """Number of optimizer steps; overrides ``epochs``."""

    batch_size: Positive = 32
    """Examples, or pairs, per optimizer step."""

    seed: NonNegative = 0
    """Seed of the data order and of the choice of held-out rows."""

    eval_every: NonNegative | None = None
    """Evaluate every this many steps, and after the last one. None: after the last one, if ``data.eval`` or
    ``data.eval_share`` is given; 0: never."""

    eval_only: bool = False
    """Evaluate ``model`` and end: nothing is trained, and no model is saved."""

    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    model_config: str | None = None
    """The ``config.json`` of ``model``, or a folder with it, to compute memory without the model's files."""

    keep: KeepConfig = KeepConfig()
    log: LogConfig = LogConfig()

    @property
    def evaluates(self) -> bool:
        has_rows = self.data.eval is not None or self.data.eval_share is not None
        return self.eval_only or (has_rows if self.eval_every is None else self.eval_every > 0)


class ExamplePlan(RecipePlan):
    """Plans jobs of an :class:`ExampleTrainer`."""

    def settings_of_state(self, config: Any) -> Mapping[str, Any]:
        # The saved position in the rows counts steps of this size.
        return {**super().settings_of_state(config), "batch_size": config.get("batch_size")}

    def longest_row(self, cfg: ExampleConfig) -> tuple[int, bool]:
        return cfg.data.max_length * cfg.data.segment_rows, True  # a pair is in one pass

    def describe_config(self, config: Any, roles: Mapping[RLRoleType, int]) -> list[str]:
        cuts = warn_of_cuts(require(self.trainer.config_class, config, "config"))
        return [*super().describe_config(config, roles), *cuts]

    def describe_step(self, cfg: ExampleConfig) -> str:
        return f"{cfg.batch_size} examples, 1 update"

    def find_errors(self, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        errors = [*super().find_errors(cfg, roles), *validate_examples(cfg.data, cfg.evaluates, cfg.seed)]
        errors += [*([] if errors else validate_lengths(cfg)), *self.trainer.validate_own(cfg, roles)]
        if cfg.eval_only and cfg.data.eval is None and cfg.data.eval_share is None and not cfg.eval_every:
            message = "is needed: without eval_every or data.eval_share every row of data.train is trained on"
            errors.append(ConfigError("config.data.eval", message))
        algorithm, wrong_options = self.read_algorithm(cfg)
        errors += wrong_options
        if (reference := self.trainer.reference_of(cfg)) != cfg.model:
            where = "config.reference_model"
            errors += validate_model(reference, where) or validate_vocabulary(reference, cfg.model, where)
        if algorithm is None or not _uses_reference(algorithm) or RLRoleType.REFERENCE in roles:
            return errors
        if cfg.engine.lora is None:
            errors.append(ConfigError("workload", "the role 'reference' is required: the loss compares with it"))
        elif reference != cfg.model:
            message = "needs the role 'reference': without one it is the model without its adapters"
            errors.append(ConfigError("config.reference_model", message))
        return errors


class ExampleTrainer(RecipeTrainer):
    """Role ACTOR, whose workers are data-parallel ranks; and REFERENCE if the loss needs it, which with adapters may be
    the actor without them.

    ::

        examples --> [REFERENCE.logprobs] --> ACTOR.train
        held out --> [REFERENCE.logprobs] --> ACTOR.measure

    A recipe names its configuration, its loss and its metrics. Only the actors and ``self.state`` last from one step to
    the next.
    """

    config_class: ClassVar[type[ExampleConfig]]
    plan = ExamplePlan
    cfg: ExampleConfig

    metric_names: ClassVar[Mapping[str, str]]
    """The names in the log of the loss's metrics; metrics without a name are not logged."""

    @classmethod
    def metrics(cls, measured: Measured) -> dict[str, float]:
        return {"loss": measured.loss, **{label: measured.metrics[name] for name, label in cls.metric_names.items()}}

    @classmethod
    def evaluation_metrics(cls, measured: Measured) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in cls.metrics(measured).items()}

    @classmethod
    def evaluation_names(cls, cfg: Any, roles: Collection[RLRoleType]) -> list[str]:
        return list(cls.evaluation_metrics(Measured(0.0, dict.fromkeys(cls.metric_names, 0.0))))

    def init(self) -> None:
        super().init()
        cfg = self.cfg
        self.announce("reading the examples")
        examples: Examples
        (examples,) = self.RG_ACTOR.encode.options(target="RANK0")(cfg.model, cfg.data, cfg.evaluates, cfg.seed)
        self.examples, data = examples, cfg.data
        if examples.unused:
            _LOG.info("%s: unused columns: %s", data.train, ", ".join(examples.unused))
        if not examples.trains_end:
            cause = f"{examples.counts.cut} of {examples.counts.rows} rows are cut at data.max_length={data.max_length}"
            cause = cause if examples.counts.cut else "the tokenizer has no end-of-sequence token"
            _LOG.warning("%s trains no end of a sequence, so the model will not learn to stop: %s", data.train, cause)
        self.model_saver.evaluated, rows = examples.evaluated, self.segment_count
        self.segments_to_train = total = cfg.steps * cfg.batch_size if cfg.steps else math.ceil(cfg.epochs * rows)
        cursor = JobCursor(data.train, rows, cfg.batch_size, cfg.seed, total, examples.digest)
        self.cursor = self.state["cursor"] = cursor
        self.announce("loading the models")
        for pending in self.load_models():
            pending.result()  # waits: for models, which the workers' limits bound
        (self.machine,) = self.RG_ACTOR.machine()

    def load_models(self) -> list[Pending]:
        cfg, optimizer = self.cfg, self.cfg.optimizer.over(self.total_steps)
        # Nothing is sampled, and the likelihood of ids without a text should fall, as in other libraries.
        engine = replace(cfg.engine, mask_unknown_ids=False)
        loading = [self.begin_loading(self.RG_ACTOR, cfg.model, engine, optimizer, self.algorithm, cfg.seed)]
        if _uses_reference(self.algorithm) and RLRoleType.REFERENCE in self.actor_handles:
            loading.append(self.begin_loading(self.RG_REFERENCE, self.reference_of(cfg), engine))
        return loading

    def fit(self) -> None:
        if self.cfg.eval_only:
            self.announce("evaluating")
            self.write_results(self._measure_held_out())
            return
        for step in self.logged_steps(self.total_steps):
            batch = select_segments(self.examples.train, self.cfg.data.segment_rows, self.cursor.next())
            trained = self.update(step, self.prepare(batch, self.algorithm))
            metrics = self.metrics(Measured(trained.loss, trained.metrics))
            metrics |= {"grad_norm": trained.grad_norm, "lr": trained.lr, "updates/skipped": float(trained.skipped)}
            metrics |= {name: value for name, value in trained.metrics.items() if "/" in name}
            every = self.cfg.eval_every or self.total_steps
            if self.cfg.evaluates and (step % every == 0 or step == self.total_steps):
                evaluation = self._measure_held_out() | self.extra_metrics(step)
                self.model_saver.update(step, evaluation)
                metrics |= evaluation
            self.model_saver.save_step(step)
            self.report(step, metrics, len(batch) // self.cfg.data.segment_rows, len(batch.ragged("tokens").values))
        counts, held_out = self.examples.counts, self.examples.held_out
        held_out_rows = 0 if held_out is None else len(held_out) // self.cfg.data.segment_rows
        rows = {"held_out_rows": held_out_rows, "cut_rows": counts.cut, "dropped_rows": counts.dropped}
        self.write_results({"examples": self.segment_count, **rows, "steps": self.last_step})

    @property
    def segment_count(self) -> int:
        return len(self.examples.train) // self.cfg.data.segment_rows

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs; the last batch may be smaller."""
        return math.ceil(self.segments_to_train / self.cfg.batch_size)

    def prepare(self, batch: Batch, algorithm: Algorithm) -> Batch:
        """Return ``batch`` with ``line`` and the columns of the loss only."""
        annotated = select_added(batch, algorithm.annotate(batch))
        ready = batch.select(*TRAINED, "line").with_columns(**annotated.columns)
        if not _uses_reference(algorithm):
            return ready
        if RLRoleType.REFERENCE in self.actor_handles:
            group, compute = self.RG_REFERENCE, self.RG_REFERENCE.logprobs
        else:
            group, compute = self.RG_ACTOR, self.RG_ACTOR.reference_logprobs  # without its adapters
        groups = self._partition(batch, group.data_parallel_size)
        logprobs = compute.options(blocking=True)(Shard(batch.select(*TRAINED), rows=groups), 1.0)
        return ready.with_columns(ref_logprobs=gather_parts(groups, logprobs)["ref_logprobs"])

    def update(self, step: int, batch: Batch) -> UpdateResult:
        """Take one optimizer step. Raises NonFiniteUpdate with the names of the rows if it is refused."""
        shard, source = self._shard(batch), self.cfg.data.train
        samples = [{"sample": f"{source}:{line}"} for line in batch.dense("line").tolist()]

        def find_offending() -> list[dict[str, Any]]:
            offending = Batch.concat(self.RG_ACTOR.find_nonfinite(shard, Replicate(("line",))))
            rows = zip(offending.dense("line").tolist(), offending.objects("text"), strict=True)
            return [{"sample": f"{source}:{line}", "text": text} for line, text in rows]

        with annotate_errors_with_samples(step, self.run_log.write_refused, samples, find_offending):
            trained: UpdateResult
            trained, *_ = self.RG_ACTOR.train(shard)
        return trained

    def _shard(self, batch: Batch) -> Shard:
        return Shard(batch, rows=self._partition(batch, self.RG_ACTOR.data_parallel_size))

    def _partition(self, batch: Batch, replicas: int) -> tuple[tuple[int, ...], ...]:
        """Divide the rows over replicas, with about as many tokens each; some may get no row."""
        return partition(batch.ragged("tokens").lengths.tolist(), replicas, self.cfg.data.segment_rows)

    def _measure_held_out(self) -> dict[str, float]:
        assert self.examples.held_out is not None, "set in a run that evaluates"
        batch = self.prepare(self.examples.held_out, self.evaluation_algorithm)
        return self.evaluation_metrics(Measured.total(self.RG_ACTOR.measure(self._shard(batch))))

    def extra_metrics(self, step: int) -> dict[str, float]:
        return {}

    @property
    def evaluation_algorithm(self) -> Algorithm:
        """The algorithm whose ``annotate`` sets the weights of the mean over the held-out examples."""
        return self.algorithm


def _uses_reference(algorithm: Algorithm) -> bool:
    return "ref_logprobs" in algorithm.needs.all
