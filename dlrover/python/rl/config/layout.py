# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the layout and its short forms, which fill it in before it is read
"""The layout of a job file: DLRover's ``rl_config``, and its short forms.

::

    name: my-job                       # default: the file's name
    job_dir: out                       # default: each run gets a folder in runs/<name>; or a URL: s3://bucket/run
    overwrite: false                   # true replaces the results in job_dir
    recipe: grpo                       # in place of classes; or module:Class of your own trainer
    trainer: {module, class, node_number, device_type, device_per_node}
    workload:                          # or roles, of which config.scripts gets the programs
      actor: {module, class, num, resource: {cpu, gpu, memory}, env}
      reward: 2                        # a number of workers
      train: {command, num}            # or function; such jobs need no class and no actor
    workload_group: [{actor: 1, reference: 1}]
    env: {KEY: value}
    config: {...}                      # the user's own
    restart: {job_max_restart, ...}
    checkpoint: {every, keep, resume, commit_to, commit_every}
    liveness: {beat_s, ...}"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import RLRoleType, check_job_name, hint, is_role_name, is_url, nearest
from dlrover.python.rl.config.plain import (
    escape_references,
    from_plain,
    map_values,
    salvage_plain,
    validate_resolvers,
    without,
)
from dlrover.python.rl.config.secrets import seal
from dlrover.python.rl.config.spec import (
    RUNS,
    CheckpointSpec,
    JobSpec,
    LivenessSpec,
    MasterSpec,
    NonNegative,
    Positive,
    RestartSpec,
    SchedulingStrategy,
    Seconds,
    TrainerSpec,
    WorkloadSpec,
)
from dlrover.python.rl.config.typed import lies_in, names_by_alias, salvage

ROLES = ("workload", "roles")  # the names of the section with the roles
_PACKAGE = "dlrover.python.rl.recipe"
_WORKLOADS = f"{_PACKAGE}.workloads"
_CLASSES = ("module", "class")


@dataclass(frozen=True)
class Recipe:
    """A trainer and the roles of its jobs."""

    trainer: str  #: ``module:Class``; names only, since describing a job imports no recipe
    needs: tuple[str, ...] = ("actor",)  #: roles that have one worker in a job whose file leaves them out
    options: tuple[str, ...] = ()  #: further roles
    actor: str = "ActorWorkload"  #: class of the actor; other classes are named after their roles

    def workload(self, role: str, config: Any) -> str:
        """Return the class of a role, which depends on some settings; empty for a role that the recipe lacks."""
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
        """Return ``needs`` and the teachers; an environment or an agent scores samples without a reward."""
        has_environment = _setting(config, "rollout.env_path") or _setting(config, "environment.agent")
        return [role for role in (*self.needs, *_teachers(config)) if role != "reward" or not has_environment]


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
    """Fill in the classes and missing roles of ``recipe``, and numbers of workers as mappings; return also errors."""
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
        message = f"unknown recipe '{name}'{hint(name, RECIPES)}" if is_close else f"must be {names}, got {name!r}"
        errors.append(ConfigError("recipe", message))
    trainer = {} if filled.get("trainer") is None else filled["trainer"]
    if isinstance(trainer, Mapping):
        doubled = [key for key in _CLASSES if key in trainer]
        errors += [ConfigError(f"trainer.{key}", "recipe sets the trainer: remove one of the two") for key in doubled]
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
    """Return ``roles`` with the needed roles and the recipe's classes, which are empty for an unknown one."""
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
    """Give rewards that are functions no GPU, unless they share one or the file gives them one."""
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
    """Return a value of the user's ``config``; None if it is missing, or unreadable, which is reported elsewhere."""
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
_RAY, _ADDRESS = "ray", "RAY_ADDRESS"


