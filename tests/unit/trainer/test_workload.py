# SPDX-License-Identifier: Apache-2.0
"""``BaseWorkload``: who it is, and the options of ``trainer_invocation``."""

import asyncio
import functools

import pytest

from dlrover.python.rl.common.names import WELL_KNOWN_ROLES, RLRoleType
from dlrover.python.rl.trainer.workload import (
    DEFAULT_OPTIONS,
    BaseWorkload,
    InvocationOptions,
    MemberContext,
    get_invocation_options,
    is_stateful,
    member_context,
    trainer_invocation,
)

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


def test_the_defaults_are_the_guides():
    assert InvocationOptions(True, False, 10, "ALL", True, None, None) == DEFAULT_OPTIONS


def test_a_decorated_method_stays_as_it_was():
    def method(self, x):
        """Words."""

    async def slow(self):
        return 1

    assert trainer_invocation(blocking=False)(method) is method
    assert asyncio.iscoroutinefunction(trainer_invocation(timeout=3)(slow))
    assert get_invocation_options(method).blocking is False
    assert get_invocation_options(slow).timeout == 3


def test_an_undecorated_method_has_the_defaults():
    assert get_invocation_options(lambda self: 1) is DEFAULT_OPTIONS
    assert get_invocation_options(len) is DEFAULT_OPTIONS


@pytest.mark.parametrize(
    ("option", "right"),
    [
        ("pre_function", "pre_func"),
        ("post_function", "post_func"),
        ("time_out", "timeout"),
        ("autoshard", "auto_shard"),
        ("async", "is_async"),
        ("Blocking", "blocking"),
        ("targets", "target"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(option, right):
    for refuse in (lambda: trainer_invocation(**{option: 1}), lambda: DEFAULT_OPTIONS.replace(**{option: 1})):
        with pytest.raises(TypeError, match=f"no option '{option}'; did you mean '{right}'"):
            refuse()


@pytest.mark.parametrize(
    "options",
    [{"blocking": 1}, {"is_async": None}, {"auto_shard": "yes"}, {"timeout": "3"}, {"timeout": True}]
    + [{"pre_func": 3}, {"post_func": "sum"}],
)
def test_an_option_of_the_wrong_type_is_refused_at_the_decorator(options):
    (name,) = options
    with pytest.raises(TypeError, match=name):
        trainer_invocation(**options)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_is_greater_than_0(timeout):
    with pytest.raises(ValueError, match="greater than 0 seconds"):
        trainer_invocation(timeout=timeout)


@pytest.mark.parametrize(("target", "right"), [("rank0", "RANK0"), ("RANK_0", "RANK0"), ("all", "ALL")])
def test_a_target_is_all_or_rank0(target, right):
    with pytest.raises(ValueError, match=f"'ALL' or 'RANK0', not '{target}'; did you mean '{right}'"):
        trainer_invocation(target=target)


class Doubler:
    def __call__(self, value):
        return 2 * value

    def method(self, value):
        return 2 * value


@pytest.mark.parametrize("function", [lambda x: 2 * x, functools.partial(max, 3), Doubler(), Doubler().method, sum])
def test_any_callable_may_stand_before_and_after(function):
    policy = DEFAULT_OPTIONS.replace(pre_func=function, post_func=function)
    assert policy.pre_func is policy.post_func is function


def test_replacing_an_option_keeps_the_others():
    policy = InvocationOptions(blocking=False, timeout=3).replace(timeout=4)
    assert policy == InvocationOptions(blocking=False, timeout=4)


def test_changes_state_warns_once_and_has_no_effect(caplog):
    options = InvocationOptions(changes_state=False)
    options.replace(timeout=5)
    assert [record.getMessage().partition(" has")[0] for record in caplog.records] == [
        "trainer_invocation(changes_state=...)"
    ]
