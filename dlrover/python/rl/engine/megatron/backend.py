# SPDX-License-Identifier: Apache-2.0
"""Megatron's GPT with its optimizer: passes through its pipeline schedules, sums through its data parallelism."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import OptimizerConfig, TokenLoss, TrainSettings
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.megatron.conversion import TransformerShape, pad_vocab
from dlrover.python.rl.engine.megatron.model import build_gpt, gather_tokens, make_packed_params
from dlrover.python.rl.engine.megatron.shards import CheckpointTensors, MegatronShard, MegatronShards, Stage
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.attention import Documents
from dlrover.python.rl.engine.model.loading import DTYPES
from dlrover.python.rl.engine.model.outputs import VocabularyShard, token_logprobs
from dlrover.python.rl.engine.model.packing import MicroBatch
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.training.backend import read_checkpoint, write_checkpoint
from dlrover.python.rl.engine.training.stepping import MasterOptimizer, ShardedBackend, accumulate_gradients

_EMBEDDING = "model.embed_tokens.weight"

Finish = Callable[[MicroBatch, Any], tuple[Any, Any, Any]]
"""Called by the last stage with a micro-batch's logits; returns the loss, an unused number, and a result."""


class MegatronBackend(ShardedBackend):
    packs = True

    def __init__(  # noqa: PLR0913 - what an engine is made of
        self,
        shape: TransformerShape,
        config: OptimizerConfig | None,
        settings: TrainSettings,
        stage: Stage,
        ranks: Ranks,
        context: AbstractContextManager[Any],
        parked: ParkedTensors,
    ) -> None:
        self._shape, self._settings, self._stage, self._ranks, self._context = shape, settings, stage, ranks, context
        self.parked, self._reads = parked, None
        self.limits = shape.vocab, shape.max_positions
        precision = DTYPES[settings.precision]
        with context:
            self.module = build_gpt(
                shape, stage.layout, stage.place, precision, settings.gradient_checkpointing, settings.device
            )
            self.module.requires_grad_(config is not None)
            self._passes = self.module
            if config is not None:
                sums = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
                self._passes = DistributedDataParallel(self.module.config, sums, self.module)
        self.shards = MegatronShards(self.module, shape, stage, self._passes if config is not None else None)
        self._is_gathered = True  # the module has all ranks' slices of the last step
        self.optimizer = None if config is None else MasterOptimizer(config, self.shards.trained)
        if stage.is_last:
            self.module.output_layer.register_forward_pre_hook(self._select_read_tokens)
        self._track_memory()

    def _track_memory(self) -> None:
        self.parked.hold("weights", [shard.tensor for shard in self.shards])
        self.parked.hold("weights", [shard.master for shard in self.shards])
        if self.optimizer is not None:
            self.parked.hold("gradients", [shard.tensor.main_grad for shard in self.shards])
            self.parked.hold("optimizer", self.optimizer.tensors())

    @torch.no_grad()
    def load(self, spec: ModelSpec) -> None:
        """Read this rank's part of the weights. Raises an ``EngineError`` if tensors are missing or of other shapes."""
        shapes = self.shapes()
        wanted: dict[str, tuple[str, ...]] = {name: (name,) for name in shapes}
        if self._shape.tied:
            wanted[_EMBEDDING] = (_EMBEDDING, "lm_head.weight")
        read = spec.reader(wanted, shapes, "model")
        for shard in self.shards:
            shard.write(self.shards.part(shard, [read(name) for name in shard.parameter.sources]))

    def _pass(self, finish: Finish, micros: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        note_progress()
        micro, device = next(micros), self._settings.device
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

    def _select_read_tokens(self, head: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = arguments
        return (gather_tokens(self.module, hidden)[self._reads], *others)

    def _run(self, micros: Sequence[MicroBatch], finish: Finish, forward_only: bool) -> list[Any]:
        self._gather()
        with self._context:
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=partial(self._pass, finish),
                data_iterator=iter(micros),
                model=self._passes,
                num_microbatches=len(micros),
                seq_length=max(len(micro.inputs) for micro in micros),
                micro_batch_size=1,
                forward_only=forward_only,
            )
            parallel_state.get_global_memory_buffer().buffer.clear()  # of gathered tokens, which others may need now
        return results

    def _read(self, logits: Any, micro: MicroBatch, temperature: float, entropy: bool) -> tuple[Any, Any]:
        """Outputs ``[actions]`` (``[actions, 1 + n]`` with candidates) and entropies of ``[1, actions, vocab]``."""
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
            raise EngineError("the megatron engine does not support `top`: a teacher needs 'fsdp2' or 'deepspeed'")

        def finish(micro: MicroBatch, logits: Any) -> tuple[Any, Any, Any]:
            outputs, entropies = self._read(logits, micro, temperature, entropy)
            parts = [outputs.reshape(len(outputs), width), *([entropies[:, None]] if entropy else [])]
            return logits, torch.zeros((), dtype=torch.int), torch.cat(parts, dim=1)

        candidates = micros[0].candidates
        width = 1 if candidates is None else 1 + candidates.shape[1]
        sizes = [len(micro.flat) for micro in micros]
        results = self._run(micros, finish, forward_only=True)
        whole = torch.empty((sum(sizes), width + entropy), device=self._settings.device)
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

            # The schedule runs the backward pass through the stages; here the loss is only captured.
            sums = accumulate_gradients([micro], batch, loss, read, values.append, self._settings.device)
            for name, amount in sums.items():
                totals[name] = totals.get(name, 0.0) + amount
            return values[0], torch.zeros((), dtype=torch.int), None

        self._run(micros, finish, forward_only=False)
        return totals if self._stage.reports else {}

    def reduce_gradients(self) -> list[Any]:
        with self._context:
            finalize_model_grads([self._passes])
        return super().reduce_gradients()

    def drop_gradients(self) -> None:
        super().drop_gradients()
        with self._context:
            self._passes.zero_grad_buffer()

    def update(self, version: int, norm: float) -> float:
        self._is_gathered = False
        return super().update(version, norm)

    def _refresh(self) -> None:
        self._is_gathered = self.optimizer is None
        super()._refresh()

    def _gather(self) -> None:
        """Exchange the slices that the data-parallel ranks have stepped. All of these ranks call it, on the device."""
        if not self._is_gathered:
            with self._context:
                self._passes.start_param_sync()
            self._is_gathered = True

    def _read_part(self, shard: MegatronShard, dtype: Any) -> Any:
        if dtype == shard.tensor.dtype and self.parked.on_device:
            self._gather()  # the next pass needs them, too
            return shard.tensor.detach()
        return self.shards.whole(shard, self.parked.locate(shard.master).to(self._settings.device).to(dtype))

    def named_weights(self, dtype: Any = None, merged: bool = True) -> Iterator[tuple[str, Any]]:
        return self.shards.named_weights(self._read_part, self._settings.device, dtype)

    def named_adapters(self) -> Iterator[tuple[str, Any]]:
        return iter(())  # none are trained here

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shards.shapes()

    @torch.no_grad()
    def write_weights(self, weights: WeightSnapshot) -> None:
        for shard in self.shards:
            tensors = [weights.tensor(name) for name in shard.parameter.sources]
            shard.write(self.shards.part(shard, tensors), self.parked.locate)

    def local_state(self) -> dict[str, Any]:
        model = {shard.name: self.parked.locate(shard.master) for shard in self.shards}
        return {"layout": list(self._stage.layout.shape), "model": model, "optimizer": self._moments()}

    def write_checkpoint(self, path: Path, version: int) -> None:
        write_checkpoint(path, self._ranks, self._stage.layout, self._checkpoint_tensors().tensors, version)

    def read_checkpoint(self, path: Path) -> int:
        copies = self._checkpoint_tensors()
        version = read_checkpoint(path, self._ranks, self._stage.layout, copies.tensors, copies.all_names())
        copies.put_back()
        return version

    def _checkpoint_tensors(self) -> CheckpointTensors:
        return CheckpointTensors(self._shape, self._stage, self.shards, self.optimizer)
