# SPDX-License-Identifier: Apache-2.0
"""The layout of a job file: every field's rule, the way back to a file, and the builder."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import CallError, ConfigError, InvalidJob
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config import spec
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.layout import job_from_mapping, job_to_yaml
from dlrover.python.rl.config.load import load_job_text


def layout(**changes):
    """A valid layout with some parts changed; ``None`` takes one away."""
    parts = {
        "trainer": {"module": "m", "class": "T"},
        "workload": {"actor": {"module": "m", "class": "A", "num": 4}, "critic": {"module": "m", "class": "C"}},
        **changes,
    }
    return {name: part for name, part in parts.items() if part is not None}


def read(**changes):
    return job_from_mapping(OmegaConf.create(layout(**changes)), "default")


def problems_of(**changes):
    with pytest.raises(InvalidJob) as caught:
        read(**changes)
    return {problem.where: problem.what for problem in caught.value.errors}


def actor(**fields):
    return {"actor": {"module": "m", "class": "A", **fields}}


def trainer(**fields):
    return {"module": "m", "class": "T", **fields}


def test_layout_defaults():
    job = read(workload=actor())
    assert job.trainer == spec.TrainerSpec("m", "T", 1, "GPU", 8, (), "USER_DEFINED")
    assert job.workloads == {RLRoleType.ACTOR: spec.WorkloadSpec("m", "A", 1, None, {}, {})}
    assert (job.name, job.job_dir) == ("default", spec.RUNS)
    with pytest.raises(InvalidJob, match="'Bad Name' is not a job name"):
        job_from_mapping(OmegaConf.create(layout()), "Bad Name")
    assert (job.groups, job.env, job.config) == ((), {}, {})
    assert job.preferred_ports("ACTOR") == ()
    assert read(workload_group=[{"actor": 2}]).collocation_of("ACTOR") == ()
    assert job.restart == spec.RestartSpec(10, 10, {}, backoff_s=1.0, window_s=3600.0, node_max_failures=3)
    assert job.checkpoint == spec.CheckpointSpec(every=10, keep=2, resume="never")
    assert job.liveness == spec.LivenessSpec(beat_s=0.5, lease_s=60.0, start_timeout_s=300.0)
    assert job.master == spec.MasterSpec(cpu=0.0, memory=0.0, max_restart=-1)
    assert job.trainer.hang_after_s == 3600.0
    assert job.workloads["ACTOR"].hang_after_s == 600.0
    assert (job.placement_timeout_s, job.scheduling_strategy) == (120.0, "AUTO")


def test_layout_of_a_whole_job():
    nodes = {"node_number": 2, "device_per_node": 4, "torch_master_port": [2001, 2002]}
    limits = {"job_max_restart": 0, "backoff_s": 0.5, "window_s": 60, "node_max_failures": 1}
    job = read(
        name="my-job",
        job_dir="/tmp/out",
        trainer=trainer(device_type="CPU", hang_after_s=90, **nodes),
        workload={
            **actor(num=2, per_node=1, resource={"cpu": 2, "mem": 512}, env={"A": "1"}),
            "Judge": {"module": "j", "class": "J", "num": 2, "standby": 1, "hang_after_s": 30},
        },
        workload_group=[{"ACTOR": 1, "judge": 1}],
        env={"B": "2"},
        restart={**limits, "workload_max_restart": {"judge": 5}},
        checkpoint={"every": 5, "keep": 3, "resume": "latest"},
        liveness={"beat_s": 0.1, "lease_s": 5, "start_timeout_s": 20},
        master={"cpu": 1, "memory": 256, "max_restart": 0},
        scheduling_strategy="SIMPLE",
    )
    assert job.trainer == spec.TrainerSpec("m", "T", 2, "CPU", 4, (2001, 2002), hang_after_s=90.0)
    assert job.workloads["ACTOR"] == spec.WorkloadSpec("m", "A", 2, 1, {"cpu": 2.0, "memory": 512.0}, {"A": "1"})
    assert job.groups == ({"ACTOR": 1, "JUDGE": 1},)
    assert job.collocation_of("JUDGE") == ("ACTOR", "JUDGE")
    assert list(job.members()) == [("ACTOR", 0), ("ACTOR", 1), ("JUDGE", 0), ("JUDGE", 1)]
    assert [job.preferred_ports(role) for role in job.workloads] == [(2001,), (2002,)]
    assert job.workloads["JUDGE"] == spec.WorkloadSpec("j", "J", 2, standby=1, hang_after_s=30.0)
    assert job.restart == spec.RestartSpec(0, 10, {"judge": 5}, 0.5, 60.0, 1)
    assert job.checkpoint == spec.CheckpointSpec(5, 3, "latest")
    assert job.liveness == spec.LivenessSpec(0.1, 5.0, 20.0)
    assert job.master == spec.MasterSpec(1.0, 256.0, 0)
    assert load_job_text(job_to_yaml(job), job.name, search_path=()) == job
    assert job.job_dir == Path("/tmp/out")


@pytest.mark.parametrize(
    ("changes", "where", "fault"),
    [
        ({"trainer": None}, "trainer", "is required"),
        ({"workload": None}, "workload", "is required"),
        ({"trainer": {"class": "T"}}, "trainer.module", "is required"),
        ({"trainer": trainer(device_type="TPU")}, "trainer.device_type", "'CPU' or 'GPU', got 'TPU'"),
        ({"trainer": trainer(torch_master_port=[80])}, "trainer.torch_master_port.0", "greater than 1000, got 80"),
        ({"trainer": trainer(class_name="x")}, "trainer.class_name", "unknown key 'class_name'; did you mean 'class'?"),
        ({"trainer": trainer(nodes=1)}, "trainer.nodes", "unknown key 'nodes'; known: class, device_per_node"),
        ({"trainer": 3}, "trainer", "must be a mapping with module, class, "),
        ({"workload": {}}, "workload", "the role 'actor' is required"),
        ({"workload": {"actr": actor()["actor"]}}, "workload", "'actor' is required; did you mean 'actr'?"),
        ({"workload": {**actor(), "2nd": {"module": "m", "class": "A"}}}, "workload.2nd", "is not a role name"),
        ({"workload": {**actor(), "ACTOR": {"module": "m", "class": "A"}}}, "workload.ACTOR", "'actor' occurs twice"),
        ({"workload": actor(resource={"gpu": math.inf})}, "workload.actor.resource.gpu", "less than inf, got inf"),
        ({"workload": actor(env={"A": 1})}, "workload.actor.env.A", "valid string, got 1"),
        ({"workload_group": [{"actr": 1}]}, "workload_group.0.actr", "no role 'actr'; did you mean 'actor'?"),
        ({"workload_group": [{"actor": 3}]}, "workload_group.0.actor", "4 workers cannot form groups of 3"),
        ({"workload_group": [{"actor": 1}, {"Actor": 1}]}, "workload_group.1.Actor", "already in workload_group.0"),
        ({"workload": actor(num=4.0), "workload_group": [{"actor": 3.0}]}, "workload_group.0.actor", "groups of 3"),
        ({"env": {"A": None}}, "env.A", "valid string, got None"),
        ({"name": "My Job"}, "name", "'My Job' is not a job name"),
        ({"restart": {"workload_max_restart": {"actr": 1}}}, "restart.workload_max_restart.actr", "no role 'actr'"),
        ({"restart": {"workload_max_restart": {"actor": -1}}}, "restart.workload_max_restart.actor", "got -1"),
        ({"workload": actor(hang_after_s=math.inf)}, "workload.actor.hang_after_s", "less than inf, got inf"),
        ({"workload": actor(hang_after_s=0.5)}, "workload.actor.hang_after_s", "longer than liveness.beat_s, 0.5, got"),
        ({"checkpoint": {"commit_to": "disk"}}, "checkpoint.commit_to", "'auto', 'memory' or 'job_dir', got 'disk'"),
        ({"checkpoint": {"resume": "always"}}, "checkpoint.resume", "'never' or 'latest', got 'always'"),
        ({"liveness": {"beat_s": 60}}, "liveness.lease_s", "must be longer than liveness.beat_s, 60, got 60"),
        ({"master": {"max_restart": -2}}, "master.max_restart", "greater than or equal to -1, got -2"),
        ({"scheduling_strategy": "auto"}, "scheduling_strategy", "'AUTO', 'SIMPLE' or 'GROUP', got 'auto'"),
        ({"algorithm_type": "DPO"}, "algorithm_type", "got 'DPO'"),
        ({"workloads": {}}, "workloads", "unknown key 'workloads'; did you mean 'workload'?"),
    ],
)
def test_layout_refuses_a_wrong_field(changes, where, fault):
    assert fault in problems_of(**changes).get(where, "nothing"), problems_of(**changes)


POSITIVE = """trainer.node_number trainer.device_per_node trainer.hang_after_s placement_timeout_s workload.actor.num
workload.actor.per_node workload.actor.hang_after_s restart.window_s restart.node_max_failures checkpoint.every
checkpoint.keep liveness.beat_s liveness.start_timeout_s"""
NOT_NEGATIVE = "restart.job_max_restart restart.backoff_s master.cpu workload.actor.standby workload.actor.resource.cpu"


@pytest.mark.parametrize(
    ("where", "value", "fault"),
    [
        *((where, 0, "input should be greater than 0, got 0") for where in POSITIVE.split()),
        *((where, -1, "input should be greater than or equal to 0, got -1") for where in NOT_NEGATIVE.split()),
    ],
)
def test_layout_refuses_a_number_below_its_least(where, value, fault):
    wrong = OmegaConf.create(layout())
    OmegaConf.update(wrong, where, value, force_add=True)
    with pytest.raises(InvalidJob) as caught:
        job_from_mapping(wrong, "default")
    assert ConfigError(where, fault) in caught.value.errors


# -- and back ---------------------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc"), exclude_characters="$?\\"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.floats(10.1, 1e6), NAMES)
def test_job_written_to_a_file_reads_back_as_itself(config, number, word):
    own = actor(resource={"cpu": number}, hang_after_s=number)
    job = read(config=config, name=word, workload=own, trainer=trainer(hang_after_s=number, torch_master_port=[1001]))
    assert load_job_text(job_to_yaml(job), job.name, search_path=()) == job


def test_job_to_yaml_keeps_references_of_the_config():
    config = {"a": 1, "b": "${config.a}", "c": "${.a}", "d": "${trainer.node_number}"}
    back = load_job_text(job_to_yaml(read(config=config)), "x")
    assert OmegaConf.to_container(back.config, resolve=True) == {"a": 1, "b": 1, "c": 1, "d": 1}


@example(r"${HOME} \${x} \\${y} $z")
@given(st.text("a$\\{}: .'\n", max_size=12))
def test_env_of_any_text_reads_back_as_itself(text):
    env, job = {"A": f"x{text}"}, read(workload=actor())
    job = replace(job, env=env, workloads={"ACTOR": replace(job.workloads["ACTOR"], env=env)})
    assert load_job_text(job_to_yaml(job), job.name, search_path=()) == job


def minimal():
    return JobBuilder().trainer("m", "T").actor("m", "A")


def test_builder_makes_a_whole_job():
    builder = JobBuilder().node_num(2).device_per_node(4).device_type("CPU").liveness(beat_s=0.1, lease_s=9)
    builder.config({"lr": 1e-6, "nothing": None, "path": "a\\b"}).global_env({"A": "1"}).global_env({"B": "2"})
    builder.restart_limits(job_max_restart=3, workload_max_restart={"rollout": 5}, window_s=60, node_max_failures=2)
    builder.checkpoint(every=5).checkpoint(keep=3, resume="latest", commit_to="job_dir")
    builder.trainer("mod", "Trainer").trainer_hang_after(90)
    builder.actor("mod", "Actor").total(4).per_node(2).resource(cpu=0.5, memory=256).env({"C": "3"})
    builder.standby(2).hang_after(30)
    builder.rollout("mod", "Rollout").total(2).standby().enable_ray_auto_visible_device()
    builder.reference("mod", "Reference").reward("mod", "Reward").critic("mod", "Critic").role("judge", "mod", "Judge")
    job = builder.spec("my-job", ("here",))
    assert job.trainer == spec.TrainerSpec("mod", "Trainer", 2, "CPU", 4, hang_after_s=90.0)
    assert list(job.workloads) == ["ACTOR", "ROLLOUT", "REFERENCE", "REWARD", "CRITIC", "JUDGE"]
    resource = {"cpu": 0.5, "memory": 256.0}
    assert job.workloads["ACTOR"] == spec.WorkloadSpec("mod", "Actor", 4, 2, resource, {"C": "3"}, 2, 30.0)
    assert (job.workloads["ROLLOUT"].standby, job.workloads["ROLLOUT"].hang_after_s) == (1, 600.0)
    assert job.workloads["ROLLOUT"].env == {"DLROVER_RL_RAY_VISIBLE_DEVICES": "1"}
    assert job.env == {"A": "1", "B": "2"}
    assert job.restart == spec.RestartSpec(3, 10, {"rollout": 5}, window_s=60.0, node_max_failures=2)
    assert job.checkpoint == spec.CheckpointSpec(5, 3, "latest", "job_dir")
    assert job.liveness == spec.LivenessSpec(0.1, 9.0)
    assert job.config == {"lr": 1e-6, "nothing": None, "path": "a\\b"}
    assert (job.name, job.job_dir, job.search_path) == ("my-job", spec.RUNS, ("here",))
    assert load_job_text(job_to_yaml(job), "my-job", search_path=("here",)) == job


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({"a": 1, "key": "${.a}"}, 1),
        ({"lr": 1e-3, "key": "${lr}"}, 1e-3),
        ({"name": "mine", "key": "runs/${name}"}, "runs/mine"),
        ({"lr": 1, "key": r"\${lr}"}, "${lr}"),
        ({"name": None, "key": "${name}"}, None),
        ({"key": "${name}"}, "j"),
    ],
)
def test_builder_reads_references_in_the_config_then_the_job(config, value):
    assert minimal().config(OmegaConf.create(config)).spec("j").config.key == value


def test_builder_collocates_the_members_of_a_node():
    job = minimal().total(4).per_node(2).rollout("m", "R").total(2).with_collocation("ACTOR", "rollout").spec("j")
    assert job.groups == ({"ACTOR": 2, "ROLLOUT": 2},)
    job = minimal().total(2).critic("m", "C").total(2).with_collocation_all().spec("j")
    assert job.groups == ({"ACTOR": 2, "CRITIC": 2},)


@pytest.mark.parametrize(
    "call", ["total", "per_node", "env", "resource", "enable_ray_auto_visible_device", "standby", "hang_after"]
)
def test_builder_calls_on_roles_need_a_role(call):
    builder = JobBuilder()
    arguments = {"total": (1,), "per_node": (1,), "env": ({},), "hang_after": (1,)}.get(call, ())
    with pytest.raises(CallError, match=r"applies to a role: call actor\(\), rollout\(\), ... or role\(\) first"):
        getattr(builder, call)(*arguments)


def test_builder_lists_all_problems():
    builder = JobBuilder().node_num(0).device_type("TPU").restart_limits(job_max_restarts=3).checkpoint(evry=1)
    builder.liveness(beat_s=0).rollout("m", "R").total(-1).standby(-1).with_collocation("actr")
    with pytest.raises(InvalidJob) as caught:
        builder.spec("My Job")
    assert {problem.where for problem in caught.value.errors} == {
        "trainer.module", "trainer.class", "trainer.node_number", "trainer.device_type", "restart.job_max_restarts",
        "checkpoint.evry", "liveness.beat_s", "workload.rollout.standby", "workload", "workload.rollout.num",
        "workload_group.0.actr", "name",
    }  # fmt: skip


def test_builder_takes_a_role_named_twice_as_one():
    job = minimal().total(3).rollout("m", "R").actor("m2", "A2").env({"A": "1"}).spec("j")
    assert job.workloads["ACTOR"] == spec.WorkloadSpec("m2", "A2", 3, None, {}, {"A": "1"})
