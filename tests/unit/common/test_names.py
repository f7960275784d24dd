# SPDX-License-Identifier: Apache-2.0
"""Names of roles, jobs, processes, and hints at the nearest name."""

import copy
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.names import (
    TRAINER_ID,
    WELL_KNOWN_ROLES,
    ProcessId,
    ProcessKind,
    RLRoleType,
    check_job_name,
    hint,
    master_name,
    member_name,
    nearest,
    nearest_path,
    resume_command,
    run_of,
    standby_name,
    trainer_name,
)


def test_roles_of_the_guide_are_constants():
    assert [str(role) for role in WELL_KNOWN_ROLES] == ["ACTOR", "ROLLOUT", "REWARD", "REFERENCE", "CRITIC"]
    assert RLRoleType.ACTOR.name == RLRoleType.ACTOR.value == "ACTOR"
    assert repr(RLRoleType.CRITIC) == "RLRoleType.CRITIC"


@pytest.mark.parametrize("role", [*WELL_KNOWN_ROLES, RLRoleType("judge")])
def test_roles_stay_roles_when_copied_and_pickled(role):
    for back in (pickle.loads(pickle.dumps(role)), copy.deepcopy(role), RLRoleType(role)):
        assert back == role
        assert type(back) is RLRoleType


@pytest.mark.parametrize(
    ("check", "names", "refused", "rule"),
    [
        (
            RLRoleType,
            ["judge_2", "Judge_2"],
            ["", "2fast", "a-b", "a b", "_x", "é", "a.b", 3],
            "a role name: use letters",
        ),
        (
            check_job_name,
            ["a", "my-job", "0", "a" * 63],
            ["", "-a", "a-", "My-Job", "a_b", "a/b", "a" * 64, "a\n"],
            "a job name: use 1 to 63 of a-z",
        ),
    ],
)
def test_names_are_checked_by_their_rule(check, names, refused, rule):
    assert [check(name) for name in names] == (names if check is check_job_name else ["JUDGE_2"] * 2)
    for name in refused:
        with pytest.raises(ValueError, match=f"is not {rule}"):
            check(name)


def test_actor_names_carry_job_run_and_process_number():
    assert master_name("j") == "j/master"
    assert trainer_name("j", "1a2b", 2) == "j/1a2b/trainer/2"
    assert member_name("j", "1a2b", "ROLLOUT", 1, 3) == "j/1a2b/ROLLOUT-1/3"
    assert standby_name("j", "1a2b", "ROLLOUT", 1) == "j/1a2b/ROLLOUT-standby/1"
    assert member_name("j", "1a2b", "ROLLOUT", 1, 3) != member_name("j", "3c4d", "ROLLOUT", 1, 3)
    assert run_of(member_name("j", "1a2b", "ROLLOUT", 1, 3)) == ("j", "1a2b")


def test_resume_command_is_quoted_for_a_shell():
    assert resume_command("runs/it's mine") == """dlrover-rl resume 'runs/it'"'"'s mine'"""
    assert resume_command(Path("runs/j-1")) == "dlrover-rl resume runs/j-1"


def test_nearest_path_compares_each_part():
    names = ["config.seed", "config.optimizer.lr", "config.steps"]
    assert nearest_path("config.nowhere", names) is None
    assert nearest_path("config.optimiser.lr", names) == "config.optimizer.lr"
    assert nearest_path("confg.stps", names) == "config.steps"
    assert nearest_path("config.optimizer", names) is None


def test_hint_is_the_nearest_name_or_all():
    assert nearest("GENERTE", ["generate", "update"]) == "generate"
    assert nearest("xyz", ["generate", "update"]) is None
    assert hint("pre_function", ["post_func", "pre_func", "timeout"]) == "; did you mean 'pre_func'?"
    assert hint("zzz", ["b", "a"]) == "; known: a, b"
    assert hint("zzz", []) == ""


@given(st.text(), st.lists(st.text()))
def test_hint_of_any_text_is_text(name, names):
    assert isinstance(hint(name, names), str)
    assert nearest(name, names) in [None, *names]


def test_process_id_spelling_and_pool():
    ids = (ProcessId("ROLLOUT", 1), ProcessId.standby("ROLLOUT", 2), TRAINER_ID)
    assert [str(process_id) for process_id in ids] == ["ROLLOUT[1]", "ROLLOUT-standby[2]", "trainer"]
    assert [process_id.pool for process_id in ids] == ["ROLLOUT", "ROLLOUT-standby", "trainer"]


@given(st.from_regex(r"[A-Z][A-Z_0-9]{0,9}", fullmatch=True), st.integers(-1, 10_000), st.booleans())
def test_process_id_parse_reads_its_str(role, rank, standby):
    process_id = ProcessId(role, rank, ProcessKind.STANDBY if standby else ProcessKind.MEMBER)
    assert ProcessId.parse(str(process_id)) == process_id
    assert ProcessId.parse("trainer") is TRAINER_ID


@pytest.mark.parametrize("text", ["", "job", "ROLLOUT", "ROLLOUT-1", "ROLLOUT[x]", "ROLLOUT[1", "ROLLOUT[1]x", "[1]"])
def test_process_id_of_another_text_is_refused(text):
    with pytest.raises(ValueError, match="is not a process such as"):
        ProcessId.parse(text)


def test_process_ids_sort_by_role_and_rank():
    ids = [ProcessId("ROLLOUT", 10), ProcessId("ROLLOUT", 2), ProcessId("ACTOR", 3)]
    assert sorted(ids) == [ids[2], ids[1], ids[0]]
