# SPDX-License-Identifier: Apache-2.0
"""Job files and dotted overrides."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from yaml import YAMLError

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import HIDDEN
from dlrover.python.rl.common.names import hint, name_of_file, nearest
from dlrover.python.rl.config.layout import JOB_KEYS, ROLES, job_from_mapping
from dlrover.python.rl.config.plain import check_text, from_plain, list_texts, without
from dlrover.python.rl.config.secrets import is_secret_at
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.config.typed import lies_in

_KEY = re.compile(r"([^\s:=]*)\s*(=?)")
_HIDDEN_REFERENCE = "\ue000{"  # stands for ``${`` in a text that is read without references
_ALMOST = 0.8  # similarity from which a key is treated as a misspelt key of the layout


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file in DLRover's ``rl_config`` layout and apply overrides.

    Args:
        path: its folder and the working directory are searched for the job's classes.
        overrides: ``key=value``. A key that begins with a part of the layout (``workload.rollout.num=4``) changes the
            job, any other (``data.train=my.jsonl``) the job's ``config``. The key must exist; ``+key=value`` adds one.

    Raises:
        InvalidJob: with all errors."""
    file = Path(path)
    if not file.is_file():
        siblings = [sibling.name for sibling in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        raise InvalidJob([ConfigError(str(path), f"no such job file{hint(file.name, siblings)}")])
    read = _read(_text(file), str(path))
    return _read_job(read, overrides, name_of_file(file), search_folders(file.absolute().parent))


def load_job_text(
    text: str, name: str, overrides: Sequence[str] = (), search_path: tuple[str, ...] | None = None
) -> JobSpec:
    """Like :func:`load_job` for YAML or JSON text; an empty ``name`` leaves it to the text."""
    read = _read(text, "rl_config")
    return _read_job(read, overrides, name or "job", search_folders() if search_path is None else search_path, name)


_Read: TypeAlias = tuple[DictConfig, list[ConfigError]]
"""The values of a file, with None in place of unreadable ones, and the errors."""


def _read_job(
    read: _Read, overrides: Sequence[str], default_name: str, search_path: tuple[str, ...], name: str = ""
) -> JobSpec:
    data, unreadable = read
    errors, unlisted = _apply(data, overrides)
    errors, places = [*unreadable, *errors], [error.where for error in unreadable]
    if name:  # precedes an override's
        data["name"] = name
    try:
        job = job_from_mapping(data, default_name, search_path)
    except InvalidJob as error:
        salvaged = error.salvaged and replace(error.salvaged, unlisted=tuple(unlisted))
        further = [fault for fault in error.errors if not lies_in(fault.where, places)]
        raise InvalidJob([*errors, *further], salvaged) from None
    job = replace(job, unlisted=tuple(unlisted))
    if errors:
        raise InvalidJob(errors, salvaged=job)
    return job


def load_job_with(path: str | Path, values: Mapping[str, Any], search_path: tuple[str, ...]) -> JobSpec:
    """Like :func:`load_job` with plain values by key, nested or dotted, instead of overrides; text is literal."""
    data, errors = _read(_text(Path(path)), str(path))
    if errors:
        raise InvalidJob(errors)
    settings: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = _path(data, key).split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
        if isinstance(value, Mapping):
            section.setdefault(last, {}).update(value)
        else:
            section[last] = value
    merged = DictConfig(OmegaConf.merge(data, from_plain(settings)))
    return job_from_mapping(merged, name_of_file(Path(path)), search_path)


def search_folders(*more: Path) -> tuple[str, ...]:
    """List the folders to search for a job's classes: the working directory, ``more``, and the entries of
    ``PYTHONPATH``, which the processes of a running cluster do not inherit."""
    inherited = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return tuple(dict.fromkeys([str(Path.cwd()), *map(str, more), *inherited]))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidJob([ConfigError(str(file), f"cannot be read: {error}")]) from error


def _read(text: str, where: str) -> _Read:
    """Read a mapping; raises InvalidJob for other text."""
    data: Any = None
    errors: list[ConfigError] = []
    check_text(text, where)
    try:
        try:
            data = OmegaConf.create(text)
        except GrammarParseError:
            # Values with references that OmegaConf cannot parse are read as text, reported and left out.
            hidden = OmegaConf.to_container(OmegaConf.create(text.replace("${", _HIDDEN_REFERENCE)))
            fault = "has a malformed reference: write ${key}, or \\${ for the text itself"
            errors = [ConfigError(place, fault) for place, value in list_texts(hidden) if _is_malformed(value)]
            readable = OmegaConf.create(without({error.where for error in errors}, hidden))
            data = OmegaConf.create(OmegaConf.to_yaml(readable).replace(_HIDDEN_REFERENCE, "${"))
    except AssertionError:
        pass  # OmegaConf raises it for a lone number
    except (YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise InvalidJob([_yaml_error(text, where, error)]) from error
    if not isinstance(data, DictConfig):
        raise InvalidJob([ConfigError(where, "a job file is a mapping at its top level")])
    is_reference = OmegaConf.is_interpolation(data, "config")
    config = None if is_reference else data.get("config")
    if is_reference or not isinstance(config, DictConfig | None):
        kind = "a reference" if is_reference else "a list" if isinstance(config, ListConfig) else "a single value"
        errors.append(ConfigError("config", f"must be a mapping of your settings, not {kind}"))
        data["config"] = None
    return data, errors


def _yaml_error(text: str, where: str, error: Exception) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ConfigError(where, f"not valid YAML: {error}")
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    fault = str(getattr(error, "problem", None) or error)
    if "\t" in line[: len(line) - len(line.lstrip())]:
        fault = "the line is indented with a tab; indent it with spaces"
    elif "${" in line and "{" in line.replace("${", ""):
        fault += "; between braces a value with ${...} needs quotes"
    elif fault == "did not find expected key" or fault.startswith("mapping values are not allowed"):
        fault += "; indent the keys of one mapping alike, and quote text that has ': '"
    return ConfigError(f"{where}:{mark.line + 1}", f"not valid YAML: {fault}")


def _is_malformed(text: str) -> bool:
    try:
        OmegaConf.create([text.replace(_HIDDEN_REFERENCE, "${")])
    except GrammarParseError:
        return True
    return False


def _apply(data: DictConfig, overrides: Sequence[str]) -> tuple[list[ConfigError], list[ConfigError]]:
    """Merge the overrides. Return the errors, and the errors that count unless the trainer's schema has the keys."""
    errors: list[ConfigError] = []
    unlisted: list[ConfigError] = []
    if data.get("config") is None:
        data["config"] = OmegaConf.create({})
    may_show = True
    for override in overrides:
        key, equals, value = override.partition("=")
        adding, key = key.startswith("+"), key.removeprefix("+").strip()
        path, (first, sign) = _path(data, key), _KEY.findall(override)[0]
        is_secret = not sign and is_secret_at(_path(data, first.lstrip("+-")), override)
        lacking = first if is_secret else ""  # a secret key whose value may be the next word
        if not equals or not key or lacking:
            shown = lacking or (override if may_show else HIDDEN)
            errors.append(ConfigError(shown, "an override is written key=value"))
            may_show = may_show and not lacking
            continue
        try:
            error = None if adding else _find_missing(data, path, key)
            if error is not None and _may_add(data, path, key):
                unlisted.append(error)
                error = None
            if error is None:
                # Not resolved here: a value may refer to other keys of the file.
                data.merge_with_dotlist([f"{_count_members(data, path, value)}={value}"])
        except (OmegaConfBaseException, YAMLError) as failure:
            fault = "is not valid YAML" if is_secret_at(path, value) else str(failure).splitlines()[0]
            error = ConfigError(key, fault)
        except (TypeError, ValueError):
            error = ConfigError(key, "a part of this key must be the number of a list's item, such as 0")
        if error is not None:
            errors.append(error)
    return errors, unlisted


def _path(data: DictConfig, key: str) -> str:
    """Return the place in the file of an override's key; roles are in the section that the file has for them."""
    first, *names = key.split(".")
    if first in ROLES:
        section = next((name for name in ROLES if name in data), first)
        return ".".join([section, *names])
    return key if first in JOB_KEYS else f"config.{key}"


def _count_members(data: DictConfig, path: str, value: str) -> str:
    """Return ``path``, or the place of the number of workers if a number stands for a role's settings. A role that is a
    number becomes a mapping if ``path`` leads below it."""
    section, role, *below = [*path.split("."), "", ""][: max(path.count(".") + 1, 2)]
    roles = data.get(section) if section in ROLES else None
    spec = roles.get(role) if isinstance(roles, DictConfig) else None
    if below and isinstance(spec, int):
        roles[role] = {"num": spec}  # type: ignore[index]  # a mapping, where it has a number
    return f"{path}.num" if isinstance(spec, DictConfig) and not below and value.strip().isdecimal() else path


def _may_add(data: DictConfig, path: str, key: str) -> bool:
    """Return True for a missing key of ``config`` that only mappings lead to, unless the layout almost has it."""
    section, *parts = path.split(".")
    node: Any = data.get(section)
    for part in parts:
        if node is not None and (not isinstance(node, DictConfig) or not part):
            return False
        node = node.get(part) if node is not None else None
    first = key.split(".")[0]
    is_known = first in JOB_KEYS or first in data["config"]
    return section == "config" and (is_known or not get_close_matches(first, JOB_KEYS, 1, _ALMOST))


def _find_missing(data: DictConfig, path: str, key: str) -> ConfigError | None:
    """Return the error of an override whose role or user key is not in the file; the layout checks its own keys."""
    first, *parts = path.split(".")
    if first in ROLES and "recipe" in data and isinstance(data.get(first), DictConfig | None):
        return None  # it has the roles
    if first in ROLES:
        parts = parts[:1]
    elif first != "config":
        return None
    node: Any = data.get(first)
    for part in parts:
        if isinstance(node, ListConfig) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, DictConfig) and part in node:
            node = node.get(part)
        else:
            names = [str(name) for name in node] if isinstance(node, DictConfig) else []
            own = JOB_KEYS if node is data.get("config") and part == parts[0] else ()
            if nearest(part, names) is None and (close := get_close_matches(part, own, 1, _ALMOST)):
                meant = key.replace(part, close[0], 1)
                return ConfigError(key, f"unknown key '{part}'; did you mean '{meant}'?")
            return ConfigError(key, f"unknown key '{part}'{hint(part, names)} (write +{key}=... to add it)")
    return None
