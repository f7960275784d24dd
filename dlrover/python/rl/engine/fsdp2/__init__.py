# SPDX-License-Identifier: Apache-2.0
"""The default train engine: PyTorch's FSDP2, DTensor and DCP over any Hugging Face model."""

from dlrover.python.rl.engine.api.registry import EngineInfo, NoOptions

INFO = EngineInfo(options=NoOptions, divides=("ddp_size", "tensor_parallel_size", "context_parallel_size"))
