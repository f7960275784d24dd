# SPDX-License-Identifier: Apache-2.0
"""The model of the contract, its five plain steps, and the folders of its checkpoints."""

import pytest
import torch

from tests.support.plain_engine import plain_run, write_model
from tests.support.processes import run


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("contract") / "T")


@pytest.fixture(scope="session")
def expected(model_path):
    """The reports of a plain loop's five steps, and the weights after them."""
    return plain_run(model_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def ranks_of(model_path, folder):
    """A function that returns each rank's result of ``work`` on a case, done once for a module in
    ``folder / NAME OF WORK / NAME OF CASE``."""
    results = {}

    def of(work, case, *arguments):
        key = work, case.name
        if key not in results:
            (folder / work.__name__).mkdir(exist_ok=True)
            path = folder / work.__name__ / case.name
            results[key] = run(case.world_size, work, case, model_path, path, *arguments)
        return results[key]

    return of
