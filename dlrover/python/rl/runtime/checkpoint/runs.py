# SPDX-License-Identifier: Apache-2.0
"""The commits and copies of all runs in a job's directory, the copies of its files where ``job_dir`` is a URL, and the
room that commits need before the job starts.

::

    in a node's memory   2 commits, the one that is written, and 1 more while it is copied;
                         on several nodes also 3 of the node before
    in job_dir           checkpoint.keep copies of all states and the one that is written; with commit_to: job_dir also
                         the generations that would be in memory
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsspec.core import url_to_fs

from dlrover.python.rl.common.errors import CheckpointMissing, ConfigError
from dlrover.python.rl.common.log import short_number
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_path, memory_root
from dlrover.python.rl.runtime.checkpoint.object_store import (
    ObjectStore,
    Store,
    newest_step,
    open_copies,
    store_errors,
    stores_below,
)
from dlrover.python.rl.runtime.checkpoint.state_file import check_size
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore, Manifest

TRAINER, CODE = "trainer", "code"  # keys of a manifest: the trainer's file, and digests of the code
STATES = COPIES, COMMITS = "checkpoints", "commits"  # the folders of copies and commits in a job's directory
_KEPT = 3  # commits in memory, of which one is being written


def forget_commits(job_dir: Path, run: str) -> None:
    """Remove an ended run's commits unless they go beyond its last copy, and its empty folder of copies."""
    folder = job_dir.absolute()
    commits, copies = (CheckpointStore(folder / name / run, run, durable=True) for name in (COMMITS, COPIES))
    if newest_step(commits) <= newest_step(copies):
        commits.remove()
    if copies.root.is_dir() and not any(path.is_dir() for path in copies.root.iterdir()):
        copies.remove()


def newest_of(stores: Iterable[Store]) -> tuple[Store, Manifest] | None:
    """Find the valid generation of the latest step of the run that committed last; copies are younger than commits."""
    pairs = [(store, manifest) for store in stores for manifest in store.manifests()]
    ended: dict[str, float] = {}
    for store, manifest in pairs:
        ended[store.run] = max(manifest.committed_at, ended.get(store.run, 0.0))
    for store, manifest in sorted(pairs, key=lambda pair: (ended[pair[0].run], pair[1].step), reverse=True):
        if store.valid(manifest, check_size):
            return store, manifest
    return None


def newest_commit(job_dir: Path, archive: str = "") -> tuple[Store, Manifest] | None:
    """Find the last valid commit or copy of any run in the folder, or at the URL of its archive."""
    folder = job_dir.absolute()
    roots = [root for name in (COPIES, COMMITS) for root in (folder / name).glob("*") if root.is_dir()]
    stores = [CheckpointStore(root, root.name, durable=True) for root in roots if root.suffix != ".gone"]
    return newest_of([*stores, *(stores_below(f"{archive}/{COPIES}") if archive else ())])


def resumed_layout(job: JobSpec) -> tuple[str, dict[str, int]] | None:
    """Return the copy that ``job`` would continue from, and its workers by role; None for a fresh start."""
    newest = newest_commit(job.job_dir, job.archive) if job.checkpoint.resume == "latest" else None
    if newest is None:
        return None
    store, manifest = newest
    members = Counter(name.rpartition("-")[0] for name in manifest.files if name != TRAINER)
    return f"{store.root}/{manifest.folder}", dict(members)


def prune_earlier_runs(durable: Store) -> None:
    """Keep the newest copies of all runs in the folder of ``durable``, and no commits of earlier runs."""
    room = durable.keep - len(durable.manifests())
    stores: Sequence[Store]
    if isinstance(durable, ObjectStore):
        stores = stores_below(durable.root.rpartition("/")[0])
    else:
        folder = durable.root.parent.parent
        for root in (folder / COMMITS).glob("*"):
            if root.name != durable.run:
                CheckpointStore(root, root.name, durable=True).remove()
        stores = [CheckpointStore(root, root.name, durable=True) for root in (folder / COPIES).glob("*")]
    ended = [(max((each.committed_at for each in store.manifests()), default=0.0), store) for store in stores]
    for _, store in sorted(ended, key=lambda pair: pair[0], reverse=True):
        if store.run != durable.run:
            newest = store.manifests()[: max(room, 0)]
            room -= len(newest)
            store.drop_older(newest[-1].step) if newest else store.remove()


