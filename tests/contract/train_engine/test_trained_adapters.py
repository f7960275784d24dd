# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters on every engine that has them: trained alone, merged on their way out, silenced for a reference."""

import shutil
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, TrainSettings
from dlrover.python.rl.engine.api.registry import TRAIN_ENGINES, engine_class
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.api.weights import UP, Adapters, take_snapshot
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.training.adapters import ADAPTER
from tests.support.plain_engine import TEMPERATURE, assert_close, start_weights
from tests.support.train_cases import named, parameters
from tests.support.train_exercise import digest, make_engine, replica_of, saved, share, train, weights_of

PEFT_READS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
PeftModel = pytest.importorskip("peft", reason="the extra 'lora' is not installed").PeftModel

LORA = LoraSettings(rank=4, alpha=8.0)
ALL = "all-linear"
STEPS = 3


def divides_rows_only(case):
    few = case.world_size <= 2 and case.sizes == ParallelSizes()
    return case.engine == "deepspeed" or (case.engine == "fsdp2" and few)


def cases(world_size=2):
    slow, only = (lambda case: case.world_size > 1), (lambda case: divides_rows_only(case))
    return parameters(slow, lambda case: only(case) and case.world_size <= world_size)


def logprobs(engine, rank):
    return engine.evaluate(share(engine, rank, 0), TEMPERATURE).ragged("logprobs").values.copy()


def added_by_a_receiver(engine):
    base, factors = (take_snapshot(named, 0) for named in (engine.named_base_weights(), engine.named_adapters()))
    both = replace(base, adapters=Adapters(factors, engine.adapter_scale))
    return {name: both.tensor(name).numpy() for name in both.buffers}


def adapted(rank, world_size, port, case, path, folder):
    engine = make_engine(case, rank, port, path, lora=LORA)
    result = {"replica": replica_of(engine, rank), "start": weights_of(engine), "before": logprobs(engine, rank)}
    result["steps"] = train(engine, rank, range(STEPS))
    result["after"] = logprobs(engine, rank)
    with engine.without_adapters():
        result["without"] = logprobs(engine, rank)
    with pytest.raises(RuntimeError, match="inside"), engine.without_adapters():
        raise RuntimeError("inside")
    result["again"] = logprobs(engine, rank)
    result["weights"], result["bytes"] = weights_of(engine), engine.footprint()["weights"]
    result["added"] = added_by_a_receiver(engine)
    state = saved(engine.state_dict())
    result["state"] = {name: tensor.numpy() for name, tensor in state["model"].items()}
    engine.save(folder / "saved")
    engine.save_checkpoint(folder / "checkpoint")
    result["on"] = train(engine, rank, [STEPS]), digest(engine)
    engine.meta()
    engine.load_state_dict(state)
    result["restored"] = train(engine, rank, [STEPS]), digest(engine)
    engine.load_checkpoint(folder / "checkpoint")
    result["read"] = train(engine, rank, [STEPS]), digest(engine)
    engine.meta()
    rough = make_engine(case, rank, port, path, lora=LORA, precision="bf16", gradient_checkpointing=True)
    result["rough"] = train(rough, rank, range(STEPS)), weights_of(rough)
    rough.close()
    if find_spec("bitsandbytes"):
        result["packed"] = beside_4_bits(case, rank, port, path)
    engine.close()
    return result


def beside_4_bits(case, rank, port, path):
    engine = make_engine(case, rank, port, path, lora=replace(LORA, quantize_base="nf4"))
    result = {"bytes": engine.footprint()["weights"], "start": weights_of(engine)}
    result["steps"] = train(engine, rank, range(STEPS))
    result["weights"], state = weights_of(engine), saved(engine.state_dict())
    on = train(engine, rank, [STEPS]), digest(engine)
    engine.meta()
    engine.load_state_dict(state)
    result["same"] = (train(engine, rank, [STEPS]), digest(engine)) == on
    engine.close()
    return result


@pytest.fixture(scope="module")
def expected(ranks_of):
    return ranks_of(adapted, named("fsdp2-1"))[0]


@pytest.mark.feature(38, 145)
@pytest.mark.parametrize("case", cases(world_size=1))
def test_adapters_are_trained_alone_and_leave_merged(case, ranks_of, folder, model_path):
    (result,) = ranks_of(adapted, case)
    before, after, state = start_weights(model_path), result["weights"], result["state"]
    assert all(".lora_" in name for name in state if not name.startswith("master "))
    assert after.keys() == result["start"].keys() == before.keys()
    for name, tensor in after.items():
        assert np.array_equal(result["start"][name], before[name])
        up, down = (state.get(name.replace(".weight", f".lora_{kind}.default.weight")) for kind in "BA")
        assert (up is not None) == name.removesuffix(".weight").endswith("proj")
        product = 0.0 if up is None else 2.0 * up.reshape(-1, LORA.rank) @ down.reshape(LORA.rank, -1)
        assert np.allclose(tensor, before[name] + product, atol=1e-6), name
    merged = AutoModelForCausalLM.from_pretrained(folder / adapted.__name__ / case.name / "saved", dtype=torch.float32)
    for name, tensor in merged.named_parameters():
        assert np.array_equal(tensor.detach().numpy(), after[name])


