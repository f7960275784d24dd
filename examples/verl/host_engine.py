# SPDX-License-Identifier: Apache-2.0
"""Megatron-core without CUDA for verl's workers: a platform and an engine, registered where verl looks for its own."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from verl.plugin.platform import platform_cuda, set_platform
from verl.utils import py_functional, tensordict_utils
from verl.workers.engine import base

from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.megatron.engine import MegatronTrainEngine


class HostPlatform(platform_cuda.PlatformCUDA):
    device_name = vendor_name = "cpu"
    device_module = SimpleNamespace(**{**vars(torch.cuda), "get_device_name": lambda: "CPU"})


class HostMegatronEngine(base.BaseEngine):
    """verl's engine interface over the train engine ``megatron``, in float32."""

    is_param_offload_enabled = is_optimizer_offload_enabled = False
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_size = staticmethod(parallel_state.get_data_parallel_world_size)
    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.is_critic, optimizer, optim = model_config.model_type == "value_model", None, optimizer_config
        if not engine_config.forward_only:
            decay = (optim.lr_decay_style, optim.min_lr, optim.lr_decay_steps)
            schedule = decay if optim.lr_decay_style != "constant" else ("constant",)
            rates = (optim.lr, max(optim.lr_warmup_steps, 0), optim.weight_decay, tuple(optim.betas))
            optimizer = OptimizerConfig(*rates, optim.clip_grad or None, "adamw", 0.0, *schedule)
        sizes = ParallelSizes(tensor_parallel_size=engine_config.tensor_model_parallel_size)
        head, ranks = "token" if self.is_critic else "causal", Rendezvous(dist.get_rank(), dist.get_world_size())
        settings = TrainSettings(parallel=sizes, head=head, backend={"cpu_shim": True})
        self.engine = MegatronTrainEngine(model_config.local_path, optimizer, settings, ranks)
        self.train_mode, self.eval_mode = (partial(base.BaseEngineCtx, self, mode) for mode in ("train", "eval"))

    def initialize(self) -> None:
        """verl asks for the ranks before."""

    def is_mp_src_rank_with_outputs(self) -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0

    def read(self, data: Any) -> tuple[Batch, Any]:
        """verl's rows as a batch, and a function that lays outputs ``[tokens]`` out as verl does, ``[rows, seq]``: a
        token's output is at the token before it. So is a critic's here; of log-probs the action mask is one later."""
        offsets = data["input_ids"].offsets()
        answers = data["attention_mask"][:, data["prompts"].shape[1] :].sum(1).repeat_interleave(offsets.diff())
        to_end = offsets[1:].repeat_interleave(offsets.diff()) - torch.arange(int(offsets[-1]))
        places = (to_end > 1) & (to_end <= 1 + answers)
        tokens = Ragged(data["input_ids"].values().numpy(), offsets.numpy())
        mask = tokens.like(np.roll(places.numpy(), 0 if self.is_critic else 1))

        def nested(values: torch.Tensor) -> torch.Tensor:
            spread = values.new_zeros(len(places)).masked_scatter(places, values)
            return torch.nested.nested_tensor_from_jagged(spread, offsets)

        return Batch({"tokens": tokens, "action_mask": mask, "row": np.arange(len(tokens))}), nested

    def options(self, data: Any) -> tuple[float, bool]:
        entropy = tensordict_utils.get(data, "calculate_entropy", False) and not self.is_critic
        return tensordict_utils.get(data, "temperature", 1.0), entropy

    def train_batch(self, data: Any, loss_function: Any) -> dict[str, Any]:
        tokens, dp_size = data["loss_mask"].sum(), self.get_data_parallel_size()
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        tensordict_utils.assign_non_tensor(data, batch_num_tokens=tokens.item(), dp_size=dp_size)
        result_fields: dict[str, Any] = {"model_output": {}, "loss": [], "metrics": {}}

        def loss(outputs: torch.Tensor, columns: Any) -> tuple[torch.Tensor, dict[str, float]]:
            micro = tensordict_utils.index_select_tensor_dict(data, columns["row"].unique_consecutive())
            nested = self.read(micro)[1]
            output = {"values" if self.is_critic else "log_probs": nested(outputs)}
            output |= {"entropy": nested(columns["entropy"])} if "entropy" in columns else {}
            value, metrics = loss_function(model_output=output, data=micro)
            result_fields["loss"].append(value.item())
            py_functional.append_to_dict(result_fields["metrics"], metrics)
            return value / dp_size, {}  # verl's is for the mean over the ranks, the engine takes the sum

        temperature, loss.wants_entropy = self.options(data)  # type: ignore[attr-defined]
        result = self.engine.step(self.read(data)[0], loss, temperature)
        result_fields["metrics"]["grad_norm"], self.lr = result.grad_norm, result.lr
        return result_fields

    def infer_batch(self, data: Any, loss_function: Any = None) -> dict[str, Any]:
        batch, nested = self.read(data)
        outputs, mask = self.engine.evaluate(batch, *self.options(data)), batch.ragged("action_mask").values
        names = {"scores": "values", "logprobs": "log_probs", "entropy": "entropy"}
        columns = {
            names[name]: nested(torch.from_numpy(column.values[mask])) for name, column in outputs.columns.items()
        }
        return {"model_output": columns, "loss": [], "metrics": {}}

    def lr_scheduler_step(self) -> float:
        return self.lr

    def get_per_tensor_param(self, **options: Any) -> tuple[Any, None]:
        return self.engine.named_weights(), None

    def save_checkpoint(self, local_path: str, *args: Any) -> None:
        Path(local_path).mkdir(parents=True, exist_ok=True)
        torch.save(self.engine.state_dict(), f"{local_path}/rank-{dist.get_rank()}.pt")

    def load_checkpoint(self, local_path: str, *args: Any) -> None:
        self.engine.load_state_dict(torch.load(f"{local_path}/rank-{dist.get_rank()}.pt", weights_only=False))


set_platform(HostPlatform())
for kind in ("language_model", "value_model"):
    base.EngineRegistry.register(kind, "megatron", "cpu")(HostMegatronEngine)
