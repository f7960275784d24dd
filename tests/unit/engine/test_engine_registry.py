"""Engines by name."""

from collections import OrderedDict

import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.registry import ROLLOUT, engine_class, register


def test_013_a_users_class_is_found_under_the_name_it_was_given():
    table = dict(ROLLOUT)
    register(table, "toy", "collections:OrderedDict")
    register(table, "toy", "collections:OrderedDict")
    assert engine_class(table, "toy") is OrderedDict


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(EngineError, match="'torch' is dlrover"):
        register(dict(ROLLOUT), "torch", "collections:OrderedDict")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(EngineError, match="no engine is called 'vlm'; did you mean 'vllm'"):
        engine_class(dict(ROLLOUT), "vlm")
