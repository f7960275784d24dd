# SPDX-License-Identifier: Apache-2.0
"""Copies of commits, in the job's directory or in an object store. A copy has all its files in its own folder."""

from dataclasses import replace
from pathlib import Path

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.runtime.checkpoint.storage.manifest import NODES, Manifest, folder_name
from dlrover.python.rl.runtime.checkpoint.storage.object_store import ObjectStore
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore


def open_copies(place: Path | str, run: str, keep: int = 2) -> CheckpointStore | ObjectStore:
    """The copies of a run in a folder, or at a URL."""
    if isinstance(place, str):
        return ObjectStore(place, run, keep)
    return CheckpointStore(place, run, durable=True, keep=keep)


def save_generation(memory: Path, manifest: Manifest, copies: CheckpointStore | ObjectStore) -> bool:
    """Copy what is in ``memory`` of a generation, and make it a copy if that completes it: other nodes may have other
    files, and save them. Returns False if it is not complete, or not intact. Raises OSError."""
    # A later trainer may have claimed the copies and ended before its first commit.
    epoch, folder = max(manifest.epoch, copies.epoch), memory / manifest.folder
    try:
        copies.claim(epoch)
        for file in manifest.files.values():
            if (folder / file.name).is_file():
                copies.put(folder, manifest.step, epoch, file)
        files = {name: replace(file, node="") for name, file in manifest.files.items()}
        for file in files.values():
            copies.check(folder_name(manifest.step, epoch), file)
        extra = {name: value for name, value in manifest.extra.items() if name != NODES}
        copies.commit(manifest.step, epoch, files, extra)
    except (CheckpointCorrupt, CheckpointMissing, StaleEpoch, FileNotFoundError):
        return False
    return True
