# SPDX-License-Identifier: Apache-2.0
"""Engines driven by hand in this process: everything but several ranks."""

import contextlib
import gc
import pickle
import weakref
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from transformers import AutoModelForCausalLM

import dlrover.rl as rl
from dlrover.python.rl.common.errors import (
    EngineError,
    InvocationError,
    MissingExtra,
    SessionError,
    UnknownMethod,
    WeightSyncError,
)
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.module.engine import ModuleEngine
from tests.support.session_toys import EchoEngine, Policy, Reference, Silent, TwoLayers, Unlucky, start

GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
ROWS = [[1.0, 0.0, 2.0, -1.0], [0.5, 0.5, -0.5, 1.0], [2.0, 1.0, 0.0, 0.0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)


@pytest.fixture
def session():
    with rl.init(local=True, slots_per_node=4) as session:
        yield session


def empty(cls, *args):
    with rl.nn.empty_weights():
        return cls(*args)


@contextlib.contextmanager
def building(engine, **options):
    engine.build(**{"shards": 1, "data_parallel_size": 1} | options)
    try:
        yield engine
    finally:
        engine.release()


def policy(model, cls=Policy):
    return rl.TrainEngine(cls.from_pretrained(model))


# -- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.feature(1)
def test_a_second_init_is_a_clear_error(session):
    with pytest.raises(SessionError, match=r"init\(\) was called before: Session\(4 slots, 4 free; engines: none\)"):
        rl.init(local=True)
    assert session.free_slots == 4
    rl.shutdown()
    rl.shutdown()
    with pytest.raises(SessionError, match=r"call init\(\) first"):
        rl.InferenceEngine("somewhere", EchoEngine).build()


@pytest.mark.feature(13)
def test_a_users_class_runs_under_its_name(session):
    engine = rl.InferenceEngine("anything", executor="tests.support.session_toys:EchoEngine")
    engine.build(data_parallel_size=2, colour="red")
    (output,) = engine.generate("ab")
    assert output.outputs[0].token_ids == [97, 98]


@pytest.mark.feature(14)
def test_the_backend_is_chosen_by_name(session, model):
    for name in ("hf", "torch"):
        engine = rl.InferenceEngine(model, executor=name).build(data_parallel_size=1)
        (output,) = engine.generate("2+2=", GREEDY)
        assert len(output.outputs[0].token_ids) <= 12
        engine.release()
    with pytest.raises(EngineError, match="no engine is called 'torhc'; did you mean 'torch'"):
        rl.InferenceEngine(model, executor="torhc")
    with pytest.raises(EngineError, match="did you mean 'prefill_tokens'"):
        rl.InferenceEngine(model).build(prefil_tokens=3)
    for name, nearest in (("max_bach", "max_batch"), ("colocate", "colocate_with")):
        with pytest.raises(EngineError, match=rf"build\(\) has no argument '{name}'; did you mean '{nearest}'"):
            rl.InferenceEngine(model).build(**{name: 3})
    with pytest.raises(EngineError, match="'deepspeed' does not run modules"):
        rl.TrainEngine(empty(TwoLayers), executor="deepspeed")


@pytest.mark.feature(14)
@pytest.mark.skipif(find_spec("vllm") is not None, reason="'vllm' is installed here")
def test_a_missing_backend_is_named_before_anything_starts(model):
    with pytest.raises(MissingExtra, match=r"'vllm' is not installed: pip install 'dlrover-rl\[vllm\]'"):
        rl.InferenceEngine(model, executor="vllm")


@pytest.mark.feature(15)
def test_use_before_build_is_refused_by_name(session, model):
    engine = rl.InferenceEngine(model, name="sampler")
    for use in (lambda: engine.generate(["x"]), engine.cpu, engine.device, lambda: engine.slots):
        with pytest.raises(SessionError, match=r"SAMPLER is not built: call build\(\) before"):
            use()
    train = policy(model)
    with pytest.raises(SessionError, match="TRAIN is not built"):
        train.train_step([[1, 2]])
    with pytest.raises(SessionError, match="SAMPLER is not built"):
        rl.InferenceEngine(model).build(colocate_with=engine)


@pytest.mark.feature(16)
def test_a_second_build_is_refused_and_with_the_flag_it_does_not_leak(session):
    engine = rl.InferenceEngine("anything", EchoEngine).build(data_parallel_size=2)
    with pytest.raises(SessionError, match=r"INFERENCE_1 is built already, on slots \[0, 1\]: release\(\) it first"):
        engine.build()
    assert engine.build(ignore_rebuild_error=True) is engine
    assert (engine.slots, session.free_slots) == ((0, 1), 2)


@pytest.mark.feature(11)
def test_what_cannot_be_built_leaves_nothing(session, tmp_path):
    for _ in range(3):
        with pytest.raises(InvocationError, match="nowhere"):
            rl.InferenceEngine(tmp_path / "nowhere").build()
        assert session.free_slots == 4
    for _ in range(20):
        engine = rl.InferenceEngine("anything", EchoEngine).build()
        engine.release()
        engine.release()
    assert session.free_slots == 4


@pytest.mark.feature(11)
def test_an_engine_that_cannot_close_gives_its_slots_back(session):
    class Stuck(EchoEngine):
        def close(self):
            raise RuntimeError("no")

    engine = rl.InferenceEngine("anything", Stuck).build()
    with pytest.raises(RuntimeError, match="no"):
        engine.release()
    assert (session.free_slots, engine.built) == (4, False)


@pytest.mark.feature(7, 9, 10)
def test_where_an_engine_goes_is_the_scripts_choice(session):
    first = rl.InferenceEngine("anything", EchoEngine).build(tensor_parallel_size=2, data_parallel_size=1)
    assert (first.slots, session.free_slots) == ((0, 1), 2)
    second = rl.InferenceEngine("anything", EchoEngine).build(not_colocate_with=first)
    assert second.slots == (2, 3)
    third = rl.InferenceEngine("anything", EchoEngine).build(colocate_with=[first, second])
    assert third.slots == (0, 1, 2, 3)
    for wrong, why in (
        ({"not_colocate_with": [first, second]}, "only those on the requested nodes and apart from not_colocate_with"),
        ({"colocate_with": third, "not_colocate_with": first}, "cannot be shared and not be shared"),
        ({"nodes": ["10.0.0.9"]}, "no node '10.0.0.9'"),
    ):
        with pytest.raises(SessionError, match=why):
            rl.InferenceEngine("anything", EchoEngine).build(**wrong)
    assert repr(session) == "Session(4 slots, 0 free; engines: INFERENCE_1, INFERENCE_2, INFERENCE_3)"


def test_engines_have_names_of_their_own(session):
    first = rl.InferenceEngine("anything", EchoEngine, name="rollout").build(data_parallel_size=1)
    assert first.name == "ROLLOUT"
    with pytest.raises(SessionError, match="there is an engine 'ROLLOUT' already"):
        rl.InferenceEngine("anything", EchoEngine, name="Rollout").build(data_parallel_size=1)
    with pytest.raises(SessionError, match="'2fast' is no engine's name"):
        rl.InferenceEngine("anything", EchoEngine, name="2fast").build(data_parallel_size=1)
    assert session.free_slots == 3


def test_several_ranks_need_processes(session):
    with pytest.raises(SessionError, match="TRAIN_1 needs 2 processes"):
        rl.TrainEngine(empty(TwoLayers)).build(shards=2, data_parallel_size=2)
    assert session.free_slots == 4


# -- generating -------------------------------------------------------------------------------------------------------


@pytest.mark.feature(81)
def test_answers_come_in_the_order_of_the_prompts(session):
    engine = rl.InferenceEngine("anything", EchoEngine).build(data_parallel_size=3)
    prompts = [f"prompt {number}" for number in range(16)]
    outputs = engine.generate(prompts)
    assert [bytes(output.outputs[0].token_ids).decode() for output in outputs] == prompts
    assert [output.prompt for output in outputs] == prompts
    assert engine.generate([]) == []
    assert len(engine.generate(["a", "b"])) == 2


@pytest.mark.feature(43)
def test_an_image_reaches_the_engine_as_it_is(session):
    engine = rl.InferenceEngine("anything", EchoEngine).build(data_parallel_size=1)
    (output,) = engine.generate({"prompt": "see", "multi_modal_data": {"image": (1, 2)}})
    assert output.outputs[0].text.startswith("{'image': (1, 2)}")


@pytest.mark.feature(99)
def test_a_group_of_two_ranks_gives_one_answer(session):
    engine = rl.InferenceEngine("anything", EchoEngine).build(tensor_parallel_size=2)
    assert engine.groups == ((0, 1), (2, 3))
    outputs = engine.generate(["a", "b", "c"])
    assert [len(output.outputs) for output in outputs] == [1, 1, 1]
    assert " 2 " in outputs[0].outputs[0].text


def test_calls_draw_anew_unless_they_have_a_seed(session):
    engine = rl.InferenceEngine("anything", EchoEngine).build(data_parallel_size=2)
    texts = [engine.generate(["a", "b"], seed=seed)[1].outputs[0].text for seed in (None, None, 4, 4)]
    assert texts[0] != texts[1]
    assert texts[2] == texts[3]


@pytest.mark.feature(83)
def test_sampling_parameters_may_be_a_dict(session, model):
    engine = rl.InferenceEngine(model).build(data_parallel_size=1)
    first, second = (engine.generate(["12+13=", "a"], GREEDY) for _ in range(2))
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
    assert [len(o.outputs) for o in engine.generate(["a"], {"n": 3, "max_tokens": 2})] == [3]
    with pytest.raises(EngineError, match="did you mean 'temperature'"):
        engine.generate(["a"], {"temprature": 1.0})


# -- places -----------------------------------------------------------------------------------------------------------


def two_steps(engine, between):
    engine.train_step(ROWS)
    engine.optimizer_step()
    engine.train_step(ROWS)
    between(engine)
    engine.optimizer_step()
    return engine.state_dict()


def there_and_back(engine):
    before = engine.footprint()[0]
    assert set(before) == {"weights", "gradients", "optimizer"}
    engine.cpu()
    assert engine.footprint() == [{}]
    assert engine.device() == "cpu"
    with pytest.raises(InvocationError, match=r"is in host memory: call cuda\(\) before optimizer_step"):
        engine.optimizer_step()
    engine.cuda()
    assert engine.footprint()[0] == before


@pytest.mark.feature(17)
def test_after_cpu_the_device_holds_nothing_and_a_step_is_the_same(session):
    results = []
    for between in (lambda _: None, there_and_back):
        with building(rl.TrainEngine(empty(TwoLayers))) as engine:
            results.append(two_steps(engine, between))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


@pytest.mark.feature(18, 19)
def test_parts_of_an_inference_engine_come_back_one_by_one(session, model):
    engine = rl.InferenceEngine(model).build(data_parallel_size=1)
    expected = engine.generate(["12+13="], GREEDY)[0].outputs[0].token_ids
    with building(policy(model, Reference)) as train:
        engine.meta()
        engine.cuda("weights")
        train.p2p_weight_sync(engine)
        with pytest.raises(InvocationError, match="kv_cache"):
            engine.generate(["12+13="], GREEDY)
        engine.cuda("kv_cache")
        assert engine.generate(["12+13="], GREEDY)[0].outputs[0].token_ids == expected
        engine.cpu()
        engine.cuda("weights", "kv_cache")
        assert engine.generate(["12+13="], GREEDY)[0].outputs[0].token_ids == expected
        with pytest.raises(InvocationError, match="it has no key-value cache"):
            train.cuda("kv_cache")


def tensors_of(session, engine):
    """Weak references to all tensors that a train engine of this process has."""
    module = session.hosting.port.members[engine.name][0].host.workload._engine._made.module
    states = [value for state in module.optimizer.state.values() for value in state.values()]
    return [weakref.ref(tensor) for tensor in [*module.parameters(), *module.buffers(), *states]]


@pytest.mark.feature(20)
def test_after_meta_no_tensor_is_alive_and_a_sync_restores(session):
    with building(rl.TrainEngine(empty(TwoLayers))) as source, building(rl.TrainEngine(empty(TwoLayers))) as engine:
        for one in (source, engine):
            one.train_step(ROWS)
            one.optimizer_step()
        tensors = tensors_of(session, engine)
        assert len(tensors) == 3 + 2 + 3 * 3
        engine.meta()
        assert [ref() for ref in tensors if ref() is not None] == []
        assert engine.device() == "meta"
        assert engine.footprint() == [{}]
        with pytest.raises(
            InvocationError, match=r"released its weights: call cuda\(\) and sync weights before train_step"
        ):
            engine.train_step(ROWS)
        engine.cuda()
        assert engine.device() == "meta", "there is nothing yet"
        source.p2p_weight_sync(engine)
        assert engine.device() == "cuda"
        for name, tensor in source.state_dict().items():
            assert torch.equal(tensor, engine.state_dict()[name])
        assert engine.facts()[0]["hooks"] == 1
        engine.train_step(ROWS)
        engine.optimizer_step()


@pytest.mark.feature(20)
def test_an_inference_engine_can_be_released_too(session, model):
    engine = rl.InferenceEngine(model).build(data_parallel_size=1)
    expected = engine.generate(["12+13="], GREEDY)[0].outputs[0].token_ids
    held = engine.footprint()[0]["weights"]
    engine.meta()
    assert held > 30_000 * 4
    assert engine.footprint() == [{}]
    engine.cuda()
    with building(policy(model, Reference)) as train:
        train.p2p_weight_sync(engine)
    assert engine.generate(["12+13="], GREEDY)[0].outputs[0].token_ids == expected


@pytest.mark.feature(21)
def test_both_kinds_say_where_they_are(session, model):
    inference = rl.InferenceEngine(model).build(data_parallel_size=1)
    with building(policy(model)) as train:
        for engine in (inference, train):
            assert engine.device() == "cuda"
            engine.cpu()
            assert engine.device() == "cpu"
            engine.cuda()
            assert engine.device() == "cuda"
            engine.meta()
            assert engine.device() == "meta"


@pytest.mark.feature(22)
def test_caches_can_be_released_on_a_cpu(session, model):
    rl.InferenceEngine(model).build(data_parallel_size=1).release_memory_cache()
    with building(policy(model)) as train:
        train.release_memory_cache()


# -- a module's methods -----------------------------------------------------------------------------------------------


@pytest.mark.feature(24)
def test_methods_are_called_through_the_engine_and_typos_refused_at_once(session, model):
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
def test_what_a_method_raises_names_engine_rank_method_and_cause(session):
    with building(rl.TrainEngine(empty(TwoLayers), name="actor")) as engine:
        with pytest.raises(InvocationError, match=r"ACTOR\[0\]\.fail on \S+: ValueError: no luck") as caught:
            engine.fail("no luck")
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.node


@pytest.mark.feature(25)
def test_arguments_are_copied(session):
    with building(rl.TrainEngine(empty(TwoLayers))) as engine:
        given = [1, 2]
        (facts,) = engine.facts(0.5, given)
        assert facts["seen"] == [0.5, [1, 2]]


@pytest.mark.feature(24)
def test_whatever_a_method_is_called_it_is_the_modules(session):
    names = ("send", "take", "open", "offer", "receive", "publish", "place", "call", "users_method", "in_training")
    with building(rl.TrainEngine(empty(Unlucky))) as engine:
        for name in names:
            assert getattr(engine, name)(name, 1) == [["send", name, 1]]
        assert engine.device() == "cuda"


def test_methods_that_the_engine_has_itself_are_refused():
    class Saves(TwoLayers):
        def save(self):
            """Hidden by the engine's own."""

        def close(self):
            """Hidden by the process's."""

    with pytest.raises(EngineError, match="Saves has methods that the engine has itself: rename close, save"):
        rl.TrainEngine(empty(Saves))


# -- modules without weights ------------------------------------------------------------------------------------------


@pytest.mark.feature(33)
def test_the_hook_runs_once_when_the_weights_are_those_of_the_checkpoint(session, model):
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
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(seen[name], tensor.float()), name


@pytest.mark.feature(34)
def test_a_module_with_weights_is_refused(model):
    with pytest.raises(EngineError, match="TwoLayers has weights already"):
        rl.TrainEngine(TwoLayers())
    with pytest.raises(EngineError, match="Linear is not a TrainModule"):
        rl.TrainEngine(torch.nn.Linear(1, 1))
    with pytest.raises(EngineError, match="not a Hugging Face model"):
        TwoLayers.from_pretrained(model)


@pytest.mark.feature(34)
def test_a_module_without_weights_is_small(model):
    module = Policy.from_pretrained(model)
    assert sum(parameter.numel() for parameter in module.parameters()) > 30_000
    assert all(parameter.is_meta for parameter in module.parameters())
    assert len(pickle.dumps(module)) < 100_000
    assert len(rl.TrainEngine(module)._payload) < 100_000


@pytest.mark.feature(34)
@pytest.mark.parametrize("context", ["empty_weights", "meta device", "accelerate", "none"])
def test_there_are_several_ways_to_build_one(model, context):
    inside = contextlib.nullcontext()
    if context == "accelerate":
        inside = pytest.importorskip("accelerate").init_empty_weights()
    elif context == "meta device":
        inside = torch.device("meta")
    elif context == "empty_weights":
        inside = rl.nn.empty_weights()
    with inside:
        module = Policy.from_pretrained(model)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())
    with rl.init(local=True), building(rl.TrainEngine(module)) as engine:
        assert engine.train_step([[1, 2, 3]])[0] > 0


