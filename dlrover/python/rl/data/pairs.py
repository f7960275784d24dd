# SPDX-License-Identifier: Apache-2.0
"""Pairs of a chosen and a rejected answer, for reward models and for DPO."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.conversation import (
    NO_KWARGS,
    Counts,
    Encoded,
    OverLong,
    Tokenizer,
    answer_span,
    encode_pieces,
    encode_raw,
    encode_rows,
    fit_length,
    make_renderer,
    messages_before_answer,
)
from dlrover.python.rl.data.jsonl import (
    TEMPLATE_KEYS,
    find_message_faults,
    find_template_faults,
    normalize_row,
    surrogate_faults,
)
from dlrover.python.rl.data.source import RowReader, SourceRows

_CONTEXT, _SIDES = ("prompt", "messages"), ("chosen", "rejected")

Masked: TypeAlias = Literal["answer", "last"]
"""Masked tokens of each sequence: the answer (DPO), or only the last token, at which a reward model scores."""


def encode_pairs(
    rows: SourceRows,
    tokenizer: Tokenizer,
    max_length: int | None = None,
    over_long: OverLong = "cut",
    masked: Masked = "answer",
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> tuple[Batch, Counts]:
    """Encode pairs; raises DataError for unusable rows (the first 20 are named), or if no pair is left.

    Both sequences begin with the prompt's tokens, as in inference; the answer with its end marker follows: in
    conversations every assistant turn that the two do not share. Pairs of equal sequences, also after a cut, are
    dropped, and pairs with an answer that a cut leaves without a token.

    Returns sequences ``2 * i`` (chosen) and ``2 * i + 1`` (rejected) of pair ``i``: ragged ``tokens`` (int64) and
    ``action_mask`` (bool), both ``[2 * pairs, seq]``, and ``row`` (int64), the index of each sequence's row."""
    equal = 0

    def fit(pair: list[Encoded]) -> list[Encoded]:
        nonlocal equal
        equal += pair[0] == pair[1]
        fitting = fit_length(pair, max_length, over_long)
        if len(fitting) < 2 or fitting[0] == fitting[1]:
            return []
        if masked == "answer":
            return [item.with_mask(item.action_mask) for item in fitting]
        return [Encoded(item.tokens, [False] * (len(item.tokens) - 1) + [True]) for item in fitting]

    def nothing_left() -> str:
        reasons = {"with equal answers": equal, f"too long for {max_length} tokens": len(rows) - equal}
        return f"no pair is left; dropped: {', '.join(f'{count} {why}' for why, count in reasons.items() if count)}"

    return encode_rows(rows, lambda row: encode_pair(tokenizer, row, template_kwargs), fit, nothing_left)


def encode_pair(
    tokenizer: Tokenizer, row: Mapping[str, Any], template_kwargs: Mapping[str, Any] = NO_KWARGS
) -> list[Encoded]:
    """Encode the chosen and the rejected sequence of a row, masked on the answers."""
    row = normalize_pair(row)
    if "prompt" in row:
        return [encode_raw(tokenizer, row["prompt"], row[side]) for side in _SIDES]
    begin, render, encoded = len(_shared(row)), make_renderer(tokenizer, row, template_kwargs), list[Encoded]()
    for messages in (row[side] for side in _SIDES):
        turns = [at for at in range(begin, len(messages)) if messages[at]["role"] == "assistant"]
        spans = [answer_span(render, messages, turn) for turn in turns]
        text = spans[-1][0]
        if not all(text.startswith(earlier) for earlier, _ in spans):
            fault = "the chat template changes an answer when the conversation continues"
            raise DataError(f"{fault}: give each pair one answer")
        # In pieces, so that the text before the answer has the same tokens on both sides, and as in inference.
        encoded.append(encode_pieces(tokenizer, text[: spans[-1][1][1]], [span for _, span in spans]))
    return encoded


