# SPDX-License-Identifier: Apache-2.0
"""Recovery by scope, once steps are open: what restarts, what does not, what it costs, when it is too much."""

from dataclasses import replace

import pytest

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId
from dlrover.python.rl.control.commands import Kill, Place, Release, StartMembers, StartStandby, StartTrainer, Wait
from dlrover.python.rl.control.events import (
    Cause,
    CauseKind,
    Failed,
    MasterStarted,
    MemberLost,
    Process,
    Progressed,
    Released,
    StepsOpened,
    TrainerLost,
    TrainerStarted,
    WaitOver,
)
from dlrover.python.rl.control.machine import outstanding
from dlrover.python.rl.control.recovery import MAX_CAUSES, blame, completed_recoveries
from dlrover.python.rl.control.state import STANDBY_TRIES, EndReason, Phase, processes
from tests.support.control_runs import (
    OPEN,
    ROLES,
    TERMS,
    Run,
    cause,
    lost,
    members_up,
    node_lost,
    ready,
    standby_lost,
    started,
    trainer_lost,
    up,
)

LOOSE = replace(TERMS, job_max_restart=99, trainer_max_restart=99, node_max_failures=99)
ALONE = replace(LOOSE, roles={**ROLES, "ROLLOUT": replace(ROLES["ROLLOUT"], standby=0)})

# -- a worker alone ---------------------------------------------------------------------------------------------------


def test_a_lost_member_is_replaced_by_its_ready_standby_at_once():
    run = Run(*OPEN, lost("ROLLOUT", 1))
    assert run.commands == (StartMembers("ROLLOUT", ((1, 2),), {1: 0}),)
    assert (run.state.phase, run.state.recoveries) == (Phase.RUNNING, {"ROLLOUT": 1})
    run(started("ROLLOUT", 1, 2, "d", standby=0))
    assert (run.phase("ROLLOUT[1]"), run.state.members[ProcessId("ROLLOUT", 1)].standby) == ("up", 0)
    assert run.commands == (StartStandby("ROLLOUT", 1),)


def test_completed_recoveries_are_without_those_under_way():
    run = Run(*OPEN, lost("ROLLOUT", 1), terms=LOOSE)
    assert (run.state.recoveries, completed_recoveries(run.state)) == ({"ROLLOUT": 1}, {})
    run(started("ROLLOUT", 1, 2, "d", standby=0))
    assert completed_recoveries(run.state) == {"ROLLOUT": 1}
    for member in (lost("ROLLOUT", 1, 2), lost("ROLLOUT", 0), lost("ACTOR", 0)):
        run(member)
    assert (run.state.recoveries, completed_recoveries(run.state)) == ({"ROLLOUT": 3, "ACTOR": 1}, {"ROLLOUT": 1})


def test_without_a_ready_standby_a_new_process_starts():
    run = Run(*OPEN[:-3], StepsOpened(1), lost("ROLLOUT", 1))
    assert run.commands == (StartMembers("ROLLOUT", ((1, 2),)),)
    assert run(started("ROLLOUT", 1, 2)).commands == (), "the standby that is starting is still to come"


def test_a_standby_takes_one_place():
    run = Run(*OPEN, lost("ROLLOUT", 1), lost("ROLLOUT", 0))
    assert run.commands == (StartMembers("ROLLOUT", ((0, 2),)),)


def test_death_reported_often_is_recovered_once():
    run = Run(*OPEN, lost("ROLLOUT", 1))
    for late in (lost("ROLLOUT", 1), node_lost("zzz"), lost("ROLLOUT", 1, 1, CauseKind.HUNG), started("ROLLOUT", 1, 1)):
        run(late)
    assert (run.state.recoveries, run.number("ROLLOUT[1]")) == ({"ROLLOUT": 1}, 2)


