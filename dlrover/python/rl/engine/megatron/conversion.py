"""Weights from Hugging Face's names to Megatron's and back: which tensors a parameter holds, in which order, and which
part of them a tensor-parallel rank has.

Everything here is arithmetic on tensors; nothing needs Megatron.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from dlrover.python.rl.engine.megatron.shape import TransformerShape

Form: TypeAlias = Literal["whole", "vocab", "columns", "qkv", "gate_up"]
"""How a parameter is made of its tensors, and split over tensor-parallel ranks:

* ``whole``: the tensor itself, the same on every rank;
* ``vocab``: rows, filled up with zeros until the ranks divide them;
* ``columns``: columns of a matrix;
* ``qkv``: for each key-value head its query heads, its key and its value, one below the other; ranks have whole groups;
* ``gate_up``: a rank's rows of the gate above its rows of the up projection."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of Megatron's GPT.

    Attributes:
        name: Megatron's, ``{layer}`` standing for the layer's number on its pipeline stage.
        layer: the layer's number in the whole model; None outside the layers.
        sources: names of the Hugging Face tensors it holds.
        shapes: theirs.
        form: how it holds them.
        last: it is on the last pipeline stage, not on the first (outside the layers).
    """

    name: str
    layer: int | None
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    form: Form
    last: bool = False

    def stage(self, shape: TransformerShape, stages: int) -> int:
        """The pipeline stage that has it; of a tied embedding the first of two."""
        if self.layer is None:
            return stages - 1 if self.last else 0
        return self.layer * stages // shape.layers

    def local_name(self, shape: TransformerShape, stages: int) -> str:
        """Its name there."""
        per_stage = shape.layers // stages
        return self.name if self.layer is None else self.name.format(layer=self.layer % per_stage)


def parameters(shape: TransformerShape) -> list[Parameter]:
    """All of a model's, in the order of Hugging Face's names."""
    hidden, vocab = shape.hidden, shape.vocab
    embedding = ("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    found = [_single(*embedding, (vocab, hidden), "vocab")]
    for layer in range(shape.layers):
        found += _layer(shape, layer)
    found.append(_single("decoder.final_layernorm.weight", "model.norm.weight", (hidden,), "whole", last=True))
    if shape.head == "token":
        found.append(_single("output_layer.weight", "score.weight", (1, hidden), "whole", last=True))
        found.append(_single("output_layer.bias", "score.bias", (1,), "whole", last=True))
    elif not shape.tied:
        found.append(_single("output_layer.weight", "lm_head.weight", (vocab, hidden), "vocab", last=True))
    return found


def _single(name: str, source: str, shape: tuple[int, ...], form: Form, last: bool = False) -> Parameter:
    return Parameter(name, None, (source,), (shape,), form, last)


def _layer(shape: TransformerShape, layer: int) -> list[Parameter]:
    hidden, middle, width = shape.hidden, shape.intermediate, shape.head_dim
    queries, keys = shape.heads * width, shape.kv_heads * width

    def of(name: str, form: Form, **sources: tuple[int, ...]) -> Parameter:
        names = tuple(f"model.layers.{layer}.{source.replace('__', '.')}" for source in sources)
        return Parameter(f"decoder.layers.{{layer}}.{name}", layer, names, tuple(sources.values()), form)

    projections = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
    weights = {f"self_attn__{letter}_proj__weight": size for letter, size in projections.items()}
    biases = {f"self_attn__{letter}_proj__bias": size[:1] for letter, size in projections.items()}
    found = [
        of("input_layernorm.weight", "whole", input_layernorm__weight=(hidden,)),
        of("self_attention.linear_qkv.weight", "qkv", **weights),
    ]
    if shape.qkv_bias:
        found.append(of("self_attention.linear_qkv.bias", "qkv", **biases))
    if shape.qk_norm:
        found.append(of("self_attention.q_layernorm.weight", "whole", self_attn__q_norm__weight=(width,)))
        found.append(of("self_attention.k_layernorm.weight", "whole", self_attn__k_norm__weight=(width,)))
    up = {"mlp__gate_proj__weight": (middle, hidden), "mlp__up_proj__weight": (middle, hidden)}
    return [
        *found,
        of("self_attention.linear_proj.weight", "columns", self_attn__o_proj__weight=(hidden, queries)),
        of("pre_mlp_layernorm.weight", "whole", post_attention_layernorm__weight=(hidden,)),
        of("mlp.linear_fc1.weight", "gate_up", **up),
        of("mlp.linear_fc2.weight", "columns", mlp__down_proj__weight=(hidden, middle)),
    ]


def split(parameter: Parameter, tensors: Sequence[Any], shape: TransformerShape, rank: int, ranks: int) -> Any:
    """The part of a parameter that tensor-parallel rank ``rank`` of ``ranks`` has.

    Args:
        parameter: which.
        tensors: its Hugging Face tensors, whole, in the order of ``parameter.sources``.
        shape: of the model.
        rank: 0 to ``ranks - 1``.
        ranks: tensor-parallel size.
    """
    return _SPLITS[parameter.form](tensors, shape, rank, ranks)


def join(parameter: Parameter, parts: Sequence[Any], shape: TransformerShape) -> list[Any]:
    """The Hugging Face tensors of a parameter from the ``parts`` of all tensor-parallel ranks, in their order."""
    return _JOINS[parameter.form](parts, shape)


def padded_vocab(vocab: int, ranks: int) -> int:
    """Rows of the embedding once tensor-parallel ranks divide it."""
    return math.ceil(vocab / ranks) * ranks


def _split_vocab(tensors: Sequence[Any], shape: TransformerShape, rank: int, ranks: int) -> Any:
    (rows,) = tensors
    padding = rows.new_zeros(padded_vocab(len(rows), ranks) - len(rows), *rows.shape[1:])
    return torch.cat([rows, padding]).chunk(ranks)[rank]


def _split_qkv(tensors: Sequence[Any], shape: TransformerShape, rank: int, ranks: int) -> Any:
    by_group = [tensor.reshape(shape.kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
    mine = torch.cat(by_group, dim=1).chunk(ranks)[rank]
    return mine.reshape(-1, *tensors[0].shape[1:])


def _join_qkv(parts: Sequence[Any], shape: TransformerShape) -> list[Any]:
    rows = torch.cat(list(parts))
    groups = rows.reshape(shape.kv_heads, -1, *rows.shape[1:])
    sizes = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
    return [piece.reshape(-1, *rows.shape[1:]) for piece in groups.split(sizes, dim=1)]


def _join_gate_up(parts: Sequence[Any], shape: TransformerShape) -> list[Any]:
    halves = [part.chunk(2) for part in parts]
    return [torch.cat([half[which] for half in halves]) for which in (0, 1)]


_SPLITS: dict[Form, Callable[[Sequence[Any], TransformerShape, int, int], Any]] = {
    "whole": lambda tensors, shape, rank, ranks: tensors[0],
    "vocab": _split_vocab,
    "columns": lambda tensors, shape, rank, ranks: tensors[0].chunk(ranks, dim=1)[rank],
    "qkv": _split_qkv,
    "gate_up": lambda tensors, shape, rank, ranks: torch.cat([tensor.chunk(ranks)[rank] for tensor in tensors]),
}
_JOINS: dict[Form, Callable[[Sequence[Any], TransformerShape], list[Any]]] = {
    "whole": lambda parts, shape: [parts[0]],
    "vocab": lambda parts, shape: [torch.cat(list(parts))[: shape.vocab]],
    "columns": lambda parts, shape: [torch.cat(list(parts), dim=1)],
    "qkv": _join_qkv,
    "gate_up": _join_gate_up,
}