def assert_peft_loads(kind, saved, model_path, **options):
    """Check that PEFT makes the merged model of the saved adapter and the model at ``model_path``."""
    ids = torch.arange(24).reshape(2, 12)
    merged = kind.from_pretrained(saved, dtype=torch.float32)(input_ids=ids).logits
    base = kind.from_pretrained(model_path, dtype=torch.float32, **options)
    plain = base(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(base, saved / ADAPTER)
    assert adapted.peft_config["default"].base_model_name_or_path == str(model_path)
    assert torch.allclose(adapted(input_ids=ids).logits, merged, atol=1e-5)
    assert not torch.allclose(plain, merged, atol=1e-3)


@PEFT_READS
@pytest.mark.parametrize("case", cases())
def test_saved_adapters_with_peft_are_the_merged_model(case, ranks_of, folder, model_path):
    ranks_of(adapted, case)
    assert_peft_loads(AutoModelForCausalLM, folder / adapted.__name__ / case.name / "saved", model_path)


HEADS = [
    (LORA, False, AutoModelForSequenceClassification),
    (replace(LORA, targets=ALL), True, AutoModelForTokenClassification),
    (replace(LORA, targets=("v_proj", "score")), False, AutoModelForSequenceClassification),
]


@PEFT_READS
@pytest.mark.parametrize(("lora", "bias", "kind"), HEADS)
def test_saved_adapters_of_a_scorer_have_its_head(lora, bias, kind, model_path, tmp_path):
    settings = TrainSettings(lora=lora, head="token", head_bias=bias)
    engine = Fsdp2TrainEngine(model_path, OptimizerConfig(lr=1e-2), settings)
    for _ in range(STEPS):
        engine.step(share(engine, 0, 0), rising)
    engine.save(tmp_path / "saved")
    assert_peft_loads(kind, tmp_path / "saved", model_path, num_labels=1, pad_token_id=0)


@pytest.mark.feature(145)
@pytest.mark.parametrize("case", cases())
def test_every_engine_takes_the_same_steps(case, ranks_of, expected):
    for rank in ranks_of(adapted, case):
        assert_close(rank["weights"], expected["weights"])
        assert_close(rank["rough"][1], expected["rough"][1], tolerance=1e-3)
        for steps, wanted in ((rank["steps"], expected["steps"]), (rank["rough"][0], expected["rough"][0])):
            for step, plain in zip(steps, wanted, strict=True):
                assert (step.loss, step.grad_norm) == pytest.approx((plain.loss, plain.grad_norm), rel=2e-3)


@pytest.mark.feature(145)
@pytest.mark.parametrize("case", cases())
def test_every_engine_takes_the_same_steps_beside_4_bits(case, ranks_of, expected):
    pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    wanted = expected["packed"]
    matrices = sum(tensor.size for name, tensor in wanted["start"].items() if name.endswith("proj.weight"))
    for whole, rank in ((rank["bytes"], rank["packed"]) for rank in ranks_of(adapted, case)):
        assert all(np.array_equal(tensor, wanted["start"][name]) for name, tensor in rank["start"].items())
        assert rank["start"].keys() == wanted["start"].keys()
        assert_close(rank["weights"], wanted["weights"])
        for step, plain in zip(rank["steps"], wanted["steps"], strict=True):
            assert (step.loss, step.grad_norm) == pytest.approx((plain.loss, plain.grad_norm), rel=2e-3)
        assert rank["same"], "after a restored state"
        spared = (4 - 0.5625) * matrices / (case.world_size if divides_base(case) else 1)
        assert whole - rank["bytes"] == pytest.approx(spared, rel=0.01)


def divides_base(case):
    return case.world_size > 1 and (case.engine == "fsdp2" or case.backend.get("zero_stage") == 3)


@pytest.mark.parametrize(
    ("target", "refusal"),
    [
        ("lm_head", r"'lm_head\.weight': it shares another layer"),
        ("q_prj", "'q_prj': no linear layer has this name; did you mean 'q_proj'"),
        ("embed_tokens", "'embed_tokens': no linear layer has this name"),
    ],
)
def test_layers_without_adapters_are_named(target, refusal, model_path):
    with pytest.raises(EngineError, match=f"no adapters can be added to {refusal}"):
        Fsdp2TrainEngine(model_path, None, TrainSettings(lora=LoraSettings(targets=("v_proj", target))))


def adapted_layers(module):
    return {name.rpartition(".lora_A")[0] for name, _ in module.named_parameters() if ".lora_A" in name}


def test_all_linear_is_every_layer_but_the_output(model_path):
    names, whole = (
        Fsdp2TrainEngine(model_path, None, TrainSettings(lora=LoraSettings(targets=targets)))._model.module
        for targets in (LoraSettings().targets, ALL)
    )
    assert adapted_layers(whole) == adapted_layers(names)
    settings = TrainSettings(lora=LoraSettings(targets=ALL), head="token")
    scoring = Fsdp2TrainEngine(model_path, None, settings)._model.module
    assert adapted_layers(scoring) == adapted_layers(names) != set()


def rising(scores, columns):
    return -scores.sum(), {}


@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "score")])
@pytest.mark.parametrize(
    "engine", ["fsdp2", pytest.param("deepspeed", marks=[pytest.mark.slow, pytest.mark.needs("deepspeed")])]
)
def test_a_new_head_is_trained_beside_the_adapters(engine, targets, model_path):
    make, settings = (
        engine_class(TRAIN_ENGINES, engine),
        TrainSettings(lora=replace(LORA, targets=targets), head="token"),
    )
    trained, other = (make(model_path, OptimizerConfig(lr=1e-2), settings) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in trained.named_weights()}
    adapters = dict(trained.named_adapters())
    assert len(adapters) == 2 * 2 + 2 * ("score" in targets)
    assert all((tensor == 0).all() == name.endswith(UP) for name, tensor in adapters.items())
    trained.step(share(trained, 0, 0), rising)
    after = dict(trained.named_weights())
    assert not torch.equal(after["score.weight"], before["score.weight"])
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert trained.adapter_scale is None, "alone, adapters would leave the trained head behind"
    other.load_state_dict(saved(trained.state_dict()))
    assert all(torch.equal(tensor, after[name]) for name, tensor in other.named_weights())


