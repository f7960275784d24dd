# SPDX-License-Identifier: Apache-2.0
"""Engines whose backend is not installed say which extra brings it."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import MissingExtra
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_class

ROOT = Path(__file__).parents[3]


@pytest.mark.feature(14)
@pytest.mark.parametrize(("name", "package"), [("deepspeed", "deepspeed"), ("megatron", "megatron-core")])
def test_a_backend_that_is_missing_is_named_with_its_extra(name, package):
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(MissingExtra, match=rf"'{package}' is not installed: pip install 'dlrover-rl\[{name}\]'"):
        engine_class(TRAIN_ENGINES, name)


@pytest.mark.feature(14)
def test_every_extra_that_is_named_exists():
    """In messages, in the README and in the documentation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "dlrover").rglob("*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    lists = [names for text in texts for names in re.findall(r"dlrover-rl\[([\w,-]+)\]", text)]
    named = {name for names in lists for name in names.split(",")}
    named |= {name for text in texts for name in re.findall(r'MissingExtra\("[\w-]+", "([\w-]+)"\)', text)}
    assert {"lora", "deepspeed", "megatron", "vllm"} <= named
    assert named <= project["optional-dependencies"].keys()
