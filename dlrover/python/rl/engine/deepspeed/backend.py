# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model with its optimizer under DeepSpeed's ZeRO, and its checkpoints.

Each rank writes its own file, for the same layout.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm
from deepspeed.utils import safe_get_full_grad

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, TokenLoss, TrainSettings
from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.loading import (
    find_limits,
    list_aliases,
    list_saved_buffers,
    prepare_training,
    sync_to_disk,
    tie_parameter,
)
from dlrover.python.rl.engine.model.outputs import OutputReader
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks, all_gather_single, pack_random_state, unpack_random_state
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.training.backend import present, write_folder
from dlrover.python.rl.engine.training.stepping import (
    accumulate_gradients,
    compute_learning_rate,
    find_nonfinite,
    restore_state,
)


def fill_parameters(
    module: Any, spec: ModelSpec, device: str, loaded: bool, divide: Callable[[list[Any]], object]
) -> None:
    """Replace a module's parameters, which are on the meta device, by float32 ones, read or zeros; ties are kept.

    ``divide`` is called with a list of each parameter as soon as it has its values.

    Raises:
        EngineError: the source lacks tensors, or has them in other shapes.
    """
    aliases, buffers = list_aliases(module), list_saved_buffers(module)
    read = _reader(module, spec, aliases, list(buffers)) if loaded else None
    for names in aliases:
        old = module.get_parameter(names[0])
        value = torch.zeros(old.shape) if read is None else read(names[0])
        new = torch.nn.Parameter(value.to(device, torch.float32, copy=True), requires_grad=old.requires_grad)
        tie_parameter(module, names, new)
        divide([new])
    if read is not None:
        for name, buffer in buffers.items():
            buffer.copy_(read(name))
    module.to(device)  # the buffers: the parameters are there


def _reader(module: Any, spec: ModelSpec, aliases: list[tuple[str, ...]], buffers: list[str]) -> Callable[[str], Any]:
    wanted = {names[0]: names for names in aliases} | {name: (name,) for name in buffers}
    shapes = {names[0]: tuple(module.get_parameter(names[0]).shape) for names in aliases}
    shapes |= {name: tuple(module.get_buffer(name).shape) for name in buffers}
    return spec.reader(wanted, shapes, module.base_model_prefix)


