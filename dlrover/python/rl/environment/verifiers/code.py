# SPDX-License-Identifier: Apache-2.0
"""Programs that a model wrote, run in a separate process with limits, and scored by tests.

It is confined as :mod:`~dlrover.python.rl.environment.sandbox.confinement` describes, and no process is left behind.

A program cannot easily score itself. Expected outputs and literals are never in its process, file, arguments or
environment: ``assert double(2) == 4`` becomes ``__compare__(0, double(2))``, and this process compares. The other tests
are sent after the program has run, and it must answer with a token that is unread in its connection until the tests
end; see ``code_tests``. A determined program may still replace a function that a test calls (``close``), return an
object that equals everything, read the token from a function under test, read the data set or trace other processes.
Prefer ``assert f(2) == 4``, or cases of input and output.
"""

import ast
import json
import os
import re
import secrets
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from dlrover.python.rl.data.model_text import ignore_thoughts
from dlrover.python.rl.environment.sandbox.child_process import stand_guard
from dlrover.python.rl.environment.sandbox.confinement import (
    Confinement,
    ResourceLimits,
    become_confined,
    confinement,
)
from dlrover.python.rl.environment.sandbox.scratch import scratch_folder
from dlrover.python.rl.environment.verifiers.code_tests import SIZE_BYTES

_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_EXIT_S = 10.0
_TESTED = Path(__file__).with_name("code_tests.py")


COMPARE = "__compare__"
"""What tests call with a number and a value in the place of an assertion."""

_NO_LITERAL = object()


@dataclass(frozen=True)
class HiddenTests:
    """Tests without their expected values.

    ``text`` calls :data:`COMPARE` with the index of a value in ``expected``; ``due`` are the indices that tests which
    run to their end always compare.
    """

    text: str
    expected: tuple[Any, ...]
    due: frozenset[int]

    def agrees(self, number: int, shown: str) -> bool:
        """Return True if ``shown``, the ``repr`` of plain data, equals the expected value."""
        try:
            return 0 <= number < len(self.expected) and bool(ast.literal_eval(shown) == self.expected[number])
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return False


def hide_expected(tests: str) -> HiddenTests:
    """Remove expected values from assertions of ``tests`` that compare with a literal by ``==``, or with None by
    ``is``.

    Assertions inside ``try`` and ``with`` stay: a test may expect their error. Raises ValueError for invalid Python."""
    try:
        tree = ast.parse(tests)
    except SyntaxError as error:
        raise ValueError(f"the tests are not Python: line {error.lineno}: {error.msg}") from error
    if all(isinstance(item, _DEFINES) or _is_constant(item) for item in tree.body):
        tree.body += ast.parse("\n".join(f"{name}()" for name in _test_functions(tree))).body
        if not any(_called(item) for item in tree.body):
            raise ValueError("the tests call nothing that could fail: call the functions that they define")
    values = _ExpectedValues()
    rewritten = ast.fix_missing_locations(values.visit(tree))
    due = {values.numbers[statement] for statement in _always_run(tree) if statement in values.numbers}
    return HiddenTests(ast.unparse(rewritten), tuple(values.expected), frozenset(due))