def trainer(path, lora=None):
    return Fsdp2TrainEngine(path, OptimizerConfig(), TrainSettings(lora=lora))


def load(engine, state, of_all_ranks):
    engine.load_states([state]) if of_all_ranks else engine.load_state_dict(state)


OTHERS = {
    "rank": ({"rank": 2}, "lora.rank is 2, not 4"),
    "alpha": ({"alpha": 4.0}, "lora.alpha is 4.0, not 8.0"),
    "targets": ({"targets": ("q_proj",)}, r"lora.targets is \['q_proj'\], not "),
}
one_and_all = pytest.mark.parametrize("of_all_ranks", [False, True], ids=["one rank's", "all ranks'"])


@one_and_all
@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_other_adapters_is_refused(other, of_all_ranks, model_path):
    changes, refusal = OTHERS[other]
    state, engine = trainer(model_path, LORA).state_dict(), trainer(model_path, replace(LORA, **changes))
    before = {name: tensor.clone() for name, tensor in engine.named_adapters()}
    with pytest.raises(WeightSyncError, match=f"the state is of other adapters: {refusal}"):
        load(engine, state, of_all_ranks)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.named_adapters())
    with pytest.raises(WeightSyncError, match="the state is of adapters, lora {'rank': 4, .* trains the whole model"):
        trainer(model_path).load_state_dict(state)


SAME = [
    (LoraSettings(), LoraSettings(targets=ALL)),
    (LoraSettings(targets=ALL), LoraSettings()),
    (LoraSettings(targets=("q_proj", "v_proj")), LoraSettings(targets=("v_proj", "q_proj", "q_proj"))),
]


@one_and_all
@pytest.mark.parametrize(("lora", "same"), SAME, ids=["a list and all", "all and a list", "another order"])
def test_targets_of_the_same_layers_have_the_same_states(lora, same, of_all_ranks, model_path):
    one, other = trainer(model_path, lora), trainer(model_path, same)
    train(one, 0, [0])
    load(other, saved(one.state_dict()), of_all_ranks)
    pairs = zip(one.named_adapters(), other.named_adapters(), strict=True)
    assert all(torch.equal(tensor, loaded) for (_, tensor), (_, loaded) in pairs)


def test_a_state_fits_a_copy_of_its_model_and_no_other(model_path, tmp_path):
    state = trainer(model_path, LORA).state_dict()
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(model_path, moved)
    shutil.copytree(model_path, other)
    trainer(moved, LORA).load_state_dict(state)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    refusal = f"other adapters: they were not trained on the weights of the model '{other}'"
    with pytest.raises(WeightSyncError, match=refusal):
        trainer(other, LORA).load_state_dict(state)


def test_a_state_without_adapter_settings_is_loaded(model_path):
    engine = trainer(model_path, LORA)
    engine.load_state_dict({key: part for key, part in engine.state_dict().items() if key != "lora"})


@pytest.mark.feature(145)
@pytest.mark.parametrize("case", cases())
def test_a_receiver_adds_adapters_to_the_merged_bits(case, ranks_of):
    for rank in ranks_of(adapted, case):
        assert rank["added"].keys() == rank["weights"].keys()
        assert all(np.array_equal(each, rank["weights"][name]) for name, each in rank["added"].items())


@pytest.mark.parametrize("case", cases())
def test_without_adapters_logprobs_are_the_first_ones(case, ranks_of):
    for rank in ranks_of(adapted, case):
        assert np.array_equal(rank["without"], rank["before"])
        assert not np.array_equal(rank["after"], rank["before"])
        assert np.array_equal(rank["again"], rank["after"]), "they are back"


@pytest.mark.parametrize("case", cases())
def test_a_state_and_a_checkpoint_continue_bit_for_bit(case, ranks_of):
    for rank in ranks_of(adapted, case):
        assert rank["restored"] == rank["on"]
        assert rank["read"] == rank["on"]
