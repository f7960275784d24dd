# SPDX-License-Identifier: Apache-2.0
"""The base of the recipes' trainers: a run's files and results, and the time of each phase of a step."""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.engine.model.loading import fingerprint_files
from dlrover.python.rl.recipe.base.engine_workload import Machine
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse
from dlrover.python.rl.recipe.memory.plan import choose_passes
from dlrover.python.rl.recipe.reporting.run_log import ModelSaver, RunLog
from dlrover.python.rl.recipe.trainers.recipe_plan import RecipePlan
from dlrover.python.rl.trainer.port import COMMIT, WRITTEN, Call, Outcome, Pending, Port, Ref
from dlrover.python.rl.trainer.role_group import RoleGroup
from dlrover.python.rl.trainer.shard import Rows
from dlrover.python.rl.trainer.steps import Attempt, Steps
from dlrover.python.rl.trainer.trainer import BaseTrainer, RunEnd, TrainerLink


class RecipeTrainer(BaseTrainer):
    """Base class of the recipes' trainers: checks the configuration, times the steps, and writes the run's files."""

    config_class: ClassVar[type[Any]]

    algorithm_name: ClassVar[str] = ""  # the default of ``algorithm.name``, empty for a recipe with one algorithm
    curve: ClassVar[str] = "loss"  # the metric to draw over the steps
    evaluates_first: ClassVar[bool] = False  # True if step 1 begins with an evaluation
    bare_head: ClassVar[bool] = False  # True for a model of scores, with a head without a bias
    plan: ClassVar[type[RecipePlan]]

    cfg: Any
    machine: Machine

    trained_tokens: int | None = None  # tokens of the step's updates in all epochs; None: all of the step's rows, once
    _meeting: Pending | None = None

    @classmethod
    @abstractmethod
    def algorithm_of(cls, cfg: Any) -> Algorithm:
        """The algorithm of a configuration. Raises InvalidJob if this recipe does not have it."""

    @classmethod
    def reference_of(cls, cfg: Any) -> str:
        model: str = cfg.model
        return model

    @classmethod
    @abstractmethod
    def evaluation_names(cls, cfg: Any, roles: Collection[RLRoleType]) -> list[str]:
        """The metrics of an evaluation in a job with these roles, for ``keep.best``."""

    @classmethod
    def further_models(cls, cfg: Any) -> dict[RLRoleType, ModelUse]:
        """The models of a recipe's own roles."""
        return {}

    @classmethod
    def validate_own(cls, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        """Errors of a recipe's own settings and roles."""
        return []

    @classmethod
    def check_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[ConfigError]:
        """Override it to add errors to those that the plan finds."""
        return ()

    @classmethod
    def settings_of_state(cls, config: Any) -> Mapping[str, Any]:
        """Override it to add settings to the plan's."""
        return {}

    @classmethod
    def describe_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[str]:
        """Override it to add lines to the plan's."""
        return ()

    def begin_loading(self, group: RoleGroup, *arguments: Any) -> Pending:
        """Call ``init_model`` of a role. Roles whose ranks meet load one after the other: if they share devices, ranks
        of one role would otherwise hold a device that ranks of the other wait for."""
        meets = len(group) > 1 and group.workload_class.needs_own_process
        if meets and self._meeting is not None:
            self._meeting.wait()  # waits: for a model, which the worker's limit bounds
        pending: Pending = group.init_model.options(blocking=False)(*arguments)
        if meets:
            self._meeting = pending
        return pending

    def init(self) -> None:
        cfg = require(self.config_class, self.config, "config")
        cfg = replace(cfg, engine=cfg.engine.resolve(torch.cuda.is_available()))
        members = {role: len(handles) for role, handles in self.actor_handles.items()}
        uses = self.plan(type(self)).model_uses(cfg, members)
        self.cfg = cfg = replace(cfg, engine=choose_passes(self, cfg, uses))
        self.algorithm = self.algorithm_of(cfg)
        self.run_log = self.state["log"] = RunLog(
            self.job_dir, config=cfg.log, settings=asdict(cfg), name=self._bound().job
        )
        self.state["frozen_models"] = FrozenModels(uses)
        self.model_saver = self.state["model_saver"] = ModelSaver(cfg.keep, self.results_dir, self.RG_ACTOR.save)

    def bind(self, link: TrainerLink, attempt: Attempt | None = None) -> Steps:
        self._timed = TimedPort(link.port, PHASES | PHASES_BY_ROLE)
        return super().bind(replace(link, port=self._timed), attempt)

    def time_metrics(self) -> dict[str, float]:
        """Return the seconds since the last call: ``time/step``, and its parts ``time/<phase>``. At the end of a step's
        body they include the commit of the step before."""
        whole, spent = self._timed.lap()
        return {"time/step": whole, **{f"time/{phase}": seconds for phase, seconds in spent.items()}}

    def report(self, step: int, metrics: Mapping[str, float], samples: int, tokens: int, generated: int = 0) -> None:
        """Log a step with its numbers of samples and tokens, of which the rollouts ``generated`` some."""
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
        """Begin each step in the log and yield it, until evaluations stop improving; then set ``last_step``, and begin
        the step after it in the log."""
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
                self.announce(f"{committed} steps are already done: steps={total_steps} leaves nothing to do")
        self.begin_log(self.last_step + 1)

    def begin_log(self, step: int) -> None:
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


class FrozenModels:
    """Fingerprints of references, teachers and reward models in local folders; part of a trainer's ``state``."""

    def __init__(self, uses: Mapping[RLRoleType, ModelUse]) -> None:
        self._models = {str(role): use.model for role, use in uses.items() if use.kind == "frozen"}
        folders = {role: Path(model).expanduser() for role, model in self._models.items()}
        self._fingerprints = {
            role: fingerprint_files(path if path.is_dir() else None) for role, path in folders.items()
        }

    def state_dict(self) -> dict[str, str]:
        return dict(self._fingerprints)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise DataError if the weights of a model have changed, wherever it is."""
        errors = []
        for role, model in self._models.items():
            earlier, current = state.get(role, ""), self._fingerprints[role]
            self._fingerprints[role] = current or earlier  # the files may be elsewhere now
            if earlier and current and earlier != current:
                message = f"the weights of '{model}', the {role.lower()}, have changed since the run began"
                errors.append(ConfigError("config", message))
        if errors:
            raise DataError(errors)


_REST = "trainer"


class TimedPort:
    """A port that books the time of its calls under phases; ``phases`` are by method, or by ``role.method`` if roles
    differ, and other methods are phases under their own names. Before a call that takes pending results it waits for
    their sources, in the order of the calls, so that each phase is booked its own time."""

    def __init__(self, inner: Port, phases: Mapping[str, str], now_s: Callable[[], float] = time.perf_counter) -> None:
        self._inner, self._phases, self._now_s = inner, phases, now_s
        self._thread, self._inside = threading.get_ident(), False
        self._calls: dict[int, tuple[Ref, tuple[Ref, ...]]] = {}
        self._seconds: dict[str, float] = {}
        self._lap_began_s = now_s()

    def lap(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last lap, in total and by phase; ``trainer`` is outside all phases."""
        now_s = self._now_s()
        total_s, seconds = now_s - self._lap_began_s, self._seconds
        self._lap_began_s, self._seconds, self._calls = now_s, {}, {}
        return total_s, {**seconds, _REST: total_s - sum(seconds.values())}

    @contextmanager
    def _phase(self, role: str, method: str) -> Iterator[None]:
        """Book the block under the phase of a call; inside another phase it counts for that one."""
        if self._inside or threading.get_ident() != self._thread:
            yield
            return
        self._inside, began_s = True, self._now_s()
        try:
            yield
        finally:
            self._inside = False
            name = self._phases.get(f"{role}.{method}", self._phases.get(method, method.removeprefix("!")))
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now_s() - began_s

    def put(self, value: Any) -> Ref:
        with self._phase("", "sending"):
            return self._inner.put(value)

    def submit(self, role: str, rank: int, call: Call) -> Ref:
        with self._phase(role, call.method):
            ref = self._inner.submit(role, rank, call)
        values = [list(each.parts) if isinstance(each, Rows) else each for each in (*call.args, *call.kwargs.values())]
        items = chain.from_iterable(each if isinstance(each, list) else [each] for each in values)
        pending = tuple(each for each in items if isinstance(each, Ref) and each.method)
        self._calls[id(ref.token)] = entry = ref, pending
        if ref.size is not None:
            self._calls[id(ref.size)] = entry  # a probe's token is the size
        return ref

    def wait(self, refs: Sequence[Ref], timeout_s: float | None) -> list[Outcome]:
        remaining_s, since_s = timeout_s, self._now_s()
        # the calls whose results ``refs`` take, directly or not, in the order of the calls; each counts once
        sources, queue = dict[int, Ref](), list(refs)
        while queue:
            ref = queue.pop()
            _, arguments = self._calls.pop(id(ref.token), (ref, ()))
            sources |= {id(source.token): source for source in arguments if source.size is not None}
            queue += arguments
        for source in reversed(sources.values()):
            with self._phase(source.role, source.method):
                self._inner.wait([source.probe()], remaining_s)
            if timeout_s is not None:
                remaining_s = max(timeout_s - (self._now_s() - since_s), 0.0)
        with self._phase(refs[0].role, refs[0].method) if refs else nullcontext():
            return self._inner.wait(refs, remaining_s)


_METHODS = {
    "generation": ("generate", "sample", "fetch", "summarize"),
    "reward": ("score",),
    "reference": ("logprobs", "reference_logprobs"),
    "teacher": ("teacher_logprobs",),
    "critic": ("values",),
    "update": ("train", "update"),
    "sync": ("publish_weights", "published_stamp", "receive_weights"),
    "evaluation": ("measure",),
    "saving": ("save", "texts", "cut_samples", "write_samples", "write_held_out"),
    "commit": (COMMIT, WRITTEN),
}
PHASES = {method: phase for phase, methods in _METHODS.items() for method in methods}
"""The phase of each workload method; a method that is not listed is a phase under its own name."""

PHASES_BY_ROLE = {f"{RLRoleType.CRITIC}.update": "critic"}  # the speed of training is the actor's
