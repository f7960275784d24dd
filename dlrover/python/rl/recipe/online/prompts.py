# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: which are trained on, which are held out, and their order."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate, chain, islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.by_value import readable_name
from dlrover.python.rl.common.errors import ConfigError, DataError, VerifierError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.data.conversation import arguments_of_template
from dlrover.python.rl.data.jsonl import describe_columns, first_errors, sort_by_line
from dlrover.python.rl.data.prompts import (
    PROMPT_ROWS,
    PromptRow,
    empty_prompts,
    find_prompt_faults,
    load_prompts,
    to_prompts,
)
from dlrover.python.rl.data.sampler import PromptCursor
from dlrover.python.rl.data.source import hold_out, is_left_unread
from dlrover.python.rl.engine.model.loading import check_positions
from dlrover.python.rl.environment.core.functions import load_function
from dlrover.python.rl.environment.core.scoring import Completed, RewardFunction
from dlrover.python.rl.recipe.base.config import PolicyConfig, PromptData
from dlrover.python.rl.recipe.base.model_files import count_room, find_large, find_tokenizer

_LOG = get_logger(__name__)

HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 200
"""Of the prompts, where ``data.eval_rows`` does not say how many."""

_GAMES, _HELD_OUT_GAMES = 1 << 14, 64
"""Rows of an environment that needs no data, to train on, which come again in another order, and to evaluate on."""

_SET_NAME = re.compile(r"[\w.-]+")

_SHOWN = 60
"""Characters of a wrong value in an error."""


def name_source(key: str, source: str, errors: Iterable[ConfigError]) -> list[ConfigError]:
    """Errors of a data source; those of all of it with the key that names it, those of rows as they are."""
    return [
        ConfigError(f"config.data.{key}", f"{source}: {error.what}") if error.where == source else error
        for error in errors
    ]


def digest_of_rows(rows: Iterable[Any]) -> str:
    """Of JSON values, in their order. Of other objects in them the type alone counts: their text may be an address."""
    whole = blake2b(digest_size=16)
    for row in rows:
        whole.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode() + b"\n")
    return whole.hexdigest()


