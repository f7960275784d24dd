# SPDX-License-Identifier: Apache-2.0
"""Engines driven by hand in this process: everything but several ranks."""

import contextlib
import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from transformers import AutoModelForCausalLM

import dlrover.rl as rl
from dlrover.python.rl.common.errors import EngineError, InvocationError, SessionError, UnknownMethod, WeightSyncError
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.module.engine import ModuleEngine
from tests.support.session_toys import EchoEngine, Policy, Reference, Silent, TwoLayers, Unlucky, empty, start

GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
ROWS = [[1.0, 0.0, 2.0, -1.0], [0.5, 0.5, -0.5, 1.0], [2.0, 1.0, 0.0, 0.0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)


@pytest.fixture
def session():
    with rl.init(local=True, slots_per_node=4) as session:
        yield session


@contextlib.contextmanager
def building(engine, **options):
    engine.build(**{"shards": 1, "data_parallel_size": 1} | options)
    try:
        yield engine
    finally:
        engine.release()


def policy(model, cls=Policy):
    return rl.TrainEngine(cls.from_pretrained(model))


def inference(model):
    return rl.InferenceEngine(model).build(data_parallel_size=1)


def echo(name=None, **sizes):
    return rl.InferenceEngine("anything", EchoEngine, name=name).build(**sizes)


def take_step(engine):
    engine.train_step(ROWS)
    engine.optimizer_step()


def assert_equal(states, expected):
    assert states.keys() == expected.keys()
    assert [name for name, tensor in states.items() if not torch.equal(tensor, expected[name])] == []


@pytest.fixture
def layers(session):
    """A train engine of a module of no library, :class:`TwoLayers`."""
    with building(rl.TrainEngine(empty(TwoLayers))) as engine:
        yield engine


@pytest.fixture
def reference(session):
    """An engine like ``layers``, which has no optimizer."""
    with building(rl.TrainEngine(empty(Silent))) as engine:
        yield engine


@pytest.mark.feature(1)
def test_second_init_is_refused(session):
    with pytest.raises(SessionError, match=r"init\(\) was called before: Session\(4 slots, 4 free; engines: none\)"):
        rl.init(local=True)
    assert session.free_slots == 4
    rl.shutdown()
    rl.shutdown()
    with pytest.raises(SessionError, match=r"call init\(\) first"):
        rl.InferenceEngine("somewhere", EchoEngine).build()


@pytest.mark.feature(13)
def test_own_engine_class_runs_under_its_name(session):
    engine = rl.InferenceEngine("anything", executor="tests.support.session_toys:EchoEngine")
    engine.build(data_parallel_size=2, colour="red")
    (output,) = engine.generate("ab")
    assert output.outputs[0].token_ids == [97, 98]


@pytest.mark.feature(14)
@pytest.mark.parametrize("name", ["hf", "torch"])
def test_backend_is_chosen_by_name(session, model, name):
    engine = rl.InferenceEngine(model, executor=name).build(data_parallel_size=1)
    assert len(engine.generate(["12+13="], GREEDY)[0].outputs[0].token_ids) <= 12


@pytest.mark.feature(14, 34)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: rl.InferenceEngine(model, executor="torhc"), "is called 'torhc'; did you mean 'torch'"),
        (lambda model: rl.InferenceEngine(model).build(prefil_tokens=3), "did you mean 'prefill_tokens'"),
        (lambda model: rl.InferenceEngine(model).build(max_bach=3), r"build\(\) has no .*did you mean 'max_batch'"),
        (lambda model: rl.InferenceEngine(model).build(colocate=3), "'colocate'; did you mean 'colocate_with'"),
        (lambda model: rl.TrainEngine(empty(TwoLayers), executor="deepspeed"), "'deepspeed' does not run modules"),
        (lambda model: rl.TrainEngine(TwoLayers()), "TwoLayers has weights already"),
        (lambda model: rl.TrainEngine(torch.nn.Linear(1, 1)), "Linear is not a TrainModule"),
        (TwoLayers.from_pretrained, "not a Hugging Face model"),
        (lambda model: rl.TrainEngine(empty(Saves)), "Saves has methods .* the engine has itself: rename close, save"),
        (lambda model: rl.TrainEngine(empty(TwoLayers)).build(shards=2, data_parallel_size=2), "needs 2 processes"),
    ],
)
def test_impossible_engine_is_refused(session, model, make, message):
    with pytest.raises((EngineError, SessionError), match=message):
        make(model)
    assert session.free_slots == 4


