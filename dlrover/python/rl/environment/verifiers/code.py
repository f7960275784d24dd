# SPDX-License-Identifier: Apache-2.0
"""Programs that a model wrote, run in a separate process with limits, and scored by tests.

:mod:`~dlrover.python.rl.environment.sandbox.confinement` describes the confinement; no process is left behind.

A program cannot easily score itself. Expected outputs and literals are never in its process, file, arguments or
environment: ``assert double(2) == 4`` becomes ``__compare__(0, double(2))``, and this process compares. The other
assertions are sent after the program has run, and compare data by its own class; each that always runs must be reported
before a token that is unread in the program's connection until the tests end; see ``hidden_tests`` and ``code_tests``.
A determined program may still find or change other expected values in its callers' frames, replace a function that a
test calls while it runs, answer for tests that it reads from the connection, read the data set or trace other
processes; an object of its class may claim to contain everything (``x in f(y)``). Prefer ``assert f(2) == 4``, or cases
of input and output."""

import json
import os
import re
import secrets
import socket
import stat
import subprocess
import textwrap
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.private_files import open_file
from dlrover.python.rl.data.jsonl import decode_json
from dlrover.python.rl.data.model_text import ignore_thoughts
from dlrover.python.rl.environment.core.scoring import needs
from dlrover.python.rl.environment.sandbox.child_process import become_program, end_guarded, interpreter_command
from dlrover.python.rl.environment.sandbox.confinement import ProgramLimits, confinement, scratch_folder
from dlrover.python.rl.environment.verifiers.code_tests import SIZE_BYTES
from dlrover.python.rl.environment.verifiers.hidden_tests import HiddenTests, hide_expected

_TESTED = Path(__file__).with_name("code_tests.py")


@dataclass(frozen=True)
class ProgramResult:
    """Output, and the exit code: minus the number of the signal that ended it."""

    stdout: str
    stderr: str
    code: int
    timed_out: bool

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and not self.timed_out


def run_python(source: str, stdin: str = "", limits: ProgramLimits | None = None) -> ProgramResult:
    """Run a program in an empty folder with a clean environment; all its processes end with it."""
    limits = limits if limits is not None else ProgramLimits()
    with scratch_folder("program-") as folder:
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        with (folder / "stdin").open("rb") as stdin_file, (folder / "stdout").open("wb") as stdout_file:
            process = _start(folder, source, limits, stdin_file, stdout_file)
        try:
            code, timed_out = process.wait(limits.timeout_s), False
        except subprocess.TimeoutExpired:
            code, timed_out = end_guarded(process), True
        except BaseException:
            end_guarded(process)
            raise
        outputs = (_read_output(folder / file, limits.output_bytes) for file in ("stdout", "stderr"))
        stdout, stderr = (output.decode(errors="replace") for output in outputs)
    return ProgramResult(stdout, stderr, code, timed_out)


def _read_output(path: Path, most: int) -> bytes:
    """Read an output file; empty if the program has replaced it by a pipe, a device or a link."""
    try:
        with open_file(path) as file:
            return file.read(most) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return b""


def passes_tests(source: str, tests: HiddenTests, limits: ProgramLimits | None = None) -> bool:
    """Run tests after a program, in the same module; return True if they end with every value as expected."""
    limits = limits if limits is not None else ProgramLimits()
    connection, channel = socket.socketpair()
    with connection, scratch_folder("program-") as folder:
        with channel:
            process = _start(folder, source, limits, channel, channel, str(_TESTED), *tests.modules)
        try:
            return _compare_values(connection, tests, time.monotonic() + limits.timeout_s, limits.output_bytes)
        except OSError:  # it ended, or its time was up
            return False
        finally:
            end_guarded(process)


