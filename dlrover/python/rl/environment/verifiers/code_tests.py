# SPDX-License-Identifier: Apache-2.0
"""The process of a tested program: it runs the program, then the tests, and reports every assertion.

It runs as a script, isolated, in the program's folder, with the standard library only. Its standard input and output::

    modules of the tests are imported: "loaded <failed module>" -> program runs: "ran" -> <tests, calls, token>
    -> tests run, each assertion is "passed <number>", "failed" or "compared <number> <value>" -> "over <token>"

Tests arrive after the program has run; the token stays unread until they end. All names used here are bound before the
program runs; functions and modules that it replaced are restored before the tests run."""

import builtins
import math
import operator
import os
import sys
from collections.abc import Callable, ItemsView, Iterator, KeysView
from contextlib import contextmanager, suppress
from numbers import Number
from types import ModuleType, SimpleNamespace
from typing import Any

globals()["__builtins__"] = _BUILTINS = dict(vars(builtins))  # the code below uses these, not the module

SIZE_BYTES = 8

PROGRAM_MODULES = ("program", "solution", "main", "submission", "your_module", "your_solution", "my_solution")
"""Names by which tests may import the program."""

_EXACT: dict[type[Any], Callable[[Any], Any]] = {
    bool: bool,
    int: int.__int__,
    float: float.__float__,
    complex: complex,
    str: str.__str__,
    bytes: bytes,
    bytearray: bytes,
}
"""Conversions of values of derived classes to these classes, without the values' own methods."""

_SCALARS = {*_EXACT, type(None)}
_CONTAINERS = (list, tuple, dict, set, frozenset)
_read_flags = vars(type)["__flags__"].__get__
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which built-in classes lack
_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"Eq": operator.eq, "NotEq": operator.ne, "Is": operator.is_, "IsNot": operator.is_not},
    **{"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge},
    "In": lambda left, right: left in right,
    "NotIn": lambda left, right: left not in right,
}


class Opaque(TypeError):
    """Raised for an object whose own methods would decide whether an assertion holds."""


