# SPDX-License-Identifier: Apache-2.0
"""A train engine on DeepSpeed: ZeRO 1 to 3 over any Hugging Face model, and its checkpoints.

Each rank writes a file, which only the same layout can read.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous, TokenLoss
from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.deepspeed import INFO
from dlrover.python.rl.engine.deepspeed.parts import ZeroParameter, allocate, list_parameters, make_reader
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.loading import DTYPES, find_known_ids, find_limits, list_saved_buffers, sync_to_disk
from dlrover.python.rl.engine.model.outputs import OutputReader
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks, pack_random_state, unpack_random_state
from dlrover.python.rl.engine.training.backend import TrainBackend, TrainSetup, present, write_folder
from dlrover.python.rl.engine.training.redivide import restore_state
from dlrover.python.rl.engine.training.stepping import (
    accumulate_gradients,
    build_optimizer,
    compute_learning_rate,
    find_nonfinite,
    make_state,
)
from dlrover.python.rl.engine.training.train_engine_base import BackendTrainEngine

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for an accelerator on import
try:
    import deepspeed
except ImportError as error:
    raise MissingExtra("deepspeed", "deepspeed") from error

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import __compatible_ops__
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm
from deepspeed.utils import groups, safe_get_full_grad

# DeepSpeed calls torch's collectives by deprecated names, at every step.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)

_BUCKET = 1 << 27
"""Maximum elements of one reduction."""


class DeepSpeedBackend(TrainBackend):
    """A Hugging Face model with its optimizer under DeepSpeed's ZeRO."""

    shards: list[ZeroParameter]
    _zero: Any
    """DeepSpeed's optimizer; None for a frozen model that the ranks do not divide."""

    def __init__(self, setup: TrainSetup, parked: ParkedTensors, loaded: bool) -> None:
        super().__init__(setup, parked)
        config, settings, stage = setup.config, setup.settings, setup.options.zero_stage
        self._has_gradients, self._is_divided = False, stage == 3
        self._on_host = setup.options.optimizer_on_host and config is not None
        # Reentrant: recomputing activations gathers divided parameters again.
        self.module = module = setup.empty_module(reentrant=self._is_divided)
        read = make_reader(module, setup.spec) if loaded else None
        # Configured to sum gradients in float32, DeepSpeed would choose another optimizer for ZeRO 1.
        on_device = config is not None and not self._on_host
        sums_otherwise = on_device and stage == 1 and settings.precision == "bf16"
        ds_config = self._make_config(sums_otherwise)
        divide: Callable[[list[Any]], object] = lambda parameters: None  # noqa: E731
        if self._is_divided:
            dividing = deepspeed.zero.Init(config_dict_or_path=ds_config, mem_efficient_linear=False)
            divide = dividing._convert_to_zero_parameters
        allocate(module, settings.device, DTYPES[settings.precision], divide)
        self.packs, self.limits = attention.can_pack(module), find_limits(module)
        self.passes, self._zero = module, None
        if config is not None or self._is_divided:
            self.passes, self._zero, *_ = deepspeed.initialize(
                model=module, optimizer=None if config is None else _make_optimizer(module, config), config=ds_config
            )
        if sums_otherwise:  # let ZeRO 1 over bf16 weights sum in float32, as it does with an optimizer on the host
            self._zero.gradient_accumulation_dtype = torch.float32
            self._zero.use_separate_grad_accum = self._zero.use_grad_accum_attribute = True
        known_ids = find_known_ids(setup.spec.tokenizer, self.limits[0], settings.mask_unknown_ids)
        self.reader = OutputReader(settings.head, settings.device, self.packs, known_ids=known_ids)
        self._masters = self._init_optimizer(config) if config is not None else []
        self.shards = list_parameters(module, None if config is None else self._zero, setup.ranks.rank)
        self.buffers = list_saved_buffers(module)
        self._track_memory()
        if read is not None:
            self._write(read)

    # -- making -------------------------------------------------------------------------------------------------------

    def _make_config(self, sums_otherwise: bool) -> dict[str, Any]:
        """Configure DeepSpeed. The loss carries the normaliser, so nothing is averaged over steps or ranks."""
        config, settings = self.setup.config, self.setup.settings
        on_cuda = torch.device(settings.device).type == "cuda"
        trained = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        zero = {
            "stage": self.setup.options.zero_stage,
            "reduce_bucket_size": min(trained or _BUCKET, _BUCKET),
            "overlap_comm": on_cuda,
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": 0,  # small parameters, if whole, could not be offloaded
        }
        if self._on_host:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_cuda}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": (config.max_grad_norm if config else None) or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # torch's gives the same bits on every device
            "steps_per_print": 1 << 62,
            # Non-finite gradients are refused before a step.
            "bf16": {"enabled": settings.precision == "bf16", "check_grad_overflow": False},
            "data_types": {"grad_accum_dtype": None if sums_otherwise else "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": zero,
        }

    def _init_optimizer(self, config: OptimizerConfig) -> list[Any]:
        """Return this rank's masters, each with parts of many parameters; their moments start as zeros."""
        zero = self._zero
        masters = list(zero.fp32_partitioned_groups_flat if self._is_divided else zero.single_partition_of_fp32_groups)
        for number, master in enumerate(masters):
            group = zero.optimizer.param_groups[zero.sub_group_to_group_id[number] if self._is_divided else number]
            zero.optimizer.state[master] = make_state(config, master, group["of_matrices"])
        return masters

    def _track_memory(self) -> None:
        """Account for what is on the device."""
        zero, parked = self._zero, self.parked
        parked.hold("weights", [shard.local for shard in self.shards])
        parked.hold("weights", self.module.buffers())
        if self.setup.config is None:
            return
        if not self._on_host:
            parked.hold("weights", self._masters)
            for master in self._masters:
                parked.hold("optimizer", zero.optimizer.state[master].values())
        if self._is_divided:  # buffers stay on the device between steps
            buckets = [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None]
            parked.hold("gradients", buckets if self._on_host else [zero.grad_partitions_flat_buffer, *buckets])
        elif self._on_host:
            parked.hold("gradients", [zero.temp_grad_buffer_for_gpu_offload])

    # -- passes -------------------------------------------------------------------------------------------------------

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        engine, last = self.passes, micros[-1]
        self._has_gradients = True

        def read(micro: MicroBatch, wants_entropy: bool) -> tuple[Any, ...]:
            engine.set_gradient_accumulation_boundary(micro is last)
            return self.reader.read(engine, micro, temperature, wants_entropy)

        def backward(value: Any) -> None:
            engine.backward(value * self.setup.ranks.world_size)  # DeepSpeed averages over the ranks

        return accumulate_gradients(micros, batch, loss, read, backward, self.setup.settings.device)

    def reduce_gradients(self) -> list[Any]:
        groups = self._zero.averaged_gradients.values()
        return [gradient for group in groups for gradient in group or ()]

    def gradient_norm(self) -> float:
        zero = self._zero
        norm = combine_grad_norm_groups(zero._get_norm_groups()) if self._is_divided else zero.scaled_global_norm()
        return math.nan if is_invalid_grad_norm(norm) else float(norm)

    def first_bad_gradient(self) -> str:
        return find_nonfinite({shard.name: safe_get_full_grad(shard.parameter) for shard in self.shards})

    def update(self, version: int, norm: float) -> float:
        assert self.setup.config is not None
        lr = compute_learning_rate(self.setup.config, version)
        for group in self._zero.optimizer.param_groups:
            group["lr"] = lr
        self.passes.step()
        self._has_gradients = False
        return lr

    def drop_gradients(self) -> None:
        if not self._has_gradients:
            return
        # DeepSpeed drops gradients when it skips a step because they are not finite.
        skipped: dict[str, Any] = {"_get_norm_groups": lambda: [math.nan]}
        if not self._is_divided:
            skipped = {"check_overflow": lambda **_: setattr(self._zero, "overflow", True)}
            self._zero.check_grad_overflow = True
        vars(self._zero).update(skipped)
        try:
            self.passes.set_gradient_accumulation_boundary(True)
            self.passes.step()
        finally:
            for name in skipped:
                delattr(self._zero, name)
            self._zero.check_grad_overflow = False
        self._zero.averaged_gradients.update(dict.fromkeys(self._zero.averaged_gradients))
        self._has_gradients = False

    # -- weights ------------------------------------------------------------------------------------------------------

    def _whole(self, shard: ZeroParameter, dtype: Any = None) -> Any:
        return shard.whole(dtype, self.setup.settings.device, self.setup.ranks, self.parked.locate)

    def write_weights(self, weights: WeightSnapshot) -> None:
        self._write(weights.tensor)

    @torch.no_grad()
    def _write(self, read: Callable[[str], Any]) -> None:
        for shard in self.shards:
            note_progress()
            shard.write(read(shard.name), self.setup.ranks.rank, self.parked.locate)
        for name, buffer in self.buffers.items():
            self.parked.locate(buffer).copy_(read(name))

    # -- states -------------------------------------------------------------------------------------------------------

    def local_state(self) -> dict[str, Any]:
        """See ``TrainBackend``; masters are by number."""
        setup, locate, moments = self.setup, self.parked.locate, None
        adapted = setup.settings.lora is not None
        model = {each.name: locate(each.local) for each in self.shards if each.master is not None or not adapted}
        model |= {} if adapted else {name: locate(buffer) for name, buffer in self.buffers.items()}
        masters = {f"master {number}": master for number, master in enumerate(self._masters)}
        model |= {name: locate(master) for name, master in masters.items()}
        if setup.config is not None:
            state = self._zero.optimizer.state
            moments = {
                name: {kind: locate(tensor) for kind, tensor in state[master].items()}
                for name, master in masters.items()
            }
        layout = [*Layout(shard=setup.ranks.world_size).shape, setup.options.zero_stage]
        return {"layout": layout, "model": model, "optimizer": moments}

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        precision = self.setup.settings.precision
        parts = (state["model"][shard.name] for shard in self.shards if shard.name in state["model"])
        if other := {str(part.dtype) for part in parts} - {str(DTYPES[precision])}:
            raise EngineError(
                f"the state has weights of {', '.join(sorted(other))}, but the engine's precision is {precision}:"
                " to change it, save the model in Hugging Face format"
            )
        restore_state(self.local_state(), state)

    def write_checkpoint(self, path: Path, version: int) -> None:
        def write(folder: Path) -> None:
            file = folder / f"rank-{self.setup.ranks.rank}.pt"
            torch.save({"version": version, **self.local_state(), "random": pack_random_state()}, file)
            sync_to_disk(file)

        write_folder(path, self.setup.ranks, write)

    def read_checkpoint(self, path: Path) -> int:
        state, own_error = dict[str, Any](), ""
        try:
            state = _read(path, self.setup.ranks.rank, self.local_state()["layout"])
        except EngineError as error:
            own_error = str(error)
        self.setup.ranks.raise_any(own_error)
        self.restore_local_state(state)
        unpack_random_state(state["random"])
        return int(state["version"])

    def release(self) -> None:
        if isinstance(self.passes, deepspeed.DeepSpeedEngine):
            self.passes.destroy()


