# SPDX-License-Identifier: Apache-2.0
"""Commits of which most have the calls of a step: what is lost comes back by repeating them, to the bit."""

import logging
import shutil
import tempfile
from pathlib import Path

import pytest
from durable_toys import (
    CLASSES,
    Pipelined,
    Policy,
    Stage,
    TrainerKilled,
    Training,
    both,
    kill,
    kill_trainer,
    wait_for_copies,
)

from dlrover.python.rl.common.errors import CheckpointMissing
from dlrover.python.rl.runtime.checkpoint.commits import StoreCheckpoints
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory
from dlrover.python.rl.runtime.checkpoint.roots import Roots
from dlrover.python.rl.runtime.checkpoint.storage.store import CheckpointStore
from dlrover.python.rl.runtime.process.host import MemberHost
from dlrover.python.rl.trainer.workload import MemberContext, trainer_invocation

OPENED = 9
"""Number of the first call in ``steps()``: what is before is not recovered."""

FAULTS = {
    "an actor": kill("ACTOR", 1),
    "the trainer": kill_trainer,
    "the trainer and an actor": both(kill("ACTOR", 0), kill_trainer),
    "the trainer and both actors": both(kill("ACTOR", 0), kill("ACTOR", 1), kill_trainer),
}


@pytest.fixture
def folder():
    """A folder in memory: many jobs sync their files."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="dlrover-rl-test-", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path)


def staged(path, trainer=Training, **options):
    return Stage(path, trainer, **{"steps": 6, "every": 100, "commit_every": 4, **options})


def same(outcome, expected):
    assert (outcome["end"], outcome["logs"]) == (expected["end"], expected["logs"])
    assert all(expected["members"][name] == state for name, state in outcome["members"].items())


def call_of(stage, step, method="update", rank=1):
    """The number of a call of the actor in ``step``."""
    numbers = [number for number, call in enumerate(stage.port.calls) if call == ("ACTOR", rank, method)]
    return numbers[step - 1]


def files(folder, step):
    return sorted(path.name for path in folder.glob(f"step-{step:08d}.*/*") if "ACTOR" in path.name)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("trainer", [Training, Pipelined])
@pytest.mark.parametrize("offset", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_whatever_dies_between_states_the_end_is_the_same(folder, offset, trainer, fault):
    reference = staged(folder / "undisturbed", trainer)
    expected = reference.run()
    for number in range(OPENED + offset, len(reference.port.calls), 10):
        stage = staged(folder / str(number), trainer)
        same(stage.run({(number, "before"): FAULTS[fault]}), expected)


def newest(stage):
    """The actors' files of the last commit."""
    (manifest, *_) = CheckpointStore(stage.path / "memory", "run1", durable=False).manifests()
    return [Path(file.name) for name, file in manifest.files.items() if name.startswith("ACTOR")]


def test_a_recovery_repeats_the_calls_since_the_last_state(folder):
    reference = staged(folder / "undisturbed")
    expected = reference.run()
    stage = staged(folder / "job")
    same(stage.run({(call_of(reference, 4), "before"): kill("ACTOR", 1)}), expected)
    # Steps 1 to 3 again, the open one, and 5 and 6; nobody else does anything again.
    assert [stage.executed()["ACTOR", rank]["update"] for rank in (0, 1)] == [6, 6]
    others = [("ROLLOUT", 0), ("ROLLOUT", 1), ("REWARD", 0), ("REWARD", 1)]
    assert [stage.executed()[other] for other in others] == [reference.executed()[other] for other in others]


def test_at_most_two_states_are_kept(folder):
    stage = staged(folder / "job", steps=16)
    most = []

    def count(step):
        states = list((stage.path / "memory").rglob("ACTOR-0.*.state"))
        most.append(len(states))

    stage.progress = type("Count", (), {"append": lambda self, step: count(step)})()
    stage.run()
    assert max(most) == 2


@pytest.mark.parametrize(("damaged", "left"), [("*.calls", 2), ("manifest.json", 2), ("trainer.state", 2)])
def test_a_damaged_commit_of_calls_costs_one_more_step(folder, damaged, left, caplog):
    reference = staged(folder / "undisturbed")
    expected = reference.run()

    def strike(port):
        path = next((stage.path / "memory" / "step-00000003.e1").glob(damaged))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        kill_trainer(port)

    stage = staged(folder / "job")
    with caplog.at_level(logging.WARNING, "dlrover"):
        same(stage.run({(call_of(reference, 4), "before"): strike}), expected)
    assert "is not used" in caplog.text
    assert [trainer.restart_info.step for trainer in stage.attempts] == [0, left]


