"""Megatron's GPT with its optimizer: passes through its pipeline schedules, sums through its data parallelism."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import OptimizerConfig, TokenLoss, TrainSettings
from dlrover.python.rl.engine.megatron.attention import packed
from dlrover.python.rl.engine.megatron.checkpoint import CheckpointTensors
from dlrover.python.rl.engine.megatron.conversion import padded_vocab
from dlrover.python.rl.engine.megatron.model import build
from dlrover.python.rl.engine.megatron.shape import TransformerShape
from dlrover.python.rl.engine.megatron.shards import MegatronShard, MegatronShards, Stage
from dlrover.python.rl.engine.torch.attention import Documents
from dlrover.python.rl.engine.torch.blueprint import Blueprint
from dlrover.python.rl.engine.torch.checkpoint import read_checkpoint, write_checkpoint
from dlrover.python.rl.engine.torch.optimizer import MasterOptimizer
from dlrover.python.rl.engine.torch.outputs import VocabularyShard, token_logprobs
from dlrover.python.rl.engine.torch.packing import MicroBatch
from dlrover.python.rl.engine.torch.precision import DTYPES
from dlrover.python.rl.engine.torch.ranks import Ranks
from dlrover.python.rl.engine.torch.residence import Residence
from dlrover.python.rl.engine.torch.state import restore
from dlrover.python.rl.engine.torch.stepping import accumulate
from dlrover.python.rl.engine.weights import WeightSnapshot

_EMBEDDING = "model.embed_tokens.weight"

Finish = Callable[[MicroBatch, Any], tuple[Any, Any, Any]]
"""What the last stage does with a micro-batch's logits; gives the loss, a number that nobody uses, and what is kept."""


