"""Algorithms by the names that job files use."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.cispo import CISPO
from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.distillation import Distillation
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.dr_grpo import DrGRPO
from dlrover.python.rl.algorithm.fields import field_faults
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.gspo import GSPO
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.algorithm.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.algorithm.rloo import RLOO
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.algorithm.vocabulary_distillation import VocabularyDistillation
from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.nearest import hint


@dataclass(frozen=True)
class Preset:
    """A name for an algorithm, with defaults of its own.

    Attributes:
        algorithm: the config class, which is the algorithm.
        options: for its fields; a job's own come before them.
    """

    algorithm: type
    options: Mapping[str, Any] = field(default_factory=dict)


ALGORITHMS: dict[str, Preset] = {
    "cispo": Preset(CISPO),
    "conservative_dpo": Preset(DPO, {"label_smoothing": 0.1}),
    "dapo": Preset(DAPO),
    "deepseek_grpo": Preset(GRPO, {"kl_coef": 0.04}),
    "distillation": Preset(Distillation),
    "dpo": Preset(DPO),
    "dr_grpo": Preset(DrGRPO),
    "grpo": Preset(GRPO),
    "gspo": Preset(GSPO),
    "ipo": Preset(DPO, {"kind": "ipo", "token_means": True}),
    "openai_ppo": Preset(PPO, {"kl_coef": 0.02}),
    "ppo": Preset(PPO),
    "reinforce_pp": Preset(ReinforcePlusPlus),
    "reinforce_pp_baseline": Preset(ReinforcePlusPlusBaseline),
    "reward_model": Preset(RewardModel),
    "rloo": Preset(RLOO),
    "sft": Preset(SFT),
    "vocabulary_distillation": Preset(VocabularyDistillation),
}
"""Every name. ``openai_ppo`` has its KL penalty (k1, coefficient as in arXiv:2203.02155) in the reward,
``deepseek_grpo`` its own (k3, arXiv:2402.03300) in the loss; ``ppo`` and ``grpo`` have none unless told."""

_METHODS = ("needs", "check_group_size", "annotate", "loss")
"""What every algorithm has."""


def make_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm ``name`` with ``options`` for the fields of its class.

    Args:
        name: one of :data:`ALGORITHMS`, or ``"package.module:Class"`` of one's own: a frozen dataclass.
        options: values of its fields.

    Raises:
        InvalidJob: unknown name or options (with the nearest known ones), or values a field forbids; all at once.
    """
    preset = Preset(_own(name)) if ":" in name else ALGORITHMS.get(name)
    if preset is None:
        raise InvalidJob([Problem("algorithm.name", f"'{name}' is unknown{hint(name, ALGORITHMS)}")])
    faults = field_faults(preset.algorithm, options or {})
    if faults:
        raise InvalidJob([Problem(f"algorithm.{option}", fault) for option, fault in faults.items()])
    try:
        algorithm: Algorithm = preset.algorithm(**{**preset.options, **(options or {})})
    except ValueError as error:
        raise InvalidJob([Problem("algorithm", str(error))]) from None
    return algorithm


def _own(name: str) -> type:
    """The class ``"package.module:Class"``."""
    module, _, path = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), path, None)
    except Exception as error:  # a module of the user's own
        what = f"'{name}' cannot be imported: {type(error).__name__}: {error}"
        raise InvalidJob([Problem("algorithm.name", what)]) from error
    if found is None:
        known = [key for key, value in vars(importlib.import_module(module)).items() if isinstance(value, type)]
        what = f"the module '{module}' has no '{path}'{hint(path, known)}"
    elif not (isinstance(found, type) and is_dataclass(found) and all(hasattr(found, part) for part in _METHODS)):
        what = f"'{name}' is no algorithm: a dataclass with {', '.join(_METHODS)}"
    else:
        return found
    raise InvalidJob([Problem("algorithm.name", what)])