BACK_OFFS = {
    "a worker": (
        [lost("ROLLOUT", 1), lost("ROLLOUT", 1, 2)],
        (),
        (Wait("ROLLOUT[1]#3", 1.0), lost("ROLLOUT", 1, 3), StartMembers("ROLLOUT", ((1, 3),))),
    ),
    "a group": (
        [lost("ACTOR", 1), started("ACTOR", 0, 2), lost("ACTOR", 1, 2)],
        (Kill(ProcessId("ACTOR", 0), 2),),
        (Wait("ACTOR#3", 1.0), lost("ACTOR", 1, 3), StartMembers("ACTOR", ((0, 3), (1, 3)))),
    ),
    "the trainer": (
        [trainer_lost(1), trainer_lost(2)],
        (Kill(TRAINER_ID, 2),),
        (Wait("trainer#3", 1.0), trainer_lost(3), StartTrainer(3, False, 2, "trainer: it is gone")),
    ),
    "a standby": (
        [standby_lost(0), standby_lost(1)],
        (Kill(ProcessId.standby("ROLLOUT", 1)),),
        (Wait("ROLLOUT-standby[2]#0", 1.0), standby_lost(2), StartStandby("ROLLOUT", 2)),
    ),
}


@pytest.mark.parametrize(("losses", "kills", "back_off"), BACK_OFFS.values(), ids=BACK_OFFS)
def test_second_loss_of_a_process_is_replaced_after_back_off(losses, kills, back_off):
    run, (wait, early, start) = Run(*OPEN, *losses, terms=LOOSE), back_off
    assert run.commands == (*kills, wait)
    assert run.ignores(early), "what has not been started cannot be lost"
    assert run(WaitOver(wait.timer)).commands == (start,)
    assert run.ignores(WaitOver(wait.timer))


def test_back_off_doubles_to_a_minute_until_progress():
    run = Run(*OPEN, terms=ALONE)
    waits = []
    for number in range(1, 11):
        run(lost("ROLLOUT", 1, number))
        waits.append(sum(wait.delay_s for wait in run.commands if isinstance(wait, Wait)))
        run(WaitOver(f"ROLLOUT[1]#{number + 1}"))
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    run(started("ROLLOUT", 1, 11), Progressed(1, 2), lost("ROLLOUT", 1, 11))
    assert run.commands == (StartMembers("ROLLOUT", ((1, 12),)),)


def test_a_restart_of_the_job_ends_all_back_offs():
    run = Run(*OPEN, lost("ROLLOUT", 1), lost("ROLLOUT", 1, 2), Failed(1, cause("job")), terms=ALONE)
    assert run.state.waits == {}
    assert run.ignores(WaitOver("ROLLOUT[1]#3"))


def test_an_old_streak_does_not_count():
    run = Run(*OPEN, lost("ROLLOUT", 1), started("ROLLOUT", 1, 2), terms=ALONE)
    run(lost("ROLLOUT", 1, 2), at_s=run.now_s + ALONE.window_s + 1)
    assert run.commands == (StartMembers("ROLLOUT", ((1, 3),)),)


# -- a group ----------------------------------------------------------------------------------------------------------


def test_lost_rank_restarts_only_its_group():
    run = Run(*OPEN, lost("ACTOR", 1))
    assert run.commands == (Kill(ProcessId("ACTOR", 0), 1), StartMembers("ACTOR", ((0, 2), (1, 2))))
    assert [run.number(each) for each in run.state.members] == [2, 2, 1, 1]
    assert (run.state.recoveries, run.state.epoch) == ({"ACTOR": 1}, 1)


def test_ranks_lost_together_are_one_recovery():
    run = Run(*OPEN, lost("ACTOR", 1))
    assert run.ignores(lost("ACTOR", 0))
    assert run.ignores(lost("ACTOR", 1))