@pytest.mark.feature(35)
def test_rotary_frequencies_are_those_of_a_normal_load(session, model):
    expected = AutoModelForCausalLM.from_pretrained(model).model.rotary_emb.inv_freq.tolist()
    with building(policy(model)) as engine:
        assert engine.rotary() == [expected]


@pytest.mark.feature(36)
def test_weights_come_from_a_dict_or_a_function(session):
    class Drawn(TwoLayers):
        def materialization_source(self):
            return lambda name, shape: torch.full(shape, float(len(name)))

    for cls, expected in ((TwoLayers, start()), (Drawn, None)):
        with building(rl.TrainEngine(empty(cls))) as engine:
            for name, tensor in engine.state_dict().items():
                wanted = expected[name] if expected else torch.full(tensor.shape, float(len(name)))
                assert torch.equal(tensor, wanted), name
            assert engine.facts()[0]["scale"] == 2.0


@pytest.mark.feature(37)
def test_a_checkpoint_with_other_names_is_read_and_a_missing_one_named(session):
    class Renamed(TwoLayers):
        def materialization_source(self):
            return {f"old.{name}": tensor for name, tensor in start().items()}

        def source_name(self, name):
            return f"old.{name}"

    class Lost(TwoLayers):
        def materialization_source(self):
            return {name: tensor for name, tensor in start().items() if name != "second.weight"}

    class Made(Lost):
        def initial_weight(self, name, shape):
            return torch.ones(shape) if name == "second.weight" else None

    with building(rl.TrainEngine(empty(Renamed))) as engine:
        assert torch.equal(engine.state_dict()["first.weight"], start()["first.weight"])
    hooks = len(torch_optimizer._global_optimizer_post_hooks)
    with pytest.raises(InvocationError, match=r"lacks second\.weight"):
        rl.TrainEngine(empty(Lost)).build(shards=1, data_parallel_size=1)
    gc.collect()
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks, "an engine that was not made is still told"
    with building(rl.TrainEngine(empty(Made))) as engine:
        assert engine.state_dict()["second.weight"].tolist() == [[1.0] * 8]


