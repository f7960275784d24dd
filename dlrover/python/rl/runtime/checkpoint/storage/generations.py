# SPDX-License-Identifier: Apache-2.0
"""The newest intact generation of several stores, and what becomes of one that cannot be read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dlrover.python.rl.common.disk_space import DiskWait, is_transient, retry_io
from dlrover.python.rl.common.errors import CheckpointCorrupt
from dlrover.python.rl.runtime.checkpoint.storage.manifest import Manifest, Piece
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
