# SPDX-License-Identifier: Apache-2.0
"""The train engine on megatron-core: process groups, and a GPT with an optimizer, whose passes use Megatron's pipeline
schedules and whose gradients are summed by its data parallelism."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import Rendezvous, TokenLoss
from dlrover.python.rl.engine.api.settings import Layout
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.megatron import INFO
from dlrover.python.rl.engine.megatron.conversion import TransformerShape, list_parameters, pad_vocab
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.attention import Documents
from dlrover.python.rl.engine.model.loading import DTYPES, bind_weights, find_known_ids
from dlrover.python.rl.engine.model.outputs import VocabularyShard, token_logprobs
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.training.backend import TrainBackend, TrainSetup, read_checkpoint, write_checkpoint
from dlrover.python.rl.engine.training.stepping import MasterOptimizer, accumulate_gradients, find_first_nonfinite
from dlrover.python.rl.engine.training.train_engine_base import BackendTrainEngine

try:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, model_parallel_cuda_manual_seed
except ImportError as error:
    raise MissingExtra("megatron-core", "megatron") from error

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from dlrover.python.rl.engine.megatron.model import build_gpt, make_packed_params
from dlrover.python.rl.engine.megatron.shards import CheckpointTensors, MegatronShard, MegatronShards, Stage

_EMBEDDING = "model.embed_tokens.weight"

Finish = Callable[[MicroBatch, Any], tuple[Any, Any, Any]]
"""Called by the last stage with a micro-batch's logits; returns the loss, an unused number, and a result."""