@pytest.mark.feature(38)
def test_an_export_hook_merges_adapters(session):
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
def test_a_reference_computes_logprobs_and_holds_no_optimizer(session, model):
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    row = [72, 101, 108, 108, 111]
    with torch.no_grad():
        logits = plain(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    with building(policy(model, Reference)) as engine:
        ((found,),) = engine.logprobs([row])
        assert engine.optimizers() == [[]]
        assert set(engine.footprint()[0]) == {"weights"}
    assert torch.allclose(torch.tensor(found), expected, atol=1e-5)


@pytest.mark.feature(40)
def test_dropout_changes_the_output_in_training_mode_only(session):
    with building(rl.TrainEngine(empty(TwoLayers))) as engine:
        assert engine.training
        assert engine.noisy(ROWS) != engine.noisy(ROWS)
        engine.eval()
        assert not engine.training
        assert engine.facts()[0]["training"] is False
        assert engine.noisy(ROWS) == engine.noisy(ROWS)
        engine.train()
        assert engine.training


@pytest.mark.feature(41)
def test_four_small_steps_are_one_big_one(session):
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for pieces in (1, 4):
        with building(rl.TrainEngine(empty(TwoLayers))) as engine:
            for piece in range(pieces):
                engine.train_step(rows[piece * 8 // pieces : (piece + 1) * 8 // pieces], pieces)
            engine.optimizer_step()
            found.append(engine.state_dict())
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], atol=1e-6), name


@pytest.mark.feature(42)
def test_a_module_of_no_library_learns(session):
    with building(rl.TrainEngine(empty(TwoLayers))) as engine:
        losses = []
        for _ in range(30):
            losses += engine.train_step(rl.NeedParallel(ROWS))
            engine.optimizer_step()
    assert losses[-1] < 0.2 * losses[0]


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.feature(100)
def test_after_a_step_and_a_sync_the_text_is_that_of_the_saved_weights(session, model, tmp_path):
    engine = rl.InferenceEngine(model).build(data_parallel_size=1)
    before = engine.generate(["12+13=", "hello"], GREEDY)
    with building(policy(model)) as train:
        for _ in range(3):
            train.train_step([[49, 50, 43, 49, 51, 61, 50, 53], [104, 101, 108, 108, 111]])
            train.optimizer_step()
        report = train.p2p_weight_sync(engine)
        assert report.stamp.version == 3
        after = engine.generate(["12+13=", "hello"], GREEDY)
        train.save(tmp_path / "saved")
    fresh = rl.InferenceEngine(tmp_path / "saved").build(data_parallel_size=1)
    expected = fresh.generate(["12+13=", "hello"], GREEDY)
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in (before, after, expected)]
    assert tokens[0] != tokens[1] == tokens[2]
    assert after[0].outputs[0].version == 3


