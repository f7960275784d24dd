"""Algorithms by the names that job files use."""

from collections.abc import Mapping
from typing import Any

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.dr_grpo import DrGRPO
from dlrover.python.rl.algorithm.fields import field_faults
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.nearest import hint

ALGORITHMS: dict[str, type] = {"grpo": GRPO, "dr_grpo": DrGRPO, "sft": SFT}
"""Name to config class, which is the algorithm."""


def make_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm ``name`` with ``options`` for the fields of its class.

    Raises:
        InvalidJob: unknown name or options (with the nearest known ones), or values a field forbids; all at once.
    """
    if name not in ALGORITHMS:
        raise InvalidJob([Problem("algorithm.name", f"'{name}' is unknown{hint(name, ALGORITHMS)}")])
    options = options or {}
    faults = field_faults(ALGORITHMS[name], options)
    if faults:
        raise InvalidJob([Problem(f"algorithm.{option}", fault) for option, fault in faults.items()])
    try:
        algorithm: Algorithm = ALGORITHMS[name](**options)
    except ValueError as error:
        raise InvalidJob([Problem("algorithm", str(error))]) from None
    return algorithm
