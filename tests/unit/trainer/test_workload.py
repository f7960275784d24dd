# SPDX-License-Identifier: Apache-2.0
"""``BaseWorkload``: who it is, from the runtime or from the environment."""

import pytest

from dlrover.python.rl.common.names import WELL_KNOWN_ROLES, RLRoleType
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext, is_stateful, member_context

WHO = MemberContext("job/1/ROLLOUT-2", RLRoleType.ROLLOUT, 2, 4, 1, 2, "10.0.0.1", 29500, "ACTOR,ROLLOUT")


def facts(workload):
    return MemberContext(
        workload.name,
        workload.role,
        workload.rank,
        workload.world_size,
        workload.local_rank,
        workload.local_world_size,
        workload.torch_master_addr,
        workload.torch_master_port,
        workload.get_device_collocation() or "",
    )


@pytest.fixture
def no_environment(monkeypatch):
    for name in MemberContext().to_env():
        monkeypatch.delenv(name, raising=False)


def test_a_workload_knows_who_it_is_from_its_context():
    with member_context(WHO):
        workload = BaseWorkload("master", {"lr": 1})
    assert facts(workload) == WHO
    assert (workload.master_handle, workload.config) == ("master", {"lr": 1})


def test_a_workload_knows_who_it_is_from_its_environment(no_environment, monkeypatch):
    for name, value in WHO.to_env().items():
        monkeypatch.setenv(name, value)
    assert facts(BaseWorkload(None, {})) == WHO


def test_outside_a_job_it_is_the_only_actor(no_environment):
    workload = BaseWorkload(None, {})
    assert facts(workload) == MemberContext()
    assert (workload.torch_master_addr, workload.torch_master_port) == ("", -1)
    assert workload.get_device_collocation() is None


def test_the_context_ends_with_its_block(no_environment):
    with member_context(WHO), member_context(MemberContext(rank=7)):
        assert BaseWorkload(None, {}).rank == 7
    assert BaseWorkload(None, {}).rank == 0


def test_the_guides_spelling_of_the_world_size():
    with member_context(WHO):
        workload = BaseWorkload(None, {})
    assert workload.word_size == workload.world_size == 4


def test_the_environment_has_the_names_torch_reads():
    env = WHO.to_env()
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert env["DEVICE_COLLOCATION_GROUP"] == "ACTOR,ROLLOUT"
    assert MemberContext.from_env(env) == WHO


@pytest.mark.parametrize("role", [*WELL_KNOWN_ROLES, RLRoleType("JUDGE")])
def test_each_predicate_is_true_for_its_role_alone(role):
    with member_context(MemberContext(role=role)):
        workload = BaseWorkload(None, {})
    answers = {known: getattr(workload, f"is_{known.lower()}_role")() for known in WELL_KNOWN_ROLES}
    assert answers == {known: known == role for known in WELL_KNOWN_ROLES}


def test_the_defaults_a_subclass_may_change():
    assert BaseWorkload.data_parallel_size({}, 6) == 6
    assert BaseWorkload.needs_own_process is False
    BaseWorkload(None, {}).close()


class Counter(BaseWorkload):
    def state_dict(self):
        return {"count": 1}


class Plain:
    """A class that is no workload by its bases."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(BaseWorkload, False), (type("Idle", (BaseWorkload,), {}), False), (Plain, False)]
    + [(Counter, True), (type("Later", (Counter,), {}), True)],
)
def test_workload_has_state_only_with_state_dict_of_its_class(kind, expected):
    assert is_stateful(kind) is expected
