# SPDX-License-Identifier: Apache-2.0
"""The text of a job file as plain values, and back: its limits, OmegaConf's containers, unreadable values."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import nearest, nearest_path

_NOT_FOUND = re.compile(r"Interpolation key '([^']*)' not found")


def to_plain(value: Any, where: str | None = None) -> Any:
    """Turn an OmegaConf container into plain dicts and lists. Raises InvalidJob with every interpolation that cannot be
    resolved and every mandatory value (``???``) that is missing, and salvages the other values. ``where`` is its place
    in errors, by default its own."""
    if not isinstance(value, DictConfig | ListConfig):
        return value
    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        errors: list[ConfigError] = []
        salvaged = salvage_plain(value, errors)
        errors = errors or [reference_error(value, error)]
        if where is not None:
            own = value._get_full_key(None)
            inner = [fault.where.removeprefix(own).removeprefix(".") for fault in errors]
            places = [".".join(filter(None, [where, place])) for place in inner]
            errors = [ConfigError(place, fault.what) for place, fault in zip(places, errors, strict=True)]
        raise InvalidJob(errors, salvaged) from error


def salvage_plain(value: Any, errors: list[ConfigError], skip: str = "") -> Any:
    """Return the plain values of a container but for the key ``skip``; unreadable ones are left out, with an error."""
    if not isinstance(value, DictConfig | ListConfig):
        return value
    if value._is_none():
        return None
    parts: dict[Any, Any] = {}
    keys: Any = [key for key in value if key != skip] if isinstance(value, DictConfig) else range(len(value))
    for key in keys:
        try:
            parts[key] = salvage_plain(value[key], errors)
        except OmegaConfBaseException as error:
            errors.append(reference_error(value, error))
    return parts if isinstance(value, DictConfig) else [*parts.values()]


def reference_error(container: Any, error: OmegaConfBaseException) -> ConfigError:
    """Return the error of a value in ``container``. A reference to a missing key gets the key of the whole file that is
    most likely meant: one that ends in its name, a similar one, or one whose last part is similar."""
    where, fault = str(getattr(error, "full_key", "") or "config"), str(error).splitlines()[0]
    missing = _NOT_FOUND.search(fault)
    if missing is None:
        return ConfigError(where, fault)
    if missing[1] in os.environ:
        return ConfigError(where, f"{fault}: an environment variable is written ${{oc.env:{missing[1]}}}")
    root, name = OmegaConf.to_container(container._get_root(), resolve=False), missing[1].lstrip(".")
    keys = [key for key in _keys(root, "") if key != where]
    by_depth = sorted(keys, key=lambda key: -key.count("."))
    by_end = {key.rpartition(".")[2]: key for key in by_depth}  # the least deep of several
    ending = [key for key in by_depth if key.endswith(f".{name}")]
    end = nearest(name.rpartition(".")[2], by_end)
    near = ending[-1] if ending else nearest_path(name, keys) or (by_end[end] if end else None)
    return ConfigError(where, f"{fault}; did you mean '${{{near}}}'?" if near else fault)


def _keys(values: Any, prefix: str) -> Iterator[str]:
    for key, value in values.items() if isinstance(values, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")


def from_plain(values: Mapping[str, Any]) -> DictConfig:
    """Invert :func:`to_plain`: text is literal, whatever it looks like."""
    escaped = map_values(values, lambda _, value: escape_references(value) if isinstance(value, str) else value)
    return DictConfig(escaped)


def map_values(value: Any, change: Callable[[str, Any], Any], where: str = "") -> Any:
    """Copy plain values, each changed by ``change(place, value)``."""
    if isinstance(value, Mapping):
        return {key: map_values(part, change, f"{where}.{key}" if where else str(key)) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [map_values(part, change, f"{where}.{number}") for number, part in enumerate(value)]
    return change(where, value)


def escape_references(text: str) -> str:
    """Escape each literal ``${``, and the backslashes before it, for OmegaConf."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


MAX_BYTES = 1_000_000
MAX_NODES = 50_000
MAX_DEPTH = 50
MAX_ALIASES = 100

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPENING = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSING = (yaml.MappingEndEvent, yaml.SequenceEndEvent)
_STANDARD_TAG = "tag:yaml.org,2002:"
_RESOLVER = re.compile(r"(?<!\\)(?:\\\\)*\$\{\s*([^}:]*?)\s*(?::|\$\{)")

ALLOW_RESOLVERS = "DLROVER_RL_ALLOW_RESOLVERS"


def check_text(text: str, where: str) -> None:
    """Raise InvalidJob for text that is too large, deep or entangled, or has tags that construct objects."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidJob([ConfigError(where, f"character {error.start} is no Unicode text")]) from error
    if size > MAX_BYTES:
        raise InvalidJob([ConfigError(where, f"has {size} bytes, a job file has at most {MAX_BYTES}")])
    try:
        for line, fault in _faults(text):
            raise InvalidJob([ConfigError(f"{where}:{line}", fault)])
    except (yaml.YAMLError, RecursionError):  # the loader reports it
        return


def _faults(text: str) -> Iterator[tuple[int, str]]:
    depth = nodes = aliases = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, _CLOSING):
            depth -= 1
            continue
        nodes += 1
        depth += isinstance(event, _OPENING)
        aliases += isinstance(event, yaml.AliasEvent)
        tag = getattr(event, "tag", None)
        if nodes > MAX_NODES:
            yield line, f"has more than {MAX_NODES} keys and values"
        if depth > MAX_DEPTH:
            yield line, f"is nested more than {MAX_DEPTH} levels deep"
        if aliases > MAX_ALIASES:
            yield line, f"has more than {MAX_ALIASES} aliases"
        if tag and ("python" in tag or not tag.startswith(_STANDARD_TAG)):
            yield line, f"the tag {tag.removeprefix(_STANDARD_TAG)} is not allowed: a job file holds plain values"


def validate_resolvers(values: Any) -> list[ConfigError]:
    """Report calls of OmegaConf's resolvers, such as ``oc.env``, in plain values that are not resolved yet; references
    to other keys are allowed. A resolver puts what it reads, such as a secret, into a job's files and logs."""
    if os.environ.get(ALLOW_RESOLVERS) == "1":
        return []
    fault = "calls {}, which may read the environment: {}=1 allows it"
    return [
        ConfigError(where, fault.format(f"the resolver {match[1]!r}" if match[1] else "a resolver", ALLOW_RESOLVERS))
        for where, text in list_texts(values)
        if (match := _RESOLVER.search(text))
    ]


def without(places: Collection[str], value: Any, where: str = "") -> Any:
    """Copy plain values with None at these places, which :func:`list_texts` names."""
    if where in places:
        return None
    if isinstance(value, dict):
        return {key: without(places, part, f"{where}.{key}" if where else str(key)) for key, part in value.items()}
    if isinstance(value, list):
        return [without(places, part, f"{where}.{number}") for number, part in enumerate(value)]
    return value


def list_texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, part in value.items():
            place = f"{where}.{key}" if where else str(key)
            yield from list_texts(key, place)
            yield from list_texts(part, place)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from list_texts(part, f"{where}.{number}")
