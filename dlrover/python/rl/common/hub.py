# SPDX-License-Identifier: Apache-2.0
"""Names on the Hugging Face hub: looking them up, and telling them from paths."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, TypeAlias

_TIMEOUT_S = 10.0

_FILE = re.compile(
    r"\.(jsonl?|[ct]sv|txt|md|ya?ml|xml|parquet|arrow|h5|gz|bz2|xz|zst|zip|tar|tgz|safetensors|bin|pth?|gguf)$"
)


Lookup: TypeAlias = Literal["none", "data", "all"]

LOOKUP: ContextVar[Lookup] = ContextVar("lookup", default="data")
"""The names to look up before a job starts: by default its data sets, whose rows a run needs first."""

NOT_LOOKED_UP = "on the hub: not looked up (check --hub does)"


def current_lookup() -> Lookup:
    return LOOKUP.get()  # waits: for nothing


@contextmanager
def looking_up(lookup: Lookup) -> Iterator[None]:
    token = LOOKUP.set(lookup)
    try:
        yield
    finally:
        LOOKUP.reset(token)


def hub_fault(kind: str, name: str) -> str:
    """Return why the hub has no ``model`` or ``dataset`` of this name, after at most 10 seconds; empty if it has."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_TIMEOUT_S)
    except RepositoryNotFoundError:
        return f"there is no {kind} '{name}' on the hub, or it is private"
    except Exception as error:  # noqa: BLE001 - networks, proxies and the hub raise any error
        return f"the hub cannot be reached: {str(error).partition(chr(10))[0]}"
    return ""


def is_cached(name: str, kind: str = "model") -> bool:
    """Return True if the hub's cache here has the configuration of a ``model``, or the card of a ``dataset``."""
    from huggingface_hub import try_to_load_from_cache

    try:
        file = "config.json" if kind == "model" else "README.md"
        return isinstance(try_to_load_from_cache(name, file, repo_type=kind), str)
    except ValueError:  # no name of the hub
        return False


def is_path(name: str, kind: str = "model") -> bool:
    """Return True if the name of a missing ``model`` or ``dataset`` can only be a path: by its form, or, unless the
    hub's cache has it, by a file's suffix or a local folder that it begins with."""
    if _has_form_of_path(name):
        return True
    may_be_file = _FILE.search(name.lower()) is not None or _begins_here(name)
    return may_be_file and not is_cached(name.partition(":")[0], kind)


def how_to_cache(name: str, kind: str = "model") -> str:
    """Return the end of a message about a path that may also be a hub's name; else empty."""
    if _has_form_of_path(name) or not _begins_here(name):
        return ""
    command = f"hf download {'' if kind == 'model' else f'--repo-type {kind} '}{name.partition(':')[0]}"
    return f"; '{name.partition('/')[0]}' is a folder here: to use the hub's, download it first ({command})"


def _has_form_of_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _begins_here(name: str) -> bool:
    first, slash, _ = name.partition("/")
    return bool(slash) and Path(first).is_dir()
