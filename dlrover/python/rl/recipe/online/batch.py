# SPDX-License-Identifier: Apache-2.0
"""The batch of a step, the columns that further roles compute for it, and its samples in the run's folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.algorithm.losses.columns import SampleView, find_masked, find_varied_groups
from dlrover.python.rl.common.disk_space import retry_io
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch, Ragged, even_cuts
from dlrover.python.rl.data.sampler import partition
from dlrover.python.rl.recipe.online.prompts import PromptSource
from dlrover.python.rl.recipe.reporting.rewards import is_unscored, merge_rows, number_samples, part_columns
from dlrover.python.rl.recipe.reporting.sample_file import HELD_OUT, NUMBERS, SAMPLES, WriteRequest, format_rows
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Replicate, Shard

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class StepBatch:
    """The rows of a step: groups in the order they were requested, retries at the end. Tokens and texts stay with the
    rollouts until a role needs them; the trainer has references, the order of the rows, and a few numbers per row."""

    rollouts: Pending  # batches that the trainer never reads
    rows: tuple[int, ...]  # the rows of ``rollouts`` to train on, in order
    scored: Batch  # the numbers of these rows
    groups: int
    total: int  # rows of ``rollouts``
    filtered: tuple[Batch, ...] = ()  # ``scored`` of groups whose rewards are all alike, and of surplus ones
    filtered_rows: tuple[int, ...] = ()  # their rows in ``rollouts``
    # ``scored`` for the algorithm: without the rewards of rows that it may not train on
    train_rows: Batch = field(default_factory=lambda: Batch({}))
    surplus: tuple[int, ...] = ()  # prompt ids of filtered groups that the step could train on, but does not need
    late: int = 0  # further groups that no step needs in time; they are not scored

    @classmethod
    def from_rollouts(cls, rollouts: Pending, scored: Batch, order: npt.NDArray[np.int64], groups: int) -> "StepBatch":
        """Make a batch of all rows of ``rollouts`` in ``order``; ``scored`` is in the order of ``rollouts``."""
        rows = order.tolist()
        return cls(rollouts, tuple(rows), scored.take(rows), groups, len(rows))

    @classmethod
    def concat(cls, parts: Sequence["StepBatch"]) -> "StepBatch":
        starts = np.cumsum([0, *(part.total for part in parts)]).tolist()
        placed = list(zip(starts, parts, strict=False))
        return cls(
            Pending([ref for part in parts for ref in part.rollouts]),
            tuple(start + row for start, part in placed for row in part.rows),
            Batch.concat([part.scored for part in parts]),
            sum(part.groups for part in parts),
            starts[-1],
            tuple(rows for part in parts for rows in part.filtered),
            tuple(start + row for start, part in placed for row in part.filtered_rows),
            surplus=tuple(prompt_id for part in parts for prompt_id in part.surplus),
        )

    def drop_uniform_groups(self, rewards: npt.NDArray[np.float64]) -> "StepBatch":
        """Filter out groups whose rewards are all alike; ``rewards`` is ``[rows]``, NaN for untrained samples."""
        samples = SampleView.of(self.scored.with_columns(reward=rewards))
        is_varied = find_varied_groups(samples.prompt_id, samples.reward, samples.counted)[samples.of_row]
        return self if is_varied.all() else self._filter(is_varied)

    def keep_groups(self, count: int) -> "StepBatch":
        """Filter out the groups after the first ``count``, which become ``surplus``."""
        ids = self.scored.dense("prompt_id")
        surplus = list(dict.fromkeys(ids.tolist()))[count:]
        return replace(self._filter(~np.isin(ids, surplus)), surplus=(*self.surplus, *surplus)) if surplus else self

    def _filter(self, is_used: npt.NDArray[np.bool_]) -> "StepBatch":
        used, unused = np.flatnonzero(is_used).tolist(), np.flatnonzero(~is_used).tolist()
        return replace(
            self,
            rows=tuple(self.rows[row] for row in used),
            scored=self.scored.take(used),
            groups=len(np.unique(self.scored.dense("prompt_id")[is_used])),
            filtered=(*self.filtered, self.scored.take(unused)),
            filtered_rows=(*self.filtered_rows, *(self.rows[row] for row in unused)),
        )

    @property
    def samples(self) -> Shard:
        return Shard(self.rollouts, rows=self.rows)

    def shard_evenly(self, ranks: int) -> Shard:
        """Shard the rows over ranks that all take part: with fewer rows than ranks, some get none."""
        cuts = even_cuts(len(self.rows), ranks)
        return self.shard([range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)])

    def balance(self, ranks: int, update: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
        tokens, parts = self.scored.dense("token_count"), [list[int]() for _ in range(ranks)]
        for number in np.unique(update):
            rows = np.flatnonzero(update == number)
            for part, group in zip(parts, partition(tokens[rows].tolist(), ranks), strict=True):
                part += rows[list(group)].tolist()
        return [tuple(part) for part in parts]

    def shard(self, parts: Sequence[Sequence[int]]) -> Shard:
        return Shard(self.rollouts, rows=[[self.rows[row] for row in part] for part in parts])

    @property
    def all_rows(self) -> Batch:
        """``scored``, followed by the rows that are filtered out."""
        return Batch.concat([self.scored, *self.filtered])

    @property
    def all_numbers(self) -> tuple[int, ...]:
        return (*self.rows, *self.filtered_rows)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of groups filtered out, and the staleness of samples if rollouts run ahead."""
        unused = sum(len(np.unique(rows.dense("prompt_id"))) for rows in self.filtered)
        counts = {"groups/filtered": unused - len(self.surplus), "groups/surplus": len(self.surplus) + self.late}
        metrics = {name: float(count) for name, count in counts.items() if count}
        if "staleness" in self.scored and len(self.scored):
            staleness = merge_rows(self.scored).dense("staleness")
            metrics["samples/staleness_mean"] = float(staleness.mean())
            metrics["samples/staleness_max"] = float(staleness.max())
        return metrics


