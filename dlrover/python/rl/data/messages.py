"""What a conversation in a data file looks like, and what may be wrong with one."""

from typing import Any

from dlrover.python.rl.common.nearest import hint

ROLES = ("system", "user", "assistant", "tool")
"""Who may speak."""

_KEYS = ("role", "content")


def message_faults(messages: Any) -> list[str]:
    """Everything wrong with ``messages``, which should be a filled list of ``{"role": ..., "content": text}``."""
    if not isinstance(messages, list) or not messages:
        return ["'messages' must be a list of messages with at least one"]
    return [
        f"messages[{index}]: {fault}" for index, message in enumerate(messages) for fault in _faults_of_one(message)
    ]


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
