# SPDX-License-Identifier: Apache-2.0
"""The base of the recipes' trainers."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, cast

import torch

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.registry import complete_options
from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.hub import NOT_LOOKED_UP
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.typed import answer, lies_in, require, salvage
from dlrover.python.rl.data.source import is_left_unread
from dlrover.python.rl.engine.model.model_shape import read_config, shape_of
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.recipe.base.checks import (
    point_to_options,
    validate_family,
    validate_optimizer,
    validate_options,
    validate_train_engine,
)
from dlrover.python.rl.recipe.base.devices import Devices, Machine, complete_config
from dlrover.python.rl.recipe.base.model_files import FrozenModels, validate_model, validate_model_config
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse
from dlrover.python.rl.recipe.memory.passes import choose_passes
from dlrover.python.rl.recipe.memory.plan import MemoryPlan, describe_engines
from dlrover.python.rl.recipe.reporting.run_log import ModelSaver, RunLog, validate_keep
from dlrover.python.rl.recipe.reporting.timing import PHASES, PHASES_BY_ROLE, Stopwatch, TimedPort
from dlrover.python.rl.recipe.reporting.trackers import validate_log
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.role_group import RoleGroup
from dlrover.python.rl.trainer.steps import Attempt, Steps
from dlrover.python.rl.trainer.trainer import BaseTrainer, RunEnd, TrainerLink

_RECIPE_CLASSES = {
    RLRoleType.ROLLOUT: "RolloutWorkload",
    RLRoleType.REFERENCE: "ReferenceWorkload",
    RLRoleType.CRITIC: "CriticWorkload",
    RLRoleType.REWARD: "RewardWorkload",
    RLRoleType("TEACHER"): "TeacherWorkload",
}


class RecipeTrainer(BaseTrainer):
    """Base class of the recipes' trainers: checks the configuration, times the steps, and writes the run's files."""

    config_class: ClassVar[type[Any]]

    algorithm_name: ClassVar[str] = ""
    """The default of ``algorithm.name``, empty for a recipe with one algorithm."""

    curve: ClassVar[str] = "loss"
    """The metric that is drawn over the steps."""

    evaluates_first: ClassVar[bool] = False
    """True if step 1 begins with an evaluation, which the trainer announces."""

    bare_head: ClassVar[bool] = False
    """True for a model that gives scores, by a head without a bias."""

    cfg: Any
    machine: Machine

    trained_tokens: int | None = None
    """Tokens of the step's updates, counted in every epoch; None: those of all the step's rows, once."""

    _meeting: Pending | None = None

    def begin_loading(self, group: RoleGroup, *arguments: Any) -> Pending:
        """``init_model`` of a role. Those whose ranks meet load one after the other: where they share devices, ranks of
        one would have a device that ranks of the other wait for."""
        meets = len(group) > 1 and group.workload_class.needs_own_process
        if meets and self._meeting is not None:
            self._meeting.wait()  # waits: for a model, which the member's limit bounds
        pending: Pending = group.init_model.options(blocking=False)(*arguments)
        if meets:
            self._meeting = pending
        return pending

    @classmethod
    @abstractmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        """The algorithm of a configuration; raises ``InvalidJob`` where it is none of this recipe's."""

    def init(self) -> None:
        cfg = require(self.config_class, self.config, "config")
        cfg = replace(cfg, engine=cfg.engine.resolve(torch.cuda.is_available()))
        self.cfg = cfg = replace(cfg, engine=choose_passes(self, cfg))
        self.algorithm = self.algorithm_of(cfg)
        self.run_log = self.state["log"] = RunLog(
            self.job_dir, config=cfg.log, settings=asdict(cfg), name=self._bound().job
        )
        self.state["frozen_models"] = FrozenModels(self, cfg)
        self.model_saver = self.state["model_saver"] = ModelSaver(cfg.keep, self.results_dir, self.RG_ACTOR.save)

    def bind(self, link: TrainerLink, attempt: Attempt | None = None) -> Steps:
        self.stopwatch = Stopwatch()
        self._timed = TimedPort(link.port, self.stopwatch, PHASES | PHASES_BY_ROLE)
        return super().bind(replace(link, port=self._timed), attempt)

    def time_metrics(self) -> dict[str, float]:
        """Seconds since the last call: ``time/step``, and other ``time/<phase>``, which add up to it. At the end of a
        step's body they include the commit of the step before."""
        self._timed.forget()
        whole, spent = self.stopwatch.lap()
        return {"time/step": whole, **{f"time/{phase}": seconds for phase, seconds in spent.items()}}

    def report(self, step: int, metrics: Mapping[str, float], samples: int, tokens: int, generated: int = 0) -> None:
        """Log a step of so many samples, and tokens, of which the rollouts ``generated`` some."""
        times, trained = self.time_metrics(), tokens if self.trained_tokens is None else self.trained_tokens
        metrics = {
            **metrics,
            **self.run_log.count(samples=samples, tokens=tokens),
            **self.machine.metrics(tokens, trained, len(self.RG_ACTOR), times),
        }
        if generated and times.get("time/generation"):
            metrics["speed/rollout_tokens_per_s"] = generated / times["time/generation"]
        metrics |= times
        self.run_log.write_step(step, metrics)
        self.log(step, metrics)
        self.run_log.redraw(self.curve)

    def logged_steps(self, total_steps: int) -> Iterator[int]:
        """Yield the steps, with a log that begins each, until the evaluations get no better; then ``last_step`` is set,
        and the log has begun the one after it."""
        self.time_metrics()  # discards the time before the first step
        for number, step in enumerate(self.steps(total_steps)):
            if self.model_saver.should_stop:
                self.last_step = step - 1
                break
            self.begin_log(step)
            if not number and (step > 1 or not self.evaluates_first):
                self.announce(f"step {step}")
            yield step
        else:
            self.last_step = max(total_steps, committed := self.restart_info.step)
            if committed > total_steps:
                self.announce(f"{committed} steps have been taken already: steps={total_steps} adds none")
        self.begin_log(self.last_step + 1)

    def begin_log(self, step: int) -> None:
        """Remove what the run's files have of ``step`` and of later ones."""
        self.run_log.begin_step(step)

    def write_results(self, summary: Mapping[str, Any]) -> None:
        if self.cfg.eval_only:
            self.run_log.write_summary({**summary, "model": self.cfg.model})
            return
        model = self.results_dir / "model"
        self.announce("saving the model")
        self.RG_ACTOR.save(model)
        self.run_log.write_curve(self.curve)
        self.run_log.write_summary({**summary, **self.model_saver.summary(), "model": str(model)})

    def on_end(self, outcome: RunEnd) -> None:
        if "log" in self.state:
            self.run_log.close(outcome)

    # -- before the start ---------------------------------------------------------------------------------------------

    @classmethod
    def complete_config(cls, config: Any, devices: str) -> Mapping[str, Any]:
        complete = asdict(complete_config(cls.config_class, config, cast(Devices, devices)))
        if cls.algorithm_name:
            options = {"name": cls.algorithm_name, **complete["algorithm"]}
            complete["algorithm"] = complete_options({**cls.algorithm_defaults(complete, options["name"]), **options})
        return complete

    @classmethod
    def algorithm_defaults(cls, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Defaults of the algorithm's options that depend on the rest of the configuration."""
        return {}

    @classmethod
    def settings_of_state(cls, config: Any) -> Mapping[str, Any]:
        return {"seed": config.get("seed", 0)}  # of the order of the rows

    @classmethod
    def describe_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> list[str]:
        """The model, the engines and the batch of a step."""
        cfg = require(cls.config_class, config, "config")
        evaluated = cfg.data.eval.values() if isinstance(cfg.data.eval, Mapping) else [cfg.data.eval]
        unread = [where for where in (cfg.data.train, *evaluated) if where and is_left_unread(where)]
        described = cfg.model, cfg.engine, cfg.optimizer, cfg.model_config, cls.trained_head()
        return [
            *describe_engines(*described, generates=RLRoleType.ROLLOUT in roles),
            *(f"data: {where}, {NOT_LOOKED_UP}" for where in unread),
            f"each step: {cls.describe_step(cfg)}",
            *cls._plan_memory(cfg, roles).lines(),
        ]

    @classmethod
    def _plan_memory(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> MemoryPlan:
        uses = cls.model_uses(cfg, roles) if cfg.engine.device.startswith("cuda") else {}
        return MemoryPlan.of(uses, cfg.engine, cfg.model, cfg.model_config)

    @classmethod
    def trained_head(cls) -> Head:
        return "token" if cls.bare_head else "causal"

    @classmethod
    def model_uses(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> dict[RLRoleType, ModelUse]:
        """The models of the job's roles."""
        made = {
            RLRoleType.ACTOR: ModelUse(
                "trained",
                cfg.model,
                optimizer=cfg.optimizer,
                lora=cfg.engine.lora,
                head=cls.trained_head(),
            ),
            RLRoleType.ROLLOUT: ModelUse("rollout", cfg.model),
            RLRoleType.REFERENCE: ModelUse("frozen", cls.reference_of(cfg), sharded_class="ShardedReferenceWorkload"),
        }
        rows: dict[str, Any] = {"longest": cls.longest_row(cfg), "bounded": cls.bounds_rows(cfg)}
        return {role: replace(use, members=roles[role], **rows) for role, use in made.items() if role in roles}

    @classmethod
    def reference_of(cls, cfg: Any) -> str:
        """The model of the role REFERENCE."""
        model: str = cfg.model
        return model

    @classmethod
    def bounds_rows(cls, cfg: Any) -> bool:
        """Whether no row can be longer than :meth:`longest_row`."""
        return True

    @classmethod
    @abstractmethod
    def longest_row(cls, cfg: Any) -> int:
        """Tokens of the longest row, as far as the configuration says."""

    @classmethod
    @abstractmethod
    def describe_step(cls, cfg: Any) -> str:
        """The rows of a step, and how its updates divide them."""

    @classmethod
    def check_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[ConfigError]:
        """Every error of the configuration, the data and the roles, before anything starts."""
        cfg, invalid = salvage(cls.config_class, config, "config")
        invalid = point_to_options(invalid, cls.algorithm_name)
        if cfg is None:
            return invalid
        cfg = replace(cfg, engine=cfg.engine.resolve(on_cuda=False))
        places = [error.where for error in invalid]
        further = [answer(cls.config_class, error) for error in cls.find_errors(cfg, roles)]
        return [*invalid, *(error for error in further if not lies_in(error.where, places))]

    @classmethod
    def check_options(cls, config: Any) -> Iterable[ConfigError]:
        cfg, _ = salvage(cls.config_class, config, "config")
        return [] if cfg is None else validate_options(lambda: cls.algorithm_of(cfg), cfg.engine)

    @classmethod
    def check_workloads(cls, workloads: Mapping[RLRoleType, type[Any]]) -> Iterable[ConfigError]:
        """Classes of the library's own belong to certain roles; others are not known here."""
        expected = {**_RECIPE_CLASSES, RLRoleType.ACTOR: "ScorerWorkload" if cls.bare_head else "ActorWorkload"}
        for role, workload in workloads.items():
            needed, own = expected.get(role), getattr(workload, "recipe_class", None)
            if needed is not None and own not in (None, needed):
                name = workload.__name__
                given = own if name == own else f"{name}, a kind of {own}"
                what = f"{cls.__name__} needs {needed} here, not {given}"
                yield ConfigError(f"workload.{role.lower()}.class", what)

    @classmethod
    def find_errors(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        errors = [*validate_model(cfg.model), *validate_optimizer(cfg.engine, cfg.optimizer)]
        members, shape = roles.get(RLRoleType.ACTOR, 1), shape_of(cfg.model, cfg.model_config)
        errors += validate_train_engine(cfg.engine, members, cls.bare_head, shape=shape)
        content = read_config(cfg.model, cfg.model_config)
        errors += validate_family(content, cfg.engine, cls.trained_head(), RLRoleType.ROLLOUT in roles)
        errors += validate_keep(cfg.keep, cfg.eval_every, cls.evaluation_names(cfg, roles))
        errors += [*validate_model_config(cfg.model_config), *cls._plan_memory(cfg, roles).find_errors()]
        return [*errors, *validate_log(cfg.log)]

    @classmethod
    @abstractmethod
    def evaluation_names(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> Sequence[str]:
        """The metrics of an evaluation, of which ``keep.best`` names one."""