class Saves(TwoLayers):
    """Has methods whose names the engine and the process use too."""

    def save(self):
        pass

    close = save


@pytest.mark.feature(15)
def test_use_before_build_is_refused(session, model):
    engine = rl.InferenceEngine(model, name="sampler")
    uses = (lambda: engine.generate(["x"]), engine.cpu, engine.device, lambda: engine.slots)
    for use in (*uses, lambda: rl.InferenceEngine(model).build(colocate_with=engine)):
        with pytest.raises(SessionError, match=r"SAMPLER is not built: call build\(\) before"):
            use()
    with pytest.raises(SessionError, match="TRAIN is not built"):
        policy(model).train_step([[1, 2]])


@pytest.mark.feature(16)
def test_second_build_is_refused_or_ignored(session):
    engine = echo(data_parallel_size=2)
    with pytest.raises(SessionError, match=r"INFERENCE_1 is built already, on slots \[0, 1\]: release\(\) it first"):
        engine.build()
    assert engine.build(ignore_rebuild_error=True) is engine
    assert (engine.slots, session.free_slots) == ((0, 1), 2)


@pytest.mark.feature(11)
def test_failed_build_leaves_nothing(session, tmp_path):
    for _ in range(3):
        with pytest.raises(InvocationError, match="nowhere"):
            rl.InferenceEngine(tmp_path / "nowhere").build()
        assert session.free_slots == 4
    for _ in range(20):
        engine = echo()
        for _ in range(2):
            engine.release()
    assert session.free_slots == 4


@pytest.mark.feature(11)
def test_failing_close_gives_its_slots_back(session):
    class Stuck(EchoEngine):
        def close(self):
            raise RuntimeError("no")

    engine = rl.InferenceEngine("anything", Stuck).build()
    with pytest.raises(RuntimeError, match="no"):
        engine.release()
    assert (session.free_slots, engine.built) == (4, False)


@pytest.mark.feature(7, 9, 10)
def test_script_chooses_the_slots_of_an_engine(session):
    first = echo(tensor_parallel_size=2, data_parallel_size=1)
    assert (first.slots, session.free_slots) == ((0, 1), 2)
    second = echo(not_colocate_with=first)
    assert second.slots == (2, 3)
    third = echo(colocate_with=[first, second])
    assert third.slots == (0, 1, 2, 3)
    with pytest.raises(SessionError, match="are in both colocate_with and not_"):
        echo(colocate_with=third, not_colocate_with=first)
    with pytest.raises(SessionError, match="no node '10.0.0.9'"):
        echo(nodes=["10.0.0.9"])
    assert repr(session) == "Session(4 slots, 0 free; engines: INFERENCE_1, INFERENCE_2, INFERENCE_3)"


def test_engine_names_are_unique(session):
    first = echo("rollout", data_parallel_size=1)
    assert first.name == "ROLLOUT"
    with pytest.raises(SessionError, match="there is an engine 'ROLLOUT' already"):
        echo("Rollout", data_parallel_size=1)
    with pytest.raises(SessionError, match="'2fast' is no engine's name"):
        echo("2fast", data_parallel_size=1)
    assert session.free_slots == 3


