# SPDX-License-Identifier: Apache-2.0
"""Checks of the parts of a job against each other: roles, data, algorithm, reward function, engines, model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.registry import ALGORITHMS, option_names
from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import (
    ConfigError,
    EngineError,
    EnvironmentFailed,
    InvalidJob,
    MissingExtra,
    VerifierError,
)
from dlrover.python.rl.common.names import WELL_KNOWN_ROLES, RLRoleType, nearest
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig
from dlrover.python.rl.engine.api.registry import (
    ROLLOUT_ENGINES,
    TRAIN_ENGINES,
    engine_info,
    find_optimizer_errors,
    find_rollout_errors,
    find_train_errors,
    require_bitsandbytes,
    require_peft,
    validate_engine,
)
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.model.model_shape import ModelShape
from dlrover.python.rl.engine.weight_sync.transports import validate_transport, validate_transport_options
from dlrover.python.rl.environment.core.functions import find_environment, load_function
from dlrover.python.rl.environment.core.scoring import RewardFunction
from dlrover.python.rl.environment.core.turns import ROW
from dlrover.python.rl.recipe.base.config import AUTO, EngineConfig, PolicyConfig
from dlrover.python.rl.recipe.base.model_files import count_room

_ENGINE_COLUMNS = frozenset({"entropy", "candidate_logprobs"})
"""Columns that train engines compute for a loss."""

_OF_ENVIRONMENTS = (
    "env_options",
    "env_isolated",
    "env_timeout_s",
    "env_missing_state",
    "env_failure_reward",
    "max_turns",
)
_OF_REWARD_ROLES = ("function", "model", "thoughts", "timeout_s", "workers", "memory_mb")
"""Settings of ``reward`` that an environment has no use for; the others are about failed samples."""

_RECIPES = {"values": "ppo", "teacher_logprobs": "distill", "candidates": "distill"}
"""The recipe whose trainer has a column."""

_FROM_EXAMPLES = (SFT, DPO, RewardModel)


def point_to_options(errors: Iterable[ConfigError], algorithm: str) -> list[ConfigError]:
    """``errors``; those of unknown keys that are options of ``algorithm`` say where it has them."""
    options, answered = option_names(algorithm), list[ConfigError]()
    for error in errors:
        key = error.where.rpartition(".")[2]
        if error.what.startswith("unknown key") and key in options:
            error = ConfigError(error.where, f"unknown key '{key}'; did you mean 'algorithm.{key}'?")
        answered.append(error)
    return answered


def validate_reward(function: str | Mapping[str, float], where: str = "config.reward") -> list[ConfigError]:
    errors = []
    for name in [function] if isinstance(function, str) else function:
        try:
            RewardFunction(load_function(name)).check(name)
        except VerifierError as error:
            errors.append(ConfigError(f"{where}.function", str(error)))
    return errors if function else [ConfigError(f"{where}.function", "names no function")]


def validate_train_engine(
    engine: EngineConfig, members: int, bare_head: bool = False, role: str = "actor", shape: ModelShape | None = None
) -> list[ConfigError]:
    """Whether there is such an engine, that can do what is asked of it, and whether its sizes divide the members of a
    role that trains; ``shape``: of the actor's model."""
    where = "config.engine.train"
    errors = validate_engine(TRAIN_ENGINES, engine.train, engine.train_options, where, _runs_here(engine))
    info, sizes = engine_info(TRAIN_ENGINES, engine.train), engine.parallel or ParallelSizes()
    faults = find_train_errors(engine.train, info, sizes, engine.lora, bare_head, engine.train_options)
    errors += [ConfigError("config.engine", fault) for fault in faults]
    shape = shape.with_score_head() if shape is not None and bare_head else shape
    errors += _find_adapter_errors(engine, engine.lora, shape) if role == "actor" and engine.lora is not None else []
    try:
        Layout.of(members, sizes)
    except EngineError as error:
        return [*errors, ConfigError("config.engine.parallel", f"{error}: they are members of the {role}")]
    if role == "actor" and members > 1 and engine.weight_sync == "cuda_ipc":
        what = (
            f"'cuda_ipc' needs one actor, which has the rollouts' device, and there are {members}: 'pull' needs nothing"
        )
        errors.append(ConfigError("config.engine.weight_sync", what))
    return errors


