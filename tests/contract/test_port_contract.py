# SPDX-License-Identifier: Apache-2.0
"""A role group behaves alike wherever its workers run."""

import asyncio
import threading

import numpy as np
import pytest

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import InvocationError, InvocationTimeout, ReplayDiverged, WorkloadDied
from dlrover.python.rl.data.batch import Batch, Ragged, even_cuts
from dlrover.python.rl.trainer.port import FORGET, RAW_CALL, Call
from dlrover.python.rl.trainer.shard import Replicate, Shard
from tests.support.manual_clock import within
from tests.support.role_group_toys import OddError

KINDS = {
    "list": lambda n: list(range(n)),
    "tuple": lambda n: tuple(range(n)),
    "array": np.arange,
    "batch": lambda n: Batch({"x": np.arange(n), "r": Ragged.from_rows([[i] * (i % 3) for i in range(n)], int)}),
    "columns": lambda n: {"a": list(range(n)), "b": np.arange(n)},
}


def plain(value):
    if isinstance(value, Batch):
        return {"x": value["x"].tolist(), "r": [row.tolist() for row in value.ragged("r")]}
    if isinstance(value, dict):
        return {name: plain(column) for name, column in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def cut(value, start, stop):
    if isinstance(value, Batch):
        return value.rows(start, stop)
    if isinstance(value, dict):
        return {name: column[start:stop] for name, column in value.items()}
    return value[start:stop]


@pytest.mark.parametrize("members", range(1, 6))
@pytest.mark.parametrize("kind", KINDS)
def test_shard_splits_every_type_evenly_and_in_order(stage, kind, members):
    group = stage.trainer(ACTOR=members).RG_ACTOR
    for count in range(members, 21):
        value = KINDS[kind](count)
        cuts = even_cuts(count, members)
        expected = [plain(cut(value, start, stop)) for start, stop in zip(cuts, cuts[1:], strict=False)]
        assert [plain(part) for part in group.echo(Shard(value))] == expected


ROWS_OF_TOKENS = Batch({"tokens": Ragged.from_rows([[1] * 8, [2], [3], [4] * 2], int)})
CALLS = {
    "a list of one item for each": (lambda t: t.RG_ROLLOUT.echo(["a", "b"]), ["a", "b"]),
    "a longer list": (lambda t: t.RG_ROLLOUT.echo([0, 1, 2]), [[0, 1], [2]]),
    "a list that is replicated": (lambda t: t.RG_ROLLOUT.echo(Replicate([1, 2])), [[1, 2], [1, 2]]),
    "a method without shards": (lambda t: t.RG_ROLLOUT.whole([1, 2]), [[1, 2], [1, 2]]),
    "keyword arguments": (
        lambda t: t.RG_ROLLOUT.echo([1, 2], key=[3, 4, 5]),
        [((1,), {"key": [3, 4]}), ((2,), {"key": [5]})],
    ),
    "rows of an array": (
        lambda t: [part.tolist() for part in t.RG_ROLLOUT.echo(Shard(np.arange(6).reshape(3, 2)))],
        [[[0, 1], [2, 3]], [[4, 5]]],
    ),
    "a batch by its tokens": (
        lambda t: [len(part) for part in t.RG_ROLLOUT.echo(Shard(ROWS_OF_TOKENS, by="tokens"))],
        [1, 3],
    ),
    "an async method": (lambda t: t.RG_ROLLOUT.slowly([3, 4]), [6, 8]),
    "pending results": (lambda t: t.RG_ROLLOUT.echo(t.RG_ROLLOUT.later(["a", "b"])), ["a", "b"]),
    "more pending results": (
        lambda t: t.RG_ROLLOUT.echo(t.RG_ACTOR.later(list("abcde"))),
        [["a", "b", "c"], ["d", "e"]],
    ),
    "one pending result": (lambda t: t.RG_ACTOR.echo(Replicate(t.RG_ROLLOUT.later(["x", "y"])[0])), ["x"] * 5),
    "pending rows to replicas": (
        lambda t: [part["x"].tolist() for part in t.RG_REWARD.echo(Shard(t.RG_ROLLOUT.rows([2, 2])))],
        [[0, 1], [100, 101]],
    ),
    "rank 0 alone": (lambda t: t.RG_ACTOR.first([1, 2, 3]), [(0, [1, 2, 3])]),
    "functions before and after": (lambda t: t.RG_ROLLOUT.prepared(1), 40),
    "a function before": (lambda t: t.RG_ROLLOUT.swapped("a", "b"), [("b", "a"), ("b", "a")]),
    "a function after a pending call": (lambda t: t.RG_ROLLOUT.counted_later([1, 2]).result(), 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_gives_the_results_in_rank_order(stage, name):
    call, results = CALLS[name]
    assert call(stage.trainer()) == results


@pytest.mark.parametrize("value", [7, "text", {"a": [1, 2]}, None, {1, 2}, np.float64(3)], ids=repr)
def test_value_without_rows_goes_to_every_worker(stage, value):
    assert stage.trainer().RG_ROLLOUT.echo(value) == [value, value]


def test_raw_handle_has_the_methods_of_the_workload(stage):
    trainer = stage.trainer()
    assert len(trainer.rollouts) == 2
    assert stage.call_raw(trainer.rollouts[1], "echo", "hello") == "hello"


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "batch"])
def test_shard_of_too_few_rows_is_refused_before_sending(stage, kind):
    group = stage.trainer(ACTOR=3).RG_ACTOR
    before = group.call_count()
    with pytest.raises(errors.ShardError, match="argument 0 has 2 rows, too few to split over 3 shards"):
        group.echo(KINDS[kind](2))
    assert group.call_count() == before


class Counted:
    serialised = 0

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        Counted.serialised += 1
        return str, (self.text,)


@pytest.mark.parametrize("members", [2, 5])
def test_broadcast_value_is_stored_once(stage, members):
    Counted.serialised = 0
    assert stage.trainer(ACTOR=members).RG_ACTOR.echo(Counted("once")) == ["once"] * members
    assert Counted.serialised == 1


def test_workers_know_their_ranks_and_addresses(stage):
    answers = stage.trainer().RG_ACTOR.who()
    assert [answer["properties"] for answer in answers] == [(rank, 5, 5, rank, 5) for rank in range(5)]
    assert [answer["env"]["RANK"] for answer in answers] == list("01234")
    assert {answer["env"]["WORLD_SIZE"] for answer in answers} == {"5"}
    assert {answer["env"]["ROLE"] for answer in answers} == {"ACTOR"}
    assert len({answer["name"] for answer in answers}) == 5
    (address,) = {answer["env"]["MASTER_ADDR"] for answer in answers}
    (port,) = {answer["env"]["MASTER_PORT"] for answer in answers}
    assert address == "127.0.0.1" or address.count(".") == 3
    assert int(port) > 1000
    assert stage.trainer().RG_ACTOR.address()[0] == (address, int(port), None, {"lr": 0.5})


def test_call_without_blocking_gives_pending_results(stage):
    pending = stage.trainer(ROLLOUT=2).RG_ROLLOUT.later([1, 2])
    assert len(pending) == 2 and pending.wait() is None
    assert pending.result(timeout=30) == [1, 2]
    assert pending[1].result() == 2


def test_pending_results_can_be_awaited(stage):
    async def wait():
        pending = trainer.RG_ROLLOUT.later([1, 2])
        return await pending, await pending[0], await asyncio.gather(pending, trainer.RG_ROLLOUT.later([3, 4]))

    trainer = stage.trainer(ROLLOUT=2)
    assert asyncio.run(wait()) == ([1, 2], 1, [[1, 2], [3, 4]])


@pytest.mark.parametrize("takers", range(1, 6))
def test_pending_rows_are_split_over_any_number_of_workers(stage, takers):
    trainer = stage.trainer(ACTOR=takers, ROLLOUT=2)
    parts = trainer.RG_ACTOR.echo(Shard(trainer.RG_ROLLOUT.rows([4, 3])))
    joined = Batch.concat(parts)
    assert joined["x"].tolist() == [0, 1, 2, 3, 100, 101, 102]
    assert joined["text"] == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2"]
    assert [len(part) for part in parts] == np.diff(even_cuts(7, takers)).tolist()


def test_failed_pending_result_fails_the_next_call(stage):
    trainer = stage.trainer(ROLLOUT=2, ACTOR=2)
    # Both fail at the same time: whichever is heard of first is told, each with its own words.
    with pytest.raises(InvocationError, match=r"ROLLOUT\[([01])\]\.late_boom.*OddError: from rank \1") as caught:
        trainer.RG_ACTOR.echo(trainer.RG_ROLLOUT.late_boom())
    assert caught.value.role == "ROLLOUT"


@pytest.mark.parametrize("wrong", [0, 1])
def test_argument_without_pickle_is_refused(stage, wrong):
    group = stage.trainer(ROLLOUT=2).RG_ROLLOUT
    before = group.call_count()
    parts = [1, 2]
    parts[wrong] = threading.Lock()
    with pytest.raises(errors.CallError, match="ROLLOUT.echo: argument 0 cannot be sent: TypeError: cannot pickle"):
        group.echo(parts)
    assert group.call_count() == before


def test_result_without_pickle_is_an_error(stage):
    with pytest.raises(InvocationError, match=r"ROLLOUT\[[01]\]\.lock.*cannot pickle"):
        stage.trainer(ROLLOUT=2).RG_ROLLOUT.lock()


def test_leaving_the_process_is_the_users_error(stage):
    with pytest.raises(InvocationError, match="SystemExit: 3") as caught:
        stage.trainer(ROLLOUT=2).RG_ROLLOUT.leave()
    assert not isinstance(caught.value, WorkloadDied)


def test_late_ranks_are_named_beside_the_arrived_results(stage):
    with pytest.raises(InvocationTimeout, match="no answer within 0.5 s from ranks 1, 3") as caught:
        stage.trainer(ACTOR=5).RG_ACTOR.sleepy(Replicate([1, 3]))
    assert caught.value.late == (1, 3)
    assert caught.value.arrived == {0: 0, 2: 2, 4: 4}


def test_options_change_one_call(stage):
    group = stage.trainer(ROLLOUT=2).RG_ROLLOUT
    assert group.sleepy.options(timeout=30)(Replicate([1])) == [0, 1]
    assert group.echo.options(blocking=False)(5).result() == [5, 5]
    with pytest.raises(TypeError, match="did you mean 'timeout'"):
        group.echo.options(timout=3)


def test_error_has_role_rank_method_traceback_and_cause(stage):
    with pytest.raises(InvocationError) as caught:
        stage.trainer().RG_ACTOR.boom(3)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("ACTOR", 3, "boom")
    assert error.node
    assert "raise OddError" in error.remote_traceback
    assert "toys.py" in error.remote_traceback
    assert isinstance(error.__cause__, OddError)
    assert str(error.__cause__) == "the user's own words"
    assert "ACTOR[3].boom" in str(error)


def test_misspelt_method_is_refused_before_sending(stage):
    group = stage.trainer().RG_ACTOR
    before = group.call_count()
    with pytest.raises(errors.UnknownMethod, match="'ecko' is no method of Toy.*did you mean 'echo'"):
        group.ecko(1)
    with pytest.raises(errors.UnknownMethod, match="a property, not a method"):
        group.rank()
    assert not hasattr(group, "ecko")
    assert group.call_count() == before


def test_workers_of_a_replica_share_a_shard_and_a_result(stage):
    group = stage.trainer().RG_REWARD
    assert (group.world_size, group.data_parallel_size) == (4, 2)
    assert group.echo(Shard([1, 2, 3])) == [[1, 2], [3]]
    assert group.later(["a", "b"]).result() == ["a", "b"]
    assert [answer["properties"][0] for answer in group.who()] == [0, 2]


def test_argument_changed_by_a_worker_is_a_copy(stage):
    values = ["mine"]
    assert stage.trainer(ROLLOUT=2).RG_ROLLOUT.mutate(Replicate(values)) == [2, 2]
    assert values == ["mine"]


def kept(call_id, method, *args, **terms):
    return Call(call_id, method, args, {}, keep=True, **terms)


def raw(method):
    return Call(RAW_CALL, method, (), {})


@pytest.fixture
def port(stage):
    """The port of the stage, whose workers forget the results that they keep after the test."""
    yield stage.port
    for rank in (1, 2, 3):
        stage.port.submit("ACTOR", rank, raw(FORGET)).result(30)


def test_call_is_carried_out_once_for_its_id(port):
    before = port.submit("ACTOR", 1, raw("call_count")).result(30)
    answers = [port.submit("ACTOR", 1, kept((1, 0), "echo", value)).result(30) for value in ("first", "second")]
    assert answers == ["first", "first"]
    assert port.submit("ACTOR", 1, raw("call_count")).result(30) == before + 1
    assert port.submit("ACTOR", 1, kept((2, 0), "echo", "third", settled=1)).result(30) == "third"


def test_another_method_at_the_same_id_diverges(port):
    port.submit("ACTOR", 2, kept((1, 0), "echo", 1)).result(30)
    with pytest.raises(ReplayDiverged, match=r"ACTOR\[2\].keep: call \(1, 0\) was 'echo' the first time"):
        port.submit("ACTOR", 2, kept((1, 0), "keep", 1)).result(30)
    with pytest.raises(ReplayDiverged, match=r"call \(0, 5\) is too late: call \(1, 0\) has already run"):
        port.submit("ACTOR", 2, kept((0, 5), "echo", 1)).result(30)


def test_call_does_not_run_before_the_one_it_follows(port):
    failing = port.submit("ROLLOUT", 0, raw("late_boom"))
    port.submit("ACTOR", 3, kept((1, 0), "echo", failing))
    skipped = port.submit("ACTOR", 3, kept((1, 1), "echo", 1, after=(1, 0)))
    with pytest.raises(errors.CallSkipped, match=r"ACTOR\[3\].echo: call \(1, 0\) has not run"):
        skipped.result(30)
    port.submit("ACTOR", 3, kept((1, 0), "echo", 0)).result(30)
    assert port.submit("ACTOR", 3, kept((1, 1), "echo", 1, after=(1, 0))).result(30) == 1


def test_error_of_a_call_is_stored_like_a_result(port):
    for _ in range(2):
        with pytest.raises(InvocationError, match="the user's own words") as caught:
            port.submit("ACTOR", 3, kept((1, 0), "boom", 3)).result(30)
        assert isinstance(caught.value.original, OddError)


def test_zy_replaced_trainer_is_refused(stage):
    """Late: from here on the worker refuses the other tests' trainers."""
    port = stage.port
    assert port.submit("ACTOR", 4, Call((1, 0), "echo", (1,), {}, epoch=8)).result(30) == 1
    with pytest.raises(errors.StaleCall, match=r"ACTOR\[4\].echo: attempt 7 of the trainer has been replaced"):
        port.submit("ACTOR", 4, Call((1, 1), "echo", (1,), {}, epoch=7)).result(30)


def test_zz_killed_worker_gives_an_error_within_two_seconds(stage):
    """Last: it takes a worker away from the shared stage."""
    group = stage.trainer().RG_ROLLOUT
    stage.kill("ROLLOUT", 1)
    with within(2.0), pytest.raises(WorkloadDied) as caught:
        group.echo(1)
    assert (caught.value.role, caught.value.rank, caught.value.retryable) == ("ROLLOUT", 1, True)
    assert caught.value.incarnation == 1


@pytest.mark.parametrize("wrapped", [lambda pending: pending, Shard, lambda pending: Replicate(pending[1])])
def test_zz_result_of_a_killed_worker_names_it(stage, wrapped):
    trainer = stage.trainer(ROLLOUT=2, ACTOR=2)
    pending = trainer.RG_ROLLOUT.rows(1)
    with pytest.raises(WorkloadDied) as caught:
        trainer.RG_ACTOR.echo(wrapped(pending))
    assert (caught.value.role, caught.value.rank, caught.value.incarnation) == ("ROLLOUT", 1, 1)
