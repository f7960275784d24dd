# SPDX-License-Identifier: Apache-2.0
"""The memory that a job's models take on each device with FSDP2, by arithmetic, before anything starts.

Of ``P`` parameters on ``s`` ranks that divide them, with ``w`` bytes a number (2 in bf16, 4 in fp32) and ``t`` tokens
in a pass::

    weights      trained: 4 P / s, and 2 P more in bf16 where s is 1; else w P / s, with s 1 but for shard_frozen
    gradients    4 P / s
    optimizer    8 P / s with AdamW
                 with optimizer_on_host none of it, and w P of the weights where s is 1; 16 P / s are on the host,
                 and the largest tensor of the exchange has 4 bytes
    gathered     where s > 1: two layers and what lies outside of the layers, w bytes each; trained, also the gradients
                 of one layer, in float32 too, and of the latter
    activations  t x layers x (8 + 4 w) hidden + w (2 queries + 2 keys + 4 intermediate), and with
                 gradient_checkpointing t x (w hidden x layers + that of one layer)
    logits       2 w t x vocabulary, or of one chunk, and the gradient of the output layer: 4 + w bytes a weight
    kv cache     2 w keys x layers for each token of the sequences that are decoded at once
    exchange     after the passes: where s > 1 gradients outside of the layers, 2 w + 4 bytes each; or the largest
                 tensor

Roles that share a device have it one at a time, so each has to fit by itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dlrover.python.rl.common.errors import ConfigError, EngineError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.model.chunked_head import CHUNK_ELEMENTS
from dlrover.python.rl.engine.model.model_shape import ModelShape, shape_of
from dlrover.python.rl.engine.model.packing import Head
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
    head: Head = "causal"
    longest: int = 0  # tokens of what has to be in one pass
    sharded_class: str = ""  # of a frozen model of which each member may hold a part


@dataclass(frozen=True)
class PlannedBytes:
    """Of one device, by owner."""

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    kv_cache: float = 0.0
    exchange: float = 0.0

    @property
    def peak(self) -> float:
        kept = self.weights + self.gradients + self.optimizer + self.kv_cache
        return kept + max(self.gathered + self.activations + self.logits, self.exchange)


_COLUMNS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "kv_cache", "exchange")


def bytes_of(shape: ModelShape, use: ModelUse, engine: EngineConfig) -> PlannedBytes:
    """``engine`` is resolved, and its sizes divide the members."""
    width = 2 if engine.dtype == "bf16" else 4
    if use.kind == "rollout":
        divisor = engine.rollout_tensor_parallel_size
        cache = 2 * width * shape.keys * shape.layers * engine.max_batch * use.longest
        return PlannedBytes(width * shape.parameters / divisor, kv_cache=cache / divisor)
    shape = shape.with_score_head() if use.head == "token" else shape
    tokens = max(engine.max_tokens_per_microbatch, use.longest)
    return (
        _trained(shape, use, engine, width, tokens)
        if use.kind == "trained"
        else _frozen(shape, use, engine, width, tokens)
    )


def _trained(shape: ModelShape, use: ModelUse, engine: EngineConfig, width: int, tokens: float) -> PlannedBytes:
    sizes = engine.parallel or ParallelSizes()
    tensor, context = sizes.tensor_parallel_size, sizes.context_parallel_size
    shards = use.members // sizes.ddp_size
    gathers = shards > tensor * sizes.pipeline_parallel_size
    changed, on_host = _changed(shape, use), _is_on_host(engine)
    master, copy = 0 if on_host and not gathers else 4, 0 if gathers or (width == 4 and not on_host) else width
    frozen = 0 if use.lora is None else width * shape.parameters
    has_gradients = use.lora is None  # of layers; those of adapters are few
    gathered = width * (2 * shape.layer + shape.outside)
    if has_gradients:
        gathered += width * (shape.layer + shape.outside) + 4 * shape.layer
    outer = (2 * width + 4) * shape.outside if gathers and has_gradients else 0
    return PlannedBytes(
        (frozen + (master + copy) * changed) / shards,
        4 * changed / shards,
        0.0 if on_host else _moments(use) * changed / shards,
        gathered / tensor if gathers else 0.0,
        _activations(shape, width, tokens / context, tensor, engine.gradient_checkpointing),
        _logits(shape, width, tokens / context, tensor, trains=True, trains_head=has_gradients),
        exchange=max(outer / tensor, (4 if on_host else width) * shape.tensor),
    )


def _moments(use: ModelUse) -> int:
    """Bytes of the optimizer's state for each parameter."""
    return 8 if use.optimizer.name == "adamw" else 4 if use.optimizer.momentum else 0


