# SPDX-License-Identifier: Apache-2.0
"""The memory that a job's models take on each device, by arithmetic, before anything starts.

With FSDP2, of ``P`` parameters on ``s`` ranks that divide them, with ``w`` bytes a number (2 in bf16, 4 in fp32) and
``t`` tokens in a pass::

    weights      trained: 4 P / s, and 2 P more in bf16 where s is 1; else w P / s, with s 1 but for shard_frozen
                 with adapters w P and those of the adapters, and of a head of one score, which is trained too; of
                 matrices with quantize_base 0.5625 bytes a number
    gradients    4 P / s
    optimizer    8 P / s with AdamW, 2.03 P / s in 8 bits, and more of adapters, whose rows are short
                 with optimizer_on_host none of it, and w P of the weights where s is 1; 16 P / s are on the host,
                 and the largest tensor of the exchange has 4 bytes
    gathered     where s > 1: two layers and what lies outside of the layers, w bytes each; trained, also the gradients
                 of one layer, in float32 too, and of the latter; with quantize_base the largest matrix of a layer,
                 and where s > 1 half a byte more of its numbers
    activations  t x layers x (8 + 4 w) hidden + w (2 queries + 2 keys + 4 intermediate), and with
                 gradient_checkpointing t x w hidden x layers; those of one layer are there after the logits, and
                 count as far as they are more (the gradient of the output layer may still be there)
    logits       2 w t x vocabulary, or of one chunk, and the gradient of the output layer: 4 + w bytes a weight
    kv cache     2 w keys x layers for each token of the sequences that are decoded at once, whose length the torch
                 engine rounds up
    exchange     after the passes: where s > 1 gradients outside of the layers, 2 w + 4 bytes each; or the largest
                 tensor

With the engines of :data:`STATE_ONLY`, whose passes come on top and are not computed, on ``n`` workers::

    deepspeed   weights    w P, of ZeRO 3 w P / n, and 4 P / n; with adapters the second are those that are trained
                gradients  4 P / n, and of ZeRO 3 a bucket of as many as there are, 2^27 at most, 4 bytes each
                optimizer  8 P / n, 2.03 P / n in 8 bits
                with optimizer_on_host w P, or w P / n, of the weights alone, and the bucket
    megatron    a stage of p has its share of the layers, and an embedding or an output layer; t ranks divide it, and
                n / (p t) have copies; of its Q parameters
                weights    2 Q and 4 Q p t / n in bf16, 4 Q in fp32
                gradients  4 Q
                optimizer  8 Q p t / n, 2.03 Q p t / n in 8 bits
    frozen      w P

Roles that share a device have it one at a time, so each has to fit by itself.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.model.chunked_head import CHUNK_ELEMENTS
from dlrover.python.rl.engine.model.model_shape import ModelShape
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.engine.rollout_torch import rounded_capacity
from dlrover.python.rl.recipe.base.config import AUTO, MOST_TOKENS, EngineConfig
from dlrover.python.rl.recipe.base.model_files import moment_bytes

FEW_TOKENS, FEWEST_TOKENS = 4096, 1024
"""Of a pass: fewer than the first are used where nothing else helps, and never fewer than the second."""

STATE_ONLY = ("deepspeed", "megatron")
"""Train engines of which weights, gradients and optimizer are computed."""

_QUANTIZED = 0.5 + 4 / 64
"""Bytes of a number in 4 bits, in blocks of 64 with a float32 scale."""

ON_HOST = ("fsdp2", "deepspeed")
"""Train engines with the option ``optimizer_on_host``."""

_BUCKET = 1 << 27
"""Gradients of a bucket of DeepSpeed's."""

SIZED = 0.8
"""Of a device's memory, for what the system chooses by the arithmetic, which is not exact."""


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
    bounded: bool = True  # nothing longer comes
    sharded_class: str = ""  # of a frozen model of which each worker may hold a part


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
    def resting(self) -> float:
        """Between the calls of an engine that stays on its device."""
        return self.weights + self.optimizer + self.kv_cache

    @property
    def peak(self) -> float:
        kept = self.weights + self.gradients + self.optimizer + self.kv_cache
        return kept + max(self.gathered + self.activations + self.logits, self.exchange)


