"""What a process is stuck in, and the last it wrote: evidence for the cause of a failure, taken from outside.

Nothing here needs the process to answer, raises, or takes longer than it was told to.
"""

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

_TAIL_BYTES = 64 * 1024
_MOST_THREADS = 20
_AGAIN_S = 0.05
# Lines by which Ray tells its own log reader whose line comes next.
_RAYS_MARKS = (":job_id:", ":actor_name:", ":task_name:")


def stacks_of(pid: int, deadline_s: float = 2.0, dumper: str = "py-spy") -> str:
    """The Python stacks of all threads of a process on this machine.

    Read without stopping the process: it may be running, waiting, stopped (SIGSTOP), or hold the GIL for ever. Where
    that is forbidden or impossible: what the kernel tells of it, and why there is no more.

    Args:
        pid: of the process.
        deadline_s: seconds this may take.
        dumper: the program that reads the stacks, a name or a path.
    """
    until_s = time.monotonic() + deadline_s
    program = _find(dumper)
    if program is None:
        return _from_kernel(pid, f"{dumper} is not installed")
    why = ""
    while (left_s := until_s - time.monotonic()) > 0.1:
        # A stack that changes while it is read is unreadable: look again.
        text, why, final = _dump(program, pid, left_s)
        if text or final:
            return text or _from_kernel(pid, why)
        time.sleep(_AGAIN_S)
    return _from_kernel(pid, why or "no time")


def ray_worker_log_tail(session_dir: str | Path, pid: int, lines: int = 20) -> str:
    """The last lines that a Ray worker process wrote, dead or alive; ``""`` when there are none.

    Args:
        session_dir: Ray's session folder on that worker's node.
        pid: of the worker.
        lines: at most; those of stderr come before (and instead of) those of stdout.
    """
    found: list[str] = []
    for ending in ("err", "out"):
        room = lines - len(found)
        if room > 0:
            found = _tail(_newest(Path(session_dir) / "logs", f"worker-*-{pid}.{ending}"), room) + found
    return "\n".join(found)


def _find(dumper: str) -> str | None:
    beside = Path(sys.executable).parent / dumper
    return str(beside) if beside.exists() else shutil.which(dumper)


def _dump(program: str, pid: int, timeout_s: float) -> tuple[str, str, bool]:
    """The stacks, else why there are none and whether trying again is of no use."""
    name, command = Path(program).name, [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return "", f"{name} took longer than {timeout_s:.1f} s", True
    except OSError as error:
        return "", f"{name} could not be started: {error}", True
    # A process that is just starting or ending has no threads to show.
    if done.returncode == 0 and "\nThread " in done.stdout:
        return done.stdout.strip(), "", True
    said = [line for line in done.stderr.splitlines() if line.strip()]
    why = said[-1].strip() if said else f"{name} found no stacks"
    return "", why, not _is_alive(pid) or "ermission" in done.stderr or "not permitted" in done.stderr


def _from_kernel(pid: int, why: str) -> str:
    """State, memory and the place each thread sleeps at, as the kernel shows them."""
    found = [f"no Python stacks of process {pid}: {why}"]
    process = Path(f"/proc/{pid}")
    if not _is_alive(pid):
        return found[0] if "No such process" in why else f"{found[0]}; there is no such process"
    command = _read(process / "cmdline").replace("\0", " ").strip()
    wanted = ("State:", "Threads:", "VmRSS:")
    states = [" ".join(line.split()) for line in _read(process / "status").splitlines() if line.startswith(wanted)]
    found += [line for line in (command[:200], ", ".join(states)) if line]
    with contextlib.suppress(OSError):
        found += [_thread(folder) for folder in sorted((process / "task").iterdir())[:_MOST_THREADS]]
    kernel = _read(process / "stack").strip()
    return "\n".join([*found, f"kernel stack:\n{kernel}"] if kernel else found)


def _thread(folder: Path) -> str:
    name, place = _read(folder / "comm").strip(), _read(folder / "wchan").strip()
    state = _read(folder / "stat").rpartition(") ")[2][:1]
    asleep = f" in {place}" if place not in ("", "0") else ""
    return f"thread {folder.name} {name}: {state or '?'}{asleep}"


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _newest(folder: Path, pattern: str) -> Path | None:
    try:
        return max(folder.glob(pattern), key=lambda file: file.stat().st_mtime, default=None)
    except OSError:
        return None


def _tail(file: Path | None, lines: int) -> list[str]:
    if file is None:
        return []
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            text = stream.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    kept = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(_RAYS_MARKS)]
    return kept[-lines:]
