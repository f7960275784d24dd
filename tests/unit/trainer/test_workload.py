# SPDX-License-Identifier: Apache-2.0
"""``BaseWorkload``: who it is, and the options of ``trainer_invocation``."""

import asyncio

import pytest

from dlrover.python.rl.common.names import WELL_KNOWN_ROLES, RLRoleType
from dlrover.python.rl.trainer import workload as module
from dlrover.python.rl.trainer.workload import DEFAULT_OPTIONS, BaseWorkload, MemberContext, trainer_invocation

CONTEXT = MemberContext(
    "job/1/ROLLOUT-2", RLRoleType.ROLLOUT, 2, 4, 1, 2, "10.0.0.1", 29500, "ACTOR,ROLLOUT", devices=(2, 3)
)


def facts(workload):
    ranks = workload.rank, workload.world_size, workload.local_rank, workload.local_world_size
    address = workload.torch_master_addr, workload.torch_master_port
    collocation = workload.get_device_collocation() or ""
    return MemberContext(workload.name, workload.role, *ranks, *address, collocation, devices=workload.devices)


@pytest.fixture
def no_environment(monkeypatch):
    for name in MemberContext().to_env():
        monkeypatch.delenv(name, raising=False)


def test_workload_has_the_facts_of_its_context_or_environment(no_environment, monkeypatch):
    with module.member_context(CONTEXT):
        workload = BaseWorkload("master", {"lr": 1})
        with module.member_context(MemberContext(rank=7)):
            assert BaseWorkload(None, {}).rank == 7
    assert facts(workload) == CONTEXT
    assert (workload.master_handle, workload.config, workload.word_size) == ("master", {"lr": 1}, 4)
    for name, value in CONTEXT.to_env().items():
        monkeypatch.setenv(name, value)
    assert facts(BaseWorkload(None, {})) == CONTEXT


def test_workload_outside_a_job_is_the_only_actor(no_environment):
    workload = BaseWorkload(None, {})
    assert facts(workload) == MemberContext()
    assert (workload.torch_master_addr, workload.torch_master_port) == ("", -1)
    assert workload.get_device_collocation() is None
    assert (workload.data_parallel_size({}, 6), workload.needs_own_process) == (6, False)
    workload.close()


def test_environment_has_the_names_of_torch():
    env = CONTEXT.to_env()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DEVICE_COLLOCATION_GROUP", "DEVICES")
    assert [env[name] for name in names] == ["2", "4", "1", "10.0.0.1", "29500", "ACTOR,ROLLOUT", "2,3"]
    assert MemberContext.from_env(env) == CONTEXT
    assert MemberContext.from_env({**env, "DEVICES": ""}).devices == ()


@pytest.mark.parametrize("role", [*WELL_KNOWN_ROLES, RLRoleType("JUDGE")])
def test_predicate_of_a_role_is_true_for_it_alone(role):
    with module.member_context(MemberContext(role=role)):
        workload = BaseWorkload(None, {})
    roles = [name for name in WELL_KNOWN_ROLES if getattr(workload, f"is_{name.lower()}_role")()]
    assert roles == [name for name in WELL_KNOWN_ROLES if name == role]


class Counter(BaseWorkload):
    def state_dict(self):
        return {"count": 1}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(BaseWorkload, False), (type("Idle", (BaseWorkload,), {}), False), (object, False)]
    + [(Counter, True), (type("Later", (Counter,), {}), True)],
)
def test_workload_has_state_only_with_state_dict_of_its_class(kind, expected):
    assert module.is_stateful(kind) is expected


def test_decorated_method_stays_as_it_was():
    def method(self, x):
        """Words."""

    async def slow(self):
        return 1

    assert trainer_invocation(blocking=False)(method) is method
    assert asyncio.iscoroutinefunction(trainer_invocation(timeout=3)(slow))
    assert module.get_invocation_options(method).blocking is False
    assert module.get_invocation_options(slow).timeout == 3
    assert module.get_invocation_options(lambda self: 1) is module.get_invocation_options(len) is DEFAULT_OPTIONS
    assert module.InvocationOptions(True, False, 10, "ALL", True, None, None) == DEFAULT_OPTIONS


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"blocking": 1}, TypeError, "blocking"),
        ({"timeout": True}, TypeError, "timeout"),
        ({"pre_func": 3}, TypeError, "pre_func"),
        ({"post_func": "sum"}, TypeError, "post_func"),
        ({"timeout": 0}, ValueError, "greater than 0 seconds"),
        ({"timeout": float("nan")}, ValueError, "greater than 0 seconds"),
        ({"target": "rank0"}, ValueError, "'ALL' or 'RANK0', not 'rank0'; did you mean 'RANK0'"),
    ],
)
def test_wrong_option_is_refused_at_the_decorator(options, error, message):
    with pytest.raises(error, match=message):
        trainer_invocation(**options)


@pytest.mark.parametrize(("option", "right"), [("pre_function", "pre_func"), ("async", "is_async")])
def test_unknown_option_is_refused_with_the_nearest_name(option, right):
    for refuse in (lambda: trainer_invocation(**{option: 1}), lambda: DEFAULT_OPTIONS.replace(**{option: 1})):
        with pytest.raises(TypeError, match=f"no option '{option}'; did you mean '{right}'"):
            refuse()


def test_changes_state_warns_once_and_has_no_effect(caplog):
    options = module.InvocationOptions(changes_state=False)
    assert options.replace(timeout=5) == module.InvocationOptions(timeout=5)
    warnings = [record.getMessage().partition(" has")[0] for record in caplog.records]
    assert warnings == ["trainer_invocation(changes_state=...)"]
