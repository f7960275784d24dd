# SPDX-License-Identifier: Apache-2.0
"""Validation of a job's classes before it starts: that they import, their types, and their ``check_config``.

The classes are the user's code, so the master and the command line never import them: :func:`inspect_in_child` does, in
a separate process with a deadline.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dlrover.python.rl.common.errors import ClassNotFound, ConfigError, InvalidJob, LibraryMissing
from dlrover.python.rl.common.extensions import ROLES_ELSEWHERE
from dlrover.python.rl.common.hub import LOOKUP, current_lookup
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.plain import from_plain, to_plain
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.config.typed import lies_in, parse, rename_keys
from dlrover.python.rl.control.events import RecoveryScope
from dlrover.python.rl.runtime.checkpoint.runs import resumed_layout
from dlrover.python.rl.runtime.member.interpreters import find_fault, interpreter_env, roles_by_interpreter
from dlrover.python.rl.runtime.member.loading import load_class
from dlrover.python.rl.trainer.plan import TrainerPlan, call_hook, plan_of
from dlrover.python.rl.trainer.role_group import public_methods
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, is_stateful, is_unknown

_LOG = get_logger(__name__)

DEADLINE_S = 180.0

CHECKS: Mapping[str, tuple[bool, bool]] = {
    "layout of the job file, names and numbers": (True, True),
    "placement, folders and space for commits": (True, False),
    "classes of your own": (True, False),
    "keys and values of the recipe's config": (False, True),
    "model and data": (False, False),
    "memory of the devices": (False, False),
}
"""Each check of a job: whether the core does it, and whether the library does it before a job is submitted to the
service. The library does all before a run; so does the service, on its machine."""

NOT_IN_CORE = ", ".join(check for check, (in_core, _) in CHECKS.items() if not in_core)

_DEVICE = "config.engine.device"
_ALSO_IN_TRAINER = "the trainer imports it too, so let its methods import what only the role's environment has"
T = TypeVar("T")
SettingsReader: TypeAlias = tuple[type[Any], Callable[[Any], Mapping[str, Any]]]
"""A class with a state, and the function that returns the settings that the state depends on."""


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection: errors, methods by role, errors that only arise in one process; the roles whose
    ranks meet in collectives and recover together, those with a state to commit, and those that keep their processes.
    ``about`` are lines for people."""

    errors: tuple[ConfigError, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    single_process_refusals: tuple[ConfigError, ...] = ()
    collectives: tuple[str, ...] = ()
    stateful: tuple[str, ...] = ()
    rejoining: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None  # with all defaults, None without a schema
    about: tuple[str, ...] = ()
    renamed: Mapping[str, Any] | None = None  # the config with the schema's names, None if it has no others
    state_bytes: Mapping[str, int | None] = field(default_factory=dict)  # of one worker by role, None: unknown
    missing: tuple[ConfigError, ...] = ()  # classes of the library, which is not installed here; see NOT_IN_CORE

    def complete(self, job: JobSpec) -> JobSpec:
        return job if self.config is None else replace(job, config=from_plain(self.config))

    def join(self, part: "Inspection") -> "Inspection":
        """Return this inspection with the answers of another interpreter about some roles."""
        errors = tuple(error for error in part.errors if error not in self.errors)
        return replace(self, errors=(*self.errors, *errors), rejoining=(*self.rejoining, *part.rejoining))

    def scope_of(self, role: str) -> RecoveryScope:
        return RecoveryScope.GROUP if role in self.collectives else RecoveryScope.MEMBER


def inspect_job(job: JobSpec, before: str = "", here: bool = False) -> Inspection:
    """Inspect a job that resumes the run described in ``before``; ``here``: on this machine's devices."""
    errors, refusals, missing = list[ConfigError](), list[ConfigError](), list[ConfigError]()
    methods, loaded = dict[str, tuple[str, ...]](), dict[str, type[BaseWorkload]]()
    collectives, rejoining, about = list[str](), list[str](), list[str]()
    roles = {role: spec.num for role, spec in job.workloads.items()}
    config: Mapping[str, Any] | None = None
    renamed: Mapping[str, Any] | None = None
    trainer = _load((errors, missing), "trainer", job.trainer.module, job.trainer.class_, BaseTrainer, job)
    if trainer is not None:
        if undefined := sorted(trainer.__abstractmethods__):
            errors.append(ConfigError("trainer.class", f"{job.trainer.class_} does not define {', '.join(undefined)}"))
        job, lines = _with_own_names(trainer, job)
        renamed = to_plain(job.config) if lines else None
        plan = plan_of(trainer)
        config, faults = _complete(plan, job, here)
        job = job if config is None else replace(job, config=from_plain(config))
        faults += _ask("trainer", partial(plan.check_config, job.config, roles))
        errors += faults
        about = [] if faults else lines + _ask_lines(partial(plan.describe_config, job.config, roles))
    for role, spec in job.workloads.items():
        where = f"workload.{role.lower()}"
        workload = _load((errors, missing), where, spec.module, spec.class_, BaseWorkload, job)
        if workload is None:
            if spec.python and errors:
                errors[-1] = replace(errors[-1], what=f"{errors[-1].what}: {_ALSO_IN_TRAINER}")
            continue
        methods[role], loaded[str(role)] = tuple(public_methods(workload)), workload
        # Another interpreter may have what this one lacks, so it is asked instead.
        own_errors = () if spec.python else _ask(where, partial(call_hook, workload, "check_config", (), job.config))
        errors += [error for error in own_errors if error not in errors]
        if not workload.needs_own_process:
            continue
        collectives.append(str(role))
        if not errors and not spec.python:
            errors += _ask(where, partial(_find_rejoining, workload, job.config, role, rejoining))
        if spec.num > 1:
            reason = f"{spec.num} workers of {spec.class_} use collectives, which need one process per worker"
            refusals.append(ConfigError(f"{where}.num", f"{reason}; use num=1"))
    if trainer is not None:
        classes = {RLRoleType(role): workload for role, workload in loaded.items()}
        errors += _ask("workload", partial(plan_of(trainer).check_workloads, classes))
    stateful = {str(role): num for role, num in roles.items() if role in loaded and is_stateful(loaded[role])}
    errors += _validate_resume(job, before, stateful, loaded, trainer, about) if len(methods) == len(roles) else []
    sizes = {role: _state_bytes(loaded[role], job.config, num) for role, num in stateful.items()} if not errors else {}
    groups = tuple(collectives), tuple(stateful), tuple(rejoining)
    inspection = Inspection(tuple(errors), methods, tuple(refusals), *groups, config, tuple(about), renamed, sizes)
    return replace(inspection, missing=tuple(missing))


def inspect_types(job: JobSpec) -> Inspection:
    """Check a config by its trainer's schema and options alone, if the trainer can be imported on this machine."""
    try:
        trainer = load_class(job.trainer.module, job.trainer.class_, job.search_path)
        if trainer.config_class is None:
            return Inspection(job.unlisted)
        job, _ = _with_own_names(trainer, job)
        errors = parse(trainer.config_class, job.config, "config")[1]
        wrong, check = [error.where for error in errors], partial(plan_of(trainer).check_options, job.config)
        none: Iterable[ConfigError] = ()
        more = _call_safely(lambda: list(check()), none, f"{trainer.__name__}.check_options", logging.INFO)
        return Inspection((*errors, *(error for error in more if not lies_in(error.where, wrong))))
    except Exception as error:  # noqa: BLE001 -- what the user's code needs may be on the other machines alone
        if isinstance(error.__cause__, LibraryMissing):
            return Inspection(job.unlisted, missing=(ConfigError("trainer.class", str(error)),))
        _LOG.info("%s.%s: %s: %s", job.trainer.module, job.trainer.class_, type(error).__name__, error)
        return Inspection()


def _call_safely(hook: Callable[[], T], default: T, name: str, level: int = logging.DEBUG) -> T:
    try:
        return hook()
    except Exception as error:  # noqa: BLE001 -- the user's code may raise anything; check_config reports bad configs
        _LOG.log(level, "%s raised %s: %s", name, type(error).__name__, error)
        return default


def _state_bytes(workload: Any, config: Any, members: int) -> int | None:
    hook: Callable[[], int | None] = partial(call_hook, workload, "state_bytes", None, config, members)
    return _call_safely(hook, None, f"{workload.__name__}.state_bytes", logging.WARNING)


def _find_rejoining(workload: Any, config: Any, role: str, rejoining: list[str]) -> Iterable[ConfigError]:
    if workload.keeps_process(config):
        rejoining.append(str(role))
    return ()


def _with_own_names(trainer: type[BaseTrainer], job: JobSpec) -> tuple[JobSpec, list[str]]:
    """Return the job with its schema's names, and lines about renamed keys; keys of the command line come first."""
    if trainer.config_class is None:
        return job, []
    added = [error.where.removeprefix("config.") for error in job.unlisted]
    try:
        config, lines = rename_keys(trainer.config_class, to_plain(job.config) or {}, "config", added)
    except InvalidJob:
        return job, []  # check_config reports it
    return replace(job, config=from_plain(config)), lines


def _complete(plan: TrainerPlan, job: JobSpec, here: bool) -> tuple[Mapping[str, Any] | None, list[ConfigError]]:
    """Return the complete config, and errors of completing it; without a schema, keys that overrides add are errors."""
    devices = "HERE" if here and job.trainer.device_type == "GPU" else job.trainer.device_type
    try:
        config = plan.complete_config(job.config, devices)
    except InvalidJob as error:
        return None, [fault for fault in error.errors if fault.where == _DEVICE]  # check_config reports the others
    except Exception as error:  # noqa: BLE001 -- the user's code may raise anything: it is reported
        return None, [ConfigError("trainer", f"complete_config raised {type(error).__name__}: {error}")]
    return config, list(job.unlisted) if config is None else []


def _ask_lines(question: Callable[[], Iterable[str]]) -> list[str]:
    try:
        return list(question())
    except Exception as error:  # noqa: BLE001 -- the user's code may raise anything, and nothing depends on it
        return [f"describe_config raised {type(error).__name__}: {error}"]


def _validate_resume(
    job: JobSpec, before: str, stateful: Mapping[str, int], loaded: Mapping[str, Any], trainer: Any, about: list[str]
) -> list[ConfigError]:
    """Validate a resumed job; ``trainer`` is None if it cannot be loaded. Adds lines about unknowns to ``about``."""
    readers: list[SettingsReader] = [] if trainer is None else [(trainer, plan_of(trainer).settings_of_state)]
    readers += [(loaded[role], partial(call_hook, loaded[role], "settings_of_state", {})) for role in stateful]
    return [*_validate_members(job, stateful, loaded), *_validate_settings(job, before, readers, about)]


def _validate_settings(
    job: JobSpec, before: str, readers: Iterable[SettingsReader], about: list[str]
) -> list[ConfigError]:
    """Refuse changed settings that states depend on; ``before`` describes the run that is resumed."""
    errors: dict[str, ConfigError] = {}
    for stateful, settings_of_state in readers if before else ():
        try:
            earlier = load_job_text(before, job.name, search_path=job.search_path)
            was, now = settings_of_state(earlier.config), settings_of_state(job.config)
            pairs = list(_differences(was, now))
            changed = [(key, _inline(old), _inline(new), is_unknown(old, new)) for key, old, new in pairs]
        except InvalidJob:
            continue  # check_config reports it
        except Exception as error:  # noqa: BLE001 -- the user's code may raise anything
            _LOG.warning("%s.settings_of_state: %s: %s", stateful.__name__, type(error).__name__, error)
            continue
        for key, old, new, unknown in changed:
            text = f"{new}, but by its job.yaml the run was begun with {old}"
            if unknown:
                about.append(f"config.{key}: {text}: it continues with the value in its last commit, not with this one")
            else:
                text += ", which its state depends on: continue with that, or begin another run"
                errors[key] = ConfigError(f"config.{key}", text)
    return list(errors.values())


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*was, *now]):
        old, new = was.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{where}{key}.")
        elif old != new or (is_unknown(old, new) and str(old) != str(new)):
            yield f"{where}{key}", old, new