@dataclass(frozen=True)
class AuxOutput:
    """Columns that a role computes for the rows of a step, if the algorithm needs one of them.

    The workload's ``method`` takes rollouts (see :func:`~dlrover.python.rl.recipe.rollout.episodes.make_batch`) and
    ``args``, and returns ``columns`` (name to numpy dtype), ragged ``[rows, seq]``, 0 outside the action mask; a column
    of several roles is stacked, ``[rows, seq, roles]``. ``init`` are the arguments of ``init_model``; None: it is not
    called. ``collective``: every rank is called, even without a row."""

    role: str
    method: str
    columns: Mapping[str, str]
    args: tuple[Any, ...] = ()
    init: tuple[Any, ...] | None = None
    collective: bool = False

    def is_needed(self, needs: frozenset[str]) -> bool:
        return not needs.isdisjoint(self.columns)


def name_samples(rows: Batch) -> list[dict[str, Any]]:
    ids = zip(rows.dense("prompt_id").tolist(), rows.dense("sample_index").tolist(), strict=True)
    return [{"sample": f"sample {index} of prompt {prompt}"} for prompt, index in ids]


def select_logged(scored: Batch, rows: int) -> Batch:
    """Return ``digest`` and the columns of ``samples.jsonl`` except texts: ``row`` is the prompt's number among the
    ``rows`` of its file; rows with the same ``trajectory`` are one sample."""
    logged = scored.with_columns(trajectory=number_samples(scored), row=scored.dense("prompt_id") % rows)
    return logged.select(*(name for name in (*NUMBERS, "digest") if name in logged), *part_columns(scored), "row")


def training_columns(batch: StepBatch, rows: Batch | None, ranks: Sequence[int]) -> dict[str, Any]:
    """Return columns of ``batch.all_rows`` about the training on ``rows``, which :func:`assign_updates` returned; None:
    nothing is trained. ``ranks`` are the first workers of the policy's replicas; none if it is not updated.

    ``mark`` is empty for a row that is trained on; else ``failed``, ``filtered``, ``masked`` or ``dropped``, and
    ``reason`` says why. ``advantage`` is the mean over the row's action tokens, NaN without one; ``update`` numbers the
    optimizer step and ``rank`` the worker that computes its gradient, -1 for none."""
    everything, count = batch.all_rows, len(batch.scored)
    update, rank = (np.full(len(everything), -1) for _ in range(2))
    advantage = np.full(len(everything), np.nan)
    if rows is not None:
        advantage[:count] = _mean_advantage(rows)
        if ranks:
            update[:count] = rows.dense("update")
            for number, part in zip(ranks, batch.balance(len(ranks), rows.dense("update")), strict=True):
                rank[list(part)] = number
            rank[update < 0] = -1
    reasons = iter(_reasons(batch, rows) if (update < 0).any() else [("", "")] * len(update))
    marks = [("", "") if number >= 0 else why for number, why in zip(update.tolist(), reasons, strict=True)]
    return {
        **{"advantage": advantage, "update": update, "rank": rank},
        **{"mark": [mark for mark, _ in marks], "reason": [reason for _, reason in marks]},
        "completion_tokens": everything.dense("action_tokens"),
        "prompt_tokens": everything.dense("token_count") - everything.dense("action_tokens"),
    }


