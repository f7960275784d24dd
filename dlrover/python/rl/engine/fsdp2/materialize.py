# SPDX-License-Identifier: Apache-2.0
"""Materialization: a module on the meta device gets this rank's part of its weights from a source."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.engine.fsdp2.shards import Grid, Shards
from dlrover.python.rl.engine.model.loading import (
    WeightReader,
    bind_weights,
    layers_of,
    list_aliases,
    list_saved_buffers,
    tie_parameter,
)
from dlrover.python.rl.engine.model.outputs import VocabularyShard

Absent: TypeAlias = Callable[[str, tuple[int, ...]], Any]
"""``absent(name, shape)`` makes the whole tensor that a source lacks, or returns None if the source must have it."""


@dataclass(frozen=True)
class MaterializeOptions:
    device: str = "cpu"
    precision: torch.dtype = torch.float32  # of the passes; trained parameters have float32 masters
    prefix: str = ""  # of the base model's names in the module
    rename: Callable[[str], str] | None = None  # from the module's names to the source's
    absent: Absent = lambda name, shape: None
    on_host: bool = False  # the masters of trained parameters are in host memory


@dataclass(frozen=True, eq=False)
class MaterializedModule:
    """A module that computes with this rank's part of its parameters. All ranks of the grid have to call it."""

    module: Any
    shards: Shards
    buffers: Mapping[str, Any]  # the saved buffers by name, whole on every rank
    vocabulary: VocabularyShard | None  # this rank's part of the logits, if ranks divide them


def materialize(
    module: Any, source: WeightReader | None, grid: Grid, options: MaterializeOptions
) -> MaterializedModule:
    """Divide a module among the ranks, allocate its parameters, and read their values; each rank reads only its part.

    ``module`` has its parameters on the meta device, and is changed in place; without a ``source`` they become zeros.
    Buffers that the source lacks keep their values. Raises an ``EngineError`` if the module cannot be divided, a buffer
    is on the meta device, or the source lacks tensors or has them in other shapes."""
    vocabulary: VocabularyShard | None = None
    summed: list[str] = []
    for parameter in module.parameters():
        if parameter.is_floating_point() and (grid.shards is None or not parameter.requires_grad):
            parameter.data = parameter.data.to(options.precision)
    if grid.tensors is not None:
        vocabulary, summed = split_matrices(module, grid.tensors)
    if grid.shards is not None:
        _shard(module, grid, options)
    if empty := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise EngineError(f"buffers without values: {', '.join(empty)}; build the module with empty_weights()")
    with _keeping_ties(module):
        device = options.device
        module._apply(lambda tensor: torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    shards = Shards.of(module, grid, summed, options.on_host)
    buffers = list_saved_buffers(module)
    if source is not None:
        _fill(shards, buffers, source, options)
    return MaterializedModule(module, shards, buffers, vocabulary)


def _shard(module: Any, grid: Grid, options: MaterializeOptions) -> None:
    policy = MixedPrecisionPolicy()
    if options.precision != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=options.precision, reduce_dtype=torch.float32)
    for part in layers_of(module):
        fully_shard(part, mesh=grid.shards, mp_policy=policy)
    fully_shard(module, mesh=grid.shards, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):  # gradients add up: the loss carries the normaliser
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _fill(shards: Shards, buffers: Mapping[str, Any], source: WeightReader, options: MaterializeOptions) -> None:
    wanted = {shard.name: shard.names for shard in shards} | {name: (name,) for name in buffers}
    shapes = {shard.name: shard.shape for shard in shards} | {name: tuple(buffers[name].shape) for name in buffers}

    def absent(name: str, shape: tuple[int, ...]) -> Any:
        return buffers[name] if name in buffers else options.absent(name, shape)

    read = bind_weights(source, wanted, shapes, absent, options.prefix, options.rename)
    with torch.no_grad():
        for shard in shards:
            note_progress()
            if shard.master.numel():
                shard.fill(read(shard.name, shard.ranges(shards.grid)), shards.grid)
            shard.refresh()
        for name, buffer in buffers.items():
            buffer.copy_(read(name, ()))


OWN_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}
"""Styles of the linear layers of each decoder layer, for Llama-like models without a plan."""

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SUMMED = "replicated_with_grad_allreduce"
_VOCABULARY = ("embed_tokens", "lm_head")


def split_matrices(module: Any, mesh: Any) -> tuple[VocabularyShard | None, list[str]]:
    """Split a model whose parameters are on the meta device over a mesh, in place.

    Returns this rank's part of the vocabulary (None if its size cannot be divided), and the names of parameters that
    every rank has but uses for its own heads only, so that their gradients add up. Raises an ``EngineError`` if heads
    or widths cannot be divided, or the plan has an unknown style."""
    config, ranks = module.config.get_text_config(), mesh.size()
    names = {
        "num_attention_heads": "attention heads",
        "num_key_value_heads": "key-value heads",
        "intermediate_size": "feed-forward columns",
    }
    sizes = {label: getattr(config, name, None) for name, label in names.items()}
    odd = [f"{size} {label}" for label, size in sizes.items() if size is not None and size % ranks]
    if odd:
        raise EngineError(f"{ranks} tensor-parallel ranks cannot share {' or '.join(odd)}")
    plan = _plan(module)
    summed = [name for name, style in plan.items() if style == _SUMMED]
    styles = {name: _STYLES[style]() for name, style in plan.items() if style in _STYLES}
    if unknown := {style for style in plan.values() if style not in {*_STYLES, _SUMMED}}:
        kinds = ", ".join(sorted(unknown))
        raise EngineError(f"{type(module).__name__} splits by {kinds}, which fsdp2 does not support")
    with _keeping_ties(module):
        parallelize_module(module, mesh, styles)
        shard = _split_vocabulary(module, mesh) if config.vocab_size % ranks == 0 else None
    patterns = [name.split(".") for name in summed]
    return shard, [name for name, _ in module.named_parameters() if any(_fits(name, one) for one in patterns)]


@contextmanager
def _keeping_ties(module: Any) -> Iterator[None]:
    """Tie parameters again after the block, to the one under their first name."""
    ties = [names for names in list_aliases(module) if len(names) > 1]
    yield
    for first, *aliases in ties:
        tie_parameter(module, aliases, module.get_parameter(first))


def _plan(module: Any) -> dict[str, str]:
    plan: Mapping[str, str] = getattr(module, "_tp_plan", None) or {}
    plan = {name: style for name, style in plan.items() if name.rsplit(".", 1)[-1] not in _VOCABULARY}
    if plan:
        return dict(plan)
    names = [name for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
    plan = {name: style for name in names for end, style in OWN_PLAN.items() if name.endswith(f".{end}")}
    if not plan:
        raise EngineError(f"{type(module).__name__} has no plan for tensor parallelism, and is not Llama-like")
    return plan


def _fits(name: str, pattern: list[str]) -> bool:
    parts = name.split(".")[:-1]
    return len(parts) == len(pattern) and all(want in ("*", part) for part, want in zip(parts, pattern, strict=True))


def _split_vocabulary(module: Any, mesh: Any) -> VocabularyShard | None:
    inputs, outputs = module.get_input_embeddings(), module.get_output_embeddings()
    if isinstance(inputs, torch.nn.Embedding):
        parallelize_module(inputs, mesh, RowwiseParallel(input_layouts=Replicate()))
    if not isinstance(outputs, torch.nn.Linear):
        return None
    parallelize_module(outputs, mesh, ColwiseParallel())
    return VocabularyShard(mesh.get_local_rank() * (outputs.out_features // mesh.size()), mesh.get_group())
