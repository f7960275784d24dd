# SPDX-License-Identifier: Apache-2.0
"""Job files and dotted overrides."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import hint, nearest
from dlrover.python.rl.common.redaction import HIDDEN
from dlrover.python.rl.config.layout import JOB_KEYS, job_from_mapping
from dlrover.python.rl.config.limits import check_text
from dlrover.python.rl.config.plain import from_plain
from dlrover.python.rl.config.secrets import is_secret_at
from dlrover.python.rl.config.spec import JobSpec

_KEY = re.compile(r"([^\s:=]*)\s*(=?)")
_ALMOST = 0.8
"""Similarity from which a key is taken to mean one of the layout."""


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file in DLRover's ``rl_config`` layout and apply overrides.

    Args:
        path: its folder and the working directory are searched for the job's classes.
        overrides: ``key=value``. A key that begins with a part of the layout (``workload.rollout.num=4``) changes the
            job, any other (``data.train=my.jsonl``) the job's ``config``. The key must exist; ``+key=value`` adds one.

    Raises:
        InvalidJob: with all errors.
    """
    file = Path(path)
    if not file.is_file():
        siblings = [sibling.name for sibling in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        raise InvalidJob([ConfigError(str(path), f"no such job file{hint(file.name, siblings)}")])
    return _read_job(
        _read(_text(file), str(path)), overrides, name_of_file(file), search_folders(file.absolute().parent)
    )


def load_job_text(
    text: str, name: str, overrides: Sequence[str] = (), search_path: tuple[str, ...] | None = None
) -> JobSpec:
    """Like :func:`load_job` for YAML or JSON text, whose own ``name`` counts if none is given; by default classes are
    looked for in the working directory."""
    data = _read(text, "rl_config")
    return _read_job(data, overrides, name or "job", search_folders() if search_path is None else search_path, name)


def _read_job(
    data: DictConfig, overrides: Sequence[str], default_name: str, search_path: tuple[str, ...], name: str = ""
) -> JobSpec:
    """``name`` counts before that of an override."""
    errors, unlisted = _apply(data, overrides)
    if name:
        data["name"] = name
    try:
        job = job_from_mapping(data, default_name, search_path)
    except InvalidJob as error:
        salvaged = error.salvaged and replace(error.salvaged, unlisted=tuple(unlisted))
        raise InvalidJob([*errors, *error.errors], salvaged) from None
    job = replace(job, unlisted=tuple(unlisted))
    if errors:
        raise InvalidJob(errors, salvaged=job)
    return job


def load_job_with(path: str | Path, values: Mapping[str, Any], search_path: tuple[str, ...]) -> JobSpec:
    """Like :func:`load_job` with plain values by key instead of overrides: nested or dotted, and text is literal."""
    data, given = _read(_text(Path(path)), str(path)), dict[str, Any]()
    for key, value in values.items():
        *parents, last = key.split(".") if key.split(".")[0] in JOB_KEYS else ["config", *key.split(".")]
        section = given
        for parent in parents:
            section = section.setdefault(parent, {})
        if isinstance(value, Mapping):
            section.setdefault(last, {}).update(value)
        else:
            section[last] = value
    return job_from_mapping(DictConfig(OmegaConf.merge(data, from_plain(given))), name_of_file(Path(path)), search_path)


def search_folders(*more: Path) -> tuple[str, ...]:
    """Where a job's classes may be: the working directory, ``more``, and what ``PYTHONPATH`` names here, since the
    processes of a running cluster do not inherit it."""
    inherited = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return tuple(dict.fromkeys([str(Path.cwd()), *map(str, more), *inherited]))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidJob([ConfigError(str(file), f"cannot be read: {error}")]) from error


def name_of_file(file: Path) -> str:
    """The name of a job whose file has none."""
    name = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in file.stem.lower())
    return name.strip("-")[:63].strip("-") or "job"


