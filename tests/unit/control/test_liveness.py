# SPDX-License-Identifier: Apache-2.0
"""Who hangs, and who of a role is the one that the others wait for."""

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.liveness import Listening, Sign, hangs, odd_one_out

LIMITS = {"ACTOR": 10.0, "trainer": 30.0}
LISTENING = Listening(beat_s=0.5, since_s=0.0)


def sign(who="ACTOR[0]", method="update", since_s=90.0, step=3, at_s=99.9):
    return Sign(ProcessId.parse(who), 1, method, since_s, step, at_s)


def found(*signs, limits=LIMITS, listening=LISTENING, now_s=100.0):
    return {str(sign.process_id): why for sign, why in hangs(signs, limits, listening, now_s)}


def test_work_and_idleness_are_no_hangs():
    assert found(sign(since_s=90.5), sign("ACTOR[1]", method="", since_s=0.0), sign("trainer", since_s=71.0)) == {}


def test_a_call_that_takes_longer_than_its_role_allows_is_a_hang():
    assert found(sign(since_s=80.0), sign("ACTOR[1]")) == {"ACTOR[0]": "in update without progress for 19.9 s"}


def test_each_role_has_its_own_limit_and_one_without_has_none():
    assert found(sign("trainer", since_s=75.0), sign("ROLLOUT[0]", since_s=0.0, at_s=0.0)) == {}


def test_a_process_that_does_not_beat_hangs_whatever_it_last_said():
    stopped = sign(method="", at_s=89.0)
    assert found(stopped) == {"ACTOR[0]": "no sign of life for 11.0 s"}
    assert found(sign(method="", at_s=91.0)) == {}
    impatient = Listening(beat_s=0.5, since_s=0.0, silence_s=5.0)
    assert found(sign(at_s=94.0), listening=impatient) == {"ACTOR[0]": "no sign of life for 6.0 s"}
    assert found(sign(since_s=91.0, at_s=99.0), listening=impatient) == {}


def test_a_call_of_a_process_that_went_silent_is_as_old_as_it_last_said():
    assert found(sign(since_s=85.0, at_s=92.0)) == {}


def test_silence_counts_only_after_three_beats_however_short_the_limit():
    short = {"ACTOR": 0.1}
    assert found(sign(method="", at_s=98.6), limits=short) == {}
    assert found(sign(method="", at_s=98.4), limits=short) == {"ACTOR[0]": "no sign of life for 1.6 s"}


def test_silence_counts_only_while_somebody_listened():
    late = Listening(beat_s=0.5, since_s=95.0)
    assert found(sign(method="", at_s=10.0), listening=late) == {}
    assert found(sign(method="", at_s=10.0), listening=late, now_s=106.0) == {"ACTOR[0]": "no sign of life for 11.0 s"}


# -- the odd one out --------------------------------------------------------------------------------------------------


def odd(*signs):
    return odd_one_out(signs, LISTENING, 100.0)


def test_one_alone_is_not_odd():
    assert odd(sign()) is None
    assert odd() is None


def test_the_silent_one_is_odd():
    culprit, why_odd = odd(sign("ACTOR[0]", at_s=99.9), sign("ACTOR[1]", at_s=80.0), sign("ACTOR[2]", method="other"))
    assert (str(culprit.process_id), why_odd) == ("ACTOR[1]", "silent for 20.0 s while others are heard")


@pytest.mark.parametrize(
    ("method", "step", "why"),
    [
        ("", -1, "in no call while 2 of 3 are in update of step 3"),
        ("save", 3, "in save of step 3 while 2 of 3 are in update of step 3"),
        ("update", 2, "in update of step 2 while 2 of 3 are in update of step 3"),
    ],
)
def test_the_one_that_is_elsewhere_is_odd(method, step, why):
    culprit, why_odd = odd(sign("ACTOR[0]"), sign("ACTOR[1]", method=method, step=step), sign("ACTOR[2]"))
    assert (str(culprit.process_id), why_odd) == ("ACTOR[1]", why)


def test_of_several_that_are_elsewhere_the_furthest_behind_is_odd():
    others = [sign(f"ACTOR[{rank}]") for rank in range(3)]
    assert odd(*others, sign("ACTOR[3]", step=2), sign("ACTOR[4]", step=1))[0].process_id == ProcessId("ACTOR", 4)


def test_of_those_in_the_same_call_the_longest_is_odd():
    culprit, why_odd = odd(sign("ACTOR[0]", since_s=90.0), sign("ACTOR[1]", since_s=80.0))
    assert (str(culprit.process_id), why_odd) == (
        "ACTOR[1]",
        "in update without progress for 20.0 s, the longest",
    )


def test_nobody_is_odd_when_all_are_idle():
    assert odd(sign("ACTOR[0]", method="", step=-1), sign("ACTOR[1]", method="", step=-1)) is None


def test_when_all_are_silent_where_they_were_decides():
    silent = [sign(f"ACTOR[{rank}]", at_s=50.0) for rank in range(3)]
    assert odd(*silent, sign("ACTOR[3]", method="", step=-1, at_s=50.0))[0].process_id == ProcessId("ACTOR", 3)
