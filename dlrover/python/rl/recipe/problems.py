"""The problems of a run: which are trained on, which are held out, and in which order they come."""

from collections.abc import Sequence

import numpy as np

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.cursor import PromptCursor
from dlrover.python.rl.data.problems import PromptRow, check_prompts, hold_out, load_prompts
from dlrover.python.rl.recipe.config import GRPOConfig


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
            self._train, held = hold_out(rows, data.eval_rows, config.seed)
            self.held_out = as_batch(rows, held)
        else:
            self._train, evaluated = list(range(len(rows))), load_prompts(data.eval)
            self.held_out = as_batch(evaluated, range(min(len(evaluated), data.eval_rows)))
        self._rows = rows
        self._cursor = PromptCursor(len(self._train), config.prompts_per_step, config.seed)

    def next(self) -> Batch:
        """The next prompts to train on; see :func:`as_batch`."""
        return as_batch(self._rows, [self._train[drawn] for drawn in self._cursor.next()])


def as_batch(rows: Sequence[PromptRow], chosen: Sequence[int]) -> Batch:
    """The chosen rows of a file as a batch: ``prompt_id`` (int64: the row's number in the file, from 0), and as objects
    ``prompt``, ``answer`` and ``extra_info``."""
    picked = [rows[index] for index in chosen]
    return Batch(
        {
            "prompt_id": np.asarray(chosen, dtype=np.int64),
            "prompt": [row.prompt for row in picked],
            "answer": [row.answer for row in picked],
            "extra_info": [row.extra_info for row in picked],
        }
    )


def data_problems(config: GRPOConfig) -> list[Problem]:
    """Everything that is wrong with the files, each with its place."""
    data = config.data
    problems = [problem for path in (data.train, data.eval) if path for problem in check_prompts(path)]
    if problems or data.eval is not None or not data.train:
        return problems
    try:
        hold_out(load_prompts(data.train), data.eval_rows, config.seed)
    except (ValueError, DataError) as error:
        return [Problem("config.data.eval_rows", str(error))]
    return []