def test_a_damaged_state_takes_the_commits_after_it_along(folder):
    def strike(port):
        path = next((stage.path / "memory" / "step-00000000.e1").glob("ACTOR-0.*.state"))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        kill_trainer(port)

    stage = staged(folder / "job")
    with pytest.raises(CheckpointMissing, match="no commit of run run1 is left"):
        stage.run({(40, "before"): strike})


def test_after_a_damaged_state_the_last_copy_counts(folder):
    options = {"every": 3, "commit_every": 6, "steps": 7}
    reference = staged(folder / "undisturbed", **options)
    expected = reference.run()

    def strike(port):
        for path in (stage.path / "memory" / "step-00000003.e1").glob("ACTOR-0.*.state"):
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        kill_trainer(port)

    stage = staged(folder / "job", **options)
    same(stage.run({(call_of(reference, 6), "before"): strike}), expected)
    assert stage.attempts[1].restart_info.step == 3


def test_a_state_that_was_read_from_a_copy_is_written_anew(folder):
    """Calls go on only from what is in the same folder."""
    options = {"every": 3, "commit_every": 6, "steps": 7}
    reference = staged(folder / "undisturbed", **options)
    expected = reference.run()

    def strike(port):
        shutil.rmtree(stage.path / "memory")
        both(kill("ACTOR", 0), kill("ACTOR", 1), kill_trainer)(port)

    stage = staged(folder / "job", **options)
    number = call_of(reference, 6)
    same(stage.run({(number, "before"): strike, (number + 30, "before"): kill("ACTOR", 0)}), expected)


class Selective(Policy):
    """Of its calls only the updates change its state."""

    @trainer_invocation(blocking=False, target="RANK0", changes_state=False)
    def publish(self):
        return super().publish()


def test_a_method_that_changes_no_state_is_not_repeated(folder):
    reference = staged(folder / "undisturbed")
    expected = reference.run()
    number = call_of(reference, 4)
    counts = {}
    for name, actor in (("any", Policy), ("selective", Selective)):
        stage = staged(folder / name, classes={**CLASSES, "ACTOR": actor})
        same(stage.run({(number, "before"): kill("ACTOR", 1)}), expected)
        counts[name] = stage.executed()["ACTOR", 0]["publish"]
    assert counts["any"] == counts["selective"] + 3


class WithPaths(Training):
    """Passes what cannot be written down."""

    def body(self, step):
        self.RG_ACTOR.look_at(Path("x"))
        super().body(step)


class Looking(Policy):
    def look_at(self, path):
        self.seen = path


class WithHandles(Training):
    """Calls its actor behind the role group's back."""

    def body(self, step):
        super().body(step)
        if step == 2:
            self.actors[0].look_at.remote(None)


@pytest.mark.parametrize(("trainer", "states"), [(WithPaths, {1, 2, 3, 4, 5, 6}), (WithHandles, {2})])
def test_after_a_call_that_cannot_be_repeated_there_is_the_state(folder, trainer, states):
    classes = {**CLASSES, "ACTOR": Looking}
    seen = {}
    stage = staged(folder / "job", trainer, classes=classes)
    look = lambda self, step: seen.update({step: newest(stage)})  # noqa: E731
    stage.progress = type("Seen", (), {"append": look})()
    expected = stage.run()
    assert {step for step, found in seen.items() if any(path.name == "ACTOR-0.1.state" for path in found)} == states
    again = staged(folder / "again", trainer, classes=classes)
    same(again.run({(call_of(stage, 4), "before"): kill("ACTOR", 1)}), expected)


class Refused(ValueError):
    pass


class Refusing(Policy):
    def refuse(self, amount):
        self.weights += amount
        raise Refused("not this one")


class Trying(Training):
    """Goes on after an error of its actor, which has changed the state."""

    def body(self, step):
        super().body(step)
        with pytest.raises(Exception, match="not this one"):
            self.RG_ACTOR.refuse(0.5)


def test_a_call_that_raised_after_it_had_changed_the_state_is_in_the_next_state(folder):
    classes = {**CLASSES, "ACTOR": Refusing}
    reference = staged(folder / "undisturbed", Trying, classes=classes)
    expected = reference.run()
    stage = staged(folder / "job", Trying, classes=classes)
    same(stage.run({(call_of(reference, 4), "before"): kill("ACTOR", 1)}), expected)


class Shifted(Policy):
    def shift(self, amount):
        self.weights += amount

    @trainer_invocation(target="RANK0")
    def look_at(self, path):
        self.seen = path


class OfOneRank(Training):
    """Only rank 0 gets what cannot be written down."""

    def body(self, step):
        self.RG_ACTOR.look_at(Path("x"))
        super().body(step)