class Approximate:
    """A value that equals numbers, and containers of numbers, within a tolerance: ``pytest.approx``."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self._expected, self._nan_ok = expected, nan_ok
        self._relative = rel if rel is not None else 0.0 if abs is not None else 1e-6
        self._absolute = abs if abs is not None else 1e-12

    def __eq__(self, actual: object) -> bool:
        return self._is_near(actual, self._expected)

    def _is_near(self, actual: Any, expected: Any) -> bool:
        actual, expected = (value.tolist() if hasattr(value, "tolist") else value for value in (actual, expected))
        if isinstance(expected, dict):
            return actual.keys() == expected.keys() and all(self._is_near(actual[key], expected[key]) for key in actual)
        if isinstance(expected, list | tuple):
            return len(actual) == len(expected) and all(map(self._is_near, actual, expected))
        if self._nan_ok and actual != actual and expected != expected:
            return True
        tolerance = max(self._relative * abs(expected), self._absolute)
        return bool(actual == expected or abs(actual - expected) <= tolerance < math.inf)


def raises(kinds: Any, call: Any = None, *arguments: Any, match: Any = None, **named: Any) -> Any:
    """Expect an exception: ``pytest.raises``, ``assertRaises`` and ``assertRaisesRegex``."""
    expected = _expect(kinds, match)
    if call is None:
        return expected
    with expected as raised:
        call(*arguments, **named)
    return raised


@contextmanager
def _expect(kinds: Any, match: Any) -> Iterator[SimpleNamespace]:
    raised = SimpleNamespace()
    try:
        yield raised
    except kinds as error:
        text = str(error)

        def matches(pattern: Any) -> bool:
            if not __import__("re").search(pattern, text):
                raise AssertionError(f"{text!r} does not match {pattern!r}")
            return True

        if match is not None:
            matches(match)
        kind = type(error)
        vars(raised).update(value=error, exception=error, type=kind, typename=kind.__name__, match=matches)
    else:
        raise AssertionError("nothing was raised")


def plain(value: Any, otherwise: Callable[[Any], Any] | None = None) -> Any:
    """Return ``value`` as numbers, text and containers of these; ``otherwise`` converts others, or Opaque is raised."""
    if type(value) in _SCALARS:
        return value
    scalar = _exact_scalar(value)
    if scalar is not None:
        return scalar
    if isinstance(value, list | tuple):
        items = list(value)
        if not set(map(type, items)) <= _SCALARS:
            items = [plain(item, otherwise) for item in items]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {plain(key, otherwise): plain(item, otherwise) for key, item in value.items()}
    if isinstance(value, set | frozenset | KeysView | ItemsView):
        return (frozenset if otherwise is not None else set)(plain(item, otherwise) for item in value)
    if otherwise is None:
        raise Opaque(f"no literal equals a {type(value).__name__}")
    return otherwise(value)


def _exact_scalar(value: Any) -> Any:
    """Return the text or the number that ``value`` is, or equals (a Fraction may); else None."""
    for kind, exact in _EXACT.items():
        if isinstance(value, kind):
            return exact(value)
    if hasattr(type(value), "shape") and value.shape == ():  # numpy's numbers
        return plain(value.item())
    for exact in (float, int) if isinstance(value, Number) else ():
        with suppress(OverflowError, ValueError, TypeError):
            if exact(value) == value:
                return exact(value)
    return None


class Assertions:
    """The functions that rewritten tests call, with names such as ``__check__``."""

    raises = staticmethod(raises)

    def __init__(self, say: Callable[[str], None], program: ModuleType) -> None:
        self._say, self._program, self._modules = say, program, dict(sys.modules)
        self._reports: set[str] = set()
        self._unittest = sys.modules.get("unittest")
        if self._unittest is not None:
            case = self._case = self._unittest.TestCase
            self._copy = type("Copy", (case,), dict(vars(case)))()
            self._suite, self._load = self._unittest.TestSuite, self._unittest.TestLoader().loadTestsFromTestCase

    def passed(self, number: int, value: Any = None) -> Any:
        """Report an assertion; return ``value``, whose expression raises on failure."""
        self._report(f"passed {number}")
        return value

    def check(self, number: int, value: Any) -> bool:
        try:
            value = self.known(value)
        except Opaque:
            if hasattr(type(value), "__getattr__"):  # it may pretend to be anything, like a Mock
                raise
        holds = bool(value)
        self.passed(number) if holds else self._say("failed")
        return holds

    def compare(self, number: int, value: Any) -> None:
        self._report(f"compared {number} {plain(value)!r}")

    def _report(self, line: str) -> None:
        if line not in self._reports:  # a loop may assert repeatedly
            self._reports.add(line)
            self._say(line)

    def assertion(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of ``TestCase`` that the program cannot reach."""
        return getattr(self._copy, name)(*(arguments if "Is" in name else map(self.known, arguments)), **named)

    def holds(self, left: Any, relation: str, right: Any, *chained: Any) -> Any:
        """Compare data as data; only objects of one class are compared by the program's methods."""
        if chained:
            return self.holds(left, relation, right) and self.holds(right, *chained)
        compare = _RELATIONS[relation]
        if (type(left) in _SCALARS and type(right) in _SCALARS) or relation in ("Is", "IsNot"):
            return compare(left, right)
        with suppress(Opaque):
            return compare(self.known(left), self.known(right))
        if relation in ("Eq", "NotEq"):
            return self._are_equal(left, right) is (relation == "Eq")
        if relation in ("In", "NotIn") and isinstance(right, _CONTAINERS):
            return any(self.holds(left, "Eq", item) for item in right) is (relation == "In")
        is_one_class = type(left) is type(right) and not isinstance(left, _CONTAINERS)
        return (is_one_class or relation in ("In", "NotIn")) and compare(left, right)

    def _are_equal(self, left: Any, right: Any) -> bool:
        kind = next((kind for kind in _CONTAINERS if isinstance(left, kind)), None)
        if kind is None:
            return type(left) is type(right) and bool(left == right)
        if not issubclass(type(right), kind) or len(left) != len(right):
            return False
        if kind in (list, tuple):
            return all(self.holds(one, "Eq", other) for one, other in zip(left, right, strict=True))
        has_items = all(self.holds(item, "In", list(right)) for item in left)
        return has_items and (kind is not dict or all(self.holds(left[key], "Eq", right[key]) for key in left))

    def known(self, value: Any) -> Any:
        """Reduce ``value`` to plain data and objects of libraries that the tests import; raises Opaque for others."""
        return plain(value, self._find_library)

    def _find_library(self, value: Any) -> Any:
        kind = type(value)
        is_owned = getattr(self._modules.get(kind.__module__), kind.__qualname__, None) is kind
        is_library = is_owned and kind.__module__ != "unittest.mock"
        if is_library or kind is Approximate or not _read_flags(kind) & _HEAP_TYPE:
            return value
        raise Opaque(f"a {kind.__name__} is no data")

    def collect(self, tests: Any) -> None:
        """Call a function, or the methods of a class, like pytest and unittest."""
        if not isinstance(tests, type):
            return _call(tests)
        if self._unittest is not None and issubclass(tests, self._case):
            self._suite(self._load(tests)).run(result := self._unittest.TestResult())
            return self._say("failed") if result.errors or result.failures or result.skipped else None
        is_case = tests.__name__.startswith("Test") and tests.__init__ is object.__init__  # type: ignore[misc]
        for name, value in [(name, getattr(tests, name)) for name in dir(tests)] if is_case else ():
            if isinstance(value, type) and name.startswith("Test"):
                self.collect(value)
            elif name.startswith("test"):
                instance = tests()
                for method in ("setup_class", "setup_method", name, "teardown_method"):
                    _call(getattr(instance, method, list))
        return None

    def run(self, *texts: str) -> bool:
        """Run tests, then the calls of pytest and unittest; return False if a helper was replaced."""
        helpers = {f"__{name}__": getattr(self, name) for name in vars(Assertions) if not name.startswith("_")}
        scope: dict[str, Any] = vars(self._program)
        # Tests that patch the module also patch it for the program.
        scope.update(helpers, __builtins__=vars(builtins) if "builtins." in texts[0] else _BUILTINS.copy())
        for text in texts:
            exec(compile(text, "tests", "exec", dont_inherit=True), scope)  # noqa: S102 -- the tested program, confined
        return all(scope.get(name) is helper for name, helper in helpers.items())


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    result = function(*arguments, **named)
    if hasattr(result, "cr_frame"):
        __import__("asyncio").run(result)


