# SPDX-License-Identifier: Apache-2.0
"""A tiny model, and the package's logger as it was."""

import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=2, max_positions=96)


@pytest.fixture(autouse=True)
def _logger_kept(kept_logger):
    pass
