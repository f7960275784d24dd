# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.feature_table``: writes ``docs/contributing/features.md``, which lists the tests that
show each feature.

A test names the features that it shows in a marker: ``@pytest.mark.feature(111, 112)``.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "contributing" / "features.md"

_TEXT = (TESTS / "features.toml").read_text(encoding="utf-8")
SECTIONS = {title: (section["first"], *section["features"]) for title, section in tomllib.loads(_TEXT).items()}
"""Section to the number of its first feature, and its features in order."""

QUICKLY = "EFGIJ"
"""Sections whose features ``make test`` shows, each by a test that is not slow at least."""

ABSENT = {144: "not there: `torch.compile` makes the kernels of log-probs on a GPU; the others are the model's"}
"""Features without a test, and why."""


def features() -> dict[int, str]:
    """Number to name."""
    return {first + at: name for first, *names in SECTIONS.values() for at, name in enumerate(names)}


def shown(slow: bool = True) -> dict[int, list[str]]:
    """Number to the tests that show it, as ``folder/file.py::test``; with those marked ``slow`` or without."""
    tests: dict[int, list[str]] = {}
    for test, numbers, is_slow in _tests():
        for number in numbers if slow or not is_slow else ():
            tests.setdefault(number, []).append(test)
    return tests


@cache
def _tests() -> list[tuple[str, tuple[int, ...], bool]]:
    """Each test, its features, and whether it is slow."""
    files = sorted(TESTS.rglob("test_*.py"))
    return [(f"{path.relative_to(TESTS)}::{name}", *about) for path in files for name, *about in _tests_in(path)]


def _tests_in(path: Path) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_all = any(_sets_marks(node) and _says_slow(node) for node in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            numbers = tuple(number for decorator in node.decorator_list for number in _numbers_in(decorator))
            yield node.name, numbers, of_all or any(map(_says_slow, node.decorator_list))


def _numbers_in(decorator: ast.expr) -> tuple[int, ...]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.feature":
        return tuple(ast.literal_eval(argument) for argument in decorator.args)
    return ()


def _sets_marks(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets)


def _says_slow(node: ast.AST) -> bool:
    return "pytest.mark.slow" in ast.unparse(node)


def page() -> str:
    """The page as it should be."""
    lines = [
        "---",
        "orphan: true",
        "---",
        "",
        "# What it can do, and which tests show it",
        "",
        "The features that users of RLite, RL2 and RLFusion know. A test names the features it shows in a marker:",
        "`pytest --feature 87` runs the tests of feature 87. Written by `python -m tests.feature_table`.",
    ]
    names, tests = features(), shown()
    for title, (first, *inside) in SECTIONS.items():
        lines += ["", f"## {title}", "", "| | feature | tests |", "|---|---|---|"]
        for number in range(first, first + len(inside)):
            cells = "<br>".join(f"`{test}`" for test in tests.get(number, ())) or ABSENT.get(number, "none")
            lines.append(f"| {number} | {names[number]} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    assert all(last + 1 == number for last, number in pairwise(features())), "numbers have no gaps"
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