def _find_adapter_errors(engine: EngineConfig, lora: LoraSettings, shape: ModelShape | None) -> list[ConfigError]:
    faults = [] if lora.targets else ["names no layer: 'all-linear' is all of them but the output layer"]
    faults += [] if shape is None else shape.find_target_errors(lora)
    errors = [ConfigError("config.engine.lora.targets", fault) for fault in faults]
    errors += [ConfigError("config.engine.lora", fault) for fault in _find_absent(engine, require_peft)]
    absent = _find_absent(engine, require_bitsandbytes) if lora.quantize_base is not None else []
    return errors + [ConfigError("config.engine.lora.quantize_base", fault) for fault in absent]


def _runs_here(engine: EngineConfig) -> bool:
    """False for devices that this machine has not: then the job is for others."""
    return not engine.device.startswith("cuda") or torch.cuda.is_available()


def validate_family(content: Mapping[str, Any], engine: EngineConfig, head: str, generates: bool) -> list[ConfigError]:
    """The engines have to take a model with this ``config.json``; empty: it is not known here."""
    parts = [(TRAIN_ENGINES, engine.train, head), *([(ROLLOUT_ENGINES, engine.rollout, "causal")] if generates else [])]
    faults = [engine_info(point, name).find_model_fault(content, kind) for point, name, kind in parts if content]
    return [ConfigError("config.model", fault) for fault in dict.fromkeys(faults) if fault]


def validate_options(make: Callable[[], Algorithm], engine: EngineConfig) -> list[ConfigError]:
    """Options of the algorithm, the engines and the transport, wherever the job is to run; unknown names of these may
    be those of extensions which are there."""
    where, errors = "config.engine", list[ConfigError]()
    try:
        make()
    except InvalidJob as error:
        errors = [ConfigError(f"config.{item.where}", item.what) for item in error.errors]
    errors += validate_engine(TRAIN_ENGINES, engine.train, engine.train_options, f"{where}.train", False)
    if engine.rollout != AUTO:  # by what is installed there
        errors += validate_engine(ROLLOUT_ENGINES, engine.rollout, engine.rollout_options, f"{where}.rollout", False)
    errors += validate_transport_options(engine.weight_sync_options)
    names = [f"{where}.train", f"{where}.rollout", "config.algorithm.name"]
    return [error for error in errors if error.where not in names]


def validate_optimizer(
    engine: EngineConfig, optimizer: OptimizerConfig, where: str = "config.optimizer"
) -> list[ConfigError]:
    info, sizes = engine_info(TRAIN_ENGINES, engine.train), engine.parallel or ParallelSizes()
    errors = find_optimizer_errors(engine.train, info, optimizer, sizes.tensor_parallel_size)
    errors += _find_absent(engine, require_bitsandbytes) if optimizer.name == "adamw_8bit" else []
    return [ConfigError(f"{where}.name", error) for error in errors]


def _find_absent(engine: EngineConfig, require_package: Callable[[], None]) -> list[str]:
    try:
        if _runs_here(engine):
            require_package()
    except MissingExtra as error:
        return [str(error)]
    return []


def validate_rollout_engine(engine: EngineConfig) -> list[ConfigError]:
    where = "config.engine.rollout"
    errors = validate_engine(ROLLOUT_ENGINES, engine.rollout, engine.rollout_options, where, _runs_here(engine))
    errors += validate_transport(engine.weight_sync, engine.weight_sync_options, engine.device)
    split = find_rollout_errors(
        engine.rollout, engine_info(ROLLOUT_ENGINES, engine.rollout), engine.rollout_tensor_parallel_size
    )
    return [*errors, *(ConfigError("config.engine.rollout_tensor_parallel_size", fault) for fault in split)]


def validate_rollout(cfg: PolicyConfig) -> list[ConfigError]:
    """Check how completions are generated, filtered and scored."""
    errors = [*validate_rollout_engine(cfg.engine), *_validate_new_tokens(cfg)]
    rollout, reward = cfg.rollout, cfg.reward
    if rollout.dynamic_filtering != "off" and rollout.samples_per_prompt == 1:
        what = "compares the samples of a prompt: rollout.samples_per_prompt has to be at least 2"
        errors.append(ConfigError("config.rollout.dynamic_filtering", what))
    if rollout.env_path is None:
        errors += [
            ConfigError(f"config.rollout.{name}", "there is no env_path")
            for name in find_changed(cfg, "rollout", _OF_ENVIRONMENTS)
            if name != "max_turns" or rollout.max_turns > 1  # a completion is one turn
        ]
        return [*errors, *validate_reward(reward.function)]
    errors += [
        ConfigError(f"config.reward.{name}", "is not used: rollout.env_path scores the samples")
        for name in find_changed(cfg, "reward", _OF_REWARD_ROLES)
    ]
    try:
        find_environment(rollout.env_path, rollout.env_options)
    except EnvironmentFailed as error:
        errors.append(ConfigError("config.rollout.env_path", str(error)))
    return errors


