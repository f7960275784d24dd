# SPDX-License-Identifier: Apache-2.0
"""Commits in the memories of several nodes, each one's also in the next one's."""

import logging
import os

import pytest

from dlrover.python.rl.runtime.checkpoint import neighbours
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore, decode, encode
from tests.support.durable_toys import CLASSES, Policy, Stage, TrainerKilled, both

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


def same(outcome, expected):
    """Those who are lost after their last call are not replaced."""
    living = {name: expected["members"][name] for name in outcome["members"]}
    assert outcome == {**expected, "members": living}


def assert_no_step_is_lost(stage):
    assert stage.progress == sorted(set(stage.progress))
    assert stage.progress[-1] == STEPS


@pytest.mark.parametrize("commit_every", [1, 3])
@pytest.mark.parametrize("classes", [CLASSES, {**CLASSES, "ACTOR": Alone}], ids=["together", "one by one"])
@pytest.mark.parametrize("lost", ["a", "b", "c"])
@pytest.mark.parametrize("offset", [0, pytest.param(11, marks=pytest.mark.slow)])
def test_a_lost_node_costs_no_committed_step(tmp_path, offset, lost, classes, commit_every):
    reference = stage_on(tmp_path / "undisturbed", classes=classes, commit_every=commit_every)
    expected = reference.run()
    begin = numbers(reference, "ACTOR", "!commit")[-1] // 2
    for at in range(begin + offset, len(reference.port.calls), 22):
        stage = stage_on(tmp_path / f"at{at}", classes=classes, commit_every=commit_every)
        same(stage.run({(at, "before"): stage.lose(lost)}), expected)
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


@pytest.mark.parametrize("then", ["a", "b"])
@pytest.mark.parametrize("commit_every", [3, 100])
def test_one_node_after_the_other_costs_no_committed_step(tmp_path, commit_every, then):
    """With 100 all but the first commit are calls: a new neighbour needs what came before, too."""
    reference = stage_on(tmp_path / "undisturbed", commit_every=commit_every)
    expected = reference.run()
    first, second = (numbers(reference, "ACTOR", "update")[2 * step] for step in (2, 4))
    for offset in (0, 9, 21):
        stage = stage_on(tmp_path / f"job{offset}", commit_every=commit_every)
        faults = {(first, "before"): stage.lose("c"), (second + 30 + offset, "before"): stage.lose(then)}
        assert stage.run(faults) == expected
        assert not stage.port.faults
        assert_no_step_is_lost(stage)


def test_a_trainer_sends_what_the_one_before_it_did_not_get_to(tmp_path):
    """It ends between a commit and sending its own part; then its node goes."""

    def end(port):
        raise TrainerKilled

    reference = stage_on(tmp_path / "undisturbed")
    expected = reference.run()
    calls = [method for _, _, method in reference.port.calls]
    own = [at for at, method in enumerate(calls[:-1]) if method == "!store" and not calls[at + 1].startswith("!")]
    assert len(own) == STEPS + 1  # the first commit is that of what init left
    for step, at in list(enumerate(own))[1:-1:2]:
        ended = stage_on(tmp_path / f"ended{at}")
        assert ended.run({(at, "before"): end}) == expected
        update = next(number for number in numbers(ended, "ACTOR", "update") if number > at)
        stage = stage_on(tmp_path / f"job{at}")
        assert stage.run({(at, "before"): end, (update, "before"): stage.lose(NODES["trainer"])}) == expected
        assert not stage.port.faults
        assert [trainer.restart_info.step for trainer in stage.attempts[-2:]] == [step, step]


def test_files_travel_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "_PART_BYTES", 1000)
    expected = stage_on(tmp_path / "undisturbed").run()
    calls = stage_on(tmp_path / "calls")
    calls.run()
    stage, at = stage_on(tmp_path / "job"), numbers(calls, "ACTOR", "update")[2 * 3]
    assert stage.run({(at, "before"): stage.lose("a")}) == expected
    assert_no_step_is_lost(stage)
    assert len(numbers(stage, "ACTOR", "!read")) > 3 * len(numbers(stage, "ACTOR", "!commit"))


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
    assert "cannot store a neighbour's commit here: [Errno 28] No space left on device" in caplog.text
    assert "only one node has the commits of ACTOR-0: losing it loses the steps since a copy" in caplog.text
    assert stage.attempts[-1].restart_info.step == 3


