# SPDX-License-Identifier: Apache-2.0
"""Role groups over the port of one process: what is sent, what comes back. The contract suite holds Ray to the same."""

import asyncio
import functools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import CallError, InvocationError, InvocationTimeout, ShardError, UnknownMethod
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.runtime.local import LocalHandle, LocalMember, LocalPort
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import Call, Outcome, Pending, Ref, gather
from dlrover.python.rl.trainer.role_group import CallCounter, RoleGroup
from dlrover.python.rl.trainer.shard import Replicate, Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer, TrainerLink
from dlrover.python.rl.trainer.workload import BaseWorkload, MemberContext, trainer_invocation
from tests.support.manual_clock import ManualClock


class Halver:
    def half(self, value):
        return value // 2


class Worker(BaseWorkload):
    """Gives back what it gets."""

    constant = 3

    def echo(self, *args, **kwargs):
        return args, kwargs

    def same(self, value):
        return value

    def count(self, values):
        return len(values)

    async def slowly(self, value):
        await asyncio.sleep(0)
        return 2 * value

    @trainer_invocation(blocking=False)
    def later(self, value):
        return value

    @trainer_invocation(blocking=False)
    def rows(self, kind, sizes):
        start, size = sum(sizes[: self.rank]), sizes[self.rank]
        return kind(list(range(start, start + size)))

    @trainer_invocation(blocking=False)
    def fail_later(self):
        raise ValueError(f"rank {self.rank}")

    @trainer_invocation(target="RANK0")
    def first(self, value):
        return self.rank, value

    @trainer_invocation(pre_func=lambda value: value + 1, post_func=sum)
    def plus(self, value):
        return value

    @trainer_invocation(pre_func=lambda first, second: (second, first))
    def swapped(self, first, second):
        return first, second

    @trainer_invocation(pre_func=functools.partial(max, 10))
    def at_least_10(self, value):
        return value

    @trainer_invocation(pre_func=Halver().half)
    def halved(self, value):
        return value

    @trainer_invocation(blocking=False, post_func=sum)
    def summed_later(self, value):
        return value

    @trainer_invocation(auto_shard=False)
    def whole(self, value):
        return value

    @trainer_invocation(is_async=True, timeout=5)
    def timed(self, seconds):
        CLOCK.advance(seconds)
        return seconds


class Paired(Worker):
    """Two consecutive ranks form one model replica."""

    @classmethod
    def data_parallel_size(cls, config, world_size):
        return world_size // 2


class Indivisible(Worker):
    @classmethod
    def data_parallel_size(cls, config, world_size):
        return 2


class Loop(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        pass


HOSTS = []


@pytest.fixture(autouse=True)
def _hosts_are_closed():
    yield
    while HOSTS:
        HOSTS.pop().close()


class Recorder(LocalPort):
    """The local port, noting what is asked of it."""

    def __init__(self, members, clock):
        super().__init__(members, now_s=clock)
        self.stored, self.calls = [], []

    def put(self, value):
        self.stored.append(value)
        return super().put(value)

    def submit(self, role, rank, call):
        self.calls.append((role, rank, call))
        return super().submit(role, rank, call)


CLOCK = ManualClock()


def trainer_of(workload=Worker, **sizes):
    """A trainer over ``sizes`` workers of each role (in lower case)."""
    members = {}
    for role, size in sizes.items():
        members[role.upper()] = []
        for rank in range(size):
            context = MemberContext(role=RLRoleType(role), rank=rank, world_size=size)
            host = MemberHost()
            host.start(workload, context, None, {})
            HOSTS.append(host)
            members[role.upper()].append(LocalMember(host, context.to_env()))
    port = Recorder(members, clock=CLOCK)
    handles = {role: [LocalHandle(port, role, rank) for rank in range(len(group))] for role, group in members.items()}
    trainer = Loop(handles, dict.fromkeys(handles, workload), {})
    trainer.bind(TrainerLink(port, lambda report: None, "job", Path("runs")))
    trainer.port = port
    return trainer


# -- what each worker gets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", range(1, 6))
def test_a_list_of_one_item_per_member_gives_each_its_item(members):
    group = trainer_of(actor=members).RG_ACTOR
    assert group.same(list("abcde"[:members])) == list("abcde"[:members])


def test_arguments_are_arranged_one_by_one():
    group = trainer_of(actor=2).RG_ACTOR
    (args, kwargs), (args_1, kwargs_1) = group.echo([1, 2, 3], "text", lr=0.1, rows=(1, 2, 3, 4), all=Replicate([1, 2]))
    assert (args, kwargs) == (([1, 2], "text"), {"lr": 0.1, "rows": (1, 2), "all": [1, 2]})
    assert (args_1, kwargs_1) == (([3], "text"), {"lr": 0.1, "rows": (3, 4), "all": [1, 2]})


def test_without_arguments_every_member_is_called():
    assert trainer_of(actor=3).RG_ACTOR.echo() == [((), {})] * 3


def test_what_cannot_be_divided_is_refused_before_anything_is_sent():
    trainer = trainer_of(actor=3)
    with pytest.raises(ShardError, match=r"ACTOR.same: argument 0 has 2 rows"):
        trainer.RG_ACTOR.same([1, 2])
    with pytest.raises(ShardError, match=r"ACTOR.same: argument 'value' is int"):
        trainer.RG_ACTOR.same(value=Shard(3))
    assert trainer.port.calls == []


@pytest.mark.parametrize(
    "value", [{"a": 1}, "x" * 2000, b"x" * 2000, np.arange(3), Batch({"x": np.arange(3)}), 10**6000], ids=type
)
def test_a_value_for_everyone_is_stored_once(value):
    trainer = trainer_of(actor=5)
    trainer.RG_ACTOR.echo(Replicate(value))
    assert len(trainer.port.stored) == 1
    assert len({id(call.args[0]) for _, _, call in trainer.port.calls}) == 1


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "text", b"text"])
def test_a_small_scalar_is_not_worth_storing(value):
    trainer = trainer_of(actor=5)
    assert trainer.RG_ACTOR.same(value) == [value] * 5
    assert trainer.port.stored == []


