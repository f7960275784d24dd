"""Programs that a model wrote, run in a process of their own with limits, and judged by tests.

The limits keep a program from using up the machine, and nothing of it is left behind. They are no sandbox: it runs as
this user and sees the file system and the network as this user does. Run hostile code in a container.

Nor can a program easily judge itself. What it has to print, and what an assertion compares with a literal, is never in
its process, file, arguments or environment: it is compared here. Of Python tests the process is sent the rest once the
program has run, and has to answer with a token that lies unread in its connection until the tests are over; see
:mod:`~dlrover.python.rl.environment.tested`. What is left to a determined program: where a test asks for less than a
literal (``assert close(f(2), 4)``), it may replace what the test calls (``close``), return an object that equals
everything, or find that connection from a function under test, read the token itself and answer before the test fails;
and as this user it may read the file of the data set, or other processes where the system lets it trace them. Prefer
tests of the form ``assert f(2) == 4``, or cases of input and output.
"""

import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.python.rl.environment.child import stand_guard
from dlrover.python.rl.environment.tested import SIZE_BYTES
from dlrover.python.rl.environment.withheld import Withheld, withhold

_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_EXIT_S = 10.0
_TESTED = Path(__file__).with_name("tested.py")


@dataclass(frozen=True)
class Limits:
    """What a program may use up."""

    timeout_s: float = 4.0
    """Seconds by the clock."""

    memory_mb: int = 1024
    """Address space in MB; more is a MemoryError there."""

    output_bytes: int = 1 << 20
    """Of standard output, of standard error, and of every file it writes; it is ended at more."""


@dataclass(frozen=True)
class Ran:
    """What a program did.

    Attributes:
        stdout: what it printed.
        stderr: the same of standard error.
        code: its exit code; minus the number of the signal that ended it.
        timed_out: it was ended for its time.
    """

    stdout: str
    stderr: str
    code: int
    timed_out: bool

    @property
    def succeeded(self) -> bool:
        """It ended by itself, without an error."""
        return self.code == 0 and not self.timed_out


def run_python(source: str, stdin: str = "", limits: Limits | None = None) -> Ran:
    """Run a program in an empty folder, without this process's environment; all that it started ends with it."""
    limits = limits if limits is not None else Limits()
    with tempfile.TemporaryDirectory(prefix="program-") as name:
        folder = Path(name)
        process = _start(folder, source, stdin, limits)
        try:
            code, timed_out = process.wait(limits.timeout_s), False
        except subprocess.TimeoutExpired:
            code, timed_out = _end(process), True
        except BaseException:
            _end(process)
            raise
        said = ((folder / file).read_bytes()[: limits.output_bytes] for file in ("stdout", "stderr"))
        stdout, stderr = (output.decode(errors="replace") for output in said)
    return Ran(stdout, stderr, code, timed_out)


def passes_tests(source: str, tests: Withheld, limits: Limits | None = None) -> bool:
    """Whether tests that run after a program, in the same module, come to their end with every value as expected."""
    limits = limits if limits is not None else Limits()
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryDirectory(prefix="program-") as name:
        with theirs:
            process = _start(Path(name), source, "", limits, theirs.fileno())
        try:
            return _verdict(ours, tests, time.monotonic() + limits.timeout_s, limits.output_bytes)
        except OSError:  # It ended, or its time was up.
            return False
        finally:
            _end(process)


def _start(
    folder: Path, source: str, stdin: str, limits: Limits, channel: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start a program in ``folder``, where its output goes too; with a ``channel``, through which it is tested."""
    (folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
    (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
    # sys.path goes along so that this module is found; the program itself starts isolated from it.
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import become; become(*sys.argv[1:])"
    sizes = [str(limits.memory_mb), str(limits.output_bytes), str(int(limits.timeout_s) + 1)]
    channels = [] if channel is None else [channel]
    with ExitStack() as files:
        stdin_file = files.enter_context((folder / "stdin").open("rb"))
        out, err = (files.enter_context((folder / name).open("wb")) for name in ("stdout", "stderr"))
        return subprocess.Popen(
            [sys.executable, "-c", start, str(folder), *sizes, *map(str, channels)],
            stdin=stdin_file,
            stdout=out,
            stderr=err,
            pass_fds=channels,
            start_new_session=True,
        )


def _verdict(connection: socket.socket, tests: Withheld, deadline_s: float, most: int) -> bool:
    """Hand a program its tests, and hear what comes of them.

    Raises:
        OSError: its end closed, or the time was up.
    """
    said = _heard(connection, deadline_s, most)
    if next(said, "") != "ran":
        return False
    token = secrets.token_hex(16)
    for text in (tests.text, token):
        body = text.encode("utf-8", "surrogatepass")
        connection.sendall(len(body).to_bytes(SIZE_BYTES, "little") + body)
    compared: set[int] = set()
    for line in said:
        word, _, rest = line.partition(" ")
        if word == "over":
            return secrets.compare_digest(rest.encode(), token.encode()) and tests.due <= compared
        number, _, shown = rest.partition(" ")
        if word != "compared" or not number.isdecimal() or not tests.agrees(int(number), shown):
            return False
        compared.add(int(number))
    return False


def _heard(connection: socket.socket, deadline_s: float, most: int) -> Iterator[str]:
    """Lines that a program says, until it says nothing more or ``most`` bytes."""
    rest = b""
    while most > 0:
        connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        part = connection.recv(1 << 16)  # waits: at most the timeout set above
        if not part:
            return
        most -= len(part)
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines)


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.terminate()  # The warden ends all that is below it.
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_EXIT_S)
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(_EXIT_S)


def become(folder: str, memory_mb: str, file_bytes: str, cpu_s: str, *channel: str) -> None:
    """Become the warden of the program in ``folder``; its child becomes the program, which a ``channel`` tests."""
    stand_guard(*map(int, channel))
    memory = int(memory_mb) << 20
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, int(file_bytes)),
        (resource.RLIMIT_CPU, int(cpu_s)),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    os.chdir(folder)
    clean = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
    command = [str(_TESTED), *channel] if channel else ["program.py"]
    os.execve(sys.executable, [sys.executable, "-I", *command], clean)


def code_block(text: str) -> str | None:
    """The last fenced block of Python (or of no named language) in ``text``; None when there is none."""
    blocks = [body for language, body in _BLOCK.findall(text) if language.lower() in ("", "python", "py", "python3")]
    return blocks[-1] if blocks else None


def python_tests(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    """1.0 when the program in the completion's last code block passes every test of ``extra_info["tests"]``, else 0.0.

    Tests are either Python text, which runs after the program in the same module and fails by raising; or a list of
    ``{"input": ..., "output": ...}``, what the program reads from standard input and has to print (white space at the
    ends of lines and of the text aside). ``assert f(2) == 4`` compares plain data: an object that is no number, text or
    container, nor of a class derived from these, equals no literal.

    Raises:
        ValueError: there are no tests, or they are neither.
    """
    tests = extra_info.get("tests")
    if not tests or not (isinstance(tests, str) or all(_is_case(case) for case in tests)):
        raise ValueError("extra_info['tests'] must be Python text, or a list of {'input': ..., 'output': ...}")
    program = code_block(completion)
    if program is None:
        return 0.0
    if isinstance(tests, str):
        return float(passes_tests(program, withhold(tests)))
    return float(all(_prints(program, case) for case in tests))


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and all(isinstance(case.get(key), str) for key in ("input", "output"))


def _prints(program: str, case: dict[str, str]) -> bool:
    ran = run_python(program, case["input"])
    return ran.succeeded and _lines(ran.stdout) == _lines(case["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
