# SPDX-License-Identifier: Apache-2.0
"""Generations of state files in an object store, through fsspec: S3, GCS, Azure, ...

::

    URL/
      epochs/00000003                  claims: the highest counts, the store refuses lower ones
      step-00000008.e3/
        ACTOR-0.1.state
        trainer.state
        manifest.json                  written last, removed first: with it the generation is valid
      step-00000006.e2/
        bad                            why it is never loaded

An object store has neither renames nor locks. An object appears as a whole, and no name gets two contents, since each
trainer writes into the folders of its epoch.
"""

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.runtime.checkpoint.state_file import StateFile, check_file, check_size, read_opened
from dlrover.python.rl.runtime.checkpoint.store import (
    MANIFEST,
    CheckpointStore,
    Files,
    Manifest,
    decode,
    encode,
    folder_name,
    numbered,
    step_and_epoch,
)

_LOG = get_logger(__name__)

_BAD, _EPOCHS = "bad", "epochs"


class ObjectStore:
    """The generations of ``run`` under ``url``, a job's durable copies. Errors are OSErrors; tests replace ``fs``."""

    def __init__(self, url: str, run: str, keep: int = 2, fs: fsspec.AbstractFileSystem | None = None) -> None:
        self.root, self.run, self.keep = url.rstrip("/"), run, keep
        own, self._path = url_to_fs(self.root, use_listings_cache=False)
        self._fs = fs or own

    def claim(self, epoch: int) -> None:
        """Refuse every lower epoch from now on; raises StaleEpoch after a higher claim."""
        self._check(epoch)
        with store_errors():
            self._fs.pipe_file(f"{self._path}/{_EPOCHS}/{epoch:08d}", b"%d" % epoch)
        self._check(epoch)

    @property
    def epoch(self) -> int:
        return max((int(name) for name in self.names(_EPOCHS) if name.isdigit()), default=0)

    def put(self, source: Path, step: int, epoch: int, file: StateFile) -> StateFile:
        """Check and upload an intact file. Raises StaleEpoch, CheckpointCorrupt, CheckpointMissing, OSError."""
        self._check(epoch)
        with store_errors():
            target = self._fs.open(f"{self._path}/{folder_name(step, epoch)}/{file.name}", "wb", autocommit=False)
            try:
                check_file(source, file, target.write)
                target.close()
                target.commit()
            except BaseException:
                with suppress(Exception):
                    target.discard()
                raise
            finally:
                self._fs.transaction.files.remove(target)  # fsspec keeps it for the end of a transaction
        return replace(file, node="")

    def commit(self, step: int, epoch: int, files: Files, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Make the uploaded files the newest generation; see :meth:`CheckpointStore.commit`."""
        self._check(epoch)
        manifest = Manifest(step, epoch, self.run, dict(files), dict(extra or {}))
        for file in files.values():
            self.check(manifest.folder, file)
        existing = self.manifests()
        if (manifest := numbered(manifest, existing)) in existing:
            return manifest
        marked = _BAD in self.names(manifest.folder)  # another attempt at the same step
        with store_errors():
            for name in (MANIFEST, _BAD) if marked else ():
                with suppress(FileNotFoundError):
                    self._fs.rm_file(f"{self._path}/{manifest.folder}/{name}")
            self._fs.pipe_file(f"{self._path}/{manifest.folder}/{MANIFEST}", encode(manifest))
        # The newest generations stay, and folders of later steps, which may still become one.
        newest = {manifest.folder, *(old.folder for old in existing[: self.keep - 1])}
        for name in self._folders():
            ids = step_and_epoch(name) or (0, 0)
            if name not in newest and ids[0] <= step and ids[1] <= epoch:
                self._remove(name)
        return manifest

    def drop_older(self, step: int) -> None:
        for name in self._folders():
            if (ids := step_and_epoch(name)) and ids[0] < step:
                self._remove(name)

    def remove(self) -> None:
        for name in self._folders():
            self._remove(name)
        with suppress(OSError), store_errors():
            self._fs.rm(self._path, recursive=True)

    def manifests(self) -> list[Manifest]:
        """List the generations, newest first, without quarantined ones."""
        manifests = []
        for name in self._folders():
            names = self.names(name)
            if MANIFEST not in names or _BAD in names:
                continue
            try:
                with store_errors():
                    content = self._fs.cat_file(f"{self._path}/{name}/{MANIFEST}")
                manifest = decode(content)
                if (manifest.run, manifest.folder) == (self.run, name):
                    manifests.append(manifest)
            except CheckpointMissing:
                continue  # removed since they were listed
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self.quarantine(name, f"not a manifest: {error}")
        return sorted(manifests, key=lambda manifest: manifest.age, reverse=True)

    def valid(self, manifest: Manifest, verify: Callable[[Path, StateFile], None] | None = None) -> bool:
        """Return True if every file has its length; otherwise quarantine the generation. Readers check the bytes."""
        try:
            for file in manifest.files.values():
                self.check(manifest.folder, file)
        except (CheckpointCorrupt, CheckpointMissing) as error:
            self.quarantine(manifest.folder, str(error))
            return False
        return True

    def check(self, folder: str, file: StateFile) -> None:
        with store_errors():
            nbytes = self._fs.size(f"{self._path}/{folder}/{file.name}")
        if nbytes != file.nbytes:
            raise CheckpointCorrupt(f"{self.root}/{folder}/{file.name}", f"{nbytes} bytes instead of {file.nbytes}")

    def read(self, manifest: Manifest, name: str) -> Any:
        """Return the tree in file ``name``. Raises CheckpointMissing, CheckpointCorrupt."""
        file = manifest.file_of(name)
        return read_from(f"{self.root}/{manifest.folder}/{file.name}", file, fs=self._fs)

    def quarantine(self, name: str, why: str) -> bool:
        """Mark a generation, which is never loaded again. Returns False if the store refuses."""
        _LOG.warning("%s/%s is not used: %s", self.root, name, why)
        with suppress(OSError), store_errors():
            self._fs.pipe_file(f"{self._path}/{name}/{_BAD}", why.encode())
            return True
        return False

    def damaged(self) -> list[str]:
        return [name for name in self._folders() if _BAD in self.names(name)]

    def _check(self, epoch: int) -> None:
        if epoch < (highest := self.epoch):
            raise StaleEpoch(f"attempt {epoch} has ended: attempt {highest} has taken over {self.root}")

    def names(self, folder: str = "") -> list[str]:
        """List the folder, or one below it."""
        with store_errors():
            try:
                self._fs.invalidate_cache()
                paths = self._fs.ls(f"{self._path}/{folder}".rstrip("/"), detail=False)
            except FileNotFoundError:
                return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def _folders(self) -> list[str]:
        return [name for name in self.names() if step_and_epoch(name)]

    def _remove(self, name: str) -> None:
        try:  # the manifest first: without it the remains are no generation
            with store_errors():
                with suppress(FileNotFoundError):
                    self._fs.rm_file(f"{self._path}/{name}/{MANIFEST}")
                self._fs.rm(f"{self._path}/{name}", recursive=True)
        except (OSError, CheckpointMissing) as error:
            _LOG.warning("%s/%s cannot be removed: %s", self.root, name, error)


def stores_below(url: str) -> list[ObjectStore]:
    """Return the stores of all runs whose folders are at ``url``."""
    return [ObjectStore(f"{url}/{run}", run) for run in ObjectStore(url, "").names()]


def read_from(
    url: str,
    expected: StateFile | None = None,
    header: Mapping[str, str | int] | None = None,
    fs: fsspec.AbstractFileSystem | None = None,
) -> Any:
    """Return the tree in the state file at ``url``; raises as ``read_state``."""
    own, path = url_to_fs(url)
    with store_errors(), (fs or own).open(path, "rb") as file:
        return read_opened(file, url, int(file.size), expected, header)


@contextmanager
def store_errors() -> Iterator[None]:
    """Raise the errors of libraries as those that a disk raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointMissing(f"{error} is not there") from error
    except (CheckpointCorrupt, CheckpointMissing, StaleEpoch):
        raise
    except Exception as error:
        if isinstance(error, OSError) and (error.errno or 0) > 0:  # numbers of name servers are below
            raise
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


Store = CheckpointStore | ObjectStore


def open_copies(place: Path | str, run: str, keep: int = 2) -> Store:
    if isinstance(place, str):
        return ObjectStore(place, run, keep)
    return CheckpointStore(place, run, durable=True, keep=keep)


def newest_step(store: Store) -> int:
    """Return the step of the newest generation whose files have their lengths; 0 for none."""
    return next((manifest.step for manifest in store.manifests() if store.valid(manifest, check_size)), 0)
