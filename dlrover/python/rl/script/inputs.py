# SPDX-License-Identifier: Apache-2.0
"""The arguments of a script's training call as a job's configuration: rows and code become files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from hashlib import blake2b
from math import isnan
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.by_value import name_for
from dlrover.python.rl.common.disk_space import replace
from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.data.jsonl import drop_nulls_of_calls
from dlrover.python.rl.data.tables import as_plain
from dlrover.python.rl.recipe.base.config import RewardConfig

_MODEL_REWARD = {"module": "dlrover.python.rl.recipe.workloads", "class": "ModelRewardWorkload"}


class Inputs:
    """Writes into ``folder``, under names made of the content: a run that goes on finds its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def config(self, keys: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """``keys`` with the named arguments. Raises InvalidJob with what cannot be written."""
        try:
            values = {key: self._plain(value) for key, value in keys.items() if key != "algorithm"}
            values["model"] = _model(given["model"])
            for split in ("train", "eval"):
                if given[split] is not None:
                    values[f"data.{split}"] = self._rows(given[split], split)
            if given.get("env") is not None:
                values["rollout.env_path"] = self._name(given["env"])
            if given.get("reward") is not None:
                values["reward"] = self._reward(given["reward"])
                if values["reward"].get("model"):
                    values["workload.reward"] = _MODEL_REWARD
        except OSError as error:
            raise InvalidJob([ConfigError("job_dir", f"{self._folder} cannot be written: {error.strerror}")]) from error
        if "algorithm" in keys:
            values["algorithm"] = self._algorithm(keys["algorithm"])
        return values

    def _rows(self, dataset: Any, split: str) -> str:
        if isinstance(dataset, str | Path):
            return str(dataset)
        lines = []
        is_table = any(hasattr(dataset, name) for name in ("iterrows", "column_names"))  # of pandas, of datasets
        for number, row in enumerate(_iterated(_without_missing(dataset), split), start=1):
            if not isinstance(row, Mapping):
                what = f"row {number} is {type(row).__name__}, not a dict"
                raise InvalidJob([ConfigError(_argument(split), what)])
            try:
                lines.append(_line_of_table(row) if is_table else _line(row))
            except (TypeError, ValueError) as error:
                raise InvalidJob([ConfigError(_argument(split), f"row {number}: {error}")]) from error
        content = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")  # lone surrogates, as JSON's
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{split}-{blake2b(content, digest_size=6).hexdigest()}.jsonl"
        if not file.exists():
            replace(file, content)
        return str(file)

    def _reward(self, reward: Any) -> dict[str, Any]:
        if isinstance(reward, list | tuple):
            reward = dict.fromkeys(reward, 1.0)
        if not isinstance(reward, Mapping):
            return {"function": self._name(reward)}
        if all(key in RewardConfig.__dataclass_fields__ for key in reward):
            return {**reward, **({"function": self._weighted(reward["function"])} if "function" in reward else {})}
        return {"function": self._weighted(reward)}

    def _weighted(self, function: Any) -> Any:
        if isinstance(function, Mapping):
            return {self._name(each): weight for each, weight in function.items()}
        return self._name(function)

    def _algorithm(self, algorithm: Any) -> dict[str, Any]:
        if isinstance(algorithm, Mapping):
            return {key: self._plain(value) for key, value in algorithm.items()}
        if is_dataclass(algorithm) and not isinstance(algorithm, type):
            return {"name": self._name(type(algorithm)), **asdict(algorithm)}
        return {"name": self._name(algorithm)}

    def _name(self, value: Any) -> str:
        try:
            return value if isinstance(value, str) else name_for(value, self._folder)
        except TypeError as error:
            raise InvalidJob([ConfigError("code", str(error))]) from error

    def _plain(self, value: Any) -> Any:
        """``value`` with paths as text, dataclasses as their fields, and code as its name."""
        if isinstance(value, Path):
            return str(value)
        if is_dataclass(value) and not isinstance(value, type):
            return self._plain(asdict(value))
        if isinstance(value, Mapping):
            return {str(key): self._plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        return self._name(value) if callable(value) else value


def _model(model: Any) -> str:
    """Return the place of a model; raise InvalidJob for another value."""
    if isinstance(model, str | Path) and str(model):
        return str(model)
    kind = "None" if model is None else f"a {type(model).__name__}"
    what = f"is {kind}, and has to be a folder or a hub name"
    saving = "; model.save_pretrained(folder) makes one" if hasattr(model, "save_pretrained") else ""
    raise InvalidJob([ConfigError("model", what + saving)])


def _argument(split: str) -> str:
    return "dataset" if split == "train" else "eval_dataset"


def _iterated(rows: Any, split: str) -> Any:
    if isinstance(rows, Mapping):
        if any(_is_column(values) for values in rows.values()):
            what = f"is a dict of the columns {', '.join(map(str, rows))}: give a list of rows, each a dict, or "
            what += f"datasets.Dataset.from_dict({_argument(split)})"
            raise InvalidJob([ConfigError(_argument(split), what)])
        if all(isinstance(value, str | int | float | None) for value in rows.values()):
            raise InvalidJob([ConfigError(_argument(split), "is one row: give a list of rows, [{...}, ...]")])
        what = f"has the splits {', '.join(map(str, rows))}: give one of them, dataset['train']"
        raise InvalidJob([ConfigError(_argument(split), what)])
    try:
        return iter(rows)
    except TypeError as error:
        what = f"must be a file, a hub name or rows, not {type(rows).__name__}"
        raise InvalidJob([ConfigError(_argument(split), what)]) from error


def _is_column(value: Any) -> bool:
    """Whether a value of a dict has no rows, as a split would."""
    values = value.tolist() if hasattr(value, "tolist") else value
    is_listed = isinstance(values, Sequence) and not isinstance(values, str)
    return is_listed and not isinstance(next(iter(values), {}), Mapping)


def _without_missing(dataset: Any) -> Any:
    """Rows with None for the values that a ``DataFrame`` has not, which are NaN, NaT or NA there."""
    if not hasattr(dataset, "iterrows"):
        return dataset
    return dataset.astype(object).where(dataset.notna(), None).to_dict("records")


def _line(row: Mapping[Any, Any]) -> str:
    return json.dumps(dict(row), ensure_ascii=False, default=_as_json)


def _line_of_table(row: Mapping[Any, Any]) -> str:
    """As rows of a Parquet file are read, whatever the columns are called: see ``data.source``."""
    line = _line({key: None if isinstance(value, float) and isnan(value) else value for key, value in row.items()})
    if '"tool_calls"' not in line:
        return line
    plain = json.loads(line)
    return _line({key: drop_nulls_of_calls({"messages": value})["messages"] for key, value in plain.items()})


def _as_json(value: Any) -> Any:
    """Numbers and arrays of NumPy and torch; what is text in files, such as dates."""
    plain = as_plain(value)
    if plain is not value:
        return plain
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON: {str(value)[:80]}")
