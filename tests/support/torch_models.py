# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of several families, and what the library's own code says about them."""

import torch
import transformers
from transformers import AutoModelForCausalLM

from dlrover.python.rl.engine.model.loading import as_causal_lm
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer

VOCAB, EOS, PAD = 259, 258, 256

DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": EOS, "pad_token_id": PAD,
}  # fmt: skip
_ROPE = {"rope_theta": 10000.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ROPE,
           "original_max_position_embeddings": 32}  # fmt: skip

_LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 2.0, **_ROPE,
             "short_factor": [1.5] * 4, "long_factor": [4.0] * 4}  # fmt: skip

FUSED = {
    "llama": {},
    "llama, tied, with biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama, llama3 rope": {"rope_parameters": _LLAMA3},
    "llama, linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **_ROPE}},
    "llama, one head each": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": None},
    "mistral, wide heads": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen2, tied": {"tie_word_embeddings": True},
    "qwen2, yarn rope": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **_ROPE}
    },
    "qwen3": {"head_dim": 16},
    "qwen3, tied": {"tie_word_embeddings": True},
}
"""Models that the engine's own forward pass fits; the family is the first word."""

GENERIC = {
    "mistral, sliding": {"sliding_window": 8},
    "qwen2, sliding": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "llama, dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **_ROPE}},
    "llama, longrope": {"rope_parameters": _LONGROPE},
    "llama, gelu": {"hidden_act": "gelu"},
    "gemma2": {"sliding_window": 8, "head_dim": 8},
    "gpt_oss": {"sliding_window": 8, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {},
    "gpt_neox": {},
}
"""Models that run through the library's."""


def family_model(label):
    """A model with random weights, biases and norms included, that generates as it is told."""
    family, changes = label.partition(",")[0], {**FUSED, **GENERIC}[label]
    config = transformers.AutoConfig.for_model(family, **{**_for(family), **changes})
    attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return made.float().eval()


def _for(family):
    if family == "gpt2":
        return {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
                "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}  # fmt: skip
    return DECODER


def loaded(model):
    """As the engine takes it; the copy becomes the engine's own."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    return as_causal_lm(copy, make_byte_tokenizer())


@torch.no_grad()
def greedy(model, prompt, count):
    """What the library's ``generate`` gives for one prompt."""
    ids = torch.tensor([list(prompt)])
    ends = {"max_new_tokens": count, "eos_token_id": EOS, "pad_token_id": PAD}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **ends)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def logprobs(model, tokens, temperature=1.0):
    """``[seq - 1]``: of each token after the first."""
    logits = model(torch.tensor([list(tokens)])).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(list(tokens[1:]))[:, None]).squeeze(1).numpy()
