"""Programs that a model wrote, run in a process of their own with limits, and judged by tests.

The limits keep a program from using up the machine, and nothing of it is left behind. They are no sandbox: it runs as
this user and sees the file system and the network as this user does. Run hostile code in a container.
"""

import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.python.rl.environment.child import stand_guard

_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_EXIT_S = 10.0


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
        (folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        code, timed_out = _run(folder, limits)
        said = ((folder / file).read_bytes()[: limits.output_bytes] for file in ("stdout", "stderr"))
        stdout, stderr = (output.decode(errors="replace") for output in said)
    return Ran(stdout, stderr, code, timed_out)


def _run(folder: Path, limits: Limits) -> tuple[int, bool]:
    # sys.path goes along so that this module is found; the program itself starts isolated from it.
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import become; become(*sys.argv[1:])"
    sizes = [str(limits.memory_mb), str(limits.output_bytes), str(int(limits.timeout_s) + 1)]
    with ExitStack() as files:
        stdin = files.enter_context((folder / "stdin").open("rb"))
        out, err = (files.enter_context((folder / name).open("wb")) for name in ("stdout", "stderr"))
        process = subprocess.Popen(
            [sys.executable, "-c", start, str(folder), *sizes],
            stdin=stdin,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            return process.wait(limits.timeout_s), False
        except subprocess.TimeoutExpired:
            return _end(process), True
        except BaseException:
            _end(process)
            raise


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.terminate()  # The warden ends all that is below it.
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_EXIT_S)
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(_EXIT_S)


def become(folder: str, memory_mb: str, file_bytes: str, cpu_s: str) -> None:
    """Become the warden of the program in ``folder``; its child becomes the program."""
    stand_guard(os.open(os.devnull, os.O_RDONLY))
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
    os.execve(sys.executable, [sys.executable, "-I", "program.py"], clean)


def code_block(text: str) -> str | None:
    """The last fenced block of Python (or of no named language) in ``text``; None when there is none."""
    blocks = [body for language, body in _BLOCK.findall(text) if language.lower() in ("", "python", "py", "python3")]
    return blocks[-1] if blocks else None


def python_tests(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    """1.0 when the program in the completion's last code block passes every test of ``extra_info["tests"]``, else 0.0.

    Tests are either Python text, which runs after the program in the same module and fails by raising; or a list of
    ``{"input": ..., "output": ...}``, what the program reads from standard input and has to print (white space at the
    ends of lines and of the text aside).

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
        return float(_passes(program, tests))
    return float(all(_prints(program, case) for case in tests))


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and all(isinstance(case.get(key), str) for key in ("input", "output"))


def _passes(program: str, tests: str) -> bool:
    # A program that ends before the tests has not passed them.
    passed = secrets.token_hex(16)
    ran = run_python(f"{program}\n{tests}\nprint('\\n{passed}')\n")
    return ran.succeeded and ran.stdout.rstrip().endswith(passed)


def _prints(program: str, case: dict[str, str]) -> bool:
    ran = run_python(program, case["input"])
    return ran.succeeded and _lines(ran.stdout) == _lines(case["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
