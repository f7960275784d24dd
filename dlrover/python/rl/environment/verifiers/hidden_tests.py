# SPDX-License-Identifier: Apache-2.0
"""Test files, rewritten so that the tested program controls neither an expected value nor a verdict.

``assert double(2) == 4`` becomes ``__compare__(0, double(2))``: this process has the 4, and compares. Any other
assertion becomes ``assert __check__(1, ...)``, which reports the outcome, as do methods of ``unittest.TestCase``."""

import ast
import builtins
import importlib.util
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, takewhile
from typing import Any

from dlrover.python.rl.environment.verifiers.code_tests import PROGRAM_MODULES, Approximate

CHECKED = object()  # the expected value of an assertion that is checked in the program's process
_NO_LITERAL = object()
_NOTHING_FAILS = "the tests call nothing that could fail"
_WHOLE = ("mark", "main", "fail")  # read with the name of their module
_TEST_CASE = re.compile(r"\w+\.assert[A-Z]|(self|pytest)\.fail$")
_UNSUPPORTED = re.compile(
    r"pytest\.(?!(raises|approx|param|main|fail|mark|mark\.(?!skip|xfail|usefixtures)\w+)$).*"
    r"|unittest\.(skip.*|SkipTest|expectedFailure|main as a name)|pytest as (?!None$).*|indirect"
    r"|self\.(skipTest|assert(No)?Logs|assertWarns.*)|(setup|teardown|setUp|tearDown)(_module|_function|Module)"
)
_METHODS = {
    **{f"assert{kind}Equal": "{0} == {1}" for kind in ("", "List", "Dict", "Tuple", "Set", "MultiLine")},
    **{"assertTrue": "{0}", "assertFalse": "not {0}", "assertIn": "{0} in {1}", "assertNotIn": "{0} not in {1}"},
    **{"assertNotEqual": "{0} != {1}", "assertGreater": "{0} > {1}", "assertGreaterEqual": "{0} >= {1}"},
    **{"assertLess": "{0} < {1}", "assertLessEqual": "{0} <= {1}", "fail": "False"},
}
"""Methods of ``unittest.TestCase`` that may hide an expected value, as assertions."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class HiddenTests:
    """Tests without their expected values, and the ``calls`` that pytest and unittest would make.

    ``text`` reports each assertion by its index in ``expected``; ``due`` are the indices that complete tests always
    report. ``modules`` are the tests' imports, with ``?`` if they are optional."""

    text: str
    expected: tuple[Any, ...]
    due: frozenset[int]
    calls: str
    modules: tuple[str, ...]

    def accepts(self, report: str, number: int, value: str) -> bool:
        """Return True if a checked assertion has ``passed``, or another is ``compared`` with an equal value."""
        expected = self.expected[number] if number < len(self.expected) else _NO_LITERAL
        if expected is CHECKED or report != "compared":
            return expected is CHECKED and report == "passed"
        try:
            return bool(expected == ast.literal_eval(value))
        except (ValueError, SyntaxError, TypeError, AttributeError, ArithmeticError, MemoryError, RecursionError):
            return False


@lru_cache(64)
def hide_expected(tests: str, entry_point: str = "") -> HiddenTests:
    """Rewrite tests, with HumanEval's ``check(entry_point)``; raises ValueError if they cannot run or cannot fail."""
    try:
        tree = ast.parse(tests)
    except SyntaxError as error:
        raise ValueError(f"the tests are not Python: line {error.lineno}: {error.msg}") from error
    body, main = list[ast.stmt](), {"__name__", "'__main__'"}
    for item in tree.body:
        is_guard = isinstance(item, ast.If) and set(ast.unparse(item.test).split(" == ")) == main
        body += item.body if isinstance(item, ast.If) and is_guard else [item]
    tree.body = body
    _refuse_unsupported(tree)
    (calls, methods), modules = _collect(tree, entry_point), tuple(dict.fromkeys(_imported(tree)))
    rewriter = _Rewriter(tree)
    ast.fix_missing_locations(rewriter.visit(tree))
    if not _can_fail(tree, calls):
        raise ValueError(f"{_NOTHING_FAILS}: call the functions that they define, and use assert, unittest or pytest")
    statements = [getattr(item, "value", getattr(item, "test", None)) for item in _always_run(tree, calls, methods)]
    due = frozenset(rewriter.numbers[call] for call in statements if call in rewriter.numbers)
    return HiddenTests(ast.unparse(tree), tuple(rewriter.expected), due, ast.unparse(calls), modules)


