# SPDX-License-Identifier: Apache-2.0
"""What a job file may be at most, found before it is loaded: a reader of untrusted text must not be its victim."""

import os
import re
from collections.abc import Collection, Iterator
from typing import Any

import yaml

from dlrover.python.rl.common.errors import ConfigError, InvalidJob

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
    """Raise InvalidJob if ``text`` is larger, deeper or more entangled than a job file is, or has tags that construct
    objects. Errors of its syntax are left to the loader."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidJob([ConfigError(where, f"character {error.start} is no Unicode text")]) from error
    if size > MAX_BYTES:
        raise _refusal(where, f"has {size} bytes, a job file has at most {MAX_BYTES}")
    try:
        for line, fault in _faults(text):
            raise _refusal(f"{where}:{line}", fault)
    except (yaml.YAMLError, RecursionError):
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
        if tag and not tag.startswith(_STANDARD_TAG):
            yield line, f"the tag {tag} is not allowed: a job file holds plain values"
        elif tag and "python" in tag:
            yield line, f"the tag {tag.removeprefix(_STANDARD_TAG)} is not allowed: a job file holds plain values"


def find_resolver(text: str) -> str | None:
    """The name of the first OmegaConf resolver that a text calls, such as ``oc.env``, empty if the name is computed;
    None if it calls none. References to other keys are no resolvers."""
    match = _RESOLVER.search(text)
    return match[1] if match else None


def validate_resolvers(values: Any) -> list[ConfigError]:
    """``values`` are plain, and not resolved yet. A resolver puts what it reads, such as a secret of the environment,
    into a job's files and logs."""
    if os.environ.get(ALLOW_RESOLVERS) == "1":
        return []
    calls = [(where, name) for where, text in list_texts(values) if (name := find_resolver(text)) is not None]
    return [
        ConfigError(
            where,
            f"calls {f'the resolver {name!r}' if name else 'a resolver'}, which may read the environment: "
            f"{ALLOW_RESOLVERS}=1 allows it",
        )
        for where, name in calls
    ]


def without(places: Collection[str], value: Any, where: str = "") -> Any:
    """A copy of plain values with None at these places, as :func:`list_texts` gives them."""
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


def _refusal(where: str, what: str) -> InvalidJob:
    return InvalidJob([ConfigError(where, what)])
