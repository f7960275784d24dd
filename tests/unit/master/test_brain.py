"""The brain: saved before ordered, replayed after a restart, silent about what changes nothing."""

import pytest
from toy_jobs import toy_job

from dlrover.python.rl.common.errors import JobConflict, JournalCorrupt
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    Failed,
    MemberStarted,
    Place,
    Placed,
    Release,
    Released,
    RestartDue,
    StopRequested,
    Submitted,
    TrainerStarted,
    WaitThenRestart,
)
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.brain import Brain, submission
from dlrover.python.rl.master.status import status_of
from dlrover.python.rl.runtime.state_store import FileStateStore, MemoryStateStore
from dlrover.python.rl.trainer.trainer import StepReport

SUBMITTED = Submitted("toy", {"ACTOR": 1}, 3, 3, backoff_s=0.5)
LOST = Failed(1, Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "gone"))


class FullDisk(MemoryStateStore):
    def append(self, line):
        raise OSError("no space left on device")


def test_an_event_is_saved_before_its_commands_are_handed_out():
    store = MemoryStateStore()
    brain = Brain(store)
    assert brain.handle(SUBMITTED) == (Place(1),)
    assert decode(store.read()) == [SUBMITTED]


def test_what_cannot_be_saved_did_not_happen():
    brain = Brain(FullDisk())
    before = brain.state
    with pytest.raises(OSError, match="no space"):
        brain.handle(SUBMITTED)
    assert brain.state is before


def test_an_event_that_changes_nothing_is_not_saved():
    store = MemoryStateStore()
    brain = Brain(store)
    for event in (SUBMITTED, SUBMITTED, Placed(7), RestartDue(1), Placed(1), Placed(1), Released(1)):
        brain.handle(event)
    assert decode(store.read()) == [SUBMITTED, Placed(1)]


def test_a_restart_passes_through_the_journal():
    store = MemoryStateStore()
    brain = Brain(store)
    answers = [brain.handle(event) for event in (SUBMITTED, LOST, Released(1), RestartDue(1))]
    assert answers == [(Place(1),), (Release(1),), (WaitThenRestart(1, 0.5),), (Place(2),)]
    assert decode(store.read()) == [SUBMITTED, LOST, Released(1), RestartDue(1)]


def test_a_new_brain_over_the_same_journal_knows_the_same(tmp_path):
    brain = Brain(FileStateStore(tmp_path / "journal"))
    for event in (SUBMITTED, Placed(1), MemberStarted(1, "ACTOR", 0, "n", 7), LOST, Released(1)):
        brain.handle(event)
    brain.close()
    again = Brain(FileStateStore(tmp_path / "journal"))
    assert again.state == brain.state
    assert again.handle(RestartDue(1)) == (Place(2),)
    again.close()


def test_a_journal_that_cannot_be_trusted_starts_nothing():
    store = MemoryStateStore()
    store.append(b"00000000 {}")
    with pytest.raises(JournalCorrupt):
        Brain(store)


def test_the_submission_says_what_the_machine_needs(tmp_path):
    brain = Brain(MemoryStateStore())
    event = submission(toy_job(tmp_path), brain)
    assert event == Submitted("toy", {"ACTOR": 2, "REWARD": 2}, 10, 10, {}, 1.0)
    brain.handle(event)
    with pytest.raises(JobConflict, match="already holds a run of 'toy'"):
        submission(toy_job(tmp_path), brain)


def test_the_status_of_a_job():
    brain = Brain(MemoryStateStore())
    assert status_of("toy", brain.state, None).phase is Phase.CREATED
    for event in (SUBMITTED, Placed(1), MemberStarted(1, "ACTOR", 0, "n", 7), TrainerStarted(1, "n", 8)):
        brain.handle(event)
    status = status_of("toy", brain.state, StepReport(3, 10, {}))
    assert (status.phase, status.incarnation, status.restarts) == (Phase.RUNNING, 1, 0)
    assert status.members == (("ACTOR[0]", "n", 7), ("trainer", "n", 8))
    assert (status.step, status.total_steps, status.cause) == (3, 10, None)
    for event in (Failed(1, Cause(CauseKind.USER_ERROR, "trainer", "words")), Released(1)):
        brain.handle(event)
    status = status_of("toy", brain.state, None)
    assert (status.phase, status.cause.who, status.members) == (Phase.FAILED, "trainer", ())
    assert status.reason == "trainer: words (user_error is not retried)"


def test_a_stop_is_kept_too():
    store = MemoryStateStore()
    brain = Brain(store)
    brain.handle(StopRequested("enough"))
    assert Brain(store).state.phase is Phase.STOPPED


def test_roles_survive_as_roles_do(tmp_path):
    event = submission(toy_job(tmp_path), Brain(MemoryStateStore()))
    assert all(isinstance(role, RLRoleType) for role in event.roles)