def _read(path: Path, rank: int, layout: list[int]) -> dict[str, Any]:
    folder = present(path)
    if not _file(folder, 0).is_file():
        raise EngineError(f"no checkpoint at '{path}'")
    try:
        written = torch.load(_file(folder, 0), map_location="cpu", weights_only=True, mmap=True)["layout"]
        if written == layout:
            return dict(torch.load(_file(folder, rank), map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, UnpicklingError, LookupError) as error:
        raise EngineError(f"the checkpoint '{path}' cannot be read: {error}") from error
    raise EngineError(
        f"the checkpoint '{path}' is of layout {written} (the ranks' grid and the ZeRO stage), not {layout}:"
        " save the model in Hugging Face format to continue in another one"
    )


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pt"


_BUCKET = 1 << 27
"""Maximum elements of one reduction."""


class DeepSpeedBackend:
    def __init__(  # noqa: PLR0913 - what an engine is made of
        self,
        spec: ModelSpec,
        config: OptimizerConfig | None,
        settings: TrainSettings,
        stage: int,
        ranks: Ranks,
        parked: ParkedTensors,
        loaded: bool,
    ) -> None:
        self._config, self._settings, self._ranks, self._stage = config, settings, ranks, stage
        self.parked, self._has_gradients = parked, False
        module = spec.empty()
        self.packs = attention.can_pack(module)
        # Recomputing activations gathers divided parameters again.
        prepare_training(module, config is not None, settings.gradient_checkpointing, reentrant=stage == 3)
        ds_config = self._make_config(sum(parameter.numel() for parameter in module.parameters()))
        self._fill(module, spec, ds_config, loaded)
        self.limits = find_limits(module)
        self._names = dict(module.named_parameters())
        self._buffers = list_saved_buffers(module)
        self._passes: Any = module
        self._zero: Any = None
        if config is not None or stage == 3:
            self._passes, self._zero, *_ = deepspeed.initialize(
                model=module, optimizer=None if config is None else _adamw(module, config), config=ds_config
            )
        self._reader = OutputReader(settings.head, settings.device, self.packs)
        self._masters = self._init_optimizer() if config is not None else []
        self._track_memory()

    # -- making -------------------------------------------------------------------------------------------------------

    def _make_config(self, elements: int) -> dict[str, Any]:
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
                "stage3_param_persistence_threshold": 0,  # small ones kept whole could not be offloaded
            },
        }

    def _fill(self, module: Any, spec: ModelSpec, ds_config: dict[str, Any], loaded: bool) -> None:
        divide: Callable[[list[Any]], object] = lambda parameters: None  # noqa: E731
        if self._stage == 3:  # Rank 0's values go to the others.
            dividing = deepspeed.zero.Init(config_dict_or_path=ds_config, mem_efficient_linear=False)
            divide = dividing._convert_to_zero_parameters
        fill_parameters(module, spec, self._settings.device, loaded, divide)

    def _init_optimizer(self) -> list[Any]:
        """This rank's masters, each the parts of many parameters; their moments start as zeros."""
        zero = self._zero
        masters = zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        for master in masters:
            zero.optimizer.state[master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }
        return list(masters)

    def _track_memory(self) -> None:
        self.parked.hold("weights", [self._part(parameter) for parameter in self._names.values()])
        self.parked.hold("weights", self._passes.buffers())
        self.parked.hold("weights", self._masters)
        for master in self._masters:
            self.parked.hold("optimizer", self._zero.optimizer.state[master].values())
        if self._stage == 3 and self._masters:
            self.parked.hold("gradients", [self._zero.grad_partitions_flat_buffer])
            buckets = [bucket.buffer for bucket in self._zero.ipg_buckets.values()]
            self.parked.hold("gradients", [buffer for buffer in buckets if buffer is not None])

    def _part(self, parameter: Any) -> Any:
        return parameter.ds_tensor if self._stage == 3 else parameter

    # -- passes -------------------------------------------------------------------------------------------------------

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        with self._precision():
            for micro in micros:
                note_progress()
                yield micro, self._reader.read(self._passes, micro, temperature, entropy)

    def _precision(self) -> AbstractContextManager[Any]:
        if isinstance(self._passes, deepspeed.DeepSpeedEngine) or self._settings.precision == "fp32":
            return nullcontext()
        return torch.autocast(torch.device(self._settings.device).type, torch.bfloat16)

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        engine, last = self._passes, micros[-1]
        self._has_gradients = True

        def read(micro: MicroBatch, wants_entropy: bool) -> tuple[Any, ...]:
            engine.set_gradient_accumulation_boundary(micro is last)
            return self._reader.read(engine, micro, temperature, wants_entropy)

        def backward(value: Any) -> None:
            engine.backward(value * self._ranks.world_size)  # DeepSpeed takes the mean over the ranks

        return accumulate_gradients(micros, batch, loss, read, backward, self._settings.device)

    def reduce_gradients(self) -> list[Any]:
        groups = self._zero.averaged_gradients.values()
        return [gradient for group in groups for gradient in group or ()]

    def gradient_norm(self) -> float:
        zero = self._zero
        norm = combine_grad_norm_groups(zero._get_norm_groups()) if self._stage == 3 else zero.scaled_global_norm()
        return math.nan if is_invalid_grad_norm(norm) else float(norm)

    def first_bad_gradient(self) -> str:
        return find_nonfinite({name: safe_get_full_grad(parameter) for name, parameter in self._names.items()})

    def update(self, version: int, norm: float) -> float:
        assert self._config is not None
        lr = compute_learning_rate(self._config, version)
        for group in self._zero.optimizer.param_groups:
            group["lr"] = lr
        self._passes.step()
        self._has_gradients = False
        return lr

    def drop_gradients(self) -> None:
        if not self._has_gradients:
            return
        # DeepSpeed drops gradients in a step that it skips because their norm is NaN.
        name, answer = ("_get_norm_groups", [math.nan]) if self._stage == 3 else ("scaled_global_norm", math.nan)
        setattr(self._zero, name, lambda *_: answer)
        try:
            self._passes.set_gradient_accumulation_boundary(True)
            self._passes.step()
        finally:
            delattr(self._zero, name)
        self._has_gradients = False

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._names.items():
            local = self.parked.locate(self._part(parameter))
            if local.dtype != (dtype or local.dtype):
                local = local.to(self._settings.device).to(dtype)
            yield name, self._whole(parameter, local) if self._stage == 3 else local
        yield from ((name, self.parked.locate(buffer)) for name, buffer in self._buffers.items())

    def _whole(self, parameter: Any, local: Any) -> Any:
        mine = local.to(self._settings.device)
        flat = mine.new_empty(mine.numel() * self._ranks.world_size)
        all_gather_single(flat, mine.contiguous())
        return flat[: parameter.ds_numel].view(parameter.ds_shape)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        divided = self._stage == 3
        shapes = {name: part.ds_shape if divided else part.shape for name, part in self._names.items()}
        shapes |= {name: buffer.shape for name, buffer in self._buffers.items()}
        return {name: tuple(shape) for name, shape in shapes.items()}

    @torch.no_grad()
    def write_weights(self, weights: WeightSnapshot) -> None:
        for name, parameter in self._names.items():
            local, whole = self.parked.locate(self._part(parameter)), weights.tensor(name)
            if self._stage == 3:
                start = self._ranks.rank * local.numel()
                whole = whole.reshape(-1)[start : start + local.numel()]
                local = local[: whole.numel()]
            local.copy_(whole)
        for name, buffer in self._buffers.items():
            self.parked.locate(buffer).copy_(weights.tensor(name))

    # -- states -------------------------------------------------------------------------------------------------------

    @property
    def _layout(self) -> list[int]:
        return [*Layout(shard=self._ranks.world_size).shape, self._stage]

    def local_state(self) -> dict[str, Any]:
        """Weights by name, masters by number."""
        locate, moments = self.parked.locate, None
        model = {name: locate(self._part(parameter)) for name, parameter in self._names.items()}
        model |= {name: locate(buffer) for name, buffer in self._buffers.items()}
        model |= {f"master {number}": locate(master) for number, master in enumerate(self._masters)}
        if self._config is not None:
            state = self._zero.optimizer.state
            moments = {
                f"master {number}": {kind: locate(tensor) for kind, tensor in state[master].items()}
                for number, master in enumerate(self._masters)
            }
        return {"layout": self._layout, "model": model, "optimizer": moments}

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        restore_state(self.local_state(), state)

    def write_checkpoint(self, path: Path, version: int) -> None:
        def write(folder: Path) -> None:
            file = _file(folder, self._ranks.rank)
            torch.save({"version": version, **self.local_state(), "random": pack_random_state()}, file)
            sync_to_disk(file)

        write_folder(path, self._ranks, write)

    def read_checkpoint(self, path: Path) -> int:
        state, own_error = dict[str, Any](), ""
        try:
            state = _read(path, self._ranks.rank, self._layout)
        except EngineError as error:
            own_error = str(error)
        self._ranks.raise_any(own_error)
        restore_state(self.local_state(), state)
        unpack_random_state(state["random"])
        return int(state["version"])

    def release(self) -> None:
        if isinstance(self._passes, deepspeed.DeepSpeedEngine):
            self._passes.destroy()


def _adamw(module: Any, config: OptimizerConfig) -> Any:
    decayed: list[Any] = []
    others: list[Any] = []
    for parameter in module.parameters():
        (decayed if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=config.betas)