def test_the_lost_rank_of_a_group_takes_the_standby():
    terms = replace(LOOSE, roles={**ROLES, "ACTOR": replace(ROLES["ACTOR"], standby=1)})
    run = Run(*OPEN, ready(0, "d", "ACTOR"), lost("ACTOR", 1), terms=terms)
    assert run.commands[-1] == StartMembers("ACTOR", ((0, 2), (1, 2)), {1: 0})
    run(lost("ACTOR", 0, 2))
    assert run.commands[0] == Kill(ProcessId("ACTOR", 1), 2)
    assert run.state.standbys["ACTOR"] == {}, "one that was becoming a worker goes with it"


KEEPING = replace(LOOSE, roles={**ROLES, "ACTOR": replace(ROLES["ACTOR"], num=3, standby=1, rejoins=True)})
KEEPING_UP = [*OPEN[:3], started("ACTOR", 2), *OPEN[3:], ready(0, "d", "ACTOR")]


def test_the_other_ranks_of_a_group_keep_their_processes():
    run = Run(*KEEPING_UP, lost("ACTOR", 1), terms=KEEPING)
    assert run.commands == (StartMembers("ACTOR", ((0, 2), (1, 2), (2, 2)), {1: 0}, rejoining=(0, 2)),)
    run(started("ACTOR", 0, 2, born=1), started("ACTOR", 1, 2, standby=0), started("ACTOR", 2, 2))
    assert [run.state.members[ProcessId("ACTOR", rank)].first for rank in range(3)] == [1, 2, 2]
    run(Progressed(1, 2), lost("ACTOR", 2, 2))
    assert run.commands[-1].rejoining == (0, 1) and not run.commands[-1].standbys
    run(started("ACTOR", 0, 3, born=1))
    assert run.state.members[ProcessId("ACTOR", 0)].first == 1


LEAVING = [lost("ACTOR", 1), started("ACTOR", 0, 2, born=1)]
LOST_AGAIN = [*LEAVING, started("ACTOR", 1, 2), started("ACTOR", 2, 2, born=1), lost("ACTOR", 0, 2)]
NEW_PROCESSES = {
    "lost again": (LOST_AGAIN, [1, 2], []),
    "lost again, after the back-off": ([*LOST_AGAIN, WaitOver("ACTOR#3")], [], [()]),
    "an unknown error": ([lost("ACTOR", 1, kind=CauseKind.UNKNOWN_ERROR)], [1, 0, 2], [()]),
    "a failed device": ([lost("ACTOR", 1, kind=CauseKind.DEVICE_FAILED)], [1, 0, 2], [()]),
    "ranks that are not up": ([lost("ACTOR", 1), Progressed(1, 2), *LEAVING[1:], lost("ACTOR", 1, 2)], [2], [(0,)]),
    "a master that is back": ([*LEAVING, MasterStarted()], [0, 1, 2], [()]),
}


@pytest.mark.parametrize(("events", "killed", "rejoining"), NEW_PROCESSES.values(), ids=NEW_PROCESSES)
def test_ranks_that_may_be_damaged_get_new_processes(events, killed, rejoining):
    commands = Run(*KEEPING_UP, *events, terms=KEEPING).commands
    assert [each.process_id.rank for each in commands if isinstance(each, Kill)] == killed
    assert [each.rejoining for each in commands if isinstance(each, StartMembers)] == rejoining


def test_rank_on_excluded_node_leaves_it():
    run = Run(*KEEPING_UP, node_lost("b"), terms=KEEPING)
    assert run.commands[-2].rejoining == (0, 2)
    run = Run(*KEEPING_UP, terms=KEEPING)
    run.state = replace(run.state, excluded=("a",))
    assert run(lost("ACTOR", 1)).commands == (
        Kill(ProcessId("ACTOR", 0), 1),
        StartMembers("ACTOR", ((0, 2), (1, 2), (2, 2)), {1: 0}, ("a",), rejoining=(2,)),
    )


# -- the trainer ------------------------------------------------------------------------------------------------------