def _make_optimizer(module: Any, config: OptimizerConfig) -> Any:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    dimensions = [len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in trained]
    matrices = [parameter for parameter, count in zip(trained, dimensions, strict=True) if count >= 2]
    vectors = [parameter for parameter, count in zip(trained, dimensions, strict=True) if count < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "of_matrices": True},
        {"params": vectors, "weight_decay": 0.0, "of_matrices": False},
    ]
    return build_optimizer(config, groups)


_load_tensors = partial(torch.load, map_location="cpu", weights_only=True)  # noqa: TID251 -- it runs no code


def _read(path: Path, rank: int, layout: list[int]) -> dict[str, Any]:
    folder = present(path)
    first = folder / "rank-0.pt"
    if not first.is_file():
        raise EngineError(f"no checkpoint at '{path}'")
    try:
        written = _load_tensors(first, mmap=True)["layout"]
        if written == layout:
            return dict(_load_tensors(folder / f"rank-{rank}.pt"))
    except (OSError, RuntimeError, UnpicklingError, LookupError) as error:
        raise EngineError(f"the checkpoint '{path}' cannot be read: {error}") from error
    raise EngineError(
        f"the checkpoint '{path}' is of layout {written} (the ranks' grid and the ZeRO stage), not {layout}:"
        " to change it, save the model in Hugging Face format"
    )