class JobCursor(PromptCursor):
    """The order of the rows of a job, of which ``digest`` is :func:`digest_of_rows`. Its state has their ``source``,
    and its errors name the keys of the job."""

    def __init__(  # noqa: PLR0913 -- what a position is of
        self, source: str, rows: int, batch_size: int, seed: int, total: int | None = None, digest: str = ""
    ) -> None:
        super().__init__(rows, batch_size, seed, total)
        self._source, self._digest = source, digest

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "source": self._source, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume; raise DataError if the rows, their number or the seed have changed."""
        try:
            super().load_state_dict(state)
        except DataError as error:
            raise DataError([self._in_terms_of_job(fault, state) for fault in error.errors]) from None
        if (was := state.get("digest")) and self._digest and was != self._digest:
            what = f"'{self._source}' has other rows, or in another order, than the run was begun with"
            raise DataError([ConfigError("config.data.train", f"{what}: go on with those, or begin another run")])

    def _in_terms_of_job(self, fault: ConfigError, state: Mapping[str, Any]) -> ConfigError:
        own, was = super().state_dict(), state.get(fault.where)
        advice = "go on with that, or begin another run"
        if fault.where == "seed":
            return ConfigError("config.seed", f"{own['seed']}, but the run was begun with {was}: {advice}")
        if fault.where == "rows":
            source = state.get("source", self._source)  # states of earlier versions have none
            what = f"'{self._source}' has {own['rows']} rows to train on, but the run was begun with"
            if source == self._source:
                what = f"{what} {was} of them: the file has changed, or the part that is held out"
                return ConfigError("config.data", f"{what}; {advice}")
            return ConfigError("config.data.train", f"{what} '{source}', which had {was}: {advice}")
        return fault


class PromptSource:
    """The prompts to train on, in their order, and those to evaluate on (``held_out``, see :func:`make_prompt_batch`).

    ``rows`` and ``held_out_rows`` are the numbers of rows that they were chosen from, ``columns`` the further columns
    that one of these has. ``places`` are all prompts of the run, as objects ``place`` (``file:line``), ``prompt`` and,
    for the chat template, ``extra_info``; ``dropped`` the numbers of those that the run does not use, rising.
    ``changed_sets`` are the sets that are others than those of the state that was loaded. Raises DataError if a file
    cannot be used."""

    def __init__(self, config: PolicyConfig) -> None:
        data = config.data
        self._source = source = data.train or "rollout.env_path"
        # Rows for an environment that gives the first state, and those to evaluate on; as many for a run of any length,
        # which may be resumed with more steps.
        empty = _GAMES + (0 if data.eval else data.eval_rows or _HELD_OUT_GAMES)
        rows = load_prompts(data.train, data.keys) if data.train else empty_prompts(empty)
        if data.eval is None:
            train, held_rows = _hold_out([row.prompt or row.extra_info for row in rows], data, config.seed)
            held_out, self.held_out_rows = make_prompt_batch(rows, held_rows), len(rows)
            self.places, self._first_held = _places((source, rows)), 0
            self.eval_sets, evaluated = {"": range(len(rows))}, []
        else:
            limit = data.eval_rows or MOST_HELD_OUT
            loaded = {name: load_prompts(path, data.keys)[:limit] for name, path in data.eval_sets.items()}
            train, evaluated = list(range(len(rows))), list(chain.from_iterable(loaded.values()))
            held_out, self.held_out_rows = make_prompt_batch(evaluated, range(len(evaluated))), len(evaluated)
            files = [(path, loaded[name]) for name, path in data.eval_sets.items()]
            self.places, self._first_held = _places((source, rows), *files), len(rows)
            ends = list(accumulate(map(len, loaded.values())))
            self.eval_sets = {name: range(end - len(loaded[name]), end) for name, end in zip(loaded, ends, strict=True)}
        self._rows, self.rows, self._config = rows, len(rows), config
        self.columns = find_columns([*rows, *evaluated])
        self._every, self._limit = (train, held_out), [data.max_prompt_tokens, data.over_long]
        self._digest = digest_of_rows(row.prompt or row.extra_info for row in rows)
        self._digests, ids = dict[str, str](), held_out.dense("prompt_id").tolist()
        for name, numbers in self.eval_sets.items():
            prompts = held_out.take([row for row, number in enumerate(ids) if number in numbers])
            pairs = zip(prompts.objects("prompt"), prompts.objects("extra_info"), strict=True)
            self._digests[name] = digest_of_rows(pairs)
        self.changed_sets: set[str] = set()
        self._drop_rows([])

    @property
    def evaluated(self) -> str:
        """A digest of all held-out prompts."""
        return digest_of_rows(sorted(self._digests.items()))

    def find_sets(self, answers: Batch) -> npt.NDArray[np.str_]:
        """``[rows]``: the names of the sets that held-out prompts are in."""
        starts, names = [numbers.start for numbers in self.eval_sets.values()], np.array(list(self.eval_sets))
        set_of_row: npt.NDArray[np.str_] = names[np.searchsorted(starts, answers.dense("prompt_id"), side="right") - 1]
        return set_of_row

    def name_sets(self, answers: Batch) -> Batch:
        """Rows of held-out prompts with their ``set``, of which they have the ``row``, where sets have names."""
        names = self.find_sets(answers).tolist()
        starts = np.array([self.eval_sets[name].start for name in names], dtype=np.int64)
        return answers.with_columns(set=names, row=answers.dense("row") - starts) if any(names) else answers

    def drop(self, too_long: Sequence[ConfigError]) -> None:
        """Neither train nor evaluate on these prompts, by their places; DataError if that leaves none."""
        names, position = {error.where for error in too_long}, self._cursor.state_dict()
        self._drop_rows([number for number, name in enumerate(self.places.objects("place")) if name in names])
        if self.changed_sets:  # the rows to train on are those of the state
            self._cursor.load_state_dict(position)
            self.changed_sets = set()
        if too_long:
            count = f"{len(self.dropped)} of {len(self.places)}"
            _LOG.warning("%s prompts are too long and dropped, the first %s", count, too_long[0])

    def _drop_rows(self, numbers: Sequence[int]) -> None:
        out, (train, held_out) = set(numbers), self._every
        numbers_held = (self._first_held + held_out.dense("prompt_id")).tolist()
        evaluated = [row for row, number in enumerate(numbers_held) if number not in out]
        self._train = [row for row in train if row not in out]
        ids = set(held_out.dense("prompt_id")[evaluated].tolist())
        sets = {f"evaluate {name}".rstrip(): ids.intersection(numbers) for name, numbers in self.eval_sets.items()}
        for purpose, rows in {"train": self._train, **sets}.items():
            if not rows:
                raise DataError([ConfigError("config.data.max_prompt_tokens", f"leaves no prompt to {purpose} on")])
        self.dropped, self.held_out = list(numbers), held_out.take(evaluated)
        every, seed = self._config.prompts_per_step, self._config.seed
        self._cursor = JobCursor(self._source, len(self._train), every, seed, digest=self._digest)

    def summary(self) -> dict[str, int]:
        return {"held_out_prompts": len(self.held_out), "dropped_prompts": len(self.dropped)}

    def next_rows(self, count: int) -> list[int]:
        return [self._train[index] for index in self._cursor.next(count)]

    def select(self, rows: Sequence[int]) -> Batch:
        """Rows of the training file, as objects ``prompt``, ``answer`` and ``extra_info``."""
        return make_prompt_batch(self._rows, rows).select("prompt", "answer", "extra_info")

    def state_dict(self) -> dict[str, Any]:
        kept = {"dropped": self.dropped, "over_long": self._limit, "sets": self._digests}
        return {**self._cursor.state_dict(), **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; DataError if the data, the seed or the prompt limit have changed."""
        if state["over_long"] != self._limit:
            message = f"was {state['over_long']} when the run began, and is {self._limit}: its prompts are chosen then"
            raise DataError([ConfigError("config.data.max_prompt_tokens and over_long", message)])
        was = state.get("sets", self._digests)  # states of earlier versions have none
        self.changed_sets = {name for name, digest in self._digests.items() if was.get(name) != digest}
        is_other = self.changed_sets and self._first_held
        self._drop_rows([row for row in state["dropped"] if not is_other or row < self._first_held])
        self._cursor.load_state_dict(state)