def test_a_lost_trainer_restarts_alone_in_the_next_epoch():
    run = Run(*OPEN, trainer_lost(1))
    again = StartTrainer(2, fresh=False, restarts=1, reason="trainer: it is gone")
    assert run.commands == (Kill(TRAINER_ID, 1), again)
    assert (run.state.phase, run.state.opened, run.state.recoveries) == (Phase.RUNNING, True, {"trainer": 1})
    assert [run.number(each) for each in run.state.members] == [1, 1, 1, 1]


def test_an_older_trainer_is_not_heard():
    run = Run(*OPEN, trainer_lost(1))
    for event in (trainer_lost(1), TrainerStarted(1), StepsOpened(1), Progressed(1, 99)):
        assert run.ignores(event)


def test_losses_in_trainers_restart_are_recovered_by_scope():
    run = Run(*OPEN, trainer_lost(1), lost("ROLLOUT", 1))
    assert (run.state.phase, run.state.recoveries) == (Phase.RUNNING, {"trainer": 1, "ROLLOUT": 1})


# -- a node -----------------------------------------------------------------------------------------------------------


def test_lost_node_loses_all_on_it_and_is_excluded():
    run = Run(*OPEN, node_lost("a"))
    assert run.commands == (
        Kill(ProcessId("ACTOR", 1), 1),
        StartMembers("ACTOR", ((0, 2), (1, 2)), excluded=("a",)),
        StartMembers("ROLLOUT", ((0, 2),), {0: 0}, excluded=("a",)),
    )
    for late in (lost("ACTOR", 0), lost("ROLLOUT", 0), node_lost("a")):
        assert run.ignores(late)
    assert run.state.recoveries == {"ACTOR": 1, "ROLLOUT": 1}


def test_members_lost_with_node_are_charged_once():
    together = [*members_up(nodes=("b", "b", "a", "a")), TrainerStarted(1, Process("c", 1)), StepsOpened(1)]
    run = Run(OPEN[0], *together, node_lost("a"))
    assert run.commands == (StartMembers("ROLLOUT", ((0, 2), (1, 2)), excluded=("a",)),)
    assert (run.state.recoveries, len(run.state.history["ROLLOUT"]), len(run.state.causes)) == ({"ROLLOUT": 2}, 1, 1)


@pytest.mark.parametrize(
    ("node", "commands", "recoveries"),
    [
        ("c", (Kill(TRAINER_ID, 1), StartTrainer(2, False, 1, "job: it is gone", ("c",))), {"trainer": 1}),
        ("d", (Kill(ProcessId.standby("ROLLOUT", 0)), StartStandby("ROLLOUT", 1, ("d",))), {}),
        ("z", (), {}),
    ],
    ids=["the trainer's", "a standby's", "an empty one"],
)
def test_lost_node_takes_the_trainer_and_standbys_too(node, commands, recoveries):
    run = Run(*OPEN, node_lost(node))
    assert (run.commands, run.state.recoveries, run.state.excluded) == (commands, recoveries, (node,))


def test_lost_node_loses_member_of_standby_taking_over():
    run = Run(*OPEN, lost("ROLLOUT", 1), node_lost("d"), terms=LOOSE)
    assert (run.commands, run.phase("ROLLOUT[1]")) == ((Wait("ROLLOUT[1]#3", 1.0),), "waiting")
    assert run.state.standbys["ROLLOUT"] == {}


def test_a_lost_node_restarts_the_job_once_before_steps():
    run = Run(*up(), node_lost("a"), lost("ACTOR", 0), lost("ROLLOUT", 0))
    assert (run.state.restarts, run.state.restarts_by) == (1, {"ACTOR": 1})
    assert run(Released(1)).commands[0].excluded == ("a",)


