# SPDX-License-Identifier: Apache-2.0
"""The samples of a run in its folder, whose texts do not pass through the trainer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrover.python.rl.common.disk_space import retry_io
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.online.batch import StepBatch, select_logged
from dlrover.python.rl.recipe.online.prompts import PromptSource
from dlrover.python.rl.recipe.reporting.sample_file import HELD_OUT, SAMPLES, format_rows
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Shard


class SampleLog:
    """Writes ``samples.jsonl`` and ``held_out.jsonl``.

    ::

        ROLLOUT[0..n].texts: what each has generated ------------.
                                                                 v
        scored rows -> trainer: numbers, and their order -> ROLLOUT[0].write_samples -> samples.jsonl
                                                                 '-> what the console and tables show -> RunLog

    A step has two calls of ROLLOUT[0]: one removes what an earlier attempt of it or of later ones has left, the other
    writes there. A member that has done a call answers its repetition without doing it again, so the lines that a
    killed trainer has had written stay, and its successor may not cut the file. Another member does both calls.

    A folder that other nodes do not see, since the run's files are in an object store, is the trainer's to write: the
    texts come to it. As part of a trainer's ``state`` it keeps where the lines end."""

    def __init__(self, trainer: Any, prompts: PromptSource) -> None:
        self._rollouts, self._prompts, self._folder = trainer.RG_ROLLOUT, prompts, trainer.job_dir
        self._run_log = trainer.run_log
        self._run_log.owns_samples = self._is_local = not isinstance(trainer.results_dir, Path)
        self._end: int | None = None  # unknown

    def begin_step(self, step: int) -> None:
        """Remove the lines of ``step`` and of later ones."""
        if not self._is_local:
            self._touch(SAMPLES)
            (self._end,) = self._rollouts.begin_samples(self._folder / SAMPLES, step, self._end)

    def write_step(self, step: int, batch: StepBatch) -> None:
        """Write the rows of a step, or of its first samples only."""
        numbers, rows = select_logged(batch.all_rows, self._prompts.rows), batch.all_numbers
        shown = self._run_log.excerpt(step)
        most = max(shown.samples, shown.printed, shown.table)
        chosen = np.flatnonzero(numbers.dense("trajectory") < most).tolist()
        if not chosen:
            return
        numbers, rows = numbers.take(chosen), tuple(rows[row] for row in chosen)
        texts = self._texts(batch.rollouts)
        if self._is_local:
            self._run_log.write_samples(step, format_rows(numbers, _fetch(texts, rows)))
            return
        place = self._folder / SAMPLES, step, self._end
        (written,) = self._rollouts.write_samples(*place, numbers, Shard(texts, rows=rows), shown)
        self._end = written.end
        self._run_log.show_samples(step, written)

    def write_held_out(self, answers: StepBatch) -> None:
        """Write the last answers to the held-out prompts, one line each."""
        numbers = self._prompts.name_sets(select_logged(answers.scored, self._prompts.held_out_rows))
        texts = self._texts(answers.rollouts)
        if self._is_local:
            self._run_log.write_held_out(format_rows(numbers, _fetch(texts, answers.rows)))
        else:
            file = self._touch(HELD_OUT)
            self._rollouts.write_held_out(file, numbers, Shard(texts, rows=answers.rows))

    def _texts(self, rollouts: Pending) -> Pending:
        """Those of each call's results, from the members that have them."""
        members = len(self._rollouts)
        if len(rollouts) % members:  # fewer prompts than members
            pending: Pending = self._rollouts.texts.options(target="RANK0")(Shard(rollouts))
            return pending
        calls = [self._rollouts.texts(rollouts[at : at + members]) for at in range(0, len(rollouts), members)]
        return Pending([ref for call in calls for ref in call])

    def _touch(self, name: str) -> Path:
        """A file that is there for each member that sees the folder."""
        file = Path(self._folder / name)
        retry_io(file.touch, file)
        return file

    def state_dict(self) -> dict[str, Any]:
        return {"end": self._end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._end = state["end"]


def _fetch(texts: Pending, rows: Sequence[int]) -> Batch:
    return Batch.concat(texts.result()).take(rows)  # waits: for what members have
