# SPDX-License-Identifier: Apache-2.0
"""The memory that a job's models take on each device, by arithmetic, before anything starts.

Of ``P`` parameters on ``s`` ranks that divide them, with ``w`` bytes a number (2 in bf16, 4 in fp32) and ``t`` tokens
in a pass::

    weights      trained: 4 P / s, and 2 P more in bf16 where s is 1; else w P / s, with s 1 but for shard_frozen
    gathered     where s > 1: two layers, and what lies outside of the layers, w bytes each
    gradients    4 P / s
    optimizer    8 P / s with AdamW
    activations  t x layers x (8 + 4 w) hidden + w (2 queries + 2 keys + 4 intermediate), and with
                 gradient_checkpointing t x (w hidden x layers + that of one layer)
    logits       2 w t x vocabulary, or of one chunk and 4 bytes for each weight of the output layer
    kv cache     2 w keys x layers for each token of the sequences that are decoded at once
    sync         the largest tensor, w bytes, after the passes

Roles that share a device have it one at a time, so each has to fit by itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.model.chunked_head import CHUNK_ELEMENTS
from dlrover.python.rl.engine.model.model_shape import ModelShape, shape_of
from dlrover.python.rl.recipe.base.config import EngineConfig

_USABLE = 0.92
"""Of a device's memory: the rest is CUDA's own, and lost between blocks."""

_GB = 1e9
_FEW_TOKENS, _FEWEST_TOKENS = 4096, 1024
"""Of a pass: fewer than the first are used where nothing else helps, and never fewer than the second."""

_MOST_MEMBERS = 1024


@dataclass(frozen=True)
class ModelUse:
    """What a role does with a model."""

    kind: Literal["trained", "frozen", "rollout"]
    model: str
    members: int = 1
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraSettings | None = None
    longest: int = 0  # tokens of a row
    can_shard: bool = False  # a frozen model of which each member may hold a part


@dataclass(frozen=True)
class PlannedBytes:
    """Of one device, by owner."""

    weights: float
    gathered: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    kv_cache: float = 0.0
    sync: float = 0.0

    @property
    def peak(self) -> float:
        kept = self.weights + self.gradients + self.optimizer + self.kv_cache
        return kept + max(self.gathered + self.activations + self.logits, self.sync)


def bytes_of(shape: ModelShape, use: ModelUse, engine: EngineConfig) -> PlannedBytes:
    """``engine`` is resolved."""
    width = 2 if engine.dtype == "bf16" else 4
    if use.kind == "rollout":
        divisor = engine.rollout_tensor_parallel_size
        cache = 2 * width * shape.keys * shape.layers * engine.max_batch * use.longest
        return PlannedBytes(width * shape.parameters / divisor, kv_cache=cache / divisor)
    trained = use.kind == "trained"
    sizes = _sizes(engine, use) if trained else ParallelSizes()
    tensor, context = sizes.tensor_parallel_size, sizes.context_parallel_size
    shards = use.members // sizes.ddp_size if trained else use.members if engine.shard_frozen and use.can_shard else 1
    tokens = max(engine.max_tokens_per_microbatch, use.longest) / context
    activations = _activations(shape, width, tokens, tensor, trained, engine.gradient_checkpointing)
    logits = _logits(shape, width, tokens, tensor, trained)
    outside = shape.parameters - shape.layers * shape.layer
    gathered = width * (2 * shape.layer + max(outside, 0))
    if not trained:
        weights = width * shape.parameters / shards
        return PlannedBytes(weights, gathered if shards > 1 else 0.0, activations=activations, logits=logits)
    gathers = shards > tensor * sizes.pipeline_parallel_size
    moments = 8 if use.optimizer.name == "adamw" else 4 if use.optimizer.momentum else 0
    changed = shape.parameters if use.lora is None else use.lora.rank * shape.adapted
    kept = 4 * changed + (0 if use.lora is None else width * shape.parameters)
    return PlannedBytes(
        kept / shards + (0 if gathers or width == 4 else width * changed / shards),
        gathered / tensor if gathers else 0.0,
        4 * changed / shards,
        moments * changed / shards,
        activations,
        logits,
        sync=width * shape.tensor,
    )


def _sizes(engine: EngineConfig, use: ModelUse) -> ParallelSizes:
    copies = engine.train == "fsdp2" and engine.device == "cpu"
    return engine.parallel or ParallelSizes(ddp_size=use.members if copies else 1)


def _activations(shape: ModelShape, width: int, tokens: float, tensor: int, trained: bool, recomputes: bool) -> float:
    """Norms are computed in float32, and on every tensor-parallel rank."""
    norms = (8 + 4 * width) * shape.hidden
    of_layer = norms + width * (2 * shape.queries + 2 * shape.keys + 4 * shape.intermediate) / tensor
    if not trained:
        return tokens * of_layer
    return tokens * (width * shape.hidden * shape.layers + of_layer if recomputes else shape.layers * of_layer)


def _logits(shape: ModelShape, width: int, tokens: float, tensor: int, trained: bool) -> float:
    copies = 2 if trained else 1
    whole = tokens * shape.vocabulary
    if whole <= CHUNK_ELEMENTS or tensor > 1:
        return copies * width * whole / tensor
    return copies * width * CHUNK_ELEMENTS + (4 * shape.vocabulary * shape.hidden if trained else 0)


# -- what people read -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryPlan:
    """The uses of a job's models by role, where ``engine`` is resolved, on CUDA."""

    uses: Mapping[RLRoleType, ModelUse]
    engine: EngineConfig
    fallback: str | None = None  # of the policy's model
    device: float | None = field(default=None)  # bytes

    @classmethod
    def of(cls, uses: Mapping[RLRoleType, ModelUse], engine: EngineConfig, fallback: str | None) -> "MemoryPlan":
        memory = engine.device_memory_gb
        if memory is None and torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory / _GB
        return cls(uses, engine, fallback, None if memory is None else memory * _GB)

    def known(self) -> Iterator[tuple[RLRoleType, ModelUse, ModelShape]]:
        for role, use in self.uses.items():
            shape = shape_of(use.model, self.fallback)
            if shape is not None:
                yield role, use, shape

    def lines(self) -> list[str]:
        """A table for people; empty if no model is known."""
        rows = []
        for role, use, shape in self.known():
            found = bytes_of(shape, use, self.engine)
            found = self._held(use, found)
            values = [*(getattr(found, name) for name in _COLUMNS), found.peak]
            rows.append([f"{role} x{use.members}", *map(_gb, values)])
        if not rows:
            return []
        of = "" if self.device is None else f" of {self.device / _GB:,.0f}"
        head = ["", *(name.replace("_", " ") for name in _COLUMNS), "at most"]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        table = [
            f"  {role.ljust(widths[0])}"
            + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            for role, *cells in [head, *rows]
        ]
        return [f"memory of each device, GB{of}:", *table]

    def _held(self, use: ModelUse, wanted: PlannedBytes) -> PlannedBytes:
        """The cache of a rollout takes what there is of its share, if that is less than it could use."""
        if use.kind != "rollout" or self.device is None:
            return wanted
        rest = self.engine.gpu_memory_utilization * self.device - wanted.weights
        return replace(wanted, kv_cache=min(wanted.kv_cache, max(rest, 0.0)))

    def find_errors(self) -> list[ConfigError]:
        """What cannot fit, with the smallest change that would."""
        if self.device is None:
            return []
        errors = []
        for role, use, shape in self.known():
            found = bytes_of(shape, use, self.engine)
            if self._fits(use, found):
                continue
            owners = sorted(_COLUMNS, key=lambda name: -getattr(found, name))[:3]
            parts = ", ".join(f"{name.replace('_', ' ')} {_gb(getattr(found, name))}" for name in owners)
            what = f"{role} needs {_gb(found.peak)} GB of a device of {_gb(self.device)} ({parts})"
            change = next(self._changes(role, use, shape), "")
            errors.append(ConfigError("config.engine", f"{what}; {change or 'no setting here makes it fit'}"))
        return errors

    def _fits(self, use: ModelUse, found: PlannedBytes) -> bool:
        assert self.device is not None, "else nothing is refused"
        if use.kind == "rollout":  # with the cache of one sequence
            one = found.weights + found.kv_cache / self.engine.max_batch
            return one <= self.engine.gpu_memory_utilization * self.device
        return found.peak <= _USABLE * self.device

    def _changes(self, role: RLRoleType, use: ModelUse, shape: ModelShape) -> Iterator[str]:
        """Settings with which it fits, the smallest change first."""
        for changes, engine, members in _alternatives(self.engine, use, role):
            changed = replace(use, members=members)
            if replace(self, engine=engine)._fits(changed, bytes_of(shape, changed, engine)):
                yield f"it fits with {' '.join(changes)}"


