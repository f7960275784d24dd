# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the memory that a job's models take on each device, before anything starts.

Numbers of weights and activations have ``width`` bytes, 2 in bf16 and 4 in fp32; master weights, gradients and moments
are float32. Each role has to fit by itself, since roles that share a device have it one at a time.

- FSDP2 gathers two layers at a time, and what lies outside of the layers. Activations of a token are (8 + 4 width)
  hidden + width (2 queries + 2 keys + 4 intermediate) per layer, or width x hidden if they are recomputed; one layer's
  are then recomputed after the logits are freed, so the larger of both counts.
- With ``optimizer_on_host`` the host holds 16 bytes per parameter, and the device the largest tensor of the exchange.
- Of DeepSpeed and Megatron (:data:`STATE_ONLY`) only weights, gradients and optimizer are computed: passes come on top.
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
"""Tokens of a pass: fewer than the first are chosen only if nothing else fits, and never fewer than the second."""

STATE_ONLY = ("deepspeed", "megatron")  # train engines whose passes are not computed
_QUANTIZED = 0.5 + 4 / 64  # bytes of a number in 4 bits, in blocks of 64 with a float32 scale

ON_HOST = ("fsdp2", "deepspeed")  # train engines with the option ``optimizer_on_host``
_BUCKET = 1 << 27  # gradients in a bucket of DeepSpeed

SIZED = 0.8  # share of a device's memory that automatic choices may fill: the arithmetic is not exact


@dataclass(frozen=True)
class ModelUse:
    """The use of a model by a role."""

    kind: Literal["trained", "frozen", "rollout"]
    model: str
    members: int = 1
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraSettings | None = None
    head: Head = "causal"
    longest: int = 0  # tokens of the longest row, which has to be in one pass
    bounded: bool = True  # no row can be longer
    sharded_class: str = ""  # the workload class whose workers hold a part of a frozen model each


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes on one device, by owner."""

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
        """Bytes between the calls of an engine that stays on its device."""
        return self.weights + self.optimizer + self.kv_cache

    @property
    def peak(self) -> float:
        return self.resting + self.gradients + max(self.gathered + self.activations + self.logits, self.exchange)


def bytes_of(shape: ModelShape, use: ModelUse, engine: EngineConfig) -> PlannedBytes:
    """Compute the memory of a role's device; ``engine`` is resolved, and its sizes divide the workers."""
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
    return use.kind != "rollout" and engine.train in STATE_ONLY


def _of_fsdp2(shape: ModelShape, use: ModelUse, engine: EngineConfig, width: int, tokens: float) -> PlannedBytes:
    sizes = sizes_of(use, engine)
    tensor, context = sizes.tensor_parallel_size, sizes.context_parallel_size
    shards = use.members // sizes.ddp_size
    gathers = shards > tensor * sizes.pipeline_parallel_size
    changed, on_host = _count_trained(shape, use), is_on_host(engine)
    master, copy = 0 if on_host and not gathers else 4, 0 if gathers or (width == 4 and not on_host) else width
    frozen = 0.0 if use.lora is None else _base(shape, use.lora, width)
    has_gradients = use.lora is None  # gradients of adapters are few
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
    """Return the sizes for a trained model: by default workers hold copies of a quantized model, and shard others."""
    return engine.parallel or ParallelSizes(ddp_size=use.members if is_quantized(use) else 1)


def is_quantized(use: ModelUse) -> bool:
    return use.lora is not None and use.lora.quantize_base is not None


def _base(shape: ModelShape, lora: LoraSettings, width: int) -> float:
    parameters = shape.parameters - shape.head  # the head is trained
    if lora.quantize_base is None:
        return width * parameters
    return width * (parameters - shape.matrices) + _QUANTIZED * shape.matrices


def _count_trained(shape: ModelShape, use: ModelUse) -> float:
    return shape.parameters if use.lora is None else shape.trained_parameters(use.lora)


def is_on_host(engine: EngineConfig) -> bool:
    """Return True if the float32 weights and the moments of trained models are in host memory."""
    return engine.train in ON_HOST and engine.train_options.get("optimizer_on_host") is True


def host_bytes(shape: ModelShape, use: ModelUse, engine: EngineConfig) -> float:
    """Bytes of host memory per worker: float32 weights, gradients and moments."""
    if use.kind != "trained" or not is_on_host(engine):
        return 0.0
    shape = shape.with_score_head() if use.head == "token" else shape
    sizes = sizes_of(use, engine)
    return (8 + moment_bytes(use.optimizer, use.lora)) * _count_trained(shape, use) * sizes.ddp_size / use.members


def _of_deepspeed(shape: ModelShape, use: ModelUse, engine: EngineConfig, width: int) -> PlannedBytes:
    members, stage = use.members, engine.train_options.get("zero_stage", 3)
    trained = _count_trained(shape, use)
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
    """Bytes of a token. Norms are computed in float32, on every tensor-parallel rank."""
    norms = (8 + 4 * width) * shape.hidden
    return norms + width * (2 * shape.queries + 2 * shape.keys + 4 * shape.intermediate) / tensor


def _logits(shape: ModelShape, width: int, tokens: float, tensor: int, trains: bool) -> float:
    whole = tokens * shape.vocabulary
    chunk = CHUNK_ELEMENTS if _has_chunks(shape, tokens, tensor) else whole / tensor
    return (2 if trains else 1) * width * chunk


def _has_chunks(shape: ModelShape, tokens: float, tensor: int) -> bool:
    return tokens * shape.vocabulary > CHUNK_ELEMENTS and tensor == 1 and shape.raw_logits


def has_auto_passes(engine: EngineConfig) -> bool:
    return AUTO in (engine.max_tokens_per_microbatch, engine.gradient_checkpointing)


def size_passes(engine: EngineConfig, use: ModelUse, shape: ModelShape | None, capacity: float | None) -> EngineConfig:
    """Return ``engine`` without ``auto`` for the passes of a model: the best of :func:`pass_choices` that fits
    ``capacity`` bytes, or else the smallest; if the memory is unknown, :data:`MOST_TOKENS` tokens, recomputed."""
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
    """List the tokens of a pass, and True for recomputed activations, the best choice first: activations are kept if
    that is possible with at least :data:`FEW_TOKENS`, and all rows are known to fit a pass."""
    limit = engine.tokens_of_a_pass
    fewest = min(max(FEWEST_TOKENS, use.longest), limit)
    sizes = [limit >> number for number in range((limit // fewest).bit_length())]
    checkpointing = engine.gradient_checkpointing
    recomputes = checkpointing is True or (checkpointing == AUTO and not use.bounded)
    flags = (False,) if use.kind != "trained" else (True,) if recomputes else (False, True)
    return sorted(product(sizes, flags), key=lambda choice: (choice[0] < FEW_TOKENS, choice[1], -choice[0]))
