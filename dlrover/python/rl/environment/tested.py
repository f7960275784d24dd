"""The process of a program that is tested: it runs the program, then asks for the tests, then says that they are over.

Run as a script, isolated, in the program's folder; it imports nothing beyond Python's own library. What it is sent and
what it says goes through one inherited descriptor::

    program runs -> "ran" -> <tests, token> -> tests run, "compared <number> <value>" each -> "over <token>"

The tests come when the program has run; the token is left unread until they are over. Functions that decide about the
verdict are those of before the program ran, so that it may replace what it likes in ``builtins`` and ``os``.
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
    """Run the program in ``file``, and the tests that come through ``channel``; does not return where these pass."""
    os.set_inheritable(channel, False)
    run, build, read, leave = exec, compile, os.read, os._exit
    say = _speaker(channel)
    with open(file, encoding="utf-8") as opened:
        source = opened.read()
    program = ModuleType("__main__")
    program.__file__ = os.path.abspath(file)
    names = vars(program)
    sys.modules["__main__"], sys.argv = program, [file]
    run(build(source, file, "exec", dont_inherit=True), names)
    say("ran")
    names["__compare__"] = lambda number, value: say(f"compared {number} {plain(value)!r}")
    run(build(_received(read, channel), "tests", "exec", dont_inherit=True), names)
    say(f"over {_received(read, channel).decode()}")
    leave(0)


def plain(value: Any) -> Any:
    """``value`` as numbers, text and containers of these, so that it equals the same literals.

    Raises:
        TypeError: it is none of these; no literal equals it.
    """
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
        told = f"{line}\n".encode()
        while told:
            told = told[write(channel, told) :]

    return say


def _received(read: Callable[[int, int], bytes], channel: int) -> bytes:
    """The next text that was sent, behind its size."""
    return _exactly(read, channel, int.from_bytes(_exactly(read, channel, SIZE_BYTES), "little"))


def _exactly(read: Callable[[int, int], bytes], channel: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = read(channel, size - len(found))
        if not part:
            raise EOFError("nobody asks any more")
        found += part
    return found


if __name__ == "__main__":
    run_tested("program.py", int(sys.argv[1]))
