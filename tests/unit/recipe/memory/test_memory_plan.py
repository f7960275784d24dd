# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of device memory: against what engines hold, against a measured step, and what it refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.api.base import LoraSettings, OptimizerConfig, TrainSettings
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.model.model_shape import ModelShape, shape_of
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.model_files import device_bytes
from dlrover.python.rl.recipe.memory import plan as memory_plan
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse, bytes_of, host_bytes, size_passes
from dlrover.python.rl.recipe.memory.plan import MemoryPlan
from tests.support.half_billion import SIZES

ON_CUDA = EngineConfig(device="cuda", precision="bf16", rollout="torch")
ACTOR, ROLLOUT, REFERENCE = RLRoleType.ACTOR, RLRoleType.ROLLOUT, RLRoleType.REFERENCE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=64, layers=3, max_positions=64))


@pytest.fixture(scope="module")
def small():
    """The shape of Qwen2.5-0.5B."""
    return ModelShape.of(AutoConfig.for_model("qwen2", **SIZES))


@pytest.fixture(scope="module")
def large():
    """The shape of Qwen2.5-72B."""
    sizes = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64}
    others = {"num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False}
    return ModelShape.of(AutoConfig.for_model("qwen2", **{**SIZES, **sizes, **others}))


def test_a_shape_is_that_of_the_model(small):
    assert small.parameters == 494_032_768
    assert (small.layers, small.hidden, small.queries, small.keys, small.vocabulary) == (24, 896, 896, 128, 151936)
    assert small.tensor == 151936 * 896
    assert small.parameters == 24 * small.layer + small.tensor + 896


def test_of_experts_those_count_that_a_token_passes():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 100}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, num_experts=8, num_experts_per_tok=2)
    assert ModelShape.of(config).intermediate == 2 * 16


def test_a_shape_comes_from_a_folder_or_from_a_configuration_beside_the_job(model, tmp_path):
    assert shape_of(model) == shape_of("some/hub-name", f"{model}/config.json") == shape_of("no-name", model)
    assert shape_of("some/hub-name") is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert shape_of(str(tmp_path)) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [OptimizerConfig(lr=1e-3), OptimizerConfig(name="sgd", lr=1e-3)])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4), LoraSettings(rank=4, quantize_base="nf4")])
@pytest.mark.parametrize("on_host", [False, True])
def test_weights_and_optimizer_are_what_an_engine_holds(model, precision, optimizer, lora, on_host):
    if lora is not None:
        pytest.importorskip("peft", reason="the extra 'lora' is not installed")
        if lora.quantize_base is not None:
            pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    options = {"optimizer_on_host": on_host}
    engine = Fsdp2TrainEngine(model, optimizer, TrainSettings(precision=precision, lora=lora, backend=options))
    use = ModelUse("trained", model, optimizer=optimizer, lora=lora)
    settings = replace(ON_CUDA, precision=precision, train_options=options)
    found, held = bytes_of(shape_of(model), use, settings), engine.footprint()
    masters = sum(shard.master.nbytes for shard in engine._model.shards if shard.on_host)  # and as much of gradients
    moments = sum(tensor.nbytes for tensor in engine._model.optimizer.tensors()) if on_host else 0
    assert host_bytes(shape_of(model), use, settings) == pytest.approx(2 * masters + moments, rel=0.02)
    assert found.weights == pytest.approx(held["weights"], rel=0.02)
    assert found.optimizer == pytest.approx(held.get("optimizer", 0), rel=0.02)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=16)])
@pytest.mark.parametrize("on_host", [False, True])
def test_moments_in_8_bits_are_what_an_engine_holds(tmp_path, lora, on_host):
    pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    if lora is not None:
        pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    model = str(write_tiny_model(tmp_path / "wide", hidden=256, layers=1, max_positions=64))
    optimizer, options = OptimizerConfig(name="adamw_8bit"), {"optimizer_on_host": on_host}
    engine = Fsdp2TrainEngine(model, optimizer, TrainSettings(lora=lora, backend=options))
    use, settings = ModelUse("trained", model, optimizer=optimizer, lora=lora), replace(ON_CUDA, train_options=options)
    trained = sum(shard.master.numel() for shard in engine._model.shards.trained)
    moments = sum(tensor.nbytes for tensor in engine._model.optimizer.tensors())
    assert moments / trained < 2.4
    found = bytes_of(shape_of(model), use, settings).optimizer
    assert found == pytest.approx(engine.footprint().get("optimizer", 0), rel=0.02)
    assert host_bytes(shape_of(model), use, settings) == pytest.approx(on_host * (8 * trained + moments), rel=0.02)


