# SPDX-License-Identifier: Apache-2.0
"""Bugs to be put into the package, and the tests that must see them, from the TOML files of this folder.

A table has the name of a file below ``dlrover/python/rl``; ``tests`` are the files of ``tests/unit`` that are run
against a bug in it, and each other entry is a bug: its name, the text that it replaces, and the new one.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bug:
    """``old``, which is once in ``file``, becomes ``new``."""

    file: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        if source.count(self.old) != 1:
            raise LookupError(f"{self.file} holds {source.count(self.old)} times: {self.old!r}")
        return source.replace(self.old, self.new)


_TABLES = [tomllib.loads(page.read_text(encoding="utf-8")) for page in sorted(Path(__file__).parent.glob("*.toml"))]
_FILES = {file: table for tables in _TABLES for file, table in tables.items()}
TESTS: dict[str, list[str]] = {file: table.pop("tests") for file, table in _FILES.items()}
BUGS = {name: Bug(file, *texts) for file, table in _FILES.items() for name, texts in table.items()}
