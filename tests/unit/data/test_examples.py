# SPDX-License-Identifier: Apache-2.0
"""From data files to a batch of examples."""

import json

import numpy as np
import pytest

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.conversation import (
    SFT_ROWS,
    Counts,
    Encoding,
    collect_sft,
    encode_example,
    encode_sft,
    normalize_sft,
    sft_prompt,
)

USER = [{"role": "user", "content": "2+2?"}]
ANSWERED = [*USER, {"role": "assistant", "content": "4"}]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def masks(batch):
    return [row.tolist() for row in batch.ragged("action_mask")]


def test_a_file_becomes_one_batch_and_dropped_rows_are_counted(tokenizer, tmp_path):
    rows = [{"prompt": "A", "response": "BC"}, {"prompt": "long" * 5, "response": "x"}, {"prompt": "D", "response": ""}]
    path = write(tmp_path / "sft.jsonl", rows)
    batch, counts = encode_sft(SFT_ROWS.read(path), tokenizer, Encoding(max_length=8))
    assert (len(batch), counts) == (2, Counts(rows=3, cut=0, dropped=1))
    assert batch.ragged("tokens").values.dtype == np.int64
    assert masks(batch) == [[False, True, True, True], [False, True]]
    assert batch.dense("row").tolist() == [0, 2]
    with pytest.raises(DataError, match="no row with a trained token; 3 dropped at 1 tokens"):
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
def test_trls_rows_are_examples(row, read):
    assert normalize_sft(row) == read


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "A", "response": "B\ud83d"}, "'response' has a lone surrogate at character 2"),
        ({"messages": USER, "answer": "\udc00"}, "messages[1]: 'content' has a lone surrogate at character 1"),
    ],
)
def test_half_a_character_is_named_with_its_row(row, what, tmp_path):
    path = write(tmp_path / "sft.jsonl", [{"prompt": "A", "response": "B"}, row])
    assert [str(error) for error in SFT_ROWS.scan(path)[1]] == [f"{path}:2: {what}"]


def test_texts_without_prompts_are_different_examples(tokenizer):
    assert [sft_prompt(normalize_sft({"text": text})) for text in ("AB", "CD", "AB")] == ["AB", "CD", "AB"]
    (encoded,) = encode_example(tokenizer, {"text": "ABC"})
    assert encoded.action_mask == [False, True, True, True]


@pytest.mark.feature(64)
@pytest.mark.parametrize(
    ("over_long", "sequences", "counts"),
    [("cut", [2, 5, 5], Counts(4, 2, 1)), ("drop", [2], Counts(4, 0, 3))],
)
def test_rows_that_are_too_long_are_cut_or_dropped_and_counted(tokenizer, tmp_path, over_long, sequences, counts):
    rows = [{"prompt": "A", "response": text} for text in ("", "BCDE", "BCDEF")] + [{"prompt": "A" * 5, "response": ""}]
    path = write(tmp_path / "sft.jsonl", rows)
    batch, found = encode_sft(SFT_ROWS.read(path), tokenizer, Encoding(max_length=5, over_long=over_long))
    assert batch.ragged("tokens").lengths.tolist() == sequences
    assert found == counts
    assert all(any(mask) for mask in masks(batch))


@pytest.mark.feature(64)
def test_rows_that_are_too_long_can_be_refused(tokenizer, tmp_path):
    path = write(tmp_path / "sft.jsonl", [{"prompt": "A", "response": "B" * size} for size in (1, 9, 2, 10)])
    with pytest.raises(DataError) as caught:
        encode_sft(SFT_ROWS.read(path), tokenizer, Encoding(max_length=5, over_long="refuse"))
    assert [str(problem) for problem in caught.value.errors] == [
        f"{path}:2: 11 tokens, 5 at most",
        f"{path}:4: 12 tokens, 5 at most",
    ]


def test_all_bad_rows_of_a_file_are_reported_together(tmp_path):
    path = tmp_path / "sft.jsonl"
    path.write_text('{"prompt": "A"}\n{"prompt": "A", "response": "B"}\n{"messages": 1}\n?\n')
    with pytest.raises(DataError) as caught:
        SFT_ROWS.read(path)
    assert [problem.where for problem in caught.value.errors] == [f"{path}:{line}" for line in (1, 3, 4)]
    assert SFT_ROWS.scan(path)[1] == list(caught.value.errors)


@pytest.mark.feature(77)
@pytest.mark.parametrize(
    "row",
    [
        {"messages": ANSWERED},
        {"prompt": ANSWERED, "answer": "ignored: the conversation has one"},
        {"prompt": USER, "answer": 4},
        {"prompt": USER, "answer": "4"},
        {"messages": USER, "response": "4"},
        {"messages": ANSWERED, "answer": None},
    ],
)
def test_every_way_to_write_a_question_and_its_answer(tokenizer, row):
    expected, _ = encode_sft(collect_sft([{"messages": ANSWERED}]), tokenizer)
    batch, _ = encode_sft(collect_sft([row]), tokenizer)
    assert batch.ragged("tokens")[0].tolist() == expected.ragged("tokens")[0].tolist()
    assert masks(batch) == masks(expected)


@pytest.mark.feature(77)
def test_samples_may_be_objects(tokenizer):
    class Sample:
        def __init__(self):
            self.prompt, self.answer = USER, 4

    class Samples:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return Sample()

    rows = collect_sft(Samples())
    assert rows[0]["messages"] == ANSWERED
    assert len(encode_sft(rows, tokenizer)[0]) == 2
    with pytest.raises(DataError, match="samples:1: no assistant turn to train"):
        collect_sft([{"prompt": USER}])


def test_questions_are_told_apart_by_what_comes_before_the_first_answer():
    rows = collect_sft([{"messages": ANSWERED}, {"messages": [*USER, {"role": "assistant", "content": "5"}]}])
    assert sft_prompt(rows[0]) == sft_prompt(rows[1]) == USER
    assert sft_prompt({"prompt": "A", "response": "B"}) == "A"
