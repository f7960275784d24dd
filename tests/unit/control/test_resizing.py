# SPDX-License-Identifier: Apache-2.0
"""Changes of the number of workers of a role while the job runs."""

from dataclasses import replace

import pytest

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.control import events
from dlrover.python.rl.control.commands import Kill, StartMembers, StartTrainer
from dlrover.python.rl.control.machine import can_resize, outstanding, replay, step
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.control.state import MemberPhase, Phase
from tests.support.control_runs import OPEN, TERMS, Run, lost, members_up, standby_lost, started, trainer_lost, up

ALL_OF_ROLLOUT = [Kill(ProcessId("ROLLOUT", 0), 1), Kill(ProcessId("ROLLOUT", 1), 1), Kill(TRAINER_ID, 1)]


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def test_growing_role_restarts_only_it_and_trainer():
    run = Run(*OPEN)(events.Resized("ROLLOUT", 3))
    assert of(Kill, run.commands) == ALL_OF_ROLLOUT
    (start,) = of(StartMembers, run.commands)
    assert start.members == ((0, 2), (1, 2), (2, 1)) and start.standbys == {0: 0}
    (trainer,) = of(StartTrainer, run.commands)
    assert (trainer.epoch, trainer.fresh) == (2, False) and "ROLLOUT was resized to 3" in trainer.reason
    assert run.number("ACTOR[0]") == 1 and run.phase("ACTOR[0]") == "up"
    assert run.state.restarts == 0 and not run.state.history and not run.state.recoveries


def test_shrinking_role_loses_its_last_ranks():
    run = Run(*OPEN)(events.Resized("ROLLOUT", 1))
    assert ProcessId("ROLLOUT", 1) not in run.state.members
    assert of(Kill, run.commands) == ALL_OF_ROLLOUT
    assert of(StartMembers, run.commands)[0].members == ((0, 2),)
    assert run.ignores(lost("ROLLOUT", 1, 1)) and run.ignores(started("ROLLOUT", 1, 1))


def test_no_process_has_the_number_of_an_earlier_one():
    """2, 3, 2, 3: the third worker comes back under the next number."""
    run = Run(*OPEN)
    seen = {("ROLLOUT", rank, 1) for rank in range(2)} | {("ACTOR", rank, 1) for rank in range(2)}
    for num in (3, 2, 3, 1, 4):
        run(events.Resized("ROLLOUT", num))
        (start,) = of(StartMembers, run.commands)
        new = {("ROLLOUT", rank, number) for rank, number in start.members}
        assert len(new) == num and not new & seen
        seen |= new
        assert len([it for it in run.state.members if it.role == "ROLLOUT"]) == num
    assert run.state.most == {"ROLLOUT": 4}


@pytest.mark.parametrize(
    ("history", "event"),
    [
        (OPEN, events.Resized("ROLLOUT", 2)),
        (OPEN, events.Resized("ROLLOUT", 0)),
        (OPEN, events.Resized("JUDGE", 2)),
        (OPEN, events.Resized("ACTOR", 3)),  # its workers meet in collectives
        (up(), events.Resized("ROLLOUT", 3)),  # before steps()
        ([*OPEN, events.StopRequested("enough")], events.Resized("ROLLOUT", 3)),
    ],
)
def test_impossible_resize_changes_nothing(history, event):
    assert Run(*history).ignores(event)


def test_resize_ends_back_off_of_member():
    run = Run(*OPEN, lost("ROLLOUT", 1), started("ROLLOUT", 1, 2, standby=0), lost("ROLLOUT", 1, 2))
    assert any(timer.startswith("ROLLOUT[1]") for timer in run.state.waits)
    run(events.Resized("ROLLOUT", 3))
    assert not any(timer.startswith("ROLLOUT[") for timer in run.state.waits)
    assert run.phase("ROLLOUT[1]") == MemberPhase.STARTING


def test_a_trainer_in_its_back_off_starts_after_that():
    run = Run(*OPEN, trainer_lost(1), events.TrainerStarted(2), trainer_lost(2))
    epoch, waits = run.state.epoch, dict(run.state.waits)
    assert waits
    run(events.Resized("ROLLOUT", 3))
    assert run.state.epoch == epoch and run.state.waits == waits and not of(StartTrainer, run.commands)


def test_master_back_starts_resized_role():
    run = Run(*OPEN)(events.Resized("ROLLOUT", 3))
    state, commands = step(run.state, events.MasterStarted(), 99.0)
    (start,) = of(StartMembers, commands)
    assert [rank for rank, _ in start.members] == [0, 1, 2]
    assert any(isinstance(command, StartMembers) for command in outstanding(state))


def test_a_restart_of_the_job_keeps_the_size():
    history = [TERMS, *OPEN, events.Resized("ROLLOUT", 3)]
    state = replay([(float(at), event) for at, event in enumerate(history)])
    assert state.settings.roles["ROLLOUT"].num == 3 and can_resize(state, "ROLLOUT")
    assert not can_resize(state, "ACTOR")