@pytest.mark.feature(81, 99)
def test_answers_are_in_the_order_of_the_prompts(session):
    engine = echo(data_parallel_size=3)
    prompts = [f"prompt {number}" for number in range(16)]
    outputs = engine.generate(prompts)
    assert [bytes(output.outputs[0].token_ids).decode() for output in outputs] == prompts
    assert [output.prompt for output in outputs] == prompts
    assert engine.generate([]) == []
    assert len(engine.generate(["a", "b"])) == 2
    engine.release()
    engine = echo(tensor_parallel_size=2)
    assert engine.groups == ((0, 1), (2, 3))
    assert [" 2 " in output.outputs[0].text for output in engine.generate(["a", "b", "c"])] == [True] * 3


def test_calls_draw_differently_without_a_seed(session):
    engine = echo(data_parallel_size=2)
    first, second, *same = (engine.generate(["a", "b"], seed=seed)[1].outputs[0].text for seed in (None, None, 4, 4))
    assert first != second and same[0] == same[1]


@pytest.mark.feature(17)
def test_cpu_frees_the_device_and_changes_no_step(session, layers):
    with building(rl.TrainEngine(empty(TwoLayers))) as engine:
        for each in (layers, engine):
            take_step(each)
            each.train_step(ROWS)
        before = engine.footprint()[0]
        assert set(before) == {"weights", "gradients", "optimizer"}
        engine.cpu()
        assert (engine.footprint(), engine.device()) == ([{}], "cpu")
        with pytest.raises(InvocationError, match=r"is in host memory: call cuda\(\) before optimizer_step"):
            engine.optimizer_step()
        engine.cuda()
        assert engine.footprint()[0] == before
        for each in (layers, engine):
            each.optimizer_step()
        assert_equal(layers.state_dict(), engine.state_dict())


@pytest.mark.feature(18, 19)
def test_parts_of_an_inference_engine_come_back_singly(session, model):
    engine = inference(model)
    (before,) = engine.generate(["12+13="], GREEDY)
    engine.cpu()
    engine.cuda("weights")
    with pytest.raises(InvocationError, match="kv_cache"):
        engine.generate(["12+13="], GREEDY)
    engine.cuda("kv_cache")
    assert engine.generate(["12+13="], GREEDY)[0].outputs[0].token_ids == before.outputs[0].token_ids


def tensors_of(session, engine):
    """Return weak references to all tensors that a train engine of this process has."""
    module = session.hosting.port.members[engine.name][0].host.workload._engine._made.module
    states = [value for state in module.optimizer.state.values() for value in state.values()]
    return [weakref.ref(tensor) for tensor in [*module.parameters(), *module.buffers(), *states]]


@pytest.mark.feature(20)
def test_meta_leaves_no_tensor_and_a_sync_restores(session, layers):
    with building(rl.TrainEngine(empty(TwoLayers))) as engine:
        for each in (layers, engine):
            take_step(each)
        tensors = tensors_of(session, engine)
        assert len(tensors) == 3 + 2 + 3 * 3
        engine.meta()
        assert [ref() for ref in tensors if ref() is not None] == []
        assert (engine.device(), engine.footprint()) == ("meta", [{}])
        message = r"released its weights: call cuda\(\) and sync weights before train_step"
        with pytest.raises(InvocationError, match=message):
            engine.train_step(ROWS)
        engine.cuda()
        assert engine.device() == "meta", "there is nothing yet"
        layers.p2p_weight_sync(engine)
        assert engine.device() == "cuda"
        assert_equal(layers.state_dict(), engine.state_dict())
        assert engine.facts()[0]["hooks"] == 1
        take_step(engine)


@pytest.mark.feature(21, 22)
def test_engine_gives_its_place_and_releases_caches(session, model):
    with building(policy(model)) as train:
        for engine in (inference(model), train):
            engine.release_memory_cache()
            assert engine.device() == "cuda"
            for place in ("cpu", "cuda", "meta"):
                getattr(engine, place)()
                assert engine.device() == place


