# SPDX-License-Identifier: Apache-2.0
"""Which trained workloads keep their processes when another rank is lost."""

import pytest

from dlrover.python.rl.recipe.workloads import ActorWorkload


@pytest.mark.parametrize(
    ("engine", "stays"),
    [
        ({"device": "cpu"}, True),
        ({"device": "cuda"}, False),
        ({"device": "cuda", "train_options": {"keep_processes": True}}, True),
        ({"device": "cuda", "train_options": {"keep_processes": False}}, False),
        ({"device": "cpu", "train": "deepspeed"}, False),
    ],
)
def test_keeps_process_on_devices_needs_the_option(engine, stays):
    assert ActorWorkload.keeps_process({"engine": {"train": "fsdp2", **engine}}) is stays
