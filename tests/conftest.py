# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests, which may be coroutine functions."""

import gc
import logging
import os
import signal
from collections import Counter

import pytest

from tests.needs import absent_need
from tests.support.async_tests import pytest_pyfunc_call  # noqa: F401

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


ABSENT = pytest.StashKey[dict[str, int]]()
"""The tests that were not collected, by what they need."""


def pytest_addoption(parser):
    help_text = "run the tests that show this feature of docs/contributing/features.md"
    parser.addoption("--feature", type=int, help=help_text)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    number = config.getoption("--feature")
    if number is not None:
        items[:] = [item for item in items if number in _features_of(item)]
    needs = {item: absent_need(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if needs[item]])
    items[:] = [item for item in items if not needs[item]]
    config.stash[ABSENT] = dict(Counter(filter(None, needs.values())))
    if hasattr(config, "workeroutput"):
        config.workeroutput["absent"] = config.stash[ABSENT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take the counts of one worker of pytest-xdist: all workers collect the same tests."""
    if hasattr(node, "workeroutput"):
        node.config.stash[ABSENT] = node.workeroutput.get("absent", {})


def pytest_terminal_summary(terminalreporter, config):
    if counts := config.stash.get(ABSENT, {}):
        text = ", ".join(f"{count} need {need}" for need, count in sorted(counts.items()))
        terminalreporter.write_line(f"not run, see docs/contributing/tests.md: {text}")


def _features_of(item):
    return {number for mark in item.iter_markers("feature") for number in mark.args}


def pytest_collection_finish():
    """Keep all imports: engines that give memory back need not look through all of it for cycles, each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ray_session():
    """One Ray cluster on loopback for all tests that need one; job names keep them apart."""
    from dlrover.python.rl.runtime.ray.cluster.cluster import ray_cluster

    with ray_cluster(None, {"cpu": 24.0}, log_to_driver=False):
        yield


@pytest.fixture
def kept_logger():
    """The package's logger gets its handlers and its level back, which commands set."""
    logger = logging.getLogger("dlrover")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