def _changed(shape: ModelShape, use: ModelUse) -> float:
    """Parameters that are trained."""
    return shape.parameters if use.lora is None else shape.adapter_parameters(use.lora)


def _is_on_host(engine: EngineConfig) -> bool:
    """Whether the float32 weights and the moments of trained models are in the host's memory."""
    return engine.train == "fsdp2" and engine.train_options.get("optimizer_on_host") is True


def host_bytes(shape: ModelShape, use: ModelUse, engine: EngineConfig) -> float:
    """Of one member: float32 weights, gradients and moments."""
    if use.kind != "trained" or not _is_on_host(engine):
        return 0.0
    shape = shape.with_score_head() if use.head == "token" else shape
    sizes = engine.parallel or ParallelSizes()
    return (8 + _moments(use)) * _changed(shape, use) * sizes.ddp_size / use.members


def _frozen(shape: ModelShape, use: ModelUse, engine: EngineConfig, width: int, tokens: float) -> PlannedBytes:
    shards = use.members if engine.shard_frozen and use.sharded_class else 1
    return PlannedBytes(
        width * shape.parameters / shards,
        gathered=width * (2 * shape.layer + shape.outside) if shards > 1 else 0.0,
        activations=tokens * _of_layer(shape, width, 1),
        logits=_logits(shape, width, tokens, 1, trains=False, trains_head=False),
    )


def _of_layer(shape: ModelShape, width: int, tensor: int) -> float:
    """Of a token. Norms are computed in float32, and on every tensor-parallel rank."""
    norms = (8 + 4 * width) * shape.hidden
    return norms + width * (2 * shape.queries + 2 * shape.keys + 4 * shape.intermediate) / tensor


def _activations(shape: ModelShape, width: int, tokens: float, tensor: int, recomputes: bool) -> float:
    of_layer = _of_layer(shape, width, tensor)
    return tokens * (width * shape.hidden * shape.layers + of_layer if recomputes else shape.layers * of_layer)


def _logits(  # noqa: PLR0913 - what they depend on
    shape: ModelShape, width: int, tokens: float, tensor: int, trains: bool, trains_head: bool
) -> float:
    copies, whole = 2 if trains else 1, tokens * shape.vocabulary
    if whole <= CHUNK_ELEMENTS or tensor > 1 or not shape.raw_logits:
        return copies * width * whole / tensor
    return copies * width * CHUNK_ELEMENTS + ((4 + width) * shape.vocabulary * shape.hidden if trains_head else 0)


