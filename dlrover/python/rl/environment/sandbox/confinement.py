# SPDX-License-Identifier: Apache-2.0
"""Confines a program that a model wrote: at two levels of this machine's kernel, or in another sandbox by its name.

``bubblewrap``, if it is installed and works: the program sees the interpreter, its own folder and no other files, no
network, and only its own processes. ``limits`` otherwise: it runs as this user and can read the user's files; if the
kernel permits new namespaces, it has no network and cannot trace other processes or read their environment.

Both levels limit memory, processor time, file sizes, open files and processes (which the kernel does not count for
root); the environment is clean, only the passed descriptors are open, and privileges cannot grow. The caller sets the
deadline. Other sandboxes, in ``containers``, have limits; their command has this process's environment."""

import ctypes
import logging
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

from dlrover.python.rl.common.errors import ClassNotFound, VerifierError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.environment.sandbox.containers import SANDBOXES

_LOG = get_logger(__name__)

SETTING = "DLROVER_RL_SANDBOX"
"""Environment variable: ``bubblewrap`` refuses to run programs without it, ``limits`` does not look for it; or another
sandbox, by a name of ``SANDBOXES`` or as ``package.module:Class``."""

_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
_PROBE_S, _SANDBOX_PROBE_S = 10.0, 60.0
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


BUBBLEWRAP, LIMITS = LEVELS = ("bubblewrap", "limits")
_OPEN_FILES = _PROCESSES = 64


@dataclass(frozen=True)
class ProgramLimits:
    timeout_s: float = 4.0  #: limit of elapsed seconds; processor time may be one second more
    memory_mb: int = 1024  #: address space in MB; more is a MemoryError in the program
    #: bytes of standard output, of standard error and of each file, with bubblewrap of all files together; more ends it
    output_bytes: int = 1 << 20


@cache
def confinement() -> str:
    """Return the level of this process's programs, logged once; raises VerifierError if the setting requires more."""
    level, reason = _choose_level()
    severity = logging.WARNING if reason and not os.environ.get(SETTING) else logging.INFO
    _LOG.log(severity, "programs that a model wrote are confined by %s%s", level, f" ({reason})" if reason else "")
    return level


def _choose_level() -> tuple[str, str]:
    """Return the level, and why it is not bubblewrap. Raises as :func:`confinement`."""
    setting = os.environ.get(SETTING, "")
    if setting == LIMITS:
        return LIMITS, f"{SETTING}={setting}"
    if setting not in ("", BUBBLEWRAP):
        fault = _find_sandbox_fault(setting)
        if fault:
            raise VerifierError(f"{SETTING} is {setting}, but cannot run programs: {fault}")
        return setting, ""
    fault = find_bubblewrap_fault()
    if fault and setting:
        raise VerifierError(f"{SETTING} is {setting}, but cannot confine programs: {fault}")
    return (LIMITS, fault) if fault else (BUBBLEWRAP, "")


def sandbox_level() -> str:
    """Return ``bubblewrap``, ``namespaces`` (limits, no network), ``limits``, ``external`` for another sandbox, or
    ``none`` if programs are refused."""
    try:
        level, _ = _choose_level()
    except VerifierError:
        return "none"
    flags = _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC
    probe = [sys.executable, "-I", "-S", "-c", f"import ctypes; raise SystemExit(ctypes.CDLL(None).unshare({flags}))"]
    with suppress(OSError, subprocess.TimeoutExpired):
        if level == LIMITS and not subprocess.run(probe, capture_output=True, timeout=_PROBE_S).returncode:
            return "namespaces"
    return level if level in LEVELS else "external"


def find_bubblewrap_fault() -> str:
    """Return why bubblewrap does not work here, or ""."""
    if shutil.which("bwrap") is None or not Path("/usr/bin/prlimit").exists():
        return "bubblewrap is not installed"
    return _probe(bubblewrap_command([sys.executable, "-I", "-S", "-c", ""], Path("/sandbox"), (), 1 << 20), _PROBE_S)


def _find_sandbox_fault(name: str) -> str:
    """Return why another sandbox does not work here, or "". Raises VerifierError if there is none of this name."""
    if name not in SANDBOXES.places() and ":" not in name:
        raise VerifierError(f"{SETTING}: {SANDBOXES.describe_unknown(name, (*LEVELS, *SANDBOXES.places()))}")
    return _probe(_sandbox_command(name, ["-c", ""], Path("/sandbox"), (), ProgramLimits()), _SANDBOX_PROBE_S)