NODE_FAILURES = {
    "two deaths": (2, [lost("ROLLOUT", 0), lost("ACTOR", 0)], [ProcessId("ACTOR", 1)], ("a",)),
    "a loss that names the node": (2, [lost("ROLLOUT", 0), lost("ROLLOUT", 0, 2, node="a")], [], ("a",)),
    "a failed device": (1, [lost("ROLLOUT", 1, kind=CauseKind.DEVICE_FAILED)], [ProcessId("ROLLOUT", 1)], ("b",)),
    "a failed link": (1, [lost("ACTOR", 0, kind=CauseKind.LINK_FAILED)], [ProcessId("ACTOR", n) for n in (0, 1)], ()),
    "an error that may pass": (1, [lost("ROLLOUT", 0, kind=CauseKind.RETRYABLE_ERROR)], [], ()),
    "an end for others": (1, [lost("ROLLOUT", 0, kind=CauseKind.PREEMPTED)], [], ()),
}


@pytest.mark.parametrize(("limit", "losses", "killed", "excluded"), NODE_FAILURES.values(), ids=NODE_FAILURES)
def test_node_with_as_many_failures_as_allowed_is_excluded(limit, losses, killed, excluded):
    run = Run(*OPEN, *losses, terms=replace(LOOSE, node_max_failures=limit))
    assert run.state.excluded == excluded
    assert [each.process_id for each in run.commands if isinstance(each, Kill)] == killed
    assert all(each.excluded == excluded for each in run.commands if isinstance(each, StartMembers))


def test_old_failures_of_a_node_do_not_count():
    run = Run(*OPEN, lost("ROLLOUT", 0), terms=replace(LOOSE, node_max_failures=2))
    run(lost("ACTOR", 0), at_s=run.now_s + LOOSE.window_s + 1)
    assert run.state.excluded == ()


HOUR_S = 3600.0
STEADY = replace(LOOSE, node_max_failures=3, window_s=HOUR_S)


@pytest.mark.parametrize(
    ("every_s", "nodes", "excluded"),
    [
        (0.51 * HOUR_S, "a", 12),
        (1.9 * HOUR_S, "a", 12),
        (2.5 * HOUR_S, "a", None),
        (0.51 * HOUR_S, "abc", None),
        (1.1 * HOUR_S, "aab", 17),
    ],
)
def test_blame_of_steady_losses_excludes_outstanding_node(every_s, nodes, excluded):
    state, count = Run(*OPEN, terms=STEADY).state, 0
    while not state.excluded and count < 140 * len(nodes):
        turn, place = divmod(count, len(nodes))
        state = blame(state, STEADY, nodes[place], cause(), turn * every_s + place)
        count += 1
    assert (count if state.excluded else None) == excluded
    assert all(len(times) <= 12 for times in state.node_losses.values())


def test_blame_of_steady_losses_leaves_more_nodes_than_it_takes():
    state = replace(Run(*OPEN, terms=STEADY).state, excluded=("x", "y", "z"))
    for turn in range(140):
        state = blame(state, STEADY, "a", cause(), turn * 0.51 * HOUR_S)
    assert state.excluded == ("x", "y", "z")


def test_the_only_node_in_use_is_not_excluded():
    terms = replace(ALONE, node_max_failures=1)
    only = [started(*rank, node="a") for rank in (("ACTOR", 0), ("ACTOR", 1), ("ROLLOUT", 0), ("ROLLOUT", 1))]
    run = Run(OPEN[0], *only, TrainerStarted(1, Process("a", 1)), StepsOpened(1), lost("ROLLOUT", 0), terms=terms)
    assert run.state.excluded == ()


def test_blame_of_last_node_in_use_excludes_none():
    state = replace(Run(*OPEN).state, excluded=("b", "c", "d"))
    assert blame(state, replace(TERMS, node_max_failures=1), "a", cause(), 9.0).excluded == ("b", "c", "d")


# -- standbys ---------------------------------------------------------------------------------------------------------


def test_a_lost_standby_is_replaced_and_the_job_does_not_notice():
    run = Run(*OPEN, standby_lost(0))
    assert run.commands == (Kill(ProcessId.standby("ROLLOUT", 0)), StartStandby("ROLLOUT", 1))
    assert run.ignores(standby_lost(0))
    assert (run.state.recoveries, run.state.causes) == ({}, ())