_COLUMNS = ("weights", "gathered", "gradients", "optimizer", "activations", "logits", "kv_cache", "sync")


def _alternatives(
    engine: EngineConfig, use: ModelUse, role: RLRoleType
) -> Iterator[tuple[Sequence[str], EngineConfig, int]]:
    if use.kind == "rollout":
        for size in (2, 4, 8):
            if size > engine.rollout_tensor_parallel_size:
                change = f"engine.rollout_tensor_parallel_size={size}"
                yield [change], replace(engine, rollout_tensor_parallel_size=size), use.members
        return
    smaller: list[tuple[list[str], EngineConfig]] = []
    for recomputes in (False, True) if use.kind == "trained" and not engine.gradient_checkpointing else (None,):
        for tokens in _fewer_tokens(engine.max_tokens_per_microbatch, use.longest):
            changes = ["engine.gradient_checkpointing=true"] if recomputes else []
            changes += (
                [f"engine.max_tokens_per_microbatch={tokens}"] if tokens < engine.max_tokens_per_microbatch else []
            )
            changed = replace(engine, max_tokens_per_microbatch=tokens)
            smaller.append((changes, replace(changed, gradient_checkpointing=True) if recomputes else changed))
    smaller.sort(key=lambda item: (item[1].max_tokens_per_microbatch < _FEW_TOKENS, len(item[0])))
    for changes, changed in smaller:
        yield changes, changed, use.members
    if use.kind == "frozen":
        if use.can_shard and use.members > 1 and not engine.shard_frozen:
            yield ["engine.shard_frozen=true"], replace(engine, shard_frozen=True), use.members
        return
    changes, changed = smaller[-1]
    members = use.members
    while members < _MOST_MEMBERS:
        members *= 2
        yield [*changes, f"workload.{role.lower()}.num={members}"], changed, members


def _fewer_tokens(most: int, longest: int) -> list[int]:
    fewest = max(_FEWEST_TOKENS, longest)
    halvings = range(int(math.log2(max(most / fewest, 1))) + 1)
    return [most >> number for number in halvings]


def _gb(nbytes: float) -> str:
    return f"{nbytes / _GB:,.1f}" if nbytes else "-"