def _inline(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_inline(part)}' for key, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    return str(value)


def _validate_members(job: JobSpec, stateful: Mapping[str, int], loaded: Mapping[str, Any]) -> list[ConfigError]:
    """Refuse a copy of other workers, except of roles that can divide their state differently."""
    resumed = resumed_layout(job)
    if resumed is None or resumed[1] == stateful:
        return []
    folder, saved = resumed
    changed = [role for role, num in stateful.items() if saved.get(role) != num]
    hooks = [partial(loaded[role].takes_other_members, job.config) for role in changed]
    if saved.keys() == stateful.keys() and all(_call_safely(hook, False, "takes_other_members") for hook in hooks):
        return []
    advice = "make them the same, or choose another job_dir or 'never'"
    members = f"{folder} holds the state of {_format(saved)}, and this job's workers with state are {_format(stateful)}"
    return [ConfigError("checkpoint.resume", f"{members}: {advice}")]


def _format(members: Mapping[str, int]) -> str:
    return ", ".join(f"{role} x{number}" for role, number in sorted(members.items())) or "none"


def _load(
    faults: tuple[list[ConfigError], list[ConfigError]], where: str, module: str, name: str, base: type, job: JobSpec
) -> Any:
    """Return a class of the job; else None, and add to the errors, or to the missing classes of the library."""
    errors, missing = faults
    if not module or not name:
        return None  # reported already: such a job comes from salvage
    try:
        loaded = load_class(module, name, job.search_path)
    except ClassNotFound as error:
        kind = missing if isinstance(error.__cause__, LibraryMissing) else errors
        kind.append(ConfigError(f"{where}.class", str(error)))
        return None
    if not issubclass(loaded, base):
        errors.append(ConfigError(f"{where}.class", f"{name} does not extend {base.__name__}"))
        return None
    return loaded


