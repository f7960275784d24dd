# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model with its optimizer under DeepSpeed's ZeRO, and its checkpoints.

Each rank writes its own file, for the same layout.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from dlrover.python.rl.engine.deepspeed import DeepSpeedOptions
from dlrover.python.rl.engine.deepspeed.parts import allocate, list_parameters, make_reader
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.loading import (
    DTYPES,
    find_limits,
    list_saved_buffers,
    prepare_training,
    sync_to_disk,
)
from dlrover.python.rl.engine.model.outputs import OutputReader
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks, pack_random_state, unpack_random_state
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.training.adapters import adapter_name, add_adapters, is_adapter, merge, model_name
from dlrover.python.rl.engine.training.backend import present, write_folder
from dlrover.python.rl.engine.training.quantized import quantize_linear_layers
from dlrover.python.rl.engine.training.stepping import (
    accumulate_gradients,
    build_optimizer,
    compute_learning_rate,
    find_nonfinite,
    make_state,
    restore_state,
)


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
        options: DeepSpeedOptions,
        ranks: Ranks,
        parked: ParkedTensors,
        loaded: bool,
    ) -> None:
        self._config, self._settings, self._options, self._ranks = config, settings, options, ranks
        self.parked, self._has_gradients, self._is_divided = parked, False, options.zero_stage == 3
        self._on_host = options.optimizer_on_host and config is not None
        self.module = module = spec.empty()
        self.packs = attention.can_pack(module)
        if settings.lora is not None:
            if settings.lora.quantize_base is not None:
                quantize_linear_layers(module, DTYPES[settings.precision])
            add_adapters(module, settings.lora)
        # Recomputing activations gathers divided parameters again.
        prepare_training(module, config is not None, settings.gradient_checkpointing, reentrant=self._is_divided)
        read = make_reader(module, spec) if loaded else None
        ds_config = self._make_config()
        self._allocate(ds_config)
        self.limits = find_limits(module)
        self._passes: Any = module
        self._zero: Any = None
        if config is not None or self._is_divided:
            self._passes, self._zero, *_ = deepspeed.initialize(
                model=module, optimizer=None if config is None else _optimizer(module, config), config=ds_config
            )
        if self._sums_otherwise:
            _sum_in_float32(self._zero)
        known_ids = spec.known_ids(self.limits[0], settings.mask_unknown_ids)
        self._reader = OutputReader(settings.head, settings.device, self.packs, known_ids=known_ids)
        self._masters = self._init_optimizer() if config is not None else []
        parameters = list_parameters(module, None if config is None else self._zero, ranks.rank)
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._buffers = list_saved_buffers(module)
        self._track_memory()
        if read is not None:
            self._write(read)

    # -- making -------------------------------------------------------------------------------------------------------

    def _make_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration. The loss carries the normaliser, so nothing is averaged over steps or ranks."""
        config, on_cuda = self._config, torch.device(self._settings.device).type == "cuda"
        trained = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        zero = {
            "stage": self._options.zero_stage,
            "reduce_bucket_size": min(trained or _BUCKET, _BUCKET),
            "overlap_comm": on_cuda,
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": 0,  # small ones kept whole could not be offloaded
        }
        if self._on_host:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_cuda}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": (config.max_grad_norm if config else None) or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # torch's gives the same bits wherever it steps
            "steps_per_print": 1 << 62,
            # Non-finite gradients are refused before a step.
            "bf16": {"enabled": self._settings.precision == "bf16", "check_grad_overflow": False},
            "data_types": {"grad_accum_dtype": None if self._sums_otherwise else "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": zero,
        }

    @property
    def _sums_otherwise(self) -> bool:
        """Configured to sum gradients in float32, DeepSpeed would take another optimizer for ZeRO 1."""
        on_device = self._config is not None and not self._on_host
        return on_device and self._options.zero_stage == 1 and self._settings.precision == "bf16"

    def _allocate(self, ds_config: dict[str, Any]) -> None:
        divide: Callable[[list[Any]], object] = lambda parameters: None  # noqa: E731
        if self._is_divided:
            dividing = deepspeed.zero.Init(config_dict_or_path=ds_config, mem_efficient_linear=False)
            divide = dividing._convert_to_zero_parameters
        allocate(self.module, self._settings.device, DTYPES[self._settings.precision], divide)

    def _init_optimizer(self) -> list[Any]:
        """This rank's masters, each the parts of many parameters; their moments start as zeros."""
        zero, config = self._zero, self._config
        assert config is not None
        masters = list(zero.fp32_partitioned_groups_flat if self._is_divided else zero.single_partition_of_fp32_groups)
        for number, master in enumerate(masters):
            group = zero.optimizer.param_groups[zero.sub_group_to_group_id[number] if self._is_divided else number]
            zero.optimizer.state[master] = make_state(config, master, group["of_matrices"])
        return masters

    def _track_memory(self) -> None:
        """Account for what is on the device."""
        self.parked.hold("weights", [parameter.local for parameter in self._parameters.values()])
        self.parked.hold("weights", self.module.buffers())
        if self._config is None:
            return
        if not self._on_host:
            self.parked.hold("weights", self._masters)
            for master in self._masters:
                self.parked.hold("optimizer", self._zero.optimizer.state[master].values())
        self.parked.hold("gradients", self._list_gradient_buffers())

    def _list_gradient_buffers(self) -> list[Any]:
        """Those that stay on the device between steps."""
        zero = self._zero
        if not self._is_divided:
            return [zero.temp_grad_buffer_for_gpu_offload] if self._on_host else []
        buckets = [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None]
        return buckets if self._on_host else [zero.grad_partitions_flat_buffer, *buckets]

    # -- passes -------------------------------------------------------------------------------------------------------

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        for micro in micros:
            note_progress()
            yield micro, self._reader.read(self._passes, micro, temperature, entropy)

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
        norm = combine_grad_norm_groups(zero._get_norm_groups()) if self._is_divided else zero.scaled_global_norm()
        return math.nan if is_invalid_grad_norm(norm) else float(norm)

    def first_bad_gradient(self) -> str:
        return find_nonfinite({name: safe_get_full_grad(each.parameter) for name, each in self._parameters.items()})

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
        # DeepSpeed drops gradients in a step that it skips because they are not finite.
        skipped: dict[str, Any] = {"_get_norm_groups": lambda: [math.nan]}
        if not self._is_divided:
            skipped = {"check_overflow": lambda **_: setattr(self._zero, "overflow", True)}
            self._zero.check_grad_overflow = True
        vars(self._zero).update(skipped)
        try:
            self._passes.set_gradient_accumulation_boundary(True)
            self._passes.step()
        finally:
            for name in skipped:
                delattr(self._zero, name)
            self._zero.check_grad_overflow = False
        self._zero.averaged_gradients.update(dict.fromkeys(self._zero.averaged_gradients))
        self._has_gradients = False

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_weights(self, dtype: Any = None, merged: bool = True) -> Iterator[tuple[str, Any]]:
        """See ``BaseTrainEngine``. Without a ``dtype`` a trained model's weights are float32, frozen ones of lower
        precision too."""
        lora, dtype = self._settings.lora, dtype or (None if self._config is None else torch.float32)
        for name in self._parameters:
            if lora is None:
                yield name, self._whole(name, dtype)
            elif not is_adapter(name):
                names = self._parameters if merged else ()
                yield model_name(name), merge(name, names, self._whole, lora).to(dtype)
        yield from ((name, self.parked.locate(buffer)) for name, buffer in self._buffers.items())

    def named_adapters(self) -> Iterator[tuple[str, Any]]:
        for name in self._parameters:
            if is_adapter(name):
                yield adapter_name(name), self._whole(name)

    def _whole(self, name: str, dtype: Any = None) -> Any:
        return self._parameters[name].whole(dtype, self._settings.device, self._ranks, self.parked.locate)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        return shapes | {name: tuple(buffer.shape) for name, buffer in self._buffers.items()}

    def write_weights(self, weights: WeightSnapshot) -> None:
        self._write(weights.tensor)

    @torch.no_grad()
    def _write(self, read: Callable[[str], Any]) -> None:
        for name, parameter in self._parameters.items():
            note_progress()
            parameter.write(read(name), self._ranks.rank, self.parked.locate)
        for name, buffer in self._buffers.items():
            self.parked.locate(buffer).copy_(read(name))

    # -- states -------------------------------------------------------------------------------------------------------

    @property
    def _layout(self) -> list[int]:
        return [*Layout(shard=self._ranks.world_size).shape, self._options.zero_stage]

    def local_state(self) -> dict[str, Any]:
        """Weights by name, masters by number. With adapters, those alone: the rest of the model does not change."""
        locate, moments, adapted = self.parked.locate, None, self._settings.lora is not None
        parts = [part for part in self._parameters.values() if part.master is not None or not adapted]
        model = {part.name: locate(part.local) for part in parts}
        model |= {} if adapted else {name: locate(buffer) for name, buffer in self._buffers.items()}
        model |= {f"master {number}": locate(master) for number, master in enumerate(self._masters)}
        if self._config is not None:
            state = self._zero.optimizer.state
            moments = {
                f"master {number}": {kind: locate(tensor) for kind, tensor in state[master].items()}
                for number, master in enumerate(self._masters)
            }
        return {"layout": self._layout, "model": model, "optimizer": moments}

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        model = {name: state["model"][name] for name in self._parameters if name in state["model"]}
        if other := {str(part.dtype) for part in model.values()} - {str(DTYPES[self._settings.precision])}:
            raise EngineError(
                f"the state has weights of {', '.join(sorted(other))}, and the engine is of precision"
                f" {self._settings.precision}: save the model in Hugging Face format to continue in another one"
            )
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
        self.restore_local_state(state)
        unpack_random_state(state["random"])
        return int(state["version"])

    def release(self) -> None:
        if isinstance(self._passes, deepspeed.DeepSpeedEngine):
            self._passes.destroy()


def _sum_in_float32(zero: Any) -> None:
    """Let ZeRO 1 over bf16 weights sum gradients in float32, as it does with an optimizer on the host."""
    zero.gradient_accumulation_dtype = torch.float32
    zero.use_separate_grad_accum = zero.use_grad_accum_attribute = True


def _optimizer(module: Any, config: OptimizerConfig) -> Any:
    matrices: list[Any] = []
    others: list[Any] = []
    for parameter in filter(lambda parameter: parameter.requires_grad, module.parameters()):
        (matrices if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "of_matrices": True},
        {"params": others, "weight_decay": 0.0, "of_matrices": False},
    ]
    return build_optimizer(config, groups)