def find_changed(cfg: Any, section: str, names: Sequence[str]) -> list[str]:
    """Which settings of a section differ from the default of this recipe, which may not be that of others."""
    declared = next(item for item in fields(cfg) if item.name == section)
    made = declared.default_factory() if declared.default_factory is not MISSING else declared.default
    given = getattr(cfg, section)
    default = type(given)() if made is MISSING else made
    return [name for name in names if getattr(given, name) != getattr(default, name)]


def validate_roles(trainer: str, cfg: PolicyConfig, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
    """Find roles that a trainer of this name lacks."""
    needed = [RLRoleType.ROLLOUT, *([RLRoleType.REWARD] if cfg.rollout.env_path is None else [])]
    return [error for role in needed for error in require_role(trainer, role, roles)]


def require_role(trainer: str, role: RLRoleType, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
    if role in roles:
        return []
    near = nearest(role, [name for name in roles if name not in WELL_KNOWN_ROLES])
    also = f", and the job has '{near.lower()}'; did you mean '{role.lower()}'?" if near else ""
    return [ConfigError("workload", f"the role '{role.lower()}' is required by {trainer}{also}")]


def validate_algorithm(
    make: Callable[[], Algorithm], provided: frozenset[str], cfg: PolicyConfig, roles: Mapping[RLRoleType, int]
) -> list[ConfigError]:
    """Check that the algorithm exists, learns from samples, and needs no column besides ``provided``, the trainer's."""
    errors: list[ConfigError] = []
    try:
        algorithm = make()
    except InvalidJob as error:
        errors = [ConfigError(f"config.{item.where}", item.what) for item in error.errors]
        name = str(cfg.algorithm.get("name", ""))
        if ":" not in name and name not in (places := ALGORITHMS.places()):
            names = [other for other in places if not issubclass(ALGORITHMS.load(other), _FROM_EXAMPLES)]
            errors = [ConfigError("config.algorithm.name", ALGORITHMS.describe_unknown(name, names))]
        if error.salvaged is None:
            return errors
        algorithm = error.salvaged
    if isinstance(algorithm, _FROM_EXAMPLES):
        what = "it learns from examples, not from samples as this trainer does"
        return [*errors, ConfigError("config.algorithm.name", what)]
    try:
        algorithm.check_group_size(cfg.rollout.samples_per_prompt)
    except ValueError as error:
        errors.append(ConfigError("config.rollout.samples_per_prompt", str(error)))
    longest = cfg.rollout.max_new_tokens * (cfg.rollout.max_turns if cfg.rollout.env_path else 1)
    if isinstance(algorithm, DAPO) and not algorithm.can_penalize(longest):
        what = f"completions have {longest} tokens at most, so none gets to where over-long shaping begins"
        errors.append(ConfigError("config.algorithm.max_tokens", what))
    generated = engine_info(ROLLOUT_ENGINES, cfg.engine.rollout).columns.keys()
    if clash := sorted(generated & (provided | _ENGINE_COLUMNS | ROW.keys())):
        errors.append(ConfigError("config.engine.rollout", f"declares a column '{clash[0]}', which the trainer has"))
    provided |= generated
    absent = algorithm.needs.annotate - provided | algorithm.needs.loss - provided - _ENGINE_COLUMNS
    if absent:
        where = {_RECIPES[name] for name in absent if name in _RECIPES}
        more = f"; the trainer of recipe.{where.pop()} has it" if len(where) == 1 else ""
        what = f"it needs {', '.join(sorted(absent))}, which this trainer does not have{more}"
        errors.append(ConfigError("config.algorithm", what))
    if "ref_logprobs" in algorithm.needs.all and RLRoleType.REFERENCE not in roles and cfg.engine.lora is None:
        errors.append(ConfigError("workload", "config.algorithm.kl_coef is above 0, which needs the role 'reference'"))
    return errors


def _validate_new_tokens(cfg: PolicyConfig) -> list[ConfigError]:
    """The default is cut to the room; a larger number is a mistake."""
    room, count = count_room(cfg, generates=True), cfg.rollout.max_new_tokens
    if room is None or count < max(room, type(cfg.rollout).max_new_tokens + 1):
        return []
    message = f"{count}, but a sequence has at most {room} tokens, its prompt's among them: write less than {room}"
    return [ConfigError("config.rollout.max_new_tokens", message)]
