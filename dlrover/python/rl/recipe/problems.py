"""The problems of a run: which are trained on, which are held out, and in which order they come."""

from collections.abc import Sequence

import numpy as np

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.cursor import PromptCursor
from dlrover.python.rl.data.problems import PromptRow, check_prompts, hold_out, load_prompts
from dlrover.python.rl.recipe.config import GRPOConfig, PromptData


class ProblemSource:
    """Draws prompts to train on, and knows those that are never trained on.

    Args:
        config: data, seed and batch size of the run.

    Raises:
        DataError: a file cannot be used.
    """

    def __init__(self, config: GRPOConfig) -> None:
        data = config.data
        rows = load_prompts(data.train)
        if data.eval is None:
            train, held = hold_out(rows, data.eval_rows, config.seed)
            self._train, held_rows = [rows[index] for index in train], [rows[index] for index in held]
        else:
            self._train, held_rows = rows, load_prompts(data.eval)[: data.eval_rows]
        self.held_out = as_batch(held_rows, range(len(held_rows)))
        self._cursor = PromptCursor(len(self._train), config.prompts_per_step, config.seed)

    def next(self) -> Batch:
        """The next prompts to train on: ``prompt_id`` (row number in the data) and the row's objects."""
        rows = self._cursor.next()
        return as_batch([self._train[row] for row in rows], rows)


def as_batch(rows: Sequence[PromptRow], ids: Sequence[int]) -> Batch:
    """Prompts as a batch: ``prompt_id`` (int64), and as objects ``prompt``, ``answer`` and ``extra_info``."""
    return Batch(
        {
            "prompt_id": np.asarray(ids, dtype=np.int64),
            "prompt": [row.prompt for row in rows],
            "answer": [row.answer for row in rows],
            "extra_info": [row.extra_info for row in rows],
        }
    )


def data_problems(data: PromptData, seed: int) -> list[Problem]:
    """Everything that is wrong with the files, each with its place."""
    problems = [*check_prompts(data.train), *(check_prompts(data.eval) if data.eval else ())]
    if problems or data.eval is not None:
        return problems
    try:
        hold_out(load_prompts(data.train), data.eval_rows, seed)
    except (ValueError, DataError) as error:
        return [Problem("config.data.eval_rows", str(error))]
    return []