# -- what runs ---------------------------------------------------------------------------------------------------------


def _refuse_unsupported(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        names = [ast.unparse(node) if isinstance(node, ast.Attribute) else getattr(node, "name", None) or ""]
        names += [node.arg or ""] if isinstance(node, ast.keyword) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}{' as a name' * (alias.name in _WHOLE)}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [f"{alias.name} as {alias.asname}" for alias in node.names]
        elif isinstance(node, ast.ClassDef):
            names = [f"{ast.unparse(each).partition('(')[0]} of a class" for each in node.decorator_list]
        for name in filter(_UNSUPPORTED.fullmatch, names):
            raise ValueError(f"the tests use {name}, which python_tests does not support")


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that the tests import, except the program. Raises ValueError if one is not installed."""
    optional = {node for each in ast.walk(tree) if isinstance(each, ast.Try) for node in ast.walk(each)}
    for node in ast.walk(tree):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        if isinstance(node, ast.ImportFrom):
            node.level, names = 0, {node.module or "."}
        for name in names - {*PROGRAM_MODULES, "pytest"}:
            top = name.partition(".")[0]
            if node not in optional and (not top or importlib.util.find_spec(top) is None):
                raise ValueError(f"the tests import {name}, which is not installed; the program is 'solution' to them")
            yield f"{name}{'?' * (node in optional)}"


def _collect(tree: ast.Module, entry_point: str) -> tuple[ast.Module, list[_Function]]:
    """Return the calls of tests by pytest, unittest and HumanEval, and the methods that they always run."""
    called, loaded = set(map(_called, tree.body)), _loaded(tree)
    calls: list[str] = []
    always: list[_Function] = []
    for item in tree.body:
        if isinstance(item, ast.ClassDef) and (item.bases or item.name.startswith("Test")):
            methods = {part.name: part for part in item.body if isinstance(part, _Function)}
            is_plain = item.name.startswith("Test") and "__init__" not in methods
            for method in methods.values() if is_plain else ():
                _refuse_fixtures(method, bound=1)
            if is_plain or any("TestCase" in ast.unparse(base) for base in item.bases):
                always += [method for name, method in methods.items() if name.startswith("test")]
            calls.append(f"__collect__({item.name})")
        elif isinstance(item, _Function) and item.name == "check" and item.name not in loaded:
            if not re.fullmatch(r"[\w.()]+", entry_point):  # ``add``, ``Solution().add``
                raise ValueError(f"{_NOTHING_FAILS}: extra_info['entry_point'] must name what check() is called with")
            calls.append(f"check({entry_point})")
        elif isinstance(item, _Function) and item.name.startswith("test") and item.name not in called:
            if item.name in loaded and _parameters(item):
                continue  # the tests call it, with arguments
            _refuse_fixtures(item)
            calls.append(f"__collect__({item.name})")
    return ast.parse("\n".join(calls)), always


def _refuse_fixtures(function: _Function, bound: int = 0) -> None:
    if function.name in ("setup_method", "teardown_method") and _parameters(function)[bound:] == ["method"]:
        function.args.defaults.append(ast.Constant(None))
    for name in _parameters(function)[bound:] if function.name.startswith(("test", "setup_", "teardown_")) else ():
        raise ValueError(f"the tests need the fixture {name!r}, which python_tests does not support")


def _parameters(function: _Function) -> list[str]:
    """Return the parameters that a call must provide; decorators may also provide them."""
    arguments = function.args.args if not function.decorator_list else []
    return [each.arg for each in arguments[: len(arguments) - len(function.args.defaults)]]


def _can_fail(tree: ast.Module, calls: ast.Module) -> bool:
    """Return True if code that runs reports an assertion, or names a definition that does."""
    definitions = {node.name: node for node in ast.walk(tree) if isinstance(node, _Function | ast.ClassDef)}
    pending = [calls, *(item for item in tree.body if item not in definitions.values())]
    while pending:
        for node in ast.walk(pending.pop()):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in ("__compare__", "__check__", "__passed__"):
                return True
            if name in definitions:
                pending.append(definitions.pop(name))
    return False


def _always_run(tree: ast.Module, calls: ast.Module, methods: list[_Function]) -> Iterator[ast.stmt]:
    """Yield statements that always run: in the module, and, up to the first return, in plain functions that it or
    ``calls`` call, and in ``methods``."""
    yield from tree.body
    called = {*map(_called, tree.body), *_loaded(calls)}
    nodes = (node for node in ast.walk(tree) if node in tree.body or not isinstance(node, _Function | ast.ClassDef))
    bound = Counter(_bound(nodes))
    functions = [item for item in tree.body if isinstance(item, _Function) and item.name in called]
    for function in [*(each for each in functions if bound[each.name] == 1), *methods]:
        if not function.decorator_list and not _holds(function, ast.Yield | ast.YieldFrom):
            yield from takewhile(lambda statement: not _holds(statement, ast.Return), function.body)


def _loaded(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield every assigned name, once per assignment."""
    for node in nodes:
        if isinstance(node, _Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg | ast.alias):
            yield node.arg if isinstance(node, ast.arg) else (node.asname or node.name).partition(".")[0]