def _parametrize(argnames: Any, argvalues: Any, **_: object) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    keys = argnames.replace(",", " ").split() if isinstance(argnames, str) else list(argnames)

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def call(*owner: Any, **named: Any) -> None:
            for row in argvalues:
                _call(function, *owner, **named, **dict(zip(keys, row if len(keys) > 1 else [row], strict=True)))

        return call

    return decorate


def _ignore_mark(*values: Any, **_: object) -> Any:
    return values[0] if values and callable(values[0]) else lambda function: function


# Marks change nothing, except ``parametrize``.
_MARK, _PYTEST = ModuleType("mark"), ModuleType("pytest")
vars(_MARK).update(parametrize=_parametrize, __getattr__=lambda name: _ignore_mark)
vars(_PYTEST).update(raises=raises, approx=Approximate, mark=_MARK)
vars(_PYTEST).update(param=lambda *row, **_: row if len(row) > 1 else row[0])


def run_tested(file: str, modules: list[str]) -> None:
    incoming, channel = os.dup(0), os.dup(1)  # which children do not inherit
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    write, receive, leave = os.write, _receiver(incoming), os._exit

    def say(line: str) -> None:
        write(channel, f"{line}\n".encode())

    with open(file, encoding="utf-8") as opened:
        code = compile(opened.read(), file, "exec", dont_inherit=True)
    missing = ""
    for module in modules:
        try:
            __import__(module.rstrip("?"))
        except Exception as error:  # noqa: BLE001 - modules may raise anything
            missing = missing if module.endswith("?") else f"{module} ({error})"
    say(f"loaded {missing}")
    program = ModuleType("program")  # its part for ``__main__`` is not tested
    vars(program).update(__file__=os.path.abspath(file), __builtins__=builtins)  # not this module's
    assertions, loaded = Assertions(say, program), sys.modules
    modules_before = {**loaded, "pytest": _PYTEST, "__main__": program, **dict.fromkeys(PROGRAM_MODULES, program)}
    places = [vars(module) for module in loaded.values() if isinstance(module, ModuleType)]
    functions = [{name: value for name, value in names.items() if callable(value)} for names in places]
    loaded["__main__"] = loaded["program"] = program
    sys.argv = [file]
    exec(code, vars(program))  # noqa: S102 -- the tested program, confined
    say("ran")
    for names, values in zip(places, functions, strict=True):
        names.update(values)
    loaded.update(modules_before)
    if assertions.run(*(receive().decode("utf-8", "surrogatepass") for _ in range(2))):
        say(f"over {receive().decode()}")
    leave(0)


def _receiver(channel: int) -> Callable[[], bytes]:
    """Return a function that reads the next text from the channel, where its size precedes it."""
    read = os.read

    def read_exactly(size: int) -> bytes:
        content = b""
        while len(content) < size:
            part = read(channel, size - len(content))
            if not part:
                raise EOFError("the other end closed")
            content += part
        return content

    return lambda: read_exactly(int.from_bytes(read_exactly(SIZE_BYTES), "little"))


if __name__ == "__main__":
    run_tested("program.py", sys.argv[1:])
