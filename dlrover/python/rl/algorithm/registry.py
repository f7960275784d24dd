# SPDX-License-Identifier: Apache-2.0
"""Algorithms by the names that job files use."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, cast

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.common.errors import ClassNotFound, ConfigError, InvalidJob
from dlrover.python.rl.common.extensions import ExtensionPoint
from dlrover.python.rl.config.typed import salvage

_PACKAGE = "dlrover.python.rl.algorithm"

ALGORITHMS = ExtensionPoint(
    "algorithm",
    "dlrover_rl.algorithms",
    {
        "cispo": f"{_PACKAGE}.cispo:CISPO",
        "conservative_dpo": f"{_PACKAGE}.dpo:DPO",
        "dapo": f"{_PACKAGE}.dapo:DAPO",
        "deepseek_grpo": f"{_PACKAGE}.grpo:GRPO",
        "distillation": f"{_PACKAGE}.distillation:Distillation",
        "dpo": f"{_PACKAGE}.dpo:DPO",
        "dr_grpo": f"{_PACKAGE}.dr_grpo:DrGRPO",
        "grpo": f"{_PACKAGE}.grpo:GRPO",
        "gspo": f"{_PACKAGE}.gspo:GSPO",
        "ipo": f"{_PACKAGE}.dpo:DPO",
        "openai_ppo": f"{_PACKAGE}.ppo:PPO",
        "ppo": f"{_PACKAGE}.ppo:PPO",
        "reinforce_pp": f"{_PACKAGE}.reinforce:ReinforcePlusPlus",
        "reinforce_pp_baseline": f"{_PACKAGE}.reinforce:ReinforcePlusPlusBaseline",
        "reward_model": f"{_PACKAGE}.reward_model:RewardModel",
        "rloo": f"{_PACKAGE}.rloo:RLOO",
        "sft": f"{_PACKAGE}.sft:SFT",
        "vocabulary_distillation": f"{_PACKAGE}.distillation:VocabularyDistillation",
    },
)

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "conservative_dpo": {"label_smoothing": 0.1},
    "deepseek_grpo": {"kl_coef": 0.04},
    "ipo": {"kind": "ipo", "token_means": True},
    "openai_ppo": {"kl_coef": 0.02},
}
"""Options of a name, which a job's options override. The KL penalty of ``openai_ppo`` (k1, coefficient as in
arXiv:2203.02155) is in the reward, of ``deepseek_grpo`` (k3, arXiv:2402.03300) in the loss."""

_METHODS = ("needs", "check_group_size", "annotate", "loss")


def option_names(name: str) -> frozenset[str]:
    """List the options of an algorithm; empty if there is none of this name."""
    try:
        schema = ALGORITHMS.load(name)
    except ClassNotFound:
        return frozenset()
    return frozenset(field.name for field in fields(schema)) if is_dataclass(schema) else frozenset()


def always_recomputes(name: str) -> bool:
    """Return True if an algorithm always needs the train engine's log-probs from before the update."""
    try:
        return make_algorithm(name).needs.recomputes
    except InvalidJob:  # it has required options
        return False


def make_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """Make an algorithm. Raises InvalidJob with all errors, which salvages an algorithm with the valid options."""
    try:
        schema = ALGORITHMS.load(name)
    except ClassNotFound as error:
        raise InvalidJob([ConfigError("algorithm.name", str(error))]) from error
    if not (isinstance(schema, type) and is_dataclass(schema) and all(hasattr(schema, part) for part in _METHODS)):
        message = f"'{name}' is not an algorithm: a dataclass with {', '.join(_METHODS)}"
        raise InvalidJob([ConfigError("algorithm.name", message)])
    algorithm, errors = salvage(schema, {**PRESETS.get(name, {}), **(options or {})}, "algorithm")
    if errors:
        raise InvalidJob(errors, salvaged=algorithm)
    return cast(Algorithm, algorithm)


def complete_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's options with the defaults of all others that a file can hold; invalid options are unchanged."""
    try:
        algorithm = make_algorithm(str(options["name"]), {key: options[key] for key in options if key != "name"})
    except InvalidJob:
        return dict(options)
    values = asdict(cast(Any, algorithm))
    names = [field.name for field in fields(cast(Any, algorithm)) if field.init]
    return {"name": options["name"], **{name: values[name] for name in names if _is_plain(values[name])}, **options}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