@pytest.mark.feature(24)
def test_methods_are_called_through_the_engine(session, model):
    engine = policy(model)
    with pytest.raises(UnknownMethod, match="Policy has no method 'trian_step'; did you mean 'train_step'"):
        _ = engine.trian_step
    with building(engine):
        (loss,) = engine.train_step([[1, 2, 3]])
        assert loss > 0
        assert engine.train_step.options(merge="rank0")([[1, 2, 3]]) == loss
        with pytest.raises(SessionError, match="did you mean 'mean'"):
            engine.train_step.options(merge="maen")


@pytest.mark.feature(24)
def test_module_method_wins_over_internal_names(session):
    names = ("send", "take", "open", "offer", "receive", "publish", "place", "call", "users_method", "in_training")
    with building(rl.TrainEngine(empty(Unlucky))) as engine:
        for name in names:
            assert getattr(engine, name)(name, 1) == [["send", name, 1]]
        assert engine.device() == "cuda"


@pytest.mark.feature(33)
def test_hook_runs_once_with_weights_of_the_checkpoint(session, model):
    class Watching(Policy):
        def on_weights_materialized(self):
            super().on_weights_materialized()
            self.seen = {name: tensor.clone() for name, tensor in self.state_dict().items()}
            self.times = getattr(self, "times", 0) + 1

        def watched(self):
            optimized = {p for group in self.optimizer.param_groups for p in group["params"]}
            return self.seen, self.times, optimized == set(self.parameters())

    expected = AutoModelForCausalLM.from_pretrained(model).state_dict()
    with building(rl.TrainEngine(Watching.from_pretrained(model))) as engine:
        ((seen, times, optimized),) = engine.watched()
    assert (times, optimized) == (1, True)
    assert_equal(seen, {name: tensor.float() for name, tensor in expected.items()})


@pytest.mark.feature(34)
def test_module_without_weights_is_small(model):
    module = Policy.from_pretrained(model)
    assert sum(parameter.numel() for parameter in module.parameters()) > 30_000
    assert all(parameter.is_meta for parameter in module.parameters())
    assert len(pickle.dumps(module)) < 100_000
    assert len(rl.TrainEngine(module)._payload) < 100_000


@pytest.mark.feature(34)
@pytest.mark.parametrize("context", ["empty_weights", "meta device", "accelerate", "none"])
def test_module_is_built_without_weights_in_any_context(model, context):
    contexts = {
        "empty_weights": rl.nn.empty_weights,
        "meta device": lambda: torch.device("meta"),
        "accelerate": lambda: pytest.importorskip("accelerate").init_empty_weights(),
        "none": contextlib.nullcontext,
    }
    with contexts[context]():
        module = Policy.from_pretrained(model)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())
    with rl.init(local=True), building(rl.TrainEngine(module)) as engine:
        assert engine.train_step([[1, 2, 3]])[0] > 0


@pytest.mark.feature(36, 37)
def test_missing_weight_is_named_and_can_be_initialized(session):
    class Lost(TwoLayers):
        def materialization_source(self):
            return {f"old.{name}": tensor for name, tensor in start().items() if name != "second.weight"}

        def source_name(self, name):
            return f"old.{name}"

    class Initialized(Lost):
        def initial_weight(self, name, shape):
            return torch.ones(shape) if name == "second.weight" else None

    hooks = len(torch_optimizer._global_optimizer_post_hooks)
    with pytest.raises(InvocationError, match=r"lacks .*second\.weight"):
        rl.TrainEngine(empty(Lost)).build(shards=1, data_parallel_size=1)
    gc.collect()
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks, "an engine that was not made has a hook"
    with building(rl.TrainEngine(empty(Initialized))) as engine:
        assert_equal(engine.state_dict(), {**start(), "second.weight": torch.ones(1, 8)})


