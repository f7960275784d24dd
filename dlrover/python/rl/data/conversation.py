"""Texts and conversations as tokens, with a mask over the tokens that are trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.jsonl import in_line_order, raise_problems, scan_jsonl
from dlrover.python.rl.data.messages import message_faults

Tokenizer: TypeAlias = Any
"""A Hugging Face tokenizer. Conversations need a fast one with a chat template."""

Turns: TypeAlias = Literal["all", "last"]
"""Which assistant turns are trained."""

Span: TypeAlias = tuple[int, int]
"""First character and the one after the last."""


@dataclass(frozen=True)
class Encoded:
    """One sequence.

    Attributes:
        tokens: token ids, ``[seq]``.
        action_mask: True on the trained tokens, ``[seq]``; never on the first one, which nothing predicts.
    """

    tokens: list[int]
    action_mask: list[bool]


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a prompt as inference sees it: raw text, or messages with the generation prompt appended."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return _tokenize(tokenizer, _render(tokenizer, prompt, generation=True))


def encode_example(
    tokenizer: Tokenizer,
    row: Mapping[str, Any],
    max_length: int | None = None,
    mode: Turns = "all",
    mask_prompt: bool = True,
) -> list[Encoded]:
    """Encode a supervised example, ``{"prompt": text, "response": text}`` or ``{"messages": [...]}``.

    Of raw text the response and the end-of-sequence token are trained; prompt and response are tokenised apart, so the
    prompt's tokens are those of inference. Of a conversation each assistant turn is trained from its first character
    after the header to its end marker. A template that rewrites history (one that hides old thoughts) shows an answer
    differently once the conversation goes on; then each trained turn becomes a sequence of its own, which ends with it.

    Args:
        tokenizer: a Hugging Face tokenizer.
        row: the example; other keys are not looked at.
        max_length: tokens at most; the tail is cut.
        mode: train every assistant turn or the last one only.
        mask_prompt: False trains every token but the first, prompts included.

    Returns:
        Usually one sequence, or one per trained turn; those without a trained token are left out.

    Raises:
        DataError: the row has neither form, or the tokenizer cannot encode it.
        ValueError: unknown ``mode``, or ``max_length`` below 1.
    """
    _check_arguments(mode, max_length)
    faults = _faults(row)
    if faults:
        raise DataError("; ".join(faults))
    if "messages" not in row:
        encoded = [_encode_raw(tokenizer, row["prompt"], row["response"])]
    elif mask_prompt:
        encoded = _encode_messages(tokenizer, row["messages"], mode)
    else:
        encoded = [_encode_spans(tokenizer, _render(tokenizer, row["messages"]), [])]
    finished = [_finish(item, max_length, mask_prompt) for item in encoded]
    return [item for item in finished if any(item.action_mask)]


def load_sft(
    path: str | Path,
    tokenizer: Tokenizer,
    max_length: int | None = None,
    mode: Turns = "all",
    mask_prompt: bool = True,
) -> tuple[Batch, int]:
    """Encode a JSON Lines file of supervised examples; see :func:`encode_example`.

    Returns:
        A batch of ragged ``tokens`` (int64) and ``action_mask`` (bool), both ``[rows, seq]``, and how many rows of the
        file were dropped because ``max_length`` left none of their trained tokens.

    Raises:
        DataError: names every row that cannot be used (20 at most); or no row is left.
    """
    rows, problems = scan_jsonl(path)
    encoded: list[Encoded] = []
    dropped = 0
    for line, row in rows:
        try:
            items = encode_example(tokenizer, row, max_length, mode, mask_prompt)
        except DataError as error:
            problems += [Problem(f"{path}:{line}", problem.what) for problem in error.problems]
            continue
        encoded += items
        dropped += not items
    if problems:
        raise_problems(in_line_order(problems))
    if not encoded:
        raise DataError([Problem(str(path), f"no row with a trained token; {dropped} dropped at {max_length} tokens")])
    tokens = Ragged.from_rows([item.tokens for item in encoded], dtype=np.int64)
    mask = Ragged.from_rows([item.action_mask for item in encoded], dtype=np.bool_)
    return Batch({"tokens": tokens, "action_mask": mask}), dropped


def _check_arguments(mode: str, max_length: int | None) -> None:
    if mode not in get_args(Turns):
        raise ValueError(f"unknown mode '{mode}'{hint(mode, get_args(Turns))}")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, not {max_length}")


def check_sft(path: str | Path) -> list[Problem]:
    """What :func:`load_sft` would refuse the file for whatever the tokenizer; empty when it would not."""
    rows, problems = scan_jsonl(path)
    if not rows and not problems:
        problems = [Problem(str(path), "holds no rows")]
    problems += [Problem(f"{path}:{line}", fault) for line, row in rows for fault in _faults(row)]
    return in_line_order(problems)


def _faults(row: Mapping[str, Any]) -> list[str]:
    if "messages" in row:
        faults = message_faults(row["messages"])
        roles = [] if faults else [message["role"] for message in row["messages"]]
        if roles and "assistant" not in roles:
            faults = ["no assistant turn to train"]
        elif roles and roles[0] == "assistant":
            faults = ["begins with the assistant: there is no prompt for its turn"]
        return faults
    if "prompt" not in row or "response" not in row:
        return [f"needs 'prompt' and 'response', or 'messages'; it has {', '.join(row) or 'nothing'}"]
    return [f"'{key}' must be text" for key in ("prompt", "response") if not isinstance(row[key], str)]


def _finish(encoded: Encoded, max_length: int | None, mask_prompt: bool) -> Encoded:
    mask = encoded.action_mask if mask_prompt else [True] * len(encoded.tokens)
    return Encoded(encoded.tokens[:max_length], [False, *mask[1:]][:max_length])


def _encode_raw(tokenizer: Tokenizer, prompt: str, response: str) -> Encoded:
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token to close a response with")
    asked = encode_prompt(tokenizer, prompt)
    answered = [*_tokenize(tokenizer, response), tokenizer.eos_token_id]
    return Encoded(asked + answered, [False] * len(asked) + [True] * len(answered))


def _encode_messages(tokenizer: Tokenizer, messages: list[dict[str, str]], mode: Turns) -> list[Encoded]:
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if mode == "last":
        turns = turns[-1:]
    answers = [_answer(tokenizer, messages, turn) for turn in turns]
    whole = _render(tokenizer, messages)
    if all(whole.startswith(text) for text, _ in answers):
        return [_encode_spans(tokenizer, whole, [span for _, span in answers])]
    return [_encode_spans(tokenizer, text, [span]) for text, span in answers]


def _answer(tokenizer: Tokenizer, messages: list[dict[str, str]], turn: int) -> tuple[str, Span]:
    """The conversation as rendered up to ``turn``, and the span in it that the assistant wrote there."""
    text = _render(tokenizer, messages[: turn + 1])
    opened = _render(tokenizer, messages[:turn], generation=True)
    content = messages[turn]["content"]
    start = len(commonprefix([opened, text]))
    if start < len(opened):
        # This template opens a turn otherwise when generating (with a "<think>", say). What the content shares with
        # that opening is the content's.
        found = text.rfind(content)
        start = min(start, found) if found >= 0 else start
    # White space after the end marker is the template's; at the end of the content it is the assistant's.
    found = text.find(content, start) if content else -1
    return text, (start, max(start, len(text.rstrip()), found + len(content) if found >= 0 else 0))


def _encode_spans(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Encoded:
    """Tokenise ``text``; the mask is True on the tokens of ``spans`` (rising, disjoint)."""
    if not tokenizer.is_fast:
        raise DataError("masking a conversation needs a fast tokenizer: a slow one has no character offsets")
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # Only the ends of offsets count: byte-level tokenizers may trim leading spaces off their starts.
    ends = [end for _, end in coded["offset_mapping"]]
    borders = [border for span in spans for border in span]
    if any(last < border < end for last, end in zip([0, *ends], ends, strict=False) for border in borders):
        return _encode_pieces(tokenizer, text, spans)
    mask = [any(start < end <= stop for start, stop in spans) for end in ends]
    return Encoded(list(coded["input_ids"]), mask)


def _encode_pieces(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Encoded:
    """Tokenise what lies in spans and between them apart, so that no token reaches over a border, as in inference."""
    tokens: list[int] = []
    mask: list[bool] = []
    borders = [0, *(border for span in spans for border in span), len(text)]
    for index, (start, stop) in enumerate(zip(borders, borders[1:], strict=False)):
        piece = _tokenize(tokenizer, text[start:stop])
        tokens += piece
        mask += [index % 2 == 1] * len(piece)
    return Encoded(tokens, mask)


def _tokenize(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], generation: bool = False) -> str:
    """The conversation as the chat template writes it: text, for what it tokenises to differs by library version."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation))
    except Exception as error:  # Templates raise what they like; the row has to be named whatever it is.
        raise DataError(f"the chat template refused the conversation: {error}") from error
