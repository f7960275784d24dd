# SPDX-License-Identifier: Apache-2.0
"""Roles, names, nearest-name hints."""

import copy
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.names import (
    WELL_KNOWN_ROLES,
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


def test_the_five_roles_of_the_guide_are_constants():
    assert [str(role) for role in WELL_KNOWN_ROLES] == ["ACTOR", "ROLLOUT", "REWARD", "REFERENCE", "CRITIC"]
    assert RLRoleType.ACTOR.name == RLRoleType.ACTOR.value == "ACTOR"
    assert repr(RLRoleType.CRITIC) == "RLRoleType.CRITIC"


@pytest.mark.parametrize("written", ["judge_2", "Judge_2", "JUDGE_2"])
def test_any_other_name_is_a_role_in_upper_case(written):
    role = RLRoleType(written)
    assert role == "JUDGE_2"
    assert {role: 1}["JUDGE_2"] == 1


@pytest.mark.parametrize("bad", ["", "2fast", "a-b", "a b", "_x", "é", "a.b", 3])
def test_a_name_that_is_no_role_is_refused_with_the_rule(bad):
    with pytest.raises(ValueError, match="is not a role name: use letters"):
        RLRoleType(bad)


@pytest.mark.parametrize("role", [*WELL_KNOWN_ROLES, RLRoleType("judge")])
def test_roles_stay_roles_when_copied_and_pickled(role):
    for back in (pickle.loads(pickle.dumps(role)), copy.deepcopy(role), RLRoleType(role)):
        assert back == role
        assert type(back) is RLRoleType


@pytest.mark.parametrize("name", ["a", "my-job", "0", "a" * 63])
def test_job_names_are_dns_labels(name):
    assert check_job_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "My-Job", "a_b", "a/b", "a" * 64, "a\n"])
def test_other_job_names_are_refused_with_the_rule(name):
    with pytest.raises(ValueError, match="is not a job name: use 1 to 63 of a-z"):
        check_job_name(name)


def test_actor_names_carry_the_job_its_run_and_the_number_of_the_process():
    assert master_name("j") == "j/master"
    assert trainer_name("j", "1a2b", 2) == "j/1a2b/trainer/2"
    assert member_name("j", "1a2b", "ROLLOUT", 1, 3) == "j/1a2b/ROLLOUT-1/3"
    assert standby_name("j", "1a2b", "ROLLOUT", 1) == "j/1a2b/ROLLOUT-standby/1"
    assert member_name("j", "1a2b", "ROLLOUT", 1, 3) != member_name("j", "3c4d", "ROLLOUT", 1, 3)
    assert run_of(member_name("j", "1a2b", "ROLLOUT", 1, 3)) == ("j", "1a2b")


def test_a_command_to_resume_can_be_pasted():
    assert resume_command("runs/it's mine") == """dlrover-rl resume 'runs/it'"'"'s mine'"""
    assert resume_command(Path("runs/j-1")) == "dlrover-rl resume runs/j-1"


def test_the_nearest_name_is_given_without_regard_to_case():
    assert nearest("GENERTE", ["generate", "update"]) == "generate"
    assert nearest("xyz", ["generate", "update"]) is None


def test_a_dotted_key_is_near_if_each_of_its_parts_is():
    known = ["config.seed", "config.optimizer.lr", "config.steps"]
    assert nearest_path("config.nowhere", known) is None
    assert nearest_path("config.optimiser.lr", known) == "config.optimizer.lr"
    assert nearest_path("confg.stps", known) == "config.steps"
    assert nearest_path("config.optimizer", known) is None


def test_a_hint_is_the_nearest_name_or_all_of_them():
    assert hint("pre_function", ["post_func", "pre_func", "timeout"]) == "; did you mean 'pre_func'?"
    assert hint("zzz", ["b", "a"]) == "; known: a, b"
    assert hint("zzz", []) == ""


@given(st.text(), st.lists(st.text()))
def test_a_hint_never_fails(name, known):
    assert isinstance(hint(name, known), str)
    assert nearest(name, known) in [None, *known]
