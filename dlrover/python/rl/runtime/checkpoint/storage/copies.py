# SPDX-License-Identifier: Apache-2.0
"""Copies of commits, in the job's directory or in an object store. A copy has all its files in its own folder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.runtime.checkpoint.storage.manifest import NODES, Manifest, Piece, folder_name
from dlrover.python.rl.runtime.checkpoint.storage.object_store import ObjectStore
from dlrover.python.rl.runtime.checkpoint.storage.state_file import StateFile
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore


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


def with_states(memory: CheckpointStore, manifest: Manifest) -> list[Manifest]:
    """A generation, after the states that it goes on from as one of their own."""
    return [*states_before(memory, manifest), manifest]


def save_generations(memory: Path, generations: Sequence[Manifest], copies: CheckpointStore | ObjectStore) -> bool:
    """Copy what is in ``memory`` of generations, and make them copies if that completes them: other nodes may have
    other files, and save them. Returns False if they are not complete, or not intact. Raises OSError."""
    # A later trainer may have claimed the copies and ended before its first commit.
    epoch = max(generations[-1].epoch, copies.epoch)
    try:
        copies.claim(epoch)
        for each in generations:
            pieces = (piece for name in each.files for piece in each.pieces_of(name))
            here = (piece for piece in pieces if (memory / piece.folder / piece.file.name).is_file())
            copy_pieces(memory, copies, each.step, epoch, here)
        for each in generations:
            folder = folder_name(each.step, epoch)
            files = {name: tuple(replace(file, node="") for _, file in each.pieces_of(name)) for name in each.files}
            for file in (file for own in files.values() for file in own):
                copies.check(folder, file)
            extra = {name: value for name, value in each.extra.items() if name != NODES}
            last = {name: own[-1] for name, own in files.items()}
            copies.commit(each.step, epoch, last, gathered(folder, files), extra)
    except (CheckpointCorrupt, CheckpointMissing, StaleEpoch, FileNotFoundError):
        return False
    return True


def states_before(memory: CheckpointStore, manifest: Manifest) -> list[Manifest]:
    """The generation of states that the calls of ``manifest`` follow from: a job with other settings can go on from it,
    and cannot repeat the calls."""
    firsts = {name: pieces[0] for name, pieces in manifest.earlier.items()}
    folders = {piece.folder for piece in firsts.values()}
    states = {name: piece.file for name, piece in firsts.items()}
    found = [
        replace(each, files={**each.files, **states}, earlier={})
        for each in memory.manifests()
        if {each.folder} == folders
    ]
    return [each for each in found if memory.valid(each)]
