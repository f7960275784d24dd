# SPDX-License-Identifier: Apache-2.0
"""Where the commits of a run are."""

from dataclasses import dataclass
from pathlib import Path

from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.node_memory import memory_root
from dlrover.python.rl.runtime.checkpoint.runs import COMMITS, COPIES
from dlrover.python.rl.runtime.checkpoint.storage.generations import open_copies
from dlrover.python.rl.runtime.checkpoint.storage.object_store import ObjectStore
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore


@dataclass(frozen=True)
class Roots:
    """The folders of a run's generations, for its trainer of ``epoch`` on ``node`` (``""`` in one process): ``durable``
    in the job's directory for copies, and ``commits`` for each step (None: in the memory of each node). ``shared``: the
    commits are on a disk that every node sees, and must outlive them."""

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
        """The ``StateFile.node`` of files that ``node`` writes there."""
        return "" if self.shared else node

    def durable_store(self, keep: int = 2) -> CheckpointStore | ObjectStore:
        return open_copies(self.durable, self.run, keep)


def roots_of(job: JobSpec, run: str, epoch: int, node: str = "") -> Roots:
    """The folders of a run's commits, for its trainer of ``epoch`` on ``node``.

    With ``commit_to: auto`` a job commits to its nodes' memories, unless it may get one node of several: losing that
    one would lose its last steps.
    """
    commit_to, folder = job.checkpoint.commit_to, job.job_dir.absolute()
    if commit_to == "auto":
        commit_to = "job_dir" if job.scheduling_strategy == "SIMPLE" and not job.archive else "memory"
    shared = commit_to == "job_dir"
    commits = folder / COMMITS / run if shared else None
    copies = f"{job.archive}/{COPIES}/{run}" if job.archive else folder / COPIES / run
    return Roots(job.name, run, epoch, copies, commits, node, shared)


def is_on_one_node(job: JobSpec) -> bool:
    """Losing the node ends such a job anyway."""
    return job.trainer.node_number == 1 and job.scheduling_strategy != "SIMPLE"