def _start(
    folder: Path, source: str, limits: ProgramLimits, stdin: Any, stdout: Any, *tested: str
) -> "subprocess.Popen[bytes]":
    """Start a program, or a script that tests it with its arguments; its errors are written to ``folder``."""
    (folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
    with (folder / "stderr").open("wb") as stderr:
        return subprocess.Popen(
            interpreter_command(become_program, str(folder), confinement(), json.dumps(astuple(limits)), *tested),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def _compare_values(connection: socket.socket, tests: HiddenTests, deadline_s: float, most: int) -> bool:
    """Send a program its tests, and return True if all pass. Raises OSError if its end closed or the time was up,
    ValueError if a module of the tests could not be imported before the program ran."""
    lines = _read_lines(connection, deadline_s, most)
    if missing := next(lines, "").partition(" ")[2]:
        raise ValueError(f"the tests import {missing.rstrip()}, which fails in the program's process")
    if next(lines, "") != "ran":
        return False
    token = secrets.token_hex(16)
    for text in (tests.text, tests.calls, token):
        body = text.encode("utf-8", "surrogatepass")
        connection.sendall(len(body).to_bytes(SIZE_BYTES, "little") + body)
    reached: set[int] = set()
    for line in lines:
        report, number, value = [*line.split(" ", 2), "", ""][:3]
        if report == "over":
            return secrets.compare_digest(number.encode(), token.encode()) and bool(reached) and tests.due <= reached
        if not (number.isdecimal() and len(number) < 9 and tests.accepts(report, int(number), value)):
            return False
        reached.add(int(number))
    return False


def _read_lines(connection: socket.socket, deadline_s: float, most: int) -> Iterator[str]:
    """Yield the lines that a program sends, up to ``most`` bytes."""
    partial = b""
    while most > 0:
        connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        part = connection.recv(1 << 16)  # waits: at most the timeout set above
        if not part:
            return
        most -= len(part)
        *lines, partial = (partial + part).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines)


def code_block(text: str) -> str | None:
    """Return the last fenced block of Python in ``text``, or else the last one without a language; None without one.
    Blocks in quotes are not read. Time is linear in the text's length, at worst seconds for a million characters."""
    from markdown_it import MarkdownIt  # imported on demand: only this function needs it

    markdown = MarkdownIt("zero").enable(["code", "fence", "list"]).disable("inline")
    blocks: dict[str, str] = {}
    for token in markdown.parse(f"{text}\n"):
        if token.type == "fence":
            language = re.split(r"\W", token.info.strip().lower(), maxsplit=1)[0]
            blocks["python" if language in ("py", "python3") else language] = token.content
    program = blocks.get("python", blocks.get(""))
    return None if program is None else textwrap.dedent(program)


@needs("tests")
@ignore_thoughts
def python_tests(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    """Return 1.0 if the program in the completion's last code block passes every test of ``extra_info["tests"]``, else
    0.0.

    Tests are Python text, or a list of its lines, or cases ``{"input": ..., "output": ...}``: what the program reads
    from standard input and must print (white space at line ends and around the text is ignored). They may be JSON, and
    cases may be one ``{"inputs": [...], "outputs": [...]}``.

    Text runs as a script after the program, in the same module; then the tests in it that pytest and unittest would
    find, and HumanEval's ``check`` with the function ``extra_info["entry_point"]``. It may import the program by the
    names in ``PROGRAM_MODULES``. It passes if it asserts something, and no assertion fails, caught or not.
    ``assert f(2) == 4`` compares plain data: only numbers, texts, containers and objects of classes derived from these
    can equal a literal.

    All tests together have ``extra_info["timeout_s"]``, by default 4 seconds: a slower program scores 0. Keep it below
    ``reward.timeout_s``, which ends the verifier without a reward. Each case starts an interpreter.

    Raises:
        ValueError: the tests are missing or of another kind, cannot fail, or need something that is not installed."""
    tests = _read_tests(decode_json(extra_info.get("tests")))
    cases = tests if isinstance(tests, list) else []
    hidden = hide_expected(tests, str(extra_info.get("entry_point") or "")) if isinstance(tests, str) else None
    program = code_block(completion)
    if program is None:
        return 0.0
    limits = ProgramLimits()
    limits = replace(limits, timeout_s=float(extra_info.get("timeout_s") or limits.timeout_s))
    if hidden is not None:
        return float(passes_tests(program, hidden, limits))
    deadline_s = time.monotonic() + limits.timeout_s
    for case in cases:
        remaining = replace(limits, timeout_s=max(deadline_s - time.monotonic(), 0.0))
        ran = run_python(program, case["input"], remaining)
        if not ran.succeeded or _lines(ran.stdout) != _lines(case["output"]):
            return 0.0
    return 1.0


def _read_tests(tests: Any) -> str | list[dict[str, str]]:
    """Return a text (also for MBPP's list of assertions) or cases (also for APPS's ``inputs`` and ``outputs``)."""
    if isinstance(tests, dict) and tests.keys() == {"inputs", "outputs"} and len({*map(len, tests.values())}) == 1:
        tests = [{"input": text, "output": out} for text, out in zip(tests["inputs"], tests["outputs"], strict=True)]
    items = tests if isinstance(tests, list) else [tests]
    if all(isinstance(item, str) for item in items) and any(items):
        return "\n".join(items)
    for case in items or [None]:
        is_text = isinstance(case, dict) and all(isinstance(case.get(key), str) for key in ("input", "output"))
        if not is_text or case.get("testtype", "stdin") != "stdin":
            kinds = "Python text, or a list of {'input': ..., 'output': ...} for the standard input and output"
            raise ValueError(f"extra_info['tests'] must be {kinds}; write calls of functions as assertions")
    return items


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