class RunFiles:
    """The files of a run in ``folder``, and their copies at ``url``, of the last copied step or later."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._fs, self._path = url_to_fs(url, use_listings_cache=False)
        self._uploaded: dict[Path, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Download files that are missing or shorter here: this may be the run's first process on its node."""
        with store_errors():
            self._fs.invalidate_cache()
            for path, details in self._fs.find(self._path, detail=True).items():
                name = Path(str(path)).relative_to(self._path)
                target = self._folder / name
                if len(name.parts) > 1 or target.is_file() and target.stat().st_size >= details["size"]:
                    continue  # folders have models, which nothing continues from, and states
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(f".{target.name}.fetched")
                self._fs.get_file(str(path), str(temporary))
                temporary.replace(target)

    def put(self, name: str) -> None:
        with store_errors():
            self._fs.put_file(str(self._folder / name), f"{self._path}/{name}")

    def read(self, name: str) -> str:
        """Return the text of a file at the URL; empty if there is none."""
        with store_errors():
            try:
                return str(self._fs.read_text(f"{self._path}/{name}", encoding="utf-8"))
            except FileNotFoundError:
                return ""

    def upload(self) -> None:
        """Upload the files that have changed since the last upload and still exist."""
        for path in sorted(Path(folder, name) for folder, _, names in os.walk(self._folder) for name in names):
            name = path.relative_to(self._folder)
            if name.parts[0] in STATES or name.name.startswith((".", "owner.", "journal.")) or not path.is_file():
                continue
            try:
                status = path.stat()
                version = status.st_mtime_ns, status.st_size
                if self._uploaded.get(name) != version:
                    self.put(str(name))
                    self._uploaded[name] = version
            except (FileNotFoundError, CheckpointMissing):
                if path.exists():
                    raise


def files_of(job: JobSpec) -> RunFiles | None:
    return RunFiles(job.job_dir, job.archive) if job.archive else None


@contextmanager
def synced_files(job: JobSpec) -> Iterator[None]:
    """Fetch the run's files from the object store, if the job has one, and upload them at the end."""
    files = files_of(job)
    if files is not None:
        files.fetch()
    try:
        yield
    finally:
        if files is not None:
            files.upload()


def results_of(job: JobSpec) -> Any:
    """Return the place of saved models: the job's folder, or a ``UPath`` that every worker reaches."""
    if not job.archive:
        return job.job_dir
    from upath import UPath  # of an extra

    return UPath(job.archive)


@contextmanager
def local_folder(place: Any) -> Iterator[Path]:
    """Yield ``place``, or for an object store a local folder whose files are uploaded after the block."""
    if isinstance(place, Path):
        yield place
        return
    with TemporaryDirectory(prefix="dlrover-rl-") as name:
        folder = Path(name) / "files"
        yield folder
        with store_errors():
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                place.fs.put_file(str(path), f"{place.path}/{path.relative_to(folder)}")


def remove_folder(place: Any) -> None:
    if isinstance(place, Path):
        shutil.rmtree(place)
    else:
        place.fs.rm(place.path, recursive=True)


def validate_archive(job: JobSpec) -> list[ConfigError]:
    """Return what keeps a job from having its ``job_dir`` at a URL, without reaching it."""
    if not job.archive:
        return []
    if job.checkpoint.commit_to == "job_dir":
        problem = f"'job_dir', but {job.archive} is no folder that nodes share: use memory, or auto"
        return [ConfigError("checkpoint.commit_to", problem)]
    try:
        RunFiles(job.job_dir, job.archive)
        results_of(job)
    except (ImportError, ValueError) as error:
        return [ConfigError("job_dir", f"{job.archive}: {error} (pip install 'dlrover-rl[store]' brings S3's)")]
    return []


