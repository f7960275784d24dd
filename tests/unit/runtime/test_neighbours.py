# SPDX-License-Identifier: Apache-2.0
"""Commits in the memories of several nodes, each one's also in the next one's."""

import logging
import os

import pytest

from dlrover.python.rl.runtime.checkpoint import neighbours
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.checkpoint.store import CheckpointStore, decode, encode
from tests.support.durable_toys import ALONE, CLASSES, Stage, both, kill_trainer

STEPS = 7
MEMBERS = [(role, rank) for role in ("ACTOR", "ROLLOUT", "REWARD") for rank in (0, 1)]
NODES = dict(zip([*MEMBERS, "trainer"], "abbccac", strict=True))


def stage_on(path, nodes=None, **options):
    return Stage(path, steps=STEPS, nodes={**NODES, **(nodes or {})}, spread=True, **{"every": 100, **options})


def assert_no_step_is_lost(stage):
    assert stage.progress == sorted(set(stage.progress))
    assert stage.progress[-1] == STEPS


@pytest.mark.parametrize("commit_every", [1, 3])
@pytest.mark.parametrize("classes", [CLASSES, ALONE], ids=["together", "one by one"])
@pytest.mark.parametrize("lost", ["a", "b", "c"])
@pytest.mark.parametrize("offset", [0, pytest.param(11, marks=pytest.mark.slow)])
def test_lost_node_costs_no_committed_step(tmp_path, offset, lost, classes, commit_every):
    reference = stage_on(tmp_path / "undisturbed", classes=classes, commit_every=commit_every)
    expected = reference.run()
    begin = reference.calls_of("ACTOR", "!commit")[-1] // 2
    for at in range(begin + offset, len(reference.port.calls), 22):
        stage = stage_on(tmp_path / f"at{at}", classes=classes, commit_every=commit_every)
        outcome = stage.run({(at, "before"): stage.lose(lost)})
        members = {name: expected["members"][name] for name in outcome["members"]}  # one may go after its last call
        assert outcome == {**expected, "members": members}
        assert_no_step_is_lost(stage)


@pytest.mark.parametrize("lost", ["ab", "bc", "ca"])
def test_two_adjacent_nodes_cost_the_steps_since_a_copy(tmp_path, caplog, lost):
    reference = stage_on(tmp_path / "undisturbed", every=3)
    expected = reference.run()
    at = reference.calls_of("ACTOR", "update")[2 * 5]  # of step 6; step 3 has a copy
    stage = stage_on(tmp_path / "job", every=3)
    order = sorted(lost, key=lambda node: node == NODES["trainer"])
    with caplog.at_level(logging.WARNING, "dlrover"):
        assert stage.run({(at, "before"): both(*map(stage.lose, order))}) == expected
    assert stage.attempts[-1].restart_info.step == 3
    assert "continuing from the copy of that step in" in caplog.text


@pytest.mark.parametrize("then", ["a", "b"])
@pytest.mark.parametrize("commit_every", [3, 100])
def test_one_node_after_the_other_costs_no_committed_step(tmp_path, commit_every, then):
    """A new neighbour needs the earlier commits, too."""
    reference = stage_on(tmp_path / "undisturbed", commit_every=commit_every)
    expected = reference.run()
    first, second = (reference.calls_of("ACTOR", "update")[2 * step] for step in (2, 4))
    for offset in (0, 9, 21):
        stage = stage_on(tmp_path / f"job{offset}", commit_every=commit_every)
        faults = {(first, "before"): stage.lose("c"), (second + 30 + offset, "before"): stage.lose(then)}
        assert stage.run(faults) == expected
        assert not stage.port.faults
        assert_no_step_is_lost(stage)


def test_trainer_sends_the_unsent_part_of_its_predecessor(tmp_path):
    """It ends between a commit and sending its own part; then its node goes."""
    reference = stage_on(tmp_path / "undisturbed")
    expected = reference.run()
    calls = [method for _, _, method in reference.port.calls]
    own = [at for at, method in enumerate(calls[:-1]) if method == "!store" and not calls[at + 1].startswith("!")]
    assert len(own) == STEPS + 1  # the first one is of the state after init
    for step, at in list(enumerate(own))[1:-1:2]:
        ended = stage_on(tmp_path / f"ended{at}")
        assert ended.run({(at, "before"): kill_trainer}) == expected
        update = next(number for number in ended.calls_of("ACTOR", "update") if number > at)
        stage = stage_on(tmp_path / f"job{at}")
        faults = {(at, "before"): kill_trainer, (update, "before"): stage.lose(NODES["trainer"])}
        assert stage.run(faults) == expected
        assert not stage.port.faults
        assert stage.restarted_after()[-2:] == [step, step]


