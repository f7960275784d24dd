"""A Hugging Face model with its optimizer under DeepSpeed's ZeRO."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm
from deepspeed.utils import safe_get_full_grad

from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import OptimizerConfig, TokenLoss, TrainSettings
from dlrover.python.rl.engine.deepspeed.checkpoint import read_checkpoint, write_checkpoint
from dlrover.python.rl.engine.deepspeed.loading import fill
from dlrover.python.rl.engine.layout import Layout
from dlrover.python.rl.engine.torch import attention
from dlrover.python.rl.engine.torch.blueprint import Blueprint
from dlrover.python.rl.engine.torch.loading import prepare
from dlrover.python.rl.engine.torch.outputs import Reader
from dlrover.python.rl.engine.torch.packing import MicroBatch
from dlrover.python.rl.engine.torch.randomness import set_packed_random_state
from dlrover.python.rl.engine.torch.ranks import Ranks
from dlrover.python.rl.engine.torch.residence import Residence
from dlrover.python.rl.engine.torch.state import restore
from dlrover.python.rl.engine.torch.stepping import accumulate, first_bad, learning_rate
from dlrover.python.rl.engine.weights import WeightSnapshot

_BUCKET = 1 << 27
"""Most elements that are reduced at a time."""


class DeepSpeedBackend:
    """Implements :class:`~dlrover.python.rl.engine.torch.backend.TrainBackend`.

    Args:
        blueprint: of the model.
        config: how it is trained; None: it is frozen.
        settings: how it runs.
        stage: of ZeRO.
        ranks: all of the engine.
        residence: accounts for its tensors.
        loaded: whether it gets the blueprint's weights; else zeros.
    """

    def __init__(  # noqa: PLR0913 - what an engine is made of
        self,
        blueprint: Blueprint,
        config: OptimizerConfig | None,
        settings: TrainSettings,
        stage: int,
        ranks: Ranks,
        residence: Residence,
        loaded: bool,
    ) -> None:
        self._config, self._settings, self._ranks, self._stage = config, settings, ranks, stage
        self.residence, self._unspent = residence, False
        module = blueprint.empty()
        self.packs = attention.can_pack(module)
        # Divided parameters are put together anew when activations are recomputed.
        prepare(module, config is not None, settings.gradient_checkpointing, reentrant=stage == 3)
        told = self._told(sum(parameter.numel() for parameter in module.parameters()))
        self._fill(module, blueprint, told, loaded)
        self.limits = (
            module.get_input_embeddings().num_embeddings,
            getattr(module.config.get_text_config(), "max_position_embeddings", None),
        )
        self._names = dict(module.named_parameters())
        kept = module.state_dict()
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept}
        self._passes: Any = module
        self._zero: Any = None
        if config is not None or stage == 3:
            self._passes, self._zero, *_ = deepspeed.initialize(
                model=module, optimizer=None if config is None else _adamw(module, config), config=told
            )
        self._reader = Reader(settings.head, settings.device, self.packs)
        self._masters = self._begin_optimizer() if config is not None else []
        self._reside()

    # -- making -------------------------------------------------------------------------------------------------------

    def _told(self, elements: int) -> dict[str, Any]:
        """DeepSpeed's configuration. The loss carries the normaliser, so nothing is averaged over steps or ranks."""
        config = self._config
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": (config.max_grad_norm if config else None) or 0.0,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 62,
            "torch_autocast": {
                "enabled": self._settings.precision == "bf16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],  # gradients are reduced in float32
            },
            "zero_optimization": {
                "stage": self._stage,
                "reduce_bucket_size": min(elements, _BUCKET),
                "overlap_comm": torch.device(self._settings.device).type == "cuda",
                "memory_efficient_linear": False,
                "stage3_param_persistence_threshold": 0,  # whole small ones would be left behind by a move
            },
        }

    def _fill(self, module: Any, blueprint: Blueprint, told: dict[str, Any], loaded: bool) -> None:
        if self._stage < 3:
            fill(module, blueprint, self._settings.device, loaded, lambda parameter: None)
            return
        dividing = deepspeed.zero.Init(config_dict_or_path=told, mem_efficient_linear=False)
        # Rank 0's values go to the others.
        divide = lambda parameter: dividing._convert_to_zero_parameters([parameter])  # noqa: E731
        fill(module, blueprint, self._settings.device, loaded, divide)

    def _begin_optimizer(self) -> list[Any]:
        """This rank's masters, each the parts of many parameters; their moments are there from the start: zeros."""
        zero = self._zero
        masters = zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        for master in masters:
            zero.optimizer.state[master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }
        return list(masters)

    def _reside(self) -> None:
        self.residence.hold("weights", [self._part(parameter) for parameter in self._names.values()])
        self.residence.hold("weights", [buffer for buffer in self._passes.buffers()])
        self.residence.hold("weights", self._masters)
        for master in self._masters:
            self.residence.hold("optimizer", self._zero.optimizer.state[master].values())
        if self._stage == 3 and self._masters:
            self.residence.hold("gradients", [self._zero.grad_partitions_flat_buffer])
            buckets = [bucket.buffer for bucket in self._zero.ipg_buckets.values()]
            self.residence.hold("gradients", [buffer for buffer in buckets if buffer is not None])

    def _part(self, parameter: Any) -> Any:
        """What this rank has of a parameter: a flat part, or all of it."""
        return parameter.ds_tensor if self._stage == 3 else parameter

    # -- passes -------------------------------------------------------------------------------------------------------

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        """Each micro-batch with what :meth:`Reader.read` says of it, without gradient."""
        with self._precision():
            for micro in micros:
                yield micro, self._reader.read(self._passes, micro, temperature, entropy)

    def _precision(self) -> AbstractContextManager[Any]:
        """For a plain module; DeepSpeed's engine sees to it by itself."""
        if isinstance(self._passes, deepspeed.DeepSpeedEngine) or self._settings.precision == "fp32":
            return nullcontext()
        return torch.autocast(torch.device(self._settings.device).type, torch.bfloat16)

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        """Gradients of the loss, summed over the ranks with the last micro-batch; and its sums for ``settle``."""
        engine, last = self._passes, micros[-1]
        self._unspent = True

        def read(micro: MicroBatch, wants_entropy: bool) -> tuple[Any, ...]:
            engine.set_gradient_accumulation_boundary(micro is last)
            return self._reader.read(engine, micro, temperature, wants_entropy)

        def backward(value: Any) -> None:
            engine.backward(value * self._ranks.world_size)  # DeepSpeed takes the mean over the ranks

        return accumulate(micros, batch, loss, read, backward, self._settings.device)

    def reduce_gradients(self) -> list[Any]:
        """They are summed already; this rank's part of them."""
        groups = self._zero.averaged_gradients.values()
        return [gradient for group in groups for gradient in group or ()]

    def gradient_norm(self) -> float:
        """Of the whole gradient: the same bits on every rank."""
        zero = self._zero
        norm = combine_grad_norm_groups(zero._get_norm_groups()) if self._stage == 3 else zero.scaled_global_norm()
        return math.nan if is_invalid_grad_norm(norm) else float(norm)

    def first_bad_gradient(self) -> str:
        """The name of the first parameter whose gradient is not finite, the same on every rank."""
        return first_bad({name: safe_get_full_grad(parameter) for name, parameter in self._names.items()})

    def update(self, version: int, norm: float) -> float:
        """Let DeepSpeed clip the gradient and take the step after ``version``; return its rate."""
        assert self._config is not None
        lr = learning_rate(self._config, version)
        for group in self._zero.optimizer.param_groups:
            group["lr"] = lr
        self._passes.step()
        self._unspent = False
        return lr

    def drop_gradients(self) -> None:
        """Forget those that no step was taken with."""
        if not self._unspent:
            return
        # DeepSpeed forgets gradients by a step that it leaves out because their norm is no number.
        name, answer = ("_get_norm_groups", [math.nan]) if self._stage == 3 else ("scaled_global_norm", math.nan)
        setattr(self._zero, name, lambda *_: answer)
        try:
            self._passes.set_gradient_accumulation_boundary(True)
            self._passes.step()
        finally:
            delattr(self._zero, name)
        self._unspent = False

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Name and whole tensor of everything, one after the other. A collective with stage 3."""
        for name, parameter in self._names.items():
            local = self.residence.there(self._part(parameter))
            yield name, self._whole(parameter, local) if self._stage == 3 else local
        yield from ((name, self.residence.there(buffer)) for name, buffer in self._buffers.items())

    def _whole(self, parameter: Any, local: Any) -> Any:
        mine = local.to(self._settings.device)
        flat = mine.new_empty(mine.numel() * self._ranks.world_size)
        dist.all_gather_into_tensor(flat, mine.contiguous())
        return flat[: parameter.ds_numel].view(parameter.ds_shape)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of what :meth:`named_weights` gives."""
        divided = self._stage == 3
        shapes = {name: part.ds_shape if divided else part.shape for name, part in self._names.items()}
        shapes |= {name: buffer.shape for name, buffer in self._buffers.items()}
        return {name: tuple(shape) for name, shape in shapes.items()}

    @torch.no_grad()
    def write_weights(self, weights: WeightSnapshot) -> None:
        """Take over a verified snapshot."""
        for name, parameter in self._names.items():
            local, whole = self.residence.there(self._part(parameter)), weights.tensor(name)
            if self._stage == 3:
                start = self._ranks.rank * local.numel()
                whole = whole.reshape(-1)[start : start + local.numel()]
                local = local[: whole.numel()]
            local.copy_(whole)
        for name, buffer in self._buffers.items():
            self.residence.there(buffer).copy_(weights.tensor(name))

    # -- states -------------------------------------------------------------------------------------------------------

    @property
    def _layout(self) -> list[int]:
        """The ranks' grid, and the stage: what divides a state into parts."""
        return [*Layout(shard=self._ranks.world_size).shape, self._stage]

    def local_state(self) -> dict[str, Any]:
        """``layout``, ``model`` (weights by name, masters by number) and ``optimizer`` (None of a frozen one): the live
        tensors."""
        there, moments = self.residence.there, None
        model = {name: there(self._part(parameter)) for name, parameter in self._names.items()}
        model |= {name: there(buffer) for name, buffer in self._buffers.items()}
        model |= {f"master {number}": there(master) for number, master in enumerate(self._masters)}
        if self._config is not None:
            states = [self._zero.optimizer.state[master] for master in self._masters]
            moments = {
                f"master {number}": {kind: there(tensor) for kind, tensor in state.items()}
                for number, state in enumerate(states)
            }
        return {"layout": self._layout, "model": model, "optimizer": moments}

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        """Copy in what :meth:`local_state` gave.

        Raises:
            WeightSyncError: it is of another model; nothing was changed.
            EngineError: it is of another layout, or exactly one of the two is frozen; nothing was changed.
        """
        restore(self.local_state(), state)

    def write_checkpoint(self, path: Path, version: int) -> None:
        """Write model, optimizer, version and random state, each rank its part."""
        write_checkpoint(path, self._ranks, {"version": version, **self.local_state()})

    def read_checkpoint(self, path: Path) -> int:
        """Go back to what :meth:`write_checkpoint` wrote in this layout, the random state too; return the version.

        Raises:
            EngineError: there is no checkpoint, or it is of another layout or model.
        """
        state = read_checkpoint(path, self._ranks, self._layout)
        restore(self.local_state(), state)
        set_packed_random_state(state["random"])
        return int(state["version"])

    def release(self) -> None:
        """Take DeepSpeed's hooks out of the module."""
        if isinstance(self._passes, deepspeed.DeepSpeedEngine):
            self._passes.destroy()


def _adamw(module: Any, config: OptimizerConfig) -> Any:
    parameters = list(module.parameters())
    dimensions = [len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in parameters]
    pairs = list(zip(parameters, dimensions, strict=True))
    groups = [
        {"params": [parameter for parameter, count in pairs if count >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter, count in pairs if count < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=config.betas)
