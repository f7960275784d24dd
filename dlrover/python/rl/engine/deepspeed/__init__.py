# SPDX-License-Identifier: Apache-2.0
"""A train engine on DeepSpeed: ZeRO 1 to 3 over any Hugging Face model."""

from dataclasses import dataclass
from typing import Literal

from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.model_shape import by_library, find_class_fault


@dataclass(frozen=True)
class DeepSpeedOptions:
    zero_stage: Literal[1, 2, 3] = 3
    """The ranks divide the optimizer's state (1), the gradients too (2), the weights too (3)."""

    optimizer_on_host: bool = False
    """Hold the float32 weights, their gradients and the optimizer's state in host memory, and take the step on the CPU
    (ZeRO-Offload). With ``precision: bf16`` a device has the weights in bf16."""


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
