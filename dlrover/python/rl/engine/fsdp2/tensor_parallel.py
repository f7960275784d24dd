"""Matrices split between ranks: the model's own plan, carried out with DTensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.torch.outputs import VocabularyShard

OWN_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}
"""For models built like Llama that bring no plan along: the linear layers of each decoder layer."""

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SUMMED = "replicated_with_grad_allreduce"
_VOCABULARY = ("embed_tokens", "lm_head")


def split_matrices(module: Any, mesh: Any) -> tuple[VocabularyShard | None, list[str]]:
    """Split a model whose parameters are on the meta device, in place.

    Args:
        module: a Hugging Face model.
        mesh: the ranks that split it.

    Returns:
        This rank's part of the vocabulary (None where its size cannot be divided: each rank has all of it then), and
        the names of parameters that every rank has but uses for its own heads only, so their gradients add up.

    Raises:
        EngineError: heads or widths cannot be divided (gives the numbers), or the plan is of a kind unknown here.
    """
    config, ranks = module.config.get_text_config(), mesh.size()
    check_divisible(config, ranks)
    plan = _plan(module)
    summed = [name for name, style in plan.items() if style == _SUMMED]
    known = {name: _STYLES[style]() for name, style in plan.items() if style in _STYLES}
    if odd := {style for style in plan.values() if style not in {*_STYLES, _SUMMED}}:
        raise EngineError(f"{type(module).__name__} splits by {', '.join(sorted(odd))}, which fsdp2 cannot do")
    tied = ties(module)
    parallelize_module(module, mesh, known)
    shard = _split_vocabulary(module, mesh) if config.vocab_size % ranks == 0 else None
    restore_ties(module, tied)
    patterns = [name.split(".") for name in summed]
    return shard, [name for name, _ in module.named_parameters() if any(_fits(name, one) for one in patterns)]


def check_divisible(config: Any, ranks: int) -> None:
    """Refuse sizes that ``ranks`` cannot share equally.

    Raises:
        EngineError: names each, with the numbers.
    """
    names = {
        "num_attention_heads": "attention heads",
        "num_key_value_heads": "key-value heads",
        "intermediate_size": "feed-forward columns",
    }
    sizes = {told: getattr(config, name, None) for name, told in names.items()}
    odd = [f"{size} {told}" for told, size in sizes.items() if size is not None and size % ranks]
    if odd:
        raise EngineError(f"{ranks} tensor-parallel ranks cannot share {' or '.join(odd)}")


def _plan(module: Any) -> dict[str, str]:
    """Module name, ``*`` for a layer's number, to how it is split; the vocabulary's ends left out."""
    plan: Mapping[str, str] = getattr(module, "_tp_plan", None) or {}
    plan = {name: style for name, style in plan.items() if name.rsplit(".", 1)[-1] not in _VOCABULARY}
    if plan:
        return dict(plan)
    names = [name for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
    found = {name: style for name in names for end, style in OWN_PLAN.items() if name.endswith(f".{end}")}
    if not found:
        raise EngineError(f"{type(module).__name__} has no plan for tensor parallelism, and is not built like Llama")
    return found


def _fits(name: str, pattern: list[str]) -> bool:
    parts = name.split(".")[:-1]
    return len(parts) == len(pattern) and all(want in ("*", part) for part, want in zip(parts, pattern, strict=True))


def _split_vocabulary(module: Any, mesh: Any) -> VocabularyShard | None:
    """Embedding and projection by rows of the vocabulary: each rank gets logits of its own part."""
    inputs, outputs = module.get_input_embeddings(), module.get_output_embeddings()
    if isinstance(inputs, torch.nn.Embedding):
        parallelize_module(inputs, mesh, RowwiseParallel(input_layouts=Replicate()))
    if not isinstance(outputs, torch.nn.Linear):
        return None
    parallelize_module(outputs, mesh, ColwiseParallel())
    return VocabularyShard(mesh.get_local_rank() * (outputs.out_features // mesh.size()), mesh.get_group())


def ties(module: Any) -> list[list[tuple[Any, str]]]:
    """Parameters with several places: each as modules and names, the first one first."""
    places: dict[int, list[tuple[Any, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((part, name))
    return [found for found in places.values() if len(found) > 1]


def restore_ties(module: Any, ties: list[list[tuple[Any, str]]]) -> None:
    """Put the parameter of each first place into the others."""
    for (first, first_name), *others in ties:
        for part, name in others:
            part.register_parameter(name, getattr(first, first_name))