class MegatronBackend:
    """Implements :class:`~dlrover.python.rl.engine.torch.backend.TrainBackend`.

    Args:
        shape: of the model.
        config: how it is trained; None: it is frozen.
        settings: how it runs.
        stage: this rank in its replica.
        ranks: all of the engine.
        ground: what Megatron's code has to run in.
        residence: accounts for its tensors.
    """

    packs = True

    def __init__(  # noqa: PLR0913 - what an engine is made of
        self,
        shape: TransformerShape,
        config: OptimizerConfig | None,
        settings: TrainSettings,
        stage: Stage,
        ranks: Ranks,
        ground: AbstractContextManager[Any],
        residence: Residence,
    ) -> None:
        self._shape, self._settings, self._stage, self._ranks, self._ground = shape, settings, stage, ranks, ground
        self.residence, self._reads = residence, None
        self.limits = shape.vocab, shape.max_positions
        precision = DTYPES[settings.precision]
        with ground:
            self._module = build(
                shape, stage.layout, stage.place, precision, settings.gradient_checkpointing, settings.device
            )
            self._module.requires_grad_(config is not None)
            self._passes = self._module if config is None else self._data_parallel()
        self._shards = MegatronShards(self._module, shape, stage, trained=config is not None)
        self._optimizer = None if config is None else MasterOptimizer(config, self._shards.trained)
        if stage.is_last:
            self._module.output_layer.register_forward_pre_hook(self._only_where_read)
        self._reside()

    def _data_parallel(self) -> Any:
        return DistributedDataParallel(
            self._module.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self._module
        )

    def _reside(self) -> None:
        self.residence.hold("weights", [shard.tensor for shard in self._shards])
        self.residence.hold("weights", [shard.master for shard in self._shards])
        if self._optimizer is not None:
            self.residence.hold("gradients", [shard.tensor.main_grad for shard in self._shards])
            self.residence.hold("optimizer", self._optimizer.tensors())

    @torch.no_grad()
    def load(self, blueprint: Blueprint) -> None:
        """Read this rank's part of the weights.

        Raises:
            EngineError: the blueprint's weights lack tensors, or have them in other shapes.
        """
        shapes = self.shapes()
        wanted: dict[str, tuple[str, ...]] = {name: (name,) for name in shapes}
        if self._shape.tied:
            wanted[_EMBEDDING] = (_EMBEDDING, "lm_head.weight")
        read = blueprint.reader(wanted, shapes, "model")
        for shard in self._shards:
            shard.master.copy_(self._shards.part(shard, [read(name) for name in shard.parameter.sources]))
            shard.refresh()

    # -- passes -------------------------------------------------------------------------------------------------------

    def _pass(self, finish: Finish, micros: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        """One micro-batch through this stage, as Megatron's schedules call it."""
        micro, device = next(micros), self._settings.device
        self._reads = torch.from_numpy(micro.reads).to(device)
        output = model(
            input_ids=torch.from_numpy(micro.inputs).to(device)[None],
            position_ids=torch.from_numpy(micro.positions).to(device)[None],
            attention_mask=None,
            packed_seq_params=packed(Documents(tuple(micro.lengths.tolist()), device)),
        )
        return output, partial(finish, micro)

    def _only_where_read(self, head: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The vocabulary projection runs only where the next token is an action."""
        hidden, *others = arguments
        return (hidden[self._reads], *others)

    def _run(self, micros: Sequence[MicroBatch], finish: Finish, forward_only: bool) -> list[Any]:
        """All micro-batches through all stages; what ``finish`` kept of each, on the last stage."""
        with self._ground:
            kept: list[Any] = get_forward_backward_func()(
                forward_step_func=partial(self._pass, finish),
                data_iterator=iter(micros),
                model=self._passes,
                num_microbatches=len(micros),
                seq_length=max(len(micro.inputs) for micro in micros),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return kept

    def _read(self, logits: Any, micro: MicroBatch, temperature: float, entropy: bool) -> tuple[Any, Any]:
        """Outputs ``[actions]`` (``[actions, 1 + n]`` with candidates) and entropies from logits ``[1, actions, vocab /
        tensor]`` or scores."""
        if self._shape.head == "token":
            return logits[0].squeeze(-1).float(), None
        ranks, rank = self._stage.layout.tensor, self._stage.place.tensor
        start = padded_vocab(self._shape.vocab, ranks) // ranks * rank
        shard = VocabularyShard(start, self._stage.tensors) if ranks > 1 else None
        targets = torch.from_numpy(micro.asked).to(logits.device)
        return token_logprobs(logits[0, :, : self._shape.vocab - start], targets, temperature, entropy, shard)

    def outputs(
        self, micros: Sequence[MicroBatch], temperature: float, entropy: bool
    ) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        """Each micro-batch with its outputs and its entropies or None, without gradient.

        Raises:
            EngineError: likely ids are asked for.
        """
        if not micros:
            return
        if micros[0].top:
            raise EngineError("the megatron engine does not tell likely ids: a teacher needs 'fsdp2' or 'deepspeed'")

        def finish(micro: MicroBatch, logits: Any) -> tuple[Any, Any, Any]:
            outputs, entropies = self._read(logits, micro, temperature, entropy)
            parts = [outputs.reshape(len(outputs), width), *([entropies[:, None]] if entropy else [])]
            return logits, torch.zeros((), dtype=torch.int), torch.cat(parts, dim=1)

        candidates = micros[0].candidates
        width = 1 if candidates is None else 1 + candidates.shape[1]
        sizes = [len(micro.flat) for micro in micros]
        kept = self._run(micros, finish, forward_only=True)
        whole = torch.empty((sum(sizes), width + entropy), device=self._settings.device)
        if self._stage.is_last:
            whole.copy_(torch.cat(kept))
        self._stage.from_stage(whole, self._stage.layout.pipeline - 1)
        for micro, part in zip(micros, whole.split(sizes), strict=True):
            outputs = part[:, 0] if candidates is None else part[:, :width]
            yield micro, (outputs, part[:, width] if entropy else None)

    def add_gradients(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: TokenLoss, temperature: float
    ) -> dict[str, float]:
        """Gradients of the loss, and its sums for ``settle``: empty on ranks that another one speaks for."""
        totals: dict[str, float] = {}

        def finish(micro: MicroBatch, logits: Any) -> tuple[Any, Any, None]:
            values: list[Any] = []

            def read(micro: MicroBatch, wants_entropy: bool) -> tuple[Any, Any]:
                return self._read(logits, micro, temperature, wants_entropy)

            # The schedule goes back through the stages by itself; here the loss is only caught.
            sums = accumulate([micro], batch, loss, read, values.append, self._settings.device)
            for name, amount in sums.items():
                totals[name] = totals.get(name, 0.0) + amount
            return values[0], torch.zeros((), dtype=torch.int), None

        self._run(micros, finish, forward_only=False)
        return totals if self._stage.speaks else {}

    def reduce_gradients(self) -> list[Any]:
        """Sum the gradients over the ranks; returns this rank's part of them."""
        with self._ground:
            finalize_model_grads([self._passes])
        return self._shards.take_gradients()

    def gradient_norm(self) -> float:
        """Of the whole gradient: the same bits on every rank."""
        return self._shards.gradient_norm(self._ranks)

    def first_bad_gradient(self) -> str:
        """The name of the first parameter whose gradient is not finite, the same on every rank."""
        return self._shards.first_bad_gradient(self._ranks)

    def update(self, version: int, norm: float) -> float:
        """Clip the gradient, whose norm is ``norm``, and take the step after ``version``; return its rate."""
        assert self._optimizer is not None
        return self._optimizer.step(version, norm)

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self._shards.drop_gradients()
        with self._ground:
            self._passes.zero_grad_buffer()

    # -- weights ------------------------------------------------------------------------------------------------------

    def _local(self, shard: MegatronShard) -> Any:
        return self.residence.there(shard.master)

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Hugging Face's name and whole tensor of everything, one after the other. A collective."""
        return self._shards.named_weights(self._local, self._settings.device)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of what :meth:`named_weights` gives."""
        return self._shards.shapes()

    @torch.no_grad()
    def write_weights(self, weights: WeightSnapshot) -> None:
        """Take over a verified snapshot."""
        for shard in self._shards:
            tensors = [weights.tensor(name) for name in shard.parameter.sources]
            self._local(shard).copy_(self._shards.part(shard, tensors))

    def local_state(self) -> dict[str, Any]:
        """``layout``, ``model`` and ``optimizer`` (None of a frozen one): the live tensors."""
        moments = None
        if self._optimizer is not None:
            moments = {
                shard.name: {kind: self.residence.there(tensor) for kind, tensor in state.items()}
                for shard, state in self._optimizer.state()
            }
        model = {shard.name: self._local(shard) for shard in self._shards}
        return {"layout": list(self._stage.layout.shape), "model": model, "optimizer": moments}

    def restore_local_state(self, state: Mapping[str, Any]) -> None:
        """Copy in what :meth:`local_state` gave.

        Raises:
            WeightSyncError: it is of another model; nothing was changed.
            EngineError: it is of another layout, or exactly one of the two is frozen; nothing was changed.
        """
        restore(self.local_state(), state)
        with torch.no_grad():
            for shard in self._shards:
                if shard.master is not shard.tensor:
                    self.residence.there(shard.tensor).copy_(self._local(shard))

    def write_checkpoint(self, path: Path, version: int) -> None:
        """Write model, optimizer, version and random state, each rank its part."""
        write_checkpoint(path, self._ranks, self._stage.layout, self._apart().tensors, version)

    def read_checkpoint(self, path: Path) -> int:
        """Go back to what :meth:`write_checkpoint` wrote, in this layout or another; return the version.

        Raises:
            EngineError: there is no checkpoint, or it does not fit.
        """
        apart = self._apart()
        version = read_checkpoint(path, self._ranks, self._stage.layout, apart.tensors, apart.all_names())
        apart.put_back()
        return version

    def _apart(self) -> CheckpointTensors:
        return CheckpointTensors(self._shape, self._stage, self._shards, self._optimizer)

    def release(self) -> None:
        """There is nothing to undo."""