# -- what people read -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryPlan:
    """The uses of a job's models by role, where ``engine`` is resolved, on CUDA."""

    uses: Mapping[RLRoleType, ModelUse]
    engine: EngineConfig
    model: str = ""  # the policy's
    model_config: str | None = None  # of that
    device_bytes: float | None = None  # of the job's devices, or else of this machine's

    @classmethod
    def of(
        cls, uses: Mapping[RLRoleType, ModelUse], engine: EngineConfig, model: str, model_config: str | None
    ) -> "MemoryPlan":
        memory = engine.device_memory_gb
        if memory is None and torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory / _GB
        return cls(uses, engine, model, model_config, None if memory is None else memory * _GB)

    def known(self) -> Iterator[tuple[RLRoleType, ModelUse, ModelShape]]:
        """Those to which the arithmetic applies, of models whose shape is known."""
        for role, use in self.uses.items():
            if use.kind != "rollout" and self.engine.train != "fsdp2":
                continue
            if use.kind == "trained" and not _divides(self.engine, use.members):
                continue  # reported already
            shape = shape_of(use.model, self.model_config if use.model == self.model else None)
            if shape is not None:
                yield role, use, shape

    def lines(self) -> list[str]:
        """A table for people, the roles that it lacks, and what does not fit on this machine's devices; empty without a
        model on a device."""
        rows, known, hosts = [], {role for role, *_ in self.known()}, []
        for role, use, shape in self.known():
            if nbytes := host_bytes(shape, use, self.engine):
                where = f"  {role} x{use.members}: {_gb(nbytes)} GB of its host's memory each, for the optimizer"
                hosts.append(where if self.engine.threads else f"{where}; engine.threads: the cores that take its step")
            found = self._held(use, bytes_of(shape, use, self.engine))
            values = [*(getattr(found, name) for name in _COLUMNS), found.peak]
            rows.append([f"{role} x{use.members}", *map(_gb, values)])
        if not self.uses:
            return []
        of = "" if self.device_bytes is None else f" of {self.device_bytes / _GB:,.0f}"
        head = ["", *(name.replace("_", " ") for name in _COLUMNS), "at most"]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        table = []
        for label, *cells in [head, *rows]:
            aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
            table.append("  ".join([f"  {label.ljust(widths[0])}", *aligned]))
        warnings = [] if self.engine.device_memory_gb is not None else self._misfits()
        unknown = [
            f"  {role} x{use.members}: {self._why_unknown(use)}" for role, use in self.uses.items() if role not in known
        ]
        warnings = [f"  it may not fit here: {what}" for what in warnings]
        return [f"memory of each device, GB{of}:", *(table if rows else ()), *hosts, *unknown, *warnings]

    def _why_unknown(self, use: ModelUse) -> str:
        if use.kind != "rollout" and self.engine.train != "fsdp2":
            return f"not computed for {self.engine.train}"
        named = " (config.model_config)" if use.model == self.model else ""
        return f"not known without the config.json of {use.model}{named}"

    def _held(self, use: ModelUse, wanted: PlannedBytes) -> PlannedBytes:
        """The cache of a rollout takes what there is of its share, if that is less than it could use."""
        if use.kind != "rollout" or self.device_bytes is None:
            return wanted
        rest = self.engine.gpu_memory_utilization * self.device_bytes - wanted.weights
        return replace(wanted, kv_cache=min(wanted.kv_cache, max(rest, 0.0)))

    def find_errors(self) -> list[ConfigError]:
        """What cannot fit on devices of ``engine.device_memory_gb``, with the smallest change that would."""
        misfits = self._misfits() if self.engine.device_memory_gb is not None else []
        return [ConfigError("config.engine", what) for what in misfits]

    def _misfits(self) -> list[str]:
        found = []
        for role, use, shape in self.known() if self.device_bytes is not None else ():
            planned = bytes_of(shape, use, self.engine)
            if self._needed(use, planned) <= self._limit(use):
                continue
            owners = sorted(
                (name for name in _COLUMNS if getattr(planned, name)), key=lambda name: -getattr(planned, name)
            )
            parts = ", ".join(f"{name.replace('_', ' ')} {_gb(getattr(planned, name))}" for name in owners[:3])
            if use.kind == "rollout":
                parts = f"weights {_gb(planned.weights)}, and the cache of one sequence"
            has = f"{_gb(self._limit(use))} GB of a device's {_gb(self.device_bytes or 0.0)}"
            what = f"{role} needs {_gb(self._needed(use, planned))} GB, and has {has} ({parts})"
            found.append(f"{what}; {next(self._changes(role, use, shape), 'no setting here makes it fit')}")
        return found

    def _needed(self, use: ModelUse, planned: PlannedBytes) -> float:
        one_sequence = planned.weights + planned.kv_cache / self.engine.max_batch
        return one_sequence if use.kind == "rollout" else planned.peak

    def _limit(self, use: ModelUse) -> float:
        return (self.engine.gpu_memory_utilization if use.kind == "rollout" else _USABLE) * (self.device_bytes or 0.0)

    def _changes(self, role: RLRoleType, use: ModelUse, shape: ModelShape) -> Iterator[str]:
        """Settings with which it fits, the smallest change first."""
        for changes, engine, members in _alternatives(self.engine, use, role):
            changed = replace(use, members=members)
            if use.kind == "trained" and not _divides(engine, members):
                continue
            if self._needed(use, bytes_of(shape, changed, engine)) <= self._limit(use):
                on_host = host_bytes(shape, changed, engine)
                yield f"it fits with {' '.join(changes)}" + (f" and {_gb(on_host)} GB of its host" if on_host else "")