def _ask(where: str, question: Callable[[], Iterable[ConfigError]]) -> list[ConfigError]:
    """Return the errors of a class's ``check_config``; an exception in it is an error, too."""
    try:
        return list(question())
    except InvalidJob as error:
        return list(error.errors)
    except Exception as error:  # noqa: BLE001 -- the user's code may raise anything: it is reported
        return [ConfigError(where, f"check_config raised {type(error).__name__}: {error}")]


def inspect_in_child(
    job: JobSpec, before: str = "", deadline_s: float = DEADLINE_S, types_only: bool = False
) -> Inspection:
    """Inspect a job in a separate process, and roles with another interpreter in one of that interpreter;
    ``types_only``: as :func:`inspect_types`, for a job that other machines run."""
    inspection = _inspect_by(sys.executable, job, before, deadline_s, types_only)
    for python, roles in roles_by_interpreter(job).items() if not types_only else ():
        if fault := find_fault(python):
            faults = (ConfigError(f"workload.{role.lower()}.python", f"{python} {fault}") for role in roles)
            inspection = inspection.join(Inspection(tuple(faults)))
        else:
            part = _part_of(inspection.complete(job), roles)
            inspection = inspection.join(_inspect_by(python, part, "", deadline_s, False))
    return inspection


def _part_of(job: JobSpec, roles: Iterable[RLRoleType]) -> JobSpec:
    """Return a job of some roles without a trainer, which the interpreter of these roles may be unable to import."""
    workloads = {role: replace(job.workloads[role], python="") for role in roles}
    trainer, checkpoint = replace(job.trainer, module="", class_=""), replace(job.checkpoint, resume="never")
    return replace(job, trainer=trainer, workloads=workloads, groups=(), checkpoint=checkpoint, unlisted=())


