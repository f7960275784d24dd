# SPDX-License-Identifier: Apache-2.0
"""Access to the service: the tokens in the folder of its state, and the rights of each role.

The file of tokens, which only its owner can read, holds names, roles and SHA-256 digests. A token itself is written
once, to a separate file. A name may have several tokens, so that a token can be replaced while both are valid.
"""

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dlrover.python.rl.common import disk_space
from dlrover.python.rl.common.errors import AccessDenied, CallError
from dlrover.python.rl.common.private_files import check_private, create_private

TOKENS, TOKEN = "tokens.json", "token"
ADDRESS = "address"
_BYTES = 32
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


class AccessRole(StrEnum):
    """Each role includes the rights of the roles above it."""

    READ = "read"
    SUBMIT = "submit"  # submits jobs, and operates them
    ADMIN = "admin"  # operates all jobs


@dataclass(frozen=True)
class Caller:
    name: str
    role: AccessRole

    def check(self, needed: AccessRole) -> None:
        """Raises AccessDenied if the caller's role is below the ``needed`` one."""
        roles = list(AccessRole)
        if roles.index(self.role) < roles.index(needed):
            raise AccessDenied(f"'{self.name}' has the role '{self.role}', which may not do this")

    def check_owner(self, owner: str) -> None:
        """Raises AccessDenied unless the caller may operate the jobs of ``owner``."""
        self.check(AccessRole.SUBMIT if owner == self.name else AccessRole.ADMIN)


class TokenFile:
    """The tokens in ``folder``, read again when the file changes; an unreadable or public file has none."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / TOKENS
        self._lock = threading.Lock()
        self._seen: tuple[int, int] = (-1, -1)
        self._callers: Mapping[str, Caller] = {}  # by the digest of a token

    def caller(self, token: str) -> Caller:
        """Raises AccessDenied."""
        digest = _digest(token).encode()
        # All are compared, so that the time does not depend on the match.
        matches = [caller for each, caller in self._current().items() if hmac.compare_digest(each.encode(), digest)]
        if not matches:
            raise AccessDenied("this request needs a valid token")
        return matches[0]

    def entries(self) -> list[tuple[str, AccessRole]]:
        return [(caller.name, caller.role) for caller in self._current().values()]

    def _current(self) -> Mapping[str, Caller]:
        with self._lock:
            try:
                state = check_private(self._path)
                if (state.st_mtime_ns, state.st_ino) != self._seen:
                    self._callers = _read(self._path)
                    self._seen = (state.st_mtime_ns, state.st_ino)
            except (OSError, CallError):
                self._seen, self._callers = (-1, -1), {}
            return self._callers


def prepare(folder: Path) -> Path:
    """Create ``folder`` and an administrator's token unless they exist; return the token's file. Raises CallError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        raise CallError(f"{folder} can be read by others: chmod 700 {folder}")
    with _locked(folder):
        if not (folder / TOKENS).exists():
            (folder / TOKEN).unlink(missing_ok=True)  # of a first start that was cut off
            return _add(folder, {}, Caller("admin", AccessRole.ADMIN), folder / TOKEN)
        check_private(folder / TOKENS)
        _read(folder / TOKENS)
    return folder / TOKEN


def add_token(folder: Path, name: str, role: AccessRole, file: Path) -> Path:
    """Write a new token for ``name`` to ``file``, which must not exist. Raises CallError."""
    if not _NAME.fullmatch(name):
        raise CallError(f"'{name}' is not a valid name: at most 63 lower-case letters, digits, '.', '_' and '-'")
    with _locked(folder):
        callers = _read(folder / TOKENS)
        if any(caller.name == name and caller.role != role for caller in callers.values()):
            raise CallError(f"'{name}' has another role already: remove its tokens first")
        return _add(folder, callers, Caller(name, role), file)


def _add(folder: Path, callers: Mapping[str, Caller], caller: Caller, file: Path) -> Path:
    token = secrets.token_urlsafe(_BYTES)
    try:
        create_private(file, f"{token}\n")
    except FileExistsError as error:
        raise CallError(f"{file} exists already") from error
    _write(folder, {**callers, _digest(token): caller})
    return file


def remove_tokens(folder: Path, name: str) -> int:
    """Remove all tokens of ``name``, which loses access at once; return their number."""
    with _locked(folder):
        callers = _read(folder / TOKENS)
        staying = {digest: caller for digest, caller in callers.items() if caller.name != name}
        _write(folder, staying)
    return len(callers) - len(staying)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the tokens while they are changed, so that no removed one comes back. The lock ends with its process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits: for another process that writes the table
        yield
    finally:
        os.close(descriptor)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _read(path: Path) -> dict[str, Caller]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["tokens"]
        callers = {row["sha256"]: Caller(row["name"], AccessRole(row["role"])) for row in rows}
        for digest in callers:
            bytes.fromhex(digest)
        return callers
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CallError(f"{path} cannot be read: {error}") from error


def _write(folder: Path, callers: Mapping[str, Caller]) -> None:
    rows = [{"name": caller.name, "role": caller.role, "sha256": digest} for digest, caller in callers.items()]
    temporary = folder / f"{TOKENS}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    create_private(temporary, json.dumps({"tokens": rows}, indent=1))
    temporary.replace(folder / TOKENS)


def default_state() -> Path:
    """Return the folder ``DLROVER_RL_STATE``, by default one in the user's home."""
    named = os.environ.get("DLROVER_RL_STATE")
    return Path(named) if named else Path.home() / ".dlrover-rl" / "service"


def write_address(state: Path, address: str) -> None:
    """Write the service's address for clients, since its port may be any free one."""
    disk_space.replace(state / ADDRESS, f"{address}\n".encode())
