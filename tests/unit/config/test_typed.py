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
from dlrover.python.rl.recipe.base.config import EngineConfig, PolicyConfig
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


def faults(data):
    value, problems = parse(Config, data, "config")
    assert value is None
    return {problem.where: problem.what for problem in problems}


def test_parse_makes_the_dataclass_with_its_defaults():
    values = OmegaConf.create({"model": "m", "optimizer": {"lr": 2}, "extra": {"a": 1}})
    assert parse(Config, values, "config") == (Config("m", optimizer=Optimizer(2.0), extra={"a": 1.0}), [])
    with pytest.raises(InvalidJob) as caught:
        require(Config, {"steps": 0, "x": 1}, "config")
    assert [problem.where for problem in caught.value.errors] == ["config.model", "config.steps", "config.x"]


@pytest.mark.parametrize("read", [parse, salvage])
def test_parse_fills_a_part_from_its_own_default(read):
    values = {"critic": {"optimizer": {"kind": "sgd"}}, "optimizer": {"lr": 2.0}}
    assert read(Trainer, values, "config") == (Trainer(Critic(Optimizer(5e-6, "sgd")), Optimizer(2.0, "sgd")), [])
    assert read(Trainer, {"critic": {}}, "config") == (Trainer(), [])
    assert values == {"critic": {"optimizer": {"kind": "sgd"}}, "optimizer": {"lr": 2.0}}


def test_parse_lists_all_problems_with_their_places():
    wrong = {"step": 3, "steps": 0, "optimizer": {"lr": -1, "kid": "sgd", "kind": "adam"}, "extra": {"a": "x"}}
    assert faults({**wrong, "parts": [{"lr": 1}, {"l": 1}], "maybe": {"lrr": 1}}) == {
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
    ("values", "named"),
    [
        ({"thraeds": 2}, "engine.threads"),
        ({"parallel": {"ddp_size": 2}}, "engine.parallel"),
        ({"engine": {"ddp_size": 2}}, "engine.parallel.ddp_size"),
        ({"data": {"lr": 1.0}}, "optimizer.lr"),
        ({"stps": 2}, "steps"),
    ],
)
def test_unknown_key_is_answered_with_its_other_place(values, named):
    data = {"train": "x", **values.pop("data", {})}
    (error,) = parse(SFTConfig, {"model": "m", "data": data, **values}, "config")[1]
    assert error.what.endswith(f"; did you mean '{named}'?")
    (error,) = parse(EngineConfig, {"ddp_size": 2}, "config.engine")[1]
    assert error.what.endswith("; did you mean 'engine.parallel.ddp_size'?")


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"max_tokens_per_microbatch": 0}, "input should be greater than 0, or 'auto', got 0"),
        ({"max_tokens_per_microbatch": True}, "input should be a valid integer, or 'auto', got True"),
        ({"gradient_checkpointing": None}, "input should be a valid boolean, or 'auto', got None"),
        ({"max_batch": 0}, "input should be greater than 0, got 0"),
        ({"device_memory_gb": False}, "input should be a valid number, got False"),
        ({"shard_frozen": "true"}, "input should be a valid boolean, got 'true'"),
    ],
)
def test_value_of_a_wrong_type_is_one_problem(values, fault):
    (key,) = values
    assert parse(EngineConfig, values, "config.engine") == (None, [ConfigError(f"config.engine.{key}", fault)])


@pytest.mark.parametrize(
    ("values", "place", "fault"),
    [
        ({"maybe": 4}, "maybe", "must be a mapping with lr, kind, or null, got 4"),
        ({"parts": [{}, "sgd"]}, "parts.1", "must be a mapping with lr, kind, got 'sgd'"),
        ({"parts": {"lr": 1}}, "parts", "input should be a list, [...], got {'lr': 1}"),
        ({"named": {"lr": 3}}, "named.lr", "must be a mapping with lr, kind, got 3"),
        ({"named": {"lr": {"lr": 0}}}, "named.lr.lr", "input should be greater than 0, got 0"),
        ({"model": "${nothing}"}, "model", "Interpolation key 'nothing' not found"),
        ({"model": "???"}, "model", "Missing mandatory value: model"),
    ],
)
def test_wrong_part_is_answered_with_its_keys(values, place, fault):
    assert faults(OmegaConf.create({"model": "m", **values})) == {f"config.{place}": fault}
    assert list(faults(None)) == ["config"]


def test_parse_takes_whole_floats_as_integers():
    values = {"max_batch": 1e3, "device_memory_gb": 80}
    assert require(EngineConfig, values, "engine") == EngineConfig(max_batch=1000, device_memory_gb=80.0)


@dataclass(frozen=True)
class Bounded:
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError("low is above high")


@pytest.mark.parametrize(
    ("schema", "values", "places"),
    [
        (Bounded, {"lo": 3, "low": 2}, {".lo", ""}),
        (Bounded, {"low": 2, "high": "3"}, {".high"}),  # the stand-in of a wrong value is not judged
        (PolicyConfig, {"optimizer": {"lrr": 3, "momentum": 0.5}}, {".model", ".optimizer", ".optimizer.lrr"}),
    ],
)
def test_unknown_key_does_not_hide_other_problems(schema, values, places):
    assert {error.where.removeprefix("config") for error in parse(schema, values, "config")[1]} == places