def _inspect_by(python: str, job: JobSpec, before: str, deadline_s: float, types_only: bool) -> Inspection:
    # A job may have secrets, so it travels in files without names, which the child inherits.
    request_file, answer_file = os.memfd_create("request"), os.memfd_create("answer")
    with open(request_file, "w", encoding="utf-8") as request, open(answer_file, encoding="utf-8") as answer:
        described: dict[str, Any] = {
            "job": job_to_yaml(job),
            "name": job.name,
            "search_path": job.search_path,
            "unlisted": [asdict(error) for error in job.unlisted],
            "lookup": current_lookup(),
            "before": before,
            "types_only": types_only,
        }
        request.write(json.dumps(described))
        request.flush()
        paths = [f"/proc/self/fd/{file}" for file in (request_file, answer_file)]
        other = python if python != sys.executable else ""
        env = {**os.environ, **({"PYTHONPATH": ""} if other else {}), "OMP_NUM_THREADS": "1", **job.env}
        command = [python, "-m", "dlrover.python.rl.runtime.member.inspection", *paths]
        try:
            child = subprocess.run(
                command,
                pass_fds=(request_file, answer_file),
                cwd=job.work_dir if os.path.isdir(job.work_dir) else None,
                timeout=deadline_s,
                capture_output=True,
                text=True,
                check=False,
                env=interpreter_env(other, env),
            )
        except subprocess.TimeoutExpired:
            return Inspection((ConfigError("job", f"importing its classes took longer than {deadline_s:g} s"),))
        content = answer.read()
        if child.returncode or not content:
            last = (child.stderr.strip().splitlines() or ["no output"])[-1]
            text = f"importing its classes{f' by {other}' if other else ''} ended with code {child.returncode}: {last}"
            return Inspection((ConfigError("job", text),))
        return _from_json(json.loads(content))


def _from_json(data: Mapping[str, Any]) -> Inspection:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    for name in ("errors", "single_process_refusals", "missing"):
        fields[name] = tuple(ConfigError(**item) for item in data[name])
    fields["methods"] = {RLRoleType(role): tuple(names) for role, names in data["methods"].items()}
    return Inspection(**fields)


def _serve(request: Path, answer: Path) -> None:
    data = json.loads(request.read_text())
    try:
        job = load_job_text(data["job"], data["name"], search_path=tuple(data["search_path"]))
    except InvalidJob as error:  # reported already: such a job comes from salvage
        if error.salvaged is None:
            raise
        job = error.salvaged
    job = replace(job, unlisted=tuple(ConfigError(**item) for item in data["unlisted"]))
    LOOKUP.set(data["lookup"])
    ROLES_ELSEWHERE.set(frozenset(role for role, spec in job.workloads.items() if spec.python))
    inspection = inspect_types(job) if data["types_only"] else inspect_job(job, data["before"])
    answer.write_text(json.dumps(asdict(inspection)))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