@pytest.mark.parametrize(("trained", "measured"), [(255, 33.8e9), (128, 28.8e9)], ids=["sft", "grpo"])
def test_a_step_of_half_a_billion_parameters_takes_what_it_took_on_an_h100(small, trained, measured):
    """64 rows of 256 tokens, all logits at once, without what was held before: benchmarks/results/device-cuda.md at
    commit 9976bcf."""
    found = bytes_of(small, ModelUse("trained", "", longest=256), replace(ON_CUDA, max_tokens_per_microbatch=16384))
    logits = 2 * 2 * 64 * trained * small.vocabulary
    assert found.weights + found.optimizer == pytest.approx(6.9e9, rel=0.01)
    assert found.gradients + found.activations + logits == pytest.approx(measured, rel=0.03)


def test_members_that_shard_a_model_hold_their_part_and_two_layers_of_the_rest(small):
    one, eight = (bytes_of(small, ModelUse("trained", "", members), ON_CUDA) for members in (1, 8))
    assert eight.optimizer == one.optimizer / 8 and eight.gradients == one.gradients / 8
    assert eight.weights == 4 * small.parameters / 8
    gradients = 2 * (small.layer + small.outside) + 4 * small.layer
    assert (one.gathered, eight.gathered) == (0.0, 2 * (2 * small.layer + small.outside) + gradients)
    assert (one.exchange, eight.exchange) == (2 * small.tensor, 8 * small.outside)
    copies = replace(ON_CUDA, parallel=ParallelSizes(ddp_size=8))
    assert bytes_of(small, ModelUse("trained", "", 8), copies).optimizer == one.optimizer
    split = replace(ON_CUDA, parallel=ParallelSizes(tensor_parallel_size=2, context_parallel_size=2))
    assert bytes_of(small, ModelUse("trained", "", 8), split).logits < one.logits


def test_an_optimizer_on_the_host_leaves_six_bytes_of_a_parameter_or_eight_of_a_sharded_one(monkeypatch, small):
    settings = replace(ON_CUDA, train_options={"optimizer_on_host": True})
    for members, ours in ((1, 6), (8, 8)):
        use = ModelUse("trained", "", members)
        found = bytes_of(small, use, settings)
        assert found.weights + found.gradients + found.optimizer == ours * small.parameters / members
        assert host_bytes(small, use, settings) == 16 * small.parameters / members
        assert host_bytes(small, use, ON_CUDA) == host_bytes(small, replace(use, kind="frozen"), settings) == 0
    lines = plan(monkeypatch, small, {ACTOR: ModelUse("trained", "", 8)}, replace(settings, threads=8), 80).lines()
    assert lines[-1] == "  ACTOR x8: 1.0 GB of its host's memory each, for the optimizer"
    lines = plan(monkeypatch, small, {ACTOR: ModelUse("trained", "", 8)}, settings, 80).lines()
    assert lines[-1].endswith("for the optimizer; engine.threads: the cores that take its step")
    critic = ModelUse("trained", "", head="token")
    found = bytes_of(small, critic, settings)
    assert host_bytes(small, critic, settings) == 16 * found.gradients / 4


def test_of_a_base_in_4_bits_one_matrix_at_a_time_is_whole(monkeypatch, small):
    lora = LoraSettings(quantize_base="nf4")
    use, plain = (ModelUse("trained", "", 2, lora=each) for each in (lora, replace(lora, quantize_base=None)))
    copies = replace(ON_CUDA, parallel=ParallelSizes(ddp_size=2))
    found, larger = (bytes_of(small, each, copies) for each in (use, plain))
    matrices = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    assert small.matrices == matrices
    assert larger.weights - found.weights == (2 - 0.5625) * matrices
    assert (larger.gathered, found.gathered) == (0, 2 * 896 * 4864)
    assert bytes_of(small, use, ON_CUDA) == found, "its workers hold copies unless engine.parallel says otherwise"
    divided = bytes_of(small, use, replace(ON_CUDA, parallel=ParallelSizes()))
    layer = 2 * (small.layer - matrices / 24) + 0.5625 * matrices / 24
    assert (divided.weights, divided.gradients) == (found.weights / 2 - found.gradients / 4, found.gradients / 2)
    assert divided.gathered == 2 * layer + 2 * small.outside + 2.5 * 896 * 4864


