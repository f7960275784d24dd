# SPDX-License-Identifier: Apache-2.0
"""Names on the Hugging Face hub: which of them a check looks up, and why one cannot be had."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

_TIMEOUT_S = 10.0


class Lookup(StrEnum):
    NONE = "none"
    DATA = "data"
    ALL = "all"


LOOKUP: ContextVar[Lookup] = ContextVar("lookup", default=Lookup.DATA)
"""What is looked up before a job starts: its data sets, since a run needs their rows first, unless a check is asked for
more or less."""

NOT_LOOKED_UP = "on the hub: not looked up (check --hub does)"


def current_lookup() -> Lookup:
    return LOOKUP.get()  # waits: for nothing


@contextmanager
def looking_up(what: Lookup) -> Iterator[None]:
    token = LOOKUP.set(what)
    try:
        yield
    finally:
        LOOKUP.reset(token)


def hub_fault(kind: str, name: str) -> str:
    """Why the hub does not have a ``model`` or ``dataset`` of this name, after at most 10 seconds; empty if it has."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_TIMEOUT_S)
    except RepositoryNotFoundError:
        return f"there is no {kind} '{name}' on the hub, or it is private"
    except Exception as error:  # noqa: BLE001 - networks, proxies and the hub raise any error
        return f"the hub cannot be reached: {str(error).partition(chr(10))[0]}"
    return ""


def is_cached(model: str) -> bool:
    """Whether the hub's cache on this machine has the configuration of a model."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except ValueError:  # no name of the hub
        return False
