# SPDX-License-Identifier: Apache-2.0
"""Rows of data files: examples, prompts, pairs."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from test_conversation import HIDING, decode, text

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.conversation import (
    SFT_ROWS,
    Counts,
    Encoding,
    collect_sft,
    encode_example,
    encode_prompt,
    encode_sft,
    normalize_sft,
    sft_prompt,
)
from dlrover.python.rl.data.pairs import PAIR_ROWS, encode_pairs, normalize_pair, pair_prompt
from dlrover.python.rl.data.prompts import PROMPT_ROWS, PromptRow, empty_prompts, load_prompts
from dlrover.python.rl.data.source import SourceRows
from tests.support.run_files import write_rows

USER = [{"role": "user", "content": "2+2?"}]
ANSWERED = [*USER, {"role": "assistant", "content": "4"}]


def masks(batch):
    return [row.tolist() for row in batch.ragged("action_mask")]


def test_sft_file_becomes_one_batch(tokenizer, tmp_path):
    rows = [{"prompt": "A", "response": "BC"}, {"prompt": "long" * 5, "response": "x"}, {"prompt": "D", "response": ""}]
    path = write_rows(tmp_path / "sft.jsonl", rows)
    batch, counts = encode_sft(SFT_ROWS.read(path), tokenizer, Encoding(max_length=8))
    assert (len(batch), counts) == (2, Counts(rows=3, cut=0, dropped=1))
    assert batch.ragged("tokens").values.dtype == np.int64
    assert masks(batch) == [[False, True, True, True], [False, True]]
    assert batch.dense("row").tolist() == [0, 2]
    with pytest.raises(DataError, match="no row has a token to train on within 1 tokens; all 3 were dropped"):
        encode_sft(SFT_ROWS.read(path), tokenizer, Encoding(max_length=1))


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"prompt": "A", "completion": "B"}, {"prompt": "A", "response": "B"}),
        ({"prompt": USER, "completion": ANSWERED[1:]}, {"messages": ANSWERED}),
        ({"prompt": USER, "completion": "4"}, {"messages": ANSWERED}),
        ({"text": "AB"}, {"prompt": "", "response": "AB"}),
    ],
)
def test_sft_rows_may_be_trls(row, read):
    assert normalize_sft(row) == read


def test_sft_row_with_half_a_character_is_named(tmp_path):
    rows = [{"prompt": "A", "response": "B\ud83d"}, {"messages": USER, "answer": "\udc00"}]
    path = write_rows(tmp_path / "sft.jsonl", rows)
    faults = ("1: 'response' has a lone surrogate at character 2", "2: messages[1]: 'content' has a lone surrogate")
    for error, fault in zip(SFT_ROWS.scan(path)[1], faults, strict=True):
        assert str(error).startswith(f"{path}:{fault}")


def test_sft_prompt_is_the_text_before_the_first_answer(tokenizer):
    rows = collect_sft([{"messages": ANSWERED}, {"messages": [*USER, {"role": "assistant", "content": "5"}]}])
    assert sft_prompt(rows[0]) == sft_prompt(rows[1]) == USER
    assert sft_prompt({"prompt": "A", "response": "B"}) == "A"
    assert [sft_prompt(normalize_sft({"text": text})) for text in ("AB", "CD", "AB")] == ["AB", "CD", "AB"]
    (encoded,) = encode_example(tokenizer, {"text": "ABC"})
    assert encoded.action_mask == [False, True, True, True]


@pytest.mark.feature(64)
@pytest.mark.parametrize(("over_long", "lengths", "counts"), [("cut", [2, 5, 5], (4, 2, 1)), ("drop", [2], (4, 0, 3))])
def test_sft_rows_too_long_are_cut_or_dropped(tokenizer, tmp_path, over_long, lengths, counts):
    rows = [{"prompt": "A", "response": text} for text in ("", "BCDE", "BCDEF")] + [{"prompt": "A" * 5, "response": ""}]
    path = write_rows(tmp_path / "sft.jsonl", rows)
    batch, counted = encode_sft(SFT_ROWS.read(path), tokenizer, Encoding(max_length=5, over_long=over_long))
    assert batch.ragged("tokens").lengths.tolist() == lengths
    assert counted == Counts(*counts)
    assert all(any(mask) for mask in masks(batch))


@pytest.mark.feature(64)
def test_sft_rows_too_long_can_be_refused(tokenizer, tmp_path):
    path = write_rows(tmp_path / "sft.jsonl", [{"prompt": "A", "response": "B" * size} for size in (1, 9, 2, 10)])
    with pytest.raises(DataError) as caught:
        encode_sft(SFT_ROWS.read(path), tokenizer, Encoding(max_length=5, over_long="refuse"))
    assert [*map(str, caught.value.errors)] == [f"{path}:{row}: {n} tokens, 5 at most" for row, n in ((2, 11), (4, 12))]


@pytest.mark.feature(77)
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ANSWERED, "answer": "ignored: the conversation has one"},
        {"prompt": USER, "answer": 4},
        {"prompt": USER, "answer": "4"},
        {"messages": USER, "response": "4"},
        {"messages": ANSWERED, "answer": None},
    ],
)
def test_sft_rows_may_have_any_layout(tokenizer, row):
    expected, _ = encode_sft(collect_sft([{"messages": ANSWERED}]), tokenizer)
    batch, _ = encode_sft(collect_sft([row]), tokenizer)
    assert batch.ragged("tokens")[0].tolist() == expected.ragged("tokens")[0].tolist()
    assert masks(batch) == masks(expected)


@pytest.mark.feature(77)
def test_sft_samples_may_be_objects(tokenizer):
    rows = collect_sft([SimpleNamespace(prompt=USER, answer=4)] * 2)
    assert rows[0]["messages"] == ANSWERED
    assert len(encode_sft(rows, tokenizer)[0]) == 2
    with pytest.raises(DataError, match="samples:1: no assistant turn to train"):
        collect_sft([{"prompt": USER}])


CALL = {"function": {"name": "f", "arguments": {}}}


def calling(call):
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def test_prompt_rows_of_texts_and_messages(tmp_path):
    samples = [
        {"prompt": "1+1=", "answer": 2},
        {"messages": USER, "answer": "2", "extra_info": {"idx": 7}},
        {"prompt": "x", "extra_info": {"answer": 0.5}},
    ]
    path = write_rows(tmp_path / "p.jsonl", samples)
    rows = [("1+1=", "2", {}), (USER, "2", {"idx": 7}), ("x", "0.5", {"answer": 0.5})]
    assert load_prompts(path) == [PromptRow(*row) for row in rows]
    assert PROMPT_ROWS.scan(path)[1] == []


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"answer": "2"}, "has no 'prompt' or 'messages'; it has answer"),
        ({"prompt": "a", "messages": USER}, "give 'prompt' or 'messages', not both"),
        ({"promt": "a"}, "unknown key 'promt'; did you mean 'prompt'?"),
        ({"prompt": 3}, "'prompt' must be text and not empty, or a list of messages"),
        ({"prompt": "a", "answer": 1, "extra_info": {"answer": 2}}, "'answer' and 'extra_info.answer' differ"),
        ({"prompt": "a", "extra_info": []}, "'extra_info' must be an object"),
        ({"messages": ["hi"]}, "messages[0]: must be an object with 'role' and 'content', not str"),
        ({"messages": [{"role": "usr", "content": ""}]}, "messages[0]: unknown role 'usr'; did you mean 'user'?"),
        ({"messages": [{"role": 1, "content": ""}]}, "messages[0]: 'role' must be text"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]: 'content' must be text"),
        ({"messages": [*USER, {**USER[0], "contnt": 1}]}, "messages[1]: unknown key 'contnt'; did you mean 'content'?"),
        ({"prompt": "ab\ud83d"}, "'prompt' has a lone surrogate at character 3"),
        (calling({**CALL, "id": "\udc00"}), "messages[0]: a text in 'tool_calls' has a lone surrogate at character 1"),
        (calling({}), 'messages[0]: tool_calls[0]: must be {"function": {"name": ..., "arguments": {...}}}'),
    ],
)
def test_prompt_row_with_a_fault_is_refused(tmp_path, row, fault):
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "fine"}, row])
    (problem,) = PROMPT_ROWS.scan(path)[1]
    assert (problem.where, problem.what) == (f"{path}:2", fault)


def test_prompt_messages_may_have_calls_of_tools(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    conversation = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answered = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"}
    (row,) = load_prompts(write_rows(tmp_path / "p.jsonl", [{"messages": [*conversation, answered]}]))
    assert row.prompt == [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answered]


@pytest.mark.feature(74)
@pytest.mark.parametrize(
    ("row", "answer", "extra_info"),
    [
        ({"id": 3, "data_source": "gsm8k"}, None, {"id": 3, "data_source": "gsm8k"}),
        ({"answer": "2", "tags": ["a", {"b": 1}]}, "2", {"tags": ["a", {"b": 1}]}),
        ({"answer": ["2", "two"]}, None, {"answer": ["2", "two"]}),
        ({"answer": True}, None, {"answer": True}),
        ({"extra_info": {"answer": {"numbers": [1, 2]}}}, None, {"answer": {"numbers": [1, 2]}}),
        ({"answer": "2", "extra_info": {"answer": 2, "n": 1}, "n": 9}, "2", {"answer": 2, "n": 1}),
        ({"extra_info": None}, None, {}),
    ],
)
def test_prompt_row_keeps_other_columns_unchanged(tmp_path, row, answer, extra_info):
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a", **row}])
    assert load_prompts(path) == [PromptRow("a", answer, extra_info)]


def test_prompt_rows_with_faults_are_reported_together(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"answer": 1, "prmpt": "a"}\nnot json\n{"prompt": "fine"}\n{"prompt": 3}\n')
    with pytest.raises(DataError) as caught:
        load_prompts(path)
    assert [problem.where for problem in caught.value.errors] == [f"{path}:{line}" for line in (1, 2, 4)]
    assert PROMPT_ROWS.scan(path)[1] == list(caught.value.errors)
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        load_prompts(path)


@pytest.mark.feature(75)
def test_empty_prompts_have_seeds():
    rows = empty_prompts(3)
    assert rows == [PromptRow("", None, {"seed": number}) for number in range(3)]
    assert rows[0].extra_info is not rows[1].extra_info
    with pytest.raises(ValueError, match="count must be at least 1, not 0"):
        empty_prompts(0)


ASK, OTHER = ([{"role": "user", "content": text}] for text in "QR")


def answer(text):
    return {"role": "assistant", "content": text}


WHOLE = {"chosen": [*ASK, answer("yes")], "rejected": [*ASK, answer("no")]}


def encode_rows(tokenizer, *rows, **options):
    return encode_pairs(SourceRows("pairs", list(enumerate(rows, start=1))), tokenizer, **options)


def shown(tokenizer, batch):
    """The prompt and the trained text of each sequence."""
    pairs = zip(batch.ragged("tokens"), batch.ragged("action_mask"), strict=True)
    return [(decode(tokenizer, tokens[~mask]), decode(tokenizer, tokens[mask])) for tokens, mask in pairs]


@pytest.mark.feature(72)
def test_pairs_of_texts_train_both_answers_and_ends(tokenizer):
    batch, counts = encode_rows(tokenizer, {"prompt": "A", "chosen": "BC", "rejected": "D", "tags": ["a"]})
    assert shown(tokenizer, batch) == [("A", "BC<|im_end|>"), ("A", "D<|im_end|>")]
    assert batch.dense("row").tolist() == [0, 0]
    assert counts == Counts(1, 0, 0)


LAYOUTS = [
    {"messages": ASK, "chosen": "yes", "rejected": "no"},
    {"prompt": ASK, "chosen": "yes", "rejected": "no"},
    {"messages": ASK, "chosen": [answer("yes")], "rejected": [answer("no")]},
    WHOLE,
    {"prompt": "Q", **WHOLE},
    {"prompt": ASK, **WHOLE},
    {"messages": ASK, **WHOLE},
    {"messages": ASK, "chosen": WHOLE["chosen"], "rejected": "no"},
    {"prompt": "Q", "messages": ASK, "chosen": "yes", "rejected": "no"},
    {"prompt": ASK, "messages": ASK, "chosen": "yes", "rejected": [answer("no")]},
    {"prompt": ASK, "messages": [*ASK, answer("yes")], "chosen": "yes", "rejected": "no"},
    {"prompt": "Q", "messages": WHOLE["chosen"], **WHOLE, "score_chosen": 8.0},  # UltraFeedback's
]


@pytest.mark.feature(73)
@pytest.mark.parametrize("row", LAYOUTS)
def test_pairs_of_every_layout_are_the_same(make_tokenizer, row, tmp_path):
    rows = PAIR_ROWS.read(write_rows(tmp_path / "p.jsonl", [row]))
    tokenizer = make_tokenizer()
    batch, _ = encode_pairs(rows, tokenizer)
    prompt = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, batch) == [(prompt, "yes<|im_end|>"), (prompt, "no<|im_end|>")]


def test_pairs_for_a_reward_model_train_the_last_token(tokenizer):
    batch, _ = encode_rows(tokenizer, {"prompt": "A", "chosen": "BC", "rejected": "D"}, masked="last")
    assert shown(tokenizer, batch) == [("ABC", "<|im_end|>"), ("AD", "<|im_end|>")]


def test_pair_prompt_is_the_shared_question():
    asks = {str(pair_prompt(normalize_pair(row))) for row in LAYOUTS}
    assert asks == {str(ASK)}
    later = [*ASK, answer("so"), *OTHER]
    assert pair_prompt({"chosen": [*later, answer("yes")], "rejected": [*later, answer("no")]}) == ASK
    assert pair_prompt({"prompt": "Q", "chosen": "yes", "rejected": "no"}) == "Q"
    greeted = [answer("Hello"), *ASK]
    assert pair_prompt({"chosen": [*greeted, answer("yes")], "rejected": [*greeted, answer("no")]}) == greeted


@pytest.mark.feature(71)
def test_pairs_rewritten_by_a_template_are_refused(make_tokenizer):
    tokenizer = make_tokenizer(HIDING)
    thought = answer("<think>t</think>B")
    good, _ = encode_rows(tokenizer, {"chosen": [*ASK, thought], "rejected": [*ASK, answer("<think>u</think>C")]})
    texts = ("<think>t</think>B", "<think>u</think>C")
    assert [trained for _, trained in shown(tokenizer, good)] == [f"{text}<|im_end|>" for text in texts]
    with pytest.raises(DataError, match="pairs:1: the chat template changes an answer"):
        encode_rows(tokenizer, {"messages": ASK, "chosen": [thought, *ASK, thought], "rejected": "C"})


@pytest.mark.feature(64)
def test_pairs_too_long_are_cut_dropped_or_refused(tokenizer, tmp_path):
    texts = [("A", "BCD", "E"), ("A", "BCDEF", "BCDEG"), ("AAAAA", "B", "C"), ("A", "B", "B"), ("A", "BCDEF", "C")]
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in texts]
    cut, counts = encode_rows(tokenizer, *rows, max_length=5)
    assert counts == Counts(rows=5, cut=1, dropped=3)
    assert cut.dense("row").tolist() == [0, 0, 4, 4]
    assert shown(tokenizer, cut)[2:] == [("A", "BCDE"), ("A", "C<|im_end|>")]
    dropped, counts = encode_rows(tokenizer, *rows, max_length=5, over_long="drop")
    assert (dropped.dense("row").tolist(), counts) == ([0, 0], Counts(5, 0, 4))
    with pytest.raises(DataError, match=r"pairs:2: 7 tokens, 5 at most\npairs:3: 7 tokens"):
        encode_rows(tokenizer, *rows, max_length=5, over_long="refuse")
    with pytest.raises(DataError, match="no pair is left; dropped: 1 too long for 2 tokens"):
        encode_rows(tokenizer, rows[1], max_length=2)
    with pytest.raises(DataError, match=r"dropped: 2 with equal answers, 1 too long for 2 tokens"):
        encode_rows(tokenizer, rows[3], rows[1], rows[3], max_length=2)


def test_pairs_all_with_equal_answers_are_refused(tmp_path):
    equal, pair = ({"prompt": "A", "chosen": "B", "rejected": side} for side in "BC")
    source = write_rows(tmp_path / "pairs.jsonl", [equal, equal])
    (fault,) = PAIR_ROWS.scan(source)[1]
    assert (fault.where, fault.what[:39]) == (source, "in every row 'chosen' equals 'rejected'")
    assert PAIR_ROWS.scan(write_rows(tmp_path / "pairs.jsonl", [equal, pair]))[1] == []


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "a", "chosen": "b"}, "needs 'chosen' and 'rejected'; it has prompt, chosen"),
        ({"prompt": "a", "chosen": "b\ud83d", "rejected": "c"}, "'chosen' has a lone surrogate at character 2"),
        ({"prompt": "a", "chosen": "b", "rejected": [answer("c")]}, "'rejected' must be text"),
        ({"chosen": "a", "rejected": "b"}, "'chosen' is text, but there is neither 'prompt' nor 'messages'"),
        ({"messages": ASK, "chosen": ASK, "rejected": "b"}, "'chosen' must end with the assistant's answer"),
        ({"chosen": [answer("a")], "rejected": [answer("b")]}, "do not begin with the same messages"),
        ({"messages": [*ASK, answer("a")], "chosen": "a", "rejected": "b"}, "so 'chosen' must not begin with one"),
        ({"messages": OTHER, **WHOLE}, "'chosen' neither begins with 'messages' nor continues them with an answer"),
        ({"prompt": "R", **WHOLE}, "'prompt' is not a user message shared by 'chosen' and 'rejected'"),
        ({"prompt": ASK, "messages": OTHER, "chosen": "a", "rejected": "b"}, "and 'messages' are different conversati"),
    ],
)
def test_pair_row_with_a_fault_is_refused(tmp_path, row, fault):
    path = write_rows(tmp_path / "p.jsonl", [row])
    problem, *_ = PAIR_ROWS.scan(path)[1]
    assert problem.where == f"{path}:1" and fault in problem.what
    with pytest.raises(DataError):
        PAIR_ROWS.read(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(text, text, text)
def test_pairs_begin_with_the_tokens_of_inference(make_tokenizer, question, chosen, rejected):
    tokenizer = make_tokenizer(merges=(("Ċ", "Ċ"), ("a", "a"), ("Ċ", "a")))
    messages = [{"role": "user", "content": question}]
    if chosen == rejected:
        rejected = f"{chosen}x"
    batch, _ = encode_rows(tokenizer, {"messages": messages, "chosen": chosen, "rejected": rejected})
    prompt = encode_prompt(tokenizer, messages)
    for tokens, mask in zip(batch.ragged("tokens"), batch.ragged("action_mask"), strict=True):
        assert tokens[: len(prompt)].tolist() == prompt
        assert mask.tolist() == [False] * len(prompt) + [True] * (len(mask) - len(prompt))
    assert [trained for _, trained in shown(tokenizer, batch)] == [f"{chosen}<|im_end|>", f"{rejected}<|im_end|>"]