def test_standbys_lost_too_often_are_given_up():
    run = Run(*OPEN, terms=LOOSE)
    for number in range(STANDBY_TRIES - 1):
        run(standby_lost(number), WaitOver(f"ROLLOUT-standby[{number + 1}]#0"))
        assert run.state.standbys["ROLLOUT"].keys() == {number + 1}
    run(standby_lost(STANDBY_TRIES - 1))
    assert run.commands == (Kill(ProcessId.standby("ROLLOUT", STANDBY_TRIES - 1)),)
    assert (run.state.standbys["ROLLOUT"], run.state.phase) == ({}, Phase.RUNNING)
    run(lost("ROLLOUT", 0), started("ROLLOUT", 0, 2), Progressed(1, 5))
    assert (run.commands, run.state.standbys["ROLLOUT"]) == ((), {})


def test_a_standby_lost_while_taking_over_is_the_members_loss():
    run = Run(*OPEN, lost("ROLLOUT", 1), standby_lost(0), terms=LOOSE)
    assert (run.number("ROLLOUT[1]"), run.state.recoveries) == (3, {"ROLLOUT": 2})
    assert run.ignores(lost("ROLLOUT", 1, 2))
    assert run.ignores(standby_lost(0))


def test_member_lost_in_takeover_loses_its_standby():
    run = Run(*OPEN, lost("ROLLOUT", 1), lost("ROLLOUT", 1, 2), terms=LOOSE)
    assert run.state.standbys["ROLLOUT"] == {}
    assert run.ignores(standby_lost(0))


# -- budgets ----------------------------------------------------------------------------------------------------------


def fill(run, count, loss, progress=False):
    """``count`` losses, each answered, and followed by ``progress``."""
    for number in range(1, count + 1):
        run(loss(number))
        run(*(WaitOver(timer) for timer in run.state.waits))
        if progress:
            run(Progressed(run.state.epoch, run.state.committed + 1))
    return run


@pytest.mark.parametrize(
    ("terms", "limit", "subject", "loss"),
    [
        (replace(ALONE, job_max_restart=3), 6, "ROLLOUT", lambda number: lost("ROLLOUT", 1, number)),
        (replace(ALONE, job_max_restart=3), 3, "ACTOR", lambda number: lost("ACTOR", 1, number)),
        (replace(ALONE, trainer_max_restart=2), 2, "trainer", trainer_lost),
        (replace(ALONE, trainer_max_restart=0), 0, "trainer", trainer_lost),
        (
            replace(ALONE, roles={**ALONE.roles, "ROLLOUT": replace(ALONE.roles["ROLLOUT"], max_restart=1)}),
            1,
            "ROLLOUT",
            lambda number: lost("ROLLOUT", 0, number),
        ),
    ],
)
def test_limits_hold_within_the_window(terms, limit, subject, loss):
    run = fill(Run(*OPEN, terms=terms), limit, loss)
    assert run.state.phase is Phase.RUNNING
    late = Run(*OPEN, terms=terms)
    fill(late, limit, loss)
    if limit:
        late(loss(limit + 1), at_s=late.now_s + terms.window_s + 1)
        assert late.state.phase is Phase.RUNNING, "what is older than the window does not count"
    run(loss(limit + 1))
    assert (run.state.outcome, run.state.ended_by) == (Phase.FAILED, EndReason.RESTART_LIMIT)
    assert run.commands == (Release(1, True),)
    assert f"the limit of {limit} restarts for {subject} is reached" in run.state.reason


def test_members_of_a_role_share_its_limit():
    roles = {**ALONE.roles, "ROLLOUT": replace(ALONE.roles["ROLLOUT"], max_restart=1)}
    run = Run(*OPEN, lost("ROLLOUT", 0), lost("ROLLOUT", 1), terms=replace(ALONE, roles=roles))
    assert run.state.outcome is Phase.FAILED


