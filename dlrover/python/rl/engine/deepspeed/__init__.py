# SPDX-License-Identifier: Apache-2.0
"""A train engine on DeepSpeed: ZeRO 1 to 3 over any Hugging Face model."""

from dataclasses import dataclass
from typing import Literal

from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.model_shape import by_library, find_class_fault


@dataclass(frozen=True)
class DeepSpeedOptions:
    zero_stage: Literal[1, 2, 3] = 3
    """The ranks divide 1 the optimizer's state, 2 the gradients too, 3 the weights too."""

    optimizer_on_host: bool = False
    """The float32 weights and the optimizer's state are in the host's memory, with the gradients that a step is taken
    with, and torch's threads take it (ZeRO-Offload). With ``precision: bf16`` a device has the weights in bf16."""


INFO = EngineInfo(
    DeepSpeedOptions,
    "deepspeed",
    deterministic_on=("cpu",),
    divides=(),
    quantizes=True,
    shares_process=False,
    sgd=False,
    adamw_8bit=True,
    redivides=False,
    masks_unknown_ids=True,
    find_model_fault=by_library(find_class_fault),
)
