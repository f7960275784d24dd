# SPDX-License-Identifier: Apache-2.0
"""The names of metrics in the glossary ``docs/reference/metrics.md``."""

import re
from functools import cache
from pathlib import Path

GLOSSARY = Path(__file__).parents[2] / "docs/reference/metrics.md"
_NAMED = re.compile(r"^\| (.*?) \|", re.MULTILINE)


@cache
def documented():
    """The first cells of the tables that explain metrics, as patterns; ``<function>`` is any name."""
    explained = GLOSSARY.read_text(encoding="utf-8").partition("## Names in other libraries")[0]
    names = [name for cell in _NAMED.findall(explained) for name in re.findall(r"`([^`]+)`", cell)]
    return {name: re.compile(re.sub("<[a-z]+>", ".+", name)) for name in names}


def undocumented(rows):
    """Names of logged metrics that the glossary lacks."""
    names = {name for row in rows for name in row}
    return sorted(name for name in names if not any(each.fullmatch(name) for each in documented().values()))
