# SPDX-License-Identifier: Apache-2.0
"""Adapters of other libraries are small, and use what those libraries publish."""

import ast
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 300
ADAPTERS = {"trl": "trl", "verl": "verl", "openrlhf": "openrlhf"}
"""Folder to the library's package."""


def sources(folder):
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((EXAMPLES / folder).rglob("*.py"))}


@pytest.mark.parametrize("folder", ADAPTERS)
def test_an_adapter_is_small(folder):
    lines = [line for path in sources(folder) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert 0 < len(lines) <= MOST_LINES


@pytest.mark.parametrize(("folder", "package"), ADAPTERS.items())
def test_an_adapter_imports_public_names_only(folder, package):
    imported = []
    for tree in sources(folder).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
                imported += [f"{node.module}.{alias.name}" for alias in node.names]
            if isinstance(node, ast.Import):
                imported += [alias.name for alias in node.names if alias.name.partition(".")[0] == package]
    assert imported
    assert [name for name in imported if any(part.startswith("_") for part in name.split("."))] == []
