# SPDX-License-Identifier: Apache-2.0
"""Tests that need a backend or a device are listed for contributors, and selected where it is."""

import re
from pathlib import Path

from tests.needs import NEEDS

ROOT = Path(__file__).parents[2]
OF_A_FILE = re.compile(r'^pytestmark = [^@]*?needs\("([\w ]+)"\)', re.MULTILINE)


def test_the_page_for_contributors_lists_every_need():
    page = (ROOT / "docs/contributing/tests.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w ]+)` \| \d+ \|", page, re.MULTILINE)) == set(NEEDS)


def test_a_contract_file_is_named_after_its_backend():
    """``make test-backends`` selects by name."""
    files = sorted((ROOT / "tests/contract").rglob("test_*.py"))
    needs = {file: match[1] for file in files if (match := OF_A_FILE.search(file.read_text(encoding="utf-8")))}
    assert len(needs) >= 3
    assert [file.name for file, need in needs.items() if need not in file.name] == []
