# SPDX-License-Identifier: Apache-2.0
"""What a run writes beside its states where ``job_dir`` is in an object store: local files, and their copies there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsspec.core import url_to_fs

from dlrover.python.rl.common.errors import CheckpointMissing, ConfigError
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.storage.object_store import store_errors

_STATES = ("checkpoints", "commits")


class RunFiles:
    """The files of a run in ``folder``, of which ``url`` has copies: those of the last copied step or of later ones."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._fs, self._path = url_to_fs(url, use_listings_cache=False)
        self._uploaded: dict[Path, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Download what is not here, or shorter: this process may be the run's first one on its node."""
        with store_errors():
            self._fetch()

    def _fetch(self) -> None:
        self._fs.invalidate_cache()
        for path, details in self._fs.find(self._path, detail=True).items():
            name = Path(str(path)).relative_to(self._path)
            target = self._folder / name
            if len(name.parts) > 1 or target.is_file() and target.stat().st_size >= details["size"]:
                continue  # folders: models, which nothing continues from, and states
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.fetched")
            self._fs.get_file(str(path), str(temporary))
            temporary.replace(target)

    def put(self, name: str) -> None:
        with store_errors():
            self._fs.put_file(str(self._folder / name), f"{self._path}/{name}")

    def read(self, name: str) -> str:
        """The text of a file there; empty if there is none."""
        with store_errors():
            try:
                return str(self._fs.read_text(f"{self._path}/{name}", encoding="utf-8"))
            except FileNotFoundError:
                return ""

    def upload(self) -> None:
        """Upload what has changed since the last time, except what is renamed or removed meanwhile."""
        for path in sorted(Path(folder, name) for folder, _, names in os.walk(self._folder) for name in names):
            name = path.relative_to(self._folder)
            if name.parts[0] in _STATES or name.name.startswith((".", "owner.", "journal.")) or not path.is_file():
                continue
            try:
                self._upload_changed(name, path)
            except (FileNotFoundError, CheckpointMissing):
                if path.exists():
                    raise

    def _upload_changed(self, name: Path, path: Path) -> None:
        status = path.stat()
        version = status.st_mtime_ns, status.st_size
        if self._uploaded.get(name) != version:
            self.put(str(name))
            self._uploaded[name] = version


def files_of(job: JobSpec) -> RunFiles | None:
    return RunFiles(job.job_dir, job.archive) if job.archive else None


def results_of(job: JobSpec) -> Any:
    """Where models are saved: the job's folder, or a ``UPath`` in the object store, which each member reaches."""
    if not job.archive:
        return job.job_dir
    from upath import UPath  # of an extra

    return UPath(job.archive)


@contextmanager
def local_folder(place: Any) -> Iterator[Path]:
    """``place``, or for one in an object store a folder here, whose files are uploaded after the block."""
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
    """What keeps a job from having its ``job_dir`` at a URL, found without reaching it."""
    if not job.archive:
        return []
    if job.checkpoint.commit_to == "job_dir":
        what = f"'job_dir', but {job.archive} is no folder that nodes share: use memory, or auto"
        return [ConfigError("checkpoint.commit_to", what)]
    try:
        RunFiles(job.job_dir, job.archive)
        results_of(job)
    except (ImportError, ValueError) as error:
        return [ConfigError("job_dir", f"{job.archive}: {error} (pip install 'dlrover-rl[store]' brings S3's)")]
    return []
