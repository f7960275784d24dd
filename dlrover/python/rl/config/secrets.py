# SPDX-License-Identifier: Apache-2.0
"""The secrets of a job, and the job without them, which is stored and passed to Ray.

Environment variables are secrets by the words in their names, values of ``config`` by the last words of a key above
them, in any spelling: ``apiKey`` is ``api_key``, while ``max_tokens`` and ``key`` are everyday names. URLs with a user
or a secret parameter, and private keys, are secrets anywhere. None, booleans and empty texts are not."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from omegaconf import AnyNode, DictConfig, ListConfig, ValueNode
from omegaconf.errors import OmegaConfBaseException

from dlrover.python.rl.common.log import HIDDEN, redacted
from dlrover.python.rl.config.plain import map_values
from dlrover.python.rl.config.spec import JobSpec

Secrets = Mapping[str, str]
"""Values as text, by place: ``env.API_KEY``, ``workload.actor.env.TOKEN``, ``config.judge.api_key``."""

_PLACEHOLDERS: Mapping[type, str] = {
    str: HIDDEN,
    int: f"{HIDDEN} (int)",
    float: f"{HIDDEN} (float)",
    bytes: f"{HIDDEN} (bytes)",
}
_READERS: Mapping[str, Callable[[str], Any]] = {
    HIDDEN: str,
    _PLACEHOLDERS[int]: int,
    _PLACEHOLDERS[float]: float,
    _PLACEHOLDERS[bytes]: lambda text: text.encode("latin-1"),
}

_VARIABLE = re.compile("TOKEN|KEY|SECRET|PASS|PWD|AUTH|CREDENTIAL|DSN|COOKIE|CONN.*STR", re.IGNORECASE)
_VALUE = re.compile(r"https?://[^/?#\s@]+@|://[^/\s:@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY-----")
_PARAMETER = re.compile(r"[?&;]([\w.-]+)=[^&;#\s]")
_SECRET_PARAMETERS = frozenset({"key", "sig", "signature"})

_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_OWNERS = (
    "api|access|auth|bearer|refresh|hub|hf|huggingface|github|gitlab|wandb|openai|anthropic|aws|azure|secret|private"
    "|ssh|signing|encryption"
)
_COLUMNS_AND_MARKS = (
    "primary|foreign|sort|group|partition|cache|join|index|row|column|field|dict|map|lookup|hash|unique|public|data"
    "|dataset|source|split|subset|domain|category|metadata|id|uid|name|text|content|context|history|system|role|message"
    "|messages|tool|tools|thinking|image|images|video|videos|audio|audios|input|output|prompt|completion|response"
    "|question|problem|answer|solution|target|label|chosen|rejected|score|reward|fn|model|teacher|metric|state|feature"
    "|pad|eos|bos|unk|sep|cls|mask|special|stop|start|begin|end|first|last|next|new|single|per|each|every|dp|max|min"
    "|mean|num|think|vision|action|step|good|bad|positive|negative|yes|no|placeholder|separator|newline|prefix|suffix"
    "|delimiter|trigger|eot|eom|boi|eoi|tls|ssl"
)
_KEY = re.compile(
    r"(?:^|[._])(?:"
    r"(?:secret|password|passwd|passphrase|pwd|credential|dsn|cookie|authorization|jwt)s?|connection_?str(?:ing)?s?"
    rf"|(?:{_OWNERS})[._]?(?:key|token)s?"
    rf"|(?!(?:{_COLUMNS_AND_MARKS})_)[a-z0-9]+_(?:key|token)"
    r")(?:\.|$)|(?:^|\.)token(?:\.|$)"
)


def is_secret_at(where: str, value: object) -> bool:
    """Return True for a secret at, or below, a place of a job file: ``env.API_KEY``, ``config.judge.api_key``."""
    if type(value) not in _PLACEHOLDERS or value == "":
        return False
    text = _as_text(value)
    parameters = _PARAMETER.findall(text)
    if _VALUE.search(text) or any(
        name.lower() in _SECRET_PARAMETERS or _KEY.search(_normalized(name)) for name in parameters
    ):
        return True
    section, is_variable, name = f".{where}.".partition(".env.")
    if not is_variable or f"{section}.".startswith(".config."):
        return bool(_KEY.search(".".join(map(_normalized, where.split(".")))))
    name = name.rstrip(".")
    return not name or name.isdecimal() or bool(_VARIABLE.search(name))


@lru_cache(maxsize=1000)
def _normalized(name: str) -> str:
    """Return ``api_key`` for ``apiKey``, ``API-Key`` and ``api_key_2``; empty for the name of a class or function."""
    return "" if ":" in name else "_".join(filter(None, _BOUNDARY.split(name))).lower().rstrip("_0123456789")


def without_secrets(values: Any, where: str = "config") -> Any:
    """Return plain values at a place of a job file without secrets, for people to read."""

    def hide(place: str, value: Any) -> Any:
        if is_secret_at(place, value):
            return HIDDEN
        return redacted(value) if type(value) is str else value

    return map_values(values, hide, where)


def hide_in_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets, for people to read: ``env.API_KEY=***``, ``--api-key ***``."""
    shown, option = list[str](), ""
    for argument in arguments:
        name, sign, value = argument.partition("=")
        is_hidden = is_secret_at(name.lstrip("+~-") if sign else option, value if sign else argument)
        shown.append(f"{f'{name}=' * bool(sign)}{HIDDEN}" if is_hidden else redacted(argument))
        option = argument.lstrip("-") if argument.startswith("--") else ""
    return shown


