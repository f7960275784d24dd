# SPDX-License-Identifier: Apache-2.0
"""Calls as plain values: what is written is what comes back, and what cannot be written is said."""

import enum
import importlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import DataError, ResultLost
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.state_tree import dump, load
from dlrover.python.rl.recipe.base.updates import UpdatePlan
from dlrover.python.rl.runtime.checkpoint.calls import CallRecord, RecordedCall, load_calls, note_modules


class Kind(enum.StrEnum):
    GOOD = "good"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True)
class Inner:
    ratio: float
    kinds: tuple[Kind, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    names: list[str] = field(default_factory=list)
    made: int = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "made", 7)


@dataclass(frozen=True, slots=True)
class Slotted:
    value: int


@dataclass
class Loaded:
    """One whose construction would show."""

    value: int
    constructed = 0

    def __post_init__(self):
        type(self).constructed += 1


def dumped(*args, **kwargs):
    note_modules()
    return dump({"calls": [RecordedCall.of("update", args, kwargs).dump()]})


def written(*args, **kwargs):
    """The arguments of a call that was written to a file and read."""
    tree = dumped(*args, **kwargs)
    (call,) = load_calls(load(tree.skeleton, [memoryview(bytes(buffer)) for buffer in tree.buffers]))
    assert call.method == "update"
    return call.load()


def test_what_trainers_pass_comes_back_the_same():
    batch = Batch({"tokens": Ragged.from_rows([[1, 2], [3]]), "weight": np.float32([0.5, 1]), "text": ["a", "b"]})
    plan = UpdatePlan(0.7, 3, dtypes={"values": "float32"})
    outer = Outer(Inner(0.1, (Kind.GOOD,)), ["x"])
    args, kwargs = written(batch, plan, [outer, None], seed=(1, 2), table={"a": {1: True}})
    assert args[1] == plan and args[2] == [outer, None] and kwargs == {"seed": (1, 2), "table": {"a": {1: True}}}
    assert args[2][0].inner.kinds[0] is Kind.GOOD
    assert args[0].objects("text") == ["a", "b"] and args[0].dense("weight").tobytes() == batch["weight"].tobytes()
    assert [row.tolist() for row in args[0].ragged("tokens")] == [[1, 2], [3]]


def test_tensors_and_slots_come_back_too():
    (tensor, slotted), _ = written(torch.arange(3), Slotted(4))
    assert tensor.tolist() == [0, 1, 2] and slotted == Slotted(4)


def test_no_constructor_runs_when_arguments_are_read():
    value = Loaded(3)
    before = Loaded.constructed
    (read,), _ = written(value)
    assert read == value and Loaded.constructed == before


PLAINLESS = {
    "a path": Path("x"),
    "a set": {1, 2},
    "a function": lambda: None,
    "an object": SimpleNamespace(a=1),
    "a tensor with a gradient": torch.ones(1, requires_grad=True),
    "what looks like a class": {("dataclass", "a:B"): {}},
    "an array in another order": np.zeros((2, 3), order="F"),
    "a tensor in another order": torch.zeros(2, 3).t(),
    "two flags": Access.READ | Access.WRITE,
    "no flag": Access(0),
    "an object in a batch": Batch({"x": [object()]}),
    "a class of a function": dataclass(type("Local", (), {"__annotations__": {"x": int}}))(1),
}


@pytest.mark.parametrize("value", PLAINLESS.values(), ids=PLAINLESS)
def test_what_has_no_plain_form_is_refused_when_it_is_written(value):
    with pytest.raises(DataError):
        dumped(value)


def test_an_object_with_more_than_its_fields_is_refused():
    value = Loaded(1)
    value.more = 2
    with pytest.raises(DataError, match="more than its fields"):
        written(value)


def test_what_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(DataError, match="contains itself"):
        written(value)