class MegatronBackend(TrainBackend):
    packs = True
    shards: MegatronShards

    def __init__(
        self,
        setup: TrainSetup,
        shape: TransformerShape,
        stage: Stage,
        context: AbstractContextManager[Any],
        parked: ParkedTensors,
    ) -> None:
        super().__init__(setup, parked)
        self._shape, self._stage, self._context = shape, stage, context
        self._reads: Any = None
        self.limits = shape.vocab, shape.max_positions
        config, settings = setup.config, setup.settings
        with context:
            precision, recompute = DTYPES[settings.precision], settings.gradient_checkpointing
            self.module = build_gpt(shape, stage.layout, stage.place, precision, recompute, settings.device)
            self.passes = self.module
            self.module.requires_grad_(config is not None)
            if config is not None:
                sums = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
                self.passes = DistributedDataParallel(self.module.config, sums, self.module)
        self.shards = MegatronShards(self.module, shape, stage, self.passes if config is not None else None)
        self._is_gathered = True  # the module has the slices of all ranks after the last step
        if stage.is_last:

            def select_read_tokens(_head: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
                hidden = arguments[0]
                if self.module.config.sequence_parallel:  # ranks share the row
                    hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
                return (hidden[self._reads], *arguments[1:])  # [tokens, 1, hidden]

            self.module.output_layer.register_forward_pre_hook(select_read_tokens)
        parked.hold("weights", [shard.tensor for shard in self.shards])
        parked.hold("weights", [shard.master for shard in self.shards])
        if config is not None:
            self.optimizer = MasterOptimizer(config, list(self.shards))
            parked.hold("gradients", [shard.tensor.main_grad for shard in self.shards])
            parked.hold("optimizer", self.optimizer.tensors())

    # -- passes -------------------------------------------------------------------------------------------------------

    def _pass(self, finish: Finish, micros: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        note_progress()
        micro, device = next(micros), self.setup.settings.device
        self._reads = torch.from_numpy(micro.reads).to(device)
        padding = -len(micro.inputs) % self._stage.layout.tensor  # ranks that split matrices share the tokens evenly
        inputs, positions = (torch.from_numpy(np.pad(each, (0, padding))) for each in (micro.inputs, micro.positions))
        lengths = *micro.lengths.tolist(), *[1] * padding
        output = model(
            input_ids=inputs.to(device)[None],
            position_ids=positions.to(device)[None],
            attention_mask=None,
            packed_seq_params=make_packed_params(Documents(lengths, device)),
        )
        return output, partial(finish, micro)

    def _run(self, micros: Sequence[MicroBatch], finish: Finish, forward_only: bool) -> list[Any]:
        self._gather()
        with self._context:
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=partial(self._pass, finish),
                data_iterator=iter(micros),
                model=self.passes,
                num_microbatches=len(micros),
                seq_length=max(len(micro.inputs) for micro in micros),
                micro_batch_size=1,
                forward_only=forward_only,
            )
            parallel_state.get_global_memory_buffer().buffer.clear()  # frees the gathered tokens
        return results

    def _read(self, logits: Any, micro: MicroBatch, temperature: float, entropy: bool) -> tuple[Any, Any]:
        """Return outputs ``[actions]`` (``[actions, 1 + n]`` with candidates) and entropies for logits ``[1, actions,
        vocab]``."""
        if self._shape.head == "token":
            return logits[0].squeeze(-1).float(), None
        ranks, rank = self._stage.layout.tensor, self._stage.place.tensor
        start = pad_vocab(self._shape.vocab, ranks) // ranks * rank
        shard = VocabularyShard(start, self._stage.tensors) if ranks > 1 else None
        targets = torch.from_numpy(micro.target_ids).to(logits.device)
        return token_logprobs(logits[0], targets, temperature, entropy, shard, self._shape.known_ids)

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        if not micros:
            return
        if micros[0].top:
            raise EngineError("the megatron engine does not support 'top': a teacher needs 'fsdp2' or 'deepspeed'")

        def finish(micro: MicroBatch, logits: Any) -> tuple[Any, Any, Any]:
            outputs, entropies = self._read(logits, micro, temperature, entropy)
            parts = [outputs.reshape(len(outputs), width), *([entropies[:, None]] if entropy else [])]
            return logits, torch.zeros((), dtype=torch.int), torch.cat(parts, dim=1)

        candidates = micros[0].candidates
        width = 1 if candidates is None else 1 + candidates.shape[1]
        sizes = [len(micro.flat) for micro in micros]
        results = self._run(micros, finish, forward_only=True)
        whole = torch.empty((sum(sizes), width + entropy), device=self.setup.settings.device)
        if self._stage.is_last:
            whole.copy_(torch.cat(results))
        self._stage.from_stage(whole, self._stage.layout.pipeline - 1)
        for micro, part in zip(micros, whole.split(sizes), strict=True):
            outputs = part[:, 0] if candidates is None else part[:, :width]
            yield micro, (outputs, part[:, width] if entropy else None)

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        totals: dict[str, float] = {}

        def finish(micro: MicroBatch, logits: Any) -> tuple[Any, Any, None]:
            values: list[Any] = []

            def read(micro: MicroBatch, wants_entropy: bool) -> tuple[Any, Any]:
                return self._read(logits, micro, temperature, wants_entropy)

            # The schedule runs the backward pass through the stages: only the loss is needed here.
            sums = accumulate_gradients([micro], batch, loss, read, values.append, self.setup.settings.device)
            for name, amount in sums.items():
                totals[name] = totals.get(name, 0.0) + amount
            return values[0], torch.zeros((), dtype=torch.int), None

        self._run(micros, finish, forward_only=False)
        # One rank reports for a model replica: the ranks of its last stage all compute the same loss.
        return totals if self._stage.is_last and self._stage.place.tensor == 0 else {}

    def reduce_gradients(self) -> list[Any]:
        """Give each master its gradient, which Megatron has summed in float32."""
        with self._context:
            finalize_model_grads([self.passes])
        for shard in self.shards:
            shard.master.grad = shard.own(shard.tensor.main_grad)
        return [shard.master.grad for shard in self.shards]

    def gradient_norm(self) -> float:
        """Sum in the ranks' order."""
        norms = [torch.linalg.vector_norm(shard.master.grad).double() for shard in self.shards if shard.counts]
        return math.sqrt(sum(self.setup.ranks.gather(sum(float(norm * norm) for norm in norms))))

    def first_bad_gradient(self) -> str:
        gradients = {shard.parameter.sources[0]: shard.master.grad for shard in self.shards}
        order = [parameter.sources[0] for parameter in list_parameters(self._shape)]
        return find_first_nonfinite(self.setup.ranks, gradients, order)

    def drop_gradients(self) -> None:
        for shard in self.shards:
            shard.master.grad = shard.tensor.grad = None
        with self._context:
            self.passes.zero_grad_buffer()

    def update(self, version: int, norm: float) -> float:
        self._is_gathered = False
        return super().update(version, norm)

    def refresh(self) -> None:
        self._is_gathered = self.optimizer is None
        super().refresh()

    def _gather(self) -> None:
        """Exchange the slices that the data-parallel ranks have stepped. A collective, on the device."""
        if not self._is_gathered:
            with self._context:
                self.passes.start_param_sync()
            self._is_gathered = True

    # -- weights and states -------------------------------------------------------------------------------------------

    def _whole(self, shard: MegatronShard, dtype: Any = None) -> Any:
        """Join the slices of all data-parallel ranks; ``named_weights`` joins tensor-parallel parts."""
        if dtype == shard.tensor.dtype and self.parked.on_device:
            self._gather()  # the next pass needs them too
            return shard.tensor.detach()
        own = self.parked.locate(shard.master).to(self.setup.settings.device).to(dtype)
        return shard.whole(own, self._stage.data)

    def named_weights(self, dtype: Any = None, merged: bool = True) -> Iterator[tuple[str, Any]]:
        return self.shards.named_weights(self._whole, self.setup.settings.device, dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shards.shapes()

    @torch.no_grad()
    def write_weights(self, weights: WeightSnapshot) -> None:
        for shard in self.shards:
            tensors = [weights.tensor(name) for name in shard.parameter.sources]
            shard.write(self.shards.part(shard, tensors), self.parked.locate)

    def local_state(self) -> dict[str, Any]:
        model = {shard.name: self.parked.locate(shard.master) for shard in self.shards}
        moments = None if self.optimizer is None else self.optimizer.moments(self.parked.locate)
        return {"layout": list(self._stage.layout.shape), "model": model, "optimizer": moments}

    def write_checkpoint(self, path: Path, version: int) -> None:
        copies = CheckpointTensors(self._shape, self._stage, self.shards, self.optimizer)
        write_checkpoint(path, self.setup.ranks, self._stage.layout, copies.tensors, version)

    def read_checkpoint(self, path: Path) -> int:
        copies = CheckpointTensors(self._shape, self._stage, self.shards, self.optimizer)
        version = read_checkpoint(path, self.setup.ranks, self._stage.layout, copies.tensors, copies.all_names())
        copies.put_back()
        return version


class MegatronTrainEngine(BackendTrainEngine):
    """Divides the model by the tensor and pipeline sizes of ``parallel``; the remaining ranks hold copies of it, with
    different rows, and divide its optimizer (ZeRO-1). Megatron's process groups belong to the process: its engines have
    equal sizes. Raises MissingExtra on import if megatron-core is not installed."""

    name, info = "megatron", INFO

    def _connect(self, rendezvous: Rendezvous) -> Ranks:
        setup, settings = self._setup, self._setup.settings
        self.layout = Layout.of(rendezvous.world_size, settings.parallel)
        self._shape = TransformerShape.of(setup.spec.config, settings.head)
        known_ids = find_known_ids(setup.spec.tokenizer, self._shape.vocab, settings.mask_unknown_ids)
        if known_ids is not None:
            self._shape = replace(self._shape, known_ids=known_ids)
        self._shape.check_split(self.layout.tensor, self.layout.pipeline)
        self._context: AbstractContextManager[Any] = nullcontext()
        if setup.options.cpu_shim:
            from dlrover.python.rl.engine.megatron.cpu_shim import CpuShim

            self._context = CpuShim()
        elif torch.device(settings.device).type != "cuda":
            raise EngineError(
                f"megatron-core needs CUDA, but the device is '{settings.device}': for tests, set cpu_shim"
            )
        ranks = Ranks.connect(rendezvous, settings.device, always=True)
        with ranks.close_on_failure(), self._context:
            self._owns_groups = _make_groups(self.layout, rendezvous.timeout_s)
        self._stage = Stage(
            self.layout,
            self.layout.coordinates(ranks.rank),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        )
        return ranks

    def _make(self, parked: ParkedTensors, loaded: bool) -> MegatronBackend:
        backend = MegatronBackend(self._setup, self._shape, self._stage, self._context, parked)
        if loaded:
            spec, shapes = self._setup.spec, backend.shapes()
            wanted: dict[str, tuple[str, ...]] = {name: (name,) for name in shapes}
            if self._shape.tied:
                wanted[_EMBEDDING] = (_EMBEDDING, "lm_head.weight")
            read = bind_weights(spec.source_of(wanted, "model"), wanted, shapes, spec.absent, "model")
            for shard in backend.shards:
                shard.write(backend.shards.part(shard, [read(name, ()) for name in shard.parameter.sources]))
        return backend

    def _leave_group(self) -> None:
        if self._owns_groups:
            parallel_state.destroy_model_parallel()
        super()._leave_group()


def _make_groups(layout: Layout, timeout_s: float) -> bool:
    """Make Megatron's process groups. Returns False if they exist; raises an ``EngineError`` if their sizes differ."""
    if not parallel_state.model_parallel_is_initialized():
        minutes: Any = timeout_s / 60  # need not be an integer
        parallel_state.initialize_model_parallel(
            layout.tensor, layout.pipeline, order="tp-cp-ep-pp-dp", distributed_timeout_minutes=minutes
        )
        state = torch.cuda.get_rng_state()
        model_parallel_cuda_manual_seed(0)  # sequence parallel requires a random state, which dropout 0 leaves unused
        torch.cuda.set_rng_state(state)
        return True
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    if (tensor, pipeline) != (layout.tensor, layout.pipeline):
        raise EngineError(
            f"this process already runs megatron with tensor_parallel_size {tensor} and pipeline_parallel_size"
            f" {pipeline}, not {layout.tensor} and {layout.pipeline}"
        )
    return False
