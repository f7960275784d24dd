"""Job files and dotted overrides."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.config.layout import JOB_KEYS, job_from_mapping
from dlrover.python.rl.config.spec import JobSpec


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file and apply overrides.

    Args:
        path: a YAML file in DLRover's ``rl_config`` layout; its folder and the working directory are searched for the
            job's classes.
        overrides: ``key=value``. A key that begins with a part of the layout (``workload.rollout.num=4``) changes the
            job, any other (``data.train=my.jsonl``) the job's ``config``. The key must exist; ``+key=value`` adds one.

    Raises:
        InvalidJob: with every problem found.
    """
    file = Path(path)
    if not file.is_file():
        siblings = [other.name for other in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        raise InvalidJob([Problem(str(path), f"no such job file{hint(file.name, siblings)}")])
    data = _read(_text(file), str(path))
    problems = _apply(data, overrides)
    search = search_folders(file.absolute().parent)
    try:
        job = job_from_mapping(data, _as_name(file.stem), search)
    except InvalidJob as error:
        raise InvalidJob([*problems, *error.problems], error.salvaged) from None
    if problems:
        raise InvalidJob(problems, salvaged=job)
    return job


def load_job_text(
    text: str, name: str, overrides: Sequence[str] = (), search_path: tuple[str, ...] | None = None
) -> JobSpec:
    """Like :func:`load_job` for YAML or JSON text; classes are looked for in the working directory by default."""
    data = _read(text, "rl_config")
    problems = _apply(data, overrides)
    if problems:
        raise InvalidJob(problems)
    data["name"] = name
    return job_from_mapping(data, name, search_folders() if search_path is None else search_path)


def search_folders(*more: Path) -> tuple[str, ...]:
    """Where a job's classes may be: the working directory, ``more``, and what ``PYTHONPATH`` names here, since the
    processes of a running cluster do not inherit it."""
    inherited = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return tuple(dict.fromkeys([str(Path.cwd()), *map(str, more), *inherited]))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidJob([Problem(str(file), f"cannot be read: {error}")]) from error


def _as_name(stem: str) -> str:
    """A job name made from a file's."""
    name = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in stem.lower())
    return name.strip("-")[:63].strip("-") or "job"


def _read(text: str, where: str) -> DictConfig:
    data: Any = None
    try:
        data = OmegaConf.create(text)
    except AssertionError:
        pass  # OmegaConf's answer to a lone number
    except (YAMLError, OmegaConfBaseException, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark is not None else where
        raise InvalidJob([Problem(place, f"not valid YAML: {getattr(error, 'problem', None) or error}")]) from error
    if not isinstance(data, DictConfig):
        raise InvalidJob([Problem(where, "a job file is a mapping at its top level")])
    return data


def _apply(data: DictConfig, overrides: Sequence[str]) -> list[Problem]:
    problems = []
    if data.get("config") is None:
        data["config"] = OmegaConf.create({})
    for override in overrides:
        key, equals, value = override.partition("=")
        adding, key = key.startswith("+"), key.removeprefix("+").strip()
        if not equals or not key:
            problems.append(Problem(override, "an override is written key=value"))
            continue
        path = key if key.split(".")[0] in JOB_KEYS else f"config.{key}"
        try:
            problem = None if adding else _missing(data, path, key)
            if problem is None:
                # Not resolved here: a value may refer to other keys of the file.
                data.merge_with_dotlist([f"{path}={value}"])
        except (OmegaConfBaseException, YAMLError) as error:
            problem = Problem(key, str(error).splitlines()[0])
        if problem is not None:
            problems.append(problem)
    return problems


def _missing(data: DictConfig, path: str, key: str) -> Problem | None:
    """The problem of an override whose role or user key is not in the file, or None; the layout judges its own keys."""
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
            return _unknown(node, part, key)
    return None


def _unknown(node: Any, part: str, key: str) -> Problem:
    known = [str(name) for name in node] if isinstance(node, DictConfig) else []
    return Problem(key, f"unknown key '{part}'{hint(part, known)} (write +{key}=... to add it)")