def bytes_of(shape: ModelShape, use: ModelUse, engine: EngineConfig) -> PlannedBytes:
    """Compute the memory of a role's device, of its state alone with an engine of :data:`STATE_ONLY`. ``engine`` is
    resolved, and its sizes divide the workers."""
    width = 2 if engine.dtype == "bf16" else 4
    if use.kind == "rollout":
        divisor = engine.rollout_tensor_parallel_size
        length = rounded_capacity(use.longest) if engine.rollout == "torch" else use.longest
        cache = 2 * width * shape.keys * shape.layers * engine.max_batch * length
        return PlannedBytes(width * shape.parameters / divisor, kv_cache=cache / divisor)
    shape = shape.with_score_head() if use.head == "token" else shape
    tokens = max(engine.tokens_of_a_pass, use.longest)
    if use.kind == "trained":
        of_engine = {"deepspeed": _of_deepspeed, "megatron": _of_megatron}.get(engine.train)
        return of_engine(shape, use, engine, width) if of_engine else _of_fsdp2(shape, use, engine, width, tokens)
    if engine.train in STATE_ONLY:
        return PlannedBytes(width * shape.parameters)
    shards = use.members if engine.shard_frozen and use.sharded_class else 1
    return PlannedBytes(
        width * shape.parameters / shards,
        gathered=width * (2 * shape.layer + shape.outside) if shards > 1 else 0.0,
        activations=tokens * _of_layer(shape, width, 1),
        logits=_logits(shape, width, tokens, 1, trains=False),
    )


def has_state_only(use: ModelUse, engine: EngineConfig) -> bool:
    """Return True if the passes of an engine come on top of :func:`bytes_of`."""
    return use.kind != "rollout" and engine.train in STATE_ONLY


def _of_fsdp2(shape: ModelShape, use: ModelUse, engine: EngineConfig, width: int, tokens: float) -> PlannedBytes:
    sizes = sizes_of(use, engine)
    tensor, context = sizes.tensor_parallel_size, sizes.context_parallel_size
    shards = use.members // sizes.ddp_size
    gathers = shards > tensor * sizes.pipeline_parallel_size
    changed, on_host = _changed(shape, use), is_on_host(engine)
    master, copy = 0 if on_host and not gathers else 4, 0 if gathers or (width == 4 and not on_host) else width
    frozen = 0.0 if use.lora is None else _base(shape, use.lora, width)
    has_gradients = use.lora is None  # of layers; those of adapters are few
    matrices = shape.matrices / shape.layers if is_quantized(use) else 0
    gathered = 2 * (width * (shape.layer - matrices) + _QUANTIZED * matrices) + width * shape.outside
    if has_gradients:
        gathered += width * (shape.layer + shape.outside) + 4 * shape.layer
    restored = shape.hidden * max(shape.queries, shape.intermediate) if is_quantized(use) else 0
    outer = (2 * width + 4) * shape.outside if gathers and has_gradients else 0
    tokens /= context
    logits = _logits(shape, width, tokens, tensor, trains=True)
    activations = tokens * _of_layer(shape, width, tensor)
    if engine.recomputes:  # one layer's are there after the logits
        activations = tokens * width * shape.hidden * shape.layers + max(activations - logits, 0.0)
    else:
        activations *= shape.layers
    if has_gradients and _has_chunks(shape, tokens, tensor):  # the output layer's gradient, added up over chunks
        logits += (4 + width) * shape.vocabulary * shape.hidden
    return PlannedBytes(
        (frozen + (master + copy) * changed) / shards,
        4 * changed / shards,
        0.0 if on_host else moment_bytes(use.optimizer, use.lora) * changed / shards,
        gathered / tensor + (width + 0.5) * restored if gathers else width * restored,
        activations,
        logits,
        exchange=max(outer / tensor, (4 if on_host else width) * shape.tensor),
    )


def sizes_of(use: ModelUse, engine: EngineConfig) -> ParallelSizes:
    """Of a model that is trained: by default the workers hold copies of a quantized one, and shard others."""
    return engine.parallel or ParallelSizes(ddp_size=use.members if is_quantized(use) else 1)


def is_quantized(use: ModelUse) -> bool:
    return use.lora is not None and use.lora.quantize_base is not None


def _base(shape: ModelShape, lora: LoraSettings, width: int) -> float:
    """Bytes of the model that adapters are added to."""
    parameters = shape.parameters - shape.head  # which is trained
    if lora.quantize_base is None:
        return width * parameters
    return width * (parameters - shape.matrices) + _QUANTIZED * shape.matrices


def _changed(shape: ModelShape, use: ModelUse) -> float:
    """Parameters that are trained."""
    return shape.parameters if use.lora is None else shape.trained_parameters(use.lora)


def is_on_host(engine: EngineConfig) -> bool:
    """Whether the float32 weights and the moments of trained models are in the host's memory."""
    return engine.train in ON_HOST and engine.train_options.get("optimizer_on_host") is True