def test_progress_gives_one_restart_back():
    terms = replace(ALONE, trainer_max_restart=2)
    assert fill(Run(*OPEN, terms=terms), 50, trainer_lost, progress=True).state.phase is Phase.RUNNING
    run = fill(Run(*OPEN, terms=terms), 2, trainer_lost)
    run(Progressed(3, 9), trainer_lost(3), trainer_lost(4), *(WaitOver(f"trainer#{epoch}") for epoch in (4, 5)))
    run(trainer_lost(4))
    assert run.state.outcome is Phase.FAILED, "one, and not all"


def test_eleven_lost_spot_nodes_in_an_hour_end_no_job():
    run = Run(*OPEN, terms=replace(ALONE, job_max_restart=10, window_s=3600.0))
    for number in range(1, 12):
        node = f"spot-{number}"
        run(MemberLost("ROLLOUT", 1, number, cause("ROLLOUT[1]", CauseKind.NODE_LOST), node))
        run(*(WaitOver(timer) for timer in run.state.waits), started("ROLLOUT", 1, number + 1, node))
        run(Progressed(run.state.epoch, run.state.committed + 1), at_s=run.now_s + 300)
    assert run.state.phase is Phase.RUNNING


def test_node_failing_again_between_commits_is_excluded():
    run = Run(*OPEN, terms=replace(ALONE, node_max_failures=12, window_s=3600.0, job_max_restart=1))
    for number in range(1, 13):
        assert run.state.excluded == ()
        run(MemberLost("ROLLOUT", 1, number, cause("ROLLOUT[1]"), "b"))
        run(*(WaitOver(timer) for timer in run.state.waits), started("ROLLOUT", 1, number + 1, "b"))
        run(Progressed(run.state.epoch, run.state.committed + 1), at_s=run.now_s + 280)
    assert run.state.excluded == ("b",) and run.state.phase is Phase.RUNNING


# -- errors that may be the machine's ---------------------------------------------------------------------------------


def raised(words, name="ROLLOUT[1]", kind=CauseKind.UNKNOWN_ERROR):
    return Cause(kind, name, words)


def test_members_unknown_error_restarts_it_and_trainer_once():
    run = Run(*OPEN, TrainerLost(1, raised("RuntimeError: odd at 0x12")), terms=ALONE)
    assert run.commands == (
        Kill(ProcessId("ROLLOUT", 1), 1),
        StartMembers("ROLLOUT", ((1, 2),)),
        Kill(TRAINER_ID, 1),
        StartTrainer(2, False, 1, "ROLLOUT[1]: RuntimeError: odd at 0x12"),
    )
    run(started("ROLLOUT", 1, 2), TrainerStarted(2), TrainerLost(2, raised("RuntimeError: odd at 0x99")))
    assert (run.state.outcome, run.state.failure.kind) == (Phase.FAILED, CauseKind.USER_ERROR)
    assert run.state.reason == "ROLLOUT[1]: RuntimeError: odd at 0x99 (again, in fresh processes)"


def test_ranks_unknown_error_restarts_group_and_trainer():
    run = Run(*OPEN, TrainerLost(1, raised("RuntimeError: odd", "ACTOR[1]")), terms=ALONE)
    assert [command for command in run.commands if isinstance(command, Kill)] == [
        Kill(ProcessId("ACTOR", 1), 1),
        Kill(ProcessId("ACTOR", 0), 1),
        Kill(TRAINER_ID, 1),
    ]
    assert StartMembers("ACTOR", ((0, 2), (1, 2))) in run.commands


@pytest.mark.parametrize("between", [[Progressed(2, 7)], []], ids=["progress", "another error"])
def test_another_unknown_error_or_a_later_one_is_tried_again(between):
    words = "RuntimeError: odd" if between else "RuntimeError: other"
    run = Run(*OPEN, TrainerLost(1, raised("RuntimeError: odd")), started("ROLLOUT", 1, 2), terms=LOOSE)
    run(TrainerStarted(2), *between, TrainerLost(2, raised(words)))
    assert run.state.phase is Phase.RUNNING


