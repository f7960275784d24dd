# SPDX-License-Identifier: Apache-2.0
"""Finished samples outside the member that has drawn them: the process that replaces it draws only the others.

They are kept on the node, in the memory of the run. A sample is taken up only if its tokens come from weights that the
run still stands on: all members of the node note the stamp of each version that they receive, and forget later ones
when the run goes back. The other samples of a group are drawn in other batches then, so last bits may differ: this is
for rollouts that run ahead, which promise no bits.
"""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import ColumnSpec, SequenceColumns
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.environment.core.turns import ROW, TokenSequence
from dlrover.python.rl.recipe.rollout.episodes import Group, GroupKey, Sample

_LOG = get_logger(__name__)

_STAMPS = "stamps.json"
_MOST_STAMPS = 1000


class KeptSamples:
    """The finished samples of the member ``rank``; ``folder`` is shared by the role's members on this node. What cannot
    be written is not kept: a full memory does not end a run."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._stamps_file = folder / str(rank), folder / _STAMPS
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writer = ThreadPoolExecutor(1, "kept-samples")
        self._stamps: dict[str, str] = {}  # version to fingerprint

    def note(self, stamp: WeightStamp) -> None:
        """The run stands on these weights, and on no later ones."""
        earlier = {version: mark for version, mark in self._read_stamps().items() if int(version) < stamp.version}
        newest = sorted(earlier, key=int)[-_MOST_STAMPS:]
        self._stamps = {version: earlier[version] for version in newest} | {str(stamp.version): stamp.fingerprint}
        if not _write(self._stamps_file, self._stamps):
            self._stamps_file.unlink(missing_ok=True)  # else later ones would still count

    def save(self, group: Group, sample: Sample) -> None:
        data = {
            "seed": group.seed,
            "sampling": repr(group.sampling),
            "prompt": group.text,
            "stamps": {str(version): self._stamps.get(str(version)) for version in _versions(sample.sequences)},
            "sequences": [vars(sequence) | {"columns": sequence.columns.values} for sequence in sample.sequences],
            "turns": sample.turns,
            "error": sample.error,
            "versions": sample.versions,
        }
        self._writer.submit(_write, self._file(group.key, sample.index), data)

    def load(self, group: Group, index: int, columns: Mapping[str, ColumnSpec]) -> Sample | None:
        """A finished sample of this group that an earlier process has drawn, if it is still valid and has the engine's
        ``columns``."""
        specs = {**ROW, **columns}
        try:
            data = json.loads(self._file(group.key, index).read_text())
            asked = (tuple(data["seed"]), data["sampling"], data["prompt"])
            if asked != (group.seed, repr(group.sampling), group.text) or not self._stands_on(data["stamps"]):
                return None
            if any(sequence["columns"].keys() != specs.keys() for sequence in data["sequences"]):
                return None
            sequences = [
                TokenSequence(**sequence | {"columns": SequenceColumns(specs, sequence["columns"])})
                for sequence in data["sequences"]
            ]
            low, high = data["versions"]
            return Sample(index, sequences, data["turns"], data["error"], versions=(low, high), ended=True)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def retain(self, keys: Iterable[GroupKey]) -> None:
        """Forget the samples of all other groups."""
        names = {_name(key) for key in keys}
        self._writer.submit(self._retain, names)

    def _retain(self, names: set[str]) -> None:
        for file in self._folder.iterdir():
            if file.stem.rpartition("-")[0] not in names:
                file.unlink(missing_ok=True)

    def close(self) -> None:
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _stands_on(self, stamps: Mapping[str, str | None]) -> bool:
        known = self._read_stamps()
        return all(mark is not None and known.get(version) == mark for version, mark in stamps.items())

    def _read_stamps(self) -> dict[str, str]:
        try:
            stamps: dict[str, str] = json.loads(self._stamps_file.read_text())
        except (OSError, ValueError):
            return {}
        return stamps

    def _file(self, key: GroupKey, index: int) -> Path:
        return self._folder / f"{_name(key)}-{index}.json"


def _name(key: GroupKey) -> str:
    return "-".join(map(str, key))


def _versions(sequences: Iterable[TokenSequence]) -> set[int]:
    return {version for sequence in sequences for version in sequence["versions"] if version >= 0}


def _write(file: Path, data: Any) -> bool:
    """Replace a file as a whole, if there is space."""
    new = file.with_suffix(f".{os.getpid()}")
    try:
        new.write_text(json.dumps(data, default=lambda value: value.tolist()))  # of numpy
        new.replace(file)
    except OSError as error:
        _LOG.warning("%s is not kept: %s", file.name, error)
        new.unlink(missing_ok=True)
        return False
    return True
