# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's DeepSpeed strategy without CUDA: on gloo, in float32, with torch's AdamW. Imported on CPUs only.

Its trainers ask ``torch.cuda`` for their device and wait for it: the host takes the device's place there."""

from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from openrlhf.utils import deepspeed as strategies
from openrlhf.utils import utils
from torch.distributed.device_mesh import init_device_mesh


class Host(str):
    """A device with a number, for ``f"cuda:{torch.cuda.current_device()}"``."""

    def __format__(self, spec: str) -> str:
        return "0"


class HostStrategy(strategies.DeepspeedStrategy):
    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        transformers.set_seed(self.seed)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, on first use
        deepspeed.init_distributed("gloo", timeout=timeout)
        self.world_size, self.param_dtype = dist.get_world_size(), "fp32"
        self.ds_device_mesh = init_device_mesh("cpu", (self.world_size, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
        self.setup_ring_attn(self.ds_device_mesh)
        self.accumulated_gradient = self.train_batch_size // self.micro_train_batch_size // self.world_size

    def get_ds_train_config(self, optim_dict: Any = None, **options: Any) -> dict[str, Any]:
        if optim_dict is not None:
            optim_dict["params"]["torch_adam"] = True
        return super().get_ds_train_config(optim_dict, **options)


strategies.DeepspeedStrategy = HostStrategy
utils.convert_to_torch_dtype = lambda name: torch.float32
torch.cuda.current_device = lambda: Host("cpu")
torch.cuda.synchronize = lambda device=None: None
