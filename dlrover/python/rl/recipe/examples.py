"""The examples of a run: where they are, how they become tokens, and which are held out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Gt, Lt

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.data.balance import Partition, partition
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.examples import Counts, Encoding, check_sft, encode_sft, read_sft, sft_prompt
from dlrover.python.rl.data.held_out import SHARE, hold_out
from dlrover.python.rl.data.jsonl import first_problems
from dlrover.python.rl.data.pairs import Masked, PairEncoding, check_pairs, encode_pairs, pair_prompt, read_pairs
from dlrover.python.rl.data.source import Rows
from dlrover.python.rl.recipe.config import Positive
from dlrover.python.rl.recipe.members import TRAINED


@dataclass(frozen=True, kw_only=True)
class ExampleData:
    """Examples to train and to evaluate on."""

    train: str
    """A file (``.json``, ``.jsonl``, ``.csv``, ``.parquet``, ``.arrow``), a folder or a hub name; ``split@`` before it
    picks a split."""

    eval: str | None = None
    """The same of examples to evaluate on. None: a run that evaluates holds ``eval_share`` out of ``train``, which is
    never trained on."""

    eval_share: Annotated[float, Gt(0.0), Lt(1.0)] = SHARE
    """What is held out, as a share of the rows; at least one is."""

    max_length: Positive = 512
    """Tokens of a sequence at most."""

    over_long: Literal["cut", "drop", "refuse"] = "cut"
    """What becomes of a longer one: its tail is cut, and it is dropped if nothing is left to train; it is dropped; or
    the data are refused. Rows cut and dropped are counted."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """The data's own names of columns: ``{prompt: question}``."""

    unit_rows: ClassVar[int] = 1
    """Sequences that belong together."""

    def check(self, where: str) -> list[Problem]:
        """What :meth:`read` would refuse a source for."""
        raise NotImplementedError

    def read(self, where: str) -> Rows:
        """The rows of a source."""
        raise NotImplementedError

    def prompt_of(self, row: Mapping[str, Any]) -> Any:
        """What a row that was read asks, text or messages: rows that ask the same are held out together."""
        raise NotImplementedError

    def encode(self, rows: Rows, tokenizer: Any) -> tuple[Batch, Counts]:
        """Rows as ``tokens``, ``action_mask`` and ``row``, the index of the row that a sequence is from."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SFTData(ExampleData):
    """Rows of ``prompt`` and ``response``, or of ``messages``."""

    assistant: Literal["all", "last"] = "all"
    """Which assistant turns are trained."""

    mask_prompt: bool = True
    """False trains prompts too."""

    def check(self, where: str) -> list[Problem]:
        """As :meth:`ExampleData.check`."""
        return check_sft(where, self.keys)

    def read(self, where: str) -> Rows:
        """As :meth:`ExampleData.read`."""
        return read_sft(where, self.keys)

    def prompt_of(self, row: Mapping[str, Any]) -> Any:
        """As :meth:`ExampleData.prompt_of`."""
        return sft_prompt(row)

    def encode(self, rows: Rows, tokenizer: Any) -> tuple[Batch, Counts]:
        """As :meth:`ExampleData.encode`."""
        encoding = Encoding(self.max_length, self.over_long, self.assistant, self.mask_prompt)
        return encode_sft(rows, tokenizer, encoding)


@dataclass(frozen=True, kw_only=True)
class PairData(ExampleData):
    """Rows of ``chosen`` and ``rejected`` answers, with their ``prompt`` or ``messages``. The mask covers the answers.

    Sequences ``2 * i`` and ``2 * i + 1`` are a pair.
    """

    unit_rows: ClassVar[int] = 2

    masked: ClassVar[Masked] = "answer"

    def check(self, where: str) -> list[Problem]:
        """As :meth:`ExampleData.check`."""
        return check_pairs(where, self.keys)

    def read(self, where: str) -> Rows:
        """As :meth:`ExampleData.read`."""
        return read_pairs(where, self.keys)

    def prompt_of(self, row: Mapping[str, Any]) -> Any:
        """As :meth:`ExampleData.prompt_of`."""
        return pair_prompt(row)

    def encode(self, rows: Rows, tokenizer: Any) -> tuple[Batch, Counts]:
        """As :meth:`ExampleData.encode`; adds ``pair`` (int64) and ``chosen`` (bool)."""
        batch, counts = encode_pairs(rows, tokenizer, PairEncoding(self.max_length, self.over_long, self.masked))
        number = np.arange(len(batch))
        return batch.with_columns(pair=number // 2, chosen=number % 2 == 0), counts


@dataclass(frozen=True, kw_only=True)
class ScoredPairData(PairData):
    """Pairs for a reward model: the mask is on the last token alone, where it gives its score."""

    masked: ClassVar[Masked] = "last"


@dataclass(frozen=True, eq=False)
class Examples:
    """What a run trains and evaluates on.

    Attributes:
        train: ``tokens``, ``action_mask``, ``action_tokens`` (int64 ``[rows]``, trained tokens), ``line`` (int64
            ``[rows]``, where in its source a row's example stands), and what its kind adds.
        held_out: the same; None where the run does not evaluate.
        counts: what has become of the rows of ``train``.
        asked: of each held-out row its prompt (text or messages) and ``answer``, as objects; None likewise.
    """

    train: Batch
    held_out: Batch | None
    counts: Counts
    asked: Batch | None = None


def load_examples(data: ExampleData, tokenizer: Any, evaluates: bool, seed: int) -> Examples:
    """Read, divide and encode the examples of a run.

    Args:
        data: which.
        tokenizer: of the model.
        evaluates: whether some are to be held out.
        seed: what is held out depends on it.

    Raises:
        DataError: names every row that cannot be used (20 at most).
    """
    rows = data.read(data.train)
    held: Rows | None = None
    if evaluates:
        rows, held = _held_out(data, rows, seed)
    train, counts = _encoded(data, rows, tokenizer)
    if held is None:
        return Examples(train, None, counts)
    return Examples(train, _encoded(data, held, tokenizer)[0], counts, _asked(data, held))


def _held_out(data: ExampleData, rows: Rows, seed: int) -> tuple[Rows, Rows]:
    if data.eval is not None:
        return rows, data.read(data.eval)
    kept, held = hold_out([data.prompt_of(row) for row in rows], data.eval_share, seed)
    return rows.take(kept), rows.take(held)


def _encoded(data: ExampleData, rows: Rows, tokenizer: Any) -> tuple[Batch, Counts]:
    batch, counts = data.encode(rows, tokenizer)
    lines = np.array([line for line, _ in rows.numbered], dtype=np.int64)[batch.dense("row")]
    trained = np.array([int(mask.sum()) for mask in batch.ragged("action_mask")], dtype=np.int64)
    more = {name: batch[name] for name in batch.columns if name not in (*TRAINED, "row")}
    return batch.select(*TRAINED).with_columns(action_tokens=trained, line=lines, **more), counts


def _asked(data: ExampleData, rows: Rows) -> Batch:
    return Batch({"prompt": [data.prompt_of(row) for row in rows], "answer": [_answer(row) for row in rows]})


def _answer(row: Mapping[str, Any]) -> Any:
    """What follows the prompt: the response, or the first answer of a conversation; None of a pair."""
    answers = [message["content"] for message in row.get("messages", ()) if message["role"] == "assistant"]
    return row.get("response", answers[0] if answers else None)


def example_problems(data: ExampleData, evaluates: bool, seed: int) -> list[Problem]:
    """Everything that is wrong with the sources, each with its place."""
    sources = [data.train, *([data.eval] if data.eval is not None else [])]
    problems = [problem for where in sources if where for problem in first_problems(data.check(where))]
    if problems or not data.train or not evaluates or data.eval is not None:
        return problems
    try:
        _held_out(data, data.read(data.train), seed)
    except (ValueError, DataError) as error:
        problems.append(Problem("config.data.eval_share", str(error)))
    return problems


def units(batch: Batch, unit_rows: int, drawn: Iterator[int] | list[int]) -> Batch:
    """The rows of the units with these numbers; pairs are numbered anew, for one may be drawn several times."""
    taken = batch.take([row for unit in drawn for row in range(unit * unit_rows, (unit + 1) * unit_rows)])
    return taken.with_columns(pair=np.arange(len(taken)) // unit_rows) if "pair" in taken else taken


def dealt(batch: Batch, unit_rows: int, members: int) -> Partition:
    """Which rows each member gets, so that all have about as many tokens; of few units some get none."""
    return partition(batch.ragged("tokens").lengths.tolist(), members, unit_rows)
