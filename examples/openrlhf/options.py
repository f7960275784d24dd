# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's options: the parser and the checks of its command ``openrlhf.cli.train_ppo_ray``, without its training."""

import argparse
import ast
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

NOT_HERE = (
    "train.agent_func_path", "train.async_enable", "train.enable_ema", "algo.dynamic_filtering_enable", "eval.dataset",
    "data.max_images_per_prompt", "ds.lora.rank", "ds.load_in_4bit", "ds.tensor_parallel_size", "ckpt.load_enable",
    "use_ms",
)  # fmt: skip


def parse(config: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """All options, nested, and the arguments that OpenRLHF makes of them; raises ValueError. None and False leave an
    option out, as on the command line."""
    source = find_spec("openrlhf.cli.train_ppo_ray")
    assert source is not None and source.origin is not None
    main = ast.parse(Path(source.origin).read_text(encoding="utf-8")).body[-1]
    assert isinstance(main, ast.If)
    reads = [ast.unparse(statement) for statement in main.body].index("args = parser.parse_args()")
    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime}
    run(main.body[:reads], names)
    parser = names["parser"]
    parser.error = refuse
    defaults = vars(parser.parse_args([]))
    options = vars(parser.parse_args(list(words(config, defaults))))
    for name in NOT_HERE:
        if options[name] != defaults[name]:
            raise ValueError(f"{name} has no counterpart here")
    if not (options["reward.remote_url"] or ".py").endswith(".py"):
        raise ValueError("reward.remote_url is a file with a reward_func here, not the address of a server")
    names["args"] = argparse.Namespace(**deepcopy(options))
    try:
        run(main.body[reads + 1 : -1], names)  # the last one trains
    except (AssertionError, AttributeError, TypeError) as error:
        raise ValueError(str(error)) from error
    return nest(options), names["args"]


def run(statements: list[ast.stmt], names: dict[str, Any]) -> None:
    exec(compile(ast.Module(statements, []), "train_ppo_ray.py", "exec"), names)


def refuse(message: str) -> NoReturn:
    raise ValueError(message)


def words(section: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The words of the command line for what differs from the defaults."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from words(value, defaults, f"{key}.")
        elif isinstance(value, list):
            yield from () if value == plain(defaults.get(key)) else (f"--{key}", *map(str, value))
        elif value not in (None, False) and value != defaults.get(key):
            yield f"--{key}" if value is True else f"--{key}={value}"


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def nest(options: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in options.items():
        *parents, last = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = plain(value)
    return tree
