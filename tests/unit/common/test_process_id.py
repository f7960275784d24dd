# SPDX-License-Identifier: Apache-2.0
"""One spelling for a process in logs, reports and files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.names import TRAINER_ID, ProcessId, ProcessKind


def test_spellings():
    assert str(ProcessId("ROLLOUT", 1)) == "ROLLOUT[1]"
    assert str(ProcessId.standby("ROLLOUT", 2)) == "ROLLOUT-standby[2]"
    assert str(TRAINER_ID) == "trainer"


def test_pools():
    ids = (ProcessId("ROLLOUT", 1), ProcessId.standby("ROLLOUT", 2), TRAINER_ID)
    assert [process_id.pool for process_id in ids] == ["ROLLOUT", "ROLLOUT-standby", "trainer"]


@given(st.from_regex(r"[A-Z][A-Z_0-9]{0,9}", fullmatch=True), st.integers(-1, 10_000), st.booleans())
def test_parse_reads_what_str_printed(role, rank, standby):
    process_id = ProcessId(role, rank, ProcessKind.STANDBY if standby else ProcessKind.MEMBER)
    assert ProcessId.parse(str(process_id)) == process_id
    assert ProcessId.parse("trainer") is TRAINER_ID


@pytest.mark.parametrize("text", ["", "job", "ROLLOUT", "ROLLOUT-1", "ROLLOUT[x]", "ROLLOUT[1", "ROLLOUT[1]x", "[1]"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="is not a process such as"):
        ProcessId.parse(text)


def test_members_sort_by_role_and_rank():
    ids = [ProcessId("ROLLOUT", 10), ProcessId("ROLLOUT", 2), ProcessId("ACTOR", 3)]
    assert sorted(ids) == [ids[2], ids[1], ids[0]]
