# SPDX-License-Identifier: Apache-2.0
"""Short forms of a job file: a recipe, which stands for classes; roles that are a number or a program.

::

    recipe: grpo                                         # or module:Class of your own trainer
    roles: {actor: 8, rollout: {num: 8, standby: 1}}     # another name of workload
    workload: {train: {command: "python train.py"}}      # config.scripts gets the programs by role
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import hint, nearest

ROLES = ("workload", "roles")
"""The names of the section with the roles."""

_PACKAGE = "dlrover.python.rl.recipe"
_WORKLOADS = f"{_PACKAGE}.workloads"
_CLASSES = ("module", "class")


@dataclass(frozen=True)
class Recipe:
    """A trainer, and the roles that its jobs have."""

    trainer: str
    """``module:Class``; names only, since describing a job imports no recipe."""

    needs: tuple[str, ...] = ("actor",)
    """Roles that have one member in a job whose file leaves them out."""

    options: tuple[str, ...] = ()
    """Further roles."""

    actor: str = "ActorWorkload"
    """Class of the actor; other classes are named after their roles."""

    def workload(self, role: str, config: Any) -> str:
        """The class of a role, which depends on some settings; empty for a role that the recipe does not have."""
        if role in _teachers(config):
            return "ShardedTeacherWorkload" if _setting(config, "engine.shard_frozen") else "TeacherWorkload"
        if role not in (*self.needs, *self.options):
            return ""
        if role == "reward" and _setting(config, "reward.model"):
            return "ModelRewardWorkload"
        if role == "reference" and _setting(config, "engine.shard_frozen"):
            return "ShardedReferenceWorkload"
        return self.actor if role == "actor" else f"{role.capitalize()}Workload"

    def needed(self, config: Any) -> list[str]:
        """The roles of ``needs``, and the teachers; an environment scores samples without a reward."""
        unused = {"reward"} if _setting(config, "rollout.env_path") else set()
        return [role for role in (*self.needs, *_teachers(config)) if role not in unused]


_SAMPLING = ("actor", "rollout", "reward")

RECIPES: Mapping[str, Recipe] = {
    "sft": Recipe(f"{_PACKAGE}.sft:SFTTrainer"),
    "rm": Recipe(f"{_PACKAGE}.rm:RMTrainer", actor="ScorerWorkload"),
    "dpo": Recipe(f"{_PACKAGE}.dpo:DPOTrainer", ("actor", "reference")),
    "grpo": Recipe(f"{_PACKAGE}.grpo:GRPOTrainer", _SAMPLING, ("reference",)),
    "ppo": Recipe(f"{_PACKAGE}.ppo:PPOTrainer", (*_SAMPLING, "critic"), ("reference",)),
    "distill": Recipe(f"{_PACKAGE}.distill:DistillationTrainer", _SAMPLING, ("reference", "teacher")),
}
"""The recipes by name."""


def with_recipe(values: Mapping[str, Any], config: Any) -> tuple[dict[str, Any], list[ConfigError]]:
    """The values of a layout with numbers of members as mappings, and the classes and missing roles of ``recipe``.
    Whatever cannot be filled in has an empty name beside its error."""
    filled = dict(values)
    if isinstance(roles := values.get("workload"), Mapping):
        filled["workload"] = {
            role: {"num": spec} if isinstance(spec, int | float) else spec for role, spec in roles.items()
        }
    if "recipe" not in filled:
        return filled, []
    name, errors = filled.pop("recipe"), list[ConfigError]()
    recipe = RECIPES.get(name) if isinstance(name, str) else None
    if isinstance(name, str) and ":" in name.strip(":"):  # a user's trainer may have all roles
        own = Recipe(name, ("actor",), ("rollout", "reward", "reference", "critic", "teacher"))
        recipe = next((recipe for recipe in RECIPES.values() if recipe.trainer == name), own)
    if recipe is None:
        names = f"{', '.join(RECIPES)}, or module:Class of your trainer"
        is_close = isinstance(name, str) and nearest(name, RECIPES)
        message = f"unknown recipe '{name}'{hint(name, RECIPES)}" if is_close else f"has to be {names}, got {name!r}"
        errors.append(ConfigError("recipe", message))
    trainer = {} if filled.get("trainer") is None else filled["trainer"]
    if isinstance(trainer, Mapping):
        errors += [
            ConfigError(f"trainer.{key}", "recipe names the trainer: leave one of them out")
            for key in _CLASSES
            if key in trainer
        ]
        classes = recipe.trainer.split(":", 1) if recipe is not None else ("", "")
        filled["trainer"] = {**dict(zip(_CLASSES, classes, strict=True)), **trainer}
    if isinstance(roles := filled.get("workload", {}), Mapping):
        filled["workload"] = _with_classes(roles, recipe, config, errors)
        if isinstance(trainer, Mapping):
            _free_devices(filled)
    return filled, errors


def _with_classes(
    roles: Mapping[Any, Any], recipe: Recipe | None, config: Any, errors: list[ConfigError]
) -> dict[str, Any]:
    """``roles`` with the classes of a recipe, which are empty for an unknown one, and the needed roles; adds errors."""
    lower = {str(role).lower() for role in roles}
    needed = recipe.needed(config) if recipe is not None else ["actor"]
    filled: dict[str, Any] = {**roles, **{role: {} for role in needed if role not in lower}}
    for role, spec in filled.items():
        spec = {} if spec is None else spec
        if not isinstance(spec, Mapping) or not spec.keys().isdisjoint((*_PROGRAMS, "module")):
            continue
        class_name = spec.get("class") or (recipe.workload(str(role).lower(), config) if recipe is not None else "")
        if recipe is not None and not class_name:
            names = (*recipe.needs, *recipe.options)
            end = hint(str(role), names)
            own = "" if "did you mean" in end else "; a role of your own needs module and class"
            errors.append(ConfigError(f"workload.{role}", f"the recipe has no role '{role}'{end}{own}"))
        filled[role] = {"module": _WORKLOADS if class_name else "", "class": class_name, **spec}
    return filled


def _free_devices(values: Mapping[str, Any]) -> None:
    """Give rewards that are functions no GPU, unless they share one or the file says otherwise."""
    groups = values.get("workload_group")
    mappings = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    grouped = {str(role).lower() for group in mappings for role in group}
    if values["trainer"].get("device_type", "GPU") != "GPU":
        return
    for role, spec in values["workload"].items():
        is_function = isinstance(spec, dict) and [spec.get(key) for key in _CLASSES] == [_WORKLOADS, "RewardWorkload"]
        if is_function and str(role).lower() not in grouped and isinstance(spec.get("resource"), Mapping | None):
            spec["resource"] = {"gpu": 0, **(spec.get("resource") or {})}


def _setting(config: Any, key: str) -> Any:
    """A value of the user's ``config``; None if there is none, or it cannot be read, which is reported elsewhere."""
    try:
        return None if config is None else OmegaConf.select(config, key, throw_on_resolution_failure=False)
    except OmegaConfBaseException:
        return None


