# SPDX-License-Identifier: Apache-2.0
"""Reward functions: how each is called, and their weighted sum.

::

    function(completion, answer, extra_info)            three parameters, whose names are not columns of the data
    function(completion, prompt=..., <column>=...)      other signatures: the first is the completion, others by name
    function(data_source, solution_str, ground_truth)   verl's, by name: the completion, the answer, other columns
    function(prompts=, completions=, <column>=, ...)    TRL's: lists over a batch, and a list of rewards

Functions get whole completions, but built-in functions, judges, and functions with the decorator
:func:`~dlrover.python.rl.data.model_text.ignore_thoughts` get the text after the thoughts."""

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from dlrover.python.rl.common.by_value import readable_name
from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.common.log import cut_middle
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.model_text import split_thoughts
from dlrover.python.rl.environment.core.functions import load_function, run_in_thread

_BATCH = "completions"
_VERL = "solution_str"
_OWN = ("prompt", "completion", "answer", "extra_info")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Form: TypeAlias = Literal["sample", "named", "batch"]


def needs(*columns: str) -> Callable[[Any], Any]:
    """Decorate a reward function that fails on rows without these columns, so that they are refused before a run."""

    def declare(function: Any) -> Any:
        function.needed_columns = columns
        return function

    return declare


class Completed(NamedTuple):
    """A completion to score."""

    completion: str
    answer: str | None = None
    extra_info: Mapping[str, Any] = {}  #: the row's user data, further columns among them
    prompt: Any = None  #: text or messages
    #: the end of the rendered prompt, if it opens thoughts; None: all functions get the whole completion
    think_prefix: str | None = ""

    @property
    def columns(self) -> dict[str, Any]:
        """Columns by the names of parameters; the sample's columns override the row's."""
        return {**self.extra_info, **{name: getattr(self, name) for name in _OWN}}


