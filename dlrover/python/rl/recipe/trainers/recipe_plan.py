# SPDX-License-Identifier: Apache-2.0
"""The plan of the recipes' trainers: it resolves ``auto`` in a ``config``, finds errors, and describes the job."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.registry import complete_options, option_names
from dlrover.python.rl.common.errors import ConfigError, EngineError, InvalidJob, MissingExtra, VerifierError
from dlrover.python.rl.common.extensions import runs_elsewhere
from dlrover.python.rl.common.hub import NOT_LOOKED_UP, current_lookup
from dlrover.python.rl.common.log import short_number
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.plain import to_plain
from dlrover.python.rl.config.typed import answer, lies_in, rename_keys, require, salvage
from dlrover.python.rl.data.source import is_left_unread
from dlrover.python.rl.engine.api import registry
from dlrover.python.rl.engine.api.base import OptimizerConfig
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.model.model_shape import ModelShape, read_config, shape_of
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.engine.weight_sync.transports import WeightSyncOptions, validate_transport
from dlrover.python.rl.environment.core.functions import load_function
from dlrover.python.rl.environment.core.scoring import RewardFunction
from dlrover.python.rl.recipe.base.config import AUTO, EngineConfig
from dlrover.python.rl.recipe.base.model_files import device_bytes, parameters_of, validate_model, validate_model_config
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse, bytes_of, is_on_host
from dlrover.python.rl.recipe.memory.plan import MemoryPlan
from dlrover.python.rl.recipe.reporting.run_log import validate_keep
from dlrover.python.rl.recipe.reporting.trackers import validate_log
from dlrover.python.rl.trainer.plan import TrainerPlan

Devices: TypeAlias = Literal["CPU", "GPU", "HERE"]
"""``trainer.device_type`` of a job to be placed; ``HERE``: the devices of this process."""

ON_CUDA: Mapping[str, Any] = {
    "prompts_per_step": 64,
    "rollout": {"max_new_tokens": 1024},
    "engine": {"gradient_checkpointing": AUTO, "max_tokens_per_microbatch": AUTO, "max_batch": 256},
}
"""The defaults on CUDA that override defaults of the configuration classes."""

_DEVICE = "config.engine.device"

_RECIPE_CLASSES = {
    RLRoleType.ROLLOUT: "RolloutWorkload",
    RLRoleType.REFERENCE: "ReferenceWorkload",
    RLRoleType.CRITIC: "CriticWorkload",
    RLRoleType.REWARD: "RewardWorkload",
    RLRoleType("TEACHER"): "TeacherWorkload",
}

T = TypeVar("T")


class RecipePlan(TrainerPlan, ABC):
    """Plans jobs of a recipe, whose ``trainer`` is a ``RecipeTrainer``."""

    def check_config(self, config: Any, roles: Mapping[RLRoleType, int]) -> Iterable[ConfigError]:
        cfg, invalid = salvage(self.trainer.config_class, config, "config")
        options = option_names(self.trainer.algorithm_name)
        for number, error in enumerate(invalid):
            key = error.where.rpartition(".")[2]
            if error.what.startswith("unknown key") and key in options:
                invalid[number] = ConfigError(error.where, f"unknown key '{key}'; did you mean 'algorithm.{key}'?")
        if cfg is None:
            return invalid
        cfg = replace(cfg, engine=cfg.engine.resolve(on_cuda=False))
        places = [error.where for error in invalid]
        further = [answer(self.trainer.config_class, error) for error in self.find_errors(cfg, roles)]
        own = super().check_config(config, roles)
        return [*invalid, *(error for error in further if not lies_in(error.where, places)), *own]

    def check_options(self, config: Any) -> Iterable[ConfigError]:
        """Check options of the algorithm, the engines and the transport, which are the same on any machine."""
        cfg, _ = salvage(self.trainer.config_class, config, "config")
        if cfg is None:
            return []
        engine, (_, errors) = cfg.engine, self.read_algorithm(cfg)
        train, rollout = "config.engine.train", "config.engine.rollout"
        errors += registry.validate_engine(registry.TRAIN_ENGINES, engine.train, engine.train_options, train, False)
        if engine.rollout != AUTO:  # depends on the packages of the job's machines
            errors += registry.validate_engine(
                registry.ROLLOUT_ENGINES, engine.rollout, engine.rollout_options, rollout, False
            )
        where = "config.engine.weight_sync_options"
        errors += salvage(WeightSyncOptions, dict(engine.weight_sync_options), where)[1]
        names = [train, rollout, "config.algorithm.name"]
        return [*(error for error in errors if error.where not in names), *super().check_options(config)]

    def check_workloads(self, workloads: Mapping[RLRoleType, type[Any]]) -> Iterable[ConfigError]:
        """Check that the library's workload classes are in the right roles."""
        name, actor = self.trainer.__name__, "ScorerWorkload" if self.trainer.bare_head else "ActorWorkload"
        expected = {**_RECIPE_CLASSES, RLRoleType.ACTOR: actor}
        for role, workload in workloads.items():
            needed, recipe_class = expected.get(role), getattr(workload, "recipe_class", None)
            if needed is not None and recipe_class not in (None, needed):
                kind = "" if workload.__name__ == recipe_class else f", a kind of {recipe_class}"
                message = f"{name} needs {needed} here, not {workload.__name__}{kind}"
                yield ConfigError(f"workload.{role.lower()}.class", message)
        yield from super().check_workloads(workloads)

    def complete_config(self, config: Any, devices: str) -> Mapping[str, Any]:
        complete = asdict(complete_config(self.trainer.config_class, config, cast(Devices, devices)))
        if default := self.trainer.algorithm_name:
            options = {"name": default, **complete["algorithm"]}
            complete["algorithm"] = complete_options({**self.algorithm_defaults(complete, options["name"]), **options})
        own = super().complete_config(complete, devices)
        return complete if own is None else own

    def algorithm_defaults(self, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """The defaults of the algorithm's options that depend on the remaining configuration."""
        return {}

    def settings_of_state(self, config: Any) -> Mapping[str, Any]:
        return {"seed": config.get("seed", 0), **super().settings_of_state(config)}  # the order of rows depends on it

    def describe_config(self, config: Any, roles: Mapping[RLRoleType, int]) -> list[str]:
        cfg = require(self.trainer.config_class, config, "config")
        evaluated = cfg.data.eval.values() if isinstance(cfg.data.eval, Mapping) else [cfg.data.eval]
        unread = [where for where in (cfg.data.train, *evaluated) if where and is_left_unread(where)]
        return [
            *describe_engines(cfg, self.head, generates=RLRoleType.ROLLOUT in roles),
            *(f"data: {where}, {NOT_LOOKED_UP}" for where in unread),
            f"each step: {self.describe_step(cfg)}",
            *self._plan_memory(cfg, roles).lines(),
            *super().describe_config(config, roles),
        ]

    @abstractmethod
    def describe_step(self, cfg: Any) -> str:
        """Describe the rows of a step, and their division into updates."""

    @abstractmethod
    def longest_row(self, cfg: Any) -> tuple[int, bool]:
        """Return the tokens of the longest row by the configuration, and True if no row can be longer."""

    def read_algorithm(self, cfg: Any) -> tuple[Algorithm | None, list[ConfigError]]:
        """Return the algorithm without its wrong options, None if this recipe does not have it, and the errors."""
        try:
            return self.trainer.algorithm_of(cfg), []
        except InvalidJob as error:
            return error.salvaged, [ConfigError(f"config.{item.where}", item.what) for item in error.errors]

    @property
    def head(self) -> Head:
        return "token" if self.trainer.bare_head else "causal"

    def models(self, cfg: Any) -> dict[RLRoleType, ModelUse]:
        trained = ModelUse("trained", cfg.model, optimizer=cfg.optimizer, lora=cfg.engine.lora, head=self.head)
        reference = self.trainer.reference_of(cfg)
        return {
            RLRoleType.ACTOR: trained,
            RLRoleType.ROLLOUT: ModelUse("rollout", cfg.model),
            RLRoleType.REFERENCE: ModelUse("frozen", reference, sharded_class="ShardedReferenceWorkload"),
        }

    def model_uses(self, cfg: Any, roles: Mapping[RLRoleType, int]) -> dict[RLRoleType, ModelUse]:
        longest, bounded = self.longest_row(cfg)
        return {
            role: replace(use, members=roles[role], longest=longest, bounded=bounded)
            for role, use in self.models(cfg).items()
            if role in roles
        }

    def _plan_memory(self, cfg: Any, roles: Mapping[RLRoleType, int]) -> MemoryPlan:
        uses = self.model_uses(cfg, roles) if cfg.engine.device.startswith("cuda") else {}
        return MemoryPlan(uses, cfg.engine, cfg.model, cfg.model_config, device_bytes(cfg.engine)).size_passes()

    def find_errors(self, cfg: Any, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        engine = cfg.engine
        errors = [*validate_model(cfg.model), *validate_optimizer(engine, cfg.optimizer)]
        members, shape = roles.get(RLRoleType.ACTOR, 1), shape_of(cfg.model, cfg.model_config)
        errors += validate_train_engine(engine, members, self.trainer.bare_head, shape=shape)
        # Engines check a config.json that is not on this machine themselves.
        if content := read_config(cfg.model, cfg.model_config):
            faults = [registry.engine_info(registry.TRAIN_ENGINES, engine.train).find_model_fault(content, self.head)]
            if RLRoleType.ROLLOUT in roles:
                faults.append(
                    registry.engine_info(registry.ROLLOUT_ENGINES, engine.rollout).find_model_fault(content, "causal")
                )
            errors += [ConfigError("config.model", fault) for fault in dict.fromkeys(faults) if fault]
        errors += validate_keep(cfg.keep, cfg.eval_every, self.trainer.evaluation_names(cfg, roles))
        errors += [*validate_model_config(cfg.model_config), *self._plan_memory(cfg, roles).find_errors()]
        return [*errors, *validate_log(cfg.log)]


def complete_config(schema: type[T], config: Any, devices: Devices) -> T:
    """Complete ``config`` with defaults. Raises InvalidJob with all errors, of its device too."""
    values, _ = rename_keys(schema, to_plain(config) or {}, "config")
    engine = (values.get("engine") or {}) if isinstance(values, Mapping) else {}
    device = str(engine.get("device", AUTO)) if isinstance(engine, Mapping) else AUTO
    on_cuda = _is_cuda(device, devices)
    if on_cuda:
        names = {field.name for field in dataclasses.fields(cast(Any, schema))}
        values = _merge({name: value for name, value in ON_CUDA.items() if name in names}, values)
    cfg: Any = require(schema, values, "config")
    resolved: T = replace(cfg, engine=cfg.engine.resolve(on_cuda))
    return resolved


def _is_cuda(device: str, devices: Devices) -> bool:
    kind = device.partition(":")[0]
    if devices == "HERE":
        available = torch.cuda.is_available()
        if kind == "cuda" and not available:
            message = f"'{device}', but PyTorch finds no CUDA device here; write engine.device=auto"
            raise InvalidJob([ConfigError(_DEVICE, message)])
        return available if kind == AUTO else kind == "cuda"
    has_gpus = devices == "GPU"
    if kind in ("cpu", "cuda") and has_gpus != (kind == "cuda"):
        reason = "its GPUs would be idle" if has_gpus else "no GPU is reserved"
        advice = f"write trainer.device_type={'CPU' if has_gpus else 'GPU'} or engine.device=auto"
        raise InvalidJob([ConfigError(_DEVICE, f"'{device}', but the job runs on {devices}s: {reason}; {advice}")])
    return has_gpus


def _merge(defaults: Mapping[str, Any], values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    merged = {**defaults, **values}
    nested = {name: default for name, default in defaults.items() if isinstance(default, Mapping) and name in values}
    return merged | {name: _merge(default, values[name]) for name, default in nested.items()}


def validate_train_engine(
    engine: EngineConfig, members: int, bare_head: bool = False, role: str = "actor", shape: ModelShape | None = None
) -> list[ConfigError]:
    """Check that the engine exists, supports the settings, and can divide the workers of ``role``."""
    where = "config.engine.train"
    errors = registry.validate_engine(
        registry.TRAIN_ENGINES, engine.train, engine.train_options, where, _runs_here(engine, role)
    )
    info, sizes, lora = (
        registry.engine_info(registry.TRAIN_ENGINES, engine.train),
        engine.parallel or ParallelSizes(),
        engine.lora,
    )
    faults = registry.find_train_errors(engine.train, info, sizes, lora, bare_head, engine.train_options)
    errors += [ConfigError("config.engine", fault) for fault in faults]
    if role == "actor" and lora is not None:
        faults = [] if lora.targets else ["names no layer: 'all-linear' is all layers except the output layer"]
        if shape is not None:
            faults += (shape.with_score_head() if bare_head else shape).find_target_errors(lora)
        errors += [ConfigError("config.engine.lora.targets", fault) for fault in faults]
        errors += [ConfigError("config.engine.lora", fault) for fault in _find_absent(engine, registry.require_peft)]
        absent = _find_absent(engine, registry.require_bitsandbytes) if lora.quantize_base is not None else []
        errors += [ConfigError("config.engine.lora.quantize_base", fault) for fault in absent]
    try:
        Layout.of(members, sizes)
    except EngineError as error:
        return [*errors, ConfigError("config.engine.parallel", f"{error}: they are workers of the {role}")]
    if role == "actor" and members > 1 and engine.weight_sync == "cuda_ipc":
        message = f"'cuda_ipc' needs one actor, on the rollouts' device, not {members}: use 'pull'"
        errors.append(ConfigError("config.engine.weight_sync", message))
    return errors


def validate_rollout_engine(engine: EngineConfig) -> list[ConfigError]:
    where = "config.engine.rollout"
    errors = registry.validate_engine(
        registry.ROLLOUT_ENGINES, engine.rollout, engine.rollout_options, where, _runs_here(engine, "rollout")
    )
    errors += validate_transport(engine.weight_sync, engine.weight_sync_options, engine.device)
    split, info = engine.rollout_tensor_parallel_size, registry.engine_info(registry.ROLLOUT_ENGINES, engine.rollout)
    faults = registry.find_rollout_errors(engine.rollout, info, split)
    return [*errors, *(ConfigError("config.engine.rollout_tensor_parallel_size", fault) for fault in faults)]


def validate_optimizer(
    engine: EngineConfig, optimizer: OptimizerConfig, where: str = "config.optimizer"
) -> list[ConfigError]:
    info, sizes = registry.engine_info(registry.TRAIN_ENGINES, engine.train), engine.parallel or ParallelSizes()
    errors = registry.find_optimizer_errors(engine.train, info, optimizer, sizes.tensor_parallel_size)
    errors += _find_absent(engine, registry.require_bitsandbytes) if optimizer.name == "adamw_8bit" else []
    return [ConfigError(f"{where}.name", error) for error in errors]


def _runs_here(engine: EngineConfig, role: str) -> bool:
    """Return False for devices that this machine lacks, since the job is for another one, and for another interpreter's
    role."""
    return not runs_elsewhere(role) and (not engine.device.startswith("cuda") or torch.cuda.is_available())


def _find_absent(engine: EngineConfig, require_package: Callable[[], None]) -> list[str]:
    try:
        if _runs_here(engine, "actor"):
            require_package()
    except MissingExtra as error:
        return [str(error)]
    return []


def validate_reward(function: str | Mapping[str, float], where: str = "config.reward") -> list[ConfigError]:
    errors = []
    for name in [function] if isinstance(function, str) else function:
        try:
            RewardFunction(load_function(name)).check(name)
        except VerifierError as error:
            errors.append(ConfigError(f"{where}.function", str(error)))
    return errors if function else [ConfigError(f"{where}.function", "names no function")]


def describe_engines(cfg: Any, head: Head = "causal", generates: bool = True) -> list[str]:
    model, engine, size = cfg.model, cfg.engine, ""
    parameters, shape = parameters_of(model, cfg.model_config), shape_of(model, cfg.model_config)
    if parameters is not None:
        weights = parameters * (2 if engine.precision == "bf16" else 4)
        uses = [f"{short_number(weights)}B of weights to generate"] if generates else []
        if shape is not None and not is_on_host(engine):
            use = ModelUse("trained", model, optimizer=cfg.optimizer, lora=engine.lora, head=head)
            planned = bytes_of(shape, use, replace(engine, parallel=None))
            trained = int(planned.weights + planned.gradients + planned.optimizer)
            uses.append(f"{short_number(trained)}B to train, activations not counted")
        size = "; ".join([f", {short_number(parameters)} parameters", *filter(None, [", ".join(uses)])])
    elif current_lookup() == "none" and not Path(model).expanduser().is_dir():
        size = f", {NOT_LOOKED_UP}"
    absent = {
        registry.absent_package(registry.TRAIN_ENGINES, engine.train, engine.train_options),
        registry.absent_package(registry.ROLLOUT_ENGINES, engine.rollout, engine.rollout_options) if generates else "",
    }
    rollout = f", rollout {engine.rollout}" if generates else ""
    return [
        f"model: {model}{size}",
        f"engines: train {engine.train}{rollout}, on {engine.device} in {engine.precision}",
        *(f"  {package} is not on this machine; the job's machines need it" for package in sorted(absent) if package),
    ]