def test_nodes_keep_no_more_than_the_commits_that_are_needed(tmp_path):
    """Node c has nothing but copies."""
    stage, most = stage_on(tmp_path / "job", nodes={"trainer": "a"}, commit_every=1), {}

    def look(self, step):
        for node in "abc":
            names = [path.name for path in (tmp_path / "job" / node).rglob("step-*")]
            most[node] = max(most.get(node, 0), len(names))

    stage.progress = type("Look", (), {"append": look})()
    stage.run()
    assert set(most) == set("abc")
    assert max(most.values()) <= 3  # the last two, and the one that the next commit removes


def test_where_there_is_one_node_nothing_travels(tmp_path):
    stage = stage_on(tmp_path / "job", nodes=dict.fromkeys(NODES, "a"))
    stage.run()
    assert not [call for call in stage.port.calls if call[2] in ("!read", "!store")]


def test_of_what_nodes_hold_the_latest_trainers_newest_commit_is_taken(tmp_path):
    def held(epoch, serials):
        store = CheckpointStore(tmp_path / f"of{epoch}", "run1", durable=False)
        for step in range(1, serials + 1):
            store.claim(epoch)
            file = store.write(step, epoch, "trainer.state", {"role": "trainer"}, {"epoch": epoch})
            store.commit(step, epoch, {"trainer": file})
        return [
            neighbours.Held(encode(each), (store.root / each.folder / "trainer.state").read_bytes())
            for each in store.manifests()
        ]

    earlier, later = held(epoch=1, serials=9), held(epoch=2, serials=3)
    for number, found in enumerate(([earlier, later], [later, earlier])):
        own = CheckpointStore(tmp_path / f"own{number}", "run1", durable=False)
        own.claim(3)
        neighbours.adopt_newest(own, found)
        assert [(each.epoch, each.step) for each in own.manifests()] == [(2, 3), (2, 2)]
        neighbours.adopt_newest(own, [earlier])
        assert own.manifests()[0].epoch == 2
    node = CheckpointStore(tmp_path / "of1", "run1", durable=False)
    neighbours.adopt_newest(node, [later])
    assert (node.manifests()[0].epoch, node.manifests()[0].step) == (2, 3)


def test_an_overtaken_trainer_may_take_the_same_over_at_the_same_time(tmp_path, monkeypatch):
    other, own = (CheckpointStore(tmp_path / name, "run1", durable=False) for name in ("other", "own"))
    other.claim(1)
    file = other.write(1, 1, "trainer.state", {"role": "trainer"}, {})
    manifest = other.commit(1, 1, {"trainer": file})
    held = neighbours.Held(encode(manifest), (other.root / manifest.folder / "trainer.state").read_bytes())
    own.claim(2)
    real, turns = os.replace, []

    def replace(source, target):
        turns.append(target)
        if len(turns) == 1:
            assert neighbours.adopt(own, held)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert neighbours.adopt(own, held)
    assert len(turns) == 4 and own.manifests() == [manifest]
    assert own.read(manifest, "trainer") == {}


def test_a_commit_that_was_set_aside_does_not_come_back_from_a_neighbour(tmp_path):
    theirs, own = (CheckpointStore(tmp_path / name, "run1", durable=False) for name in ("theirs", "own"))
    for store in (theirs, own):
        store.claim(1)
        file = store.write(1, 1, "trainer.state", {"role": "trainer"}, {})
        manifest = store.commit(1, 1, {"trainer": file})
    own.quarantine(manifest.folder, "it is damaged")
    content = (theirs.root / manifest.folder / "trainer.state").read_bytes()
    neighbours.adopt_newest(own, [[neighbours.Held(encode(manifest), content)]])
    assert own.manifests() == []


def test_held_leaves_out_commit_without_trainers_part(tmp_path):
    roots = Roots("job", "run1", 1, tmp_path / "durable", tmp_path / "memory", node="a")
    store = roots.commit_store("a")
    store.claim(1)
    for step in (1, 2):
        file = store.write(step, 1, "trainer.state", {"role": "trainer"}, {})
        store.commit(step, 1, {"trainer": file})
    assert len(neighbours.held(roots, "a")) == 2
    (store.root / "step-00000002.e1" / "trainer.state").unlink()
    assert [decode(each.manifest).step for each in neighbours.held(roots, "a")] == [1]
