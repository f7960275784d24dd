# SPDX-License-Identifier: Apache-2.0
"""Confines a program that a model wrote, at two levels.

``bubblewrap``, where it is installed and works: the program sees the interpreter, its own folder and nothing else of
the disk, no network, and no process but its own. ``limits`` otherwise: it runs as this user and can read the user's
files; it has no network and cannot trace or read the environment of other processes, where the kernel lets a process
have namespaces of its own.

At both: limits on memory, processor time, file sizes, open files and processes (which the kernel does not count for
root), a clean environment, no descriptor but those it is given, no new privileges. Who calls sets the deadline.
"""

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
from enum import StrEnum
from functools import cache
from pathlib import Path

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

SETTING = "DLROVER_RL_SANDBOX"
"""Environment variable: ``bubblewrap`` refuses to run programs without it, ``limits`` does not look for it."""


_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
_PROBE_S = 10.0
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


class Confinement(StrEnum):
    BUBBLEWRAP = "bubblewrap"
    LIMITS = "limits"


@dataclass(frozen=True)
class ResourceLimits:
    memory_mb: int  #: address space
    file_bytes: int  #: of each file, and with bubblewrap of all files together
    cpu_s: int
    open_files: int = 64
    processes: int = 64


@cache
def confinement() -> Confinement:
    """The level of the programs that this process runs; logged once, as a warning where bubblewrap is missing. Raises
    VerifierError if the environment asks for more."""
    level, why = _choose_level()
    severity = logging.WARNING if why and not os.environ.get(SETTING) else logging.INFO
    because = f" ({why})" if why else ""
    _LOG.log(severity, "programs that a model wrote are confined by %s%s", level.value, because)
    return level


def _choose_level() -> tuple[Confinement, str]:
    """The level here, and why it is not bubblewrap. Raises as :func:`confinement`."""
    wanted = os.environ.get(SETTING, "")
    if wanted not in ("", *Confinement):
        raise VerifierError(f"{SETTING}={wanted!r} is neither {' nor '.join(Confinement)}")
    if wanted == Confinement.LIMITS:
        return Confinement.LIMITS, f"{SETTING}={wanted}"
    why = _why_not_bubblewrap()
    if why and wanted:
        raise VerifierError(f"{SETTING} is {wanted}, and programs cannot be confined by it: {why}")
    return (Confinement.LIMITS, why) if why else (Confinement.BUBBLEWRAP, "")


def sandbox_level() -> str:
    """``bubblewrap``, ``namespaces`` (limits, no network) or ``limits``; ``none`` where programs are refused, because
    more is asked for."""
    try:
        level, _ = _choose_level()
    except VerifierError:
        return "none"
    if level is Confinement.BUBBLEWRAP:
        return level.value
    flags = _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC
    probe = [sys.executable, "-I", "-S", "-c", f"import ctypes; raise SystemExit(ctypes.CDLL(None).unshare({flags}))"]
    try:
        is_apart = subprocess.run(probe, capture_output=True, timeout=_PROBE_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        is_apart = False
    return "namespaces" if is_apart else level.value


def _why_not_bubblewrap() -> str:
    """Empty if it works here."""
    if shutil.which("bwrap") is None or not Path("/usr/bin/prlimit").exists():
        return "bubblewrap is not installed"
    command = bubblewrap_command([sys.executable, "-I", "-S", "-c", ""], Path("/sandbox"), (), 1 << 20)
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not run here: {error}"
    return "" if probe.returncode == 0 else f"bubblewrap does not run here: {probe.stderr.strip()[:200]}"


def bubblewrap_command(command: Sequence[str], folder: Path, shown: Sequence[Path], room: int) -> list[str]:
    """``command`` in an empty ``folder`` of ``room`` bytes, which is its only one to write in. ``shown`` are files that
    it may read."""
    interpreter = dict.fromkeys((sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)))
    readable = [each for each in interpreter if not each.startswith("/usr/") and each != "/usr"]
    mounts = [*_SYSTEM, *readable]
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
    command: Sequence[str], folder: Path, shown: Sequence[Path], limits: ResourceLimits, level: Confinement
) -> None:
    """Replace this process by ``command``, confined. With bubblewrap its other ``shown`` files appear in ``folder``'s
    place, too."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": "0"}
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if level is Confinement.BUBBLEWRAP:
        counted = ["/usr/bin/prlimit", f"--nproc={limits.processes}", *command]  # counted inside only
        command = bubblewrap_command(counted, folder, shown, limits.file_bytes)
    by_kind = {
        resource.RLIMIT_AS: limits.memory_mb << 20,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits.open_files,
    }
    if level is not Confinement.BUBBLEWRAP:
        elsewhere = 0 if _leave_namespaces() else _processes_of_this_user()
        by_kind = {resource.RLIMIT_NPROC: limits.processes + elsewhere, **by_kind}
        os.chdir(folder)
    for kind, limit in by_kind.items():
        _, most = resource.getrlimit(kind)
        fitting = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (fitting, fitting))
    os.execve(command[0], list(command), clean)


def _leave_namespaces() -> bool:
    """Have a user, network and IPC namespace of one's own, if the kernel permits it: from there neither the network nor
    the memory and environment of outer processes can be reached."""
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
    """The kernel counts threads, all of them."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == os.getuid():
                count += len(os.listdir(entry / "task"))
    return count


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make an empty folder, and remove it with all that is in it by then; what cannot be removed stays, and is
    logged."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        try:
            remove_tree(folder)
        except OSError as error:
            _LOG.warning("a program's folder could not be removed: %s", error)


def remove_tree(folder: Path) -> None:
    """Remove a folder in which no process writes any more.

    Unlike ``shutil.rmtree`` it takes folders of any depth, which no path can name: each is moved to the top first."""
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
            if is_folder:
                os.chmod(path, 0o700)  # else it cannot be moved
                count += 1
                waiting.append(target := os.path.join(folder, f"{moved}-{count}"))
                os.rename(path, target)
            else:
                os.unlink(path)
        if current != str(folder):
            os.rmdir(current)
    os.rmdir(folder)