@pytest.mark.feature(102)
@pytest.mark.parametrize("way", ["shared memory", "disk"])
def test_the_weights_are_the_same_whatever_way_they_take(session, tmp_path, way):
    with building(rl.TrainEngine(empty(TwoLayers))) as actor, building(rl.TrainEngine(empty(Silent))) as reference:
        actor.train_step(ROWS)
        actor.optimizer_step()
        folder = tmp_path if way == "disk" else None
        report = actor.p2p_weight_sync(reference, way=way, folder=folder)
        assert (report.way, report.stamp.version) == (way, 1)
        for name, tensor in actor.state_dict().items():
            assert torch.equal(tensor, reference.state_dict()[name])
        assert actor.p2p_weight_sync(reference).way == "shared memory"


@pytest.mark.feature(104)
@pytest.mark.parametrize("way", ["shared memory", "disk"])
def test_a_receiver_with_other_weights_than_the_sender_says_is_an_error(session, monkeypatch, tmp_path, way):
    with building(rl.TrainEngine(empty(TwoLayers))) as actor, building(rl.TrainEngine(empty(Silent))) as reference:
        receive = ModuleEngine.receive

        def another(engine, weights):
            return replace(receive(engine, weights), version=7)

        monkeypatch.setattr(ModuleEngine, "receive", another)
        with pytest.raises(WeightSyncError, match=r"has other weights than TRAIN_1 sent, version 0 .*version 7"):
            actor.p2p_weight_sync(reference, way=way, folder=tmp_path if way == "disk" else None)


