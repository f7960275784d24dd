# SPDX-License-Identifier: Apache-2.0
"""The worker of OpenRLHF's group, and its module of groups, without the engines that its package imports and without
flash-attn, which needs CUDA. Every process of the group imports this module first."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import openrlhf.trainer

_USED = {"bert_padding": "index_first_axis pad_input rearrange unpad_input", "utils.distributed": "all_gather"}

layer = sys.modules["openrlhf.trainer.ray"] = ModuleType("openrlhf.trainer.ray")
layer.__path__ = [str(Path(openrlhf.trainer.__file__).parent / "ray")]
for module, functions in _USED.items() if find_spec("flash_attn") is None else ():
    sys.modules[f"flash_attn.{module}"] = ModuleType(f"flash_attn.{module}")
    vars(sys.modules[f"flash_attn.{module}"]).update(dict.fromkeys(functions.split()))

from openrlhf.trainer.ray import launcher  # noqa: E402


class OpenRLHFWorker(launcher.BaseModelActor):  # type: ignore[misc]
    """A worker like any side's."""

    strategy = SimpleNamespace(is_rank_0=lambda: False)  # who shows bars

    def nothing(self) -> None:
        """Take nothing, give nothing."""

    def take(self, array: Any) -> int:
        """Give the number of rows."""
        return len(array)

    def double(self, array: Any) -> Any:
        """Give twice the array."""
        return 2 * array
