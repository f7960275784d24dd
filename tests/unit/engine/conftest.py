# SPDX-License-Identifier: Apache-2.0
"""The model of most tests of engines."""

import pytest
import torch

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A model with a vocabulary of 259, which no two ranks can share equally."""
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)
