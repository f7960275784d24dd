# SPDX-License-Identifier: Apache-2.0
"""The examples of other libraries read or refuse each option; their guides count options of the libraries' scripts.

``shipped_options.json`` has, by name, in how many scripts of a library an option is given; for verl in the
scripts of ``main_ppo`` for Megatron.
"""

import json
from collections import Counter

import pytest

from tests.support.commands import ROOT, run
from tests.support.other_environments import engine_python, needs_environments
from tests.support.run_files import read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHIPPED = read_json(ROOT / "tests/slow/shipped_options.json")
ROWS = {"read": "read", "in the job file": "given by the job file", "refused": "refused", "unknown": "not in 0.11.2"}
LIBRARIES = [pytest.param(library, marks=needs_environments(library)) for library in SHIPPED]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_option_is_read_or_refused(library):
    script = [engine_python(library), "tests/slow/option_reads.py", library]
    fates = json.loads(run(ROOT, *script, HF_HUB_OFFLINE="1").stdout.splitlines()[-1])
    assert [name for name, fate in fates.items() if fate == "ignored"] == []
    assert len(fates) > 150
    options = SHIPPED[library]["options"]
    names = Counter(fates.get(name, "unknown") for name in options)
    lines = Counter(fates.get(name, "unknown") for name, count in options.items() for _ in range(count))
    table = [f"| {ROWS[fate]} | {names[fate]} | {lines[fate]:,} |" for fate in ROWS if names[fate]]
    assert "\n".join(table) in (ROOT / f"docs/guides/from-{library}.md").read_text()