def seal(job: JobSpec) -> tuple[JobSpec, Secrets]:
    """Return the job with a placeholder, which begins with ``HIDDEN``, for each secret, and the secrets."""
    secrets: dict[str, str] = {}

    def hide(where: str, value: Any) -> str:
        if _is_hidden(where, value):
            return str(value)
        secrets[where] = _as_text(value)
        return _PLACEHOLDERS[type(value)]

    return _mapped(job, hide, is_secret_at), secrets


def unseal(job: JobSpec, secrets: Secrets) -> JobSpec:
    """Put ``secrets`` back in their places, with their types; others stay hidden."""

    def restore(where: str, placeholder: Any) -> Any:
        if where not in secrets:
            return placeholder
        try:
            value = _READERS[placeholder](secrets[where])
        except ValueError:  # a secret may have been replaced by one of another type
            return secrets[where]
        return value if _as_text(value) == secrets[where] else secrets[where]

    return _mapped(job, restore, _is_hidden)


def hidden_in(job: JobSpec) -> list[str]:
    """List the places where ``job`` lacks secrets."""
    places: dict[str, Any] = {}
    _mapped(job, places.setdefault, _is_hidden)
    return list(places)


def variables_of(secrets: Secrets, role: str = "") -> dict[str, str]:
    """Return the environment variables among ``secrets`` for the trainer, or for the workers of ``role``."""
    both = ("env.", f"workload.{role.lower()}.env.")
    return {at.removeprefix(start): value for start in both for at, value in secrets.items() if at.startswith(start)}


def _as_text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


_Change = Callable[[str, Any], Any]
_Test = Callable[[str, Any], bool]


def _is_hidden(_: str, value: object) -> bool:
    return isinstance(value, str) and value in _READERS


def _mapped(job: JobSpec, change: _Change, is_wanted: _Test) -> JobSpec:
    def change_wanted(where: str, value: Any) -> Any:
        return change(where, value) if is_wanted(where, value) else value

    workloads = {
        role: replace(spec, env=map_values(spec.env, change_wanted, f"workload.{role.lower()}.env"))
        for role, spec in job.workloads.items()
    }
    config = _mapped_config(job.config, change, is_wanted)
    return replace(job, env=map_values(job.env, change_wanted, "env"), workloads=workloads, config=config)


def _mapped_config(config: Any, change: _Change, is_wanted: _Test) -> Any:
    """Change ``config`` together with its root, the whole job file, which its references may lead to."""
    if not isinstance(config, DictConfig | ListConfig):
        return config
    root = config._get_root()
    changes = []
    for where, path, value in _scalars(root, "config" if root is config else ""):
        is_kept = where.startswith("config.") or ".env." in f".{where}"
        if is_kept and is_wanted(where, value):
            changes.append((path, change(where, value)))
    if not changes:
        return config
    changed = copy.deepcopy(root)
    for (*folders, last), value in changes:
        node: Any = changed
        for key in folders:
            node = node[key]
        node._content[last] = AnyNode(value, key=last, parent=node)  # of any type, even in a read-only config
    return changed if root is config else changed[config._key()]


def _scalars(node: Any, where: str, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yield the place, the path and the value of every scalar in ``config``."""
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    content: Any = node._content
    for key, child in content.items() if isinstance(content, dict) else enumerate(content):
        if child._is_interpolation() or child._is_missing():
            continue
        place = f"{where}.{key}" if where else str(key)
        try:
            value = child._value() if isinstance(child, ValueNode) else node[key]  # ten times as slow
        except OmegaConfBaseException:
            continue
        if isinstance(value, DictConfig | ListConfig):
            yield from _scalars(value, place, (*path, key))
        else:
            yield place, (*path, key), value