def make_prompt_batch(rows: Sequence[PromptRow], chosen: Sequence[int]) -> Batch:
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


def find_columns(rows: Iterable[PromptRow]) -> list[str]:
    """The names of user data that a row has."""
    return sorted({name for row in rows for name in row.extra_info})


def _hold_out(prompts: Sequence[Any], data: PromptData, seed: int) -> tuple[list[int], list[int]]:
    """The numbers of the rows to train on, and of those to evaluate on; ValueError or DataError if ``data.eval_rows``
    is impossible."""
    share = min(MOST_HELD_OUT, max(1, round(HELD_OUT_SHARE * len(prompts))))
    size = data.eval_rows or (share if data.train else _HELD_OUT_GAMES)
    try:
        return hold_out(prompts, size, seed)
    except (ValueError, DataError):
        if data.eval_rows is not None:
            raise
        _LOG.warning("%s repeats a single prompt, which the run is evaluated on, too", data.train)
        return list(range(len(prompts))), [0]


def _places(*files: tuple[str, Sequence[PromptRow]]) -> Batch:
    placed = [(f"{path}:{row.line}", row) for path, rows in files for row in rows]
    return Batch(
        {
            "place": [place for place, _ in placed],
            "prompt": [row.prompt for _, row in placed],
            "extra_info": [{"chat_template_kwargs": arguments_of_template(row.extra_info)} for _, row in placed],
        }
    )


def validate_data(config: PolicyConfig) -> list[ConfigError]:
    data = config.data
    if data.train is None and config.rollout.env_path is None:
        return [ConfigError("config.data.train", "is required, where no rollout.env_path says what to begin with")]
    if data.over_long == "drop" and data.max_prompt_tokens is None:
        what = "says 'drop', and no data.max_prompt_tokens says what is too long"
        return [ConfigError("config.data.over_long", what)]
    if errors := _validate_evaluation(config):
        return errors
    sources = {key: path for key, path in data.sources.items() if not is_left_unread(path)}
    files = dict[str, list[PromptRow]]()
    for key, path in sources.items():
        rows, faults = PROMPT_ROWS.scan(path, data.keys)
        errors += name_source(key, path, first_errors(faults))
        files[path] = to_prompts(rows)[: None if path == data.train else data.eval_rows or MOST_HELD_OUT]
    if errors or data.train not in files:
        return errors
    errors += _find_untemplated(config, files)
    if config.rollout.env_path is None and config.reward.model is None:
        columns = find_columns(chain.from_iterable(files.values()))
        errors += [error for path, rows in files.items() for error in _find_missing(config, path, rows, columns)]
    if data.eval is None:
        try:
            _hold_out([row.prompt for row in files[data.train]], data, config.seed)
        except (ValueError, DataError) as error:
            errors.append(ConfigError("config.data.eval_rows", str(error)))
    return errors or [error for path, rows in files.items() for error in _find_long(config, path, rows)]