def _reasons(batch: StepBatch, rows: Batch | None) -> Iterator[tuple[str, str]]:
    """Yield why each row of ``batch.all_rows`` would not be trained on, as ``mark`` and ``reason``."""
    everything, count = batch.all_rows, len(batch.scored)
    errors = everything.objects("error") if "error" in everything else [None] * len(everything)
    has_failed = is_unscored(everything)
    train_rows = batch.train_rows if len(batch.train_rows) else batch.scored
    masked, may_train = find_masked(train_rows), ~is_unscored(train_rows)
    is_planned = rows.dense("update") >= 0 if rows is not None else np.zeros(count, dtype=np.bool_)
    samples = SampleView.of(everything)
    _, first = np.unique(samples.of_row, return_index=True)
    _, group = np.unique(np.stack([samples.prompt_id, everything.dense("retry")[first]]), axis=1, return_inverse=True)
    is_varied = find_varied_groups(group.reshape(-1), samples.reward, samples.counted)[samples.of_row]
    is_surplus = np.isin(everything.dense("prompt_id"), batch.surplus)
    for row, error in enumerate(errors):
        if has_failed[row] and (error or row >= count or not may_train[row]):
            yield "failed", error or "it has no reward"
        elif row >= count and not is_varied[row]:
            yield "filtered", "the rewards of its group are equal"
        elif row >= count and is_surplus[row]:
            yield "dropped", "the step had enough other groups"
        elif row >= count or not may_train[row]:
            yield "dropped", "a sample of its group failed"
        elif masked[row]:
            yield "masked", "its completion was cut off"
        else:
            yield "dropped", "only the critic was trained" if is_planned[row] else "it has no weight in the loss"


def _mean_advantage(rows: Batch) -> npt.NDArray[np.float64]:
    column = rows["advantage"] if "advantage" in rows else np.full(len(rows), np.nan)
    if not isinstance(column, Ragged):
        return np.asarray(column, dtype=np.float64)
    sums = np.bincount(column.spread(np.arange(len(rows))), column.values, len(rows))
    tokens = rows.dense("action_tokens")
    means: npt.NDArray[np.float64] = np.divide(sums, tokens, out=np.full(len(rows), np.nan), where=tokens > 0)
    return means


def _token_values(trained: Batch | None, chosen: npt.NDArray[np.bool_]) -> dict[str, list[Any]]:
    """Return the values of each token of the chosen rows, as far as the trainer has them: a list for the whole row, or
    one number for all tokens."""
    values: dict[str, list[Any]] = {}
    for name, column in (("token_advantages", "advantage"), ("token_old_logprobs", "old_logprobs")):
        if trained is not None and column in trained:
            count = len(trained)
            source = trained.ragged(column) if isinstance(trained[column], Ragged) else trained.dense(column)
            values[name] = [None] * len(chosen)
            for row in np.flatnonzero(chosen[:count]).tolist():
                values[name][row] = source[row].tolist()
    return values