@dataclass(frozen=True)
class RewardFunction:
    """A user's reward function, sync or async."""

    function: Callable[..., Any]
    #: of all rows of the data, if they are known: a parameter that names one gets no other value in rows without it
    columns: Collection[str] = ()

    @cached_property
    def form(self) -> Form:
        if _BATCH in self._parameters:
            return "batch"
        if _VERL in self._parameters or self._names_any(self.columns):
            return "named"
        try:
            inspect.signature(self.function).bind("completion", "answer", {})
        except TypeError:
            return "named"
        except ValueError:  # it has no signature
            pass
        return "sample"

    def check(self, name: str) -> None:
        """Raise VerifierError if the function takes no completion."""
        if self.form == "named" and not self._parameters:
            message = f"takes no completion: it is called as ({', '.join(Completed._fields[:3])})"
            raise VerifierError(f"'{readable_name(name)}' {message}")

    def find_missing(self, columns: Collection[str]) -> str:
        """Return a column that the function needs and no row has, with the nearest of the rows' ``columns``."""
        if self.form == "sample":  # it names no column
            return ""
        names = {*self._by_name(Completed("", extra_info=dict.fromkeys(columns)))}
        if self.form == "batch":
            names = names - {"prompt"} | {"prompts", _BATCH}
        return self._find_absent(names)

    def find_empty(self, sample: Completed) -> list[str]:
        """Return the declared columns (:func:`needs`) in which a row has no value."""
        needed: Collection[str] = getattr(self.function, "needed_columns", ())
        return [name for name in needed if sample.columns.get(name) in (None, [])]

    def on(self, sample: Completed) -> Any:
        """Return the reward of a sample, or an awaitable of it."""
        function = getattr(self.function, "score_whole", self.function)
        if function is not self.function and sample.think_prefix is not None:
            _, answer = split_thoughts(sample.completion, sample.think_prefix)
            if answer is None:
                return 0.0
            sample = sample._replace(completion=answer)
        if self.form == "sample" and not self._names_any(sample.extra_info):
            return function(sample.completion, sample.answer, dict(sample.extra_info))
        completion = [sample.completion] if self._first else []
        return function(*completion, **self._select(self._by_name(sample)))

    def on_all(self, samples: Sequence[Completed]) -> Any:
        """Return a list of the rewards of samples, or an awaitable of it, from a function of the form ``batch``."""
        rows = [sample.columns for sample in samples]
        columns = {name: [row.get(name) for row in rows] for name in {name: None for row in rows for name in row}}
        columns["prompts"] = columns.pop("prompt")
        texts = [(sample.completion, isinstance(sample.prompt, str | None)) for sample in samples]
        # As in TRL, completions are messages if the prompt is messages.
        columns[_BATCH] = [text if is_text else [{"role": "assistant", "content": text}] for text, is_text in texts]
        return self.function(**self._select(columns))

    def _by_name(self, sample: Completed) -> dict[str, Any]:
        """Return the columns of a sample, by verl's names if the function takes ``solution_str``."""
        if _VERL not in self._parameters:
            return sample.columns
        return {"ground_truth": sample.answer, **sample.columns, _VERL: sample.completion}

    def _names_any(self, columns: Collection[str]) -> bool:
        """Return True if a parameter after the first names one of ``columns``."""
        return any(name in columns for name in [*self._parameters][1:] if name not in _OWN)

    @cached_property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        try:
            return dict(inspect.signature(self.function).parameters)
        except ValueError:  # some C functions have no signature
            return {}

    @cached_property
    def _first(self) -> str:
        """The parameter that gets the completion, "" if it gets it by name."""
        first = next(iter(self._parameters.values()), None)
        if first is None or self.form == "batch":
            return ""
        has_own = not self._parameters.keys().isdisjoint(("completion", _VERL)) or first.name in _OWN
        return "" if has_own and first.kind is not inspect.Parameter.POSITIONAL_ONLY else first.name

    @cached_property
    def _named(self) -> dict[str, inspect.Parameter]:
        """The parameters besides the first that are given by name."""
        parameters = self._parameters.items()
        return {name: item for name, item in parameters if item.kind in _BY_NAME and name != self._first}

    def _select(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that the function takes by name; raises VerifierError if one is missing."""
        if absent := self._find_absent(columns):
            raise VerifierError(f"needs {absent}")
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self._parameters.values())
        return {
            name: value for name, value in columns.items() if name in self._named or (takes_any and name != self._first)
        }

    def _find_absent(self, columns: Collection[str]) -> str:
        needed = [name for name, item in self._named.items() if item.default is inspect.Parameter.empty]
        absent = next((name for name in needed if name not in columns), "")
        return f"'{absent}', which is not a column of its row{hint(absent, columns)}" if absent else ""


@dataclass(frozen=True)
class Reward:
    """The weighted sum, and each function's unweighted value."""

    total: float
    parts: dict[str, float]


class WeightedRewards:
    """Functions and weights by name; a sample has no reward if one function fails on it."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], weights: Mapping[str, float], columns: Collection[str] = ()
    ) -> None:
        if not functions or set(functions) != set(weights):
            raise ValueError(f"each of {sorted(functions)} needs a weight, not {sorted(weights)}")
        wrong = {name: weight for name, weight in weights.items() if not math.isfinite(weight)}
        if wrong:
            raise ValueError(f"weights must be finite, not {wrong}")
        self._functions = {name: RewardFunction(function, columns) for name, function in functions.items()}
        self._weights = weights
        self.compares = any(function.form == "batch" for function in self._functions.values())
        """True if a function gets all samples of a batch at once."""

    @classmethod
    def load(cls, weights: Mapping[str, float], columns: Collection[str] = ()) -> "WeightedRewards":
        return cls({name: load_function(name) for name in weights}, weights, columns)

    def now(self, samples: Sequence[Completed]) -> list[Reward]:
        """Run sync functions in order, then async ones together in a new loop; raises VerifierError."""
        values = {name: self._start(function, samples) for name, function in self._functions.items()}
        items = [item for value in values.values() for item in (value if isinstance(value, list) else [value])]
        if any(map(inspect.isawaitable, items)):
            values = asyncio.run(_settle(values))
        return self._sum(values, len(samples))

    async def score(self, sample: Completed) -> Reward:
        """Score a sample in a running loop, with sync functions in threads."""
        names, functions = list(self._functions), self._functions.values()
        started = (run_in_thread(self._start, function, [sample]) for function in functions)
        values = dict(zip(names, await asyncio.gather(*started), strict=True))
        (reward,) = self._sum(await _settle(values), 1)
        return reward

    def _start(self, function: RewardFunction, samples: Sequence[Completed]) -> Any:
        return function.on_all(samples) if function.form == "batch" else [function.on(sample) for sample in samples]

    def _sum(self, values: Mapping[str, Any], count: int) -> list[Reward]:
        columns: dict[str, list[float]] = {}
        for name, returned in values.items():
            label = f": {readable_name(name)}" if len(self._functions) > 1 else ""  # ends an error that names all
            items: Any = returned.tolist() if hasattr(returned, "tolist") else returned
            if isinstance(items, str | Mapping) or not isinstance(items, Iterable):
                message = f"not a list of {count}: a function of 'completions' must return a number for each"
                raise VerifierError(f"returned {cut_middle(repr(returned), 60)}, {message}{label}")
            items = list(items)
            if len(items) != count:
                raise VerifierError(f"returned {len(items)} rewards for {count} completions{label}")
            # TRL's functions may return None for samples that they do not apply to.
            is_batch = self._functions[name].form == "batch"
            columns[name] = [0.0 if item is None and is_batch else _number(label, item) for item in items]
        rows = [{name: column[row] for name, column in columns.items()} for row in range(count)]
        return [Reward(math.fsum(self._weights[name] * value for name, value in row.items()), row) for row in rows]


async def _settle(values: Mapping[str, Any]) -> dict[str, Any]:
    """Await all awaitables together."""

    async def settle(value: Any) -> Any:
        if isinstance(value, list):
            return await asyncio.gather(*map(settle, value))
        return await value if inspect.isawaitable(value) else value

    return dict(zip(values, await settle(list(values.values())), strict=True))


def _number(label: str, value: Any) -> float:
    if isinstance(value, str):
        raise VerifierError(f"returned the text {value[:40]!r}, which is not a reward{label}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise VerifierError(f"returned {cut_middle(repr(value), 60)}, which is not a reward{label}") from None
    if not math.isfinite(number):
        raise VerifierError(f"returned {number}, which is not a reward{label}")
    return number
