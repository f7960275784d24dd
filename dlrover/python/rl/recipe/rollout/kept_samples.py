# SPDX-License-Identifier: Apache-2.0
"""Copies of finished samples, and of the actions of agents, that survive their worker."""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import ColumnSpec, SequenceColumns
from dlrover.python.rl.engine.api.base import Completion, Request
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.environment.core.turns import ROW
from dlrover.python.rl.recipe.rollout.episodes import Group, GroupKey, Sample

_LOG = get_logger(__name__)

_STAMPS = "stamps.json"
_MOST_STAMPS = 1000
_ACTIONS = ".actions"


class KeptSamples:
    """Copies of the finished samples of the worker ``rank``: a process that replaces it generates only the others.

    The role's workers on this node share ``folder``. A sample is reused only if its tokens come from weights of the
    run's present history: all workers note the stamp of each version, and forget later ones when the run goes back.
    The same holds for an action of an agent, by which the replacement answers the agent's request again.
    Last bits of the remaining samples may differ, so only rollouts that run ahead use this. A full memory does not end
    a run: a sample that cannot be written is lost."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._stamps_file = folder / str(rank), folder / _STAMPS
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writer = ThreadPoolExecutor(1, "kept-samples")
        self._stamps: dict[str, str] = {}  # version to fingerprint

    def note(self, stamp: WeightStamp) -> None:
        """Add these weights to the run's history, and forget later ones."""
        earlier = {version: mark for version, mark in self._read_stamps().items() if int(version) < stamp.version}
        newest = sorted(earlier, key=int)[-_MOST_STAMPS:]
        self._stamps = {version: earlier[version] for version in newest} | {str(stamp.version): stamp.fingerprint}
        if not _write(self._stamps_file, self._stamps):
            self._stamps_file.unlink(missing_ok=True)  # otherwise later ones would still count

    def save(self, group: Group, sample: Sample) -> None:
        versions = {version for sequence in sample.sequences for version in sequence.values["versions"] if version >= 0}
        data = {
            **self._origin(group, versions),
            "sequences": [[sequence.values, sequence.opening, sequence.text] for sequence in sample.sequences],
            "turns": sample.turns,
            "error": sample.error,
            "versions": sample.versions,
        }
        self._writer.submit(_write, self._file(group.key, sample.index), data)

    def load(self, group: Group, index: int, columns: Mapping[str, ColumnSpec]) -> Sample | None:
        """Return a finished sample of this group by an earlier process, if it is still valid and has ``columns``."""
        specs = {**ROW, **columns}
        try:
            data = json.loads(self._file(group.key, index).read_text())
            is_valid = self._is_valid(group, data, self._read_stamps())
            if not is_valid or any(values.keys() != specs.keys() for values, _, _ in data["sequences"]):
                return None
            sequences = [SequenceColumns(specs, *sequence) for sequence in data["sequences"]]
            low, high = data["versions"]
            return Sample(index, sequences, data["turns"], data["error"], versions=(low, high), ended=True)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save_action(self, group: Group, index: int, mark: str, completion: Completion) -> None:
        """Add an action to a sample's; ``mark`` identifies the request."""
        request = completion.request
        data = {
            **self._origin(group, set(request.versions.tolist())),
            "mark": mark,
            "context": _digest_context(request),
            "tokens": request.done,
            "columns": {name: [str(values.dtype), values] for name, values in request.columns.items()},
            "finish": completion.finish,
            "text": completion.text,
        }
        self._writer.submit(_append, self._file(group.key, index).with_suffix(_ACTIONS), data)

    def load_actions(self, group: Group, index: int) -> dict[str, Mapping[str, Any]]:
        """Return the valid actions of a sample by their marks, for :func:`completed`."""
        stamps, actions = self._read_stamps(), dict[str, Mapping[str, Any]]()
        try:
            lines = self._file(group.key, index).with_suffix(_ACTIONS).read_text().splitlines()
        except (OSError, ValueError):
            return actions
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # a line that was not written whole
                if self._is_valid(group, data := json.loads(line), stamps):
                    actions[data["mark"]] = data
        return actions

    def _origin(self, group: Group, versions: Iterable[int]) -> dict[str, Any]:
        stamps = {str(version): self._stamps.get(str(version)) for version in versions}
        return {"seed": group.seed, "sampling": repr(group.sampling), "prompt": group.text, "stamps": stamps}

    def _is_valid(self, group: Group, data: Mapping[str, Any], stamps: Mapping[str, str]) -> bool:
        origin = tuple(data["seed"]), data["sampling"], data["prompt"]
        return origin == (group.seed, repr(group.sampling), group.text) and all(
            mark is not None and stamps.get(version) == mark for version, mark in data["stamps"].items()
        )

    def retain(self, keys: Iterable[GroupKey]) -> None:
        names = {"-".join(map(str, key)) for key in keys}

        def remove() -> None:
            for file in self._folder.iterdir():
                if file.stem.rpartition("-")[0] not in names:
                    file.unlink(missing_ok=True)

        self._writer.submit(remove)

    def close(self) -> None:
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _read_stamps(self) -> dict[str, str]:
        try:
            stamps: dict[str, str] = json.loads(self._stamps_file.read_text())
        except (OSError, ValueError):
            return {}
        return stamps

    def _file(self, key: GroupKey, index: int) -> Path:
        return self._folder / f"{'-'.join(map(str, (*key, index)))}.json"


def _digest_context(request: Request) -> str:
    return blake2b(np.asarray(request.prompt, np.int64).tobytes(), digest_size=16).hexdigest()


def completed(request: Request, data: Mapping[str, Any] | None) -> Completion | None:
    """Return the completion of a request by its kept action, if there is one that continued the same tokens."""
    if data is None or data.get("context") != _digest_context(request):
        return None
    columns = {name: np.array(values, dtype=kind) for name, (kind, values) in data["columns"].items()}
    logprobs, versions = columns.pop("logprobs"), columns.pop("versions")
    done = np.array(data["tokens"], dtype=np.int64)
    request = Request(*request.key, request.prompt, done, logprobs, versions, columns)
    return Completion(request, data["finish"], data["text"])


def _append(file: Path, data: Any) -> None:
    try:
        with file.open("a") as actions:
            # Its own line, also after one that was not written whole.
            actions.write("\n" + json.dumps(data, default=lambda value: value.tolist()))
    except OSError as error:
        _LOG.warning("an action was not added to %s: %s", file.name, error)


def _write(file: Path, data: Any) -> bool:
    new = file.with_suffix(f".{os.getpid()}")
    try:
        new.write_text(json.dumps(data, default=lambda value: value.tolist()))  # of numpy
        new.replace(file)
    except OSError as error:
        _LOG.warning("%s was not saved: %s", file.name, error)
        new.unlink(missing_ok=True)
        return False
    return True
