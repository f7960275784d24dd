# SPDX-License-Identifier: Apache-2.0
"""The cause of a death that the kernel's count of OOM kills explains."""

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import Cause, CauseKind, Process
from dlrover.python.rl.runtime.member.heartbeat import OomKills, count_oom_kills

FIRST, SECOND = ProcessId("ACTOR", 0), ProcessId("ACTOR", 1)
GONE = Cause(CauseKind.PROCESS_DIED, "ACTOR[0]", "the actor is dead")


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["nr_free_pages 7\noom_kill 3\noom_killed 9\n", "oom_kill 5\n"], 3),
        (["nr_free_pages 7\n", "oom 1\noom_kill 5\noom_group_kill 2\n"], 5),
        (["", None], -1),
    ],
)
def test_count_oom_kills_reads_the_first_file_with_one(tmp_path, texts, count):
    files = (tmp_path / "vmstat", tmp_path / "memory.events")
    for file, text in zip(files, texts, strict=True):
        if text is not None:
            file.write_text(text)
    assert count_oom_kills(files) == count


@pytest.mark.parametrize("host", ["here", "elsewhere"])
@pytest.mark.parametrize(
    ("before", "later", "kind"),
    [
        (3, 4, CauseKind.OUT_OF_MEMORY),
        (3, 3, CauseKind.PROCESS_DIED),
        (-1, 4, CauseKind.PROCESS_DIED),  # a process that has sent none
    ],
)
def test_explain_a_death_compares_with_its_last_beat(tmp_path, host, before, later, kind):
    process, kernel = Process("node", host=host), tmp_path / "vmstat"
    kills = OomKills("here", (kernel,))
    kills.note(FIRST, process, before)
    if host == "here":
        kernel.write_text(f"oom_kill {later}\n")
    else:
        kills.note(SECOND, process, later)
        kills.note(SECOND, Process("another", host="third"), 99)
    cause = kills.explain(FIRST, process, GONE)
    assert (cause.kind, cause.who) == (kind, "ACTOR[0]")
    assert ("OOM killer" in cause.message) == (kind is CauseKind.OUT_OF_MEMORY)


def test_explain_keeps_the_cause_of_any_other_loss(tmp_path):
    kills, process = OomKills("here", ()), Process("node", host="elsewhere")
    kills.note(FIRST, process, 1)
    kills.note(SECOND, process, 2)
    hung = Cause(CauseKind.HUNG, "ACTOR[0]", "no progress")
    assert kills.explain(FIRST, process, hung) == hung
