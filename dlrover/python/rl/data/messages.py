"""What a conversation in a data file looks like, and what may be wrong with one."""

from collections.abc import Mapping
from typing import Any

from dlrover.python.rl.common.nearest import hint

ROLES = ("system", "user", "assistant", "tool")
"""Who may speak."""

_KEYS = ("role", "content")


_CONVERSATIONS = ("prompt", "messages", "chosen", "rejected")


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as every loader takes it, whatever kind of file it comes from.

    Absent and null are the same, also in messages: in the columns of a table what one row lacks is null. A list of
    messages under ``prompt`` goes by the name ``messages``.
    """
    plain = {key: value for key, value in row.items() if value is not None}
    if isinstance(plain.get("prompt"), list) and "messages" not in plain:
        plain["messages"] = plain.pop("prompt")
    for key in _CONVERSATIONS:
        if isinstance(plain.get(key), list):
            plain[key] = [_without_nulls(message) for message in plain[key]]
    return plain


def _without_nulls(message: Any) -> Any:
    return {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message


def message_faults(messages: Any, name: str = "messages") -> list[str]:
    """Everything wrong with the list ``name``: filled, of ``{"role": ..., "content": text}``."""
    if not isinstance(messages, list) or not messages:
        return [f"'{name}' must be a list of messages with at least one"]
    return [f"{name}[{index}]: {fault}" for index, message in enumerate(messages) for fault in _faults_of_one(message)]


def _faults_of_one(message: Any) -> list[str]:
    if not isinstance(message, dict):
        return [f"must be an object with 'role' and 'content', not {type(message).__name__}"]
    faults = [f"unknown key '{key}'{hint(key, _KEYS)}" for key in message if key not in _KEYS]
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        faults.append("'role' must be text")
    elif role not in ROLES:
        faults.append(f"unknown role '{role}'{hint(role, ROLES)}")
    if not isinstance(content, str):
        faults.append("'content' must be text")
    return faults
