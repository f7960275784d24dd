# SPDX-License-Identifier: Apache-2.0
"""Role groups over the port of one process: the calls that are sent, and their results; tests/contract has more."""

import functools
import threading
from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.common.errors import CallError, InvocationError, InvocationTimeout, ShardError, UnknownMethod
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.runtime.local import LocalHandle, LocalMember, LocalPort
from dlrover.python.rl.runtime.member.host import MemberHost
from dlrover.python.rl.trainer.port import Outcome, Pending, Ref, gather
from dlrover.python.rl.trainer.role_group import CallCounter, RoleGroup
from dlrover.python.rl.trainer.shard import Replicate, Shard
from dlrover.python.rl.trainer.trainer import TrainerLink
from dlrover.python.rl.trainer.workload import MemberContext, trainer_invocation
from tests.support.manual_clock import ManualClock
from tests.support.role_group_toys import StageTrainer, Toy


class Worker(Toy):
    constant = 3

    def same(self, value):
        return value

    @trainer_invocation(pre_func=functools.partial(max, 10))
    def at_least_10(self, value):
        return value

    @trainer_invocation(is_async=True, timeout=5)
    def timed(self, seconds):
        CLOCK.advance(seconds)
        return seconds


class Paired(Worker):
    """Two consecutive ranks form one model replica."""

    @classmethod
    def data_parallel_size(cls, config, world_size):
        return config.get("size", world_size // 2)


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


def trainer_of(workload=Worker, config=None, **sizes):
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
    trainer = StageTrainer(handles, dict.fromkeys(handles, workload), config or {})
    trainer.bind(TrainerLink(port, lambda report: None, "job", Path("runs")))
    trainer.port = port
    return trainer


def test_refused_argument_sends_nothing_and_takes_no_number():
    trainer = trainer_of(actor=3)
    with pytest.raises(ShardError, match="ACTOR.same: argument 'value' is int"):
        trainer.RG_ACTOR.same(value=Shard(3))
    with pytest.raises(CallError, match="ACTOR.same: argument 0 cannot be sent: TypeError"):
        trainer.RG_ACTOR.same([1, 2, threading.Lock()])
    assert trainer.port.calls == []
    trainer.RG_ACTOR.same(1)
    assert trainer.port.calls[0][2].call_id == (0, 0)


def test_value_for_everyone_is_stored_once_unless_it_is_small():
    large = ({"a": 1}, "x" * 2000, b"x" * 2000, np.arange(3), 10**6000)
    for value in (*large, None, True, 3, 0.5, "text", b"text"):
        trainer = trainer_of(actor=5)
        trainer.RG_ACTOR.echo(Replicate(value))
        assert len(trainer.port.stored) == any(value is each for each in large), type(value)
        assert len({id(call.args[0]) for _, _, call in trainer.port.calls}) == 1


def test_members_of_a_replica_share_a_shard_and_a_result():
    trainer = trainer_of(Paired, actor=6)
    assert trainer.RG_ACTOR.same(list(range(7))) == [[0, 1, 2], [3, 4], [5, 6]]
    assert trainer.RG_ACTOR.same(["a", "b", "c"]) == ["a", "b", "c"]
    # Each shard is stored once for the two workers that take it; the short texts travel along.
    assert (len(trainer.port.stored), len(trainer.port.calls)) == (3, 12)
    assert len(trainer.RG_ACTOR.later([1, 2, 3])) == 3
    with pytest.raises(CallError, match="Paired.data_parallel_size gave 2, which does not divide its 3 workers"):
        trainer_of(Paired, {"size": 2}, actor=3)


def test_call_ids_count_the_calls_of_a_step():
    trainer = trainer_of(actor=2, rollout=1)
    trainer.RG_ACTOR.same(1)
    for _ in trainer.steps(2):
        trainer.RG_ACTOR.same(1)
        trainer.RG_ROLLOUT.same(1)
    ids = [(role, call.call_id) for role, rank, call in trainer.port.calls if rank == 0]
    steps = [[("ACTOR", (step, 0)), ("ROLLOUT", (step, 1))] for step in (1, 2)]
    assert ids == [("ACTOR", (0, 0)), *steps[0], *steps[1]]


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


def test_functions_run_before_and_after():
    group = trainer_of(actor=3).RG_ACTOR
    assert group.prepared(x=4) == 150
    assert group.at_least_10(4) == [10] * 3
    assert group.same.options(post_func=lambda results: results[-1], pre_func=lambda: [7, 8, 9])() == 9


def test_options_change_one_call():
    group = trainer_of(actor=2).RG_ACTOR
    assert group.same.options(target="RANK0")(1) == [1]
    assert group.same(1) == [1, 1]
    assert group.later.options(auto_shard=False)([1, 2]).result() == [[1, 2]] * 2, "its other options stay"


def test_deadline_names_the_late_ranks_and_keeps_results():
    group = trainer_of(actor=3).RG_ACTOR
    with pytest.raises(InvocationTimeout, match="no answer within 5 s from rank 1") as caught:
        group.timed([1, 6, 2])
    assert caught.value.late == (1,)
    assert caught.value.arrived == {0: 1, 2: 2}
    assert group.timed([1, 4, 2]) == [1, 4, 2]
    assert group.timed.options(timeout=10)([1, 6, 2]) == [1, 6, 2]
    assert group.timed.options(is_async=False)([1, 6, 2]) == [1, 6, 2]


POST_FUNC = r"ROLLOUT.same: argument 0 is pending with a post_func.*\.result\(\)"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (lambda group: group.counted_later([1, 2]), POST_FUNC),
        (lambda group: Shard(group.counted_later([1, 2])), POST_FUNC),
        (lambda group: Replicate(group.counted_later([1, 2])), POST_FUNC),
        (lambda group: Shard(group.later([[1], [2]]), by="tokens"), "only a whole Batch can be split by 'tokens'"),
        (lambda group: {"deep": group.later([1, 2])[0]}, "pass it as a separate argument or in a list"),
    ],
)
def test_unfit_pending_argument_is_refused(argument, message):
    trainer = trainer_of(actor=2, rollout=2)
    with pytest.raises((CallError, InvocationError, ShardError), match=message):
        trainer.RG_ROLLOUT.same(argument(trainer.RG_ACTOR))


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


def test_value_or_private_name_is_no_method():
    group = trainer_of(actor=2).RG_ACTOR
    with pytest.raises(UnknownMethod, match="'constant' is a property, not a method"):
        group.constant()
    with pytest.raises(AttributeError, match="RG_ACTOR has no attribute '_member'"):
        group._member()


def test_group_has_a_length_and_is_not_iterated():
    group = trainer_of(actor=2).RG_ACTOR
    assert (len(group), group.world_size, group.role) == (2, 2, "ACTOR")
    assert "echo" in dir(group)
    assert "_member" not in dir(group)
    for use in (list, lambda group: group[0]):
        with pytest.raises(TypeError, match=r"actor_handles\['ACTOR'\]"):
            use(group)
