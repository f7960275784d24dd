# SPDX-License-Identifier: Apache-2.0
"""Every code block and table of the integration guide. Where it contradicts itself, the table of names wins."""

from dataclasses import replace
from pathlib import Path

import pytest

from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_here, run_on_ray
from dlrover.python.rl.trainer import trainer as trainer_module
from dlrover.python.rl.trainer import workload as workload_module
from dlrover.python.rl.trainer.workload import DEFAULT_OPTIONS, trainer_invocation


def guide_job(tmp_path):
    builder = JobBuilder().device_type("CPU").device_per_node(4).config({"start": 10})
    builder.trainer("tests.examples.guide_code", "UserTrainer").actor(
        "tests.examples.guide_code", "UserActorModel"
    ).total(4)
    builder.rollout("tests.examples.guide_code", "UserRolloutModel").total(2)
    builder.with_collocation("actor", "rollout")
    spec = builder.spec("guide", (str(Path(__file__).parent),))
    return replace(spec, job_dir=tmp_path)


def test_blocks_of_the_guide_run_twice_in_one_folder(tmp_path):
    for name in ("first", "second"):
        status = run_here(check_job(guide_job(tmp_path / name), local=True))
        assert status.phase is Phase.FINISHED, status.cause


@pytest.mark.slow
@pytest.mark.ray
def test_blocks_of_the_guide_run_on_ray(tmp_path, ray_session):
    status = run_on_ray(check_job(guide_job(tmp_path)), connected=True)
    assert status.phase is Phase.FINISHED, status.cause


def test_module_paths_of_the_guide_exist():
    assert workload_module.BaseWorkload is trainer_module.BaseWorkload
    assert workload_module.BaseWorkload.__module__ == "dlrover.python.rl.trainer.workload"
    assert trainer_module.BaseTrainer.__module__ == "dlrover.python.rl.trainer.trainer"


def test_trainer_invocation_has_the_defaults_of_the_table():
    table = {
        "blocking": True, "is_async": False, "timeout": 10, "target": "ALL", "auto_shard": True, "pre_func": None,
        "post_func": None,
    }  # fmt: skip
    assert {name: getattr(DEFAULT_OPTIONS, name) for name in table} == table


def test_trainer_invocation_takes_pre_func_not_pre_function():
    with pytest.raises(TypeError, match="no option 'pre_function'; did you mean 'pre_func'"):
        trainer_invocation(is_async=True, timeout=30, pre_function=abs)


@pytest.mark.parametrize("timeout", [0, -1, "10", True])
def test_timeout_of_trainer_invocation_is_above_zero(timeout):
    with pytest.raises((TypeError, ValueError), match="timeout"):
        trainer_invocation(timeout=timeout)