def with_scripts(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill in classes and limits of roles that are programs. Return the values and the programs; raises InvalidJob."""
    workload: Any = values.get("workload")
    specs = workload.items() if isinstance(workload, Mapping) else ()
    mappings = {role: spec for role, spec in specs if isinstance(spec, Mapping)}
    programs = {role: spec for role, spec in mappings.items() if not spec.keys().isdisjoint(_PROGRAMS)}
    if not programs:
        return dict(values), {}
    errors = [error for role, spec in programs.items() for error in _validate(role, spec)]
    if errors:
        raise InvalidJob(errors)
    roles, scripts = dict(workload), dict[str, Any]()
    for role, spec in programs.items():
        roles[role] = {**_ROLE, **{key: value for key, value in spec.items() if key not in (*_PROGRAMS, _RAY)}}
        scripts[str(role).lower()] = {key: spec[key] for key in _PROGRAMS if spec.get(key)}
        if spec.get(_RAY):
            scripts[str(role).lower()][_RAY] = dict(spec["resource"])
        elif isinstance(env := spec.get("env") or {}, Mapping) and _ADDRESS not in (values.get("env") or {}):
            roles[role]["env"] = {_ADDRESS: "local", **env}  # else it joins the cluster of the job, or any other
    trainer: Any = {} if values.get("trainer") is None else values["trainer"]
    if isinstance(trainer, Mapping) and len(programs) == len(workload) and trainer.keys().isdisjoint(_TRAINER):
        trainer = {**trainer, **_TRAINER}
    restart: dict[str, Any] = dict(values.get("restart") or {})
    limits: dict[str, Any] = dict(restart.get("workload_max_restart") or {})
    limited = {str(role).upper() for role in limits}
    limits |= {role: _MAX_RESTART for role in programs if str(role).upper() not in limited}
    restart["workload_max_restart"] = limits
    return {**values, "trainer": trainer, "workload": roles, "restart": restart}, scripts


def _validate(role: Any, spec: Mapping[str, Any]) -> list[ConfigError]:
    where, programs = f"workload.{role}", [key for key in _PROGRAMS if spec.get(key)]
    classes = [key for key in _CLASSES if spec.get(key)]
    if classes and programs:
        return [ConfigError(where, f"has {programs[0]} and {classes[0]}: a role is a program or a class")]
    if len(programs) == 2:
        return [ConfigError(where, "has command and function: a role runs one program")]
    if not programs:
        return [ConfigError(where, "its command is empty")]
    if errors := _validate_ray(where, spec):
        return errors
    program = spec[programs[0]]
    if isinstance(program, str) or (
        programs[0] == "command" and isinstance(program, list) and all(isinstance(part, str) for part in program)
    ):
        return []
    kinds = "text or a list of texts" if programs[0] == "command" else "text, module:function"
    return [ConfigError(f"{where}.{programs[0]}", f"must be {kinds}, got {program!r}")]


def _validate_ray(where: str, spec: Mapping[str, Any]) -> list[ConfigError]:
    ray, resource, env = spec.get(_RAY), spec.get("resource"), spec.get("env")
    if not isinstance(ray, bool | None):
        return [ConfigError(f"{where}.{_RAY}", f"must be true or false, got {ray!r}")]
    if ray and not (isinstance(resource, Mapping) and _count(resource.get("cpu"))):
        return [ConfigError(f"{where}.resource.cpu", "must be a number of whole CPUs, which its Ray cluster gets")]
    if ray and isinstance(env, Mapping) and _ADDRESS in env:
        return [ConfigError(f"{where}.env.{_ADDRESS}", "cannot be set with ray: true, which sets it: remove one")]
    return []


@dataclass(frozen=True)
class JobLayout:
    """The top level of a job file, before roles and groups are checked against each other."""

    elsewhere: ClassVar[Mapping[str, str]] = names_by_alias("answered in the layout")

    trainer: TrainerSpec
    workload: Mapping[str, WorkloadSpec]
    recipe: str = ""
    roles: Any = None
    name: str = ""
    job_dir: str = ""
    overwrite: bool = False
    workload_group: list[Mapping[str, Positive]] = field(default_factory=list)
    env: Mapping[str, str] = field(default_factory=dict)
    config: Any = None
    restart: RestartSpec = RestartSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    liveness: LivenessSpec = LivenessSpec()
    master: MasterSpec = MasterSpec()
    placement_timeout_s: Seconds = 120.0
    scheduling_strategy: SchedulingStrategy = "AUTO"
    spans_mb: NonNegative = 64
    algorithm_type: Literal["GRPO", "PPO", "USER_DEFINED"] = "USER_DEFINED"


JOB_KEYS = tuple(JobLayout.__dataclass_fields__)


def job_from_mapping(data: DictConfig, default_name: str, search_path: tuple[str, ...] = ()) -> JobSpec:
    """Read the content of a job file. Raises InvalidJob with all errors, and with the job without its faulty values."""
    written = OmegaConf.to_container(data, resolve=False)
    if calls := validate_resolvers(written):
        data = OmegaConf.create(without({call.where for call in calls}, written) or {})  # a key may be empty
    unresolved = list(calls)
    plain = salvage_plain(data, unresolved, skip="config")  # references may lead into ``config``
    doubled = list[ConfigError]()
    section = "roles" if "roles" in plain else "workload"
    if section == "roles":
        if "workload" in plain:
            doubled.append(ConfigError("roles", "is another name of workload: leave one of them out"))
        plain["workload"] = plain.pop("roles")
    values, unnamed = with_recipe(plain, data.get("config"))
    values, scripts = with_scripts(values)
    renamed = {key: _rename(value) if key == "trainer" else value for key, value in values.items()}
    if isinstance(roles := values.get("workload"), dict):
        renamed["workload"] = {role: _rename(spec) for role, spec in roles.items()}
    layout, errors = salvage(JobLayout, renamed, "")
    errors += _validate_roles({"name": default_name, **values})
    errors += _validate_times(layout) if layout is not None else []
    places = [error.where for error in unnamed]
    errors = doubled + unnamed + [error for error in errors if not lies_in(error.where, places)]
    errors = [  # in the file's own terms
        ConfigError(re.sub(r"^workload\b", section, _CLASS_FIELD.sub("class", where)), _CLASS_FIELD.sub("class", text))
        for where, text in ((error.where, error.what) for error in errors)
    ]
    places = [error.where for error in unresolved]
    errors = unresolved + [error for error in errors if not lies_in(error.where, places)]
    config = data.get("config")
    if scripts:
        config = OmegaConf.merge(config or {}, from_plain({"scripts": scripts}))
    job = _spec(layout, config, default_name, search_path) if layout is not None else None
    if job is None or errors:
        raise InvalidJob(errors, salvaged=job)
    return job


def _spec(layout: JobLayout, config: Any, default_name: str, search_path: tuple[str, ...]) -> JobSpec:
    """Return the job of a layout, without its invalid roles and groups."""
    workloads = {
        RLRoleType(role): replace(spec, python=spec.python and str(Path(spec.python).expanduser().absolute()))
        for role, spec in layout.workload.items()
        if is_role_name(role)
    }
    groups = [{str(role).upper(): count for role, count in group.items()} for group in layout.workload_group]
    return JobSpec(
        name=layout.name or default_name,
        workloads=workloads,
        groups=tuple(
            {RLRoleType(role): count for role, count in group.items()}
            for group in groups
            if all(role in workloads and workloads[RLRoleType(role)].num % count == 0 for role, count in group.items())
        ),
        config=config if config is not None else OmegaConf.create({}),
        job_dir=Path(layout.job_dir).absolute() if layout.job_dir and not is_url(layout.job_dir) else RUNS,
        archive=layout.job_dir.rstrip("/") if is_url(layout.job_dir) else "",
        search_path=search_path,
        **{name: getattr(layout, name) for name in (*_SECTIONS, "trainer", "env", "overwrite", *_PLAIN)},
    )


_SECTIONS = ("restart", "checkpoint", "liveness", "master")
_PLAIN = ("placement_timeout_s", "scheduling_strategy", "spans_mb")


def _rename(mapping: Any) -> Any:
    """Rename ``class``, which no field can be called, and ``mem`` of the resources."""
    if not isinstance(mapping, dict):
        return mapping
    names = {"class": "class_", "class_": "'class_'"}
    renamed = {names.get(key, key): value for key, value in mapping.items()}
    resource = renamed.get("resource")
    if isinstance(resource, dict) and "mem" in resource:
        renamed["resource"] = {"memory" if key == "mem" else key: value for key, value in resource.items()}
    return renamed


def _validate_roles(values: Any) -> list[ConfigError]:
    """Check names, the actor and groups against each other."""
    errors = []
    if name := values.get("name"):
        try:
            check_job_name(str(name))
        except ValueError as error:
            errors.append(ConfigError("name", str(error)))
    workload = values.get("workload")
    if not isinstance(workload, dict):
        return errors
    nums: dict[str, Any] = {}
    for role, spec in workload.items():
        try:
            name = RLRoleType(role)
        except ValueError as error:
            errors.append(ConfigError(f"workload.{role}", str(error)))
            continue
        if name in nums:
            errors.append(ConfigError(f"workload.{role}", f"the role '{role.lower()}' occurs twice"))
        nums[name] = _count(spec.get("num", 1)) if isinstance(spec, dict) else None
    trainer = values.get("trainer")
    runs_scripts_only = isinstance(trainer, Mapping) and trainer.get("module") == _MODULE
    if RLRoleType.ACTOR not in nums and not runs_scripts_only:
        near = nearest("actor", map(str, workload))
        advice = f"did you mean '{near}'?" if near else f"the job has {', '.join(map(str, workload)) or 'none'}"
        errors.append(ConfigError("workload", f"the role 'actor' is required; {advice}"))
    restarts = values.get("restart")
    limits = restarts.get("workload_max_restart") if isinstance(restarts, dict) else None
    for role in limits if isinstance(limits, dict) else ():
        if str(role).upper() not in nums:
            where = f"restart.workload_max_restart.{role}"
            errors.append(ConfigError(where, f"the job has no role '{role}'{hint(str(role), workload)}"))
    return errors + _validate_groups(values.get("workload_group"), nums)


def _count(value: Any) -> int | None:
    """Return a number of workers (4.0 is 4), None for any other value, which the layout reports."""
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    return int(value) if is_whole and value > 0 else None


def _validate_groups(groups: Any, nums: Mapping[str, Any]) -> list[ConfigError]:
    errors = []
    group_of: dict[str, int] = {}
    names = [str(role).lower() for role in nums]
    for index, group in enumerate(groups if isinstance(groups, list) else []):
        for role, count in group.items() if isinstance(group, dict) else ():
            where, key = f"workload_group.{index}.{role}", str(role).upper()
            if key not in nums:
                errors.append(ConfigError(where, f"the job has no role '{role}'{hint(str(role), names)}"))
            elif key in group_of:
                errors.append(ConfigError(where, f"'{role}' is already in workload_group.{group_of[key]}"))
            elif (size := _count(count)) and nums[key] and nums[key] % size:
                errors.append(ConfigError(where, f"{nums[key]} workers cannot form groups of {size}"))
            group_of.setdefault(key, index)
    return errors


def _validate_times(layout: JobLayout) -> list[ConfigError]:
    """Report limits that are not longer than the time between two heartbeats."""
    beat_s = layout.liveness.beat_s
    limits = {
        "liveness.lease_s": layout.liveness.lease_s,
        "trainer.hang_after_s": layout.trainer.hang_after_s,
        **{f"workload.{role}.hang_after_s": spec.hang_after_s for role, spec in layout.workload.items()},
    }
    return [
        ConfigError(where, f"must be longer than liveness.beat_s, {beat_s:g}, got {limit:g}")
        for where, limit in limits.items()
        if limit <= beat_s
    ]


def job_to_yaml(job: JobSpec, *, hide_secrets: bool = False) -> str:
    """Write the resolved job as a job file, from which the same job is read; ``hide_secrets`` if others may read it."""
    job = seal(job)[0] if hide_secrets else job
    trainer = {name.rstrip("_"): value for name, value in vars(job.trainer).items()}
    trainer["torch_master_port"] = list(job.trainer.torch_master_port)
    layout = {
        "name": job.name,
        "job_dir": job.archive or ("" if job.job_dir == RUNS else str(job.job_dir)),
        "trainer": trainer,
        "workload": {
            role.lower(): {
                name.rstrip("_"): dict(value) if isinstance(value, Mapping) else value
                for name, value in vars(spec).items()
            }
            | {"env": map_values(spec.env, lambda _, value: escape_references(value))}
            for role, spec in job.workloads.items()
        },
        "workload_group": [{role.lower(): count for role, count in group.items()} for group in job.groups],
        "env": map_values(job.env, lambda _, value: escape_references(value)),
        "restart": {**vars(job.restart), "workload_max_restart": dict(job.restart.workload_max_restart)},
        **{name: {**vars(getattr(job, name))} for name in ("checkpoint", "liveness", "master")},
        **{name: getattr(job, name) for name in _PLAIN},
    }
    data = OmegaConf.create(layout)
    data["config"] = job.config
    return OmegaConf.to_yaml(data)


def digest(job: JobSpec) -> str:
    """Return a text that is equal for jobs with equal descriptions, wherever they write."""
    return hashlib.sha256(job_to_yaml(replace(job, job_dir=RUNS)).encode()).hexdigest()[:16]


_CLASS_FIELD = re.compile(r"\bclass_(?!\w)")
