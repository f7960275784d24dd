# SPDX-License-Identifier: Apache-2.0
"""Tokens and masks of supervised examples."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.conversation import Encoded, encode_example, encode_prompt, fit_length

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


def test_prompts_are_tokenised_as_inference_sees_them(tokenizer):
    assert decode(tokenizer, encode_prompt(tokenizer, "1+1=")) == "1+1="
    ids = encode_prompt(tokenizer, say("hi", system="be kind"))
    expected = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert decode(tokenizer, ids) == expected
    assert all(type(token) is int for token in ids)


AROUND = {
    # what the tokenizer adds to a text: prompts, the tokens of each, and those that were given before
    "<s> $A": [("hm", "<s>hm", "<s>hm"), ("<s>hm", "<s>hm", "<s><s>hm"), ("", "<s>", "<s>")],
    "<s> $A </s>": [("hm", "<s>hm", "<s>hm</s>"), ("<s>hm", "<s>hm", "<s><s>hm</s>"), ("", "<s>", "<s></s>")],
    "$A </s>": [("hm", "hm", "hm</s>"), ("hm</s>", "hm</s>", "hm</s></s>"), ("", "", "</s>")],
    "</s> $A": [("hm", "</s>hm", "</s>hm"), ("</s>", "</s>", "</s></s>"), ("", "</s>", "</s>")],  # GPT-2's, with a BOS
    "<s> <t> $A </s>": [("<s><t>hm", "<s><t>hm", "<s><t><s><t>hm</s>"), ("<s>hm", "<s><t><s>hm", "<s><t><s>hm</s>")],
    "$A": [("hm", "hm", "hm"), ("<s>hm</s>", "<s>hm</s>", "<s>hm</s>"), ("", "", "")],
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
    for prompt, expected, before in AROUND[pattern]:
        assert decode(tokenizer, encode_prompt(tokenizer, prompt)) == expected
        assert decode(tokenizer, tokenizer(prompt)["input_ids"]) == before


@pytest.mark.parametrize(
    ("row", "tokens", "before"),
    [
        ({"prompt": "hm", "response": "k"}, "<s>hmk</s>", "<s>hm</s>k</s>"),
        ({"prompt": "<s>hm", "response": "k"}, "<s>hmk</s>", "<s><s>hm</s>k</s>"),
        ({"prompt": "hm", "response": "k</s>"}, "<s>hmk</s>", "<s>hm</s>k</s></s>"),
        ({"text": "hm"}, "<s>hm</s>", "<s></s>hm</s>"),
        ({"text": "<s>hm</s>"}, "<s>hm</s>", "<s></s><s>hm</s></s>"),
    ],
)
def test_raw_example_begins_once_and_ends_once(make_tokenizer, row, tokens, before):
    tokenizer = around("<s> $A </s>", make_tokenizer)
    (encoded,) = encode_example(tokenizer, row)
    assert decode(tokenizer, encoded.tokens) == tokens != before
    assert trained(tokenizer, encoded).endswith("</s>")


@pytest.mark.feature(66)
def test_raw_text_trains_the_response_and_its_end(tokenizer):
    (encoded,) = encode_example(tokenizer, {"prompt": "A", "response": "BC", "id": 3})
    assert encoded.action_mask == [False, True, True, True]
    assert trained(tokenizer, encoded) == "BC<|im_end|>"


def test_raw_prompt_and_response_are_never_merged(make_tokenizer):
    tokenizer = make_tokenizer(merges=(("A", "B"),))
    assert len(tokenizer("AB")["input_ids"]) == 1
    (encoded,) = encode_example(tokenizer, {"prompt": "A", "response": "B"})
    assert encoded.tokens[:1] == encode_prompt(tokenizer, "A")
    assert encoded.action_mask == [False, True, True]


def test_raw_text_without_a_prompt_cannot_train_its_first_token(tokenizer):
    (encoded,) = encode_example(tokenizer, {"prompt": "", "response": "BC"})
    assert encoded.action_mask == [False, True, True]


@pytest.mark.feature(67, 68)
def test_every_answer_and_no_header(tokenizer):
    (encoded,) = encode_example(tokenizer, {"messages": say("Q1", "A1", "Q2", "A2", system="S")})
    assert trained(tokenizer, encoded) == "A1<|im_end|>A2<|im_end|>"
    assert decode(tokenizer, encoded.tokens).endswith("A2<|im_end|>\n")


@pytest.mark.feature(69)
def test_only_the_last_answer(tokenizer):
    (encoded,) = encode_example(tokenizer, {"messages": say("Q1", "A1", "Q2", "A2", "Q3")}, mode="last")
    assert trained(tokenizer, encoded) == "A2<|im_end|>"


@pytest.mark.feature(70)
@pytest.mark.parametrize("row", [{"messages": say("Q", "A")}, {"prompt": "Q", "response": "A"}])
def test_every_token_but_the_first(tokenizer, row):
    (encoded,) = encode_example(tokenizer, row, mask_prompt=False)
    assert encoded.action_mask == [False] + [True] * (len(encoded.tokens) - 1)


@pytest.mark.feature(71)
def test_a_template_that_hides_old_thoughts_splits_the_row(make_tokenizer):
    tokenizer = make_tokenizer(HIDING)
    messages = say("Q1", "<think>a</think>A1", "Q2", "<think>b</think>A2")
    first, second = encode_example(tokenizer, {"messages": messages})
    assert trained(tokenizer, first) == "<think>a</think>A1<|im_end|>"
    assert trained(tokenizer, second) == "<think>b</think>A2<|im_end|>"
    assert "a</think>" not in decode(tokenizer, second.tokens)
    assert len(encode_example(tokenizer, {"messages": say("Q1", "A1", "Q2", "A2")})) == 1


@pytest.mark.feature(71)
def test_the_last_answer_needs_no_split(make_tokenizer):
    tokenizer = make_tokenizer(HIDING)
    messages = say("Q1", "<think>a</think>A1", "Q2", "<think>b</think>A2")
    (encoded,) = encode_example(tokenizer, {"messages": messages}, mode="last")
    assert trained(tokenizer, encoded) == "<think>b</think>A2<|im_end|>"


@pytest.mark.parametrize(
    ("content", "expected"), [("<think>\nt</think>A", "t</think>A"), ("A", "A"), ("<thought>A", "<thought>A")]
)
def test_a_template_that_opens_thoughts_when_generating(make_tokenizer, content, expected):
    tokenizer = make_tokenizer(THINKING_PROMPT)
    (encoded,) = encode_example(tokenizer, {"messages": say("Q", content)})
    assert trained(tokenizer, encoded) == f"{expected}<|im_end|>"


def test_a_template_without_an_end_marker_keeps_the_contents_own_space(make_tokenizer):
    (encoded,) = encode_example(make_tokenizer(NO_MARKER), {"messages": say("Q", "A \n", "R", "B")})
    assert trained(make_tokenizer(NO_MARKER), encoded) == "A \nB<|im_end|>"


ALPACA = (
    "{% for m in messages %}### {{ 'Response' if m.role == 'assistant' else 'Instruction' }}:\n{{ m.content }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
OTHER_MARKER = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_MARKER_HIDING = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('</t>')[-1] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
OPEN = {"messages": say("Q", "A")}
ENDS = {
    # template, row, options, what is trained, and what was trained before an end was appended
    "an end marker that is the tokenizer's": (None, OPEN, {}, ["A<|im_end|>"], ["A<|im_end|>"]),
    "roles": (NO_MARKER, OPEN, {}, ["A<|im_end|>"], ["A"]),
    "Alpaca": (ALPACA, OPEN, {}, ["A<|im_end|>"], ["A"]),
    "a marker that is plain text": (OTHER_MARKER, OPEN, {}, ["A<end><|im_end|>"], ["A<end>"]),
    "a marker of the generation config": (
        OTHER_MARKER.replace("<end>", "<|endoftext|>"), OPEN, {"eos_ids": [256]}, ["A<|endoftext|>"],
        ["A<|endoftext|>"],
    ),
    "a marker that is no end": (
        OTHER_MARKER.replace("<end>", "<|endoftext|>"), OPEN, {}, ["A<|endoftext|><|im_end|>"], ["A<|endoftext|>"],
    ),
    "an answer that brings its end": (NO_MARKER, {"messages": say("Q", "A<|im_end|>")}, {}, *[["A<|im_end|>"]] * 2),
    "an empty answer": (NO_MARKER, {"messages": say("Q", "")}, {}, ["<|im_end|>"], []),
    "two answers": (NO_MARKER, {"messages": say("Q", "A", "R", "B")}, {}, ["AB<|im_end|>"], ["AB"]),
    "a question at the end": (NO_MARKER, {"messages": say("Q", "A", "R")}, {}, ["A<|im_end|>"], ["A"]),
    "the last answer": (
        NO_MARKER, {"messages": say("Q", "A", "R", "B", "S")}, {"mode": "last"}, ["B<|im_end|>"], ["B"],
    ),
    "hidden thoughts": (
        NO_MARKER_HIDING, {"messages": say("Q", "<t>x</t>A", "R", "B")}, {}, ["<t>x</t>A<|im_end|>", "B<|im_end|>"],
        ["<t>x</t>A", "B"],
    ),
    "every token": (
        NO_MARKER, OPEN, {"mask_prompt": False}, ["ser: Q\nassistant: A<|im_end|>"], ["ser: Q\nassistant: A\n"],
    ),
    "every token, a question at the end": (
        NO_MARKER, {"messages": say("Q", "A", "R")}, {"mask_prompt": False}, *[["ser: Q\nassistant: A\nuser: R\n"]] * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_conversation_trains_an_end_of_sequence(make_tokenizer, name):
    template, row, options, expected, before = ENDS[name]
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    encoded = encode_example(tokenizer, row, **options)
    assert [trained(tokenizer, item) for item in encoded] == expected
    tokenizer.eos_token = None  # nothing is appended, as before
    options.pop("eos_ids", None)
    assert [trained(tokenizer, item) for item in encode_example(tokenizer, row, **options)] == before


def test_appended_end_follows_the_answer_at_once(make_tokenizer):
    tokenizer = make_tokenizer(ALPACA)
    (encoded,) = encode_example(tokenizer, {"messages": say("Q", "A", "R")})
    assert decode(tokenizer, encoded.tokens) == "### Instruction:\nQ\n\n### Response:\nA<|im_end|>"
    (cut,) = fit_length([encoded], len(encoded.tokens) - 1, "cut")
    assert trained(tokenizer, cut) == "A"


def test_tokens_that_reach_over_a_border_are_cut_there(make_tokenizer):
    tokenizer = make_tokenizer(merges=(("Ċ", "Ċ"),))  # "\n\n" is one token
    (encoded,) = encode_example(tokenizer, {"messages": say("Q", "\nA")})
    assert trained(tokenizer, encoded) == "\nA<|im_end|>"
    prompt = encode_prompt(tokenizer, say("Q"))
    assert encoded.tokens[: len(prompt)] == prompt


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(text, min_size=2, max_size=6))
def test_exactly_the_answers_are_trained_whatever_they_hold(tokenizer, contents):
    (encoded,) = encode_example(tokenizer, {"messages": say(*contents)})
    assert trained(tokenizer, encoded) == "".join(f"{content}<|im_end|>" for content in contents[1::2])
    assert not encoded.action_mask[0]


@pytest.mark.feature(64)
def test_the_tail_is_cut_and_nothing_trained_is_dropped(tokenizer):
    row = {"prompt": "ABC", "response": "DE"}
    (encoded,) = fit_length(encode_example(tokenizer, row), 4, "cut")
    assert encoded.action_mask == [False, False, False, True]
    assert fit_length(encode_example(tokenizer, row), 3, "cut") == []
    assert fit_length(encode_example(tokenizer, row, mask_prompt=False), 1, "cut") == []


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (
            {"prompt": "a", "respnse": "b"},
            "unknown key 'respnse'; did you mean 'response'",
        ),
        ({"prompt": "a", "response": 3}, "'response' must be text"),
        ({"messages": say("Q")}, "no assistant turn to train"),
        ({"messages": [{"role": "assistant", "content": "A"}]}, "begins with the assistant"),
        ({"messages": [{"role": "bot", "content": "A"}]}, "unknown role 'bot'"),
        ({"messages": say("Q", "A"), "response": "B"}, "ends with an answer, and also has a 'response'"),
    ],
)
def test_rows_that_cannot_be_encoded(tokenizer, row, what):
    with pytest.raises(DataError, match=what):
        encode_example(tokenizer, row)


def test_a_refusing_template_is_a_data_error(make_tokenizer):
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="the chat template refused the conversation: roles must alternate"):
        encode_example(tokenizer, {"messages": say("Q", "A")})
