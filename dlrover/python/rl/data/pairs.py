"""Pairs of a chosen and a rejected answer, for reward models and for DPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.conversation import Encoded, Tokenizer, answer_span, encode_pieces, encode_raw
from dlrover.python.rl.data.examples import Counts, OverLong, as_batch, before_answer
from dlrover.python.rl.data.jsonl import in_line_order, raise_problems
from dlrover.python.rl.data.messages import message_faults, plain_row
from dlrover.python.rl.data.source import Rows, scan_rows

_TOLD, _SIDES = ("prompt", "messages"), ("chosen", "rejected")

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
    """The pairs of a source, each in one of the forms of :func:`pair_row`.

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
    with its end marker. Of messages that go on for several turns every assistant turn that the two do not share is part
    of the answer. A pair whose sequences are the same, or have become so by a cut, teaches nothing and is dropped.

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
    row = pair_row(row)
    if "prompt" in row:
        return (
            encode_raw(tokenizer, row["prompt"], row["chosen"]),
            encode_raw(tokenizer, row["prompt"], row["rejected"]),
        )
    begin = len(_shared(row))
    return _encode_side(tokenizer, row["chosen"], begin), _encode_side(tokenizer, row["rejected"], begin)


def pair_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A pair in one of two forms, and nothing else: the texts ``prompt``, ``chosen`` and ``rejected``; or ``chosen``
    and ``rejected`` alone, whole conversations that begin alike.

    It may come in others. ``messages`` (or a list under ``prompt``) are what both begin with, and each side
    is a text, the messages that go on from there, or the whole conversation. What says again what these say already has
    to agree with them: ``messages`` that are all of one side, or a ``prompt`` that is the text of a user's turn
    (UltraFeedback has both).

    Raises:
        DataError: it has no such form, or says two things.
    """
    row = plain_row(row)
    if faults := _faults(row):
        raise DataError([Problem("data", fault) for fault in faults])
    if "messages" not in row and isinstance(row["chosen"], str):
        return {key: row[key] for key in ("prompt", *_SIDES)}
    given = [row[key] for key in _TOLD if isinstance(row.get(key), list)]
    told = [messages for messages in given if messages not in (row["chosen"], row["rejected"])]
    pair = {side: _whole(side, row[side], told[0] if told else []) for side in _SIDES}
    if not (shared := _shared(pair)):
        raise DataError("'chosen' and 'rejected' do not begin with the same messages")
    for messages in told[1:]:
        if messages not in (*pair.values(), shared[: len(messages)]):
            raise DataError("'prompt' and 'messages' are different conversations: leave one of them out")
    asked = [message["content"].strip() for message in shared if message["role"] == "user"]
    if isinstance(row.get("prompt"), str) and row["prompt"].strip() not in asked:
        raise DataError("'prompt' is no text of the user's in what both conversations begin with: leave it out, or give"
                        " 'chosen' and 'rejected' as texts without 'messages'")  # fmt: skip
    return pair


def pair_prompt(pair: Mapping[str, Any]) -> Any:
    """What a pair asks, to tell whether two are copies: its raw prompt, or the messages before the first answer.

    Args:
        pair: as :func:`pair_row` gives it.
    """
    if "prompt" in pair:
        return pair["prompt"]
    shared = _shared(pair)
    return before_answer(shared) or shared


def _whole(side: str, given: Any, asked: list[Any]) -> list[Any]:
    """The conversation of a side from its beginning."""
    if isinstance(given, list):
        if given[: len(asked)] == asked:
            return given
        if given[0]["role"] != "assistant":
            raise DataError(f"'{side}' neither begins with 'messages' nor goes on from them with an answer")
    if not asked or asked[-1]["role"] == "assistant":
        raise DataError(f"'messages' end with the assistant's turn, and '{side}' goes on with another")
    return [*asked, *(given if isinstance(given, list) else [{"role": "assistant", "content": given}])]


def _shared(pair: Mapping[str, Any]) -> list[Any]:
    """What both conversations begin with."""
    chosen, rejected = pair["chosen"], pair["rejected"]
    shared = 0
    # The last message of either is its answer, even where the other one goes on from it.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return list(chosen[:shared])


def _encode_side(tokenizer: Tokenizer, messages: list[Any], begin: int) -> Encoded:
    turns = [at for at in range(begin, len(messages)) if messages[at]["role"] == "assistant"]
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
    rows, problems = scan_rows(where, keys, (*_TOLD, *_SIDES))
    numbered: list[tuple[int, dict[str, Any]]] = []
    for number, row in rows.numbered:
        try:
            numbered.append((number, pair_row(row)))
        except DataError as error:
            problems += [Problem(f"{rows.where}:{number}", problem.what) for problem in error.problems]
    return Rows(rows.where, numbered), in_line_order(problems)


def _faults(row: Mapping[str, Any]) -> list[str]:
    """What is wrong with a row's parts, each for itself."""
    if any(side not in row for side in _SIDES):
        return [f"needs 'chosen' and 'rejected'; it has {', '.join(row) or 'nothing'}"]
    if not isinstance(row.get("prompt", ""), str | list):
        return ["'prompt' must be text or a list of messages"]
    lists = [key for key in _TOLD if key in row and not (key == "prompt" and isinstance(row[key], str))]
    return [*(fault for key in lists for fault in message_faults(row[key], key)), *_side_faults(row)]


def _side_faults(row: Mapping[str, Any]) -> list[str]:
    texts = [side for side in _SIDES if isinstance(row[side], str)]
    if "messages" not in row and texts:
        if "prompt" not in row:
            return [f"'{side}' is text, and there is no 'prompt' and no 'messages' that it answers" for side in texts]
        return [f"'{side}' must be text, as 'prompt' is" for side in _SIDES if side not in texts]
    faults: list[str] = []
    for side in (side for side in _SIDES if side not in texts):
        found = message_faults(row[side], side)
        faults += found
        if not found and row[side][-1]["role"] != "assistant":
            faults.append(f"'{side}' must end with the assistant's answer")
    return faults