_DEFINES = (ast.Pass, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_constant(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign) else statement
    return value is None or (isinstance(value, ast.expr) and _literal(value) is not _NO_LITERAL)


def _test_functions(tree: ast.Module) -> Iterator[str]:
    for item in tree.body:
        if isinstance(item, ast.FunctionDef) and item.name.startswith("test"):
            given = item.args
            if len(given.defaults) == len([*given.posonlyargs, *given.args]) and None not in given.kw_defaults:
                yield item.name


class _ExpectedValues(ast.NodeTransformer):
    def __init__(self) -> None:
        self.expected: list[Any] = []
        self.numbers: dict[ast.stmt, int] = {}

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        value, expected = _comparison(node.test)
        if value is None:
            return node
        call = ast.Call(ast.Name(COMPARE, ast.Load()), [ast.Constant(len(self.expected)), value], [])
        statement = ast.copy_location(ast.Expr(call), node)
        self.numbers[statement] = len(self.expected)
        self.expected.append(expected)
        return statement

    def visit_Try(self, node: ast.stmt) -> ast.stmt:
        return node

    visit_TryStar = visit_With = visit_AsyncWith = visit_Try


def _comparison(test: ast.expr) -> tuple[ast.expr | None, Any]:
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.Is):
        return None, None
    none_only = isinstance(test.ops[0], ast.Is)  # 1 equals True, and is not it
    left, right = test.left, test.comparators[0]
    for value, literal in ((left, right), (right, left)):
        expected = _literal(literal)
        if expected is not _NO_LITERAL and (expected is None or not none_only):
            return value, expected
    return None, None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return _NO_LITERAL


def _always_run(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield statements that always run: of the module, and of plain functions that it calls, up to their first
    return."""
    yield from tree.body
    functions = [item for item in tree.body if isinstance(item, ast.FunctionDef)]
    defined, called = Counter(_bound(tree)), set(map(_called, tree.body))
    for function in functions:
        if function.name not in called or defined[function.name] > 1 or function.decorator_list:
            continue
        if not _holds(function, ast.Yield | ast.YieldFrom):
            yield from takewhile(lambda statement: not _holds(statement, ast.Return), function.body)


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield every assigned name, once per assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _holds(node: ast.AST, kind: Any) -> bool:
    return any(isinstance(item, kind) for item in ast.walk(node))


def _called(statement: ast.stmt) -> str | None:
    """The function if the statement is only a call: ``check(double)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None


# -- running programs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramLimits:
    timeout_s: float = 4.0
    """Seconds by the clock."""

    memory_mb: int = 1024
    """Address space in MB; more is a MemoryError there."""

    output_bytes: int = 1 << 20
    """Of standard output, of standard error, and of every file it writes; it is ended at more."""


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
    """Run a program in an empty folder, with a clean environment; all its processes end with it."""
    limits = limits if limits is not None else ProgramLimits()
    with scratch_folder("program-") as folder:
        process = _start(folder, source, stdin, limits)
        try:
            code, timed_out = process.wait(limits.timeout_s), False
        except subprocess.TimeoutExpired:
            code, timed_out = _end(process), True
        except BaseException:
            _end(process)
            raise
        outputs = (_read_output(folder / file, limits.output_bytes) for file in ("stdout", "stderr"))
        stdout, stderr = (output.decode(errors="replace") for output in outputs)
    return ProgramResult(stdout, stderr, code, timed_out)


def _read_output(path: Path, most: int) -> bytes:
    """Nothing where the program has put a pipe, a device or a link in its output's place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)


def passes_tests(source: str, tests: HiddenTests, limits: ProgramLimits | None = None) -> bool:
    """Run tests after a program, in the same module; return True if they end with every value as expected."""
    limits = limits if limits is not None else ProgramLimits()
    connection, channel = socket.socketpair()
    with connection, scratch_folder("program-") as folder:
        with channel:
            process = _start(folder, source, "", limits, channel.fileno())
        try:
            return _compare_values(connection, tests, time.monotonic() + limits.timeout_s, limits.output_bytes)
        except OSError:  # It ended, or its time was up.
            return False
        finally:
            _end(process)


def _start(
    folder: Path, source: str, stdin: str, limits: ProgramLimits, channel: int | None = None
) -> "subprocess.Popen[bytes]":
    """``folder`` will hold the program's output; a ``channel`` sends tests."""
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
            [sys.executable, "-c", start, str(folder), confinement().value, *sizes, *map(str, channels)],
            stdin=stdin_file,
            stdout=out,
            stderr=err,
            pass_fds=channels,
            start_new_session=True,
        )