def test_all_ranks_have_states_or_all_have_calls(folder):
    classes = {**CLASSES, "ACTOR": Shifted}
    seen = {}
    reference = staged(folder / "undisturbed", OfOneRank, classes=classes)
    reference.progress = type("Seen", (), {"append": lambda self, step: seen.update({step: newest(reference)})})()
    expected = reference.run()
    assert all({path.suffix for path in found} == {".state"} for found in seen.values())
    stage = staged(folder / "job", OfOneRank, classes=classes)
    same(stage.run({(call_of(reference, 4), "before"): kill("ACTOR", 1)}), expected)
    assert [stage.executed()["ACTOR", rank]["update"] for rank in (0, 1)] == [3, 3], "they meet in collectives"


@pytest.mark.parametrize("step", [3, 4])
def test_a_call_after_the_commit_of_its_step_is_not_lost(folder, step):
    """Another thread of the trainer calls while it commits."""

    def made(name):
        stage = staged(folder / name, classes={**CLASSES, "ACTOR": Shifted})
        done = []

        def late(self, committed):
            if committed == 2 and not done:
                done.append(stage.attempts[-1].RG_ACTOR.shift(0.5))

        stage.progress = type("Late", (), {"append": late})()
        return stage

    reference = made("undisturbed")
    expected = reference.run()
    same(made("job").run({(call_of(reference, step), "before"): kill("ACTOR", 0)}), expected)


class WithCritic(Training):
    """Changes its actors behind the role group's back in step 2."""

    def init(self):
        super().init()
        self.RG_CRITIC.init_model(3)

    def body(self, step):
        super().body(step)
        if step == 2:
            for actor in self.actors:
                actor.shift.remote(0.5)


class Alone(Policy):
    needs_own_process = False


def test_what_raw_calls_did_stays_when_their_commit_is_repeated(folder):
    def made(name):
        return staged(folder / name, WithCritic, classes={**CLASSES, "ACTOR": Shifted, "CRITIC": Alone})

    reference = made("undisturbed")
    expected = reference.run()
    commits = [number for number, call in enumerate(reference.port.calls) if call == ("CRITIC", 0, "!commit")]
    stage, struck = made("job"), []
    submit = stage.port.submit

    def striking(role, rank, call):
        if (call.method, rank, call.call_id[0]) == ("update", 1, 4) and role == "ACTOR" and not struck:
            struck.append(stage.port.kill("ACTOR", 0))
        return submit(role, rank, call)

    stage.port.submit = striking
    same(stage.run({(commits[2], "before"): kill("CRITIC", 0)}), expected)
    assert struck


@pytest.mark.parametrize("then", ["the trainer", "another actor"])
def test_a_commit_that_is_repeated_goes_on_only_from_what_was_committed(folder, then):
    """A node is lost while step 3 is committed; its actor restores step 2 from the copy, and the commit is repeated."""
    nodes = {("ACTOR", 0): "a", ("ACTOR", 1): "b", "trainer": "a"}

    def made(name):
        classes = {**CLASSES, "ACTOR": Alone}
        return staged(folder / name, steps=8, every=2, classes=classes, nodes=dict(nodes))

    expected = made("undisturbed").run()
    stage, struck = made("job"), []
    submit = stage.port.submit

    def striking(role, rank, call):
        who, step = (str(role), rank, call.method), stage.attempts[-1]._steps.port.step if stage.attempts else 0
        if who == ("ACTOR", 1, "!commit") and step == 3 and not struck:
            struck.append("node")
            wait_for_copies()
            shutil.rmtree(stage.path / "b", ignore_errors=True)
            stage.nodes["ACTOR", 1] = "c"
            stage.port.kill("ACTOR", 1)
        elif who == ("ACTOR", 0, "!commit") and step == 3 and struck == ["node"]:
            struck.append(then)
            if then == "the trainer":
                raise TrainerKilled
            stage.port.kill("ACTOR", 0)
        elif who == ("ACTOR", 1, "update") and call.call_id[0] == 4 and len(struck) == 2:
            struck.append("again")
            stage.port.kill("ACTOR", 1)
        return submit(role, rank, call)

    stage.port.submit = striking
    same(stage.run(), expected)
    assert len(struck) == 3 and all(trainer.restart_info.step in (0, 2) for trainer in stage.attempts)


def test_trainers_that_die_do_not_make_the_calls_more(folder):
    stage, struck, chain = staged(folder / "job", steps=16), set(), {}
    submit = stage.port.submit

    def striking(role, rank, call):
        step = call.call_id[0]
        if (
            (str(role), rank, call.method) == ("ACTOR", 0, "update")
            and step > 1
            and not step % 3
            and step not in struck
        ):
            struck.add(step)
            raise TrainerKilled
        return submit(role, rank, call)

    def look(self, step):
        (manifest, *_) = CheckpointStore(stage.path / "memory", "run1", durable=False).manifests()
        chain[step] = len(manifest.pieces_of("ACTOR-0"))

    stage.port.submit = striking
    stage.progress = type("Look", (), {"append": look})()
    stage.run()
    # Four, the state, and those of a step in which a trainer dies before it knows that the state is written.
    assert len(struck) == 5 and max(chain.values()) <= 6