@pytest.mark.feature(103)
def test_a_renamed_parameter_is_an_error_that_lists_names(session, model):
    class Renaming(Reference):
        def export_weight(self, name, tensor, whole):
            return name.replace("q_proj", "query"), tensor

    engine = rl.InferenceEngine(model).build(data_parallel_size=1)
    before = engine.generate(["12+13="], GREEDY)[0].outputs[0].token_ids
    with building(policy(model, Renaming)) as train:
        with pytest.raises(InvocationError, match=r"layers\.0\.self_attn\.query\.weight") as caught:
            train.p2p_weight_sync(engine)
        assert isinstance(caught.value.__cause__, WeightSyncError)
        assert "q_proj.weight' is missing" in str(caught.value)
    assert engine.generate(["12+13="], GREEDY)[0].outputs[0].token_ids == before


@pytest.mark.feature(107)
def test_a_reference_follows_its_actor_and_a_trained_one_does_not(session):
    with building(rl.TrainEngine(empty(TwoLayers))) as actor, building(rl.TrainEngine(empty(Silent))) as reference:
        actor.train_step(ROWS)
        actor.optimizer_step()
        report = actor.p2p_weight_sync(reference)
        assert report.stamp.version == 1
        for name, tensor in actor.state_dict().items():
            assert torch.equal(tensor, reference.state_dict()[name])
        with pytest.raises(InvocationError, match="has an optimizer"):
            reference.p2p_weight_sync(actor)