def test_before_steps_an_unknown_error_restarts_the_job_once():
    run = Run(*up(), TrainerLost(1, raised("could not start: RuntimeError: odd", "trainer")))
    assert run.state.phase is Phase.RESTARTING
    run(Released(1), *up(2, 2, 2), TrainerLost(2, raised("could not start: RuntimeError: odd", "trainer")))
    assert (run.state.outcome, run.state.failure.kind) == (Phase.FAILED, CauseKind.START_FAILED)


def test_failed_job_has_first_cause_since_progress():
    terms = replace(ALONE, trainer_max_restart=1)
    run = Run(
        *OPEN, lost("ACTOR", 1), Progressed(1, 5), lost("ROLLOUT", 1), trainer_lost(1), trainer_lost(2), terms=terms
    )
    assert (run.state.outcome, run.state.failure.who) == (Phase.FAILED, "ROLLOUT[1]")


def test_being_ended_for_the_sake_of_others_is_never_charged():
    run = Run(*OPEN, terms=replace(ALONE, job_max_restart=0))
    run(lost("ROLLOUT", 1, kind=CauseKind.PREEMPTED))
    assert (run.state.phase, run.state.history) == (Phase.RUNNING, {})


def test_the_first_and_the_newest_causes_are_kept():
    run = Run(*OPEN, lost("ACTOR", 0), terms=replace(ALONE, job_max_restart=9999))
    fill(run, MAX_CAUSES + 20, lambda number: lost("ROLLOUT", 1, number))
    assert len(run.state.causes) == MAX_CAUSES
    assert {cause.who for cause in run.state.causes[1:]} == {"ROLLOUT[1]"}
    assert run.state.causes[0] == cause("ACTOR[0]")


# -- a master that comes back -----------------------------------------------------------------------------------------


def test_master_back_keeps_processes_up():
    run = Run(*OPEN, MasterStarted("m", 7))
    assert (run.state.master_starts, run.commands, outstanding(run.state)) == (1, (), ())
    up_now = {"ACTOR[0]", "ACTOR[1]", "ROLLOUT[0]", "ROLLOUT[1]", "trainer", "ROLLOUT-standby[0]"}
    assert set(map(str, processes(run.state))) == up_now


def test_master_back_starts_again_under_next_number():
    run = Run(*OPEN, lost("ROLLOUT", 1), trainer_lost(1), MasterStarted())
    expected = (StartMembers("ROLLOUT", ((1, 3),)), StartTrainer(3, False, 2, "trainer: it is gone"))
    assert outstanding(run.state) == expected
    assert run.commands == (Kill(ProcessId("ROLLOUT", 1), 2), expected[0], Kill(TRAINER_ID, 2), expected[1])
    assert run.state.recoveries == {"ROLLOUT": 1, "trainer": 1}, "none is charged"


def test_master_back_restarts_partly_started_group():
    run = Run(*OPEN, lost("ACTOR", 1), started("ACTOR", 0, 2), MasterStarted())
    assert outstanding(run.state) == (StartMembers("ACTOR", ((0, 3), (1, 3))),)
    assert run.commands[:2] == (Kill(ProcessId("ACTOR", 0), 2), Kill(ProcessId("ACTOR", 1), 2))


def test_master_back_restarts_job_with_starting_trainer():
    run = Run(*OPEN[:5], MasterStarted())
    assert StartTrainer(2, fresh=False, restarts=1) in outstanding(run.state)
    assert StartStandby("ROLLOUT", 0) in outstanding(run.state)


def test_back_offs_and_releases_go_on():
    assert outstanding(Run(*OPEN, trainer_lost(1), trainer_lost(2), terms=LOOSE).state) == (Wait("trainer#3", 1.0),)
    restarting = Run(*up(), node_lost("a"))
    assert outstanding(restarting.state) == (Release(1, final=False),)
    assert outstanding(restarting(node_lost("b"), Released(1)).state) == restarting.commands == (Place(2, ("a", "b")),)
