# SPDX-License-Identifier: Apache-2.0
"""Tokens and masks of conversations, with toy templates and SmolLM2's, and arguments of templates."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.conversation import (
    Encoded,
    continue_chat,
    encode_example,
    encode_prompt,
    fit_length,
    prompt_text,
)
from dlrover.python.rl.data.pairs import encode_pair

HIDING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING_PROMPT = HIDING.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
NO_MARKER = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
text = st.text(alphabet=st.sampled_from("aä漢🙂 \n<|assistant"), max_size=8)


def say(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


def decode(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def trained(tokenizer, encoded: Encoded) -> str:
    assert len(encoded.tokens) == len(encoded.action_mask)
    return decode(tokenizer, [token for token, on in zip(encoded.tokens, encoded.action_mask, strict=True) if on])


AROUND = {
    # what the tokenizer adds to a text: prompts, and the tokens of each
    "<s> $A": [("hm", "<s>hm"), ("<s>hm", "<s>hm"), ("", "<s>")],
    "<s> $A </s>": [("hm", "<s>hm"), ("<s>hm", "<s>hm"), ("", "<s>")],
    "$A </s>": [("hm", "hm"), ("hm</s>", "hm</s>"), ("", "")],
    "</s> $A": [("hm", "</s>hm"), ("</s>", "</s>"), ("", "</s>")],  # GPT-2's, with a BOS
    "<s> <t> $A </s>": [("<s><t>hm", "<s><t>hm"), ("<s>hm", "<s><t><s>hm")],
    "$A": [("hm", "hm"), ("<s>hm</s>", "<s>hm</s>"), ("", "")],
}


def around(pattern: str, make_tokenizer):
    tokenizer = make_tokenizer()
    names = ["<s>", "</s>", "<t>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names, "eos_token": "</s>"})
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=pattern, special_tokens=ids)
    return tokenizer


@pytest.mark.parametrize("pattern", AROUND)
def test_raw_prompt_gets_one_beginning_and_no_end(make_tokenizer, pattern):
    tokenizer = around(pattern, make_tokenizer)
    encoded = [(prompt, decode(tokenizer, encode_prompt(tokenizer, prompt))) for prompt, _ in AROUND[pattern]]
    assert encoded == AROUND[pattern]


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        ({"prompt": "<s>hm", "response": "k"}, "<s>hmk</s>"),
        ({"prompt": "hm", "response": "k</s>"}, "<s>hmk</s>"),
        ({"text": "hm"}, "<s>hm</s>"),
        ({"text": "<s>hm</s>"}, "<s>hm</s>"),
    ],
)
def test_raw_example_begins_once_and_ends_once(make_tokenizer, row, tokens):
    tokenizer = around("<s> $A </s>", make_tokenizer)
    (encoded,) = encode_example(tokenizer, row)
    assert decode(tokenizer, encoded.tokens) == tokens
    assert trained(tokenizer, encoded).endswith("</s>")


CHAT = {"messages": say("Q1", "A1", "Q2", "A2", "Q3", system="S")}


@pytest.mark.feature(66, 67, 68, 69, 70)
@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"prompt": "A", "response": "BC", "id": 3}, {}, "BC<|im_end|>"),
        (CHAT, {}, "A1<|im_end|>A2<|im_end|>"),
        (CHAT, {"mode": "last"}, "A2<|im_end|>"),
        ({"prompt": "AB", "response": "C"}, {"mask_prompt": False}, "BC<|im_end|>"),
        ({"prompt": "", "response": "BC"}, {}, "C<|im_end|>"),
    ],
)
def test_encode_example_trains_by_mode(tokenizer, row, options, expected):
    (encoded,) = encode_example(tokenizer, row, **options)
    assert trained(tokenizer, encoded) == expected
    assert not encoded.action_mask[0]


def test_raw_prompt_and_response_are_never_merged(make_tokenizer):
    tokenizer = make_tokenizer(merges=(("A", "B"),))
    (encoded,) = encode_example(tokenizer, {"prompt": "A", "response": "B"})
    assert len(tokenizer("AB")["input_ids"]) == 1
    assert encoded.action_mask == [False, True, True]


@pytest.mark.feature(71)
def test_template_hiding_old_thoughts_splits_the_row(make_tokenizer):
    tokenizer = make_tokenizer(HIDING)
    messages = say("Q1", "<think>a</think>A1", "Q2", "<think>b</think>A2")
    first, second = encode_example(tokenizer, {"messages": messages})
    assert trained(tokenizer, first) == "<think>a</think>A1<|im_end|>"
    assert trained(tokenizer, second) == "<think>b</think>A2<|im_end|>"
    assert "a</think>" not in decode(tokenizer, second.tokens)
    assert len(encode_example(tokenizer, {"messages": say("Q1", "A1", "Q2", "A2")})) == 1


@pytest.mark.parametrize(("opening", "answer"), [("<think>\n", "t</think>A"), ("", "A"), ("", "<thought>A")])
def test_template_opening_thoughts_leaves_them_to_the_prompt(make_tokenizer, opening, answer):
    tokenizer = make_tokenizer(THINKING_PROMPT)
    (encoded,) = encode_example(tokenizer, {"messages": say("Q", f"{opening}{answer}")})
    assert trained(tokenizer, encoded) == f"{answer}<|im_end|>"


ALPACA = (
    "{% for m in messages %}### {{ 'Response' if m.role == 'assistant' else 'Instruction' }}:\n{{ m.content }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
OTHER_MARKER = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END_OF_TEXT = OTHER_MARKER.replace("<end>", "<|endoftext|>")
NO_MARKER_HIDING = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('</t>')[-1] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
OPEN = {"messages": say("Q", "A")}
ENDS = {
    # template, row, options, and what is trained
    "Alpaca": (ALPACA, OPEN, {}, ["A<|im_end|>"]),
    "a marker that is plain text": (OTHER_MARKER, OPEN, {}, ["A<end><|im_end|>"]),
    "a marker of the generation config": (END_OF_TEXT, OPEN, {"eos_ids": [256]}, ["A<|endoftext|>"]),
    "a marker that is no end": (END_OF_TEXT, OPEN, {}, ["A<|endoftext|><|im_end|>"]),
    "an answer that brings its end": (NO_MARKER, {"messages": say("Q", "A<|im_end|>")}, {}, ["A<|im_end|>"]),
    "an answer with space": (NO_MARKER, {"messages": say("Q", "A \n", "R", "B")}, {}, ["A \nB<|im_end|>"]),
    "an empty answer": (NO_MARKER, {"messages": say("Q", "")}, {}, ["<|im_end|>"]),
    "a question at the end": (NO_MARKER, {"messages": say("Q", "A", "R")}, {}, ["A<|im_end|>"]),
    "the last answer": (NO_MARKER, {"messages": say("Q", "A", "R", "B", "S")}, {"mode": "last"}, ["B<|im_end|>"]),
    "hidden thoughts": (NO_MARKER_HIDING, {"messages": say("Q", "x</t>A", "R", "B")}, {},
        ["x</t>A<|im_end|>", "B<|im_end|>"]),
    "every token": (NO_MARKER, OPEN, {"mask_prompt": False}, ["ser: Q\nassistant: A<|im_end|>"]),
    "every token, a question at the end": (
        NO_MARKER, {"messages": say("Q", "A", "R")}, {"mask_prompt": False}, ["ser: Q\nassistant: A\nuser: R\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_conversation_trains_an_end_of_sequence(make_tokenizer, name):
    template, row, options, expected = ENDS[name]
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    assert [trained(tokenizer, example) for example in encode_example(tokenizer, row, **options)] == expected


def test_appended_end_follows_the_answer_at_once(make_tokenizer):
    tokenizer = make_tokenizer(ALPACA)
    (encoded,) = encode_example(tokenizer, {"messages": say("Q", "A", "R")})
    assert decode(tokenizer, encoded.tokens) == "### Instruction:\nQ\n\n### Response:\nA<|im_end|>"
    (cut,) = fit_length([encoded], len(encoded.tokens) - 1, "cut")
    assert trained(tokenizer, cut) == "A"


def test_token_over_a_border_is_cut_there(make_tokenizer):
    tokenizer = make_tokenizer(merges=(("Ċ", "Ċ"),))  # "\n\n" is one token
    (encoded,) = encode_example(tokenizer, {"messages": say("Q", "\nA")})
    assert trained(tokenizer, encoded) == "\nA<|im_end|>"
    prompt = encode_prompt(tokenizer, say("Q"))
    assert encoded.tokens[: len(prompt)] == prompt


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(text, min_size=2, max_size=6))
def test_encode_example_trains_exactly_the_answers(tokenizer, contents):
    (encoded,) = encode_example(tokenizer, {"messages": say(*contents)})
    assert trained(tokenizer, encoded) == "".join(f"{content}<|im_end|>" for content in contents[1::2])
    assert not encoded.action_mask[0]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "a", "respnse": "b"}, "unknown key 'respnse'; did you mean 'response'"),
        ({"prompt": "a", "response": 3}, "'response' must be text"),
        ({"messages": say("Q")}, "no assistant turn to train"),
        ({"messages": say("Q", "A")}, "the chat template refused the conversation: roles must alternate"),
        ({"messages": [{"role": "assistant", "content": "A"}]}, "begins with the assistant"),
        ({"messages": [{"role": "bot", "content": "A"}]}, "unknown role 'bot'"),
        ({"messages": say("Q", "A"), "response": "B"}, "ends with an answer, and also has a 'response'"),
    ],
)
def test_encode_example_refuses_wrong_rows(make_tokenizer, row, fault):
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = make_tokenizer(template) if "roles" in fault else make_tokenizer()
    with pytest.raises(DataError, match=fault):
        encode_example(tokenizer, row)


SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
QUESTION = [{"role": "user", "content": "What is 3 * 4?"}]
ASKED = f"{SYSTEM}<|im_start|>user\nWhat is 3 * 4?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("3 * 4 =", "3 * 4 ="),
        (QUESTION, ASKED),
        ([{"role": "system", "content": "S"}, *QUESTION], ASKED.replace(SYSTEM, "<|im_start|>system\nS<|im_end|>\n")),
    ],
)
def test_smollm2_prompt_is_the_text_of_its_template(smollm2, prompt, text):
    tokens = encode_prompt(smollm2, prompt)
    assert (smollm2.decode(tokens), prompt_text(smollm2, prompt)) == (text, text)
    if not isinstance(prompt, str):
        assert tokens == smollm2.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        (example,) = encode_example(smollm2, {"messages": [*prompt, *say("", "12")[1:]]})
        assert trained(smollm2, example) == "12<|im_end|>"


def test_continue_chat_keeps_the_text_before_the_answer(smollm2):
    text = continue_chat(smollm2, ASKED, QUESTION, "12", QUESTION)
    assert text == f"{ASKED}12<|im_end|>\n{ASKED.removeprefix(SYSTEM)}"


TOOL_TEMPLATE = (
    "{% if tools %}Tools:{% for t in tools %} {{ t.function.name }}{% endfor %}. {% endif %}"
    "{% if thinking is defined %}thinking={{ thinking }}. {% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
(ASK, SAY), (_, NO) = say("Q", "A"), say("Q", "B")
SFT_ROW, PAIR_ROW = {"messages": [ASK, SAY]}, {"prompt": [ASK], "chosen": [SAY], "rejected": [NO]}
PLAIN_CHAT = "<user>Q<|im_end|><assistant>A<|im_end|>"

ROWS = {
    "SFT_ROW": SFT_ROW,
    "SFT, prompt and completion": {"prompt": [ASK], "completion": [SAY]},
    "SFT, prompt and text": {"prompt": [ASK], "response": "A"},
    "pair": PAIR_ROW,
    "pair, texts after messages": {"messages": [ASK], "chosen": "A", "rejected": "B"},
}
ARGUMENTS = {
    # the row's, the job's, and what the text begins with
    "tools": ({"tools": TOOLS}, {}, "Tools: tide. "),
    "tools as JSON text": ({"tools": json.dumps(TOOLS)}, {}, "Tools: tide. "),
    "no tools in a table": ({"tools": None, "chat_template_kwargs": None}, {}, ""),
    "empty cells": ({"tools": "", "chat_template_kwargs": ""}, {}, ""),
    "arguments": ({"chat_template_kwargs": {"thinking": False}}, {}, "thinking=False. "),
    "both": ({"tools": TOOLS, "chat_template_kwargs": {"thinking": True}}, {}, "Tools: tide. thinking=True. "),
    "the job's": ({}, {"tools": TOOLS, "thinking": False}, "Tools: tide. thinking=False. "),
    "the row's before the job's": ({"chat_template_kwargs": '{"thinking": 1}'}, {"thinking": 2}, "thinking=1. "),
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("kind", ROWS)
def test_template_arguments_reach_the_template(make_tokenizer, kind, arguments):
    tokenizer, (of_row, of_job, opening) = make_tokenizer(TOOL_TEMPLATE), ARGUMENTS[arguments]
    encode = encode_pair if "chosen" in ROWS[kind] else encode_example
    encoded = encode(tokenizer, {**ROWS[kind], **of_row}, template_kwargs=of_job)[0]
    assert tokenizer.decode(encoded.tokens) == opening + PLAIN_CHAT
    whole, *_ = encode_example(tokenizer, {**SFT_ROW, **of_row}, mask_prompt=False, template_kwargs=of_job)
    assert tokenizer.decode(whole.tokens) == opening + PLAIN_CHAT


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({**SFT_ROW, "tools": ["hammer"]}, "'tools' must be a list of"),
        ({**PAIR_ROW, "tools": TOOLS[0]}, "'tools' must be a list of"),
        ({**SFT_ROW, "chat_template_kwargs": [1]}, "'chat_template_kwargs' must be an object"),
        ({"prompt": "Q", "response": "A", "tools": TOOLS}, "'tools' is for the chat template, which texts do not use"),
        ({**SFT_ROW, "tools": [{"name": "\ud83d"}]}, "a text in 'tools' has a lone surrogate"),
    ],
)
def test_template_arguments_of_texts_are_refused(tokenizer, row, fault):
    with pytest.raises(DataError, match=fault):
        (encode_pair if "chosen" in row else encode_example)(tokenizer, row)