def _find_long(config: PolicyConfig, path: str, rows: Sequence[PromptRow]) -> list[ConfigError]:
    """The prompts that leave the model no room for a token, or that a run refuses."""
    data, room = config.data, count_room(config, generates=True)
    prompts = [
        (f"{path}:{row.line}", row.prompt, {**data.chat_template_kwargs, **arguments_of_template(row.extra_info)})
        for row in rows
    ]
    most = min([limit for limit in (room and room - 1, data.max_prompt_tokens) if limit], default=sys.maxsize)
    large = find_large(prompts, lambda item: item[1] if isinstance(item[1], str) else item[1:], most)
    if not large or (tokenizer := find_tokenizer(config.model)) is None:
        return []

    def check(tokens: Sequence[int]) -> None:
        check_positions(len(tokens) + 1, room)

    wrong, too_long = find_prompt_faults(tokenizer, large, data.max_prompt_tokens, check)
    return first_errors(sort_by_line(wrong + (too_long if data.over_long == "refuse" else [])))


def warn_of_repeats(config: PolicyConfig) -> list[str]:
    """A line about rows that are more than once in a step."""
    path, count = config.data.train, config.prompts_per_step
    rows = count if path is None or is_left_unread(path) else len(load_prompts(path, config.data.keys))
    line = f"data: prompts_per_step={count} is above the {rows} rows of {path}, each {count / rows:.1f} times in a step"
    return [line] if count > rows else []


def _find_missing(
    config: PolicyConfig, path: str, rows: Sequence[PromptRow], columns: Sequence[str]
) -> Iterable[ConfigError]:
    """Report columns that reward functions need and rows lack, of the ``columns`` of all files. Where some rows have a
    column that is asked for by name, the samples of the other rows fail."""
    named, present, errors = config.reward.function, find_columns(rows), list[ConfigError]()
    for name in [named] if isinstance(named, str) else named:
        with suppress(VerifierError):  # reported elsewhere
            function, label = RewardFunction(load_function(name), columns), readable_name(name)
            if missing := function.find_missing(present):
                errors.append(ConfigError("config.reward.function", f"'{label}' asks for {missing} of {path}"))
            empty = ((row, function.find_empty(Completed("", row.answer, row.extra_info))) for row in rows)
            errors += first_errors(
                [_column_fault(f"{path}:{row.line}", row, column, label) for row, names in empty for column in names]
            )
    return errors


def _column_fault(where: str, row: PromptRow, column: str, function: str) -> ConfigError:
    value = row.extra_info.get(column)
    if value is None:
        columns = describe_columns({"prompt": row.prompt, **row.extra_info}, column)
        return ConfigError(where, f"has no '{column}', which reward.function '{function}' needs{columns}")
    shown = shorten(json.dumps(value, ensure_ascii=False, default=str), _SHOWN, placeholder="...")
    fault = f"its '{column}' is {shown}, a {type(value).__name__}"
    return ConfigError(where, f"{fault}: reward.function '{function}' needs text or a number")


def _validate_evaluation(config: PolicyConfig) -> list[ConfigError]:
    errors, sets = [], config.data.eval_sets
    if config.data.eval is not None and not sets:
        errors.append(ConfigError("config.data.eval", "has no set of prompts"))
    names = [name for name in sets if not isinstance(config.data.eval, str) and not _SET_NAME.fullmatch(name)]
    errors += [
        ConfigError("config.data.eval", f"'{name}' is no name: letters, digits, '.', '_', '-'") for name in names
    ]
    if config.eval.samples > 1 and not config.eval.temperature:
        message = "above 1 needs config.eval.temperature: all greedy answers to a prompt are the same"
        errors.append(ConfigError("config.eval.samples", message))
    return errors


def _find_untemplated(cfg: PolicyConfig, files: Mapping[str, Sequence[PromptRow]]) -> list[ConfigError]:
    """Conversations need a chat template; for a model on the hub this is checked when it is loaded."""
    folder = Path(cfg.model).expanduser()
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if not cfg.model or not (folder / "config.json").is_file() or any((folder / name).exists() for name in names):
        return []
    with suppress(OSError, ValueError):
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if isinstance(settings, dict) and settings.get("chat_template"):
            return []
    what = f"the tokenizer in {cfg.model} has no chat template, which the 'messages' of"
    talks = (f"{path}:{row.line}" for path, rows in files.items() for row in rows if not isinstance(row.prompt, str))
    return [ConfigError("config.model", f"{what} {place} need") for place in islice(talks, 1)]
