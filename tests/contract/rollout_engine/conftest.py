# SPDX-License-Identifier: Apache-2.0
"""The rollout engines, one after the other."""

import pytest
import torch

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.rollout_cases import KINDS, Reference, as_parameter


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=map(as_parameter, KINDS))
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def model_path(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "T"
    return write_tiny_model(path, hidden=kind.hidden, layers=2, max_positions=128)


@pytest.fixture(scope="session")
def reference(model_path):
    return Reference(model_path)


@pytest.fixture(scope="session")
def shared_engine(kind, model_path):
    engine = kind.make(model_path)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine, reference):
    """Idle, on its device, with the model's weights as version 0."""
    shared_engine.abort()
    shared_engine.cuda()
    shared_engine.receive(reference.snapshot(0), rewind=True)
    return shared_engine
