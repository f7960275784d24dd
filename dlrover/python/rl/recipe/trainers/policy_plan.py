# SPDX-License-Identifier: Apache-2.0
"""The plan of trainers that learn from samples: it checks that roles, columns, rollouts and rewards fit each other."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.registry import ALGORITHMS, always_recomputes, option_names
from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import ConfigError, EnvironmentFailed, MissingExtra
from dlrover.python.rl.common.names import WELL_KNOWN_ROLES, RLRoleType, nearest
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_info
from dlrover.python.rl.environment.core.agents import find_agent, require_openai
from dlrover.python.rl.environment.core.functions import find_environment
from dlrover.python.rl.environment.core.turns import ROW
from dlrover.python.rl.recipe.base.config import AgentConfig, PolicyConfig
from dlrover.python.rl.recipe.base.model_files import count_room
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse
from dlrover.python.rl.recipe.online.prompts import validate_data, warn_of_repeats
from dlrover.python.rl.recipe.trainers.recipe_plan import RecipePlan, validate_reward, validate_rollout_engine

_ENGINE_COLUMNS = frozenset({"entropy", "candidate_logprobs"})  # columns that train engines compute for a loss
_OF_ENVIRONMENTS = ("env_options", "env_isolated", "env_timeout_s", "env_missing_state", "env_failure_reward")
_OF_REWARD_ROLES = ("function", "model", "thoughts", "timeout_s", "workers", "memory_mb")
"""Settings of ``reward`` that an environment does not use; the other settings are about failed samples."""

_RECIPES = {"values": "ppo", "teacher_logprobs": "distill", "candidates": "distill"}
"""The recipe whose trainer has a column."""

_FROM_EXAMPLES = (SFT, DPO, RewardModel)


class PolicyPlan(RecipePlan):
    """Plans jobs of a :class:`~dlrover.python.rl.recipe.trainers.policy_trainer.PolicyTrainer`."""

    def algorithm_defaults(self, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Turn the correction on if rollouts and training differ in more than float32 rounding, or if samples may be
        stale and the algorithm compares with the policy before the update rather than with the rollouts' policy."""
        differs = config["engine"]["rollout"] != "torch" or config["engine"]["precision"] != "fp32"
        stale = config["rollout"]["max_staleness"] > 0 and always_recomputes(name)
        return {"correction": "truncate"} if (differs or stale) and "correction" in option_names(name) else {}

    def longest_row(self, cfg: PolicyConfig) -> tuple[int, bool]:
        turns = cfg.rollout.max_turns if cfg.has_environment else 1
        is_bounded = cfg.data.max_prompt_tokens is not None and not cfg.has_environment
        return (cfg.data.max_prompt_tokens or 0) + turns * cfg.rollout.max_new_tokens, is_bounded

    def models(self, cfg: PolicyConfig) -> dict[RLRoleType, ModelUse]:
        models = super().models(cfg)
        if cfg.reward.model is not None:
            models[RLRoleType.REWARD] = ModelUse("frozen", cfg.reward.model, head="token")
        return {**models, **self.trainer.further_models(cfg)}

    def describe_step(self, cfg: PolicyConfig) -> str:
        samples = cfg.prompts_per_step * cfg.rollout.samples_per_prompt
        updates = cfg.updates_per_step * cfg.epochs
        turns = f" in up to {cfg.rollout.max_turns} turns" if cfg.has_environment else ""
        return (
            f"{cfg.prompts_per_step} prompts x {cfg.rollout.samples_per_prompt} samples = {samples} of up to"
            f" {cfg.rollout.max_new_tokens} new tokens{turns}; {updates} update{'s' if updates > 1 else ''} of"
            f" {-(-samples // cfg.updates_per_step)}"
        )

    def describe_config(self, config: Any, roles: Mapping[RLRoleType, int]) -> list[str]:
        repeats = warn_of_repeats(require(self.trainer.config_class, config, "config"))
        return [*super().describe_config(config, roles), *repeats]

    def find_errors(self, cfg: PolicyConfig, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        errors = [*super().find_errors(cfg, roles), *validate_data(cfg)]
        needed = [RLRoleType.ROLLOUT, *([RLRoleType.REWARD] if not cfg.has_environment else [])]
        errors += [error for role in needed for error in require_role(self.trainer.__name__, role, roles)]
        errors += [*self._validate_rollout(cfg), *self._validate_algorithm(cfg, roles)]
        errors += self.trainer.validate_own(cfg, roles)
        outputs, needs = self.trainer.aux_outputs(cfg), self.trainer.needs_of(cfg)
        is_unfit = any(error.where in ("config.algorithm", "config.algorithm.name") for error in errors)
        for output in () if is_unfit else outputs:
            is_reported = any(f"'{output.role}'" in error.what for error in errors)
            by_actor = output.role == "reference" and cfg.engine.lora is not None
            if output.is_needed(needs) and not is_reported and not by_actor:
                errors += require_role(self.trainer.__name__, RLRoleType(output.role), roles)
        return errors

    def _validate_rollout(self, cfg: PolicyConfig) -> list[ConfigError]:
        errors, rollout = validate_rollout_engine(cfg.engine), cfg.rollout
        room, count = count_room(cfg, generates=True), rollout.max_new_tokens
        if room is not None and count >= max(room, type(rollout).max_new_tokens + 1):  # the default is cut to the room
            limit = f"a sequence has at most {room} tokens with its prompt: write less than {room}"
            errors.append(ConfigError("config.rollout.max_new_tokens", f"{count}, but {limit}"))
        if rollout.dynamic_filtering != "off" and rollout.samples_per_prompt == 1:
            errors.append(ConfigError("config.rollout.dynamic_filtering", "needs rollout.samples_per_prompt above 1"))
        if (host := cfg.environment.host) in ("", "0.0.0.0", "::"):
            message = f"agents cannot send requests to '{host}': give an address of the worker's node"
            errors.append(ConfigError("config.environment.host", message))
        return [*errors, *self._validate_scoring(cfg)]

    def _validate_scoring(self, cfg: PolicyConfig) -> list[ConfigError]:
        """Return the errors of what rewards the samples: an environment, an agent, or the role REWARD."""
        rollout, agent = cfg.rollout, cfg.environment
        changed = find_changed(cfg, "rollout", _OF_ENVIRONMENTS) if rollout.env_path is None else []
        if agent.agent is not None:
            changed = [name for name in changed if name != "env_failure_reward"]
        elif rollout.max_turns > 1 and rollout.env_path is None:  # a completion is one turn: 1 says nothing else
            changed += find_changed(cfg, "rollout", ["max_turns"])
        errors = [ConfigError(f"config.rollout.{name}", "there is no env_path") for name in changed]
        if agent.agent is None:
            changed = find_changed(cfg, "environment", [item.name for item in fields(AgentConfig)])
            errors += [ConfigError(f"config.environment.{name}", "there is no agent") for name in changed]
        if not cfg.has_environment:
            return [*errors, *validate_reward(cfg.reward.function)]
        source = "rollout.env_path" if rollout.env_path is not None else "environment.agent"
        for name in find_changed(cfg, "reward", _OF_REWARD_ROLES):
            errors.append(ConfigError(f"config.reward.{name}", f"is not used: {source} scores the samples"))
        try:
            if rollout.env_path is not None:
                find_environment(rollout.env_path, rollout.env_options)
            elif agent.agent is not None:
                find_agent(agent.agent, agent.options)
                require_openai()
        except (EnvironmentFailed, MissingExtra) as error:
            errors.append(ConfigError(f"config.{source}", str(error)))
        if rollout.env_path is not None and agent.agent is not None:
            errors.append(ConfigError("config.environment.agent", "rollout.env_path is set, too: give one of them"))
        return errors

    def _validate_algorithm(self, cfg: PolicyConfig, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
        algorithm, errors = self.read_algorithm(cfg)
        name = str(cfg.algorithm.get("name", ""))
        if errors and ":" not in name and name not in (places := ALGORITHMS.places()):
            names = [place for place in places if not issubclass(ALGORITHMS.load(place), _FROM_EXAMPLES)]
            errors = [ConfigError("config.algorithm.name", ALGORITHMS.describe_unknown(name, names))]
        if algorithm is None:
            return errors
        if isinstance(algorithm, _FROM_EXAMPLES):
            return [*errors, ConfigError("config.algorithm.name", "it learns from examples, not from samples")]
        try:
            algorithm.check_group_size(cfg.rollout.samples_per_prompt)
        except ValueError as error:
            errors.append(ConfigError("config.rollout.samples_per_prompt", str(error)))
        longest = cfg.rollout.max_new_tokens * (cfg.rollout.max_turns if cfg.has_environment else 1)
        if isinstance(algorithm, DAPO) and not algorithm.can_penalize(longest):
            message = f"completions have at most {longest} tokens, so none is long enough for over-long shaping"
            errors.append(ConfigError("config.algorithm.max_tokens", message))
        errors += self._validate_columns(cfg, algorithm.needs)
        if "ref_logprobs" in algorithm.needs.all and RLRoleType.REFERENCE not in roles and cfg.engine.lora is None:
            errors.append(ConfigError("workload", "config.algorithm.kl_coef above 0 needs the role 'reference'"))
        return errors

    def _validate_columns(self, cfg: PolicyConfig, needs: Any) -> list[ConfigError]:
        trainer = self.trainer
        provided = trainer.own_columns | {name for output in trainer.aux_outputs(cfg) for name in output.columns}
        generated, errors = engine_info(ROLLOUT_ENGINES, cfg.engine.rollout).columns.keys(), list[ConfigError]()
        if clash := sorted(generated & (provided | _ENGINE_COLUMNS | ROW.keys())):
            message = f"declares a column '{clash[0]}', which the trainer has already"
            errors.append(ConfigError("config.engine.rollout", message))
        provided |= generated
        if absent := needs.annotate - provided | needs.loss - provided - _ENGINE_COLUMNS:
            recipes = {_RECIPES[name] for name in absent if name in _RECIPES}
            more = f"; the trainer of recipe.{recipes.pop()} has it" if len(recipes) == 1 else ""
            message = f"it needs {', '.join(sorted(absent))}, which this trainer does not have{more}"
            errors.append(ConfigError("config.algorithm", message))
        return errors


def require_role(trainer: str, role: RLRoleType, roles: Mapping[RLRoleType, int]) -> list[ConfigError]:
    if role in roles:
        return []
    near = nearest(role, [name for name in roles if name not in WELL_KNOWN_ROLES])
    meant = f", and the job has '{near.lower()}'; did you mean '{role.lower()}'?" if near else ""
    return [ConfigError("workload", f"the role '{role.lower()}' is required by {trainer}{meant}")]


def find_changed(cfg: Any, section: str, names: Sequence[str]) -> list[str]:
    """List the settings of a section that differ from the default of this recipe, which may differ from others'."""
    declared = next(item for item in fields(cfg) if item.name == section)
    default = declared.default_factory() if declared.default_factory is not MISSING else declared.default
    settings = getattr(cfg, section)
    default = type(settings)() if default is MISSING else default
    return [name for name in names if getattr(settings, name) != getattr(default, name)]
