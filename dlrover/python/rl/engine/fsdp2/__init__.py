# SPDX-License-Identifier: Apache-2.0
"""The default train engine: PyTorch's FSDP2, DTensor and DCP over any Hugging Face model."""

from dataclasses import dataclass

from dlrover.python.rl.engine.api.registry import EngineInfo
from dlrover.python.rl.engine.model.model_shape import by_library, find_class_fault


@dataclass(frozen=True)
class Fsdp2Options:
    compile_layers: bool = False
    """Compile norms, MLPs and projections with ``torch.compile``: fewer passes over memory, equal results up to
    rounding. The first pass of each process, with gradients and without, waits for it, for up to some minutes."""

    optimizer_on_host: bool = False
    """Hold the float32 weights and the optimizer's state in host memory, 16 bytes per parameter with gradients and
    AdamW, and take the step on the CPU. The device holds the weights of the passes and the gradients: in bf16 6 bytes
    per parameter instead of 18, or 8 instead of 16 if ranks shard the model."""

    keep_processes: bool = False
    """On CUDA under Ray: when a rank is lost, the others abort NCCL, keep their processes and CUDA contexts, and join
    the new one; a rank that does not abort within 10 seconds gets a new process. NCCL's watchdog is disabled, so a
    broken link without a lost process is detected after ``hang_after_s``. On CPUs the processes always stay."""


INFO = EngineInfo(
    deterministic_on=("cpu",),
    options=Fsdp2Options,
    divides=("ddp_size", "tensor_parallel_size", "context_parallel_size"),
    whole_matrices=("compile_layers",),
    quantizes=True,
    adamw_8bit=True,
    masks_unknown_ids=True,
    find_model_fault=by_library(find_class_fault),
)
