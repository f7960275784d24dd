# SPDX-License-Identifier: Apache-2.0
"""The pages of ``docs/api`` draw the line: what guides and examples import is on one, and all names there exist."""

import ast
import pkgutil
import re
import textwrap
from functools import cache
from pathlib import Path

import pytest

import dlrover.rl
from dlrover.python.rl.common.errors import MissingExtra

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bdlrover\.(?:python\.)?rl(?:\.\w+)+")
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
NAMES = {page.stem: set(NAME.findall(page.read_text(encoding="utf-8"))) for page in (ROOT / "docs/api").glob("*.md")}
PUBLIC = set().union(*NAMES.values())


@cache
def target_of(name):
    """The object of a dotted name; the name itself where its module needs a backend that is not installed."""
    try:
        return pkgutil.resolve_name(name)
    except MissingExtra:
        return name


def shown_code():
    """Path and text of each piece of Python that a user is shown."""
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.*"), *(ROOT / "examples").rglob("*.py")]:
        if path.suffix == ".py":
            yield path, path.read_text(encoding="utf-8")
        elif path.suffix == ".md":
            yield from ((path, textwrap.dedent(block)) for block in BLOCK.findall(path.read_text(encoding="utf-8")))


def imported_names(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and NAME.match(node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("page", sorted(NAMES))
def test_each_name_on_an_api_page_exists(page):
    for name in NAMES[page]:
        target_of(name)


def test_the_api_pages_have_the_whole_front_door():
    names = PUBLIC | {name.rpartition(".")[0] for name in PUBLIC}  # a module is there by the names in it
    assert [name for name in dlrover.rl.__all__ if f"dlrover.rl.{name}" not in names] == []


def test_guides_and_examples_import_public_names_only():
    public = {id(target_of(name)) for name in PUBLIC}
    places = {name: str(path.relative_to(ROOT)) for path, source in shown_code() for name in imported_names(source)}
    assert len(places) > 20
    names = [name for name in places if name.rpartition(".")[0] not in PUBLIC]
    assert {name: places[name] for name in names if id(target_of(name)) not in public} == {}
