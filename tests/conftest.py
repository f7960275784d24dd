# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

try:
    from hypothesis import settings
except ImportError:  # the contract suites of the engines do without
    settings = None

# Before anything imports numpy or torch: several processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# As from a terminal, here and in the processes that tests start: shells let background jobs ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of what else the machine does.
if settings is not None:
    settings.register_profile("here", deadline=None, max_examples=50)
    settings.load_profile("here")


def pytest_addoption(parser):
    parser.addoption("--feature", type=int, help="run the tests that show this feature of docs/features.md")


def pytest_collection_modifyitems(config, items):
    number = config.getoption("--feature")
    if number is not None:
        items[:] = [item for item in items if number in _features_of(item)]


def _features_of(item):
    return {number for mark in item.iter_markers("feature") for number in mark.args}


def pytest_collection_finish():
    """What is imported stays. Engines that give memory back need not look through all of it for cycles, each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ray_session():
    """One Ray cluster on loopback for all tests that need one; job names keep them apart."""
    from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster

    with ray_cluster(None, {"cpu": 24.0}, log_to_driver=False):
        yield


@pytest.fixture(autouse=True, scope="session")
def _helper_modules_are_importable():
    """Jobs of the tests name their classes by module: those beside the tests."""
    here = Path(__file__).parent
    sys.path[:0] = [str(here / folder) for folder in ("contract", "ray", "examples")]
