"""Where a step's time goes, and how fast that is."""

import threading

import pytest
from example_jobs import EXAMPLES, metrics_of, stage, write_rows

from dlrover.python.rl.recipe.speed import Machine
from dlrover.python.rl.recipe.timing import Stopwatch, TimedPort
from dlrover.python.rl.recipe.tiny import write_tiny_model
from dlrover.python.rl.trainer.port import Call, Outcome, Ref
from dlrover.python.rl.trainer.shard import Rows


class Hands:
    """A clock that is set by hand."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class SlowPort:
    """Members that work at once, each call for a while from when what it takes is there."""

    def __init__(self, hands, seconds):
        self.hands, self.seconds, self.ready_s = hands, seconds, {}

    def put(self, value):
        return Ref(self, value)

    def submit(self, role, rank, call):
        token, size = object(), object()
        taken = [ref for value in call.args for ref in (value.parts if isinstance(value, Rows) else [value])]
        begins_s = max([self.hands.now_s, *(self.ready_s[ref.token] for ref in taken if isinstance(ref, Ref))])
        self.ready_s[token] = self.ready_s[size] = begins_s + self.seconds[call.method]
        return Ref(self, token, size, role, rank, call.method)

    def wait(self, refs, timeout_s):
        end_s = max(self.ready_s[ref.token] for ref in refs)
        most_s = end_s if timeout_s is None else self.hands.now_s + timeout_s
        self.hands.now_s = max(self.hands.now_s, min(end_s, most_s))
        return [Outcome(late=self.ready_s[ref.token] > self.hands.now_s) for ref in refs]


def call(method, *args):
    return Call((1, 0), method, args, {}, sized=True)


@pytest.fixture
def timed():
    hands = Hands()
    stopwatch = Stopwatch(hands)
    return hands, stopwatch, TimedPort(SlowPort(hands, {"generate": 5.0, "score": 2.0, "update": 3.0}), stopwatch)


def test_140_each_phase_has_its_own_time_though_one_waits_for_the_other(timed):
    hands, stopwatch, port = timed
    drawn = port.submit("ROLLOUT", 0, call("generate"))
    hands.now_s += 1.0  # the trainer does something of its own
    scored = port.submit("REWARD", 0, call("score", Rows((drawn,), 0, 1)))
    assert port.wait([scored], None) == [Outcome()]
    port.wait([port.submit("ACTOR", 0, call("update", drawn))], None)
    whole, spent = stopwatch.lap()
    assert spent == {"generation": 4.0, "reward": 2.0, "update": 3.0, "trainer": 1.0}
    assert whole == 10.0
    assert stopwatch.lap() == (0.0, {"trainer": 0.0})


def test_a_deadline_is_for_the_whole_wait(timed):
    hands, _, port = timed
    drawn = port.submit("ROLLOUT", 0, call("generate"))
    scored = port.submit("REWARD", 0, call("score", drawn))
    assert port.wait([scored], 6.0) == [Outcome(late=True)]
    assert hands.now_s == 6.0
    assert port.wait([scored], 6.0) == [Outcome()]
    assert hands.now_s == 7.0


def test_what_other_threads_wait_for_is_not_the_steps(timed):
    _, stopwatch, port = timed
    waiting = threading.Thread(target=lambda: port.wait([port.submit("ROLLOUT", 0, call("generate"))], None))
    waiting.start()
    waiting.join(10)
    assert stopwatch.lap() == (5.0, {"trainer": 5.0})


def test_140_the_phases_of_a_step_add_up_to_it(tmp_path):
    write_tiny_model(tmp_path / "model", hidden=32, layers=1, max_positions=32)
    data = {name: write_rows(tmp_path / "rows.jsonl", EXAMPLES) for name in ("train", "eval")}
    config = {"model": str(tmp_path / "model"), "data": data, "batch_size": 1, "engine": {"threads": 1}}
    stage("sft", tmp_path / "out", config | {"eval_every": 2}).run()
    rows = metrics_of(tmp_path / "out")
    assert len(rows) == 4
    for row in rows:
        phases = {name: value for name, value in row.items() if name.startswith("time/")}
        assert sum(phases.values()) == pytest.approx(row["step_s"], rel=0.05)
        assert phases["time/update"] > 0.0
        assert ("time/evaluation" in phases) == (row["step"] % 2 == 0)
        assert phases["time/commit"] > 0.0


def test_speed_by_hand():
    times = {"step_s": 4.0, "time/update": 2.0}
    told = Machine(1000, 1e9).figures(tokens=500, members=2, times=times)
    assert told == pytest.approx({"tokens_per_s": 125.0, "train_tflops": 1.5e-6, "mfu": 1.5e6 / 2e9})
    assert Machine(1000).figures(500, 2, times).keys() == {"tokens_per_s", "train_tflops"}
    assert Machine(0).figures(500, 2, times).keys() == {"tokens_per_s"}
    assert Machine(10).figures(500, 2, {"step_s": 1.0}).keys() == {"tokens_per_s"}


def test_a_machine_is_told_by_its_engine(tmp_path):
    write_tiny_model(tmp_path / "model", hidden=32, layers=1, max_positions=32)
    from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine

    engine = Fsdp2TrainEngine(tmp_path / "model", None)
    count = sum(tensor.numel() for _, tensor in engine.named_weights())
    assert Machine.of(engine, "cpu", "bf16") == Machine(count)
    assert Machine.of(object(), "cpu", "fp32") == Machine(0)