def normalize_pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pair as texts ``prompt``, ``chosen``, ``rejected``, or as conversations ``chosen`` and ``rejected`` with
    ``tools`` and ``chat_template_kwargs``; raises DataError.

    Shared ``messages`` (or a list as ``prompt``) are accepted, which each side continues by a text or messages, or
    repeats. Redundant keys must agree: ``messages`` with one side, ``prompt`` with the text of a user turn
    (UltraFeedback has both)."""
    row = normalize_row(row)
    if faults := _faults(row):
        raise DataError([ConfigError("data", fault) for fault in faults])
    if "messages" not in row and isinstance(row["chosen"], str):
        return {key: row[key] for key in ("prompt", *_SIDES)}
    conversations = [row[key] for key in _CONTEXT if isinstance(row.get(key), list)]
    contexts = [messages for messages in conversations if messages not in (row["chosen"], row["rejected"])]
    pair = {side: _complete(side, row[side], contexts[0] if contexts else []) for side in _SIDES}
    if not (shared := _shared(pair)):
        raise DataError("'chosen' and 'rejected' do not begin with the same messages")
    for messages in contexts[1:]:
        if messages not in (*pair.values(), shared[: len(messages)]):
            raise DataError("'prompt' and 'messages' are different conversations: leave one of them out")
    questions = [message["content"].strip() for message in shared if message["role"] == "user"]
    if isinstance(row.get("prompt"), str) and row["prompt"].strip() not in questions:
        fault = "'prompt' is not a user message shared by 'chosen' and 'rejected'"
        raise DataError(f"{fault}: leave it out, or give 'chosen' and 'rejected' as texts without 'messages'")
    return pair | {key: row[key] for key in TEMPLATE_KEYS if key in row}


def pair_prompt(pair: Mapping[str, Any]) -> Any:
    """Return the prompt of a pair, which identifies copies: text, or the messages before the first answer."""
    if "prompt" in pair:
        return pair["prompt"]
    shared = _shared(pair)
    return messages_before_answer(shared) or shared


def _complete(side: str, answer: Any, context: list[Any]) -> list[Any]:
    if isinstance(answer, list):
        if answer[: len(context)] == context:
            return answer
        if answer[0]["role"] != "assistant":
            raise DataError(f"'{side}' neither begins with 'messages' nor continues them with an answer")
    if not context or context[-1]["role"] == "assistant":
        raise DataError(f"'messages' end with an assistant turn, so '{side}' must not begin with one")
    return [*context, *(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])]


def _shared(pair: Mapping[str, Any]) -> list[Any]:
    """Return the messages with which both conversations begin."""
    chosen, rejected = pair["chosen"], pair["rejected"]
    shared = 0
    # The last message of either is its answer, even if the other continues it.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return list(chosen[:shared])


def _faults(row: Mapping[str, Any]) -> list[str]:
    if any(side not in row for side in _SIDES):
        return [f"needs 'chosen' and 'rejected'; it has {', '.join(row) or 'nothing'}"]
    if not isinstance(row.get("prompt", ""), str | list):
        return ["'prompt' must be text or a list of messages"]
    lists = [key for key in _CONTEXT if key in row and not (key == "prompt" and isinstance(row[key], str))]
    faults = [fault for key in lists for fault in find_message_faults(row[key], key)]
    texts = [key for key in ("prompt", *_SIDES) if isinstance(row.get(key), str)]
    faults += [fault for key in texts for fault in surrogate_faults(key, row[key])]
    return [*faults, *_side_faults(row), *find_template_faults(row)]


def _side_faults(row: Mapping[str, Any]) -> list[str]:
    texts = [side for side in _SIDES if isinstance(row[side], str)]
    if "messages" not in row and texts:
        if "prompt" not in row:
            return [f"'{side}' is text, but there is neither 'prompt' nor 'messages' before it" for side in texts]
        return [f"'{side}' must be text, as 'prompt' is" for side in _SIDES if side not in texts]
    faults: list[str] = []
    for side in (side for side in _SIDES if side not in texts):
        malformed = find_message_faults(row[side], side)
        faults += malformed
        if not malformed and row[side][-1]["role"] != "assistant":
            faults.append(f"'{side}' must end with the assistant's answer")
    return faults


_ALL_EQUAL = "in every row 'chosen' equals 'rejected': no pair is left to train on"

PAIR_ROWS = RowReader(
    normalize_pair,
    pair_prompt,
    lambda pairs: _ALL_EQUAL if all(pair["chosen"] == pair["rejected"] for pair in pairs) else "",
    names=(*_CONTEXT, *_SIDES, *TEMPLATE_KEYS),
)
