# SPDX-License-Identifier: Apache-2.0
"""The process of a tested program: it runs the program, receives the tests, and reports their end.

Runs as a script, isolated, in the program's folder, with the standard library only. One inherited descriptor::

    program runs -> "ran" -> <tests, token> -> tests run, "compared <number> <value>" each -> "over <token>"

Tests arrive after the program has run; the token stays unread until they end. The functions used here are bound before
the program runs, so replacing ``builtins`` and ``os`` has no effect.
"""

import os
import sys
from collections.abc import Callable
from numbers import Number
from types import ModuleType
from typing import Any

SIZE_BYTES = 8

_EXACT: dict[type[Any], Callable[[Any], Any]] = {
    bool: bool,
    int: int.__int__,
    float: float.__float__,
    complex: complex,
    str: str.__str__,
    bytes: bytes,
    bytearray: bytes,
}
"""How a value of a class derived from one of these becomes one of it; what they make of themselves is not asked."""


def run_tested(file: str, channel: int) -> None:
    os.set_inheritable(channel, False)
    run, build, read, leave = exec, compile, os.read, os._exit
    say = _speaker(channel)
    with open(file, encoding="utf-8") as opened:
        source = opened.read()
    program = ModuleType("program")  # what it does as a script is not tested
    program.__file__ = os.path.abspath(file)
    names = vars(program)
    sys.modules["__main__"] = sys.modules["program"] = program
    sys.argv = [file]
    run(build(source, file, "exec", dont_inherit=True), names)
    say("ran")
    names["__compare__"] = lambda number, value: say(f"compared {number} {plain(value)!r}")
    run(build(_receive(read, channel), "tests", "exec", dont_inherit=True), names)
    say(f"over {_receive(read, channel).decode()}")
    leave(0)


def plain(value: Any) -> Any:
    """``value`` as numbers, text and containers of these; TypeError for others, which equal no literal."""
    if value is None:
        return None
    for kind, exact in _EXACT.items():
        if isinstance(value, kind):
            return exact(value)
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return {plain(item) for item in value}
    if getattr(value, "shape", None) == ():  # numpy's numbers
        return plain(value.item())
    if isinstance(value, Number):  # Fraction, Decimal
        return float(value)  # type: ignore[arg-type]
    raise TypeError(f"no literal equals a {type(value).__name__}")


def _speaker(channel: int) -> Callable[[str], None]:
    write = os.write

    def say(line: str) -> None:
        pending = f"{line}\n".encode()
        while pending:
            pending = pending[write(channel, pending) :]

    return say


def _receive(read: Callable[[int, int], bytes], channel: int) -> bytes:
    """The next text that was sent, behind its size."""
    return _read_exactly(read, channel, int.from_bytes(_read_exactly(read, channel, SIZE_BYTES), "little"))


def _read_exactly(read: Callable[[int, int], bytes], channel: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = read(channel, size - len(content))
        if not part:
            raise EOFError("the other end closed")
        content += part
    return content


if __name__ == "__main__":
    run_tested("program.py", int(sys.argv[1]))
