# SPDX-License-Identifier: Apache-2.0
"""The rollout engines, one after the other; an engine whose package or device is absent is skipped."""

import pytest
import torch
from rollouts import KINDS, Reference

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def _as_parameter(kind):
    """vLLM warns of what it uses itself; the server that stands in for SGLang reads everything anew for each token."""
    marks = {"vllm": [pytest.mark.filterwarnings("default")], "sglang": [pytest.mark.slow]}
    return pytest.param(kind, id=kind.label, marks=marks.get(kind.name, []))


@pytest.fixture(scope="session", params=[_as_parameter(kind) for kind in KINDS])
def kind(request):
    if request.param.missing:
        pytest.skip(request.param.missing)
    return request.param


@pytest.fixture(scope="session")
def model_path(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "T"
    return write_tiny_model(path, hidden=kind.hidden, layers=2, max_positions=128)


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