class Failing(Policy):
    """Its next ``left`` updates fail."""

    left = 0

    def update(self, rollouts, rewards):
        if type(self).left:
            type(self).left -= 1
            raise Refused("this time only")
        return super().update(rollouts, rewards)


class Swallowing(Training):
    def body(self, step):
        try:
            super().body(step)
        except Exception as error:
            raise AssertionError("a user's except has seen it") from error


def test_an_error_in_a_repeated_call_is_no_error_of_the_trainers_code(folder):
    Failing.left = 0
    classes = {**CLASSES, "ACTOR": Failing}
    reference = staged(folder / "undisturbed", Swallowing, classes=classes)
    expected = reference.run()

    def strike(port):
        Failing.left = 1
        port.kill("ACTOR", 1)

    stage = staged(folder / "job", Swallowing, classes=classes)
    same(stage.run({(call_of(reference, 4), "before"): strike}), expected)
    assert len(stage.attempts) == 2


@pytest.fixture
def busy(monkeypatch):
    """At the last step a copy is still being written, so that its commit has calls."""
    request = StoreCheckpoints.commit_request
    monkeypatch.setattr(StoreCheckpoints, "commit_request", lambda self, step, last: request(self, step, last=False))


def states_after(folder, steps):
    reference = staged(folder / f"reference-{steps}", steps=steps)  # 0: as init leaves them
    reference.run()
    return reference.states()


def load_into(checkpoints, rank, step):
    host = MemberHost(9)
    host.start(Policy, MemberContext(role="ACTOR", rank=rank, world_size=2), None, {})
    host.workload.init_model(7)
    host._restore(checkpoints.restore_request(step))
    host._replay()
    return host.workload.state_dict()


def test_a_last_commit_of_calls_is_copied_whole_to_the_jobs_directory(folder, busy):
    stage = staged(folder / "job", steps=2)
    stage.run()
    shutil.rmtree(stage.path / "memory")
    copies = CheckpointStore(stage.path / "durable", "run1", durable=True)
    assert [manifest.step for manifest in copies.manifests()] == [2, 0]
    continue_with(folder, copies, {"": 2, "others": 0})


def continue_with(folder, copies, steps):
    """Calls are repeated only with the settings that they were made with."""
    for settings, step in steps.items():
        roots = Roots("job", "run2", 1, folder / f"other{step}", folder / f"mem{step}")
        checkpoints = StoreCheckpoints(roots, 100, before=copies, settings=settings)
        assert checkpoints.newest() == step
        expected = states_after(folder, step)
        for rank in (0, 1):
            loaded = load_into(checkpoints, rank, step)
            assert loaded["weights"].tobytes() == expected[f"ACTOR-{rank}"]["weights"].tobytes()
            assert loaded["updates"] == step


def test_that_a_run_cannot_be_continued_is_said(folder, busy):
    stage = staged(folder / "job", steps=2)
    stage.run()
    shutil.rmtree(stage.path / "durable" / "step-00000000.e1")
    copies = CheckpointStore(stage.path / "durable", "run1", durable=True)
    roots = Roots("job", "run2", 1, folder / "other", folder / "mem")
    with pytest.raises(CheckpointMissing, match="run run1 cannot be continued: it has calls without the states"):
        StoreCheckpoints(roots, 100, before=copies, settings="others").newest()


def test_what_is_only_in_memory_at_the_end_is_saved_with_all_that_it_goes_on_from(folder, monkeypatch):
    monkeypatch.setenv("DLROVER_RL_MEMORY", str(folder / "shm"))
    stage = staged(folder / "job")
    (folder / "job" / "out" / "checkpoints").mkdir(parents=True)
    place = folder / "job" / "out" / "checkpoints" / "run1"
    stage.roots = lambda: Roots("job", "run1", stage.epoch, place)

    class Ended(BaseException):
        pass

    def end(port):
        raise Ended

    reference = staged(folder / "undisturbed")
    reference.run()
    with pytest.raises(Ended):
        stage.run({(call_of(reference, 4), "before"): end})
    forget_memory("job", "run1")
    copies = CheckpointStore(place, "run1", durable=True)
    last, first = copies.manifests()
    assert last.step == 3 and len(last.pieces_of("ACTOR-0")) == 4 and last.folders == {last.folder}
    assert first.step == 0 and not first.earlier
    continue_with(folder, copies, {"": 3, "others": 0})
