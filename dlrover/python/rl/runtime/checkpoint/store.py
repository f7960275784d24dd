# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: a folder of generations, its manifests and its fence are read together.
"""Generations of state files in a folder: a manifest commits each, the trainer's epoch fences them, the newest stay.

::

    root/
      LOCK                        flock for every change of the set of generations
      EPOCH                       the highest epoch that has claimed the folder; lower ones are refused
      step-00000007.e1/           a generation
        manifest.json             its appearance makes the generation valid
        ACTOR-0.1.state           of rank 0, from the process of its incarnation 1
        trainer.state
      step-00000008.e1/           no manifest: being written, or left by a crash
      step-00000006.e1.bad.1/     damaged: quarantined, never loaded
      step-00000005.e1.gone/      being removed
      spare/                      the generation removed last, in memory: its files are overwritten

A generation is changed as a whole, by renaming its folder, so readers see all of it or nothing.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from dlrover.python.rl.common.disk_space import naming
from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, StaleEpoch
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.runtime.checkpoint.state_file import (
    Header,
    StateFile,
    check_file,
    check_size,
    copy_file,
    make_folder,
    new_file,
    read_state,
    sync_folder,
    write_state,
)

_LOG = get_logger(__name__)

MANIFEST = "manifest.json"
NODES = "nodes"  # key in Manifest.extra of the nodes that have all files of each process
VERSION = 1
_FOLDER = re.compile(r"step-(?P<step>\d{8,})\.e(?P<epoch>\d+)")
_LARGEST = 1 << 28

Files: TypeAlias = Mapping[str, StateFile]


class Piece(NamedTuple):
    """A file, and the folder of its generation: in the same root, or an absolute path or URL."""

    folder: str
    file: StateFile


@dataclass(frozen=True)
class Manifest:
    """One generation: the state of every stateful worker and of the trainer after ``step``."""

    step: int
    epoch: int
    run: str
    files: Files  # by process: "ROLLOUT-0", "trainer"
    extra: Mapping[str, Any] = field(default_factory=dict)
    serial: int = 0  # rises with each commit in its folder; the highest is the newest
    committed_at: float = 0.0

    @property
    def age(self) -> tuple[int, int]:
        """Rises with each commit of a run."""
        return self.epoch, self.serial

    @property
    def folder(self) -> str:
        return folder_name(self.step, self.epoch)

    def file_of(self, name: str) -> StateFile:
        if name not in self.files:
            raise CheckpointMissing(f"{self.folder} has no '{name}'")
        return self.files[name]


def folder_name(step: int, epoch: int) -> str:
    return f"step-{step:08d}.e{epoch}"


def step_and_epoch(name: str) -> tuple[int, int] | None:
    match = _FOLDER.fullmatch(name)
    return (int(match["step"]), int(match["epoch"])) if match else None


def numbered(manifest: Manifest, existing: Sequence[Manifest]) -> Manifest:
    """Return the manifest as the newest of its folder, or the one of ``existing`` that has made the same commit."""
    for old in existing:
        if replace(old, serial=0, committed_at=0.0) == manifest:
            return old
    serial = 1 + max((old.serial for old in existing), default=0)
    return replace(manifest, serial=serial, committed_at=time.time())


def encode(manifest: Manifest) -> bytes:
    fields = dict(vars(manifest), files={name: vars(file) for name, file in manifest.files.items()})
    return _sealed(json.dumps({"version": VERSION, **fields}, sort_keys=True, allow_nan=False).encode())


def _sealed(body: bytes) -> bytes:
    return b'{"crc32": "%08x", "manifest": %s}\n' % (zlib.crc32(body), body)


def decode(content: bytes) -> Manifest:
    """Invert :func:`encode`. Raises ValueError for a changed byte, CheckpointMissing for an earlier version's calls."""
    fields = json.loads(content)["manifest"]
    if _sealed(json.dumps(fields, sort_keys=True, allow_nan=False).encode()) != content:
        raise ValueError("it does not match its checksum")
    version = fields.pop("version")
    if version != VERSION:
        raise ValueError(f"format {version!r} instead of {VERSION}")
    files = {name: StateFile(**file) for name, file in fields.pop("files").items()}
    if fields.pop("earlier", {}):
        raise CheckpointMissing(f"step {fields['step']} was committed as calls, by an earlier version of this package")
    return Manifest(files=files, **fields)