class DeepSpeedTrainEngine(BackendTrainEngine):
    """Gives each rank different rows, and divides the model by ``backend: {zero_stage: ...}``.

    With ``precision: bf16`` a rank has its parameters in bf16, and its part of their masters and gradients in float32.
    A checkpoint can only be read in the layout, stage and precision that wrote it. Raises MissingExtra on import if
    deepspeed is not installed."""

    name, info = "deepspeed", INFO

    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        settings = self._setup.settings
        device = torch.device(settings.device)
        if get_accelerator().device_name() != device.type:
            chosen = get_accelerator().device_name()
            raise EngineError(f"the device is '{device}', but DeepSpeed chose '{chosen}' on import: set DS_ACCELERATOR")
        self.layout = Layout.of(rendezvous.world_size, settings.parallel)
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed takes its device from there
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        if device.type == "cpu":
            # Its shared-memory collectives are compiled on first use, and an interrupted build blocks all later ones.
            __compatible_ops__["deepspeed_shm_comm"] = False
        ranks = Ranks.connect(rendezvous, settings.device, always=True)
        deepspeed.init_distributed(dist_init_required=False)
        ranks.set_timeout(groups._get_data_parallel_group())
        return ranks

    def _make(self, parked: ParkedTensors, loaded: bool) -> DeepSpeedBackend:
        return DeepSpeedBackend(self._setup, parked, loaded)

    def _leave_group(self) -> None:
        if self._setup.ranks.owns_group:
            deepspeed.comm.destroy_process_group()
        super()._leave_group()
