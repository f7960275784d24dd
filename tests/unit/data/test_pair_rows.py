# SPDX-License-Identifier: Apache-2.0
"""Chosen and rejected answers as tokens and masks."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.conversation import Counts, encode_prompt
from dlrover.python.rl.data.pairs import (
    PAIR_ROWS,
    encode_pairs,
    normalize_pair,
    pair_prompt,
)
from dlrover.python.rl.data.source import SourceRows

PLAIN = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
ASK = [{"role": "user", "content": "Q"}]


def answer(text):
    return {"role": "assistant", "content": text}


WHOLE = {"chosen": [*ASK, answer("yes")], "rejected": [*ASK, answer("no")]}


def encoded(tokenizer, *rows, **options):
    return encode_pairs(SourceRows("pairs", list(enumerate(rows, start=1))), tokenizer, **options)


def shown(tokenizer, batch):
    """Of each sequence, the prompt and the trained text."""
    pairs = zip(batch.ragged("tokens"), batch.ragged("action_mask"), strict=True)
    return [
        tuple(
            tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for part in (tokens[~mask], tokens[mask])
        )
        for tokens, mask in pairs
    ]


@pytest.mark.feature(72)
def test_raw_pairs_train_both_answers_and_their_ends(tokenizer):
    batch, counts = encoded(tokenizer, {"prompt": "A", "chosen": "BC", "rejected": "D", "tags": ["a"]})
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
def test_every_layout_of_messages_gives_the_same(make_tokenizer, row, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    rows = PAIR_ROWS.read(tmp_path / "p.jsonl")
    tokenizer = make_tokenizer()
    expected, _ = encoded(tokenizer, LAYOUTS[0])
    batch, _ = encode_pairs(rows, tokenizer)
    assert shown(tokenizer, batch) == shown(tokenizer, expected)
    prompt = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, batch) == [(prompt, "yes<|im_end|>"), (prompt, "no<|im_end|>")]


@pytest.mark.feature(73)
def test_messages_with_a_plain_template_equal_raw_text(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    raw, _ = encoded(tokenizer, {"prompt": "Q", "chosen": "yes", "rejected": "no"})
    batch, _ = encoded(tokenizer, LAYOUTS[0])
    for column in ("tokens", "action_mask"):
        assert [row.tolist() for row in batch.ragged(column)] == [row.tolist() for row in raw.ragged(column)]


def test_a_reward_model_scores_the_last_token(tokenizer):
    batch, _ = encoded(tokenizer, {"prompt": "A", "chosen": "BC", "rejected": "D"}, masked="last")
    assert shown(tokenizer, batch) == [("ABC", "<|im_end|>"), ("AD", "<|im_end|>")]


def test_the_last_message_is_an_answer_even_where_the_other_goes_on_from_it(tokenizer):
    longer = [*ASK, answer("yes"), {"role": "user", "content": "R"}, answer("so")]
    batch, _ = encoded(tokenizer, {"chosen": longer, "rejected": [*ASK, answer("yes")]})
    assert [trained for _, trained in shown(tokenizer, batch)] == ["yes<|im_end|>so<|im_end|>", "yes<|im_end|>"]


def test_what_both_say_before_they_differ_is_no_answer(tokenizer):
    begin = [*ASK, answer("so"), {"role": "user", "content": "R"}]
    turns = {"chosen": [*begin[1:], answer("yes")], "rejected": [*begin[1:], answer("no")]}
    apart, _ = encoded(tokenizer, {"messages": ASK, **turns})
    whole, _ = encoded(tokenizer, {"chosen": [*begin, answer("yes")], "rejected": [*begin, answer("no")]})
    assert shown(tokenizer, apart) == shown(tokenizer, whole)
    assert [trained for _, trained in shown(tokenizer, apart)] == ["yes<|im_end|>", "no<|im_end|>"]


def test_pairs_are_told_apart_by_what_they_ask():
    asks = {str(pair_prompt(normalize_pair(row))) for row in LAYOUTS}
    assert asks == {str(ASK)}
    later = [*ASK, answer("so"), {"role": "user", "content": "R"}]
    assert pair_prompt({"chosen": [*later, answer("yes")], "rejected": [*later, answer("no")]}) == ASK
    assert pair_prompt({"prompt": "Q", "chosen": "yes", "rejected": "no"}) == "Q"
    greeted = [answer("Hello"), *ASK]
    assert pair_prompt({"chosen": [*greeted, answer("yes")], "rejected": [*greeted, answer("no")]}) == greeted


@pytest.mark.feature(71)
def test_answers_that_a_template_rewrites_later_cannot_be_a_pair(make_tokenizer):
    hiding = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(hiding)
    thought = answer("<think>t</think>B")
    good, _ = encoded(tokenizer, {"chosen": [*ASK, thought], "rejected": [*ASK, answer("<think>u</think>C")]})
    assert [trained for _, trained in shown(tokenizer, good)] == [
        "<think>t</think>B<|im_end|>",
        "<think>u</think>C<|im_end|>",
    ]
    with pytest.raises(DataError, match="pairs:1: the chat template changes an answer"):
        encoded(tokenizer, {"messages": ASK, "chosen": [thought, *ASK, thought], "rejected": "C"})


@pytest.mark.feature(64)
def test_pairs_that_are_too_long(tokenizer, tmp_path):
    rows = [
        {"prompt": "A", "chosen": "BCD", "rejected": "E"},
        {"prompt": "A", "chosen": "BCDEF", "rejected": "BCDEG"},
        {"prompt": "AAAAA", "chosen": "B", "rejected": "C"},
        {"prompt": "A", "chosen": "B", "rejected": "B"},
        {"prompt": "A", "chosen": "BCDEF", "rejected": "C"},
    ]
    cut, counts = encoded(tokenizer, *rows, max_length=5)
    assert counts == Counts(rows=5, cut=1, dropped=3)
    assert cut.dense("row").tolist() == [0, 0, 4, 4]
    assert shown(tokenizer, cut)[2:] == [("A", "BCDE"), ("A", "C<|im_end|>")]
    dropped, counts = encoded(tokenizer, *rows, max_length=5, over_long="drop")
    assert (dropped.dense("row").tolist(), counts) == ([0, 0], Counts(5, 0, 4))
    with pytest.raises(DataError, match=r"pairs:2: 7 tokens, 5 at most\npairs:3: 7 tokens"):
        encoded(tokenizer, *rows, max_length=5, over_long="refuse")
    with pytest.raises(DataError, match="no pair is left; dropped: 1 at 2 tokens"):
        encoded(tokenizer, rows[1], max_length=2)
    with pytest.raises(DataError, match=r"dropped: 2 with equal answers, 1 at 2 tokens"):
        encoded(tokenizer, rows[3], rows[1], rows[3], max_length=2)


def test_a_source_of_equal_pairs_alone_is_refused_when_it_is_read(tmp_path):
    equal, pair = ({"prompt": "A", "chosen": "B", "rejected": side} for side in "BC")
    source = tmp_path / "pairs.jsonl"
    source.write_text(f"{json.dumps(equal)}\n" * 2)
    (fault,) = PAIR_ROWS.scan(source)[1]
    assert (fault.where, fault.what[:39]) == (str(source), "in every row 'chosen' equals 'rejected'")
    source.write_text(f"{json.dumps(equal)}\n{json.dumps(pair)}\n")
    assert PAIR_ROWS.scan(source)[1] == []


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "chosen": "b"}, "needs 'chosen' and 'rejected'; it has prompt, chosen"),
        ({"prompt": "a", "chosen": "b\ud83d", "rejected": "c"}, "'chosen' has a lone surrogate at character 2"),
        ({"prompt": "a", "chosen": "b", "rejected": [answer("c")]}, "'rejected' must be text"),
        ({"chosen": "a", "rejected": "b"}, "'chosen' is text, but there is neither 'prompt' nor 'messages'"),
        ({"messages": ASK, "chosen": ASK, "rejected": "b"}, "'chosen' must end with the assistant's answer"),
        ({"messages": ASK, "chosen": [], "rejected": "b"}, "'chosen' must be a list of messages with at least one"),
        ({"messages": [{"role": "usr", "content": ""}], "chosen": "a", "rejected": "b"}, "did you mean 'user'"),
        (
            {"chosen": [answer("a")], "rejected": [answer("b")]},
            "'chosen' and 'rejected' do not begin with the same messages",
        ),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "'prompt' must be text or a list of messages"),
        (
            {"messages": [*ASK, answer("a")], "chosen": "a", "rejected": "b"},
            "'messages' end with the assistant's turn, and 'chosen' begins with another",
        ),
        (
            {"messages": WHOLE["chosen"], "chosen": WHOLE["chosen"], "rejected": "b"},
            "'messages' end with the assistant's turn, and 'rejected' begins with another",
        ),
        (
            {"messages": [{"role": "user", "content": "R"}], **WHOLE},
            "'chosen' neither begins with 'messages' nor continues them with an answer",
        ),
        ({"prompt": "R", **WHOLE}, "'prompt' is not a user's text in the shared part"),
        ({"prompt": "R", "messages": ASK, "chosen": "a", "rejected": "b"}, "'prompt' is not a user's text"),
        (
            {"prompt": ASK, "messages": [{"role": "user", "content": "R"}], "chosen": "a", "rejected": "b"},
            "'prompt' and 'messages' are different conversations: leave one of them out",
        ),
    ],
)
def test_rows_that_are_no_pairs(tmp_path, row, what):
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    problem, *_ = PAIR_ROWS.scan(tmp_path / "p.jsonl")[1]
    assert problem.where == f"{tmp_path}/p.jsonl:1"
    assert what in problem.what
    with pytest.raises(DataError):
        PAIR_ROWS.read(tmp_path / "p.jsonl")


text = st.text(alphabet=st.sampled_from("aä漢🙂 \n<|assistant"), max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(text, text, text)
def test_both_sides_begin_with_the_tokens_of_inference(make_tokenizer, question, chosen, rejected):
    tokenizer = make_tokenizer(merges=(("Ċ", "Ċ"), ("a", "a"), ("Ċ", "a")))
    messages = [{"role": "user", "content": question}]
    if chosen == rejected:
        rejected = f"{chosen}x"
    batch, _ = encoded(tokenizer, {"messages": messages, "chosen": chosen, "rejected": rejected})
    prompt = encode_prompt(tokenizer, messages)
    for tokens, mask in zip(batch.ragged("tokens"), batch.ragged("action_mask"), strict=True):
        assert tokens[: len(prompt)].tolist() == prompt
        assert not mask[: len(prompt)].any()
        assert mask[len(prompt) :].all()
    assert [trained for _, trained in shown(tokenizer, batch)] == [f"{chosen}<|im_end|>", f"{rejected}<|im_end|>"]