JOB = """
trainer: {module: m, class: T, device_type: CPU, device_per_node: 3, node_number: 2}
workload:
  actor: {module: m, class: A, resource: {cpu: 2}}
  rollout: {module: m, class: R, num: 2, standby: 1}
"""


def test_places_beyond_the_plan_leave_its_numbers_as_they_are():
    placement, errors = plan(load_job_text(JOB, "job"))
    assert not errors
    larger = placement.with_places({"ROLLOUT": 4})
    assert larger.bundles[: len(placement.bundles)] == placement.bundles
    assert larger.slots == placement.slots
    assert larger.standbys["ROLLOUT"][:1] == placement.standbys["ROLLOUT"]
    added = [larger.bundles[slot.bundle] for slot in larger.standbys["ROLLOUT"][1:]]
    last = placement.bundles[-1].node
    assert [bundle.node for bundle in added] == [last + 1, last + 2]
    assert {tuple(bundle.resources.items()) for bundle in added} == {(("cpu", 1.0),)}
    assert larger.position(len(placement.bundles)) == (last + 1, 0)
    assert placement.with_places({}) == placement.with_places({"ROLLOUT": 1}) == placement


# -- roles that may continue with fewer workers ------------------------------------------------------------------------

ELASTIC = replace(TERMS, roles={**TERMS.roles, "ROLLOUT": replace(TERMS.roles["ROLLOUT"], standby=0, least=1)})


def no_place(rank, incarnation, role="ROLLOUT"):
    cause = events.Cause(events.CauseKind.NO_RESOURCES, "job", "there is no node")
    return events.Unplaced(role, rank, incarnation, cause)


def test_role_without_place_shrinks_and_grows_again():
    run = Run(*OPEN, lost("ROLLOUT", 0), no_place(0, 2), terms=ELASTIC)
    assert run.state.phase is Phase.RUNNING and run.state.wanted == {"ROLLOUT": 2}
    assert of(StartMembers, run.commands)[0].members == ((0, 3),)
    assert of(Kill, run.commands)[-2] == Kill(ProcessId("ROLLOUT", 1), 1), "its ranks are counted again"
    assert "no place" in of(StartTrainer, run.commands)[0].reason
    assert not run.state.history.get("job"), "nothing is charged for it"
    run(started("ROLLOUT", 0, 3), events.TrainerStarted(2, run.state.trainer.process), events.Resized("ROLLOUT", 2, 2))
    assert len(of(StartMembers, run.commands)[0].members) == 2 and run.state.wanted == {}


def test_users_resize_of_lacking_role_decides():
    run = Run(*OPEN, lost("ROLLOUT", 0), no_place(0, 2), events.Resized("ROLLOUT", 2), no_place(1, 2), terms=ELASTIC)
    assert run.state.wanted == {"ROLLOUT": 2}
    assert run(events.Resized("ROLLOUT", 3)).state.wanted == {}


def test_role_below_its_least_fails_job():
    run = Run(*OPEN, lost("ROLLOUT", 0), no_place(0, 2), no_place(0, 3), terms=ELASTIC)
    assert run.state.outcome is Phase.FAILED and run.state.failure.kind is events.CauseKind.NO_RESOURCES
    assert Run(*OPEN, lost("ROLLOUT", 0), no_place(0, 2)).state.outcome is Phase.FAILED, "a role that needs all"


def test_a_job_may_begin_with_fewer_members():
    run = Run(events.Placed(1), *members_up()[:3], no_place(1, 1), terms=ELASTIC)
    assert run.state.phase is Phase.PLACED and of(StartTrainer, run.commands) == []
    assert of(StartTrainer, run(started("ROLLOUT", 0, 2)).commands)


def test_missing_place_before_steps_restarts_or_fails_job():
    assert Run(*up(), lost("ROLLOUT", 0), no_place(0, 2), terms=ELASTIC).state.phase is not Phase.RUNNING
    assert Run(*up(), no_place(0, 1), terms=ELASTIC).state.outcome is Phase.FAILED


def test_roles_second_missing_place_wants_both_back():
    roles = {**TERMS.roles, "ROLLOUT": replace(TERMS.roles["ROLLOUT"], num=3, least=1)}
    third = started("ROLLOUT", 2)
    opened = [*OPEN[:5], third, *OPEN[5:]]
    run = Run(*opened, lost("ROLLOUT", 0), no_place(0, 2), no_place(0, 3), terms=replace(TERMS, roles=roles))
    assert (run.state.settings.roles["ROLLOUT"].num, run.state.wanted) == (1, {"ROLLOUT": 3})


def test_resize_keeps_back_offs_of_standbys_and_other_roles():
    run = Run(*OPEN, standby_lost(0), standby_lost(1), lost("ACTOR", 0), lost("ACTOR", 0, 2))
    before = dict(run.state.waits)
    assert len(before) == 2 and run(events.Resized("ROLLOUT", 3)).state.waits == before


def test_outdated_missing_place_is_ignored():
    run = Run(*OPEN, lost("ROLLOUT", 0), terms=ELASTIC)
    assert run.ignores(no_place(0, 1)) and run.ignores(no_place(7, 1)) and run.ignores(no_place(0, 2, "JUDGE"))
