# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models that Megatron's GPT can compute, and their weights under both names: the tensors of a parameter,
their order, and the part of a tensor-parallel rank. Nothing here imports Megatron.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from dlrover.python.rl.common.errors import EngineError

_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` of supported transformers: pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU."""


@dataclass(frozen=True)
class TransformerShape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int  # each shared by `heads / kv_heads` query heads
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_factor: float | None  # Llama 3's scaling of the rotary frequencies
    tied: bool  # the language-model head is the input embedding
    qkv_bias: bool
    qk_norm: bool  # queries and keys are normalised by head (Qwen3)
    head: Literal["causal", "token"]  # a vocabulary projection, or one score for each token
    known_ids: int  # ids from this one on, such as padding, have no probability

    @classmethod
    def of(cls, config: Any, head: Literal["causal", "token"]) -> "TransformerShape":
        """Read a Hugging Face configuration. Raises an ``EngineError`` that lists all that Megatron cannot compute."""
        if faults := list(find_faults(config)):
            raise EngineError(f"megatron cannot run this model: {'; '.join(faults)}")
        kind, heads, rope = config.model_type, config.num_attention_heads, config.rope_parameters
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_theta=float(rope["rope_theta"]),
            rope_factor=float(rope["factor"]) if rope.get("rope_type") == "llama3" else None,
            tied=bool(config.tie_word_embeddings) and head == "causal",
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            head=head,
            known_ids=config.vocab_size,
        )

    def check_split(self, tensor: int, pipeline: int) -> None:
        """Raise an ``EngineError`` unless these sizes divide the model."""
        for label, number in (("key-value heads", self.kv_heads), ("MLP columns", self.intermediate)):
            if number % tensor:
                raise EngineError(f"{number} {label} cannot be divided by tensor_parallel_size {tensor}")
        if self.layers % pipeline:
            raise EngineError(f"{self.layers} layers cannot be divided by pipeline_parallel_size {pipeline}")


def find_faults(config: Any) -> Iterator[str]:
    if config.model_type not in TYPES:
        yield f"its type is '{config.model_type}', not {', '.join(TYPES[:-1])} or {TYPES[-1]}"
        return
    if config.hidden_act != "silu":
        yield f"its activation is '{config.hidden_act}', not 'silu'"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            yield f"it has {name}"
    windowed = getattr(config, "use_sliding_window", config.model_type == "mistral")
    if windowed and getattr(config, "sliding_window", None) is not None:
        yield f"its attention has a sliding window of {config.sliding_window} tokens"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        yield f"its rotary positions are of type '{rope['rope_type']}'"
    elif rope.get("rope_type") == "llama3" and tuple(map(rope.get, _LLAMA3)) != (1.0, 4.0, 8192):
        yield "its llama3 rotary positions differ from Llama 3's bounds (1, 4, 8192)"


Form: TypeAlias = Literal["whole", "vocab", "columns", "qkv", "gate_up"]
"""The form of a parameter: its tensors, and the parts of tensor-parallel ranks.

* ``whole``: the tensor itself, the same on every rank;
* ``vocab``: rows, padded with zeros until the ranks divide them;
* ``columns``: columns of a matrix;
* ``qkv``: for each key-value head its query heads, its key and its value, stacked; ranks have whole groups;
* ``gate_up``: a rank's rows of the gate above its rows of the up projection."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of Megatron's GPT."""

    name: str  # Megatron's; `{layer}` is the layer's number on its pipeline stage
    layer: int | None  # the layer's number in the whole model; None outside the layers
    sources: tuple[str, ...]  # names of the Hugging Face tensors it holds
    shapes: tuple[tuple[int, ...], ...]  # of those tensors
    form: Form
    last: bool = False  # outside the layers: it is on the last pipeline stage, not on the first

    def stage(self, shape: TransformerShape, stages: int) -> int:
        """Return the pipeline stage that has it; for a tied embedding, which is on two, the first."""
        if self.layer is None:
            return stages - 1 if self.last else 0
        return self.layer * stages // shape.layers

    def local_name(self, shape: TransformerShape, stages: int) -> str:
        per_stage = shape.layers // stages
        return self.name if self.layer is None else self.name.format(layer=self.layer % per_stage)


def list_parameters(shape: TransformerShape) -> list[Parameter]:
    """List a model's parameters, in the order of Hugging Face's names."""
    hidden, vocab = shape.hidden, shape.vocab
    outside: list[tuple[str, str, tuple[int, ...], Form]] = [
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight", (vocab, hidden), "vocab"),
        ("decoder.final_layernorm.weight", "model.norm.weight", (hidden,), "whole"),
    ]
    if shape.head == "token":
        outside.append(("output_layer.weight", "score.weight", (1, hidden), "whole"))
        outside.append(("output_layer.bias", "score.bias", (1,), "whole"))
    elif not shape.tied:
        outside.append(("output_layer.weight", "lm_head.weight", (vocab, hidden), "vocab"))
    first, *last = [
        Parameter(name, None, (source,), (size,), form, last=number > 0)
        for number, (name, source, size, form) in enumerate(outside)
    ]
    return [first, *(part for layer in range(shape.layers) for part in _list_layer(shape, layer)), *last]


def _list_layer(shape: TransformerShape, layer: int) -> list[Parameter]:
    hidden, middle, width = shape.hidden, shape.intermediate, shape.head_dim
    queries, keys = shape.heads * width, shape.kv_heads * width

    def of(name: str, form: Form, **sources: tuple[int, ...]) -> Parameter:
        names = tuple(f"model.layers.{layer}.{source.replace('__', '.')}" for source in sources)
        return Parameter(f"decoder.layers.{{layer}}.{name}", layer, names, tuple(sources.values()), form)

    projections = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
    weights = {f"self_attn__{letter}_proj__weight": size for letter, size in projections.items()}
    biases = {f"self_attn__{letter}_proj__bias": size[:1] for letter, size in projections.items()}
    table = [
        of("input_layernorm.weight", "whole", input_layernorm__weight=(hidden,)),
        of("self_attention.linear_qkv.weight", "qkv", **weights),
    ]
    if shape.qkv_bias:
        table.append(of("self_attention.linear_qkv.bias", "qkv", **biases))
    if shape.qk_norm:
        table.append(of("self_attention.q_layernorm.weight", "whole", self_attn__q_norm__weight=(width,)))
        table.append(of("self_attention.k_layernorm.weight", "whole", self_attn__k_norm__weight=(width,)))
    up = {"mlp__gate_proj__weight": (middle, hidden), "mlp__up_proj__weight": (middle, hidden)}
    return [
        *table,
        of("self_attention.linear_proj.weight", "columns", self_attn__o_proj__weight=(hidden, queries)),
        of("pre_mlp_layernorm.weight", "whole", post_attention_layernorm__weight=(hidden,)),
        of("mlp.linear_fc1.weight", "gate_up", **up),
        of("mlp.linear_fc2.weight", "columns", mlp__down_proj__weight=(hidden, middle)),
    ]


def split(parameter: Parameter, tensors: Sequence[Any], shape: TransformerShape, rank: int, ranks: int) -> Any:
    """Return a tensor-parallel rank's part of a parameter, from whole Hugging Face tensors."""
    first = tensors[0]
    match parameter.form:
        case "whole":
            return first
        case "vocab":
            padding = first.new_zeros(pad_vocab(len(first), ranks) - len(first), *first.shape[1:])
            return torch.cat([first, padding]).chunk(ranks)[rank]
        case "columns":
            return first.chunk(ranks, dim=1)[rank]
        case "qkv":
            by_group = [tensor.reshape(shape.kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
            return torch.cat(by_group, dim=1).chunk(ranks)[rank].reshape(-1, *first.shape[1:])
        case "gate_up":
            return torch.cat([tensor.chunk(ranks)[rank] for tensor in tensors])


def join(parameter: Parameter, parts: Sequence[Any], shape: TransformerShape) -> list[Any]:
    """Return the Hugging Face tensors of a parameter, from the ``parts`` of all tensor-parallel ranks in order."""
    match parameter.form:
        case "whole":
            return [parts[0]]
        case "vocab":
            return [torch.cat(list(parts))[: shape.vocab]]
        case "columns":
            return [torch.cat(list(parts), dim=1)]
        case "qkv":
            rows = torch.cat(list(parts))
            groups = rows.reshape(shape.kv_heads, -1, *rows.shape[1:])
            sizes = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
            return [piece.reshape(-1, *rows.shape[1:]) for piece in groups.split(sizes, dim=1)]
        case "gate_up":
            halves = [part.chunk(2) for part in parts]
            return [torch.cat([half[which] for half in halves]) for which in (0, 1)]


def pad_vocab(vocab: int, ranks: int) -> int:
    """Round the embedding's rows up to a number that tensor-parallel ranks divide."""
    return math.ceil(vocab / ranks) * ranks
