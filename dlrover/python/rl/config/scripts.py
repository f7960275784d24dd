# SPDX-License-Identifier: Apache-2.0
"""Roles of a job file that name a program instead of a class: ``train: {command: "python train.py", num: 2}``.

They get the class that runs programs, and ``config.scripts`` gets the programs by role.
"""

from collections.abc import Mapping
from typing import Any

from dlrover.python.rl.common.errors import ConfigError, InvalidJob

_PROGRAMS = ("command", "function")
_MODULE = "dlrover.python.rl.recipe.scripts"
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
    roles = {role: {**_ROLE, **_without(spec, _PROGRAMS)} for role, spec in given.items()}
    trainer: dict[str, Any] = dict(values.get("trainer") or {})
    if len(given) == len(workload) and trainer.keys().isdisjoint(_TRAINER):
        trainer |= _TRAINER
    restart: dict[str, Any] = dict(values.get("restart") or {})
    limits: dict[str, Any] = dict(restart.get("workload_max_restart") or {})
    limited = {str(role).upper() for role in limits}
    limits |= {role: _MAX_RESTART for role in given if str(role).upper() not in limited}
    changed = {
        "trainer": trainer,
        "workload": {**workload, **roles},
        "restart": {**restart, "workload_max_restart": limits},
    }
    scripts = {str(role).lower(): {key: spec[key] for key in _given(spec)} for role, spec in given.items()}
    return {**values, **changed}, scripts


def runs_scripts_only(values: Mapping[str, Any]) -> bool:
    trainer = values.get("trainer")
    return isinstance(trainer, Mapping) and trainer.get("module") == _MODULE


def _given(spec: Mapping[str, Any]) -> list[str]:
    return [key for key in _PROGRAMS if spec.get(key)]


def _validate(role: Any, spec: Mapping[str, Any]) -> list[ConfigError]:
    where, programs = f"workload.{role}", _given(spec)
    classes = [key for key in ("module", "class") if spec.get(key)]
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


def _without(spec: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key not in keys}
