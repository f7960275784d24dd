"""Tests whose expected values stay outside of the process that they run in.

``assert double(2) == 4`` becomes ``__compare__(0, double(2))``: the process says what the left side is, and whoever
holds the 4 compares. A program cannot say what it does not know, whatever it does to its own process.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

COMPARE = "__compare__"
"""What tests call with a number and a value in the place of an assertion."""

_NOT_THERE = object()


@dataclass(frozen=True)
class Withheld:
    """Tests without their expected values.

    Attributes:
        text: Python, which calls :data:`COMPARE`.
        expected: the values, by the numbers it is called with.
        due: the numbers it is called with in any case when the tests run to their end.
    """

    text: str
    expected: tuple[Any, ...]
    due: frozenset[int]

    def agrees(self, number: int, shown: str) -> bool:
        """Whether the value whose ``repr`` is ``shown`` is the expected one; what is no plain data never is."""
        try:
            return 0 <= number < len(self.expected) and bool(ast.literal_eval(shown) == self.expected[number])
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return False


def withhold(tests: str) -> Withheld:
    """Take expected values out of the assertions of ``tests`` that compare with a literal, by ``==``, or with None
    by ``is``.

    Assertions inside ``try`` and ``with`` stay as they are: somebody may wait for what they raise.

    Raises:
        ValueError: the tests are no Python.
    """
    try:
        tree = ast.parse(tests)
    except SyntaxError as error:
        raise ValueError(f"the tests are no Python: line {error.lineno}: {error.msg}") from error
    taken = _Taking()
    rewritten = ast.fix_missing_locations(taken.visit(tree))
    due = {taken.numbers[statement] for statement in _always_run(tree) if statement in taken.numbers}
    return Withheld(ast.unparse(rewritten), tuple(taken.expected), frozenset(due))


class _Taking(ast.NodeTransformer):
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

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        return node

    def visit_TryStar(self, node: ast.stmt) -> ast.stmt:
        return node

    def visit_With(self, node: ast.With) -> ast.stmt:
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.stmt:
        return node


def _comparison(test: ast.expr) -> tuple[ast.expr | None, Any]:
    """What is compared, and the literal that it has to be; None where it is no such comparison."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.Is):
        return None, None
    none_only = isinstance(test.ops[0], ast.Is)  # 1 equals True, and is not it
    left, right = test.left, test.comparators[0]
    for value, literal in ((left, right), (right, left)):
        expected = _literal(literal)
        if expected is not _NOT_THERE and (expected is None or not none_only):
            return value, expected
    return None, None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return _NOT_THERE


def _always_run(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that have run when the tests have: those of the module itself, and of plain functions that it defines
    once and calls, up to their first return."""
    yield from tree.body
    functions = [item for item in tree.body if isinstance(item, ast.FunctionDef)]
    defined, called = Counter(_bound(tree)), set(map(_called, tree.body))
    for function in functions:
        if function.name not in called or defined[function.name] > 1 or function.decorator_list:
            continue
        if not _holds(function, ast.Yield | ast.YieldFrom):
            yield from takewhile(lambda statement: not _holds(statement, ast.Return), function.body)


def _bound(tree: ast.Module) -> Iterator[str]:
    """Every name, as often as something in the tests gives it a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _holds(node: ast.AST, kind: Any) -> bool:
    return any(isinstance(found, kind) for found in ast.walk(node))


def _called(statement: ast.stmt) -> str | None:
    """The function that a statement does nothing but call: ``check(double)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