def test_a_base_in_4_bits_that_does_not_fit_is_divided(monkeypatch, large):
    def change(members, gigabytes, engine=ON_CUDA):
        use = ModelUse("trained", "", members, lora=LoraSettings(quantize_base="nf4"), longest=2048)
        engine = replace(engine, gradient_checkpointing=True, max_tokens_per_microbatch=4096)
        (error,) = plan(monkeypatch, large, {ACTOR: use}, engine, gigabytes).find_errors()
        return error.what.rpartition("it fits with ")[-1]

    assert change(2, 48) == change(2, 48, replace(ON_CUDA, parallel=ParallelSizes(ddp_size=2)))
    assert change(2, 48) == "engine.parallel.ddp_size=1"
    assert change(1, 48) == "engine.parallel.ddp_size=1 workload.actor.num=2"
    assert change(2, 24) == "engine.parallel.ddp_size=1 workload.actor.num=8"
    assert change(2, 24, replace(ON_CUDA, parallel=ParallelSizes())) == "workload.actor.num=8"


def test_recomputed_activations_are_those_of_one_layer_and_each_layers_input(small):
    use = ModelUse("trained", "")
    whole, less = (bytes_of(small, use, replace(ON_CUDA, gradient_checkpointing=on)) for on in (False, True))
    assert less.activations == pytest.approx(16384 * 24 * 896 * 2), "those of one layer come when the logits have gone"
    few = replace(small, vocabulary=8000)
    checkpointed = bytes_of(few, use, replace(ON_CUDA, gradient_checkpointing=True))
    one_layer = checkpointed.activations - 16384 * 24 * 896 * 2 + checkpointed.logits
    assert one_layer == pytest.approx(whole.activations / 24), "which are more here"
    frozen = bytes_of(small, ModelUse("frozen", ""), ON_CUDA)
    assert frozen.weights == 2 * small.parameters and frozen.activations == pytest.approx(whole.activations / 24)


def test_logits_of_a_large_vocabulary_take_one_chunk(small):
    twice = replace(small, vocabulary=2 * small.vocabulary)
    found, larger = (bytes_of(shape, ModelUse("trained", ""), ON_CUDA).logits for shape in (small, twice))
    assert found == 4 * (1 << 29) + 6 * small.vocabulary * 896
    assert larger - found == 6 * small.vocabulary * 896  # the gradient of the output layer alone
    lora = ModelUse("trained", "", lora=LoraSettings())
    assert bytes_of(small, lora, ON_CUDA).logits == 4 * (1 << 29), "which has none"
    capped = replace(small, raw_logits=False)
    assert bytes_of(capped, ModelUse("trained", ""), ON_CUDA).logits == 4 * 16384 * small.vocabulary
    few = replace(ON_CUDA, max_tokens_per_microbatch=1024)
    assert bytes_of(small, ModelUse("trained", ""), few).logits == 4 * 1024 * small.vocabulary


def test_a_rollout_has_weights_and_the_cache_of_what_it_decodes_at_once(small):
    use, engine = ModelUse("rollout", "", longest=1024), replace(ON_CUDA, max_batch=256)
    found = bytes_of(small, use, engine)
    assert found.weights == 2 * small.parameters
    assert found.kv_cache == 256 * 1024 * 24 * 2 * 128 * 2
    halves = bytes_of(small, use, replace(engine, rollout_tensor_parallel_size=2))
    assert (halves.weights, halves.kv_cache) == (found.weights / 2, found.kv_cache / 2)


def plan(monkeypatch, shape, uses, engine, gigabytes):
    monkeypatch.setattr(memory_plan, "shape_of", lambda model, fallback=None: shape)
    engine = replace(engine, device_memory_gb=gigabytes)
    return MemoryPlan(uses, engine, "", None, device_bytes(engine)).size_passes()