def test_members_of_a_replica_share_a_shard_and_give_one_result():
    trainer = trainer_of(Paired, actor=6)
    assert trainer.RG_ACTOR.data_parallel_size == 3
    assert trainer.RG_ACTOR.same(list(range(7))) == [[0, 1, 2], [3, 4], [5, 6]]
    assert trainer.RG_ACTOR.same(["a", "b", "c"]) == ["a", "b", "c"]
    # Each shard is stored once for the two workers that take it; the short texts travel along.
    assert len(trainer.port.stored) == 3
    assert len(trainer.port.calls) == 12
    assert len(trainer.RG_ACTOR.later([1, 2, 3])) == 3


def test_a_data_parallel_size_that_does_not_divide_the_group_is_refused():
    with pytest.raises(CallError, match="Indivisible.data_parallel_size gave 2, which does not divide its 3 workers"):
        trainer_of(Indivisible, actor=3)


def test_call_ids_count_the_calls_of_a_step():
    trainer = trainer_of(actor=2, rollout=1)
    trainer.RG_ACTOR.same(1)
    for _ in trainer.steps(2):
        trainer.RG_ACTOR.same(1)
        trainer.RG_ROLLOUT.same(1)
    ids = [(role, rank, call.call_id) for role, rank, call in trainer.port.calls]
    assert ids[:2] == [("ACTOR", 0, (0, 0)), ("ACTOR", 1, (0, 0))]
    assert ids[2:5] == [("ACTOR", 0, (1, 0)), ("ACTOR", 1, (1, 0)), ("ROLLOUT", 0, (1, 1))]
    assert ids[5:] == [("ACTOR", 0, (2, 0)), ("ACTOR", 1, (2, 0)), ("ROLLOUT", 0, (2, 1))]


def test_argument_that_cannot_be_sent_is_refused_before_any_call():
    trainer = trainer_of(actor=2)
    with pytest.raises(CallError, match="ACTOR.same: argument 0 cannot be sent: TypeError"):
        trainer.RG_ACTOR.same([1, threading.Lock()])
    assert trainer.port.calls == []


def test_calls_of_two_threads_are_sent_in_order_of_numbers():
    class Sending:
        sent = []

        def submit(self, role, rank, call):
            if not self.sent:
                other.start()
                other.join(0.2)  # it waits for this call, or would be sent before it
            self.sent.append((call.call_id[1], rank))
            return Ref(self, Outcome(), None, role, rank, call.method)

        def wait(self, refs, timeout_s):
            return [ref.token for ref in refs]

    group = RoleGroup(RLRoleType.ACTOR, Worker, 2, 2, Sending(), CallCounter())
    other = threading.Thread(target=group.same, args=(2,))
    group.same(1)
    other.join()
    assert Sending.sent == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_refused_call_takes_no_number():
    trainer = trainer_of(actor=2)
    with pytest.raises(ShardError):
        trainer.RG_ACTOR.same([1])
    trainer.RG_ACTOR.same(1)
    assert trainer.port.calls[0][2].call_id == (0, 0)


