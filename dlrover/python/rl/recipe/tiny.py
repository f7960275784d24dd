"""A tiny byte-level model with random weights, for demos and tests that must run anywhere in seconds.

Command line::

    python -m dlrover.python.rl.recipe.tiny --out runs/tiny
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from dlrover.python.rl.engine.torch.loading import write_atomically

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)

INITIAL_STD = 0.06
"""Spread of the random weights. The usual 0.02 is meant for widths in the thousands; at these widths it makes the first
steps of learning several times longer."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 259 tokens: id ``b`` is the byte ``b``; 256 to 258 are ``SPECIAL_TOKENS``.

    Any text is encoded without loss. End of sequence is ``<|im_end|>``, padding is ``<|endoftext|>``, and the chat
    template is ChatML.
    """
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_byte_symbols())}, merges=[]))
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


def _byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, as GPT-2 defined them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


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
) -> Path:
    """Write a small Qwen2 with random weights and tied embeddings, and its tokenizer, in Hugging Face format.

    The default shape has 0.6 million parameters.

    Args:
        path: the folder to write; replaced whole if it is there.
        hidden: width of the residual stream.
        layers: transformer blocks.
        heads: attention heads; divides ``hidden``.
        kv_heads: key and value heads; divides ``heads``.
        intermediate: width of the feed-forward layers; ``3 * hidden`` by default.
        max_positions: longest sequence in tokens.
        seed: of the weights; the process's own random state is left as it was.

    Returns:
        The folder.
    """
    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden if intermediate is None else intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        initializer_range=INITIAL_STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return write_atomically(Path(path), model, tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dlrover.python.rl.recipe.tiny",
        description="Write a tiny byte-level model with random weights in Hugging Face format.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    shape = {"hidden": 128, "layers": 3, "heads": 4, "kv_heads": 2, "max_positions": 512, "seed": 0}
    for name, default in shape.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    options = parser.parse_args(argv)
    path = write_tiny_model(options.out, **{name: getattr(options, name) for name in shape})
    sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
