"""The pure machine with its journal: an event is saved before its commands are handed out."""

from pathlib import Path

from dlrover.python.rl.common.errors import JobConflict
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.events import Command, Event, Submitted
from dlrover.python.rl.control.journal import decode, encode
from dlrover.python.rl.control.machine import replay, step
from dlrover.python.rl.control.state import JobState
from dlrover.python.rl.runtime.state_store import StateStore


class Brain:
    """Takes events in, keeps the journal and the state, hands commands out.

    Args:
        store: where the journal is; what it holds already is replayed.

    Raises:
        JournalCorrupt: the journal cannot be trusted.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self.state: JobState = replay(decode(store.read()))

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Save ``event``, step, and return what shall be done. An event that changes nothing is not saved."""
        state, commands = step(self.state, event)
        if state is self.state:
            return ()
        self._store.append(encode(event))
        self.state = state
        return commands

    def close(self) -> None:
        """Give the journal back."""
        self._store.close()


def submission(job: JobSpec, brain: Brain) -> Submitted:
    """The first event of ``job``.

    Raises:
        JobConflict: the journal already holds a job.
    """
    if brain.state.terms is not None:
        raise JobConflict(f"the journal already holds a run of '{brain.state.terms.job}'")
    limits = job.restart
    return Submitted(
        job=job.name,
        roles={role: spec.num for role, spec in job.workloads.items()},
        job_max_restart=limits.job_max_restart,
        trainer_max_restart=limits.trainer_max_restart,
        workload_max_restart={role.upper(): limit for role, limit in limits.workload_max_restart.items()},
        backoff_s=limits.backoff_s,
    )


def fresh_journal(job: JobSpec) -> Path:
    """Where this run's journal goes, on the machine that keeps it. An earlier run's is kept beside it, numbered."""
    job.job_dir.mkdir(parents=True, exist_ok=True)
    description = job.job_dir / "job.yaml"
    description.write_text(job_to_yaml(job, hide_secrets=True), encoding="utf-8")
    description.chmod(0o600)
    journal = job.job_dir / "journal.jsonl"
    if journal.exists():
        numbers = [int(file.suffixes[0][1:]) for file in job.job_dir.glob("journal.[0-9]*.jsonl")]
        journal.rename(job.job_dir / f"journal.{1 + max(numbers, default=0)}.jsonl")
    return journal
