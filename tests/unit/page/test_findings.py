# SPDX-License-Identifier: Apache-2.0
"""The causes that made steps slow."""

import pytest

from dlrover.python.rl.control.events import CauseKind
from dlrover.python.rl.page.findings import findings, slow_parts, time_lines
from dlrover.python.rl.page.spans import read_steps
from tests.support.recorded_spans import Recording, lose_rollout, write_loss


@pytest.fixture
def recording(tmp_path):
    return Recording(tmp_path, ["ACTOR[0]", "ROLLOUT[0]", "ROLLOUT[1]", "ROLLOUT[2]"])


def causes_of(recording, first=1, last=99, **options):
    steps = read_steps(recording.write(), first, last, **options)
    return [(each.kind, each.process, each.method, round(each.cost_s, 3)) for each in findings(steps)]


def test_quiet_steps_have_no_finding(recording):
    for number in range(1, 8):
        recording.step(number, [0.4, 0.45 + 0.02 * number, 0.4], own_s=0.02)
    assert causes_of(recording) == []
    assert time_lines(recording.folder) == []
    assert findings([]) == []


def test_slow_rank_costs_what_it_adds_to_its_peers(recording):
    for number in range(1, 6):
        recording.step(number, [0.4, 0.4, 1.9 if number > 2 else 0.4])
    assert causes_of(recording) == [("slow_rank", "ROLLOUT[2]", "sample", 4.5)]
    assert causes_of(recording, 4, 4) == [("slow_rank", "ROLLOUT[2]", "sample", 1.5)]
    (title, line) = time_lines(recording.folder)
    assert "ROLLOUT[2].sample took 1.9 s, its peers 0.399 s, in 3 of 5 steps: 4.5 s, 47% of the time" in line


def test_short_delay_counts_from_its_third_step_on(recording):
    for number in range(1, 7):
        recording.step(number, [0.3, 0.3, 0.65 if number > 4 else 0.3])
    assert causes_of(recording) == causes_of(recording, 5, 5) == []
    recording.step(7, [0.3, 0.3, 0.65])
    assert causes_of(recording) == [("slow_rank", "ROLLOUT[2]", "sample", 1.05)]


def test_ranks_that_take_turns_in_being_slow_are_unequal(recording):
    for number in range(1, 7):
        seconds = [0.3, 0.3, 0.3]
        seconds[number % 3] = 0.9
        recording.step(number, seconds)
    assert causes_of(recording) == [("imbalance", "ROLLOUT", "sample", 2.4)]


@pytest.mark.parametrize(
    "last, count, causes",
    [
        ({"reward": 22.0}, 3, [("reward", 21.5)]),
        ({"reward": 22.0}, 2, []),  # steps are too few to compare
        ({"reward": 0.9, "evaluation": 30.0}, 3, []),
    ],
)
def test_part_that_takes_longer_than_before_is_named(last, count, causes):
    before, last = ({f"time/{name}": seconds for name, seconds in times.items()} for times in ({"reward": 0.5}, last))
    rows = [{**times, "time/step": sum(times.values()) + 3.0} for times in [before] * count + [last]]
    assert [(each.method, each.cost_s) for each in slow_parts(rows)] == causes


def test_trainers_own_code_counts_while_no_worker_runs(recording):
    recording.step(1, own_s=1.5).step(2, own_s=1.5)
    ((kind, process, method, cost_s),) = causes_of(recording)
    assert (kind, process, method) == ("trainer", "trainer", "") and cost_s == pytest.approx(3.2, abs=0.02)


@pytest.mark.parametrize(
    "cause, kind", [(CauseKind.PROCESS_DIED, "lost_member"), (CauseKind.HUNG, "hung_call")], ids=str
)
def test_lost_worker_costs_the_time_until_its_call_runs_again(recording, cause, kind):
    recording.step(1)
    began_s = lose_rollout(recording, 2)
    write_loss(recording.folder, began_s + 1.0, cause)
    recording.step(3)
    assert causes_of(recording) == [(kind, "ROLLOUT[1]", "sample", 2.6)]


def test_lines_that_a_killed_worker_did_not_write_add_no_cost(recording):
    recording.step(1)
    began_s = lose_rollout(recording, 2)
    write_loss(recording.folder, began_s + 1.0, CauseKind.PROCESS_DIED)
    del recording.lines["ROLLOUT[1]"][1]  # the call of step 1
    assert causes_of(recording) == causes_of(recording, 2, 2) == [("lost_member", "ROLLOUT[1]", "sample", 2.6)]


def test_ranks_that_restart_with_a_lost_one_are_not_accused(recording):
    recording.step(1)
    began_s = lose_rollout(recording, 2)
    write_loss(recording.folder, began_s + 1.0, CauseKind.PROCESS_DIED)
    recording.start("ROLLOUT[0]", 2, began_s + 2.2, pid=9)
    recording.call("ROLLOUT[0]", (-1, -1), "__init__", began_s + 2.25, began_s + 2.4)
    ((kind, process, *_),) = causes_of(recording)
    assert (kind, process) == ("lost_member", "ROLLOUT[1]")


def test_call_that_still_runs_is_found_by_its_peers(recording):
    recording.step(1)
    recording.add("trainer", "issue", 2, 0, "ROLLOUT", [0, 1, 2], "sample", recording.now_s, [])
    for rank in (0, 2):
        recording.call(f"ROLLOUT[{rank}]", (2, 0), "sample", recording.now_s, recording.now_s + 0.4)
    assert causes_of(recording, now_s=recording.now_s + 5.0) == []
    assert causes_of(recording, now_s=recording.now_s + 30.0) == [("hung_call", "ROLLOUT[1]", "sample", 30.0)]
