# SPDX-License-Identifier: Apache-2.0
"""Mappings into frozen dataclasses, every problem at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import pytest
from annotated_types import Gt
from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.config.plain import to_plain
from dlrover.python.rl.config.typed import parse, rename_keys, require, salvage
from dlrover.python.rl.recipe.base.config import EngineConfig, LogConfig, PolicyConfig
from dlrover.python.rl.recipe.sft import SFTConfig


@dataclass(frozen=True)
class Optimizer:
    lr: Annotated[float, Gt(0.0)] = 1e-6
    kind: Literal["adamw", "sgd"] = "adamw"


@dataclass(frozen=True)
class Config:
    model: str
    steps: Annotated[int, Gt(0)] = 10
    optimizer: Optimizer = Optimizer()
    parts: list[Optimizer] = field(default_factory=list)
    named: Mapping[str, Optimizer] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)
    maybe: Optimizer | None = None


@dataclass(frozen=True)
class Critic:
    optimizer: Optimizer = Optimizer(lr=5e-6)


@dataclass(frozen=True)
class Trainer:
    critic: Critic = Critic()
    optimizer: Optimizer = Optimizer(lr=1e-5, kind="sgd")


def found(data):
    value, problems = parse(Config, data, "config")
    assert value is None
    return {problem.where: problem.what for problem in problems}


def test_a_mapping_becomes_the_dataclass_with_its_defaults():

    given = OmegaConf.create({"model": "m", "optimizer": {"lr": 2}, "extra": {"a": 1}})
    assert parse(Config, given, "config") == (Config("m", optimizer=Optimizer(2.0), extra={"a": 1.0}), [])
    assert require(Config, {"model": "m"}, "config") == Config("m")


@pytest.mark.parametrize("read", [parse, salvage])
def test_what_is_not_given_of_a_part_is_as_in_the_default_that_holds_there(read):
    given = {"critic": {"optimizer": {"kind": "sgd"}}, "optimizer": {"lr": 2.0}}
    assert read(Trainer, given, "config") == (Trainer(Critic(Optimizer(5e-6, "sgd")), Optimizer(2.0, "sgd")), [])
    assert read(Trainer, {"critic": {}}, "config") == (Trainer(), [])
    assert given == {"critic": {"optimizer": {"kind": "sgd"}}, "optimizer": {"lr": 2.0}}


def test_all_problems_are_said_with_their_places():
    assert found(
        {
            "step": 3,
            "steps": 0,
            "optimizer": {"lr": -1, "kid": "sgd", "kind": "adam"},
            "parts": [{"lr": 1}, {"l": 1}],
            "extra": {"a": "x"},
            "maybe": {"lrr": 1},
        }
    ) == {
        "config.model": "is required",
        "config.step": "unknown key 'step'; did you mean 'steps'?",
        "config.steps": "input should be greater than 0, got 0",
        "config.optimizer.lr": "input should be greater than 0, got -1",
        "config.optimizer.kid": "unknown key 'kid'; did you mean 'kind'?",
        "config.optimizer.kind": "input should be 'adamw' or 'sgd', got 'adam'",
        "config.parts.1.l": "unknown key 'l'; did you mean 'lr'?",
        "config.extra.a": "input should be a valid number, got 'x'",
        "config.maybe.lrr": "unknown key 'lrr'; did you mean 'lr'?",
    }


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"threads": 2}, "engine.threads"),
        ({"thraeds": 2}, "engine.threads"),
        ({"parallel": {"ddp_size": 2}}, "engine.parallel"),
        ({"engine": {"ddp_size": 2}}, "engine.parallel.ddp_size"),
        ({"data": {"lr": 1.0}}, "optimizer.lr"),
        ({"stps": 2}, "steps"),
    ],
)
def test_an_unknown_key_that_another_place_has_is_answered_with_that(given, named):
    data = {"train": "x", **given.pop("data", {})}
    (error,) = parse(SFTConfig, {"model": "m", "data": data, **given}, "config")[1]
    assert error.what.endswith(f"; did you mean '{named}'?")
    (error,) = parse(EngineConfig, {"ddp_size": 2}, "config.engine")[1]
    assert error.what.endswith("; did you mean 'engine.parallel.ddp_size'?")


@pytest.mark.parametrize("data", [None, 3, "text", [1]])
def test_what_is_no_mapping_is_a_problem(data):
    assert list(found(data)) == ["config"]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"max_tokens_per_microbatch": 0}, "input should be greater than 0, or 'auto', got 0"),
        ({"gradient_checkpointing": None}, "input should be a valid boolean, or 'auto', got None"),
        ({"max_batch": 0}, "input should be greater than 0, got 0"),
    ],
)
def test_a_value_that_no_branch_of_a_union_takes_is_one_problem(given, what):
    value, errors = parse(EngineConfig, given, "config.engine")
    assert value is None
    assert errors == [ConfigError(f"config.engine.{next(iter(given))}", what)]


@pytest.mark.parametrize("single", ["wandb", {"my:Tracker": {"file": "x"}}])
def test_a_single_item_in_place_of_a_list_is_told_how_a_list_is_written(single):
    _, errors = parse(LogConfig, {"trackers": single}, "config.log")
    assert errors == [ConfigError("config.log.trackers", f"input should be a list, [...], got {single!r}")]
    _, errors = parse(Config, {"model": "m", "parts": {"lr": 1}}, "config")
    assert errors == [ConfigError("config.parts", "input should be a list, [...], got {'lr': 1}")]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"lora": {"rank": True}}, "lora.rank: input should be a valid integer, got True"),
        ({"lora": {"alpha": True}}, "lora.alpha: input should be a valid number, got True"),
        ({"device_memory_gb": False}, "device_memory_gb: input should be a valid number, got False"),
        (
            {"max_tokens_per_microbatch": True},
            "max_tokens_per_microbatch: input should be a valid integer, or 'auto', got",
        ),
        ({"shard_frozen": 1}, "shard_frozen: input should be a valid boolean, got 1"),
        ({"shard_frozen": 0.0}, "shard_frozen: input should be a valid boolean, got 0.0"),
        ({"gradient_checkpointing": 0}, "gradient_checkpointing: input should be a valid boolean, or 'auto', got 0"),
    ],
)
def test_a_boolean_is_no_number_and_a_number_no_boolean(given, what):
    value, (error,) = parse(EngineConfig, given, "engine")
    assert value is None
    assert str(error).startswith(f"engine.{what}")


def test_a_whole_float_is_an_integer_and_an_integer_a_number():
    given = {"max_batch": 1e3, "device_memory_gb": 80}
    assert require(EngineConfig, given, "engine") == EngineConfig(max_batch=1000, device_memory_gb=80.0)


def test_a_text_is_neither_a_number_nor_a_boolean_whatever_it_says():
    given = {"threads": "2", "device_memory_gb": "80", "shard_frozen": "true", "max_tokens_per_microbatch": "4"}
    _, errors = parse(EngineConfig, given, "engine")
    assert {error.where.removeprefix("engine."): error.what for error in errors} == {
        "threads": "input should be a valid integer, got '2'",
        "device_memory_gb": "input should be a valid number, got '80'",
        "shard_frozen": "input should be a valid boolean, got 'true'",
        "max_tokens_per_microbatch": "input should be a valid integer, or 'auto', got '4'",
    }


@dataclass(frozen=True)
class Row:
    size: int


@dataclass(frozen=True)
class Table:
    rows: list[Row]


def test_what_is_wrong_inside_a_list_is_one_error():
    assert [str(error) for error in parse(Table, {"rows": [{"size": 1, "sise": 2}]}, "config")[1]] == [
        "config.rows.0.sise: unknown key 'sise'; did you mean 'size'?"
    ]


@dataclass(frozen=True)
class Bounded:
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError("low is above high")


def test_an_unknown_key_does_not_hide_what_is_wrong_with_the_others():
    places = [error.where for error in parse(Bounded, {"lo": 3, "low": 2}, "config")[1]]
    assert places == ["config.lo", "config"]
    places = [error.where for error in parse(Bounded, {"low": 2, "high": "3"}, "config")[1]]
    assert places == ["config.high"], "what stands for a wrong value is not judged"
    optimizer = {"lrr": 3, "momentum": 0.5}
    places = [error.where for error in parse(PolicyConfig, {"steps": "2", "optimizer": optimizer}, "config")[1]]
    assert sorted(places) == ["config.model", "config.optimizer", "config.optimizer.lrr", "config.steps"]


@pytest.mark.parametrize(
    ("given", "place", "what"),
    [
        ({"optimizer": [1]}, "optimizer", "must be a mapping with lr, kind, got [1]"),
        ({"maybe": 4}, "maybe", "must be a mapping with lr, kind, or null, got 4"),
        ({"parts": [{}, "sgd"]}, "parts.1", "must be a mapping with lr, kind, got 'sgd'"),
        ({"named": {"lr": 3}}, "named.lr", "must be a mapping with lr, kind, got 3"),
        ({"named": {"lr": {"lr": 0}}}, "named.lr.lr", "input should be greater than 0, got 0"),
        ({"optimizer": None}, "optimizer", "must be a mapping with lr, kind, got None"),
    ],
)
def test_what_has_to_be_a_mapping_is_answered_with_its_keys(given, place, what):
    assert found({"model": "m", **given}) == {f"config.{place}": what}


@dataclass(frozen=True)
class Branches:
    weights: str | Mapping[str, float] = ""
    limits: Mapping[str, Annotated[int, Gt(0)] | Literal["auto"] | None] = field(default_factory=dict)
    either: Optimizer | Literal["auto"] = "auto"


@pytest.mark.parametrize("name", ["none", "int", "str", "dict[str,float]", "1.5", "a"])
def test_a_key_that_is_called_like_a_branch_of_a_union_stays_in_the_place(name):
    for key in {name, 1.5 if name == "1.5" else name}:
        _, errors = parse(Branches, {"weights": {key: "x"}}, "config")
        assert [error.where for error in errors] == [f"config.weights.{name}"]
    _, errors = parse(Branches, {"limits": {name: 0}}, "config")
    what = "input should be greater than 0, or 'auto', got 0"
    assert errors == [ConfigError(f"config.limits.{name}", what)]


@pytest.mark.parametrize(
    ("given", "place", "what"),
    [
        (3, "", "must be a mapping with lr, kind, or 'auto', got 3"),
        ({"lr": 0}, ".lr", "input should be greater than 0, got 0"),
        ({"l": 0}, ".l", "unknown key 'l'; did you mean 'lr'?"),
    ],
)
def test_the_name_of_a_dataclass_among_others_is_in_no_place(given, place, what):
    _, errors = parse(Branches, {"either": given}, "config")
    assert errors == [ConfigError(f"config.either{place}", what)]


def test_require_raises_all_problems():
    with pytest.raises(InvalidJob) as caught:
        require(Config, {"steps": 0, "x": 1}, "config")
    assert [problem.where for problem in caught.value.errors] == ["config.model", "config.steps", "config.x"]


@pytest.mark.parametrize(
    ("value", "said"), [("${nothing}", "Interpolation key 'nothing' not found"), ("???", "issing")]
)
def test_unresolved_values_are_problems(value, said):
    (what,) = found(OmegaConf.create({"model": value})).values()
    assert said in what


def test_plain_leaves_other_values_alone():
    value = object()
    assert to_plain(value) is value
    assert to_plain(OmegaConf.create([1, "${0}"])) == [1, 1]


@dataclass(frozen=True)
class Welcoming(Config):
    other_names: ClassVar[Mapping[str, str]] = {"actor.optim.lr": "optimizer.lr", "n": "steps"}


@pytest.mark.parametrize("read", [parse, salvage])
def test_a_key_by_its_name_elsewhere_is_taken_for_the_schemas_own(read):
    given = OmegaConf.create({"model": "m", "actor": {"optim": {"lr": 2}}, "n": 3, "optimizer": {"kind": "sgd"}})
    assert read(Welcoming, given, "config") == (Welcoming("m", 3, Optimizer(2.0, "sgd")), [])


def test_a_later_other_name_counts_and_null_is_the_default():
    given = {"model": "m", "n": 3, "steps": 4, "actor": {"optim": {"lr": None}}}
    values, lines = rename_keys(Welcoming, given, "config", ["n"])
    assert values == {"model": "m", "steps": 3}
    assert lines == [
        "config.actor.optim.lr is read as optimizer.lr, its name here",
        "config.n is read as steps, its name here",
    ]


@pytest.mark.parametrize("read", [parse, salvage])
def test_a_key_by_two_names_and_what_stands_beside_it_are_problems(read):
    given = {"model": "m", "n": 3, "steps": 4, "optimizer": {"kind": "sgd", "lr": 0}}
    value, problems = read(Welcoming, given, "config")
    assert value == (Welcoming("m", 4, Optimizer(kind="sgd")) if read is salvage else None)
    assert list(map(str, problems)) == [
        "config.n: is another name of steps: leave one of them out",
        "config.optimizer.lr: input should be greater than 0, got 0",
    ]
    _, problems = read(Welcoming, {"model": "m", "actor": {"optim": {"lr": 2, "x": 1}}, "optimizer": 5}, "config")
    assert {problem.where for problem in problems} == {"config.actor.optim.x", "config.optimizer"}


@pytest.mark.parametrize(
    ("given", "place", "stand_in"),
    [
        ({"model": 4}, "model", Config("")),
        ({"optimizer": 4}, "optimizer", Config("m")),
        ({"named": {"a": 4}}, "named.a", Config("m", named={"a": Optimizer()})),
        ({"named": {"a": {"lr": True}}}, "named.a.lr", Config("m", named={"a": Optimizer()})),
        ({"named": 4}, "named", Config("m")),
        ({"parts": [{}, 4]}, "parts.1", Config("m")),
        ({"extra": {"a": "x", "b": 1}}, "extra.a", Config("m", extra={"b": 1})),
    ],
)
def test_a_wrong_value_of_any_kind_leaves_something_to_find_further_errors_with(given, place, stand_in):
    value, (problem,) = salvage(Config, {"model": "m", **given}, "config")
    assert (value, problem.where) == (stand_in, f"config.{place}")


def test_of_a_union_a_wrong_value_is_left_out():
    value, (problem,) = salvage(EngineConfig, {"max_tokens_per_microbatch": "x", "threads": 2}, "engine")
    assert (value, problem.where) == (EngineConfig(threads=2), "engine.max_tokens_per_microbatch")


def test_all_references_that_lead_nowhere_are_said_beside_other_problems_with_the_nearest_key():
    text = """
        lr: 1
        config: {steps: 0, mdel: m, model: '${mdel}', optimizer: {lr: '${stps}', kind: '${kind}'}, maybe: '???',
                 extra: {a: '${config.nowhere}', b: '${config.optimiser.lr}'}}
        """
    value, problems = salvage(Config, OmegaConf.create(text)["config"], "config")
    assert {problem.where: problem.what for problem in problems} == {
        "config.model": "Interpolation key 'mdel' not found; did you mean '${config.mdel}'?",
        "config.optimizer.lr": "Interpolation key 'stps' not found; did you mean '${config.steps}'?",
        "config.optimizer.kind": "Interpolation key 'kind' not found",
        "config.maybe": "Missing mandatory value: config.maybe",
        "config.extra.a": "Interpolation key 'config.nowhere' not found",
        "config.extra.b": "Interpolation key 'config.optimiser.lr' not found; did you mean '${config.optimizer.lr}'?",
        "config.mdel": "unknown key 'mdel'; did you mean 'model'?",
        "config.steps": "input should be greater than 0, got 0",
    }
    assert value == Config("")


def test_a_reference_that_leads_nowhere_is_placed_below_the_key_of_what_is_read():
    with pytest.raises(InvalidJob) as caught:
        to_plain(OmegaConf.create({"a": {"b": ["${c}"]}, "d": {"c": 1}}), "config")
    (problem,) = caught.value.errors
    assert str(problem) == "config.a.b[0]: Interpolation key 'c' not found; did you mean '${d.c}'?"
    assert caught.value.salvaged == {"a": {"b": []}, "d": {"c": 1}}


@dataclass(frozen=True)
class Judge:
    api_key: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)


@pytest.mark.parametrize("where", ["", "config"])
@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"api_key": 12345678}, "input should be a valid string"),
        ({"api_key": ["canary"]}, "input should be a valid string, got ['***']"),
        ({"limits": {"password": 0.5}}, "input should be a valid integer, got a number with a fractional part"),
        ({"limits": {"rows": 0.5}}, "input should be a valid integer, got a number with a fractional part, got 0.5"),
        ({"limits": ["https://canary@host"]}, "must be a mapping, got ['***']"),
    ],
)
def test_the_error_of_a_wrong_secret_does_not_show_it(where, given, fault):
    _, (error,) = parse(Judge, given, where)
    assert error.what == fault


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        ({"API_KEY": 12345678}, "input should be a valid string"),
        ({"MODE": 3}, "input should be a valid string, got 3"),
        ("API_KEY=canary", "must be a mapping"),
        (["API_KEY=canary"], "must be a mapping, got ['***']"),
    ],
)
def test_the_error_of_a_wrong_variable_does_not_show_a_secret_one(env, fault):
    _, (error,) = parse(Judge, {"env": env}, "")
    assert error.what == fault
