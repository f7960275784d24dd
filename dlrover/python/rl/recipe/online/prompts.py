# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run to train on, the held-out ones, and their order."""

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
"""The share of the prompts to hold out without ``data.eval_rows``, and the most."""

_GAMES, _HELD_OUT_GAMES = 1 << 14, 64  # number of rows to train and to evaluate on for an environment without data
_SET_NAME = re.compile(r"[\w.-]+")
_SHOWN = 60  # characters of a wrong value in an error


def name_source(key: str, source: str, errors: Iterable[ConfigError]) -> list[ConfigError]:
    """Place errors of a whole data source at the key that names it; errors of rows stay as they are."""
    return [
        ConfigError(f"config.data.{key}", f"{source}: {error.what}") if error.where == source else error
        for error in errors
    ]


def digest_of_rows(rows: Iterable[Any]) -> str:
    """Digest JSON values, in order. Of other objects only the type counts: their text may be an address."""
    whole = blake2b(digest_size=16)
    for row in rows:
        whole.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode() + b"\n")
    return whole.hexdigest()


_ADVICE = "restore it, or start another run"


class JobCursor(PromptCursor):
    """The order of the rows of a job, which have this ``digest``; errors name the keys of the job."""

    def __init__(
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
            raise DataError([self._name_key(fault, state) for fault in error.errors]) from None
        if (earlier := state.get("digest")) and self._digest and earlier != self._digest:
            message = f"the rows of '{self._source}' or their order have changed since the run began: {_ADVICE}"
            raise DataError([ConfigError("config.data.train", message)])

    def _name_key(self, fault: ConfigError, state: Mapping[str, Any]) -> ConfigError:
        own, earlier = super().state_dict(), state.get(fault.where)
        if fault.where == "seed":
            return ConfigError("config.seed", f"{own['seed']}, but the run began with {earlier}: {_ADVICE}")
        if fault.where == "rows":
            source = state.get("source", self._source)  # absent from states of earlier versions
            message = f"'{self._source}' has {own['rows']} rows to train on, but the run began with {earlier}"
            cause = "the file or its held-out part has changed" if source == self._source else f"of '{source}'"
            return ConfigError("config.data.train", f"{message} ({cause}): {_ADVICE}")
        return fault


class PromptSource:
    """The prompts to train on, in order, and the prompts to evaluate on (``held_out``, see :func:`make_prompt_batch`).

    ``rows`` and ``held_out_rows`` are the numbers of rows that both were chosen from. ``places`` are all prompts, with
    ``place`` (``file:line``); ``dropped`` are the rising numbers of the unused ones; ``changed_sets`` are the
    evaluation sets that differ from the loaded state. Raises DataError if a file cannot be used."""

    def __init__(self, config: PolicyConfig) -> None:
        data = config.data
        self._source = source = data.train or ("rollout.env_path" if config.rollout.env_path else "environment.agent")
        # rows for an environment without data; their number does not depend on the steps, which may grow
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
        return digest_of_rows(sorted(self._digests.items()))

    def find_sets(self, answers: Batch) -> npt.NDArray[np.str_]:
        """Return ``[rows]``: the name of the set of each held-out prompt."""
        starts, names = [numbers.start for numbers in self.eval_sets.values()], np.array(list(self.eval_sets))
        set_of_row: npt.NDArray[np.str_] = names[np.searchsorted(starts, answers.dense("prompt_id"), side="right") - 1]
        return set_of_row

    def name_sets(self, answers: Batch) -> Batch:
        """Add the ``set`` of held-out prompts, and count ``row`` within it, if sets have names."""
        names = self.find_sets(answers).tolist()
        starts = np.array([self.eval_sets[name].start for name in names], dtype=np.int64)
        return answers.with_columns(set=names, row=answers.dense("row") - starts) if any(names) else answers

    def drop(self, too_long: Sequence[ConfigError]) -> None:
        """Use the prompts at these places neither for training nor for evaluation; DataError if that leaves none."""
        names, position = {error.where for error in too_long}, self._cursor.state_dict()
        self._drop_rows([number for number, name in enumerate(self.places.objects("place")) if name in names])
        if self.changed_sets:  # the rows to train on are still the state's
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
        return make_prompt_batch(self._rows, rows).select("prompt", "answer", "extra_info")

    def state_dict(self) -> dict[str, Any]:
        return {**self._cursor.state_dict(), "dropped": self.dropped, "over_long": self._limit, "sets": self._digests}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; raise DataError if the data, the seed or the prompt limit have changed."""
        if state["over_long"] != self._limit:
            message = f"are now {self._limit}, but the run began with {state['over_long']}: restore them"
            raise DataError([ConfigError("config.data.max_prompt_tokens and over_long", message)])
        digests = state.get("sets", self._digests)  # absent from states of earlier versions
        self.changed_sets = {name for name, digest in self._digests.items() if digests.get(name) != digest}
        is_other = self.changed_sets and self._first_held
        self._drop_rows([row for row in state["dropped"] if not is_other or row < self._first_held])
        self._cursor.load_state_dict(state)


def make_prompt_batch(rows: Sequence[PromptRow], chosen: Sequence[int]) -> Batch:
    """Return the chosen rows of a file as a batch: ``prompt_id`` (int64: the row's number in the file, from 0), and the
    objects ``prompt``, ``answer`` and ``extra_info``."""
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
    return sorted({name for row in rows for name in row.extra_info})


def _hold_out(prompts: Sequence[Any], data: PromptData, seed: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows to train on and to evaluate on."""
    share = min(MOST_HELD_OUT, max(1, round(HELD_OUT_SHARE * len(prompts))))
    size = data.eval_rows or (share if data.train else _HELD_OUT_GAMES)
    try:
        return hold_out(prompts, size, seed)
    except (ValueError, DataError):
        if data.eval_rows is not None:
            raise
        _LOG.warning("%s repeats a single prompt; the run is also evaluated on it", data.train)
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
    if data.train is None and not config.has_environment:
        return [ConfigError("config.data.train", "is required without rollout.env_path or environment.agent")]
    if data.over_long == "drop" and data.max_prompt_tokens is None:
        return [ConfigError("config.data.over_long", "'drop' needs data.max_prompt_tokens")]
    if errors := _validate_evaluation(config):
        return errors
    sets = {f"eval.{name}" if name else "eval": path for name, path in data.eval_sets.items()}
    files = dict[str, list[PromptRow]]()
    for key, path in (({"train": data.train} if data.train else {}) | sets).items():
        if is_left_unread(path):
            continue
        rows, faults = PROMPT_ROWS.scan(path, data.keys)
        errors += name_source(key, path, first_errors(faults))
        files[path] = to_prompts(rows)[: None if path == data.train else data.eval_rows or MOST_HELD_OUT]
    if errors or data.train not in files:
        return errors
    errors += _find_untemplated(config, files)
    if not config.has_environment and config.reward.model is None:
        columns = find_columns(chain.from_iterable(files.values()))
        errors += [error for path, rows in files.items() for error in _find_missing(config, path, rows, columns)]
    if data.eval is None:
        try:
            _hold_out([row.prompt for row in files[data.train]], data, config.seed)
        except (ValueError, DataError) as error:
            errors.append(ConfigError("config.data.eval_rows", str(error)))
    return errors or [error for path, rows in files.items() for error in _find_long(config, path, rows)]


def _find_long(config: PolicyConfig, path: str, rows: Sequence[PromptRow]) -> list[ConfigError]:
    """Report prompts that leave the model no room for a token, or that a run refuses."""
    data, room = config.data, count_room(config, generates=True)
    prompts = [
        (f"{path}:{row.line}", row.prompt, {**data.chat_template_kwargs, **arguments_of_template(row.extra_info)})
        for row in rows
    ]
    limit = min([most for most in (room and room - 1, data.max_prompt_tokens) if most], default=sys.maxsize)
    large = find_large(prompts, lambda item: item[1] if isinstance(item[1], str) else item[1:], limit)
    if not large or (tokenizer := find_tokenizer(config.model)) is None:
        return []

    def check(tokens: Sequence[int]) -> None:
        check_positions(len(tokens) + 1, room)

    wrong, too_long = find_prompt_faults(tokenizer, large, data.max_prompt_tokens, check)
    return first_errors(sort_by_line(wrong + (too_long if data.over_long == "refuse" else [])))


def warn_of_repeats(config: PolicyConfig) -> list[str]:
    path, count = config.data.train, config.prompts_per_step
    rows = count if path is None or is_left_unread(path) else len(load_prompts(path, config.data.keys))
    line = f"data: prompts_per_step={count} exceeds the {rows} rows of {path}: {count / rows:.1f} uses of each per step"
    return [line] if count > rows else []


def _find_missing(
    config: PolicyConfig, path: str, rows: Sequence[PromptRow], columns: Sequence[str]
) -> Iterable[ConfigError]:
    """Report columns that reward functions name and rows lack, of the ``columns`` of all files."""
    functions, present, errors = config.reward.function, find_columns(rows), list[ConfigError]()
    for name in [functions] if isinstance(functions, str) else functions:
        with suppress(VerifierError):  # reported elsewhere
            function, label = RewardFunction(load_function(name), columns), readable_name(name)
            if missing := function.find_missing(present):
                errors.append(ConfigError("config.reward.function", f"'{label}' asks for {missing} of {path}"))
            empty = ((row, function.find_empty(Completed("", row.answer, row.extra_info))) for row in rows)
            faults = [(row.line, _describe_fault(row, column, label)) for row, names in empty for column in names]
            errors += first_errors([ConfigError(f"{path}:{line}", fault) for line, fault in faults])
    return errors


def _describe_fault(row: PromptRow, column: str, function: str) -> str:
    value = row.extra_info.get(column)
    if value is None:
        columns = describe_columns({"prompt": row.prompt, **row.extra_info}, column)
        return f"has no '{column}', which reward.function '{function}' needs{columns}"
    shown = shorten(json.dumps(value, ensure_ascii=False, default=str), _SHOWN, placeholder="...")
    return f"its '{column}' is {shown}, a {type(value).__name__}: reward.function '{function}' needs text or a number"


def _validate_evaluation(config: PolicyConfig) -> list[ConfigError]:
    errors, sets = [], config.data.eval_sets
    if config.data.eval is not None and not sets:
        errors.append(ConfigError("config.data.eval", "has no set of prompts"))
    for name in () if isinstance(config.data.eval, str) else sets:
        if not _SET_NAME.fullmatch(name):
            message = f"'{name}' is no name of a set: use letters, digits, '.', '_' and '-'"
            errors.append(ConfigError("config.data.eval", message))
    if config.eval.samples > 1 and not config.eval.temperature:
        message = "above 1 needs config.eval.temperature: all greedy answers to a prompt are the same"
        errors.append(ConfigError("config.eval.samples", message))
    return errors


def _find_untemplated(cfg: PolicyConfig, files: Mapping[str, Sequence[PromptRow]]) -> list[ConfigError]:
    """Report conversations without a chat template; for a model on the hub this is checked when it is loaded."""
    folder = Path(cfg.model).expanduser()
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if not cfg.model or not (folder / "config.json").is_file() or any((folder / name).exists() for name in names):
        return []
    with suppress(OSError, ValueError):
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if isinstance(settings, dict) and settings.get("chat_template"):
            return []
    message = f"the tokenizer in {cfg.model} has no chat template, which the 'messages' of"
    talks = (f"{path}:{row.line}" for path, rows in files.items() for row in rows if not isinstance(row.prompt, str))
    return [ConfigError("config.model", f"{message} {place} need") for place in islice(talks, 1)]