def _read(text: str, where: str) -> DictConfig:
    data: Any = None
    check_text(text, where)
    try:
        data = OmegaConf.create(text)
    except AssertionError:
        pass  # OmegaConf raises it for a lone number
    except (YAMLError, OmegaConfBaseException, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark is not None else where
        raise InvalidJob([ConfigError(place, f"not valid YAML: {getattr(error, 'problem', None) or error}")]) from error
    if not isinstance(data, DictConfig):
        raise InvalidJob([ConfigError(where, "a job file is a mapping at its top level")])
    if OmegaConf.is_interpolation(data, "config"):
        raise InvalidJob([ConfigError("config", "is a mapping of your settings, not a reference")])
    config = data.get("config")
    if config is not None and not isinstance(config, DictConfig):
        kind = "a list" if isinstance(config, ListConfig) else "a single value"
        raise InvalidJob([ConfigError("config", f"must be a mapping of your settings, not {kind}")])
    return data


def _apply(data: DictConfig, overrides: Sequence[str]) -> tuple[list[ConfigError], list[ConfigError]]:
    """Merge the overrides; returns the errors, and what are errors unless the trainer's schema has the keys."""
    errors: list[ConfigError] = []
    unlisted: list[ConfigError] = []
    if data.get("config") is None:
        data["config"] = OmegaConf.create({})
    may_show = True
    for override in overrides:
        key, equals, value = override.partition("=")
        adding, key = key.startswith("+"), key.removeprefix("+").strip()
        path, lacking = _path(key), _secret_without_value(override)
        if not equals or not key or lacking:
            shown = lacking or (override if may_show else HIDDEN)
            errors.append(ConfigError(shown, "an override is written key=value"))
            may_show = may_show and not lacking  # the next word may be its value
            continue
        try:
            error = None if adding else _find_missing(data, path, key)
            if error is not None and _is_addable(data, path) and not _is_near_layout(data, key):
                unlisted.append(error)
                error = None
            if error is None:
                # Not resolved here: a value may refer to other keys of the file.
                data.merge_with_dotlist([f"{path}={value}"])
        except (OmegaConfBaseException, YAMLError) as failure:
            what = "is not valid YAML" if is_secret_at(path, value) else str(failure).splitlines()[0]
            error = ConfigError(key, what)
        if error is not None:
            errors.append(error)
    return errors, unlisted


def _path(key: str) -> str:
    return key if key.split(".")[0] in JOB_KEYS else f"config.{key}"


def _secret_without_value(override: str) -> str:
    """The secret key at the beginning of an override, if no ``=`` follows it; else empty."""
    key, equals = _KEY.findall(override)[0]
    return key if not equals and is_secret_at(_path(key.lstrip("+-")), override) else ""


def _is_addable(data: DictConfig, path: str) -> bool:
    """Whether a key that is not there is one of ``config``, and nothing but mappings is in its way."""
    first, *parts = path.split(".")
    node: Any = data.get(first)
    for part in parts:
        if node is not None and (not isinstance(node, DictConfig) or not part):
            return False
        node = node.get(part) if node is not None else None
    return first == "config"


def _is_near_layout(data: DictConfig, key: str) -> bool:
    """Whether a key is none of ``config``, but almost one of the layout."""
    first = key.split(".")[0]
    if first in JOB_KEYS or first in data["config"]:
        return False
    return bool(get_close_matches(first, JOB_KEYS, 1, _ALMOST))


def _find_missing(data: DictConfig, path: str, key: str) -> ConfigError | None:
    """The error of an override whose role or user key is not in the file; the layout checks its own keys."""
    first, *rest = path.split(".")
    if first == "workload":
        rest = rest[:1]
    elif first != "config":
        return None
    node: Any = data.get(first)
    for part in rest:
        if isinstance(node, ListConfig) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, DictConfig) and part in node:
            node = node.get(part)
        else:
            own = JOB_KEYS if node is data.get("config") and part == rest[0] else ()
            return _unknown_key(node, part, key, own)
    return None


def _unknown_key(node: Any, part: str, key: str, own: Sequence[str]) -> ConfigError:
    names = [str(name) for name in node] if isinstance(node, DictConfig) else []
    if nearest(part, names) is None and (close := get_close_matches(part, own, 1, _ALMOST)):
        return ConfigError(key, f"unknown key '{part}'; did you mean '{key.replace(part, close[0], 1)}'?")
    return ConfigError(key, f"unknown key '{part}'{hint(part, names)} (write +{key}=... to add it)")
