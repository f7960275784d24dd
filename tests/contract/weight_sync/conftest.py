# SPDX-License-Identifier: Apache-2.0
"""Transports that are closed at the end, and a tiny model."""

from contextlib import ExitStack, closing

import pytest
import torch

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.sync_sides import Wire


@pytest.fixture
def connect():
    """Makes wires."""
    with ExitStack() as stack:
        yield lambda kind, **options: stack.enter_context(closing(Wire(kind, **options)))


@pytest.fixture
def wire(kind, connect):
    return connect(kind)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=64)
