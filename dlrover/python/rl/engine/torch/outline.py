"""What is known of a causal language model without its weights: for engines whose weights live in another program."""

from pathlib import Path

import torch
from transformers import GenerationConfig

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.torch.blueprint import Blueprint
from dlrover.python.rl.engine.torch.loading import CausalLM, as_causal_lm


def outline_causal_lm(source: str | Path) -> tuple[CausalLM, str]:
    """A model on the meta device, with its tokenizer: names and shapes of its weights, vocabulary, end tokens.

    Args:
        source: folder or hub name.

    Returns:
        The outline, and the folder where the model's files are.

    Raises:
        EngineError: there is no such model, or it names no end-of-sequence token.
    """
    plan = Blueprint.of(source)
    assert plan.folder is not None
    module = plan.empty()
    if (plan.folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(plan.folder)
    lm = as_causal_lm(module, plan.tokenizer, "meta")
    if not lm.eos_ids:
        raise EngineError(f"'{source}' names no end-of-sequence token: its completions would never finish")
    return lm, str(plan.folder)


def weight_bytes(lm: CausalLM, dtype: torch.dtype) -> int:
    """Bytes of all weights in ``dtype``, tied ones once."""
    return sum(tensor.numel() for _, tensor in lm.named_weights()) * dtype.itemsize


def cache_bytes_per_token(lm: CausalLM, dtype: torch.dtype) -> int:
    """Bytes that the keys and values of one token take in ``dtype``, over all layers."""
    config = lm.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * head_width(lm) * dtype.itemsize


def head_width(lm: CausalLM) -> int:
    """Numbers that an attention head has for a token."""
    config = lm.model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
