# SPDX-License-Identifier: Apache-2.0
"""The options of ``trainer_invocation``."""

import asyncio
import functools

import pytest

from dlrover.python.rl.trainer.workload import (
    DEFAULT_OPTIONS,
    InvocationOptions,
    get_invocation_options,
    trainer_invocation,
)


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