# -- policies ---------------------------------------------------------------------------------------------------------


def test_rank0_alone_is_called_with_the_argument_whole():
    assert trainer_of(actor=3).RG_ACTOR.first([1, 2, 3, 4]) == [(0, [1, 2, 3, 4])]
    assert trainer_of(actor=3).RG_ACTOR.first([1]) == [(0, [1])]


def test_auto_shard_off_copies():
    assert trainer_of(actor=2).RG_ACTOR.whole([1, 2]) == [[1, 2]] * 2


def test_functions_run_before_and_after():
    group = trainer_of(actor=3).RG_ACTOR
    assert group.plus(4) == group.plus(value=4) == 15
    assert group.swapped("a", "b") == [("b", "a")] * 3
    assert group.at_least_10(4) == [10] * 3
    assert group.halved(9) == [4] * 3
    assert group.same.options(post_func=lambda results: results[-1], pre_func=lambda: [7, 8, 9])() == 9


def test_options_change_one_call():
    group = trainer_of(actor=2).RG_ACTOR
    assert group.same.options(blocking=False)(1).result() == [1, 1]
    assert group.same.options(target="RANK0")(1) == [1]
    assert group.same(1) == [1, 1]
    assert group.later.options(auto_shard=False)([1, 2]).result() == [[1, 2]] * 2, "its other options stay"
    with pytest.raises(TypeError, match="no option 'pre_function'; did you mean 'pre_func'"):
        group.same.options(pre_function=len)


def test_async_methods_are_run_to_their_end():
    assert trainer_of(actor=2).RG_ACTOR.slowly(3) == [6, 6]


def test_a_deadline_names_the_late_ranks_and_keeps_what_arrived():
    group = trainer_of(actor=3).RG_ACTOR
    with pytest.raises(InvocationTimeout, match="no answer within 5 s from rank 1") as caught:
        group.timed([1, 6, 2])
    assert caught.value.late == (1,)
    assert caught.value.arrived == {0: 1, 2: 2}
    assert group.timed([1, 4, 2]) == [1, 4, 2]
    assert group.timed.options(timeout=10)([1, 6, 2]) == [1, 6, 2]
    assert group.timed.options(is_async=False)([1, 6, 2]) == [1, 6, 2]


def test_the_first_failed_rank_speaks():
    group = trainer_of(actor=3).RG_ACTOR
    with pytest.raises(InvocationError, match=r"ACTOR\[0\].fail_later on .*: ValueError: rank 0") as caught:
        group.fail_later().result()
    assert isinstance(caught.value.__cause__, ValueError)
    assert "fail_later" in caught.value.remote_traceback


# -- pending results --------------------------------------------------------------------------------------------------


def test_pending_results_are_resolved_or_awaited():
    pending = trainer_of(actor=2).RG_ACTOR.later([1, 2])
    assert pending.result() == [1, 2]
    assert [ref.result(1.0) for ref in pending] == [1, 2]

    async def wait():
        return await pending, await pending[1]

    assert asyncio.run(wait()) == ([1, 2], 2)


def test_pending_results_apply_post_func_when_resolved():
    assert trainer_of(actor=3).RG_ACTOR.summed_later([1, 2, 3]).result() == 6


def test_pending_results_with_a_post_func_are_not_passed_on_without_it():
    trainer = trainer_of(actor=2, rollout=2)
    for argument in (pending := trainer.RG_ACTOR.summed_later([1, 2]), Shard(pending), Replicate(pending)):
        with pytest.raises(CallError, match=r"ROLLOUT.same: argument 0 is pending with a post_func.*\.result\(\)"):
            trainer.RG_ROLLOUT.same(argument)


def test_pending_results_pass_to_a_group_of_the_same_size_one_to_one():
    trainer = trainer_of(actor=3, rollout=3)
    assert trainer.RG_ROLLOUT.same(trainer.RG_ACTOR.later(["a", "b", "c"])) == ["a", "b", "c"]
    assert trainer.port.stored == []


def test_more_pending_results_than_members_arrive_in_lists():
    trainer = trainer_of(actor=3, rollout=2)
    assert trainer.RG_ROLLOUT.same(trainer.RG_ACTOR.later(["a", "b", "c"])) == [["a", "b"], ["c"]]


