# SPDX-License-Identifier: Apache-2.0
"""Nodes that go and come under a run: fewer rollouts for a time, the same bits in the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Return the observations of a scene of ``nodes_stage``."""

    def play(name):
        folder = tmp_path_factory.mktemp(name)
        command = [sys.executable, str(Path(__file__).parent / "nodes_stage.py"), name, str(folder)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=350,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stdout + done.stderr[-6000:]
        return json.loads(
            next(line for line in done.stdout.splitlines() if line.startswith("{"))
        )  # Ray writes there, too

    return play


@pytest.fixture(scope="module")
def expected(scene):
    return scene("undisturbed")["model"]


def test_rollouts_shrink_and_grow_with_the_nodes(scene, expected):
    seen = scene("fewer")
    assert seen["phase"] == "finished", seen["reason"]
    assert seen["sizes"] == [3, 2, 3]
    assert "Unplaced" in seen["events"] and "Resized" in seen["events"] and "Failed" not in seen["events"]
    assert seen["model"] == expected


def test_node_announcing_its_end_is_left_without_charge(scene, expected):
    seen = scene("told")
    assert seen["phase"] == "finished", seen["reason"]
    assert (seen["before"], seen["after"]) == (1, [0, 1])
    assert "NodeLost" in seen["events"] and "Failed" not in seen["events"]
    assert seen["model"] == expected


@pytest.fixture(scope="module")
def expected_apart(scene):
    return scene("apart")["model"]


def test_node_lost_with_its_memory_costs_no_committed_step(scene, expected_apart):
    seen = scene("apart_without_one")
    assert seen["phase"] == "finished", seen["reason"]
    assert seen["model"] == expected_apart
    assert seen["steps"] == sorted(seen["steps"]), "none but the open step, which was reported, was done again"
    assert "continuing from its copy" not in seen["log"]


def test_two_lost_neighbours_cost_the_steps_since_the_last_copy(scene, expected_apart):
    seen = scene("apart_without_two_neighbours")
    assert seen["phase"] == "finished", seen["reason"]
    assert seen["model"] == expected_apart
    assert "no commit later than step 20 is left: continuing from its copy" in seen["log"]
