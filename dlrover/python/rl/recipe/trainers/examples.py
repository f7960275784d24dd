# SPDX-License-Identifier: Apache-2.0
"""The examples of a run: sources, encoding as tokens, held-out examples and the loss on them."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Gt, Lt

from dlrover.python.rl.algorithm.base import EngineLoss
from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.conversation import SFT_ROWS, Counts, Encoding, encode_sft
from dlrover.python.rl.data.jsonl import first_errors, template_kwargs_of
from dlrover.python.rl.data.pairs import PAIR_ROWS, Masked, encode_pairs
from dlrover.python.rl.data.source import HELD_OUT_SHARE, RowReader, SourceRows, hold_out, is_left_unread
from dlrover.python.rl.engine.api.base import BaseTrainEngine
from dlrover.python.rl.engine.model.loading import merge_eos_ids
from dlrover.python.rl.engine.model.packing import select_columns
from dlrover.python.rl.engine.model.ranks import preserve_random_state
from dlrover.python.rl.recipe.base.config import Positive
from dlrover.python.rl.recipe.base.model_files import LARGEST, count_room, find_large, find_tokenizer
from dlrover.python.rl.recipe.base.updates import TRAINED
from dlrover.python.rl.recipe.online.prompts import digest_of_rows, name_source


@dataclass(frozen=True, kw_only=True)
class ExampleData:
    train: str
    """A file (``.json``, ``.jsonl``, ``.csv``, ``.parquet``, ``.arrow``), a folder or a hub name; the prefix ``split@``
    selects a split."""

    eval: str | None = None
    """Examples for evaluation, in the same form. None: a run that evaluates holds ``eval_share`` of ``train`` out."""

    eval_share: Annotated[float, Gt(0.0), Lt(1.0)] | None = None
    """Fraction of rows to hold out; at least one row. None: 0.03."""

    max_length: Positive = 512
    """Maximum tokens of a sequence."""

    over_long: Literal["cut", "drop", "refuse"] = "cut"
    """Treatment of longer sequences: cut the tail, and drop the row if no trained token is left; drop the row; or
    refuse the data. Cut and dropped rows are counted."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """Column names of the data: ``{prompt: question}``."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's chat template, such as ``{enable_thinking: false}`` or ``tools``; a row's own
    ``chat_template_kwargs`` and ``tools`` override them."""

    segment_rows: ClassVar[int] = 1
    """Consecutive sequences that stay together: a segment."""

    reader: ClassVar[RowReader]

    def encode(self, rows: SourceRows, tokenizer: Any, eos_ids: Sequence[int] = ()) -> tuple[Batch, Counts]:
        """Return ``tokens``, ``action_mask`` and ``row``, the index of a sequence's row."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SFTData(ExampleData):
    """Rows of ``prompt`` and ``response``, or of ``messages``."""

    assistant: Literal["all", "last"] = "all"
    """Which assistant turns are trained."""

    mask_prompt: bool = True
    """False also trains prompts."""

    reader: ClassVar[RowReader] = SFT_ROWS

    def encode(self, rows: SourceRows, tokenizer: Any, eos_ids: Sequence[int] = ()) -> tuple[Batch, Counts]:
        options = self.assistant, self.mask_prompt, eos_ids, self.chat_template_kwargs
        return encode_sft(rows, tokenizer, Encoding(self.max_length, self.over_long, *options))


