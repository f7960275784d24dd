# SPDX-License-Identifier: Apache-2.0
"""The original's builder methods."""

import pytest
from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import CallError, InvalidJob
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.spec import RUNS, CheckpointSpec, LivenessSpec, RestartSpec, TrainerSpec, WorkloadSpec


def minimal():
    return JobBuilder().trainer("m", "T").actor("m", "A")


def test_a_whole_job():
    job = (
        JobBuilder()
        .node_num(2)
        .device_per_node(4)
        .device_type("CPU")
        .config({"lr": 1e-6, "nothing": None, "path": "a\\b"})
        .global_env({"A": "1"})
        .global_env({"B": "2"})
        .restart_limits(job_max_restart=3, workload_max_restart={"rollout": 5})
        .trainer("mod", "Trainer")
        .actor("mod", "Actor")
        .total(4)
        .per_node(2)
        .resource(cpu=0.5, memory=256)
        .env({"C": "3"})
        .rollout("mod", "Rollout")
        .total(2)
        .enable_ray_auto_visible_device()
        .reference("mod", "Reference")
        .reward("mod", "Reward")
        .critic("mod", "Critic")
        .role("judge", "mod", "Judge")
        .spec("my-job", ("here",))
    )
    assert job.trainer == TrainerSpec("mod", "Trainer", 2, "CPU", 4)
    assert list(job.workloads) == ["ACTOR", "ROLLOUT", "REFERENCE", "REWARD", "CRITIC", "JUDGE"]
    assert job.workloads["ACTOR"] == WorkloadSpec("mod", "Actor", 4, 2, {"cpu": 0.5, "memory": 256.0}, {"C": "3"})
    assert job.workloads["ROLLOUT"].env == {"DLROVER_RL_RAY_VISIBLE_DEVICES": "1"}
    assert job.env == {"A": "1", "B": "2"}
    assert (job.restart.job_max_restart, job.restart.workload_max_restart) == (3, {"rollout": 5})
    assert job.config == {"lr": 1e-6, "nothing": None, "path": "a\\b"}
    assert (job.name, job.job_dir, job.search_path) == ("my-job", RUNS, ("here",))
    assert load_job_text(job_to_yaml(job), "my-job", search_path=("here",)) == job


def test_a_dictconfig_is_taken_as_it_is():
    config = OmegaConf.create({"a": 1, "b": "${.a}"})
    assert minimal().config(config).spec("j").config.b == 1


def test_references_of_a_dictconfig_are_meant_within_it_or_else_in_the_job():
    config = OmegaConf.create(
        {"lr": 1e-3, "critic_lr": "${lr}", "name": "mine", "out": "runs/${name}", "text": r"\${lr}"}
    )
    made = minimal().config(config).spec("j").config
    assert (made.critic_lr, made.out, made.text) == (1e-3, "runs/mine", "${lr}")
    made = minimal().config(OmegaConf.create({"name": None, "of": "${name}"})).spec("j").config
    assert made.of is None
    made = minimal().config(OmegaConf.create({"of": "${name}"})).spec("j").config
    assert made.of == "j"


def test_collocation_takes_the_members_of_each_node():
    job = minimal().total(4).per_node(2).rollout("m", "R").total(2).with_collocation("ACTOR", "rollout").spec("j")
    assert job.groups == ({"ACTOR": 2, "ROLLOUT": 2},)
    assert minimal().total(2).critic("m", "C").total(2).with_collocation_all().spec("j").groups == (
        {"ACTOR": 2, "CRITIC": 2},
    )


def test_how_a_job_recovers():
    job = (
        minimal()
        .standby(2)
        .hang_after(30)
        .rollout("m", "R")
        .standby()
        .restart_limits(job_max_restart=1, window_s=60, node_max_failures=2)
        .checkpoint(every=5)
        .checkpoint(keep=3, resume="latest", commit_to="job_dir")
        .liveness(beat_s=0.1, lease_s=9)
        .trainer_hang_after(90)
        .spec("j", ("here",))
    )
    assert [(spec.standby, spec.hang_after_s) for spec in job.workloads.values()] == [(2, 30.0), (1, 600.0)]
    assert job.trainer.hang_after_s == 90.0
    assert job.restart == RestartSpec(job_max_restart=1, window_s=60.0, node_max_failures=2)
    assert job.checkpoint == CheckpointSpec(5, 3, "latest", "job_dir")
    assert job.liveness == LivenessSpec(0.1, 9.0)
    assert load_job_text(job_to_yaml(job), "j", search_path=("here",)) == job


@pytest.mark.parametrize(
    "call", ["total", "per_node", "env", "resource", "enable_ray_auto_visible_device", "standby", "hang_after"]
)
def test_role_calls_need_a_role(call):
    builder = JobBuilder()
    arguments = {"total": (1,), "per_node": (1,), "env": ({},), "hang_after": (1,)}.get(call, ())
    with pytest.raises(CallError, match=r"applies to a role: call actor\(\), rollout\(\), ... or role\(\) first"):
        getattr(builder, call)(*arguments)


def test_everything_wrong_is_said_at_once():
    builder = (
        JobBuilder()
        .node_num(0)
        .device_type("TPU")
        .restart_limits(job_max_restarts=3)
        .checkpoint(evry=1)
        .liveness(beat_s=0)
        .rollout("m", "R")
        .total(-1)
        .standby(-1)
        .with_collocation("actr")
    )
    with pytest.raises(InvalidJob) as caught:
        builder.spec("My Job")
    assert {problem.where for problem in caught.value.errors} == {
        "trainer.module",
        "trainer.class",
        "trainer.node_number",
        "trainer.device_type",
        "restart.job_max_restarts",
        "checkpoint.evry",
        "liveness.beat_s",
        "workload.rollout.standby",
        "workload",
        "workload.rollout.num",
        "workload_group.0.actr",
        "name",
    }


def test_a_role_named_again_is_the_same_role():
    job = minimal().total(3).rollout("m", "R").actor("m2", "A2").env({"A": "1"}).spec("j")
    assert job.workloads["ACTOR"] == WorkloadSpec("m2", "A2", 3, None, {}, {"A": "1"})
