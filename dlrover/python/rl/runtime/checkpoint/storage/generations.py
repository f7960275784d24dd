# SPDX-License-Identifier: Apache-2.0
"""Generations in stores: the newest intact one, one that cannot be read, and copies, which have all their files in
their own folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.disk_space import DiskWait, is_transient, retry_io
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.runtime.checkpoint.storage.manifest import NODES, Manifest, Piece, folder_name
from dlrover.python.rl.runtime.checkpoint.storage.object_store import ObjectStore
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore

Store = CheckpointStore | ObjectStore


@dataclass(frozen=True)
class Generation:
    store: Store
    manifest: Manifest

    def read(self, name: str, wait: DiskWait) -> Any:
        """The tree in a file. Raises CheckpointMissing, CheckpointCorrupt, or OSError if the store cannot be read."""
        try:
            return retry_io(partial(self.store.read, self.manifest, name), self.store.root, wait)
        except OSError as error:
            if isinstance(self.store, ObjectStore) or not is_transient(error):
                raise  # rather out of reach than damaged
            place = f"{self.store.root}/{self.manifest.folder}/{name}"
            raise CheckpointCorrupt(place, f"it cannot be read: {error}") from error

    def is_intact(self, wait: DiskWait) -> bool:
        """Return True if every file is; otherwise the generation is set aside, also after errors of the disk that last.
        Raises OSError if the store cannot be read."""
        try:
            return retry_io(partial(self.store.valid, self.manifest), self.store.root, wait)
        except OSError as error:
            store, why = self.store, f"it cannot be read: {error}"
            if isinstance(store, CheckpointStore) and is_transient(error) and store.quarantine(self.manifest, why):
                return False
            raise

    def pieces(self, own: Store) -> dict[str, Piece]:
        """The file of each process; one in ``own`` has a relative folder."""
        folder = self.manifest.folder if self.store is own else f"{self.store.root}/{self.manifest.folder}"
        return {name: Piece(folder, file) for name, file in self.manifest.files.items()}


def find_newest(
    store: Store,
    manifests: Sequence[Manifest],
    wait: DiskWait,
    usable: Callable[[Manifest], bool] = lambda manifest: True,
    beyond: Generation | None = None,
) -> Generation | None:
    """The first intact and ``usable`` one, or ``beyond`` if that is of no earlier step."""
    for manifest in manifests:
        if beyond is not None and manifest.step <= beyond.manifest.step:
            break
        generation = Generation(store, manifest)
        if usable(manifest) and generation.is_intact(wait):
            return generation
    return beyond


def open_copies(place: Path | str, run: str, keep: int = 2) -> Store:
    """The copies of a run in a folder, or at a URL."""
    if isinstance(place, str):
        return ObjectStore(place, run, keep)
    return CheckpointStore(place, run, durable=True, keep=keep)


def save_generation(memory: Path, manifest: Manifest, copies: Store) -> bool:
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