def test_fewer_pending_results_than_members_need_shard():
    trainer = trainer_of(actor=2, rollout=3)
    with pytest.raises(ShardError, match="2 rows, too few to split over 3"):
        trainer.RG_ROLLOUT.same(trainer.RG_ACTOR.later(["a", "b"]))
    assert trainer.RG_ROLLOUT.same(Replicate(trainer.RG_ACTOR.later(["a", "b"]))) == [["a", "b"]] * 3


@pytest.mark.parametrize("members", range(1, 6))
@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_the_rows_of_pending_results_are_divided_anew_over_any_number_of_members(kind, members):
    trainer = trainer_of(actor=3, rollout=members)
    rows = Shard(trainer.RG_ACTOR.rows(Replicate(kind), Replicate([4, 1, 2])))
    taken = trainer.RG_ROLLOUT.same(rows)
    assert [len(part) for part in taken] == [len(part) for part in np.array_split(np.arange(7), members)]
    assert [int(item) for part in taken for item in part] == list(range(7))


def test_rows_of_pending_results_are_not_divided_by_tokens():
    trainer = trainer_of(actor=2, rollout=2)
    with pytest.raises(ShardError, match="only a whole Batch can be split by 'tokens'"):
        trainer.RG_ROLLOUT.same(Shard(trainer.RG_ACTOR.later([[1], [2]]), by="tokens"))


def test_one_failed_pending_result_fails_whoever_takes_it_with_its_own_name():
    trainer = trainer_of(actor=2, rollout=2)
    with pytest.raises(InvocationError, match=r"ACTOR\[0\].fail_later"):
        trainer.RG_ROLLOUT.same(trainer.RG_ACTOR.fail_later())


def test_a_pending_result_nested_too_deep_is_refused_with_the_way_out():
    trainer = trainer_of(actor=2)
    (ref, _) = trainer.RG_ACTOR.later([1, 2])
    with pytest.raises((CallError, InvocationError), match="pass it as a separate argument or in a list"):
        trainer.RG_ACTOR.same({"deep": ref})


class Answering:
    """Gives the next list of outcomes to each wait."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def refs(self):
        return [Ref(self, rank, None, "ACTOR", rank, "go") for rank in range(len(self.answers[0]))]

    def wait(self, refs, timeout_s):
        outcomes = self.answers.pop(0)
        return [outcomes[ref.token] for ref in refs]


FAILED = Outcome(error=InvocationError("it raised", role="ACTOR", rank=1, method="go"))


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_gather_raises_failure_while_other_ranks_are_late(timeout_s):
    port = Answering([Outcome(late=True), FAILED], [Outcome(1), Outcome(2)])
    with pytest.raises(InvocationError, match="it raised"):
        gather(port.refs(), timeout_s)


def test_pending_result_of_replicas_needs_every_rank():
    values = [Outcome(rank) for rank in range(4)]
    port = Answering(values, [values[0], FAILED, *values[2:]])
    pending = Pending(port.refs(), 2)
    assert pending.result() == [0, 2]
    with pytest.raises(InvocationError, match="it raised"):
        pending.wait()


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_misspelt_method_fails_before_anything_is_sent():
    trainer = trainer_of(actor=2)
    with pytest.raises(
        UnknownMethod, match="'conut' is no method of Worker, the workload of ACTOR; did you mean 'count'"
    ):
        trainer.RG_ACTOR.conut([1, 2])
    assert not hasattr(trainer.RG_ACTOR, "conut")
    assert trainer.port.calls == []


@pytest.mark.parametrize("name", ["rank", "torch_master_port", "constant"])
def test_what_is_no_method_cannot_be_called(name):
    with pytest.raises(UnknownMethod, match=f"'{name}' is a property, not a method, of Worker"):
        getattr(trainer_of(actor=2).RG_ACTOR, name)()


def test_private_names_are_not_reachable():
    with pytest.raises(AttributeError, match="RG_ACTOR has no attribute '_member'"):
        _ = trainer_of(actor=2).RG_ACTOR._member


def test_a_group_has_a_length_and_is_not_iterated():
    group = trainer_of(actor=2).RG_ACTOR
    assert (len(group), group.world_size, group.role) == (2, 2, "ACTOR")
    assert "echo" in dir(group)
    assert "_member" not in dir(group)
    for use in (list, lambda group: group[0]):
        with pytest.raises(TypeError, match=r"actor_handles\['ACTOR'\]"):
            use(group)


def test_a_raw_handle_calls_one_member():
    trainer = trainer_of(actor=2)
    assert trainer.actors[1].echo.remote(1, a=2).result() == ((1,), {"a": 2})
    assert trainer.port.calls[-1] == ("ACTOR", 1, Call((-1, -1), "echo", (1,), {"a": 2}))
