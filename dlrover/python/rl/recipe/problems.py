"""The problems of a run: which are trained on, which are held out, and in which order they come."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import DataError, Problem
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.cursor import PromptCursor
from dlrover.python.rl.data.held_out import hold_out
from dlrover.python.rl.data.jsonl import first_problems
from dlrover.python.rl.data.problems import PromptRow, check_prompts, empty_prompts, load_prompts
from dlrover.python.rl.recipe.config import PolicyConfig, RewardConfig

_LOG = get_logger(__name__)


class ProblemSource:
    """Draws prompts to train on, and knows those that are never trained on.

    Args:
        config: data, seed and batch size of the run.

    Attributes:
        rows: how many rows the file of the training problems has.
        held_out: the problems to evaluate on; see :func:`as_batch`.
        held_out_rows: how many rows they were chosen from.
        places: every prompt of the run, as objects ``place`` (``file:line``) and ``prompt``.
        left_out: numbers of the ``places`` that the run does without, rising.

    Raises:
        DataError: a file cannot be used.
    """

    def __init__(self, config: PolicyConfig) -> None:
        data = config.data
        source = data.train or "rollout.env_path"
        rows = load_prompts(data.train, data.keys) if data.train else _empty_rows(config)
        if data.eval is None:
            train, held = hold_out([row.prompt or row.extra_info for row in rows], data.eval_rows, config.seed)
            held_out, self.held_out_rows = as_batch(rows, held), len(rows)
            self.places, self._first_held = _places((source, rows)), 0
        else:
            train, evaluated = list(range(len(rows))), load_prompts(data.eval, data.keys)[: data.eval_rows]
            held_out, self.held_out_rows = as_batch(evaluated, range(len(evaluated))), len(evaluated)
            self.places, self._first_held = _places((source, rows), (data.eval, evaluated)), len(rows)
        self._rows, self.rows, self._config = rows, len(rows), config
        self._every = train, held_out
        self._keep_all_but([])

    def leave_out(self, too_long: Sequence[Problem]) -> None:
        """Neither train nor evaluate on these prompts, named by their places, from the run's beginning on.

        Raises:
            DataError: none would be left to train on, or to evaluate on.
        """
        names = {problem.where for problem in too_long}
        self._keep_all_but([number for number, name in enumerate(self.places.objects("place")) if name in names])
        if too_long:
            count = f"{len(self.left_out)} of {len(self.places)}"
            _LOG.warning("%s prompts are too long and left out, the first %s", count, too_long[0])

    def _keep_all_but(self, numbers: Sequence[int]) -> None:
        out, (train, held_out) = set(numbers), self._every
        numbers_held = (self._first_held + held_out.dense("prompt_id")).tolist()
        evaluated = [row for row, number in enumerate(numbers_held) if number not in out]
        self._train = [row for row in train if row not in out]
        for rows, what in ((self._train, "train"), (evaluated, "evaluate")):
            if not rows:
                raise DataError([Problem("config.data.max_prompt_tokens", f"leaves no prompt to {what} on")])
        self.left_out, self.held_out = list(numbers), held_out.take(evaluated)
        self._cursor = PromptCursor(len(self._train), self._config.prompts_per_step, self._config.seed)

    @property
    def _limit(self) -> list[Any]:
        return [self._config.data.max_prompt_tokens, self._config.data.over_long]

    def told(self) -> dict[str, int]:
        """What a run's summary says of its problems."""
        dropped = {"dropped prompts": len(self.left_out)} if self.left_out else {}
        return {"held-out problems": len(self.held_out), **dropped}

    def draw(self, count: int) -> list[int]:
        """Numbers of the next rows to train on, from 0."""
        return [self._train[drawn] for drawn in self._cursor.next(count)]

    def prompts(self, rows: Sequence[int]) -> Batch:
        """Rows of the training file, as objects ``prompt``, ``answer`` and ``extra_info``."""
        return as_batch(self._rows, rows).select("prompt", "answer", "extra_info")

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in its data, and which of them it does without."""
        return {**self._cursor.state_dict(), "left_out": self.left_out, "over_long": self._limit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the run that gave ``state`` stood.

        Raises:
            DataError: it is of other data, another seed or another limit of prompts.
        """
        if state["over_long"] != self._limit:
            what = f"was {state['over_long']} when the run began, and is {self._limit}: its prompts are chosen then"
            raise DataError([Problem("config.data.max_prompt_tokens and over_long", what)])
        self._keep_all_but(state["left_out"])
        self._cursor.load_state_dict(state)


def as_batch(rows: Sequence[PromptRow], chosen: Sequence[int]) -> Batch:
    """The chosen rows of a file as a batch: ``prompt_id`` (int64: the row's number in the file, from 0), and as objects
    ``prompt``, ``answer`` and ``extra_info``."""
    picked = [rows[index] for index in chosen]
    return Batch(
        {
            "prompt_id": np.array(chosen, dtype=np.int64),
            "prompt": [row.prompt for row in picked],
            "answer": [row.answer for row in picked],
            "extra_info": [row.extra_info for row in picked],
        }
    )


def _empty_rows(config: PolicyConfig) -> list[PromptRow]:
    """Rows for an environment that says itself what it begins with: one for each prompt of the run, and those to
    evaluate on."""
    held_out = 0 if config.data.eval else config.data.eval_rows
    return empty_prompts(config.steps * config.prompts_per_step + held_out)


def _places(*files: tuple[str, Sequence[PromptRow]]) -> Batch:
    placed = [(f"{path}:{row.line}", row.prompt) for path, rows in files for row in rows]
    return Batch({"place": [place for place, _ in placed], "prompt": [prompt for _, prompt in placed]})


def data_problems(config: PolicyConfig) -> list[Problem]:
    """Everything that is wrong with the files, each with its place."""
    data = config.data
    if data.train is None and config.rollout.env_path is None:
        return [Problem("config.data.train", "is required, where no rollout.env_path says what to begin with")]
    if data.over_long == "drop" and data.max_prompt_tokens is None:
        return [Problem("config.data.over_long", "says 'drop', and no data.max_prompt_tokens says what is too long")]
    files = [path for path in (data.train, data.eval) if path]
    problems = [problem for path in files for problem in first_problems(check_prompts(path, data.keys))]
    if problems or not data.train:
        return problems
    judged_by_function = config.rollout.env_path is None and config.reward.model is None
    if judged_by_function and config.reward.function == RewardConfig().function:
        problems = [problem for path in files for problem in first_problems(_without_answer(path, data.keys))]
    if data.eval is None:
        try:
            hold_out([row.prompt for row in load_prompts(data.train, data.keys)], data.eval_rows, config.seed)
        except (ValueError, DataError) as error:
            problems.append(Problem("config.data.eval_rows", str(error)))
    return problems


def _without_answer(path: str, keys: Mapping[str, str]) -> list[Problem]:
    what = "has no 'answer', with which the default reward.function compares"
    return [Problem(f"{path}:{row.line}", what) for row in load_prompts(path, keys) if row.answer is None]
