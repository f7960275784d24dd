"""Engines whose backend is not installed say which extra brings it."""

from importlib.util import find_spec

import pytest

from dlrover.python.rl.common.errors import MissingExtra
from dlrover.python.rl.engine.registry import TRAIN, engine_class


@pytest.mark.parametrize(("name", "package"), [("deepspeed", "deepspeed"), ("megatron", "megatron-core")])
def test_014_a_backend_that_is_missing_is_named_with_its_extra(name, package):
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(MissingExtra, match=rf"'{package}' is not installed: pip install 'dlrover-rl\[{name}\]'"):
        engine_class(TRAIN, name)