def _divides(engine: EngineConfig, members: int) -> bool:
    try:
        Layout.of(members, engine.parallel or ParallelSizes())
    except EngineError:
        return False
    return True


_Alternative = tuple[Sequence[str], EngineConfig, int]


def _alternatives(engine: EngineConfig, use: ModelUse, role: RLRoleType) -> Iterator[_Alternative]:
    name = f"workload.{role.lower()}"
    if use.kind == "rollout":
        yield from _split(engine, use, name)
        return
    yield from ((changes, changed, use.members) for changes, changed in _smaller_passes(engine, use))
    if use.kind == "trained":
        yield from _on_host(engine, use)
        yield from _more_members(engine, use, name, [], 2 * use.members)
    elif use.sharded_class:
        change = [] if engine.shard_frozen else ["engine.shard_frozen=true", f"{name}.class={use.sharded_class}"]
        yield from _more_members(replace(engine, shard_frozen=True), use, name, change, max(use.members, 2))


def _split(engine: EngineConfig, use: ModelUse, name: str) -> Iterator[_Alternative]:
    for size in (2, 4, 8):
        if size > engine.rollout_tensor_parallel_size:
            change = [f"engine.rollout_tensor_parallel_size={size}", f"{name}.resource.gpu={size}"]
            yield change, replace(engine, rollout_tensor_parallel_size=size), use.members


def _on_host(engine: EngineConfig, use: ModelUse) -> Iterator[_Alternative]:
    if engine.train == "fsdp2" and not _is_on_host(engine):
        options = {**engine.train_options, "optimizer_on_host": True}
        for changes, changed in _smaller_passes(engine, use):
            yield (
                ["engine.train_options.optimizer_on_host=true", *changes],
                replace(changed, train_options=options),
                use.members,
            )


def _more_members(
    engine: EngineConfig, use: ModelUse, name: str, change: Sequence[str], members: int
) -> Iterator[_Alternative]:
    """``members`` of them, or twice as many, and so on."""
    smaller = _smaller_passes(engine, use)
    while members <= _MOST_MEMBERS:
        more = [f"{name}.num={members}"] if members > use.members else []
        yield from (([*change, *changes, *more], changed, members) for changes, changed in smaller)
        members *= 2


def _smaller_passes(engine: EngineConfig, use: ModelUse) -> list[tuple[list[str], EngineConfig]]:
    """Passes that take less memory, the engine's own first."""
    found = []
    most, can_recompute = engine.max_tokens_per_microbatch, use.kind == "trained" and not engine.gradient_checkpointing
    for recomputes in (False, True) if can_recompute else (engine.gradient_checkpointing,):
        for number in range(int(math.log2(max(most / max(_FEWEST_TOKENS, use.longest), 1))) + 1):
            changed = replace(engine, max_tokens_per_microbatch=most >> number, gradient_checkpointing=recomputes)
            changes = ["engine.gradient_checkpointing=true"] if recomputes != engine.gradient_checkpointing else []
            changes += [f"engine.max_tokens_per_microbatch={most >> number}"] if number else []
            found.append((changes, changed))
    return sorted(found, key=lambda item: (item[1].max_tokens_per_microbatch < _FEW_TOKENS, len(item[0])))


def _gb(nbytes: float) -> str:
    return f"{nbytes / _GB:,.1f}" if nbytes else "-"
