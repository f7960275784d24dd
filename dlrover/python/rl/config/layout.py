"""The layout of a job file: DLRover's ``rl_config``.

::

    name: my-job                       # default: the file's name
    job_dir: runs/my-job               # default: runs/<name>
    trainer: {module, class, node_number, device_type, device_per_node}
    workload:
      actor: {module, class, num, resource: {cpu, gpu, memory}, env}
    workload_group: [{actor: 1, reference: 1}]
    env: {KEY: value}
    config: {...}                      # the user's own
    restart: {job_max_restart, ...}
    checkpoint: {every, keep, resume, commit_to}
    liveness: {beat_s, ...}
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.names import check_job_name
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.common.roles import RLRoleType, is_role_name
from dlrover.python.rl.config.given import plain
from dlrover.python.rl.config.spec import (
    CheckpointSpec,
    JobSpec,
    LivenessSpec,
    MasterSpec,
    Positive,
    RestartSpec,
    SchedulingStrategy,
    Seconds,
    TrainerSpec,
    WorkloadSpec,
)
from dlrover.python.rl.config.typed import salvage


@dataclass(frozen=True)
class JobLayout:
    """The top level of a job file, before roles and groups are checked against each other."""

    trainer: TrainerSpec
    workload: Mapping[str, WorkloadSpec]
    name: str = ""
    job_dir: str = ""
    workload_group: list[Mapping[str, Positive]] = field(default_factory=list)
    env: Mapping[str, str] = field(default_factory=dict)
    config: Any = None
    restart: RestartSpec = RestartSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    liveness: LivenessSpec = LivenessSpec()
    master: MasterSpec = MasterSpec()
    placement_timeout_s: Seconds = 120.0
    scheduling_strategy: SchedulingStrategy = "AUTO"
    algorithm_type: Literal["GRPO", "PPO", "USER_DEFINED"] = "USER_DEFINED"


JOB_KEYS = tuple(JobLayout.__dataclass_fields__)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def job_from_mapping(data: DictConfig, default_name: str, search_path: tuple[str, ...] = ()) -> JobSpec:
    """Check a whole job file.

    Args:
        data: the file's content.
        default_name: the job's name when the file gives none.
        search_path: folders that classes may be imported from.

    Raises:
        InvalidJob: with every problem that can be seen without importing anything, and what could be read.
    """
    values = _layout_values(data)
    layout, problems = salvage(JobLayout, _with_class_field(values), "")
    problems = [_in_file_terms(problem) for problem in problems]
    problems += _role_problems({"name": default_name, **values})
    problems += _time_problems(layout) if layout is not None else []
    job = _spec(layout, data.get("config"), default_name, search_path) if layout is not None else None
    if job is None or problems:
        raise InvalidJob(problems, salvaged=job)
    return job


def _spec(layout: JobLayout, config: Any, default_name: str, search_path: tuple[str, ...]) -> JobSpec:
    """The job that a layout describes; of a faulty one, without the roles and groups that cannot be."""
    workloads = {RLRoleType(role): spec for role, spec in layout.workload.items() if is_role_name(role)}
    groups = [{str(role).upper(): count for role, count in group.items()} for group in layout.workload_group]
    return JobSpec(
        name=layout.name or default_name,
        trainer=layout.trainer,
        workloads=workloads,
        groups=tuple(
            {RLRoleType(role): count for role, count in group.items()}
            for group in groups
            if all(role in workloads and workloads[RLRoleType(role)].num % count == 0 for role, count in group.items())
        ),
        env=layout.env,
        config=config if config is not None else OmegaConf.create({}),
        job_dir=Path(layout.job_dir or Path("runs") / (layout.name or default_name)).absolute(),
        search_path=search_path,
        restart=layout.restart,
        checkpoint=layout.checkpoint,
        liveness=layout.liveness,
        master=layout.master,
        placement_timeout_s=layout.placement_timeout_s,
        scheduling_strategy=layout.scheduling_strategy,
    )


def _layout_values(data: DictConfig) -> dict[str, Any]:
    """All of the file but the user's ``config``, as plain values; interpolations may refer to ``config`` too."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key in data:
        if key == "config":
            continue
        try:
            values[str(key)] = plain(data[key])
        except InvalidJob as error:
            problems += error.problems
        except OmegaConfBaseException as error:
            problems.append(Problem(str(key), str(error).splitlines()[0]))
    if problems:
        raise InvalidJob(problems)
    return values


def _with_class_field(values: Any) -> Any:
    """``class`` cannot be a field's name: rename it where the layout has it."""
    renamed = dict(values)
    if isinstance(renamed.get("trainer"), dict):
        renamed["trainer"] = _rename(renamed["trainer"])
    if isinstance(renamed.get("workload"), dict):
        renamed["workload"] = {
            role: _rename(spec) if isinstance(spec, dict) else spec for role, spec in renamed["workload"].items()
        }
    return renamed


def _rename(mapping: Mapping[str, Any]) -> dict[str, Any]:
    names = {"class": "class_", "class_": "'class_'"}
    renamed = {names.get(key, key): value for key, value in mapping.items()}
    resource = renamed.get("resource")
    if isinstance(resource, dict) and "mem" in resource:
        renamed["resource"] = {"memory" if key == "mem" else key: value for key, value in resource.items()}
    return renamed