class SampleLog:
    """Writes ``samples.jsonl`` and ``held_out.jsonl``.

    ::

        rollouts -----------------------------------------------.
                                                                v
        scored rows -> trainer: numbers and their order -> ROLLOUT[0].write_samples -> samples.jsonl
                                                                '-> excerpt for console and tables -> RunLog

    ROLLOUT[0] removes the lines of a step and of later steps before it writes, and all lines before the run begins. It
    answers a repeated call from its record, so a replaced trainer does not cut the lines of its predecessor. If the
    run's files are in an object store, the trainer fetches the texts and writes them. The state is where the lines
    end."""

    def __init__(self, trainer: Any, prompts: PromptSource) -> None:
        self._rollouts, self._prompts, self._folder = trainer.RG_ROLLOUT, prompts, trainer.job_dir
        self._run_log = trainer.run_log
        self._run_log.owns_samples = self._is_local = not isinstance(trainer.results_dir, Path)
        self._end: int | None = None  # unknown

    def remove_steps(self, first: int) -> None:
        """Remove the lines of the steps from ``first`` on."""
        if not self._is_local:
            (self._end,) = self._rollouts.cut_samples(self._folder / SAMPLES, first, self._end)

    def write_step(self, step: int, batch: StepBatch) -> None:
        """Write the rows of a step, or of its first samples only."""
        self._end_step(step, self._begin_step(step, batch))

    @contextmanager
    def writing_step(self, step: int, batch: StepBatch, trained: Batch, ranks: Sequence[int]) -> Iterator[None]:
        """Write the rows of a step while the block runs, also if it raises an error; ``trained`` has the rows of its
        updates on ``ranks``, see :func:`training_columns`."""
        pending = self._begin_step(step, batch, trained, ranks)
        with self._despite_errors(step, lambda: self._end_step(step, pending)):
            yield
        self._end_step(step, pending)

    def _begin_step(
        self, step: int, batch: StepBatch, trained: Batch | None = None, ranks: Sequence[int] = ()
    ) -> Pending | None:
        excerpt = self._run_log.excerpt(step)
        limit = max(excerpt.samples, excerpt.printed, excerpt.table)
        if not limit:
            return None
        numbers, rows = select_logged(batch.all_rows, self._prompts.rows), batch.all_numbers
        is_detailed = numbers.dense("trajectory") < min(excerpt.tokens, excerpt.samples)
        numbers = numbers.with_columns(
            **training_columns(batch, trained, ranks), detailed=is_detailed, **_token_values(trained, is_detailed)
        )
        chosen = np.flatnonzero(numbers.dense("trajectory") < limit).tolist()
        numbers = numbers.take(chosen) if len(chosen) < len(numbers) else numbers
        places = [rows[row] for row in chosen]
        if self._is_local:
            texts = Batch.concat(self._texts(batch.rollouts).result()).take(places)  # waits: for the workers' records
            detailed = [rows[row] for row in np.flatnonzero(is_detailed).tolist()]
            pending = self._rollouts.token_columns(Shard(batch.rollouts, rows=detailed)) if detailed else None
            tokens = pending.result()[0] if pending is not None else None  # waits: likewise
            self._run_log.write_samples(step, format_rows(numbers, texts, tokens))
            return None
        request = WriteRequest(self._folder / SAMPLES, step, self._end, places, numbers, excerpt)
        write = self._rollouts.write_samples.options(blocking=False)
        written: Pending = write(request.pack(), Replicate(batch.rollouts))
        return written

    def _end_step(self, step: int, pending: Pending | None) -> None:
        if pending is not None:
            (written,) = pending.result()  # waits: for the worker's record
            self._end = written.end
            self._run_log.show_samples(step, written)

    @contextmanager
    def write_failed_step(self, step: int, batch: StepBatch) -> Iterator[None]:
        """Write the rows of the step if the block raises an error, which is raised even if they cannot be written."""
        with self._despite_errors(step, lambda: self.write_step(step, batch)):
            yield

    @contextmanager
    def _despite_errors(self, step: int, write: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except Exception:
            try:
                write()
            except Exception as error:  # noqa: BLE001 -- the first error says why the step failed
                _LOG.warning("the samples of step %d could not be written: %s", step, error)
            raise

    def write_held_out(self, step: int, answers: StepBatch) -> None:
        """Write the answers of the evaluation after ``step``."""
        numbers = self._prompts.name_sets(select_logged(answers.scored, self._prompts.held_out_rows))
        texts = self._texts(answers.rollouts)
        if self._is_local:
            fetched = Batch.concat(texts.result()).take(answers.rows)  # waits: for the workers' records
            self._run_log.write_held_out(step, format_rows(numbers, fetched))
        else:
            file = Path(self._folder / HELD_OUT)
            retry_io(file.touch, file)
            self._rollouts.write_held_out(file, step, numbers, Shard(texts, rows=answers.rows))

    def _texts(self, rollouts: Pending) -> Pending:
        members = len(self._rollouts)
        if len(rollouts) % members:  # fewer prompts than workers
            pending: Pending = self._rollouts.texts.options(target="RANK0")(Shard(rollouts))
            return pending
        calls = [self._rollouts.texts(rollouts[at : at + members]) for at in range(0, len(rollouts), members)]
        return Pending([ref for call in calls for ref in call])

    def state_dict(self) -> dict[str, Any]:
        return {"end": self._end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._end = state["end"]