@dataclass(frozen=True, kw_only=True)
class PairData(ExampleData):
    """Rows of ``chosen`` and ``rejected`` answers, with their ``prompt`` or ``messages``. The mask covers the answers.
    Sequences ``2 * i`` and ``2 * i + 1`` are a pair."""

    reader: ClassVar[RowReader] = PAIR_ROWS
    segment_rows: ClassVar[int] = 2
    masked: ClassVar[Masked] = "answer"

    def encode(self, rows: SourceRows, tokenizer: Any, eos_ids: Sequence[int] = ()) -> tuple[Batch, Counts]:
        """Return the columns of every kind with ``pair`` (int64) and ``chosen`` (bool)."""
        options = self.max_length, self.over_long, self.masked, self.chat_template_kwargs
        batch, counts = encode_pairs(rows, tokenizer, *options)
        number = np.arange(len(batch))
        return batch.with_columns(pair=number // 2, chosen=number % 2 == 0), counts


@dataclass(frozen=True, kw_only=True)
class ScoredPairData(PairData):
    """Pairs for a reward model: the mask covers only the last token, which gets the score."""

    masked: ClassVar[Masked] = "last"


@dataclass(frozen=True, eq=False)
class Examples:
    """The encoded examples of a run; ``held_out`` and ``prompts`` are None if it does not evaluate.

    ``train`` and ``held_out`` have ``tokens``, ``action_mask``, ``action_tokens`` (int64 ``[rows]``), ``line`` (int64
    ``[rows]``, in the source), and the columns of their kind; ``prompts`` has the ``prompt``, ``answer`` and
    ``extra_info`` of each held-out row as objects."""

    train: Batch
    held_out: Batch | None
    counts: Counts
    prompts: Batch | None = None
    digest: str = ""  # digest of the rows to train on
    evaluated: str = ""  # digest of the rows to evaluate on
    trains_end: bool = True  # SFT: an end-of-sequence token is trained
    unused: Sequence[str] = ()  # columns that nothing reads


def load_examples(
    data: ExampleData, tokenizer: Any, evaluates: bool, seed: int, eos_ids: Sequence[int] = ()
) -> Examples:
    """Read, divide and encode the examples of a run. Raises DataError with at most 20 unusable rows."""
    rows = data.reader.read(data.train, data.keys)
    held_out: SourceRows | None = None
    if evaluates or data.eval_share is not None:
        rows, held_out = _split(data, rows, seed)
    eos_ids = merge_eos_ids(tokenizer, list(eos_ids))
    train, counts = _encode(data, rows, tokenizer, eos_ids)
    digest = digest_of_rows(row for _, row in rows.numbered)
    trained = train.ragged("tokens").values[train.ragged("action_mask").values]
    trains_end = not isinstance(data, SFTData) or bool(np.isin(trained, eos_ids).any())
    if held_out is None or not evaluates:
        return Examples(train, None, counts, digest=digest, trains_end=trains_end, unused=rows.unused)
    prompts: dict[str, list[Any]] = {"prompt": [data.reader.prompt_of(row) for row in held_out], "answer": []}
    for row in held_out:  # the response, or the first answer of a conversation; None for a pair
        answers = [message["content"] for message in row.get("messages", ()) if message["role"] == "assistant"]
        prompts["answer"].append(row.get("response", answers[0] if answers else None))
    prompts["extra_info"] = [{"chat_template_kwargs": template_kwargs_of(row)} for row in held_out]
    evaluated = digest_of_rows(row for _, row in held_out.numbered)
    encoded, _ = _encode(data, held_out, tokenizer, eos_ids)
    return Examples(train, encoded, counts, Batch(prompts), digest, evaluated, trains_end, rows.unused)


def _split(data: ExampleData, rows: SourceRows, seed: int) -> tuple[SourceRows, SourceRows]:
    if data.eval is not None:
        return rows, data.reader.read(data.eval, data.keys)
    share = HELD_OUT_SHARE if data.eval_share is None else data.eval_share
    train, held_out = hold_out([data.reader.prompt_of(row) for row in rows], share, seed)
    return rows.take(train), rows.take(held_out)


def _encode(data: ExampleData, rows: SourceRows, tokenizer: Any, eos_ids: Sequence[int]) -> tuple[Batch, Counts]:
    batch, counts = data.encode(rows, tokenizer, eos_ids)
    lines = np.array([line for line, _ in rows.numbered], dtype=np.int64)[batch.dense("row")]
    trained = np.array([int(mask.sum()) for mask in batch.ragged("action_mask")], dtype=np.int64)
    further = {name: batch[name] for name in batch.columns if name not in (*TRAINED, "row")}
    return batch.select(*TRAINED).with_columns(action_tokens=trained, line=lines, **further), counts


def validate_examples(data: ExampleData, evaluates: bool, seed: int) -> list[ConfigError]:
    named = {"train": data.train, "eval": data.eval}
    sources = {key: where for key, where in named.items() if where and not is_left_unread(where)}
    errors = list[ConfigError]()
    for key, where in sources.items():
        errors += name_source(key, where, first_errors(data.reader.scan(where, data.keys)[1]))
    holds_out = data.eval is None and (evaluates or data.eval_share is not None)
    if errors or "train" not in sources or not holds_out:
        return errors
    try:
        _split(data, data.reader.read(data.train, data.keys), seed)
    except (ValueError, DataError) as error:
        errors.append(ConfigError("config.data.eval_share", str(error)))
    return errors


def validate_lengths(cfg: Any) -> list[ConfigError]:
    """Check ``data.max_length`` against the model's positions, and report longer rows if they are refused."""
    data, room = cfg.data, count_room(cfg)
    limit = data.max_length if room is None else min(data.max_length, room)
    long = _find_long(cfg, limit) if limit < data.max_length or data.over_long == "refuse" else []
    if limit < data.max_length and (long or data.max_length > type(data).max_length):
        row = "; {} has {} tokens".format(*long[0]) if long else ""
        message = f"{data.max_length}, but the model has {room} positions: write at most {room}{row}"
        return [ConfigError("config.data.max_length", message)]
    return first_errors([ConfigError(place, f"{tokens} tokens, {limit} at most") for place, tokens in long])


def warn_of_cuts(cfg: Any) -> list[str]:
    data, long = cfg.data, _find_long(cfg, cfg.data.max_length)
    if not long:
        return []
    (place, tokens), treatment = max(long, key=itemgetter(1)), "left out" if data.over_long == "drop" else "cut"
    rows = f"{'at least ' if len(long) >= LARGEST else ''}{len(long)} rows"
    return [f"data: {rows} above data.max_length={data.max_length} are {treatment}; {place} has {tokens} tokens"]


def _find_long(cfg: Any, limit: int) -> list[tuple[str, int]]:
    long, whole = dict[str, int](), replace(cfg.data, max_length=sys.maxsize, over_long="cut")
    for source in filter(None, (cfg.data.train, cfg.data.eval if cfg.evaluates else None)):
        rows = SourceRows(source, []) if is_left_unread(source) else whole.reader.read(source, whole.keys)
        large = rows.take(find_large(range(len(rows)), rows.__getitem__, limit))
        if not len(large) or (tokenizer := find_tokenizer(cfg.model)) is None:
            continue
        with suppress(DataError):  # the run reports rows that cannot be encoded
            batch, _ = whole.encode(large, tokenizer)
            for tokens, row in zip(batch.ragged("tokens").lengths, batch.dense("row"), strict=True):
                place = large.location(row)
                long |= {place: max(int(tokens), long.get(place, 0))} if tokens > limit else {}
    return list(long.items())


def select_segments(batch: Batch, segment_rows: int, numbers: Iterable[int]) -> Batch:
    """Select the rows of these segments; pairs are renumbered, since a segment may occur several times."""
    rows = batch.take([row for number in numbers for row in range(number * segment_rows, (number + 1) * segment_rows)])
    return rows.with_columns(pair=np.arange(len(rows)) // segment_rows) if "pair" in rows else rows


@dataclass(frozen=True)
class Measured:
    """A loss and its metrics: a rank's weighted sums, whose weights add up to 1 over all ranks."""

    loss: float
    metrics: dict[str, float]

    @classmethod
    def of(cls, engine: BaseTrainEngine, batch: Batch, loss: EngineLoss) -> "Measured":
        """Measure this rank's part of the loss on annotated rows, in a collective call without side effects."""
        with preserve_random_state(), torch.no_grad():
            outputs = compute_outputs(engine, batch)
            flat = np.flatnonzero(batch.ragged("action_mask").values)
            if not len(flat):
                return cls(0.0, {})
            value, metrics = loss(torch.from_numpy(outputs[flat]), select_columns(batch, flat, "cpu"))
        return cls(float(value), {name: float(amount) for name, amount in metrics.items()})

    @classmethod
    def total(cls, parts: Sequence["Measured"]) -> "Measured":
        """Sum over ranks; a rank without rows has no metrics."""
        names = dict.fromkeys(name for part in parts for name in part.metrics)
        metrics = {name: sum(part.metrics.get(name, 0.0) for part in parts) for name in names}
        return cls(sum(part.loss for part in parts), metrics)


def compute_outputs(engine: BaseTrainEngine, batch: Batch) -> Any:
    """Compute log-probs or scores ``[all tokens]``, 0 outside the action mask."""
    evaluated = engine.evaluate(batch.select(*TRAINED))
    return evaluated.ragged("logprobs" if "logprobs" in evaluated else "scores").values