def _in_file_terms(problem: Problem) -> Problem:
    return Problem(*(re.sub(r"\bclass_(?!\w)", "class", text) for text in (problem.where, problem.what)))


def _role_problems(values: Any) -> list[Problem]:
    """Problems between the parts of the file: names, the actor, groups."""
    problems = []
    if name := values.get("name"):
        try:
            check_job_name(str(name))
        except ValueError as error:
            problems.append(Problem("name", str(error)))
    workload = values.get("workload")
    if not isinstance(workload, dict):
        return problems
    nums: dict[str, Any] = {}
    for role, spec in workload.items():
        try:
            name = RLRoleType(role)
        except ValueError as error:
            problems.append(Problem(f"workload.{role}", str(error)))
            continue
        if name in nums:
            problems.append(Problem(f"workload.{role}", f"the role '{role.lower()}' is there twice"))
        nums[name] = _count(spec.get("num", 1)) if isinstance(spec, dict) else None
    if RLRoleType.ACTOR not in nums:
        problems.append(Problem("workload", f"the role 'actor' is required{hint('actor', workload)}"))
    restarts = values.get("restart")
    limits = restarts.get("workload_max_restart") if isinstance(restarts, dict) else None
    for role in limits if isinstance(limits, dict) else ():
        if str(role).upper() not in nums:
            where = f"restart.workload_max_restart.{role}"
            problems.append(Problem(where, f"the job has no role '{role}'{hint(str(role), workload)}"))
    return problems + _group_problems(values.get("workload_group"), nums)


def _count(value: Any) -> int | None:
    """A number of members, as the layout reads it (``"4"`` is 4); None when it is none, which the layout reports."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None


def _group_problems(groups: Any, nums: Mapping[str, Any]) -> list[Problem]:
    problems = []
    seen: dict[str, int] = {}
    names = [str(role).lower() for role in nums]
    for index, group in enumerate(groups if isinstance(groups, list) else []):
        for role, count in group.items() if isinstance(group, dict) else ():
            where, key = f"workload_group.{index}.{role}", str(role).upper()
            if key not in nums:
                problems.append(Problem(where, f"the job has no role '{role}'{hint(str(role), names)}"))
            elif key in seen:
                problems.append(Problem(where, f"'{role}' is already in workload_group.{seen[key]}"))
            elif (size := _count(count)) and nums[key] and nums[key] % size:
                problems.append(Problem(where, f"{nums[key]} members cannot form groups of {size}"))
            seen.setdefault(key, index)
    return problems


def _time_problems(layout: JobLayout) -> list[Problem]:
    """Limits that signs of life could not be watched by."""
    beat_s = layout.liveness.beat_s
    limits = {
        "liveness.lease_s": layout.liveness.lease_s,
        "trainer.hang_after_s": layout.trainer.hang_after_s,
        **{f"workload.{role}.hang_after_s": spec.hang_after_s for role, spec in layout.workload.items()},
    }
    return [
        Problem(where, f"must be longer than liveness.beat_s, {beat_s:g}, got {limit:g}")
        for where, limit in limits.items()
        if limit <= beat_s
    ]


def job_to_yaml(job: JobSpec, *, hide_secrets: bool = False) -> str:
    """The resolved job as a job file; reading it back gives the same job.

    Args:
        job: the job.
        hide_secrets: write ``***`` for the value of an environment variable whose name looks like a secret's (it holds
            TOKEN, KEY, SECRET, PASSWORD, PASSWD or CREDENTIAL): for a file that others may read.
    """
    trainer = {_file_key(name): value for name, value in vars(job.trainer).items()}
    trainer["torch_master_port"] = list(job.trainer.torch_master_port)
    layout = {
        "name": job.name,
        "job_dir": str(job.job_dir),
        "trainer": trainer,
        "workload": {
            role.lower(): {
                _file_key(name): dict(value) if isinstance(value, Mapping) else value
                for name, value in vars(spec).items()
            }
            | {"env": _env_to_file(spec.env, hide_secrets)}
            for role, spec in job.workloads.items()
        },
        "workload_group": [{role.lower(): count for role, count in group.items()} for group in job.groups],
        "env": _env_to_file(job.env, hide_secrets),
        "restart": {**vars(job.restart), "workload_max_restart": dict(job.restart.workload_max_restart)},
        "checkpoint": dict(vars(job.checkpoint)),
        "liveness": dict(vars(job.liveness)),
        "master": dict(vars(job.master)),
        "placement_timeout_s": job.placement_timeout_s,
        "scheduling_strategy": job.scheduling_strategy,
    }
    data = OmegaConf.create(layout)
    data["config"] = job.config
    return OmegaConf.to_yaml(data)


def _file_key(name: str) -> str:
    return "class" if name == "class_" else name


def _env_to_file(env: Mapping[str, str], hide_secrets: bool) -> dict[str, str]:
    """The variables as OmegaConf reads them back: a literal ``${`` is escaped, and so are backslashes before it."""
    return {
        name: "***" if hide_secrets and _SECRET.search(name) else re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        for name, value in env.items()
    }