def read_manifest(folder: Path, run: str) -> Manifest:
    """Read the manifest of ``run`` in ``folder``. Raises CheckpointMissing, CheckpointCorrupt, OSError."""
    path = folder / MANIFEST
    try:
        with naming(path), open(path, "rb") as file:
            content = file.read(_LARGEST)
        manifest = decode(content)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointMissing(f"{path} is not there") from None
    except CheckpointMissing as error:
        _warn(f"{folder}: {error}; the newest whole state before it is used")
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(str(path), f"not a manifest: {error}") from error
    if manifest.run != run:
        raise CheckpointMissing(f"{path} belongs to run {manifest.run}, not to {run}")
    if manifest.folder != folder.name:
        raise CheckpointCorrupt(str(path), f"it belongs to {manifest.folder}")
    return manifest


@cache
def _warn(message: str) -> None:
    """Log a message once in this process: a store is read at each commit."""
    _LOG.warning(message)


def write_manifest(folder: Path, manifest: Manifest, durable: bool) -> None:
    """Make the files in ``folder`` a generation, or leave no manifest and raise OSError."""
    path, content = folder / MANIFEST, encode(manifest)
    try:
        with new_file(path, durable, len(content)) as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)  # it may have its name already, while the name is not safe yet
        raise


LOCK_TIMEOUT_S = 30.0
TAKE_OVER_S = 5.0  # for the lock of a folder or journal that is taken over: its holder may be frozen or lost
_LOCK_POLL_S = 0.002


