# SPDX-License-Identifier: Apache-2.0
"""The rules of conversations, with the tokenizer and template of a model that people use."""

import pytest

from dlrover.python.rl.data.conversation import continue_chat, encode_example, encode_prompt, prompt_text

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
QUESTION = [{"role": "user", "content": "What is 3 * 4?"}]
ANSWERED = [*QUESTION, {"role": "assistant", "content": "12"}]
ASKED = f"{SYSTEM}<|im_start|>user\nWhat is 3 * 4?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("3 * 4 =", "3 * 4 ="),
        (QUESTION, ASKED),
        ([{"role": "system", "content": "S"}, *QUESTION], ASKED.replace(SYSTEM, "<|im_start|>system\nS<|im_end|>\n")),
    ],
)
def test_encode_prompt_returns_the_ids_of_the_text(smollm2, prompt, text):
    tokens = encode_prompt(smollm2, prompt)
    assert (smollm2.decode(tokens), prompt_text(smollm2, prompt)) == (text, text)
    if not isinstance(prompt, str):
        assert tokens == smollm2.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"messages": ANSWERED}, "12<|im_end|>"),
        ({"messages": [*ANSWERED, *ANSWERED]}, "12<|im_end|>12<|im_end|>"),
        ({"prompt": QUESTION, "response": "12"}, "12<|im_end|>"),
        ({"prompt": "3 * 4 =", "response": " 12"}, " 12<|im_end|>"),
    ],
)
def test_encode_example_trains_each_answer_and_its_end(smollm2, row, trained):
    (example,) = encode_example(smollm2, row)
    tokens = [token for token, counts in zip(example.tokens, example.action_mask, strict=True) if counts]
    assert smollm2.decode(tokens) == trained


def test_continue_chat_keeps_the_text_before_the_answer(smollm2):
    text = continue_chat(smollm2, ASKED, QUESTION, "12", QUESTION)
    assert text == f"{ASKED}12<|im_end|>\n{ASKED.removeprefix(SYSTEM)}"
