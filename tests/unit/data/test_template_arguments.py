# SPDX-License-Identifier: Apache-2.0
"""A row's ``tools`` and ``chat_template_kwargs``, and the job's, reach the chat template; other columns are named."""

import json

import pytest

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.conversation import SFT_ROWS, arguments_of_template, encode_example
from dlrover.python.rl.data.pairs import PAIR_ROWS, encode_pair
from dlrover.python.rl.data.prompts import PROMPT_ROWS, load_prompts

TOOL_TEMPLATE = (
    "{% if tools %}Tools:{% for t in tools %} {{ t.function.name }}{% endfor %}. {% endif %}"
    "{% if thinking is defined %}thinking={{ thinking }}. {% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
ASK, SAY, NO = (
    {"role": role, "content": text} for role, text in [("user", "Q"), ("assistant", "A"), ("assistant", "B")]
)
SFT_ROW, PAIR_ROW = {"messages": [ASK, SAY]}, {"prompt": [ASK], "chosen": [SAY], "rejected": [NO]}
PLAIN_CHAT = "<user>Q<|im_end|><assistant>A<|im_end|>"

ROWS = {
    "SFT_ROW": SFT_ROW,
    "SFT, prompt and completion": {"prompt": [ASK], "completion": [SAY]},
    "SFT, prompt and text": {"prompt": [ASK], "response": "A"},
    "pair": PAIR_ROW,
    "pair, whole conversations": {"chosen": [ASK, SAY], "rejected": [ASK, NO]},
    "pair, texts after messages": {"messages": [ASK], "chosen": "A", "rejected": "B"},
}
ARGUMENTS = {
    # the row's, the job's, and what the text begins with
    "tools": ({"tools": TOOLS}, {}, "Tools: tide. "),
    "tools as JSON text": ({"tools": json.dumps(TOOLS)}, {}, "Tools: tide. "),
    "no tools": ({"tools": []}, {}, ""),
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


def write(folder, kind, rows):
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_template_arguments_stay_with_prompts(tmp_path, kind):
    other = [{"type": "function", "function": {"name": "moon", "parameters": {"required": ["day"]}}}]
    rows = [{"messages": [ASK], "tools": tools, "source": "web"} for tools in (TOOLS, other)]
    loaded = load_prompts(write(tmp_path, kind, rows))
    names = [[tool["function"] for tool in arguments_of_template(row.extra_info)["tools"]] for row in loaded]
    assert [function["name"] for (function,) in names] == ["tide", "moon"]
    assert "required" not in names[0][0]["parameters"], "a null of the table"
    assert [row.extra_info["source"] for row in loaded] == ["web", "web"]
    (text,) = load_prompts(write(tmp_path, "jsonl", [{"prompt": "Q", "tools": "hammer"}]))
    assert (text.extra_info, arguments_of_template(text.extra_info)) == ({"tools": "hammer"}, {})
    (error,) = PROMPT_ROWS.scan(write(tmp_path, "jsonl", [{"messages": [ASK], "tools": "hammer"}]))[1]
    assert "'tools' must be a list of" in error.what


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("reader", "row", "keys", "unused"),
    [
        (SFT_ROWS, {**SFT_ROW, "id": "1", "tool": "x"}, {}, ["id", "tool (did you mean 'tools'?)"]),
        (SFT_ROWS, {"prompt": "Q", "response": "A", "prompt_id": "1"}, {}, ["prompt_id"]),
        (PAIR_ROWS, {**PAIR_ROW, "score_chosen": 1.0}, {"source": "score_chosen"}, ["source"]),
        (PAIR_ROWS, PAIR_ROW, {}, []),
        (PROMPT_ROWS, {"prompt": "Q", "answer": "A", "level": "1"}, {}, []),
    ],
)
def test_unread_columns_are_named(tmp_path, kind, reader, row, keys, unused):
    assert reader.read(write(tmp_path, kind, [row, row]), keys).unused == unused
