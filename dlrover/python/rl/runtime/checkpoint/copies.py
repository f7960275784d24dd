# SPDX-License-Identifier: Apache-2.0
"""Copies of commits, in the job's directory or in an object store. A copy has all its files in its own folder."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.runtime.checkpoint.manifest import Manifest, Piece, folder_name
from dlrover.python.rl.runtime.checkpoint.object_store import ObjectStore
from dlrover.python.rl.runtime.checkpoint.state_file import StateFile
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore


def open_copies(place: Path | str, run: str, keep: int = 2) -> CheckpointStore | ObjectStore:
    """The copies of a run in a folder, or at a URL."""
    if isinstance(place, str):
        return ObjectStore(place, run, keep)
    return CheckpointStore(place, run, durable=True, keep=keep)


def copy_pieces(
    root: Path, copies: CheckpointStore | ObjectStore, step: int, epoch: int, pieces: Iterable[Piece]
) -> tuple[StateFile, ...]:
    """Copy a process's files in ``root`` into one generation of ``copies``; raises as ``copies.put``."""
    return tuple(copies.put(root / folder, step, epoch, file) for folder, file in pieces)


def gathered(folder: str, files: Mapping[str, tuple[StateFile, ...]]) -> Mapping[str, tuple[Piece, ...]]:
    """``Manifest.earlier`` of a generation that has all files of each process in its own ``folder``."""
    return {name: tuple(Piece(folder, file) for file in own[:-1]) for name, own in files.items() if len(own) > 1}


def save_generation(memory: CheckpointStore, manifest: Manifest, copies: CheckpointStore | ObjectStore) -> bool:
    """Copy a whole generation; returns False if it is not intact, or not all of it is here. Raises OSError."""
    # A later trainer may have claimed the copies and ended before its first commit.
    epoch = max(manifest.epoch, copies.epoch)
    try:
        copies.claim(epoch)
        files = {
            name: copy_pieces(memory.root, copies, manifest.step, epoch, manifest.pieces_of(name))
            for name in manifest.files
        }
        folder = folder_name(manifest.step, epoch)
        copies.commit(manifest.step, epoch, {name: own[-1] for name, own in files.items()}, gathered(folder, files))
    except (CheckpointCorrupt, CheckpointMissing, StaleEpoch):
        return False
    return True