@pytest.mark.feature(38)
def test_export_hook_merges_adapters(session):
    class Adapted(TwoLayers):
        def __init__(self):
            super().__init__()
            self.down = torch.nn.Parameter(torch.empty(2, 4))
            self.up = torch.nn.Parameter(torch.empty(8, 2))

        def initial_weight(self, name, shape):
            return torch.full(shape, 0.5) if name in ("up", "down") else None

        def export_weight(self, name, tensor, whole):
            if name in ("up", "down"):
                return None
            return name, tensor + whole("up") @ whole("down") if name == "first.weight" else tensor

    with building(rl.TrainEngine(empty(Adapted))) as engine:
        exported = engine.state_dict()
    assert exported.keys() == start().keys()
    assert torch.equal(exported["first.weight"], start()["first.weight"] + torch.full((8, 4), 0.5))


@pytest.mark.feature(39)
def test_reference_has_logprobs_and_no_optimizer(session, model):
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    row = [72, 101, 108, 108, 111]
    with torch.no_grad():
        logits = plain(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    with building(policy(model, Reference)) as engine:
        ((logprobs,),) = engine.logprobs([row])
        assert engine.optimizers() == [[]]
        assert set(engine.footprint()[0]) == {"weights"}
    assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-5)


@pytest.mark.feature(40)
def test_dropout_is_active_in_training_mode_only(layers):
    assert layers.training
    assert layers.noisy(ROWS) != layers.noisy(ROWS)
    layers.eval()
    assert (layers.training, layers.facts()[0]["training"]) == (False, False)
    assert layers.noisy(ROWS) == layers.noisy(ROWS)
    layers.train()
    assert layers.training


@pytest.mark.feature(42)
def test_module_of_no_library_learns(layers):
    losses = []
    for _ in range(30):
        losses += layers.train_step(rl.NeedParallel(ROWS))
        layers.optimizer_step()
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.feature(100)
def test_synced_engine_generates_as_the_saved_weights(session, model, tmp_path):
    engine = inference(model)
    before = engine.generate(["12+13=", "hello"], GREEDY)
    with building(policy(model)) as train:
        for _ in range(3):
            train.train_step([[49, 50, 43, 49, 51, 61, 50, 53], [104, 101, 108, 108, 111]])
            train.optimizer_step()
        report = train.p2p_weight_sync(engine)
        assert report.stamp.version == 3
        after = engine.generate(["12+13=", "hello"], GREEDY)
        train.save(tmp_path / "saved")
    expected = inference(tmp_path / "saved").generate(["12+13=", "hello"], GREEDY)
    tokens = [[each.outputs[0].token_ids for each in outputs] for outputs in (before, after, expected)]
    assert tokens[0] != tokens[1] == tokens[2]
    assert after[0].outputs[0].version == 3


@pytest.mark.feature(102, 107)
@pytest.mark.parametrize("way", ["shared memory", "device memory"])
def test_reference_gets_the_actors_weights_by_any_way(layers, reference, way):
    take_step(layers)
    report = layers.p2p_weight_sync(reference, way=way)
    assert (report.way, report.stamp.version) == (way, 1)
    assert_equal(layers.state_dict(), reference.state_dict())
    assert layers.p2p_weight_sync(reference).way == "shared memory"
    with pytest.raises(InvocationError, match="has an optimizer"):
        reference.p2p_weight_sync(layers)


@pytest.mark.feature(104)
@pytest.mark.parametrize("way", ["shared memory", "device memory"])
def test_other_weights_than_were_sent_are_an_error(layers, reference, monkeypatch, way):
    receive = ModuleEngine.receive
    monkeypatch.setattr(ModuleEngine, "receive", lambda *arguments: replace(receive(*arguments), version=7))
    with pytest.raises(WeightSyncError, match=r"has other weights than TRAIN_1 sent, version 0 .*version 7"):
        layers.p2p_weight_sync(reference, way=way)