def _teachers(config: Any) -> list[str]:
    teachers = _setting(config, "teachers")
    return [str(name).lower() for name in teachers] if isinstance(teachers, Mapping | DictConfig) else []


# -- roles that are programs -------------------------------------------------------------------------------------------

_PROGRAMS = ("command", "function")
_MODULE = f"{_PACKAGE}.scripts"
_ROLE = {"module": _MODULE, "class": "Script", "hang_after_s": 3600}
_TRAINER = {"module": _MODULE, "class": "ScriptTrainer"}
_MAX_RESTART = 3


def with_scripts(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a layout with classes and limits for such roles, and their programs. Raises InvalidJob."""
    workload: Any = values.get("workload")
    specs = workload.items() if isinstance(workload, Mapping) else ()
    given = {role: spec for role, spec in specs if isinstance(spec, Mapping) and not spec.keys().isdisjoint(_PROGRAMS)}
    if not given:
        return dict(values), {}
    errors = [error for role, spec in given.items() for error in _validate(role, spec)]
    if errors:
        raise InvalidJob(errors)
    roles = {
        role: {**_ROLE, **{key: value for key, value in spec.items() if key not in _PROGRAMS}}
        for role, spec in given.items()
    }
    trainer: Any = {} if values.get("trainer") is None else values["trainer"]
    if isinstance(trainer, Mapping) and len(given) == len(workload) and trainer.keys().isdisjoint(_TRAINER):
        trainer = {**trainer, **_TRAINER}
    restart: dict[str, Any] = dict(values.get("restart") or {})
    limits: dict[str, Any] = dict(restart.get("workload_max_restart") or {})
    limited = {str(role).upper() for role in limits}
    limits |= {role: _MAX_RESTART for role in given if str(role).upper() not in limited}
    changed = {
        "trainer": trainer,
        "workload": {**workload, **roles},
        "restart": {**restart, "workload_max_restart": limits},
    }
    scripts = {
        str(role).lower(): {key: spec[key] for key in _PROGRAMS if spec.get(key)} for role, spec in given.items()
    }
    return {**values, **changed}, scripts


def runs_scripts_only(values: Mapping[str, Any]) -> bool:
    trainer = values.get("trainer")
    return isinstance(trainer, Mapping) and trainer.get("module") == _MODULE


def _validate(role: Any, spec: Mapping[str, Any]) -> list[ConfigError]:
    where, programs = f"workload.{role}", [key for key in _PROGRAMS if spec.get(key)]
    classes = [key for key in _CLASSES if spec.get(key)]
    if classes and programs:
        return [ConfigError(where, f"has {programs[0]} and {classes[0]}: a role is a program or a class")]
    if len(programs) == 2:
        return [ConfigError(where, "has command and function: a role runs one program")]
    if not programs:
        return [ConfigError(where, "its command is empty")]
    program = spec[programs[0]]
    if isinstance(program, str) or (
        programs[0] == "command" and isinstance(program, list) and all(isinstance(part, str) for part in program)
    ):
        return []
    kinds = "text or a list of texts" if programs[0] == "command" else "text, module:function"
    return [ConfigError(f"{where}.{programs[0]}", f"must be {kinds}, got {program!r}")]