def test_arguments_are_those_before_the_call():
    rows, array = [1], np.zeros(2)
    call = RecordedCall.of("update", (rows, array), {})
    rows.append(2)
    array[0] = 9
    assert [part if isinstance(part, list) else part.tolist() for part in call.load()[0]] == [[1], [0.0, 0.0]]


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "nowhere:Thing", "dlrover.python.rl.nowhere:Thing", "builtins:int"]
)
def test_a_file_cannot_name_what_is_no_dataclass(name):
    with pytest.raises(DataError):
        load_calls({"calls": [["update", [[{("dataclass", name): {}}], {}]]]})


def test_a_file_cannot_make_this_process_import_anything():
    sys.modules.pop("colorsys", None)
    with pytest.raises(DataError):
        load_calls({"calls": [["update", [[{("dataclass", "colorsys:Thing"): {}}], {}]]]})
    assert "colorsys" not in sys.modules


@pytest.mark.parametrize(
    "tree", [None, {}, {"calls": 3}, {"calls": [1]}, {"calls": [["update", 3, False]]}], ids=json.dumps
)
def test_what_is_no_file_of_calls_is_refused(tree):
    with pytest.raises(DataError):
        load_calls(tree)


def test_a_class_that_came_with_an_argument_may_not_be_there_in_another_process(tmp_path, monkeypatch):
    note_modules()
    (tmp_path / "module_of_a_plan.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Plan:\n  x: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = importlib.import_module("module_of_a_plan").Plan(1)
    with pytest.raises(DataError, match="may not have"):
        RecordedCall.of("update", (plan,), {})
    note_modules()
    RecordedCall.of("update", (plan,), {})


def of_step(step):
    return [["update", [[step], {}]]]


def record(calls, *steps):
    for step in steps:
        with calls.recording(step, "update", (step,), {}):
            pass


def test_the_calls_of_a_step_are_kept_until_it_is_settled():
    calls = CallRecord()
    record(calls, 1, 1, 2)
    assert calls.calls_of(1) == of_step(1) * 2 and calls.calls_of(2) == of_step(2)
    calls.settle(1)
    assert calls.calls_of(1) == [] and calls.calls_of(2) == of_step(2)


def test_a_call_after_the_commit_of_its_step_is_part_of_the_next_one():
    calls = CallRecord()
    record(calls, 1)
    assert calls.calls_of(1) == of_step(1)
    record(calls, 1)
    calls.settle(1)
    record(calls, 2)
    assert calls.calls_of(2) == of_step(1) + of_step(2)


def test_one_call_without_a_plain_form_takes_its_step_along():
    calls = CallRecord()
    with calls.recording(1, "update", (object(),), {}):
        pass
    record(calls, 1)
    assert calls.calls_of(1) is None and calls.calls_of(2) == []
    calls.settle(1)
    assert calls.calls_of(2) == []


def test_one_after_the_commit_of_its_step_takes_the_next_one_along():
    calls = CallRecord()
    assert calls.calls_of(1) == []
    with calls.recording(1, "update", (object(),), {}):
        pass
    calls.settle(1)
    assert calls.calls_of(2) is None


def test_a_call_whose_arguments_raise_runs_all_the_same():
    class Touchy:
        @property
        def __dict__(self):
            raise ZeroDivisionError

    calls, ran = CallRecord(), []
    with calls.recording(1, "update", (dataclass(Touchy)(),), {}):
        ran.append(1)
    assert ran and calls.calls_of(1) is None


def test_whether_an_error_would_come_again_is_not_known():
    calls = CallRecord()
    with pytest.raises(ZeroDivisionError), calls.recording(1, "update", (), {}):
        raise ZeroDivisionError
    assert calls.calls_of(1) is None


def test_a_call_that_did_not_run_is_not_repeated():
    calls = CallRecord()
    with pytest.raises(ResultLost), calls.recording(1, "update", (), {}):
        raise ResultLost("gone", role="ACTOR", rank=0, method="update")
    assert calls.calls_of(1) == []
