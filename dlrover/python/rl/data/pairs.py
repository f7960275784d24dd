"""Pairs of a chosen and a rejected answer, for reward models and for DPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.conversation import Encoded, Tokenizer, answer_span, encode_pieces, encode_raw
from dlrover.python.rl.data.examples import Counts, OverLong, as_batch
from dlrover.python.rl.data.jsonl import in_line_order, raise_problems
from dlrover.python.rl.data.messages import message_faults
from dlrover.python.rl.data.source import Rows, scan_rows

_KEYS = ("prompt", "messages", "chosen", "rejected")

Masked: TypeAlias = Literal["answer", "last"]
"""Where the mask of a pair's sequences is set: on every token of the answer (DPO), or on the last token alone, where a
reward model gives its score."""


@dataclass(frozen=True)
class PairEncoding:
    """How pairs become tokens."""

    max_length: int | None = None
    """Tokens of each of the two sequences at most."""

    over_long: OverLong = "cut"
    """What becomes of a pair of which one is longer. A cut that leaves an answer without a token drops the pair."""

    masked: Masked = "answer"
    """What the mask covers."""


def read_pairs(where: str | Path, keys: Mapping[str, str] | None = None) -> Rows:
    """The pairs of a source, each in one of these forms:

    * ``prompt``, ``chosen`` and ``rejected``: texts;
    * ``messages`` (or a list under ``prompt``), ``chosen`` and ``rejected``: a conversation, and for each side a text
      or a list of the messages that go on from there;
    * ``chosen`` and ``rejected`` alone: lists of messages, whole conversations that begin alike.

    Raises:
        DataError: a row is no pair, or there is none; names every row that is wrong (20 at most).
    """
    rows, problems = _scan(where, keys)
    if problems:
        raise_problems(problems)
    return rows


def check_pairs(where: str | Path, keys: Mapping[str, str] | None = None) -> list[Problem]:
    """What :func:`read_pairs` would refuse the source for; empty when it would not."""
    return _scan(where, keys)[1]


def encode_pairs(rows: Rows, tokenizer: Tokenizer, encoding: PairEncoding | None = None) -> tuple[Batch, Counts]:
    """Encode pairs.

    Both sequences of a pair begin with the same tokens, those of the prompt as inference sees it; then comes the answer
    with its end marker. Of messages that go on for several turns every assistant turn is part of the answer. A pair
    whose sequences are the same, or have become so by a cut, teaches nothing and is dropped.

    Returns:
        Sequences ``2 * i`` (chosen) and ``2 * i + 1`` (rejected) are pair ``i``: ragged ``tokens`` (int64) and
        ``action_mask`` (bool), both ``[2 * pairs, seq]``, and ``row`` (int64), the index of the row each is from.

    Raises:
        DataError: names every row that cannot be used (20 at most); or none is left.
    """
    how = encoding if encoding is not None else PairEncoding()
    kept: list[Encoded] = []
    from_row: list[int] = []
    problems: list[Problem] = []
    cut = 0
    for index, row in enumerate(rows):
        try:
            whole = encode_pair(tokenizer, row)
            pair = _fitted(whole, how)
        except DataError as error:
            problems += [Problem(rows.place(index), problem.what) for problem in error.problems]
            continue
        if pair is not None:
            kept += [_masked(item, how.masked) for item in pair]
            from_row += [index, index]
            cut += pair != whole
    if problems:
        raise_problems(in_line_order(problems))
    if not kept:
        raise DataError([Problem(rows.where, f"no pair is left; {len(rows)} dropped at {how.max_length} tokens")])
    batch = as_batch(kept).with_columns(row=np.array(from_row, dtype=np.int64))
    return batch, Counts(len(rows), cut, len(rows) - len(kept) // 2)


def encode_pair(tokenizer: Tokenizer, row: Mapping[str, Any]) -> tuple[Encoded, Encoded]:
    """The chosen and the rejected sequence of a row, masked on the answers.

    Raises:
        DataError: the tokenizer cannot encode it.
    """
    if isinstance(row.get("prompt"), str):
        return (
            encode_raw(tokenizer, row["prompt"], row["chosen"]),
            encode_raw(tokenizer, row["prompt"], row["rejected"]),
        )
    shared, chosen, rejected = _sides(row)
    return _encode_side(tokenizer, shared, chosen), _encode_side(tokenizer, shared, rejected)


def _sides(row: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What both conversations begin with, and how each goes on."""
    chosen, rejected = (_messages(row[side]) for side in ("chosen", "rejected"))
    if "messages" in row:
        return row["messages"], chosen, rejected
    shared = 0
    # The last message of either is its answer, even where the other one goes on from it.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _messages(side: Any) -> list[Any]:
    return side if isinstance(side, list) else [{"role": "assistant", "content": side}]