def _compare_values(connection: socket.socket, tests: HiddenTests, deadline_s: float, most: int) -> bool:
    """Hand a program its tests, and hear what comes of them; OSError: its end closed, or the time was up."""
    lines = _read_lines(connection, deadline_s, most)
    if next(lines, "") != "ran":
        return False
    token = secrets.token_hex(16)
    for text in (tests.text, token):
        body = text.encode("utf-8", "surrogatepass")
        connection.sendall(len(body).to_bytes(SIZE_BYTES, "little") + body)
    compared: set[int] = set()
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "over":
            return secrets.compare_digest(rest.encode(), token.encode()) and tests.due <= compared
        number, _, shown = rest.partition(" ")
        if word != "compared" or not number.isdecimal() or not tests.agrees(int(number), shown):
            return False
        compared.add(int(number))
    return False


def _read_lines(connection: socket.socket, deadline_s: float, most: int) -> Iterator[str]:
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


def become(folder: str, level: str, memory_mb: str, file_bytes: str, cpu_s: str, *channel: str) -> None:
    """Become the warden of the program in ``folder``, its child; a ``channel`` sends tests."""
    stand_guard(*map(int, channel))
    limits = ResourceLimits(int(memory_mb), int(file_bytes), int(cpu_s))
    command = [sys.executable, "-I", *([str(_TESTED), *channel] if channel else ["program.py"])]
    shown = [Path(folder, "program.py"), *([_TESTED] if channel else [])]
    become_confined(command, Path(folder), shown, limits, Confinement(level))


def code_block(text: str) -> str | None:
    """The last fenced block of Python, or else the last of no named language, in ``text``; None when there is none."""
    blocks = _BLOCK.findall(text)
    named = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    found = named or [body for language, body in blocks if not language]
    return textwrap.dedent(found[-1]) if found else None


@ignore_thoughts
def python_tests(completion: str, answer: str | None, extra_info: dict[str, Any]) -> float:
    """1.0 when the program in the completion's last code block passes every test of ``extra_info["tests"]``, else 0.0.

    Tests are either Python text, which runs after the program in the same module and fails by raising, and whose
    functions ``test_...`` are called if it only defines; or a list, which may be JSON, of
    ``{"input": ..., "output": ...}``, what the program reads from standard input and has to print (white space at the
    ends of lines and of the text aside). ``assert f(2) == 4`` compares plain data: only numbers, texts, containers and
    objects of classes derived from these can equal a literal.

    All tests together have ``extra_info["timeout_s"]``, 4 seconds by default: a program that needs longer gets 0. Keep
    it below ``reward.timeout_s``, which ends the verifier without a reward. Each case starts an interpreter.

    Raises:
        ValueError: there are no tests, or they are neither.
    """
    tests = _as_cases(extra_info.get("tests"))
    if not tests or not (isinstance(tests, str) or all(_is_case(case) for case in tests)):
        raise ValueError("extra_info['tests'] must be Python text, or a list of {'input': ..., 'output': ...}")
    program = code_block(completion)
    if program is None:
        return 0.0
    limits = ProgramLimits()
    limits = replace(limits, timeout_s=float(extra_info.get("timeout_s") or limits.timeout_s))
    if isinstance(tests, str):
        return float(passes_tests(program, hide_expected(tests), limits))
    deadline_s = time.monotonic() + limits.timeout_s
    return float(all(_prints(program, case, limits, deadline_s) for case in tests))


def _as_cases(tests: Any) -> Any:
    """The value of JSON, as tables have it; other text as it is."""
    try:
        return json.loads(tests) if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{") else tests
    except ValueError:
        return tests


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and all(isinstance(case.get(key), str) for key in ("input", "output"))


def _prints(program: str, case: dict[str, str], limits: ProgramLimits, deadline_s: float) -> bool:
    remaining_s = max(deadline_s - time.monotonic(), 0.0)
    ran = run_python(program, case["input"], replace(limits, timeout_s=remaining_s))
    return ran.succeeded and _lines(ran.stdout) == _lines(case["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
