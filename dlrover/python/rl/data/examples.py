"""Supervised examples from a source to a batch, and what becomes of those that are too long."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import Encoded, Tokenizer, Turns, encode_example, sft_faults, sft_row
from dlrover.python.rl.data.jsonl import in_line_order, raise_problems
from dlrover.python.rl.data.source import Rows, scan_rows

OverLong: TypeAlias = Literal["cut", "drop", "refuse"]
"""What becomes of a sequence of more than ``max_length`` tokens: its tail is cut off; it is left out; or the data are
refused, with the place of each."""

Encode: TypeAlias = Callable[[dict[str, Any]], list[Encoded]]
"""The sequences of one row."""


@dataclass(frozen=True)
class Encoding:
    """How examples become tokens."""

    max_length: int | None = None
    """Tokens of a sequence at most."""

    over_long: OverLong = "cut"
    """What becomes of a longer one."""

    assistant: Turns = "all"
    """Which assistant turns are trained."""

    mask_prompt: bool = True
    """False trains every token but the first, prompts included."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """The source's own names of columns: ``{"prompt": "question"}``."""

    def __post_init__(self) -> None:
        if self.over_long not in get_args(OverLong):
            raise ValueError(f"unknown over_long '{self.over_long}'{hint(self.over_long, get_args(OverLong))}")
        if self.assistant not in get_args(Turns):
            raise ValueError(f"unknown assistant mode '{self.assistant}'{hint(self.assistant, get_args(Turns))}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, not {self.max_length}")


@dataclass(frozen=True)
class Counts:
    """What has become of the rows of a source.

    Attributes:
        rows: how many there were.
        cut: those that lost tokens, or one of several sequences, to ``max_length``.
        dropped: those of which nothing is left to train on.
    """

    rows: int
    cut: int
    dropped: int


def read_sft(where: str | Path, keys: Mapping[str, str] | None = None) -> Rows:
    """The examples of a source; see :func:`~dlrover.python.rl.data.source.scan_rows` for which there are.

    Raises:
        DataError: a row is no example, or there is none; names every row that is wrong (20 at most).
    """
    rows, problems = _scan(where, keys)
    if problems:
        raise_problems(problems)
    return rows


def check_sft(where: str | Path, keys: Mapping[str, str] | None = None) -> list[Problem]:
    """What :func:`read_sft` would refuse the source for; empty when it would not."""
    return _scan(where, keys)[1]


def sft_rows(samples: Sequence[Any], name: str = "samples") -> Rows:
    """Examples that are in memory: dicts, or objects with ``prompt`` and ``answer``.

    Raises:
        DataError: names every one that is no example by its number, from 1 (20 at most).
    """
    raw = [sample if isinstance(sample, Mapping) else vars(sample) for sample in (samples[i] for i in _all(samples))]
    rows, problems = _checked(Rows(name, [(number, dict(row)) for number, row in enumerate(raw, start=1)]))
    if problems:
        raise_problems(problems)
    return rows


def _all(samples: Sequence[Any]) -> range:
    return range(len(samples))


def sft_prompt(row: Mapping[str, Any]) -> Any:
    """What a row asks, to tell whether two are copies: its raw prompt, or the messages before the first answer."""
    return before_answer(row["messages"]) if "messages" in row else row["prompt"]


def before_answer(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The messages before the assistant's first."""
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def encode_sft(rows: Rows, tokenizer: Tokenizer, encoding: Encoding | None = None) -> tuple[Batch, Counts]:
    """Encode examples; see :func:`~dlrover.python.rl.data.conversation.encode_example`.

    Returns:
        A batch of ragged ``tokens`` (int64) and ``action_mask`` (bool), both ``[sequences, seq]``, and ``row`` (int64),
        the index of the row that each is from.

    Raises:
        DataError: names every row that cannot be used (20 at most); or no row is left.
    """
    how = encoding if encoding is not None else Encoding()

    def encode(row: dict[str, Any]) -> list[Encoded]:
        return encode_example(tokenizer, row, None, how.assistant, how.mask_prompt)

    encoded, counts = _encode_rows(rows, encode, how)
    flat = [item for items in encoded for item in items]
    from_row = [index for index, items in enumerate(encoded) for _ in items]
    return as_batch(flat).with_columns(row=np.array(from_row, dtype=np.int64)), counts


def load_sft(where: str | Path, tokenizer: Tokenizer, encoding: Encoding | None = None) -> tuple[Batch, Counts]:
    """:func:`read_sft`, then :func:`encode_sft`."""
    return encode_sft(read_sft(where, encoding.keys if encoding is not None else None), tokenizer, encoding)


def _encode_rows(rows: Rows, encode: Encode, how: Encoding) -> tuple[list[list[Encoded]], Counts]:
    encoded: list[list[Encoded]] = []
    problems: list[Problem] = []
    cut = 0
    for index, row in enumerate(rows):
        try:
            items = encode(row)
            kept = fitted(items, how.max_length, how.over_long)
        except DataError as error:
            problems += [Problem(rows.place(index), problem.what) for problem in error.problems]
            continue
        encoded.append(kept)
        cut += bool(kept) and kept != items
    if problems:
        raise_problems(in_line_order(problems))
    dropped = sum(not items for items in encoded)
    if dropped == len(rows):
        what = f"no row with a trained token; {dropped} dropped at {how.max_length} tokens"
        raise DataError([Problem(rows.where, what)])
    return encoded, Counts(len(rows), cut, dropped)


def fitted(items: Sequence[Encoded], max_length: int | None, over_long: OverLong) -> list[Encoded]:
    """The sequences of a row as far as they fit, without those that have no trained token (left).

    Raises:
        DataError: one is too long, and ``over_long`` is ``"refuse"``.
    """
    if max_length is None:
        return [item for item in items if item.trained]
    long = [len(item.tokens) for item in items if len(item.tokens) > max_length]
    if long and over_long == "refuse":
        raise DataError(f"{max(long)} tokens, {max_length} at most")
    if over_long == "drop":
        items = [item for item in items if len(item.tokens) <= max_length]
    return [kept for item in items if (kept := item.cut(max_length)).trained]


def as_batch(encoded: Sequence[Encoded]) -> Batch:
    """Ragged ``tokens`` (int64) and ``action_mask`` (bool), both ``[sequences, seq]``."""
    tokens = Ragged.from_rows([item.tokens for item in encoded], dtype=np.int64)
    mask = Ragged.from_rows([item.action_mask for item in encoded], dtype=np.bool_)
    return Batch({"tokens": tokens, "action_mask": mask})


def _scan(where: str | Path, keys: Mapping[str, str] | None) -> tuple[Rows, list[Problem]]:
    rows, problems = scan_rows(where, keys)
    checked, faults = _checked(rows)
    return checked, in_line_order([*problems, *faults])


def _checked(rows: Rows) -> tuple[Rows, list[Problem]]:
    numbered = [(number, sft_row(row)) for number, row in rows.numbered]
    faults = [Problem(f"{rows.where}:{number}", fault) for number, row in numbered for fault in sft_faults(row)]
    return Rows(rows.where, numbered), faults