def host_bytes(shape: ModelShape, use: ModelUse, engine: EngineConfig) -> float:
    """Of one worker: float32 weights, gradients and moments."""
    if use.kind != "trained" or not is_on_host(engine):
        return 0.0
    shape = shape.with_score_head() if use.head == "token" else shape
    sizes = sizes_of(use, engine)
    return (8 + moment_bytes(use.optimizer, use.lora)) * _changed(shape, use) * sizes.ddp_size / use.members


def _of_deepspeed(shape: ModelShape, use: ModelUse, engine: EngineConfig, width: int) -> PlannedBytes:
    members, stage = use.members, engine.train_options.get("zero_stage", 3)
    trained = _changed(shape, use)
    whole = width * trained + (0.0 if use.lora is None else _base(shape, use.lora, width))
    weights, bucket = (whole / members, 4 * min(trained, _BUCKET)) if stage == 3 else (whole, 0)
    if is_on_host(engine):
        return PlannedBytes(weights, bucket)
    moments = moment_bytes(use.optimizer) * trained / members  # in 8 bits, blocks of flat parts
    return PlannedBytes(weights + 4 * trained / members, 4 * trained / members + bucket, moments)


def _of_megatron(shape: ModelShape, use: ModelUse, engine: EngineConfig, width: int) -> PlannedBytes:
    sizes = engine.parallel or ParallelSizes()
    stages = sizes.pipeline_parallel_size
    outside = shape.outside if stages == 1 else max(shape.vocabulary * shape.hidden, shape.outside / 2)
    own = (math.ceil(shape.layers / stages) * shape.layer + outside) / sizes.tensor_parallel_size
    copies = use.members / (stages * sizes.tensor_parallel_size)
    masters = 4 * own / copies if width == 2 else 0.0
    return PlannedBytes(width * own + masters, 4 * own, moment_bytes(use.optimizer) * own / copies)


def _of_layer(shape: ModelShape, width: int, tensor: int) -> float:
    """Of a token. Norms are computed in float32, and on every tensor-parallel rank."""
    norms = (8 + 4 * width) * shape.hidden
    return norms + width * (2 * shape.queries + 2 * shape.keys + 4 * shape.intermediate) / tensor


def _logits(shape: ModelShape, width: int, tokens: float, tensor: int, trains: bool) -> float:
    whole = tokens * shape.vocabulary
    chunk = CHUNK_ELEMENTS if _has_chunks(shape, tokens, tensor) else whole / tensor
    return (2 if trains else 1) * width * chunk


def _has_chunks(shape: ModelShape, tokens: float, tensor: int) -> bool:
    return tokens * shape.vocabulary > CHUNK_ELEMENTS and tensor == 1 and shape.raw_logits


# -- passes that fit ---------------------------------------------------------------------------------------------------


def has_auto_passes(engine: EngineConfig) -> bool:
    return AUTO in (engine.max_tokens_per_microbatch, engine.gradient_checkpointing)


def size_passes(engine: EngineConfig, use: ModelUse, shape: ModelShape | None, capacity: float | None) -> EngineConfig:
    """Return ``engine`` without ``auto`` for the passes of a model that is trained or evaluated: the best of
    :func:`pass_choices` that fits a device of ``capacity`` bytes, or else the smallest. Where the memory is not known,
    :data:`MOST_TOKENS` tokens, recomputed."""
    if not has_auto_passes(engine):
        return engine
    if shape is None or capacity is None or engine.train != "fsdp2":
        return engine.with_passes(MOST_TOKENS, recompute=True)
    choices = pass_choices(engine, use)
    sized = [engine.with_passes(tokens, recompute) for tokens, recompute in choices]
    fitting = (each for each in sized if bytes_of(shape, use, each).peak <= SIZED * capacity)
    smallest = engine.with_passes(min(tokens for tokens, _ in choices), recompute=use.kind == "trained")
    return next(fitting, smallest)


def pass_choices(engine: EngineConfig, use: ModelUse) -> list[tuple[int, bool]]:
    """List the tokens of a pass, and True for recomputed activations, from the best choice on: as many tokens as the
    engine may have, at least those of the longest row. Activations are kept if that is possible with :data:`FEW_TOKENS`
    or more, and all rows are known to fit a pass."""
    most = engine.tokens_of_a_pass
    fewest = min(max(FEWEST_TOKENS, use.longest), most)
    sizes = [most >> number for number in range((most // fewest).bit_length())]
    checkpointing = engine.gradient_checkpointing
    recomputes = checkpointing is True or (checkpointing == AUTO and not use.bounded)
    ways = (False,) if use.kind != "trained" else (True,) if recomputes else (False, True)
    return sorted(product(sizes, ways), key=lambda choice: (choice[0] < FEW_TOKENS, choice[1], -choice[0]))
