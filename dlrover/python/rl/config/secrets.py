# SPDX-License-Identifier: Apache-2.0
"""Which values of a job are secrets, and a job without them: it is what is stored, and what Ray keeps of an actor.

Environment variables are secrets by the words in their names, keys of ``config`` by their whole last words: there
``max_tokens`` and ``key`` are everyday names. A URL with a password is one anywhere.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from dlrover.python.rl.common.redaction import HIDDEN
from dlrover.python.rl.config.spec import JobSpec

Secrets = Mapping[str, str]
"""Where a secret is (``env.API_KEY``, ``workload.actor.env.TOKEN``, ``config.judge.api_key``) to its value."""

_VARIABLE = re.compile("TOKEN|KEY|SECRET|PASS|PWD|AUTH|CREDENTIAL|DSN", re.IGNORECASE)
_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_KEY = re.compile(
    r"(^|_)(api_?key|access_?key|secret_?key|private_?key|secret|password|passwd|passphrase|credentials?|dsn"
    r"|(auth|access|api|bearer|hub|hf)_?token)$|^token$",
    re.IGNORECASE,
)


def is_secret(name: str, value: str) -> bool:
    """Of an environment variable."""
    return bool(_VARIABLE.search(name) or _VALUE.search(value))


def is_secret_key(name: str, value: str) -> bool:
    """Of a key of ``config``."""
    return bool(_KEY.search(name) or _VALUE.search(value))


def seal(job: JobSpec) -> tuple[JobSpec, Secrets]:
    """The job with ``HIDDEN`` in the place of each secret, and the secrets."""
    found: dict[str, str] = {}

    def hide(where: str, value: str) -> str:
        found[where] = value
        return HIDDEN

    return _mapped(job, hide, is_secret, is_secret_key), {at: value for at, value in found.items() if value != HIDDEN}


def unseal(job: JobSpec, secrets: Secrets) -> JobSpec:
    """Put secrets back where they were; one that is not given stays hidden."""
    return _mapped(job, lambda where, value: secrets.get(where, value), _is_hidden, _is_hidden)


def hidden_in(job: JobSpec) -> list[str]:
    """Where ``job`` lacks secrets."""
    found: dict[str, str] = {}

    def note(where: str, value: str) -> str:
        return found.setdefault(where, value)

    _mapped(job, note, _is_hidden, _is_hidden)
    return list(found)


def variables_of(secrets: Secrets, role: str = "") -> dict[str, str]:
    """The environment variables among them, of the trainer or of the members of ``role``."""
    both = ("env.", f"workload.{role.lower()}.env.")
    return {at.removeprefix(start): value for start in both for at, value in secrets.items() if at.startswith(start)}


_Change = Callable[[str, str], str]
_Test = Callable[[str, str], bool]


def _is_hidden(name: str, value: str) -> bool:
    return value == HIDDEN


def _mapped(job: JobSpec, change: _Change, of_variable: _Test, of_key: _Test) -> JobSpec:
    def variables(where: str, env: Mapping[str, str]) -> dict[str, str]:
        return {
            name: change(f"{where}.{name}", value) if of_variable(name, value) else value for name, value in env.items()
        }

    workloads = {
        role: replace(spec, env=variables(f"workload.{role.lower()}.env", spec.env))
        for role, spec in job.workloads.items()
    }
    config = _mapped_config(job.config, change, of_variable, of_key)
    return replace(job, env=variables("env", job.env), workloads=workloads, config=config)


def _mapped_config(config: Any, change: _Change, of_variable: _Test, of_key: _Test) -> Any:
    """``config`` has the whole job file as its root, to which its references may lead, and which goes where it goes."""
    if not isinstance(config, DictConfig | ListConfig):
        return config
    root = config._get_root()
    found = []
    for where, path, name, value in _texts(root, "config" if root is config else ""):
        is_wanted = of_key if where.startswith("config.") else of_variable if ".env." in f".{where}" else None
        if is_wanted is not None and is_wanted(name, value):
            found.append((path, change(where, value)))
    if not found:
        return config
    changed = copy.deepcopy(root)
    for path, value in found:
        _put(changed, path, value)
    return changed if root is config else changed[config._key()]


def _texts(node: Any, where: str, path: tuple[Any, ...] = (), name: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """Every text in ``config``: where it is, its path, the key that it is under, and its value."""
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    keys: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        if OmegaConf.is_interpolation(node, key) or OmegaConf.is_missing(node, key):
            continue
        label = str(key) if isinstance(node, DictConfig) else name
        place = f"{where}.{key}" if where else str(key)
        try:
            value = node[key]
        except OmegaConfBaseException:
            continue
        if isinstance(value, DictConfig | ListConfig):
            yield from _texts(value, place, (*path, key), label)
        elif isinstance(value, str):
            yield place, (*path, key), label, value


def _put(config: Any, path: tuple[Any, ...], value: str) -> None:
    *folders, last = path
    node = config
    for key in folders:
        node = node[key]
    with read_write(config):
        node[last] = value