def _holds(node: ast.AST, kind: Any) -> bool:
    return any(isinstance(item, kind) for item in ast.walk(node))


def _called(statement: ast.stmt) -> str | None:
    """Return the function of a statement that is only a call: ``check(double)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None


# -- assertions --------------------------------------------------------------------------------------------------------


class _Rewriter(ast.NodeTransformer):
    """Makes assertions report, and protects comparisons and built-in functions from the program's definitions."""

    def __init__(self, tree: ast.Module) -> None:
        self.expected: list[Any] = []
        self.numbers: dict[ast.AST | None, int] = {}  # indices of the calls that report
        self._bound = set(_bound(ast.walk(tree)))
        origins = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        self._libraries = {each.name for node in origins if node.module not in PROGRAM_MODULES for each in node.names}
        free, names = _loaded(tree) - self._bound, set(dir(builtins))
        imports = any(isinstance(node, ast.ImportFrom) and node.module in PROGRAM_MODULES for node in ast.walk(tree))
        is_clear = imports or free - names or {*PROGRAM_MODULES} & self._bound  # the program's function is not built in
        self._builtins = free & names - {"super"} if is_clear else set()

    def _report(self, function: str, *values: ast.expr, expected: Any = CHECKED) -> ast.Call:
        call = _call(function, ast.Constant(len(self.expected)), *values)
        self.numbers[call] = len(self.expected)
        self.expected.append(expected)
        return call

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And):
            return [part for test in node.test.values for part in self.visit_Assert(ast.Assert(test))]
        if isinstance(node.test, ast.Constant) and node.test.value:
            return [ast.Pass()]
        value, expected = _comparison(node.test)
        if value is not None:
            return [ast.Expr(self._report("__compare__", self.visit(value), expected=expected))]
        return [ast.Assert(self._report("__check__", self.visit(node.test)))]

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        call = node.value if isinstance(node.value, ast.Call) else _call("")
        path, arguments = ast.unparse(call.func), [f"({ast.unparse(each)})" for each in call.args]
        name = path.rpartition(".")[2]
        if path in ("sys.exit", "exit", "quit", "os._exit"):
            return self._report_exit(call.args)
        if path == "unittest.main":  # all tests are collected
            return ast.Pass()
        if _TEST_CASE.match(path) and name in _METHODS and _METHODS[name].count("{") <= len(arguments):
            return self.visit_Assert(ast.Assert(ast.parse(_METHODS[name].format(*arguments), mode="eval").body))
        self.generic_visit(node)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.stmt | list[ast.stmt]:
        path = ast.unparse(node.exc).partition("(")[0] if node.exc else ""
        if path == "AssertionError":
            return self.visit_Assert(ast.Assert(ast.Constant(False)))
        return self._report_exit(getattr(node.exc, "args", [])) if path == "SystemExit" else node

    def _report_exit(self, arguments: list[ast.expr]) -> ast.stmt | list[ast.stmt]:
        """Make an exit status an assertion; the code after it also runs."""
        status = self.visit(arguments[0]) if arguments else ast.Constant(0)
        is_success = isinstance(status, ast.Constant) and not status.value
        return ast.Pass() if is_success else self.visit_Assert(ast.Assert(ast.UnaryOp(ast.Not(), status)))

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        """Make ``if f(2) != 4: raise AssertionError`` an assertion; any other branch that fails passes if not taken."""
        is_failure, test = not node.orelse and _reports_failure(node.body), node.test
        if is_failure and isinstance(test, ast.Compare) and [*map(type, test.ops)] == [ast.NotEq] and not node.body[1:]:
            return self.visit_Assert(ast.Assert(ast.Compare(test.left, [ast.Eq()], test.comparators)))
        self.generic_visit(node)
        node.orelse = [ast.Expr(self._report("__passed__"))] if is_failure else node.orelse
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        blocks = [block for block in (node.body, node.orelse) if block]
        is_expected = any(isinstance(block[-1], ast.Raise) or _reports_failure(block) for block in blocks)
        is_failure = bool(node.handlers) and all(_reports_failure(handler.body) for handler in node.handlers)
        self.generic_visit(node)
        if is_failure and not is_expected:
            node.orelse.append(ast.Expr(self._report("__passed__")))
        for handler in node.handlers if is_expected else ():
            handler.body.insert(0, ast.Expr(self._report("__passed__")))
        return node

    def visit_With(self, node: ast.With) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        is_assertion = any(re.match(r"(__raises__|raises)\(", ast.unparse(item.context_expr)) for item in node.items)
        return [node, ast.Expr(self._report("__passed__"))] if is_assertion else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        path = ast.unparse(node.func)
        name = path.rpartition(".")[2]
        self.generic_visit(node)
        if path == "pytest.main":
            return ast.Constant(0)
        if path in ("pytest.raises", "raises") or name in ("assertRaises", "assertRaisesRegex"):
            node.keywords += [ast.keyword("match", node.args.pop(1))] if name == "assertRaisesRegex" else []
            node.func = ast.Name("__raises__", ast.Load()) if path != "raises" else node.func
            return self._report("__passed__", node) if len(node.args) > 1 else node
        if name in ("allclose", "array_equal", "isclose"):
            node.args = [_call("__known__", argument) for argument in node.args]
        if name in self._bound - self._libraries:
            return node
        if _TEST_CASE.match(path):
            node.func, node.args = ast.Name("__assertion__", ast.Load()), [ast.Constant(name), *node.args]
            return self._report("__passed__", node)
        if name.startswith("assert_"):
            node.args = [_call("__known__", argument) for argument in node.args]
            return self._report("__passed__", node)
        difference = node.args[0] if path == "abs" and node.args else None
        if isinstance(difference, ast.BinOp):  # abs(f(2) - 4) < 1e-6
            sides = (_call("__known__", side) for side in (difference.left, difference.right))
            difference.left, difference.right = sides
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        relations = [ast.Constant(type(relation).__name__) for relation in node.ops]
        return _call("__holds__", node.left, *chain(*zip(relations, node.comparators, strict=True)))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_builtin = node.id in self._builtins and isinstance(node.ctx, ast.Load)
        return ast.Subscript(ast.Name("__builtins__", ast.Load()), ast.Constant(node.id)) if is_builtin else node

    def visit_MatchClass(self, node: ast.AST) -> ast.AST:
        return node  # its class must be a name

    visit_JoinedStr = visit_MatchClass  # it cannot hold more quotes


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


def _reports_failure(block: list[ast.stmt]) -> bool:
    """Return True for statements whose last one always fails, by an assertion."""
    last = block[-1]
    if isinstance(last, ast.Assert):
        return not _holds(last.test, ast.Name) and ast.unparse(last.test) != "True"
    return ast.unparse(last).startswith(("raise AssertionError", "self.fail(", "pytest.fail("))


def _comparison(test: ast.expr) -> tuple[ast.expr | None, Any]:
    """Return the value that is compared with a literal, and the literal."""
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
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.approx":
            named = {each.arg or "": ast.literal_eval(each.value) for each in node.keywords}
            return Approximate(*map(ast.literal_eval, node.args), **named)
        is_infinite = any(getattr(part, "value", None) == math.inf for part in ast.walk(node))  # its repr is no literal
        return _NO_LITERAL if is_infinite else ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return _NO_LITERAL
