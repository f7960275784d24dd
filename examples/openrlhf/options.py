# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's options: the parser and the checks of its command ``openrlhf.cli.train_ppo_ray``, without its training."""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf
from openrlhf import cli

NOT_HERE = re.compile(
    r"""eval\..*|vllm\.(?!num_engines|sync_backend).*|algo\.dynamic_filtering_\w+
    |train\.(agent_func_path|async_\w+|enable_ema|partial_rollout_enable)|rollout\.vllm_generate_batch_size
    |data\.(max_images_per_prompt|dataloader_num_workers)|ds\.(lora\.rank|load_in_4bit|tensor_parallel_size)
    |ckpt\.(load_enable|best_metric_key)|reward\.normalize_enable|use_ms""",
    re.VERBOSE,
)


def parse(config: Any) -> tuple[Any, Any]:
    """All options with their defaults, nested, and the arguments that OpenRLHF makes of them. None and False leave an
    option out, as on the command line. Raises ValueError and what OpenRLHF raises."""
    main: Any = ast.parse(Path(cli.__path__[0], "train_ppo_ray.py").read_text(encoding="utf-8")).body[-1]
    reads = [ast.unparse(statement) for statement in main.body].index("args = parser.parse_args()")
    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime}
    run(main.body[:reads], names)
    parser = names["parser"]
    parser.error = refuse
    defaults = vars(parser.parse_args([]))
    arguments = vars(parser.parse_args(list(to_words(OmegaConf.to_container(config), defaults))))
    for name in filter(NOT_HERE.fullmatch, defaults):
        if arguments[name] != defaults[name]:
            refuse(f"{name} has no counterpart here")
    if arguments["ds.zero_stage"] == 3:
        refuse("ds.zero_stage=3: OpenRLHF's way to load such a model is for transformers 5.15")
    if not (arguments["reward.remote_url"] or ".py").endswith(".py"):
        refuse("reward.remote_url is a file with a reward_func here, not the address of a server")
    names["args"] = argparse.Namespace(**deepcopy(arguments))
    run(main.body[reads + 1 : -1], names)  # the last one trains
    options = OmegaConf.create()
    for key, value in arguments.items():
        OmegaConf.update(options, key, value)
    return OmegaConf.to_container(options), names["args"]


def run(statements: list[ast.stmt], names: dict[str, Any]) -> None:
    exec(compile(ast.Module(statements, []), "train_ppo_ray.py", "exec"), names)


def refuse(message: str) -> NoReturn:
    raise ValueError(message)


def to_words(section: Any, defaults: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    """The words of the command line for what differs from the defaults."""
    for name, value in section.items():
        default = defaults.get(f"{prefix}{name}"[2:])
        if isinstance(value, Mapping):
            yield from to_words(value, defaults, f"{prefix}{name}.")
        elif value not in (None, False, default, list(default) if isinstance(default, tuple) else default):
            listed = [f"{prefix}{name}", *map(str, value)] if isinstance(value, list) else [f"{prefix}{name}={value}"]
            yield from [f"{prefix}{name}"] if value is True else listed