def test_files_travel_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "_PART_BYTES", 1000)
    calm = stage_on(tmp_path / "undisturbed")
    expected = calm.run()
    stage, at = stage_on(tmp_path / "job"), calm.calls_of("ACTOR", "update")[2 * 3]
    assert stage.run({(at, "before"): stage.lose("a")}) == expected
    assert_no_step_is_lost(stage)
    assert len(stage.calls_of("ACTOR", "!read")) > 3 * len(stage.calls_of("ACTOR", "!commit"))


def test_neighbour_without_room_is_a_warning(tmp_path, caplog, monkeypatch):
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
        assert stage.run({(calls.calls_of("ACTOR", "update")[2 * 4], "before"): stage.lose("a")}) == expected
    assert "cannot store a neighbour's commit here: [Errno 28] No space left on device" in caplog.text
    assert "only one node has the commits of ACTOR-0: losing it loses the steps since a copy" in caplog.text
    assert stage.attempts[-1].restart_info.step == 3


def test_nodes_keep_only_the_commits_they_need(tmp_path):
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


def test_single_node_sends_nothing(tmp_path):
    stage = stage_on(tmp_path / "job", nodes=dict.fromkeys(NODES, "a"))
    stage.run()
    assert not [call for call in stage.port.calls if call[2] in ("!read", "!store")]


def committed(folder, epoch, steps=()):
    """A store that this epoch has claimed, with its commits of these steps."""
    store = CheckpointStore(folder, "run1", durable=False)
    store.claim(epoch)
    for step in steps:
        file = store.write(step, epoch, "trainer.state", {"role": "trainer"}, {})
        store.commit(step, epoch, {"trainer": file})
    return store


def held_by(store):
    return [
        neighbours.Held(encode(manifest), (store.root / manifest.folder / "trainer.state").read_bytes())
        for manifest in store.manifests()
    ]


def test_adopt_newest_takes_the_last_commit_of_the_last_trainer(tmp_path):
    earlier = committed(tmp_path / "of1", 1, range(1, 10))
    candidates = [held_by(earlier), held_by(committed(tmp_path / "of2", 2, range(1, 4)))]
    for number, order in enumerate((candidates, candidates[::-1])):
        own = committed(tmp_path / f"own{number}", 3)
        neighbours.adopt_newest(own, order)
        assert [(each.epoch, each.step) for each in own.manifests()] == [(2, 3), (2, 2)]
        neighbours.adopt_newest(own, [candidates[0]])
        assert own.manifests()[0].epoch == 2
    neighbours.adopt_newest(earlier, [candidates[1]])
    assert (earlier.manifests()[0].epoch, earlier.manifests()[0].step) == (2, 3)


def test_two_trainers_may_adopt_a_commit_at_the_same_time(tmp_path, monkeypatch):
    other, own = committed(tmp_path / "other", 1, [1]), committed(tmp_path / "own", 2)
    (manifest,), (candidate,) = other.manifests(), held_by(other)
    real, turns = os.replace, []

    def replace(source, target):
        turns.append(target)
        if len(turns) == 1:
            assert neighbours.adopt(own, candidate)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert neighbours.adopt(own, candidate)
    assert len(turns) == 4 and own.manifests() == [manifest]
    assert own.read(manifest, "trainer") == {}


def test_quarantined_commit_does_not_come_back_from_a_neighbour(tmp_path):
    neighbour, own = (committed(tmp_path / name, 1, [1]) for name in ("neighbour", "own"))
    own.quarantine(own.manifests()[0].folder, "it is damaged")
    neighbours.adopt_newest(own, [held_by(neighbour)])
    assert own.manifests() == []


def test_held_leaves_out_commit_without_trainers_part(tmp_path):
    roots = Roots("job", "run1", 1, tmp_path / "durable", tmp_path / "memory", node="a")
    store = committed(roots.commit_store("a").root, 1, [1, 2])
    assert len(neighbours.held(roots, "a")) == 2
    (store.root / "step-00000002.e1" / "trainer.state").unlink()
    assert [decode(each.manifest).step for each in neighbours.held(roots, "a")] == [1]