def take_lock(handle: int, path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """flock ``handle``, an open file at ``path``, until it is closed or the process ends. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                message = f"another process has held the lock for {timeout_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, message, str(path)) from None
            time.sleep(_LOCK_POLL_S)
        else:
            return


class EpochFence:
    """The highest epoch that has claimed a folder, in its file ``EPOCH``; ``fallback`` estimates it if that is bad."""

    def __init__(self, root: Path, durable: bool, fallback: Callable[[], int]) -> None:
        self._root, self._durable, self._fallback = root, durable, fallback
        self._path, self._lock = root / "EPOCH", root / "LOCK"

    @contextmanager
    def locked(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Keep every other process from changing the folder. Raises CheckpointMissing, TimeoutError."""
        is_current = False
        while not is_current:  # else it was taken over between the opening and the lock
            try:
                handle = os.open(self._lock, os.O_CREAT | os.O_RDWR, 0o600)
            except FileNotFoundError:
                raise CheckpointMissing(f"{self._root} is not there") from None
            try:
                take_lock(handle, self._lock, timeout_s)
                if is_current := _is_at(handle, self._lock):
                    yield
            finally:
                os.close(handle)

    def take_over(self, epoch: int) -> None:
        """Refuse every lower epoch from now on. Raises StaleEpoch after a higher claim.

        If a frozen or lost process of a lower epoch holds the lock, a new lock replaces it. That process may finish its
        change later, which removes nothing of a higher epoch, nor the newest generation before."""
        try:
            with self.locked(TAKE_OVER_S):
                self.claim(epoch)
        except TimeoutError as error:
            _LOG.warning("taking %s over without its lock: %s", self._root, error)
            self.claim(epoch)
            fresh = self._lock.with_name(f".{self._lock.name}.{epoch}.tmp")
            os.close(os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600))
            fresh.replace(self._lock)

    def check(self, epoch: int) -> None:
        """Raise StaleEpoch if a higher epoch than ``epoch`` has claimed the folder."""
        if epoch < (highest := self.highest()):
            raise StaleEpoch(f"attempt {epoch} has ended: attempt {highest} has taken over {self._root}")

    def claim(self, epoch: int) -> None:
        """Refuse every lower epoch from now on; call it under the lock. Raises StaleEpoch after a higher claim."""
        self.check(epoch)
        if self._content() != _line(epoch):
            with new_file(self._path, self._durable) as file:
                file.write(_line(epoch))

    def _content(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def highest(self) -> int:
        content = self._content()
        digits = (content or b"").partition(b" ")[0]
        if digits.isdigit() and content == _line(int(digits)):
            return int(digits)
        if content is not None:
            _LOG.warning("%s is damaged: using the number of the last trainer that has written", self._path)
        return self._fallback()


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _line(epoch: int) -> bytes:
    text = b"%d" % epoch
    return b"%s %08x\n" % (text, zlib.crc32(text))


_BAD, _GONE, _SPARE = ".bad", ".gone", "spare"
_KEPT_BAD = 2


class CheckpointStore:
    """The generations of ``run`` under one ``root``, which :meth:`claim` creates; any number of processes may use it.
    ``durable``: sync to disk (False in memory). ``node``: this node's id, if workers on other nodes write to their own
    folders; their files are not checked here."""

    def __init__(self, root: Path, run: str, durable: bool, keep: int = 2, node: str = "") -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.root, self.run, self.durable = root, run, durable
        self.pinned: set[int] = set()  # steps that stay while they are being copied
        self.keep, self._node = keep, node
        self._manifests: dict[str, tuple[tuple[int, int, int], Manifest]] = {}  # by folder, with their versions
        self._fence = EpochFence(root, durable, lambda: max((epoch for _, epoch in self._folders()), default=0))

    def claim(self, epoch: int) -> None:
        """Refuse every lower epoch from now on; raises StaleEpoch if a higher one has claimed the folder."""
        make_folder(self.root, self.durable, mode=0o700)
        self._fence.take_over(epoch)

    @property
    def epoch(self) -> int:
        return self._fence.highest()

    def folder(self, step: int, epoch: int) -> Path:
        """Create and return the folder of ``step``. Raises StaleEpoch, or CheckpointMissing after the job's end."""
        self._fence.check(epoch)
        folder = self.root / folder_name(step, epoch)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            raise CheckpointMissing(f"{self.root} is not there") from None
        return folder

    def write(self, step: int, epoch: int, name: str, header: Header, tree: Any) -> StateFile:
        """Write a file, in memory over an old one, which is faster; raises as :meth:`folder` and ``write_state``."""
        path = self.folder(step, epoch) / name
        return write_state(path, header, tree, self.durable, self.spare(path))

    def put(self, source: Path, step: int, epoch: int, file: StateFile) -> StateFile:
        """Copy a file of generation ``step`` from another folder; raises as :meth:`folder` and ``copy_file``."""
        return copy_file(source, self.folder(step, epoch), file, self.durable)

    def commit(self, step: int, epoch: int, files: Files, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Make the workers' files the newest generation, and remove superfluous ones. Idempotent. Raises StaleEpoch, or
        CheckpointMissing, CheckpointCorrupt and OSError, after which the generation is not valid."""
        with self._fence.locked():
            self._fence.claim(epoch)
            folder = self.root / folder_name(step, epoch)
            manifest = Manifest(step, epoch, self.run, dict(files), dict(extra or {}))
            for file in self._files_here(manifest):
                check_size(folder, file)
            existing = self.manifests()
            if (manifest := numbered(manifest, existing)) in existing:
                return manifest
            write_manifest(folder, manifest, self.durable)
            with suppress(OSError):  # it is read again then
                self._manifests[folder.name] = _version(folder), manifest
            if self.durable:
                sync_folder(self.root)
            self._prune(manifest, [old for old in existing if old.folder != manifest.folder])
        return manifest

    def drop_older(self, step: int) -> None:
        """Remove the folders of the steps before ``step``, on a node where no manifest is ever committed."""
        for folder in sorted(self._folders(), reverse=True):  # see _prune
            if folder[0] < step and folder[0] not in self.pinned:
                self._retire(self.root / folder_name(*folder))

    def free_space(self, step: int, pinned: bool) -> bool:
        """Remove steps before ``step``, also ``pinned`` ones, and damaged ones. Returns False if there are none."""
        protected = set() if pinned else self.pinned
        spared = [folder_name(*ids) for ids in self._folders() if ids[0] < step and ids[0] not in protected]
        damaged = [folder.name for folder in self.root.glob(f"*{_BAD}*") if folder.suffix != _GONE]
        names = sorted((*spared, *damaged, *(path.name for path in self.root.glob(_SPARE))))
        for name in names:
            self._remove(self.root / name)
        if names:
            _LOG.warning("no space left in %s: removed %s", self.root, ", ".join(names))
        return bool(names)

    def remove(self) -> None:
        self._remove(self.root)  # renamed first, so that nothing new can be written into it
        with suppress(OSError):
            self.root.parent.rmdir()  # fails unless it is empty

    def manifests(self) -> list[Manifest]:
        """List all generations, newest first. One whose manifest is damaged is quarantined."""
        manifests, folders = [], self._folders()
        names = {folder_name(*ids) for ids in folders}
        self._manifests = {name: pair for name, pair in self._manifests.items() if name in names}
        for step, epoch in folders:
            folder = self.root / folder_name(step, epoch)
            try:
                version = _version(folder)
                before, manifest = self._manifests.get(folder.name, (None, None))
                if manifest is None or before != version:
                    manifest = read_manifest(folder, self.run)
                    self._manifests[folder.name] = version, manifest
                manifests.append(manifest)
            except (CheckpointMissing, FileNotFoundError, NotADirectoryError):
                continue
            except CheckpointCorrupt as error:
                self.quarantine(folder.name, str(error))
        return sorted(manifests, key=lambda manifest: manifest.age, reverse=True)

    def valid(self, manifest: Manifest, verify: Callable[[Path, StateFile], None] = check_file) -> bool:
        """Return True if ``verify`` (:func:`check_size` is quicker) passes; else quarantine the generation."""
        folder = self.root / manifest.folder
        try:
            for file in self._files_here(manifest):
                verify(folder, file)
        except (CheckpointCorrupt, CheckpointMissing) as error:
            self.quarantine(manifest.folder, str(error))  # does nothing if it was just removed as superfluous
            return False
        return True

    def read(self, manifest: Manifest, name: str) -> Any:
        """Return the tree in file ``name``. Raises CheckpointMissing, CheckpointCorrupt: :meth:`quarantine` it."""
        file = manifest.file_of(name)
        return read_state(self.root / manifest.folder / file.name, file)

    def check(self, folder: str, file: StateFile) -> None:
        check_size(self.root / folder, file)

    def quarantine(self, name: str, why: str) -> bool:
        """Rename a generation, which stays for inspection and is never loaded. Returns False if the disk refuses."""
        folder, names = self.root / name, (f"{name}{_BAD}.{number}" for number in count(1))
        target = next(path for path in map(self.root.joinpath, names) if not path.exists())
        try:
            folder.rename(target)
        except FileNotFoundError:
            return True  # removed, or quarantined by another process
        except OSError as error:
            _LOG.warning("%s is not used (%s), and cannot be renamed: %s", folder, why, error)
            return False
        _LOG.warning("%s is not used: %s; it is now %s", folder, why, target.name)
        return True

    def damaged(self) -> list[str]:
        return [folder.name for folder in self.root.glob(f"*{_BAD}*")]

    def _folders(self) -> list[tuple[int, int]]:
        return [ids for ids in map(step_and_epoch, _names_in(self.root)) if ids]

    def _files_here(self, manifest: Manifest) -> list[StateFile]:
        return [file for file in manifest.files.values() if file.node in ("", self._node)]

    def _prune(self, newest: Manifest, existing: list[Manifest]) -> None:
        """Keep the newest generations, pinned ones, and folders that may still become one."""
        recent = [newest]
        for manifest in existing:
            if len(recent) < self.keep and self.valid(manifest, check_size):
                recent.append(manifest)
        needed = {manifest.folder for manifest in recent}
        committed = {manifest.folder for manifest in existing}
        for step, epoch in sorted(self._folders(), reverse=True):  # the oldest one is retired last, and stays as spare
            name = folder_name(step, epoch)
            old = name in committed or (step <= newest.step and epoch <= newest.epoch)
            if old and name not in needed and step not in self.pinned:
                self._retire(self.root / name)
        # The remains of crashed processes: partial files, half-removed folders, all but two damaged ones.
        names = _names_in(self.root)
        for folder in (self.root, self.root / newest.folder):
            for path in folder.glob(".*.tmp"):
                with suppress(OSError):
                    path.unlink()
        for name in names:
            if name.endswith(_GONE):
                shutil.rmtree(self.root / name, ignore_errors=True)
        bad = [self.root / name for name in names if _BAD in name and not name.endswith(_GONE)]
        for folder in sorted(bad, key=_changed_at)[:-_KEPT_BAD]:
            _LOG.warning("removing %s: keeping the %d newer damaged ones", folder, _KEPT_BAD)
            shutil.rmtree(folder, ignore_errors=True)

    def _retire(self, folder: Path) -> None:
        """Remove a generation; in memory, its files stay until the next ones overwrite or replace them."""
        if self.durable:
            return self._remove(folder)
        spare = self.root / _SPARE
        shutil.rmtree(spare, ignore_errors=True)
        try:
            folder.rename(spare)
        except OSError:  # another process has removed it, or retires another one
            self._remove(folder)

    def spare(self, path: Path) -> Path | None:
        """Return an unneeded file that the state at ``path`` may overwrite."""
        files = (self.root / _SPARE).glob(f"{path.name.partition('.')[0]}.*.state") if path.suffix == ".state" else ()
        with suppress(OSError):  # another process replaces it with a newer generation
            return next(iter(files), None)
        return None

    def _remove(self, folder: Path) -> None:
        target = folder.with_name(folder.name + _GONE)
        try:
            folder.rename(target)
        except FileNotFoundError:
            return
        except OSError as error:
            _LOG.warning("%s cannot be removed: %s", folder, error)
            return
        shutil.rmtree(target, ignore_errors=True)


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _version(folder: Path) -> tuple[int, int, int]:
    """Return the identity of a folder's manifest, which is read again once this changes."""
    status = os.stat(folder / MANIFEST)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0
