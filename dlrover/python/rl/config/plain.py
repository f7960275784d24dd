# SPDX-License-Identifier: Apache-2.0
"""From OmegaConf's containers to plain values and back."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import nearest, nearest_path

_NOT_FOUND = re.compile(r"Interpolation key '([^']*)' not found")


def to_plain(value: Any, where: str | None = None) -> Any:
    """Turn an OmegaConf container into plain dicts and lists. Raises InvalidJob with every interpolation that cannot be
    resolved and every mandatory value (``???``) that is missing; what it salvages is without them.

    ``where``: its place in errors; by default that which it has itself.
    """
    if not isinstance(value, DictConfig | ListConfig):
        return value
    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        errors: list[ConfigError] = []
        salvaged = _salvage(value, errors)
        errors = errors or [reference_error(value, error)]
        if where is not None:
            own = value._get_full_key(None)
            errors = [ConfigError(_moved(fault.where, own, where), fault.what) for fault in errors]
        raise InvalidJob(errors, salvaged) from error


def _moved(place: str, own: str, where: str) -> str:
    """``place``, which begins with ``own``, as one below ``where``."""
    inner = place.removeprefix(own).removeprefix(".")
    return ".".join(filter(None, [where, inner]))


def _salvage(value: Any, errors: list[ConfigError]) -> Any:
    """The plain values of a container without those that cannot be read, which are added to ``errors``."""
    if isinstance(value, DictConfig) and not value._is_none():
        return {key: part for key in value for part in _read(value, key, errors)}
    if isinstance(value, ListConfig) and not value._is_none():
        return [part for number in range(len(value)) for part in _read(value, number, errors)]
    return None if isinstance(value, DictConfig | ListConfig) else value


def _read(container: Any, key: Any, errors: list[ConfigError]) -> Iterator[Any]:
    try:
        yield _salvage(container[key], errors)
    except OmegaConfBaseException as error:
        errors.append(reference_error(container, error))


def reference_error(container: Any, error: OmegaConfBaseException) -> ConfigError:
    """The error of a value in ``container``; of a reference to a key that is not there, with the nearest one."""
    where, what = str(getattr(error, "full_key", "") or "config"), str(error).splitlines()[0]
    missing = _NOT_FOUND.search(what)
    near = _nearest_key(missing[1], container._get_root(), where) if missing is not None else None
    if missing is not None and missing[1] in os.environ:
        return ConfigError(where, f"{what}: an environment variable is written ${{oc.env:{missing[1]}}}")
    return ConfigError(where, f"{what}; did you mean '${{{near}}}'?" if near else what)


def _nearest_key(name: str, root: Any, where: str) -> str | None:
    """The key of the whole file that a reference most likely means, but its own: one that ends in its name, a similar
    one, or one whose last part is similar."""
    keys = [key for key in _keys(OmegaConf.to_container(root, resolve=False), "") if key != where]
    name = name.lstrip(".")
    by_depth = sorted(keys, key=lambda key: -key.count("."))
    by_end = {key.rpartition(".")[2]: key for key in by_depth}  # of several the one that is least deep
    ending = [key for key in by_depth if key.endswith(f".{name}")]
    end = nearest(name.rpartition(".")[2], by_end)
    return ending[-1] if ending else nearest_path(name, keys) or (by_end[end] if end else None)


def _keys(values: Any, prefix: str) -> Iterator[str]:
    for key, value in values.items() if isinstance(values, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")


def from_plain(values: Mapping[str, Any]) -> DictConfig:
    """The inverse of :func:`to_plain`: text is literal, whatever it looks like."""
    config: DictConfig = OmegaConf.create(_escape(values))
    return config


def _escape(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    return escape_references(value) if isinstance(value, str) else value


def escape_references(text: str) -> str:
    """``text`` as OmegaConf reads it back: a literal ``${`` is escaped, and so are backslashes before it."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
