"""The rollout engines, one after the other; an engine whose package is absent is skipped."""

import pytest
import torch
from rollouts import KINDS, Reference

from dlrover.python.rl.recipe.tiny import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=KINDS, ids=lambda kind: kind.label)
def kind(request):
    if request.param.missing:
        pytest.skip(f"'{request.param.package}' is not installed here")
    return request.param


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)


@pytest.fixture(scope="session")
def reference(model_path):
    return Reference(model_path)


@pytest.fixture(scope="session")
def made(kind, model_path):
    engine = kind.make(model_path)
    yield engine
    engine.close()


@pytest.fixture
def engine(made, reference):
    """Idle, on its device, with the model's weights as version 0."""
    made.abort()
    made.cuda()
    made.receive(reference.snapshot(0), rewind=True)
    return made