def _sandbox_command(name: str, *arguments: Any) -> Sequence[str]:
    try:
        return SANDBOXES.load(name)().command(*arguments)  # type: ignore[no-any-return]
    except ClassNotFound as error:
        raise VerifierError(f"{SETTING}: {error}") from error


def _probe(command: Sequence[str], timeout_s: float) -> str:
    """Return why an empty program does not run, or ""."""
    try:
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not run here: {error}"
    return "" if probe.returncode == 0 else f"{command[0]} does not run here: {probe.stderr.strip()[-200:]}"


def bubblewrap_command(command: Sequence[str], folder: Path, shown: Sequence[Path], room: int) -> list[str]:
    """Return a command line that confines ``command`` to an empty ``folder`` of ``room`` bytes and ``shown`` files."""
    interpreter = dict.fromkeys((sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)))
    mounts = [*_SYSTEM, *(path for path in interpreter if not f"{path}/".startswith("/usr/"))]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        *("--proc", "/proc", "--dev", "/dev"),
        *(word for path in mounts for word in ("--ro-bind-try", path, path)),
        *("--size", str(room), "--tmpfs", str(folder)),
        *(word for path in shown for word in ("--ro-bind", str(path), str(path))),
        *("--chdir", str(folder)),
        *("--", *command),
    ]


def become_confined(
    command: Sequence[str], folder: Path, shown: Sequence[Path], limits: ProgramLimits, level: str
) -> None:
    """Replace this process by ``command``, confined. With bubblewrap only the ``shown`` files are in ``folder``."""
    if level not in LEVELS:
        _pass_output(_sandbox_command(level, command[1:], folder, shown, limits), limits.output_bytes)
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": "0"}
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    by_kind = {
        resource.RLIMIT_AS: limits.memory_mb << 20,
        resource.RLIMIT_FSIZE: limits.output_bytes,
        resource.RLIMIT_CPU: int(limits.timeout_s) + 1,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
    }
    if level == BUBBLEWRAP:
        counted = ["/usr/bin/prlimit", f"--nproc={_PROCESSES}", *command]  # counts the processes inside only
        command = bubblewrap_command(counted, folder, shown, limits.output_bytes)
    else:
        by_kind[resource.RLIMIT_NPROC] = _PROCESSES + (0 if _leave_namespaces() else _processes_of_this_user())
        os.chdir(folder)
    for kind, limit in by_kind.items():
        _, most = resource.getrlimit(kind)
        fitting = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (fitting, fitting))
    os.execve(command[0], list(command), clean)


def _pass_output(command: Sequence[str], most: int) -> NoReturn:
    """Run a command, which may itself write large files, and exit as it does, or when an output reaches its limit."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    def copy_output(source: Any, target: int) -> None:
        try:
            while part := source.read1(1 << 16):
                while part:
                    part = part[os.write(target, part) :]
        except OSError:  # beyond the limit, or closed
            os._exit(1)

    copying = [
        Thread(target=copy_output, args=(source, at)) for at, source in ((1, process.stdout), (2, process.stderr))
    ]
    for each in copying:
        each.start()
    for each in copying:
        each.join()  # waits: for the end of the command, which the caller kills
    code = process.wait()  # waits: no more, its outputs are closed
    os._exit(code if code >= 0 else 128 - code)


def _leave_namespaces() -> bool:
    """Enter new user, network and IPC namespaces, away from other processes; return False if the kernel forbids it."""
    user, group = os.getuid(), os.getgid()
    try:
        if ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except (OSError, AttributeError):
        return False
    return True


def _processes_of_this_user() -> int:
    """Count the processes of this user as the kernel does: all threads."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == os.getuid():
                count += len(os.listdir(entry / "task"))
    return count


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make an empty folder, and remove it with its content; what cannot be removed remains, with a warning."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        try:
            remove_tree(folder)
        except OSError as error:
            _LOG.warning("a program's folder could not be removed: %s", error)


def remove_tree(folder: Path) -> None:
    """Remove a folder that no process writes to; unlike ``shutil.rmtree`` it handles folders too deep for a path."""
    if folder.is_symlink():
        folder.unlink()
        return
    moved = f".removed-{secrets.token_hex(8)}"
    count, waiting = 0, [str(folder)]
    os.chmod(folder, 0o700)
    while waiting:
        current = waiting.pop()
        with os.scandir(current) as entries:
            listed = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_folder in listed:
            if is_folder:  # moved to the top, so that no path becomes too long
                os.chmod(path, 0o700)
                count += 1
                waiting.append(target := os.path.join(folder, f"{moved}-{count}"))
                os.rename(path, target)
            else:
                os.unlink(path)
        if current != str(folder):
            os.rmdir(current)
    os.rmdir(folder)
