"""The same job file in one process and on Ray, whatever the number of rollout workers."""

import pytest
from recipe_jobs import grpo_job, samples

from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_here, run_on_ray

pytestmark = pytest.mark.ray


def test_the_samples_of_the_first_step_are_the_same_everywhere(tmp_path, ray_session):
    seen = {}
    for name, rollouts, local in (("local", 2, True), ("ray-1", 1, False), ("ray-2", 2, False)):
        job = grpo_job(tmp_path, f"name={name}", f"job_dir={tmp_path / name}", f"workload.rollout.num={rollouts}")
        status = run_here(check_job(job, local=True)) if local else run_on_ray(check_job(job), connected=True)
        assert status.phase is Phase.FINISHED, status
        seen[name] = samples(tmp_path / name)
    assert len(seen["local"]) == 4 * 8
    assert seen["local"] == seen["ray-1"] == seen["ray-2"]


def test_two_actor_ranks_end_in_the_weights_of_one(tmp_path, ray_session):
    import torch
    from transformers import AutoModelForCausalLM

    ends = {}
    for name, actors in (("one", 1), ("two", 2)):
        overrides = [f"name={name}", f"job_dir={tmp_path / name}", f"workload.actor.num={actors}", "steps=2"]
        job = grpo_job(
            tmp_path,
            *overrides,
            f"workload_group.0={{actor: {actors}}}",
            "algorithm.kl_coef=0",
            "trainer.device_per_node=8",
        )
        assert run_on_ray(check_job(job), connected=True).phase is Phase.FINISHED
        ends[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict()
    for name, tensor in ends["one"].items():
        torch.testing.assert_close(tensor, ends["two"][name], atol=1e-5, rtol=0)
