# SPDX-License-Identifier: Apache-2.0
"""Engines by name, by entry point and by class; what they state about themselves, and the extras that bring them."""

import re
import sys
import tomllib
import types
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest

from dlrover.python.rl.common import extensions
from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.engine.api.base import LoraSettings
from dlrover.python.rl.engine.api.registry import (
    ROLLOUT_ENGINES,
    TRAIN_ENGINES,
    EngineInfo,
    engine_class,
    engine_info,
    find_optimizer_errors,
    find_train_errors,
    validate_engine,
)
from dlrover.python.rl.engine.api.settings import OptimizerConfig, ParallelSizes


@dataclass(frozen=True)
class MyOptions:
    colour: str = "red"


class Silent:
    def __init__(self, model, optimizer, settings, rendezvous, memory): ...

    step = evaluate = publish = state_dict = print


class MyEngine(Silent):
    info = EngineInfo(MyOptions, divides=("ddp_size",), adapters=False)


@pytest.fixture
def module(monkeypatch):
    mine = types.ModuleType("my_engines")
    mine.MyEngine, mine.Silent = MyEngine, Silent
    monkeypatch.setitem(sys.modules, "my_engines", mine)
    return mine


@pytest.fixture
def entry_point(module, monkeypatch):
    group = TRAIN_ENGINES.group
    point = EntryPoint("mine", "my_engines:MyEngine", group)
    monkeypatch.setattr(extensions, "entry_points", lambda group: [point] if group == TRAIN_ENGINES.group else [])


@pytest.mark.feature(13)
def test_a_users_class_is_loaded_by_module_and_name(module):
    assert engine_class(TRAIN_ENGINES, "my_engines:MyEngine") is MyEngine
    assert validate_engine(TRAIN_ENGINES, "my_engines:MyEngine", {}, "config.engine.train") == []


@pytest.mark.feature(13)
def test_an_entry_point_is_an_engines_name(entry_point):
    assert engine_class(TRAIN_ENGINES, "mine") is MyEngine
    assert engine_info(TRAIN_ENGINES, "mine") is MyEngine.info


@pytest.mark.parametrize("name", ["mine", "my_engines:MyEngine"])
def test_options_and_sizes_are_checked_against_an_engines_info(entry_point, name):
    (error,) = validate_engine(TRAIN_ENGINES, name, {"color": "blue"}, "config.engine.train")
    assert (error.where, "did you mean 'colour'" in error.what) == ("config.engine.train_options.color", True)
    info, sizes = engine_info(TRAIN_ENGINES, name), ParallelSizes(tensor_parallel_size=2)
    errors = find_train_errors(name, info, sizes, LoraSettings())
    assert [error.split(",")[0] for error in errors] == [
        "tensor_parallel_size is 2",
        f"{name} trains only whole models: adapters need fsdp2 or deepspeed",
    ]


def test_a_base_in_4_bits_needs_an_engine_with_the_option():
    lora = LoraSettings(quantize_base="nf4")
    errors = find_train_errors("megatron", engine_info(TRAIN_ENGINES, "megatron"), ParallelSizes(), lora)
    assert errors[-1] == "megatron cannot quantize the model: lora.quantize_base needs fsdp2 or deepspeed"
    for name in ("fsdp2", "deepspeed"):
        assert find_train_errors(name, engine_info(TRAIN_ENGINES, name), ParallelSizes(), lora) == []
    assert find_train_errors("silent", EngineInfo(), ParallelSizes(), lora), "it may know nothing of the option"
    assert find_optimizer_errors("silent", EngineInfo(), OptimizerConfig(name="adamw_8bit"))


def test_an_engine_without_info_may_do_everything(module):
    info = engine_info(TRAIN_ENGINES, "my_engines:Silent")
    sizes = ParallelSizes(pipeline_parallel_size=2)
    assert find_train_errors("silent", info, sizes, LoraSettings(), bare_head=True) == []
    assert validate_engine(TRAIN_ENGINES, "my_engines:Silent", {"any": 1}, "config.engine.train") == []


@pytest.mark.parametrize("point", [TRAIN_ENGINES, ROLLOUT_ENGINES], ids=["train", "rollout"])
def test_classes_of_this_package_have_the_info_of_their_folder(point):
    for name in ("fsdp2",) if point is TRAIN_ENGINES else ("torch", "sglang"):
        assert engine_class(point, name).info is engine_info(point, name)


def score(completion, answer, extra_info):
    """A reward function, named as an engine."""
    return completion


class NoEngine:
    def score(self): ...


class Proxy:
    def __init__(self, model, optimizer, settings, rendezvous, memory): ...

    def __getattr__(self, name): ...


@pytest.mark.parametrize(
    ("point", "name", "message"),
    [
        (TRAIN_ENGINES, "score", "cannot be called with (model, optimizer, settings, rendezvous, memory): too many"),
        (TRAIN_ENGINES, "NoEngine", "is not an engine: it lacks the methods step, evaluate, publish, state_dict"),
        (ROLLOUT_ENGINES, "NoEngine", "is not an engine: it lacks the methods add, advance, receive"),
        (ROLLOUT_ENGINES, "Proxy", "cannot be called with (model, settings, memory): missing a required argument"),
        (ROLLOUT_ENGINES, "__name__", "is a str, not an engine"),
    ],
)
def test_a_class_of_another_kind_is_refused(point, name, message):
    (error,) = validate_engine(point, f"{__name__}:{name}", {}, "engine.train")
    assert error.where == "engine.train"
    assert f"{name} {message}" in error.what
    assert not validate_engine(TRAIN_ENGINES, f"{__name__}:Proxy", {}, "engine.train"), "it finds its methods itself"


def test_a_function_without_an_engine_is_named():
    assert not validate_engine(ROLLOUT_ENGINES, f"{__name__}:score", {}, "engine.rollout")
    with pytest.raises(EngineError, match=r":score returned a str, which lacks the methods add, advance, receive"):
        engine_class(ROLLOUT_ENGINES, f"{__name__}:score")("model", "settings", "memory")


# -- extras -----------------------------------------------------------------------------------------------------------
@pytest.mark.feature(14)
@pytest.mark.parametrize(("name", "package"), [("deepspeed", "deepspeed"), ("megatron", "megatron-core")])
def test_a_missing_backend_is_named_with_its_extra(name, package):
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(MissingExtra, match=rf"'{package}' is not installed: pip install 'dlrover-rl\[{name}\]'"):
        engine_class(TRAIN_ENGINES, name)


@pytest.mark.feature(14)
def test_extras_named_in_code_and_pages_exist():
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "dlrover").rglob("*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    lists = [names for text in texts for names in re.findall(r"dlrover-rl\[([\w,-]+)\]", text)]
    named = {name for names in lists for name in names.split(",")}
    named |= {name for text in texts for name in re.findall(r'MissingExtra\("[\w-]+", "([\w-]+)"\)', text)}
    assert {"lora", "deepspeed", "megatron", "vllm"} <= named
    assert named <= project["optional-dependencies"].keys()