@pytest.mark.parametrize(
    ("gigabytes", "tokens", "change"),
    [
        (40, 16384, ""),
        (30, 16384, "engine.max_tokens_per_microbatch=8192"),
        (16, 16384, "engine.gradient_checkpointing=true"),
        (13.6, 16384, "engine.gradient_checkpointing=true engine.max_tokens_per_microbatch=8192"),
        (12, 16384, "engine.max_tokens_per_microbatch=1024"),
        (
            9.5,
            16384,
            "engine.gradient_checkpointing=true engine.train_options.optimizer_on_host=true and 7.9 GB of its host",
        ),
        (3.9, 16384, "engine.gradient_checkpointing=true engine.max_tokens_per_microbatch=1024 workload.actor.num=4"),
        (1, 16384, "no setting here makes it fit"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_smallest_change_that_would(monkeypatch, small, gigabytes, tokens, change):
    engine = replace(ON_CUDA, max_tokens_per_microbatch=tokens)
    found = plan(monkeypatch, small, {ACTOR: ModelUse("trained", "")}, engine, gigabytes).find_errors()
    assert [error.what.rpartition("; ")[2].removeprefix("it fits with ") for error in found] == (
        [change] if change else []
    )
    for error in found:
        assert error.where == "config.engine"
        assert f" of a device's {gigabytes:.1f} (" in error.what


def test_the_change_that_is_named_fits(monkeypatch, small):
    checkpointed = replace(ON_CUDA, gradient_checkpointing=True, max_tokens_per_microbatch=8192)
    assert plan(monkeypatch, small, {ACTOR: ModelUse("trained", "", 2)}, checkpointed, 9.5).find_errors() == []
    assert plan(monkeypatch, small, {ACTOR: ModelUse("trained", "", 1)}, checkpointed, 9.5).find_errors() != []


def test_a_reference_that_does_not_fit_is_sharded(monkeypatch, small):
    uses = {REFERENCE: ModelUse("frozen", "", 4, sharded_class="ShardedReferenceWorkload")}
    few = replace(ON_CUDA, max_tokens_per_microbatch=1024)
    (error,) = plan(monkeypatch, small, uses, few, 1.4).find_errors()
    change = "engine.shard_frozen=true workload.reference.class=ShardedReferenceWorkload"
    assert error.what.endswith(f"it fits with {change}")
    (error,) = plan(monkeypatch, small, {REFERENCE: replace(uses[REFERENCE], members=1)}, few, 1.4).find_errors()
    assert error.what.endswith(f"it fits with {change} workload.reference.num=2")
    sharded = replace(few, shard_frozen=True)
    assert plan(monkeypatch, small, uses, sharded, 1.4).find_errors() == []
    found = bytes_of(small, uses[REFERENCE], sharded)
    assert found.weights == 2 * small.parameters / 4 and found.gathered == 2 * (small.parameters - 22 * small.layer)
    copy = replace(uses[REFERENCE], sharded_class="")
    assert bytes_of(small, copy, sharded) == bytes_of(small, copy, few)


def test_a_rollout_that_cannot_hold_one_sequence_is_split(monkeypatch, small):
    uses = {ROLLOUT: ModelUse("rollout", "", longest=32768)}
    (error,) = plan(monkeypatch, small, uses, ON_CUDA, 1.6).find_errors()
    change = "engine.rollout_tensor_parallel_size=2 workload.rollout.resource.gpu=2"
    assert error.what.endswith(f"(weights 1.0, and the cache of one sequence); it fits with {change}")
    assert plan(monkeypatch, small, uses, ON_CUDA, 4).find_errors() == []


def test_a_model_of_scores_has_no_logits_and_no_output_layer_of_its_own(small):
    untied = replace(small, parameters=small.parameters + small.tensor)
    for shape in (small, untied):
        found = bytes_of(shape, ModelUse("trained", "", head="token"), ON_CUDA)
        assert found.weights == 6 * (small.parameters + small.hidden) and found.logits == 4 * 16384


def test_a_new_head_of_one_score_is_trained_beside_the_adapters(small):
    lora = LoraSettings(rank=4)
    adapters = small.trained_parameters(lora)
    untied = replace(small, parameters=small.parameters + small.tensor)
    for shape in (small, untied):
        use = ModelUse("trained", "", lora=lora, head="token")
        found, trained = bytes_of(shape, use, ON_CUDA), adapters + small.hidden
        assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)
        assert found.weights == 2 * small.parameters + 6 * trained
        on_host = replace(ON_CUDA, train_options={"optimizer_on_host": True})
        assert host_bytes(shape, use, on_host) == 16 * trained
    scoring = small.with_score_head()
    assert scoring.trained_parameters(replace(lora, targets="all-linear")) == adapters + small.hidden
    both = replace(lora, targets=("q_proj", "score"))  # an adapter in place of the head itself
    alone = small.trained_parameters(replace(lora, targets=("q_proj",)))
    assert scoring.trained_parameters(both) == alone + 4 * (small.hidden + 1)


def test_the_policys_configuration_stands_for_the_policys_model_alone(model):
    uses = {ACTOR: ModelUse("trained", "hub/policy"), REFERENCE: ModelUse("frozen", "hub/other")}
    assert [role for role, *_ in MemoryPlan(uses, ON_CUDA, "hub/policy", model).known()] == [ACTOR]


def test_sizes_that_do_not_divide_the_members_and_other_engines_are_left_out(model):
    uses = {ACTOR: ModelUse("trained", model, 8), ROLLOUT: ModelUse("rollout", model)}
    for engine in (replace(ON_CUDA, parallel=ParallelSizes(ddp_size=16)), replace(ON_CUDA, train="deepspeed")):
        assert [role for role, *_ in MemoryPlan(uses, engine).known()] == [ROLLOUT]


def test_where_the_jobs_devices_are_not_known_this_machines_are_a_warning(monkeypatch, small):
    monkeypatch.setattr(memory_plan, "shape_of", lambda model, fallback=None: small)
    made = MemoryPlan({ACTOR: ModelUse("trained", "")}, ON_CUDA, device_bytes=16e9)
    assert made.find_errors() == []
    assert made.lines()[-1].startswith("  it may not fit here: ACTOR needs 34.4 GB")


def test_people_get_a_table_by_role_and_owner(monkeypatch, small):
    uses = {ACTOR: ModelUse("trained", "", 8), ROLLOUT: ModelUse("rollout", "", 8, longest=100_000)}
    head, names, *rows = plan(monkeypatch, small, uses, ON_CUDA, 80).lines()
    assert head == "memory of each device, GB of 80:"
    assert names.split("  ")[-1] == "at most" and "kv cache" in names
    assert [row.split()[:2] for row in rows] == [["ACTOR", "x8"], ["ROLLOUT", "x8"]]
    assert float(rows[1].split()[-1]) == 0.85 * 80, "a rollout takes its share, and no more"
    assert len({len(row) for row in rows}) == 1
    kept = plan(monkeypatch, small, uses, replace(ON_CUDA, weight_sync="cuda_ipc"), 80).lines()[-1]
    assert kept == "  and 2.0 GB of weights that the actor keeps on the device for the rollout"


@pytest.mark.parametrize(
    ("rollout", "options", "most"),
    [("torch", {}, 1.1), ("vllm", {}, 68.0), ("sglang", {}, 68.0), ("vllm", {"kv_cache_bytes": 3e9}, 4.0)],
)
def test_an_engine_that_fills_its_device_is_planned_so(monkeypatch, small, rollout, options, most):
    engine = replace(ON_CUDA, rollout=rollout, rollout_options=options)
    row = plan(monkeypatch, small, {ROLLOUT: ModelUse("rollout", "", longest=64)}, engine, 80).lines()[2]
    assert float(row.split()[-1]) == most


def test_what_is_not_known_is_said_and_not_refused(monkeypatch, small):
    uses = {ACTOR: ModelUse("trained", "some/hub-name")}
    engine = replace(ON_CUDA, device_memory_gb=1)
    made = MemoryPlan(uses, engine, "some/hub-name", None, device_bytes(engine)).size_passes()
    assert made.lines()[1:] == ["  ACTOR x1: not known without the config.json of some/hub-name (config.model_config)"]
    assert made.find_errors() == MemoryPlan({}, ON_CUDA).lines() == []
    other = MemoryPlan(uses, replace(ON_CUDA, train="own:Engine"))
    assert other.lines()[1:] == ["  ACTOR x1: not computed for own:Engine"]
    if not torch.cuda.is_available():
        assert plan(monkeypatch, small, uses, ON_CUDA, None).find_errors() == []
    assert math.isfinite(bytes_of(small, uses[ACTOR], ON_CUDA).peak)


def test_of_deepspeed_and_megatron_the_state_is_planned_and_refused_where_it_cannot_fit(monkeypatch, small, large):
    def planned(shape, gigabytes, members=8, **changes):
        use = ModelUse("trained", "", members)
        made = plan(monkeypatch, shape, {ACTOR: use}, replace(ON_CUDA, **changes), gigabytes)
        return made.lines()[-1].strip(), [error.what for error in made.find_errors()]

    line, faults = planned(small, 80, train="deepspeed", train_options={"zero_stage": 1})
    assert (line, faults) == (
        "ACTOR x8: at least 2.0 (weights 1.2, gradients 0.2, optimizer 0.5); passes are not computed for deepspeed",
        [],
    )
    line, _ = planned(small, 80, train="deepspeed", train_options={"optimizer_on_host": True})
    assert line.startswith("ACTOR x8: at least 0.7 (weights 0.1, gradients 0.5), and 1.0 of its host; passes")
    _, faults = planned(large, 80, train="deepspeed", train_options={"zero_stage": 2})
    assert faults == [
        "ACTOR needs 290.8 GB for its weights, gradients and optimizer, and has 73.6 GB of a device's 80.0; with"
        " engine.train_options.zero_stage=3 engine.train_options.optimizer_on_host=true it is 18.7 GB"
    ]
    split = ParallelSizes(tensor_parallel_size=8)
    _, faults = planned(large, 80, train="megatron", parallel=split)
    assert faults == [
        "ACTOR needs 163.6 GB for its weights, gradients and optimizer, and has 73.6 GB of a device's 80.0; with"
        " workload.actor.num=64 it is 68.2 GB"
    ]
    line, faults = planned(large, 80, 64, train="megatron", parallel=split)
    assert line.startswith("ACTOR x64: at least 68.2 (weights 22.7, gradients 36.4, optimizer 9.1)") and not faults
    line, _ = planned(large, 80, 64, train="megatron", parallel=replace(split, pipeline_parallel_size=4))
    assert line.startswith("ACTOR x64: at least 28.2 (weights")
    frozen = plan(monkeypatch, small, {REFERENCE: ModelUse("frozen", "")}, replace(ON_CUDA, train="megatron"), 80)
    assert "REFERENCE x1: at least 1.0 (weights 1.0); passes" in frozen.lines()[-1]


AUTO_SIZED = replace(ON_CUDA, max_tokens_per_microbatch="auto", gradient_checkpointing="auto")


@pytest.mark.parametrize(
    ("gigabytes", "tokens", "recomputes"),
    [
        (80, 16384, False),
        (30, 8192, False),
        (24, 4096, False),
        (17, 16384, True),
        (15.5, 8192, True),
        (14, 1024, False),
    ],
)
def test_passes_are_as_large_as_fit_and_recomputed_only_where_they_would_be_small(small, gigabytes, tokens, recomputes):
    use = ModelUse("trained", "")
    sized = size_passes(AUTO_SIZED, use, small, gigabytes * 1e9)
    assert (sized.max_tokens_per_microbatch, sized.gradient_checkpointing) == (tokens, recomputes)
    assert bytes_of(small, use, sized).peak <= 0.8 * gigabytes * 1e9
    larger = replace(sized, max_tokens_per_microbatch=2 * tokens)
    assert tokens == 16384 or bytes_of(small, use, larger).peak > 0.8 * gigabytes * 1e9
    assert size_passes(AUTO_SIZED, use, small, 1e9) == AUTO_SIZED.with_passes(1024, recompute=True), "the smallest"


def test_what_is_given_stays_and_what_is_not_known_is_cautious(small):
    use = ModelUse("trained", "")
    given = replace(AUTO_SIZED, max_tokens_per_microbatch=12288)
    assert size_passes(given, use, small, 80e9) == replace(given, gradient_checkpointing=False)
    assert size_passes(given, use, small, 24e9) == replace(given, gradient_checkpointing=True)
    assert size_passes(ON_CUDA, use, small, 1e9) == ON_CUDA
    cautious = replace(AUTO_SIZED, max_tokens_per_microbatch=16384, gradient_checkpointing=True)
    for shape, capacity, engine in ((None, 80e9, AUTO_SIZED), (small, None, AUTO_SIZED)):
        assert size_passes(engine, use, shape, capacity) == cautious
    other = replace(AUTO_SIZED, train="megatron")
    assert size_passes(other, use, small, 80e9) == replace(cautious, train="megatron")
    unbounded = size_passes(AUTO_SIZED, replace(use, bounded=False), small, 80e9)
    assert unbounded.gradient_checkpointing, "a longer row may come"
    long = size_passes(AUTO_SIZED, replace(use, longest=9000), small, 17e9)
    assert long.max_tokens_per_microbatch == 16384 and long.gradient_checkpointing


def test_on_a_cpu_passes_have_the_defaults():
    resolved = replace(AUTO_SIZED, device="auto").resolve(on_cuda=False)
    assert (resolved.max_tokens_per_microbatch, resolved.gradient_checkpointing) == (16384, False)
    assert replace(AUTO_SIZED).resolve(on_cuda=False).max_tokens_per_microbatch == "auto"  # the device is given


def test_a_plan_has_passes_that_fit_every_role_and_shows_them(monkeypatch, small):
    uses = {ACTOR: ModelUse("trained", ""), REFERENCE: ModelUse("frozen", "")}
    found = plan(monkeypatch, small, uses, AUTO_SIZED, 15.5)
    assert "  passes of 8,192 tokens, activations recomputed" in found.lines()
    assert (found.engine.max_tokens_per_microbatch, found.engine.gradient_checkpointing) == (8192, True)
    assert plan(monkeypatch, small, {REFERENCE: uses[REFERENCE]}, AUTO_SIZED, 16).chosen == "  passes of 16,384 tokens"
    (line,) = (line for line in plan(monkeypatch, small, uses, AUTO_SIZED, None).lines() if "passes of" in line)
    assert line.endswith("activations recomputed; they are sized once the devices are known (engine.device_memory_gb)")
    assert not any("passes of" in line for line in plan(monkeypatch, small, uses, ON_CUDA, 17).lines())
    (error,) = plan(monkeypatch, small, {ACTOR: uses[ACTOR]}, AUTO_SIZED, 3.9).find_errors()
    assert "workload.actor.num=4" in error.what


@pytest.mark.parametrize(("longest", "held"), [(1, 64), (256, 256), (257, 512), (600, 768), (1024, 1024)])
def test_the_cache_of_the_torch_engine_is_as_long_as_it_allocates_it(small, longest, held):
    def cache(rollout, tokens):
        engine = replace(ON_CUDA, rollout=rollout)
        return bytes_of(small, ModelUse("rollout", "", longest=tokens), engine).kv_cache

    assert cache("torch", longest) == cache("torch", held) == cache("vllm", held)
    assert cache("vllm", longest) * held == cache("vllm", held) * longest


def test_the_output_layer_that_can_have_adapters_is_the_models_own():
    tied = ModelShape.of(AutoConfig.for_model("qwen2", **SIZES))
    own = ModelShape.of(AutoConfig.for_model("qwen2", **{**SIZES, "tie_word_embeddings": False}))
    head, score = LoraSettings(targets=("lm_head",)), LoraSettings(targets=("q_proj", "score"))
    assert own.find_target_errors(head) == []
    assert tied.find_target_errors(head) == [
        "the output layer shares the embedding's weight, so it cannot have an adapter"
    ]
    for scoring in (own.with_score_head(), tied.with_score_head()):
        assert scoring.find_target_errors(score) == []
        assert scoring.find_target_errors(head)[0].startswith("no linear layer is named 'lm_head'")
    assert "did you mean" not in own.find_target_errors(score)[0]
    assert own.find_target_errors(LoraSettings(targets="all-linear")) == []
