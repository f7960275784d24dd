# SPDX-License-Identifier: Apache-2.0
"""The trainer of recipes: the time of its calls by phase, its frozen models, roles that load in turn, and its log."""

import shutil
import threading
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe import workloads
from dlrover.python.rl.recipe.base.engine_workload import Machine, peak_memory
from dlrover.python.rl.recipe.grpo import GRPOTrainer
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse
from dlrover.python.rl.recipe.online.batch import AuxOutput
from dlrover.python.rl.recipe.trainers import recipe_trainer
from dlrover.python.rl.recipe.trainers.recipe_trainer import FrozenModels, RecipeTrainer, TimedPort
from dlrover.python.rl.recipe.workloads import (
    ActorWorkload,
    CriticWorkload,
    ReferenceWorkload,
    RolloutWorkload,
    ShardedReferenceWorkload,
)
from dlrover.python.rl.trainer.port import COMMIT, WRITTEN, Call, Outcome, Ref, RestartInfo
from dlrover.python.rl.trainer.shard import Rows
from tests.support.example_jobs import EXAMPLES, stage
from tests.support.manual_clock import ManualClock
from tests.support.run_files import metrics_of, write_rows

PHASES = {"generate": "generation", "score": "reward", "CRITIC.update": "critic"}


class SlowPort:
    """A call begins when its arguments are complete, and takes the seconds of its method."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.ready_s = clock, seconds, {}

    def put(self, value):
        return Ref(self, value)

    def submit(self, role, rank, call):
        token, size = object(), object()
        arguments = [ref for value in call.args for ref in (value.parts if isinstance(value, Rows) else [value])]
        begins_s = max([self.clock.now_s, *(self.ready_s[ref.token] for ref in arguments if isinstance(ref, Ref))])
        self.ready_s[token] = self.ready_s[size] = begins_s + self.seconds[call.method]
        return Ref(self, token, size, role, rank, call.method)

    def wait(self, refs, timeout_s):
        end_s = max(self.ready_s[ref.token] for ref in refs)
        most_s = end_s if timeout_s is None else self.clock.now_s + timeout_s
        self.clock.now_s = max(self.clock.now_s, min(end_s, most_s))
        return [Outcome(late=self.ready_s[ref.token] > self.clock.now_s) for ref in refs]


def call(method, *args):
    return Call((1, 0), method, args, {}, sized=True)


@pytest.fixture
def timed():
    clock = ManualClock()
    return clock, TimedPort(SlowPort(clock, {"generate": 5.0, "score": 2.0, "update": 3.0}), PHASES, clock)


@pytest.mark.feature(140)
def test_each_phase_has_its_own_time_where_one_awaits_another(timed):
    clock, port = timed
    completions = port.submit("ROLLOUT", 0, call("generate"))
    clock.now_s += 1.0  # the trainer's own work
    rewards = port.submit("REWARD", 0, call("score", Rows((completions,), 0, 1)))
    assert port.wait([rewards], None) == [Outcome()]
    port.wait([port.submit("ACTOR", 0, call("update", completions))], None)
    assert port.lap() == (10.0, {"generation": 4.0, "reward": 2.0, "update": 3.0, "trainer": 1.0})
    assert port.lap() == (0.0, {"trainer": 0.0})


def test_method_of_one_role_can_have_its_own_phase(timed):
    _, port = timed
    for role in ("CRITIC", "ACTOR"):
        port.wait([port.submit(role, 0, call("update"))], None)
    assert port.lap() == (6.0, {"critic": 3.0, "update": 3.0, "trainer": 0.0})


def test_deadline_is_for_the_whole_wait(timed):
    clock, port = timed
    rewards = port.submit("REWARD", 0, call("score", port.submit("ROLLOUT", 0, call("generate"))))
    assert (port.wait([rewards], 6.0), clock.now_s) == ([Outcome(late=True)], 6.0)
    assert (port.wait([rewards], 6.0), clock.now_s) == ([Outcome()], 7.0)


def test_waits_of_other_threads_are_not_booked(timed):
    _, port = timed
    waiting = threading.Thread(target=lambda: port.wait([port.submit("ROLLOUT", 0, call("generate"))], None))
    waiting.start()
    waiting.join(10)
    assert port.lap() == (5.0, {"trainer": 5.0})


def test_every_method_with_a_phase_belongs_to_a_workload():
    classes = [getattr(workloads, name) for name in workloads.__all__]
    missing = [name for name in recipe_trainer.PHASES if not any(callable(getattr(cls, name, None)) for cls in classes)]
    assert missing == [COMMIT, WRITTEN], "rename the method in PHASES as well"


@pytest.mark.feature(140)
def test_phases_of_a_step_add_up_to_it(tmp_path):
    write_tiny_model(tmp_path / "model", hidden=32, layers=1, max_positions=32)
    data = dict.fromkeys(("train", "eval"), write_rows(tmp_path / "rows.jsonl", EXAMPLES))
    config = {"model": str(tmp_path / "model"), "data": data, "batch_size": 1, "engine": {"threads": 1}}
    stage("sft", tmp_path / "out", config | {"eval_every": 2}).run()
    rows = metrics_of(tmp_path / "out")
    assert len(rows) == 4
    for row in rows:
        phases = {name: value for name, value in row.items() if name.startswith("time/")}
        assert sum(phases.values()) - phases["time/step"] == pytest.approx(phases["time/step"], rel=0.05)
        assert phases["time/update"] > 0.0 and phases["time/commit"] > 0.0
        assert ("time/evaluation" in phases) == (row["step"] % 2 == 0)


def test_speed_of_a_machine_by_hand(tmp_path):
    times = {"time/step": 4.0, "time/update": 2.0}
    metrics = Machine(1000, 1e9).metrics(tokens=500, trained=800, members=2, times=times)
    expected = {"speed/tokens_per_s": 125.0, "speed/train_tflops": 2.4e-6, "speed/mfu": 2.4e6 / 2e9}
    assert metrics == pytest.approx(expected)
    assert Machine(1000).metrics(500, 500, 2, times).keys() == {"speed/tokens_per_s", "speed/train_tflops"}
    assert Machine(0).metrics(500, 500, 2, times).keys() == {"speed/tokens_per_s"}
    assert Machine(10).metrics(500, 500, 2, {"time/step": 1.0}).keys() == {"speed/tokens_per_s"}
    engine = Fsdp2TrainEngine(write_tiny_model(tmp_path / "model", hidden=32, layers=1, max_positions=32), None)
    count = sum(tensor.numel() for _, tensor in engine.named_weights())
    assert Machine.of(engine, "cpu", "bf16") == Machine(count)
    assert Machine.of(object(), "cpu", "fp32") == Machine(0)
    assert peak_memory("cpu") == {}


def models(**paths):
    uses = {RLRoleType(role.upper()): ModelUse("frozen", str(path)) for role, path in paths.items()}
    uses[RLRoleType.ACTOR] = ModelUse("trained", "anything")
    return FrozenModels(uses)


def test_frozen_models_refuse_other_weights_and_no_other_place(tmp_path):
    first = write_tiny_model(tmp_path / "first", hidden=32, layers=1)
    state = models(reference=first, reward=first).state_dict()
    moved, other = shutil.copytree(first, tmp_path / "moved"), shutil.copytree(first, tmp_path / "other")
    models(reference=moved, reward=first).load_state_dict(state)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError) as caught:
        models(reference=other, reward=moved).load_state_dict(state)
    (error,) = caught.value.errors
    assert error.what == f"the weights of '{other}', the reference, have changed since the run began"


def test_frozen_models_are_read_once_and_unknown_ones_taken(tmp_path):
    here = write_tiny_model(tmp_path / "here", hidden=32, layers=1)
    of_hub, local = models(reference="owner/name"), models(reference=here)
    assert of_hub.state_dict() == {"REFERENCE": ""}
    local.load_state_dict(of_hub.state_dict())
    fingerprints = models(reference=here).state_dict()
    of_hub.load_state_dict(fingerprints)
    assert of_hub.state_dict() == fingerprints, "they stay known, for when the files are here again"
    models(reference=here).load_state_dict({})
    models().load_state_dict(fingerprints)
    shutil.rmtree(here)
    assert of_hub.state_dict() == fingerprints != {"REFERENCE": ""}


class Group:
    """A role whose load ends when it is waited for."""

    def __init__(self, workload_class, members, events):
        self.workload_class, self.members, self.events = workload_class, members, events
        self.init_model = SimpleNamespace(options=lambda blocking: self.begin)

    def __len__(self):
        return self.members

    def begin(self):
        name = self.workload_class.__name__
        self.events.append(f"{name} begins")
        return SimpleNamespace(wait=lambda: self.events.append(f"{name} has ended"))


@pytest.mark.parametrize(
    ("second", "members", "waits"),
    [(CriticWorkload, 2, True), (ReferenceWorkload, 2, False), (ShardedReferenceWorkload, 1, False)],
)
def test_second_role_whose_ranks_meet_loads_after_the_first(second, members, waits):
    """On shared devices they would wait for each other."""
    events, trainer = [], GRPOTrainer.__new__(GRPOTrainer)
    for kind, count in ((ActorWorkload, 2), (RolloutWorkload, 2), (second, members)):
        trainer.begin_loading(Group(kind, count, events))
    ended = ["ActorWorkload has ended"] * waits
    assert events == ["ActorWorkload begins", "RolloutWorkload begins", *ended, f"{second.__name__} begins"]


@pytest.mark.parametrize(("kind", "waits"), [(ReferenceWorkload, False), (ShardedReferenceWorkload, True)])
def test_outputs_of_a_role_whose_ranks_meet_are_waited_for(kind, waits):
    events, trainer = [], GRPOTrainer.__new__(GRPOTrainer)

    def compute(*arguments):
        return SimpleNamespace(wait=lambda: events.append("waited"))

    group = Group(kind, 2, events)
    group.data_parallel_size, group.logprobs = 2, SimpleNamespace(options=lambda **_: compute)
    trainer.needed_outputs = [AuxOutput("reference", "logprobs", {"ref_logprobs": "float32"})]
    trainer.group = lambda role: group
    trainer.compute_aux_outputs(SimpleNamespace(shard_evenly=lambda parts: parts, scored=[1, 2], samples=None))
    assert events == ["waited"] * waits


@pytest.mark.parametrize(("taken", "total", "first"), [(6, 3, 7), (3, 3, 4), (0, 3, 4)])
def test_log_continues_after_the_last_step_taken(taken, total, first):
    steps, messages = [], []
    trainer = SimpleNamespace(time_metrics=dict, steps=lambda total: iter(()), restart_info=RestartInfo(step=taken))
    trainer.announce, trainer.begin_log = messages.append, steps.append
    assert list(RecipeTrainer.logged_steps(trainer, total)) == []
    assert (steps, trainer.last_step) == ([first], first - 1)
    assert messages == [f"{taken} steps are already done: steps={total} leaves nothing to do"] * (taken > total)
