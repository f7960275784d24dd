"""The pure machine with its journal: an event is saved before its commands are handed out."""

from dlrover.python.rl.common.errors import JobConflict
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
