# SPDX-License-Identifier: Apache-2.0
"""Counts the size and the language of a tree: ``python -m tests.shape`` prints what ``tests/shape_limits.toml`` limits.

A measure is a list of places, and its value is the sum of their amounts, so whatever is above a limit can be named.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
LIMITS = tomllib.loads((REPOSITORY / "tests/shape_limits.toml").read_text(encoding="utf-8"))
LONG_FILE = re.compile(r"(#.*\n)*# Over (\d+) lines: \S")

_VAGUE = frozenset(LIMITS["words"]["vague_names"])
_OPENING = re.compile(rf"(?:{'|'.join(LIMITS['words']['openings'])})\b")
_PHRASE = re.compile(rf"\b(?:{'|'.join(LIMITS['words']['phrases'])})\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
_RECORDS = {"NamedTuple", "Protocol", "TypedDict"}
_COUNTED = ast.Module | ast.ClassDef | Function | ast.Name | ast.arg


@dataclass(frozen=True)
class Place:
    """A line that adds ``amount`` to a measure."""

    file: str
    line: int
    text: str
    amount: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class Tree:
    """The Python files of a folder, without empty and generated ones, and its Markdown pages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = [file for file in sorted(root.rglob("*.py")) if file.stat().st_size and "_pb2" not in file.name]
        self.sources = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}
        self.pages = pages_of(root, sorted(root.rglob("*.md")))
        self._nodes = [
            (name, node)
            for name, source in self.sources.items()
            for node in ast.walk(ast.parse(source))
            if isinstance(node, _COUNTED)
        ]

    def nodes(self, kind: Any) -> Iterator[tuple[str, Any]]:
        return ((name, node) for name, node in self._nodes if isinstance(node, kind))

    def measure(self) -> dict[str, list[Place]]:
        sizes = {name: text.count("\n") for name, text in self.sources.items()}
        return {
            "lines": [Place(name, 1, f"{lines} lines", lines) for name, lines in sizes.items()],
            "modules": [Place(name, 1, "a module") for name in self.sources],
            "functions": [Place(name, node.lineno, node.name) for name, node in self.nodes(Function)],
            "classes": [Place(name, node.lineno, node.name) for name, node in self.nodes(ast.ClassDef)],
            "names_twice": list(self._names_twice()),
            "vague_names": list(self._vague_names()),
            "fragments": list(self._fragments()),
            "phrases": list(phrases_in(self.sources | self.pages)),
        }

    def _names_twice(self) -> Iterator[Place]:
        homes: dict[str, dict[str, int]] = defaultdict(dict)
        for name, node in self.nodes(ast.ClassDef):
            if not node.name.startswith("_"):
                homes[node.name].setdefault(name, node.lineno)
        for class_name, lines in homes.items():
            if len(lines) > 1:
                (file, line), *more = lines.items()
                yield Place(file, line, f"{class_name}, also defined in {', '.join(name for name, _ in more)}")

    def _vague_names(self) -> Iterator[Place]:
        for name, node in self.nodes(ast.Name | ast.arg):
            word = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node.ctx, ast.Store) else ""
            if word.rstrip("_") in _VAGUE:
                yield Place(name, node.lineno, word)

    def _fragments(self) -> Iterator[Place]:
        for name, node in self.nodes(ast.Module | ast.ClassDef | Function):
            docstring = ast.get_docstring(node) or ""
            if _OPENING.match(docstring):
                yield Place(name, node.body[0].lineno, docstring.partition("\n")[0])


def pages_of(root: Path, files: Iterable[Path]) -> dict[str, str]:
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}


def phrases_in(texts: dict[str, str]) -> Iterator[Place]:
    for name, text in texts.items():
        for match in _PHRASE.finditer(text):
            yield Place(name, text.count("\n", 0, match.start()) + 1, match.group())


def changed_files(root: Path) -> set[str]:
    """Return the files below ``root`` that differ from the commit before the last one; none without git."""
    command = ["git", "diff", "--name-only", "--relative", "HEAD~1", "--", "."]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        return set()
    return set(listed.splitlines())


def excesses(measures: dict[str, list[Place]], limits: dict[str, int], changed: Collection[str] = ()) -> list[str]:
    """A message for each measure above its limit; it names ten places, those in ``changed`` files first."""
    messages = []
    for measure, limit in limits.items():
        places = measures[measure]
        value = sum(place.amount for place in places)
        if value > limit:
            sums: Counter[str] = Counter()
            for place in places:
                sums[place.file] += place.amount
            places.sort(key=lambda place: (place.file not in changed, -sums[place.file], place.file, place.line))
            named = "".join(f"\n  {place}" for place in places[:10])
            messages.append(f"{measure}: {value}, and the limit is {limit}; the last change first:{named}")
    return messages


# -- the largest of each kind -----------------------------------------------------------------------------------------


def oversized(tree: Tree, largest: dict[str, int], attributes: dict[str, int]) -> list[str]:
    """A message for each function, file and class above its limit, and for each exception that could be lower."""
    messages = []
    for name, node in tree.nodes(Function):
        lines = node.end_lineno - node.lineno + 1
        if lines > largest["function_lines"]:
            messages.append(f"{name}:{node.lineno}: {node.name} has {lines} lines, {largest['function_lines']} at most")
    for name, source in tree.sources.items():
        lines, unexplained = source.count("\n"), largest["unexplained_file_lines"]
        if lines > largest["file_lines"]:
            messages.append(f"{name}: {lines} lines, {largest['file_lines']} at most")
        elif lines > unexplained and not ((reason := LONG_FILE.match(source)) and int(reason[2]) == unexplained):
            messages.append(f"{name}: {lines} lines; say why in a comment '# Over {unexplained} lines: ...'")
    counts: Counter[str] = Counter()
    for name, node in tree.nodes(ast.ClassDef):
        counts[node.name] = max(counts[node.name], count := len(attributes_of(node)))
        if count > (allowed := attributes.get(node.name, largest["attributes"])):
            messages.append(f"{name}:{node.lineno}: {node.name} has {count} attributes, {allowed} at most")
    for name, allowed in attributes.items():
        if counts[name] < allowed:
            messages.append(f"[attributes] allows {name} {allowed} attributes, and it has {counts[name]}: lower it")
    return messages


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Names that a class declares with a type, or its methods assign on ``self``; not the columns of a record."""
    words = [ast.unparse(item) for item in (*node.decorator_list, *node.bases)]
    is_record = any("frozen=True" in word or word.split(".")[-1] in _RECORDS for word in words)
    names = {
        item.target.id
        for item in node.body
        if not is_record and isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for method in node.body:
        if isinstance(method, Function):
            names |= {
                item.attr
                for item in ast.walk(method)
                if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
                and isinstance(item.value, ast.Name) and item.value.id == "self"
            }  # fmt: skip
    return names


def main() -> int:
    for scope in ("dlrover", "tests", "benchmarks", "examples"):
        measures = Tree(REPOSITORY / scope).measure()
        values = (f"{name} {sum(place.amount for place in places)}" for name, places in measures.items())
        sys.stdout.write(f"{scope}: {', '.join(values)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