def _encode_side(tokenizer: Tokenizer, shared: list[Any], answer: list[Any]) -> Encoded:
    messages = [*shared, *answer]
    turns = [at for at in range(len(shared), len(messages)) if messages[at]["role"] == "assistant"]
    spans = [answer_span(tokenizer, messages, turn) for turn in turns]
    text = spans[-1][0]
    if not all(text.startswith(earlier) for earlier, _ in spans):
        raise DataError("the chat template shows an answer differently once the conversation goes on: give each pair"
                        " one answer")  # fmt: skip
    # In pieces: what lies before the answer has the same tokens on both sides, and as in inference.
    return encode_pieces(tokenizer, text[: spans[-1][1][1]], [span for _, span in spans])


def _fitted(pair: tuple[Encoded, Encoded], how: PairEncoding) -> tuple[Encoded, Encoded] | None:
    longest = max(len(item.tokens) for item in pair)
    if how.max_length is not None and longest > how.max_length:
        if how.over_long == "refuse":
            raise DataError(f"{longest} tokens, {how.max_length} at most")
        if how.over_long == "drop":
            return None
        pair = (pair[0].cut(how.max_length), pair[1].cut(how.max_length))
    chosen, rejected = pair
    return pair if chosen != rejected and chosen.trained and rejected.trained else None


def _masked(item: Encoded, masked: Masked) -> Encoded:
    if masked == "last":
        return Encoded(item.tokens, [False] * (len(item.tokens) - 1) + [True])
    return Encoded(item.tokens, [False, *item.action_mask[1:]])


def _scan(where: str | Path, keys: Mapping[str, str] | None) -> tuple[Rows, list[Problem]]:
    rows, problems = scan_rows(where, keys, _KEYS)
    faults = [Problem(f"{rows.where}:{number}", fault) for number, row in rows.numbered for fault in _faults(row)]
    return rows, in_line_order([*problems, *faults])


def _faults(row: Mapping[str, Any]) -> list[str]:
    missing = [side for side in ("chosen", "rejected") if side not in row]
    if missing:
        return [f"needs 'chosen' and 'rejected'; it has {', '.join(row) or 'nothing'}"]
    if "messages" in row:
        return [*message_faults(row["messages"]), *_side_faults(row, texts=True)]
    if "prompt" in row:
        return [f"'{key}' must be text" for key in ("prompt", "chosen", "rejected") if not isinstance(row[key], str)]
    return _side_faults(row, texts=False) or _beginnings(row)


def _side_faults(row: Mapping[str, Any], texts: bool) -> list[str]:
    faults: list[str] = []
    for side in ("chosen", "rejected"):
        if isinstance(row[side], str):
            faults += [] if texts else [f"'{side}' is text, and there is no 'prompt' and no 'messages' that it answers"]
            continue
        found = message_faults(row[side], side)
        faults += found
        if not found and row[side][-1]["role"] != "assistant":
            faults.append(f"'{side}' must end with the assistant's answer")
    return faults


def _beginnings(row: Mapping[str, Any]) -> list[str]:
    return [] if _sides(row)[0] else ["'chosen' and 'rejected' do not begin with the same messages"]
