# SPDX-License-Identifier: Apache-2.0
"""Supervised examples from a source to a batch; over-long examples are cut, dropped or refused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import (
    Encoded,
    Tokenizer,
    Turns,
    encode_example,
    find_sft_faults,
    normalize_sft,
)
from dlrover.python.rl.data.jsonl import raise_errors, sort_by_line
from dlrover.python.rl.data.source import SourceRows, scan_rows

OverLong: TypeAlias = Literal["cut", "drop", "refuse"]
"""Sequences of more than ``max_length`` tokens: cut the tail, leave them out, or refuse the data."""

Encode: TypeAlias = Callable[[dict[str, Any]], list[Encoded]]
"""The sequences of one row."""


@dataclass(frozen=True)
class Encoding:
    max_length: int | None = None
    """Maximum tokens of a sequence."""

    over_long: OverLong = "cut"
    """Treatment of longer ones."""

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
    """The rows of a source: all, ``cut`` (lost tokens or a sequence to ``max_length``), ``dropped`` (nothing left to
    train)."""

    rows: int
    cut: int
    dropped: int


def read_sft(where: str | Path, keys: Mapping[str, str] | None = None) -> SourceRows:
    """Read the examples of a source; see :func:`~dlrover.python.rl.data.source.scan_rows`.

    Raises:
        DataError: no rows, or wrong rows (the first 20 are named).
    """
    rows, errors = _scan(where, keys)
    if errors:
        raise_errors(errors)
    return rows


def validate_sft(where: str | Path, keys: Mapping[str, str] | None = None) -> list[ConfigError]:
    return _scan(where, keys)[1]


def collect_sft(samples: Sequence[Any], name: str = "samples") -> SourceRows:
    """Take examples from memory: dicts, or objects with ``prompt`` and ``answer``; raise DataError naming wrong
    ones."""
    raw = [sample if isinstance(sample, Mapping) else vars(sample) for sample in (samples[i] for i in _all(samples))]
    rows, errors = _checked(SourceRows(name, [(number, dict(row)) for number, row in enumerate(raw, start=1)]))
    if errors:
        raise_errors(errors)
    return rows


def _all(samples: Sequence[Any]) -> range:
    return range(len(samples))


def sft_prompt(row: Mapping[str, Any]) -> Any:
    """The prompt that identifies copies: raw, or the messages before the first answer."""
    return messages_before_answer(row["messages"]) if "messages" in row else row["prompt"]


def messages_before_answer(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def encode_sft(rows: SourceRows, tokenizer: Tokenizer, encoding: Encoding | None = None) -> tuple[Batch, Counts]:
    """Encode examples; see :func:`~dlrover.python.rl.data.conversation.encode_example`.

    Returns:
        A batch of ragged ``tokens`` (int64) and ``action_mask`` (bool), both ``[sequences, seq]``, and ``row`` (int64),
        the index of each one's row.

    Raises:
        DataError: unusable rows (the first 20 are named), or no row left.
    """
    settings = encoding or Encoding()

    def encode(row: dict[str, Any]) -> list[Encoded]:
        return encode_example(tokenizer, row, None, settings.assistant, settings.mask_prompt)

    encoded, counts = _encode_rows(rows, encode, settings)
    flat = [item for items in encoded for item in items]
    from_row = [index for index, items in enumerate(encoded) for _ in items]
    return to_batch(flat).with_columns(row=np.array(from_row, dtype=np.int64)), counts


def load_sft(where: str | Path, tokenizer: Tokenizer, encoding: Encoding | None = None) -> tuple[Batch, Counts]:
    return encode_sft(read_sft(where, encoding.keys if encoding is not None else None), tokenizer, encoding)


def _encode_rows(rows: SourceRows, encode: Encode, settings: Encoding) -> tuple[list[list[Encoded]], Counts]:
    encoded: list[list[Encoded]] = []
    errors: list[ConfigError] = []
    cut = 0
    for index, row in enumerate(rows):
        try:
            items = encode(row)
            sequences = fit_length(items, settings.max_length, settings.over_long)
        except DataError as error:
            errors += [ConfigError(rows.location(index), fault.what) for fault in error.errors]
            continue
        encoded.append(sequences)
        cut += bool(sequences) and sequences != items
    if errors:
        raise_errors(sort_by_line(errors))
    dropped = sum(not items for items in encoded)
    if dropped == len(rows):
        message = f"no row with a trained token; {dropped} dropped at {settings.max_length} tokens"
        raise DataError([ConfigError(rows.where, message)])
    return encoded, Counts(len(rows), cut, dropped)


def fit_length(items: Sequence[Encoded], max_length: int | None, over_long: OverLong) -> list[Encoded]:
    """Cut, drop or refuse (DataError) the sequences of a row; remove those without a trained token."""
    if max_length is None:
        return [item for item in items if item.trained]
    long = [len(item.tokens) for item in items if len(item.tokens) > max_length]
    if long and over_long == "refuse":
        raise DataError(f"{max(long)} tokens, {max_length} at most")
    if over_long == "drop":
        items = [item for item in items if len(item.tokens) <= max_length]
    return [short for item in items if (short := item.cut(max_length)).trained]


def to_batch(encoded: Sequence[Encoded]) -> Batch:
    """Ragged ``tokens`` (int64) and ``action_mask`` (bool), both ``[sequences, seq]``."""
    tokens = Ragged.from_rows([item.tokens for item in encoded], dtype=np.int64)
    mask = Ragged.from_rows([item.action_mask for item in encoded], dtype=np.bool_)
    return Batch({"tokens": tokens, "action_mask": mask})


def _scan(where: str | Path, keys: Mapping[str, str] | None) -> tuple[SourceRows, list[ConfigError]]:
    rows, errors = scan_rows(where, keys)
    checked, faults = _checked(rows)
    return checked, sort_by_line([*errors, *faults])


def _checked(rows: SourceRows) -> tuple[SourceRows, list[ConfigError]]:
    numbered = [(number, normalize_sft(row)) for number, row in rows.numbered]
    faults = [
        ConfigError(f"{rows.where}:{number}", fault) for number, row in numbered for fault in find_sft_faults(row)
    ]
    return SourceRows(rows.where, numbered), faults