@dataclass(frozen=True)
class Branches:
    weights: str | Mapping[str, float] = ""
    limits: Mapping[str, Annotated[int, Gt(0)] | Literal["auto"] | None] = field(default_factory=dict)
    either: Optimizer | Literal["auto"] = "auto"


@pytest.mark.parametrize("name", ["none", "int", "str", "dict[str,float]", 1.5, "a"])
def test_key_named_like_a_branch_of_a_union_is_in_the_place(name):
    _, errors = parse(Branches, {"weights": {name: "x"}, "limits": {str(name): 0}}, "config")
    assert [error.where for error in errors] == [f"config.weights.{name}", f"config.limits.{name}"]
    assert errors[1].what == "input should be greater than 0, or 'auto', got 0"


@pytest.mark.parametrize(
    ("values", "place", "fault"),
    [
        (3, "", "must be a mapping with lr, kind, or 'auto', got 3"),
        ({"lr": 0}, ".lr", "input should be greater than 0, got 0"),
        ({"l": 0}, ".l", "unknown key 'l'; did you mean 'lr'?"),
    ],
)
def test_branch_of_a_union_is_not_in_the_place(values, place, fault):
    assert parse(Branches, {"either": values}, "config")[1] == [ConfigError(f"config.either{place}", fault)]


@dataclass(frozen=True)
class Welcoming(Config):
    other_names: ClassVar[Mapping[str, str]] = {"actor.optim.lr": "optimizer.lr", "n": "steps"}


@pytest.mark.parametrize("read", [parse, salvage])
def test_other_name_is_read_as_the_schemas_own(read):
    values = OmegaConf.create({"model": "m", "actor": {"optim": {"lr": 2}}, "n": 3, "optimizer": {"kind": "sgd"}})
    assert read(Welcoming, values, "config") == (Welcoming("m", 3, Optimizer(2.0, "sgd")), [])


def test_rename_keys_takes_later_names_and_drops_null():
    values = {"model": "m", "n": 3, "steps": 4, "actor": {"optim": {"lr": None}}}
    values, lines = rename_keys(Welcoming, values, "config", ["n"])
    assert values == {"model": "m", "steps": 3}
    renamed = {"actor.optim.lr": "optimizer.lr", "n": "steps"}
    assert lines == [f"config.{old} is read as {new}, its name here" for old, new in renamed.items()]


@pytest.mark.parametrize("read", [parse, salvage])
def test_key_by_two_names_is_a_problem(read):
    values = {"model": "m", "n": 3, "steps": 4, "optimizer": {"kind": "sgd", "lr": 0}}
    value, problems = read(Welcoming, values, "config")
    assert value == (Welcoming("m", 4, Optimizer(kind="sgd")) if read is salvage else None)
    assert str(problems[0]) == "config.n: is another name of steps: leave one of them out"
    assert [problem.where for problem in problems] == ["config.n", "config.optimizer.lr"]
    _, problems = read(Welcoming, {"model": "m", "actor": {"optim": {"lr": 2, "x": 1}}, "optimizer": 5}, "config")
    assert {problem.where for problem in problems} == {"config.actor.optim.x", "config.optimizer"}


@pytest.mark.parametrize(
    ("values", "place", "stand_in"),
    [
        ({"model": 4}, "model", Config("")),
        ({"named": {"a": 4}}, "named.a", Config("m", named={"a": Optimizer()})),
        ({"named": {"a": {"lr": True}}}, "named.a.lr", Config("m", named={"a": Optimizer()})),
        ({"parts": [{}, 4]}, "parts.1", Config("m")),
        ({"extra": {"a": "x", "b": 1}}, "extra.a", Config("m", extra={"b": 1})),
    ],
)
def test_salvage_leaves_a_stand_in_for_a_wrong_value(values, place, stand_in):
    value, (problem,) = salvage(Config, {"model": "m", **values}, "config")
    assert (value, problem.where) == (stand_in, f"config.{place}")
    value, (problem,) = salvage(EngineConfig, {"max_tokens_per_microbatch": "x", "threads": 2}, "engine")
    assert (value, problem.where) == (EngineConfig(threads=2), "engine.max_tokens_per_microbatch")


def test_salvage_lists_broken_references_with_the_nearest_key():
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


def test_to_plain_places_a_broken_reference_below_its_key():
    message = r"config.a.b\[0\]: Interpolation key 'c' not found; did you mean '\${d.c}'\?$"
    with pytest.raises(InvalidJob, match=message) as caught:
        to_plain(OmegaConf.create({"a": {"b": ["${c}"]}, "d": {"c": 1}}), "config")
    assert caught.value.salvaged == {"a": {"b": []}, "d": {"c": 1}}


@dataclass(frozen=True)
class Judge:
    api_key: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"api_key": 12345678}, "input should be a valid string"),
        ({"api_key": ["canary"]}, "input should be a valid string, got ['***']"),
        ({"limits": {"rows": 0.5}}, "input should be a valid integer, got a number with a fractional part, got 0.5"),
        ({"limits": ["https://canary@host"]}, "must be a mapping, got ['***']"),
        ({"env": {"MODE": 3}}, "input should be a valid string, got 3"),
        ({"env": "API_KEY=canary"}, "must be a mapping"),
        ({"env": ["API_KEY=canary"]}, "must be a mapping, got ['***']"),
    ],
)
def test_error_of_a_wrong_secret_does_not_show_it(values, fault):
    _, (error,) = parse(Judge, values, "" if "env" in values else "config")
    assert error.what == fault
