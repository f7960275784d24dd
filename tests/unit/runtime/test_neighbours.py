# SPDX-License-Identifier: Apache-2.0
"""Commits in the memories of several nodes, each one's also in the next one's."""

import logging

import pytest
from durable_toys import CLASSES, Policy, Stage, both

from dlrover.python.rl.runtime.checkpoint import neighbours

STEPS = 7
NODES = {
    ("ACTOR", 0): "a",
    ("ACTOR", 1): "b",
    ("ROLLOUT", 0): "b",
    ("ROLLOUT", 1): "c",
    ("REWARD", 0): "c",
    ("REWARD", 1): "a",
    "trainer": "c",
}


class Alone(Policy):
    """Its ranks restart one by one."""

    needs_own_process = False


def stage_on(path, nodes=None, **options):
    return Stage(path, steps=STEPS, nodes={**NODES, **(nodes or {})}, spread=True, **{"every": 100, **options})


def numbers(stage, role, method):
    return [number for number, call in enumerate(stage.port.calls) if call[0] == role and call[2] == method]


def assert_no_step_is_lost(stage):
    assert stage.progress == sorted(set(stage.progress))
    assert stage.progress[-1] == STEPS


@pytest.mark.parametrize("commit_every", [1, 3])
@pytest.mark.parametrize("classes", [CLASSES, {**CLASSES, "ACTOR": Alone}], ids=["together", "one by one"])
@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_lost_node_costs_no_committed_step(tmp_path, lost, classes, commit_every):
    reference = stage_on(tmp_path / "undisturbed", classes=classes, commit_every=commit_every)
    expected = reference.run()
    begin = numbers(reference, "ACTOR", "!commit")[-1] // 2
    for at in range(begin, len(reference.port.calls), 11):
        stage = stage_on(tmp_path / f"at{at}", classes=classes, commit_every=commit_every)
        assert stage.run({(at, "before"): stage.lose(lost)}) == expected
        assert_no_step_is_lost(stage)


@pytest.mark.parametrize(("lost", "costs"), [("ab", 3), ("bc", 3), ("ca", 3)])
def test_two_adjacent_nodes_cost_the_steps_since_the_last_copy_and_that_is_said(tmp_path, caplog, lost, costs):
    reference = stage_on(tmp_path / "undisturbed", every=3)
    expected = reference.run()
    at = numbers(reference, "ACTOR", "update")[2 * 5]  # of step 6; step 3 has a copy
    stage = stage_on(tmp_path / "job", every=3)
    order = sorted(lost, key=lambda node: node == NODES["trainer"])
    with caplog.at_level(logging.WARNING, "dlrover"):
        assert stage.run({(at, "before"): both(*map(stage.lose, order))}) == expected
    assert stage.attempts[-1].restart_info.step == costs
    assert "continuing from its copy in" in caplog.text


def test_one_node_after_the_other_costs_no_committed_step(tmp_path):
    reference = stage_on(tmp_path / "undisturbed", commit_every=3)
    expected = reference.run()
    first, second = (numbers(reference, "ACTOR", "update")[2 * step] for step in (2, 4))
    for offset in (0, 9, 21):
        stage = stage_on(tmp_path / f"job{offset}", commit_every=3)
        faults = {(first, "before"): stage.lose("c"), (second + 30 + offset, "before"): stage.lose("a")}
        assert stage.run(faults) == expected
        assert not stage.port.faults
        assert_no_step_is_lost(stage)


def test_files_travel_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "_PART_BYTES", 1000)
    expected = stage_on(tmp_path / "undisturbed").run()
    calls = stage_on(tmp_path / "calls")
    calls.run()
    stage, at = stage_on(tmp_path / "job"), numbers(calls, "ACTOR", "update")[2 * 3]
    assert stage.run({(at, "before"): stage.lose("a")}) == expected
    assert_no_step_is_lost(stage)
    assert len(numbers(stage, "ACTOR", "!read")) > 3 * len(numbers(stage, "ACTOR", "!commit"))


def test_between_states_only_the_calls_travel(tmp_path):
    stage, sent = stage_on(tmp_path / "job", commit_every=3), []
    submit = stage.port.submit

    def counting(role, rank, call):
        if call.method == "!read":
            sent.append(call.args[0])
        return submit(role, rank, call)

    stage.port.submit = counting
    stage.run()
    assert [part for part in sent if part.piece.file.name.endswith(".calls")]
    steps = [part.piece.folder for part in sent if part.piece.file.name.endswith(".state")]
    assert steps == [f"step-{step:08d}.e1" for step in (0, 3, 6, 7) for _ in range(2)]


def test_a_neighbour_that_has_no_room_costs_a_warning_and_later_the_steps_since_the_copy(tmp_path, caplog, monkeypatch):
    write_part = neighbours.write_part

    def full(folder, file, start, content, recycled=None):
        if file.name.startswith("ACTOR-0"):
            raise OSError(28, "No space left on device")
        write_part(folder, file, start, content, recycled)

    expected = stage_on(tmp_path / "undisturbed", every=3).run()
    monkeypatch.setattr(neighbours, "write_part", full)
    calls = stage_on(tmp_path / "calls", every=3)
    calls.run()
    stage = stage_on(tmp_path / "job", every=3)
    with caplog.at_level(logging.WARNING, "dlrover"):
        assert stage.run({(numbers(calls, "ACTOR", "update")[2 * 4], "before"): stage.lose("a")}) == expected
    assert "a neighbour's commit is not kept here: [Errno 28] No space left on device" in caplog.text
    assert "only one node has the commits of ACTOR-0: losing it loses the steps since a copy" in caplog.text
    assert stage.attempts[-1].restart_info.step == 3


def test_nodes_keep_no_more_than_the_commits_that_are_needed(tmp_path):
    stage, most = stage_on(tmp_path / "job", commit_every=3), {}

    def look(self, step):
        for node in "abc":
            names = [path.name for path in (tmp_path / "job" / node).rglob("step-*")]
            most[node] = max(most.get(node, 0), len(names))

    stage.progress = type("Look", (), {"append": look})()
    stage.run()
    assert set(most) == set("abc")
    assert max(most.values()) <= 6  # two chains of three, one of which the next commit removes


def test_where_there_is_one_node_nothing_travels(tmp_path):
    stage = stage_on(tmp_path / "job", nodes=dict.fromkeys(NODES, "a"))
    stage.run()
    assert not [call for call in stage.port.calls if call[2] in ("!read", "!store")]
