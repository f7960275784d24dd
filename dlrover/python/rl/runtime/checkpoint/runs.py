# SPDX-License-Identifier: Apache-2.0
"""The commits and copies of all runs in a job's directory."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.storage.manifest import Manifest
from dlrover.python.rl.runtime.checkpoint.storage.object_store import ObjectStore, stores_below
from dlrover.python.rl.runtime.checkpoint.storage.state_file import check_size
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore, newest_of

TRAINER, CODE = "trainer", "code"
"""Names in a manifest: of the trainer's file, and of the digests of the code that computed."""

COPIES, COMMITS = "checkpoints", "commits"
"""Their folders in a job's directory."""


def forget_commits(job_dir: Path, run: str) -> None:
    """Remove the commits of an ended run from the job's directory, unless they go beyond its last copy; also the folder
    of copies if it has made none."""
    folder = job_dir.absolute()
    commits, copies = (CheckpointStore(folder / name / run, run, durable=True) for name in (COMMITS, COPIES))
    if _newest_step(commits) <= _newest_step(copies):
        commits.remove()
    if copies.root.is_dir() and not any(path.is_dir() for path in copies.root.iterdir()):
        copies.remove()


def _newest_step(store: CheckpointStore) -> int:
    return next((manifest.step for manifest in store.manifests() if store.valid(manifest, check_size)), 0)


def newest_commit(job_dir: Path, archive: str = "") -> tuple[CheckpointStore | ObjectStore, Manifest] | None:
    """The valid commit or copy made last by any run in the folder, or at the URL of its archive."""
    folder = job_dir.absolute()
    roots = [root for name in (COPIES, COMMITS) for root in (folder / name).glob("*") if root.is_dir()]
    stores = [CheckpointStore(root, root.name, durable=True) for root in roots if root.suffix != ".gone"]
    found = [*stores, *(stores_below(f"{archive}/{COPIES}") if archive else ())]
    return newest_of(found)


def resumed_layout(job: JobSpec) -> tuple[str, dict[str, int]] | None:
    """The copy that ``job`` would continue from, and its members by role; None for a fresh start."""
    newest = newest_commit(job.job_dir, job.archive) if job.checkpoint.resume == "latest" else None
    if newest is None:
        return None
    store, manifest = newest
    members = Counter(name.rpartition("-")[0] for name in manifest.files if name != TRAINER)
    return f"{store.root}/{manifest.folder}", dict(members)


def prune_earlier_runs(durable: CheckpointStore | ObjectStore) -> None:
    """Of all runs in the folder of ``durable``, keep the newest copies; commits of earlier ones are superseded."""
    room = durable.keep - len(durable.manifests())
    others: Sequence[CheckpointStore | ObjectStore]
    if isinstance(durable, ObjectStore):
        others = stores_below(durable.root.rpartition("/")[0])
    else:
        folder = durable.root.parent.parent
        for root in (folder / COMMITS).glob("*"):
            if root.name != durable.run:
                CheckpointStore(root, root.name, durable=True).remove()
        others = [CheckpointStore(root, root.name, durable=True) for root in (folder / COPIES).glob("*")]
    for store in sorted(others, key=_committed_at, reverse=True):
        if store.run != durable.run:
            kept = store.manifests()[: max(room, 0)]
            room -= len(kept)
            store.drop_older(kept[-1].step) if kept else store.remove()


def _committed_at(store: CheckpointStore | ObjectStore) -> float:
    return max((manifest.committed_at for manifest in store.manifests()), default=0.0)
