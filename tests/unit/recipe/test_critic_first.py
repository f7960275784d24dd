# SPDX-License-Identifier: Apache-2.0
"""A critic that learns before the actor does."""

import pytest

from dlrover.python.rl.environment.sandbox.confinement import sandbox_level
from tests.support.policy_jobs import finished, policy_job

MODEL = "model/model.safetensors"


@pytest.mark.feature(125)
def test_the_actor_is_as_it_was_while_the_critic_is_warmed_up(tmp_path):
    critic = {"optimizer": {"lr": 3e-3}, "warmup_steps": 3}
    out, rows = finished(policy_job(tmp_path, "ppo", out="frozen", steps=3, critic=critic))
    assert rows[2]["critic/value_error"] < rows[0]["critic/value_error"]
    assert all(row[f"sandbox/{sandbox_level()}"] == 1 for row in rows)
    assert (out / MODEL).read_bytes() == (tmp_path / MODEL).read_bytes()
    out, rows = finished(policy_job(tmp_path, "ppo", steps=4, critic=critic))
    assert ["loss" in row for row in rows] == [False] * 3 + [True]
    assert (out / MODEL).read_bytes() != (tmp_path / MODEL).read_bytes()