@dataclass(frozen=True)
class Roots:
    """The folders of a run's generations, for its trainer of ``epoch`` on ``node`` (``""`` in one process): ``durable``
    for copies, ``commits`` for each step (None: in each node's memory; ``shared``: on a disk that all nodes see)."""

    job: str
    run: str
    epoch: int
    durable: Path | str
    commits: Path | None = None
    node: str = ""
    shared: bool = False

    def commit_root(self) -> Path:
        return self.commits or memory_root(self.job, self.run, self.durable)

    def commit_store(self, node: str) -> CheckpointStore:
        return CheckpointStore(self.commit_root(), self.run, durable=self.shared, node=self.owner(node))

    def owner(self, node: str) -> str:
        """Return the ``StateFile.node`` of the files that ``node`` writes."""
        return "" if self.shared else node

    def durable_store(self, keep: int = 2) -> Store:
        return open_copies(self.durable, self.run, keep)


def roots_of(job: JobSpec, run: str, epoch: int, node: str = "") -> Roots:
    """Return the folders of a run's commits, for its trainer of ``epoch`` on ``node``. With ``commit_to: auto`` a job
    commits to its nodes' memories, unless it may run on one node of several, whose loss would lose the last steps."""
    commit_to, folder = job.checkpoint.commit_to, job.job_dir.absolute()
    if commit_to == "auto":
        commit_to = "job_dir" if job.scheduling_strategy == "SIMPLE" and not job.archive else "memory"
    shared = commit_to == "job_dir"
    commits = folder / COMMITS / run if shared else None
    copies = f"{job.archive}/{COPIES}/{run}" if job.archive else folder / COPIES / run
    return Roots(job.name, run, epoch, copies, commits, node, shared)


def is_on_one_node(job: JobSpec) -> bool:
    """Return True if losing the node ends the job anyway."""
    return job.trainer.node_number == 1 and job.scheduling_strategy != "SIMPLE"


@dataclass(frozen=True)
class Room:
    """The bytes needed in the memory of the fullest node, and in the job's directory; ``states`` describes them."""

    memory: int
    disk: int
    states: str


def room_for(job: JobSpec, placement: Placement, state_bytes: Mapping[str, int | None]) -> Room | None:
    """Compute the room from the ``state_bytes`` of one worker per role with state; None if one is unknown."""
    own = [0] * max(len(placement.nodes), 1)
    parts = []
    for role, slots in placement.slots.items():
        nbytes = state_bytes.get(str(role), 0)
        if nbytes is None:
            return None
        for slot in slots:
            own[placement.position(slot.bundle)[0]] += nbytes
        if nbytes:
            parts.append(f"{role} {len(slots)} x {short_number(nbytes)}B")
    roots = roots_of(job, "", 1)
    most = sorted(own, reverse=True)
    neighbours = most[1] if len(most) > 1 and not is_on_one_node(job) else 0
    in_memory = (_KEPT + 1) * most[0] + _KEPT * neighbours
    disk = 0 if job.archive else (job.checkpoint.keep + 1) * sum(own)
    if roots.shared:
        in_memory, disk = 0, disk + (_KEPT + 1) * sum(own)
    return Room(in_memory, disk, ", ".join(parts))


def describe_room(room: Room | None) -> list[str]:
    if room is None:
        return ["commits: the size of a state is unknown until it is loaded"]
    if not room.states:
        return []
    memory = f"{short_number(room.memory)}B in the memory of a node at most, " if room.memory else ""
    return [f"commits: {room.states}; {memory}{short_number(room.disk)}B in the job's directory"]


def validate_room(job: JobSpec, room: Room | None) -> list[ConfigError]:
    """Return what cannot fit, where the job's nodes are like this machine."""
    if room is None:
        return []
    advice = "use checkpoint.keep: 1, or another disk"
    needs = [("job_dir", room.disk, job.run_folders or job.job_dir, advice)]
    if is_on_one_node(job):
        memory, advice = memory_path(job.name, "").parent.parent, "checkpoint.commit_to: job_dir needs no memory"
        needs.insert(0, ("checkpoint.commit_to", room.memory, memory, advice))
    errors = []
    for where, nbytes, folder, advice in needs:
        disk = os.statvfs(next(parent for parent in (folder, *folder.parents) if parent.exists()))
        size = disk.f_blocks * disk.f_frsize  # 0 without a disk
        if 0 < size < nbytes:
            need, has = short_number(nbytes), short_number(size)
            errors.append(ConfigError(where, f"commits need {need}B in {folder}, which has {has}B in all: {advice}"))
    return errors
