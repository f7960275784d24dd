# SPDX-License-Identifier: Apache-2.0
"""The sizes of Qwen2.5-0.5B, as in its configuration."""

SIZES = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
