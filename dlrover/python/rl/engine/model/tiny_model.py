# SPDX-License-Identifier: Apache-2.0
"""A tiny byte-level model with random weights, for demos and tests that must run anywhere in seconds."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from dlrover.python.rl.engine.model.loading import write_atomically

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)

INITIAL_STD = 0.06
"""Standard deviation of the random weights. The usual 0.02 suits widths in the thousands and learns slowly here."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of 259 tokens: id ``b`` is the byte ``b``; 256 to 258 are ``SPECIAL_TOKENS``. End of sequence is
    ``<|im_end|>``, padding is ``<|endoftext|>``, and the chat template is ChatML."""
    # Byte-level tokenizers write each byte as a printable character, as GPT-2 defined them.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    vocabulary = {chr(byte) if byte in printable else chr(next(spare)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_tiny_model(  # noqa: PLR0913 - a model's shape is this many numbers
    path: Path | str,
    *,
    hidden: int = 128,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    max_positions: int = 512,
    seed: int = 0,
    rows: int | None = None,
) -> Path:
    """Write a small Qwen2 with random weights and tied embeddings, and its tokenizer, in Hugging Face format.

    The default shape has 0.6 million parameters; ``intermediate`` is ``3 * hidden`` by default, and ``rows`` of the
    embedding the tokenizer's 259. The process's random state does not change."""
    tokenizer = make_byte_tokenizer()
    config = tiny_config(
        tokenizer,
        hidden_size=hidden,
        intermediate_size=3 * hidden if intermediate is None else intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
    )
    config.vocab_size = rows or config.vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return write_atomically(Path(path), model, tokenizer)


def tiny_config(tokenizer: PreTrainedTokenizerFast, **shape: int) -> Qwen2Config:
    """Configure a Qwen2 with tied embeddings for the byte tokenizer; ``shape`` has the names of ``Qwen2Config``."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        initializer_range=INITIAL_STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
