# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of device memory: against the memory of engines, against a measured step, and its refusals."""

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
AUTO_SIZED = replace(ON_CUDA, max_tokens_per_microbatch="auto", gradient_checkpointing="auto")
ON_HOST = replace(ON_CUDA, train_options={"optimizer_on_host": True})
COPIES = replace(ON_CUDA, parallel=ParallelSizes(ddp_size=2))
TRAINED = ModelUse("trained", "")
ACTOR, ROLLOUT, REFERENCE = RLRoleType.ACTOR, RLRoleType.ROLLOUT, RLRoleType.REFERENCE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=256, layers=1, max_positions=64))


@pytest.fixture(scope="module")
def small():
    """The shape of Qwen2.5-0.5B."""
    return ModelShape.of(AutoConfig.for_model("qwen2", **SIZES))


@pytest.fixture(scope="module")
def large():
    """The shape of Qwen2.5-72B."""
    sizes = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False}
    return ModelShape.of(AutoConfig.for_model("qwen2", **{**SIZES, **sizes}))


@pytest.fixture
def plan(monkeypatch):
    def make(shape, uses, engine, gigabytes):
        monkeypatch.setattr(memory_plan, "shape_of", lambda model, fallback=None: shape)
        engine = replace(engine, device_memory_gb=gigabytes)
        return MemoryPlan(uses, engine, "", None, device_bytes(engine)).size_passes()

    return make


def test_shape_has_the_models_sizes(small):
    assert small.parameters == 494_032_768
    assert (small.layers, small.hidden, small.queries, small.keys, small.vocabulary) == (24, 896, 896, 128, 151936)
    assert small.tensor == 151936 * 896
    assert small.parameters == 24 * small.layer + small.tensor + 896


def test_shape_of_experts_counts_the_active_ones():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 100}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, num_experts=8, num_experts_per_tok=2)
    assert ModelShape.of(config).intermediate == 2 * 16


def test_shape_comes_from_a_folder_or_a_configuration(model, tmp_path):
    assert shape_of(model) == shape_of("some/hub-name", f"{model}/config.json") == shape_of("no-name", model)
    assert shape_of("some/hub-name") is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert shape_of(str(tmp_path)) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw_8bit"])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=16), LoraSettings(rank=16, quantize_base="nf4")])
@pytest.mark.parametrize("on_host", [False, True])
def test_weights_and_optimizer_are_an_engines(model, precision, optimizer, lora, on_host):
    if lora is not None:
        pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    if optimizer == "adamw_8bit" or (lora is not None and lora.quantize_base is not None):
        pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    optimizer = OptimizerConfig(name=optimizer)
    options = {"optimizer_on_host": on_host}
    engine = Fsdp2TrainEngine(model, optimizer, TrainSettings(precision=precision, lora=lora, backend=options))
    use = ModelUse("trained", model, optimizer=optimizer, lora=lora)
    settings = replace(ON_CUDA, precision=precision, train_options=options)
    planned, measured = bytes_of(shape_of(model), use, settings), engine.footprint()
    masters = sum(shard.master.nbytes for shard in engine._model.shards if shard.on_host)  # and as much of gradients
    moments = sum(tensor.nbytes for tensor in engine._model.optimizer.tensors()) if on_host else 0
    assert host_bytes(shape_of(model), use, settings) == pytest.approx(2 * masters + moments, rel=0.02)
    assert planned.weights == pytest.approx(measured["weights"], rel=0.02)
    assert planned.optimizer == pytest.approx(measured.get("optimizer", 0), rel=0.02)


@pytest.mark.parametrize(("trained", "measured"), [(255, 33.8e9), (128, 28.8e9)], ids=["sft", "grpo"])
def test_step_of_half_a_billion_takes_the_measured_memory(small, trained, measured):
    """64 rows of 256 tokens, all logits at once, without the memory held before: benchmarks/results/device-cuda.md at
    commit 9976bcf."""
    planned = bytes_of(small, ModelUse("trained", "", longest=256), replace(ON_CUDA, max_tokens_per_microbatch=16384))
    logits = 2 * 2 * 64 * trained * small.vocabulary
    assert planned.weights + planned.optimizer == pytest.approx(6.9e9, rel=0.01)
    assert planned.gradients + planned.activations + logits == pytest.approx(measured, rel=0.03)


def test_sharded_member_holds_its_part_and_two_whole_layers(small):
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


def test_optimizer_on_the_host_leaves_6_bytes_or_8_if_sharded(plan, small):
    for members, ours in ((1, 6), (8, 8)):
        use = ModelUse("trained", "", members)
        planned = bytes_of(small, use, ON_HOST)
        assert planned.weights + planned.gradients + planned.optimizer == ours * small.parameters / members
        assert host_bytes(small, use, ON_HOST) == 16 * small.parameters / members
        assert host_bytes(small, use, ON_CUDA) == host_bytes(small, replace(use, kind="frozen"), ON_HOST) == 0
    eight = {ACTOR: ModelUse("trained", "", 8)}
    counted, unknown = (plan(small, eight, engine, 80).lines()[-1] for engine in (replace(ON_HOST, threads=8), ON_HOST))
    assert counted == "  ACTOR x8: 1.0 GB of its host's memory each, for the optimizer"
    assert unknown == f"{counted}; engine.threads: the cores that take its step"
    critic = replace(TRAINED, head="token")
    assert host_bytes(small, critic, ON_HOST) == 16 * bytes_of(small, critic, ON_HOST).gradients / 4


def test_base_in_4_bits_has_one_whole_matrix_at_a_time(small):
    lora = LoraSettings(quantize_base="nf4")
    use, plain = (ModelUse("trained", "", 2, lora=each) for each in (lora, replace(lora, quantize_base=None)))
    rounded, larger = (bytes_of(small, each, COPIES) for each in (use, plain))
    matrices = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    assert small.matrices == matrices
    assert larger.weights - rounded.weights == (2 - 0.5625) * matrices
    assert (larger.gathered, rounded.gathered) == (0, 2 * 896 * 4864)
    assert bytes_of(small, use, ON_CUDA) == rounded, "its workers hold copies unless engine.parallel says otherwise"
    divided = bytes_of(small, use, replace(ON_CUDA, parallel=ParallelSizes()))
    layer = 2 * (small.layer - matrices / 24) + 0.5625 * matrices / 24
    assert (divided.weights, divided.gradients) == (rounded.weights / 2 - rounded.gradients / 4, rounded.gradients / 2)
    assert divided.gathered == 2 * layer + 2 * small.outside + 2.5 * 896 * 4864


@pytest.mark.parametrize(
    ("members", "gigabytes", "parallel", "change"),
    [
        (2, 48, None, "engine.parallel.ddp_size=1"),
        (1, 48, None, "engine.parallel.ddp_size=1 workload.actor.num=2"),
        (2, 24, None, "engine.parallel.ddp_size=1 workload.actor.num=8"),
        (2, 24, ParallelSizes(), "workload.actor.num=8"),
    ],
)
def test_base_in_4_bits_too_large_is_divided(plan, large, members, gigabytes, parallel, change):
    use = ModelUse("trained", "", members, lora=LoraSettings(quantize_base="nf4"), longest=2048)
    engine = replace(ON_CUDA, parallel=parallel) if parallel else ON_CUDA
    engine = replace(engine, gradient_checkpointing=True, max_tokens_per_microbatch=4096)
    (error,) = plan(large, {ACTOR: use}, engine, gigabytes).find_errors()
    assert error.what.rpartition("it fits with ")[-1] == change


def test_recomputed_activations_are_one_layer_and_the_inputs(small):
    checkpointing = replace(ON_CUDA, gradient_checkpointing=True)
    whole, less = (bytes_of(small, TRAINED, replace(ON_CUDA, gradient_checkpointing=on)) for on in (False, True))
    assert less.activations == pytest.approx(16384 * 24 * 896 * 2), "one layer's come when the logits have gone"
    checkpointed = bytes_of(replace(small, vocabulary=8000), TRAINED, checkpointing)
    one_layer = checkpointed.activations - 16384 * 24 * 896 * 2 + checkpointed.logits
    assert one_layer == pytest.approx(whole.activations / 24), "which are more here"
    frozen = bytes_of(small, ModelUse("frozen", ""), ON_CUDA)
    assert frozen.weights == 2 * small.parameters and frozen.activations == pytest.approx(whole.activations / 24)


def test_logits_of_a_large_vocabulary_take_one_chunk(small):
    def logits(use=TRAINED, engine=ON_CUDA, **changes):
        return bytes_of(replace(small, **changes), use, engine).logits

    assert logits() == 4 * (1 << 29) + 6 * small.vocabulary * 896
    larger = logits(vocabulary=2 * small.vocabulary)
    assert larger - logits() == 6 * small.vocabulary * 896  # the gradient of the output layer alone
    assert logits(ModelUse("trained", "", lora=LoraSettings())) == 4 * (1 << 29), "which has none"
    assert logits(raw_logits=False) == 4 * 16384 * small.vocabulary
    assert logits(engine=replace(ON_CUDA, max_tokens_per_microbatch=1024)) == 4 * 1024 * small.vocabulary


def test_rollout_has_weights_and_a_cache(small):
    use, engine = ModelUse("rollout", "", longest=1024), replace(ON_CUDA, max_batch=256)
    whole, halves = (bytes_of(small, use, replace(engine, rollout_tensor_parallel_size=size)) for size in (1, 2))
    assert (whole.weights, whole.kv_cache) == (2 * small.parameters, 256 * 1024 * 24 * 2 * 128 * 2)
    assert (halves.weights, halves.kv_cache) == (whole.weights / 2, whole.kv_cache / 2)


@pytest.mark.parametrize(
    ("gigabytes", "change"),
    [
        (40, ""),
        (30, "engine.max_tokens_per_microbatch=8192"),
        (16, "engine.gradient_checkpointing=true"),
        (13.6, "engine.gradient_checkpointing=true engine.max_tokens_per_microbatch=8192"),
        (12, "engine.max_tokens_per_microbatch=1024"),
        (9.5, "engine.gradient_checkpointing=true engine.train_options.optimizer_on_host=true and 7.9 GB of its host"),
        (3.9, "engine.gradient_checkpointing=true engine.max_tokens_per_microbatch=1024 workload.actor.num=4"),
        (1, "no setting here makes it fit"),
    ],
)
def test_model_too_large_is_refused_with_a_change(plan, small, gigabytes, change):
    engine = replace(ON_CUDA, max_tokens_per_microbatch=16384)
    errors = plan(small, {ACTOR: TRAINED}, engine, gigabytes).find_errors()
    changes = [error.what.rpartition("; ")[2].removeprefix("it fits with ") for error in errors]
    assert changes == ([change] if change else [])
    assert all(error.where == "config.engine" for error in errors)
    assert all(f" of a device's {gigabytes:.1f} (" in error.what for error in errors)


def test_reference_too_large_is_sharded(plan, small):
    use = ModelUse("frozen", "", 4, sharded_class="ShardedReferenceWorkload")
    few = replace(ON_CUDA, max_tokens_per_microbatch=1024)
    change = "engine.shard_frozen=true workload.reference.class=ShardedReferenceWorkload"
    for members, more in ((4, ""), (1, " workload.reference.num=2")):
        (error,) = plan(small, {REFERENCE: replace(use, members=members)}, few, 1.4).find_errors()
        assert error.what.endswith(f"it fits with {change}{more}")
    sharded = replace(few, shard_frozen=True)
    assert plan(small, {REFERENCE: use}, sharded, 1.4).find_errors() == []
    part = bytes_of(small, use, sharded)
    assert part.weights == 2 * small.parameters / 4 and part.gathered == 2 * (small.parameters - 22 * small.layer)
    copy = replace(use, sharded_class="")
    assert bytes_of(small, copy, sharded) == bytes_of(small, copy, few)


def test_rollout_without_room_for_a_sequence_is_split(plan, small):
    uses = {ROLLOUT: ModelUse("rollout", "", longest=32768)}
    (error,) = plan(small, uses, ON_CUDA, 1.6).find_errors()
    change = "engine.rollout_tensor_parallel_size=2 workload.rollout.resource.gpu=2"
    assert error.what.endswith(f"(weights 1.0, and the cache of one sequence); it fits with {change}")
    assert plan(small, uses, ON_CUDA, 4).find_errors() == []


@pytest.mark.parametrize("tied", [True, False])
def test_head_of_one_score_replaces_the_output_layer(small, tied):
    shape = small if tied else replace(small, parameters=small.parameters + small.tensor)
    whole = bytes_of(shape, replace(TRAINED, head="token"), ON_CUDA)
    assert whole.weights == 6 * (small.parameters + small.hidden) and whole.logits == 4 * 16384
    lora = LoraSettings(rank=4)
    trained = small.trained_parameters(lora) + small.hidden
    use = replace(TRAINED, lora=lora, head="token")
    adapted = bytes_of(shape, use, ON_CUDA)
    assert (adapted.gradients, adapted.optimizer) == (4 * trained, 8 * trained)
    assert adapted.weights == 2 * small.parameters + 6 * trained
    assert host_bytes(shape, use, ON_HOST) == 16 * trained


def test_known_roles_of_other_models_sizes_and_engines(model):
    hub = {ACTOR: ModelUse("trained", "hub/policy"), REFERENCE: ModelUse("frozen", "hub/other")}
    assert [role for role, *_ in MemoryPlan(hub, ON_CUDA, "hub/policy", model).known()] == [ACTOR]
    uses = {ACTOR: ModelUse("trained", model, 8), ROLLOUT: ModelUse("rollout", model)}
    for engine in (replace(ON_CUDA, parallel=ParallelSizes(ddp_size=16)), replace(ON_CUDA, train="deepspeed")):
        assert [role for role, *_ in MemoryPlan(uses, engine).known()] == [ROLLOUT]


def test_this_machines_devices_are_only_a_warning(monkeypatch, small):
    monkeypatch.setattr(memory_plan, "shape_of", lambda model, fallback=None: small)
    here = MemoryPlan({ACTOR: TRAINED}, ON_CUDA, device_bytes=16e9)
    assert here.find_errors() == []
    assert here.lines()[-1].startswith("  it may not fit here: ACTOR needs 34.4 GB")


def test_lines_are_a_table_by_role_and_owner(plan, small):
    uses = {ACTOR: ModelUse("trained", "", 8), ROLLOUT: ModelUse("rollout", "", 8, longest=100_000)}
    head, names, *rows = plan(small, uses, ON_CUDA, 80).lines()
    assert head == "memory of each device, GB of 80:"
    assert names.split("  ")[-1] == "at most" and "kv cache" in names
    assert [row.split()[:2] for row in rows] == [["ACTOR", "x8"], ["ROLLOUT", "x8"]]
    assert float(rows[1].split()[-1]) == 0.85 * 80, "a rollout takes its share, and no more"
    assert len({len(row) for row in rows}) == 1
    line = plan(small, uses, replace(ON_CUDA, weight_sync="cuda_ipc"), 80).lines()[-1]
    assert line == "  and 2.0 GB of weights that the actor keeps on the device for the rollout"


@pytest.mark.parametrize(
    ("rollout", "options", "most"),
    [("torch", {}, 1.1), ("vllm", {}, 68.0), ("sglang", {}, 68.0), ("vllm", {"kv_cache_bytes": 3e9}, 4.0)],
)
def test_engine_filling_its_device_is_planned_so(plan, small, rollout, options, most):
    engine = replace(ON_CUDA, rollout=rollout, rollout_options=options)
    row = plan(small, {ROLLOUT: ModelUse("rollout", "", longest=64)}, engine, 80).lines()[2]
    assert float(row.split()[-1]) == most


def test_unknown_models_and_engines_are_named_and_not_refused(plan, small):
    uses = {ACTOR: ModelUse("trained", "some/hub-name")}
    engine = replace(ON_CUDA, device_memory_gb=1)
    unknown = MemoryPlan(uses, engine, "some/hub-name", None, device_bytes(engine)).size_passes()
    line = "  ACTOR x1: not known without the config.json of some/hub-name (config.model_config)"
    assert unknown.lines()[1:] == [line]
    assert unknown.find_errors() == MemoryPlan({}, ON_CUDA).lines() == []
    other = MemoryPlan(uses, replace(ON_CUDA, train="own:Engine"))
    assert other.lines()[1:] == ["  ACTOR x1: not computed for own:Engine"]
    if not torch.cuda.is_available():
        assert plan(small, uses, ON_CUDA, None).find_errors() == []
    assert math.isfinite(bytes_of(small, uses[ACTOR], ON_CUDA).peak)


ZERO_1, ZERO_2, ZERO_ON_HOST = (
    {"train": "deepspeed", "train_options": options}
    for options in ({"zero_stage": 1}, {"zero_stage": 2}, {"optimizer_on_host": True})
)
SPLIT = {"train": "megatron", "parallel": ParallelSizes(tensor_parallel_size=8)}
DEEP = {"tensor_parallel_size": 8, "pipeline_parallel_size": 4}


@pytest.mark.parametrize(
    ("shape", "members", "engine", "line"),
    [
        ("small", 8, ZERO_1, "2.0 (weights 1.2, gradients 0.2, optimizer 0.5); passes are not computed for deepspeed"),
        ("small", 8, ZERO_ON_HOST, "0.7 (weights 0.1, gradients 0.5), and 1.0 of its host; passes"),
        ("large", 64, SPLIT, "68.2 (weights 22.7, gradients 36.4, optimizer 9.1)"),
        ("large", 64, {**SPLIT, "parallel": ParallelSizes(**DEEP)}, "28.2 (weights"),
    ],
)
def test_state_of_deepspeed_and_megatron_is_planned(plan, request, shape, members, engine, line):
    uses = {ACTOR: ModelUse("trained", "", members)}
    planned = plan(request.getfixturevalue(shape), uses, replace(ON_CUDA, **engine), 80)
    assert planned.lines()[-1].strip().startswith(f"ACTOR x{members}: at least {line}")
    assert planned.find_errors() == []


@pytest.mark.parametrize(
    ("engine", "needed", "change"),
    [
        (ZERO_2, 290.8, "engine.train_options.zero_stage=3 engine.train_options.optimizer_on_host=true it is 18.7 GB"),
        (SPLIT, 163.6, "workload.actor.num=64 it is 68.2 GB"),
    ],
)
def test_state_too_large_is_refused_with_a_change(plan, large, engine, needed, change):
    (error,) = plan(large, {ACTOR: ModelUse("trained", "", 8)}, replace(ON_CUDA, **engine), 80).find_errors()
    message = f"ACTOR needs {needed} GB for its weights, gradients and optimizer, and has 73.6 GB of a device's 80.0"
    assert error.what == f"{message}; with {change}"


@pytest.mark.parametrize(
    ("gigabytes", "tokens", "recomputes"),
    [(80, 16384, False), (24, 4096, False), (17, 16384, True), (15.5, 8192, True), (14, 1024, False)],
)
def test_passes_are_as_large_as_fit(small, gigabytes, tokens, recomputes):
    """Activations are recomputed only where the passes would be small."""
    sized = size_passes(AUTO_SIZED, TRAINED, small, gigabytes * 1e9)
    assert (sized.max_tokens_per_microbatch, sized.gradient_checkpointing) == (tokens, recomputes)
    assert bytes_of(small, TRAINED, sized).peak <= 0.8 * gigabytes * 1e9
    larger = replace(sized, max_tokens_per_microbatch=2 * tokens)
    assert tokens == 16384 or bytes_of(small, TRAINED, larger).peak > 0.8 * gigabytes * 1e9
    assert size_passes(AUTO_SIZED, TRAINED, small, 1e9) == AUTO_SIZED.with_passes(1024, recompute=True), "the smallest"


def test_passes_given_stay_and_unknown_ones_are_cautious(small):
    fixed = replace(AUTO_SIZED, max_tokens_per_microbatch=12288)
    assert size_passes(fixed, TRAINED, small, 80e9) == replace(fixed, gradient_checkpointing=False)
    assert size_passes(fixed, TRAINED, small, 24e9) == replace(fixed, gradient_checkpointing=True)
    assert size_passes(ON_CUDA, TRAINED, small, 1e9) == ON_CUDA
    cautious = replace(AUTO_SIZED, max_tokens_per_microbatch=16384, gradient_checkpointing=True)
    for shape, capacity in ((None, 80e9), (small, None)):
        assert size_passes(AUTO_SIZED, TRAINED, shape, capacity) == cautious
    other = replace(AUTO_SIZED, train="megatron")
    assert size_passes(other, TRAINED, small, 80e9) == replace(cautious, train="megatron")
    unbounded = size_passes(AUTO_SIZED, replace(TRAINED, bounded=False), small, 80e9)
    assert unbounded.gradient_checkpointing, "a longer row may come"
    long = size_passes(AUTO_SIZED, replace(TRAINED, longest=9000), small, 17e9)
    assert long.max_tokens_per_microbatch == 16384 and long.gradient_checkpointing


def test_passes_on_a_cpu_have_the_defaults():
    resolved = replace(AUTO_SIZED, device="auto").resolve(on_cuda=False)
    assert (resolved.max_tokens_per_microbatch, resolved.gradient_checkpointing) == (16384, False)
    assert replace(AUTO_SIZED).resolve(on_cuda=False).max_tokens_per_microbatch == "auto"  # the device is given


def test_plan_shows_passes_fit_for_every_role(plan, small):
    uses = {ACTOR: TRAINED, REFERENCE: ModelUse("frozen", "")}
    sized = plan(small, uses, AUTO_SIZED, 15.5)
    assert "  passes of 8,192 tokens, activations recomputed" in sized.lines()
    assert (sized.engine.max_tokens_per_microbatch, sized.engine.gradient_checkpointing) == (8192, True)
    assert plan(small, {REFERENCE: uses[REFERENCE]}, AUTO_SIZED, 16).chosen == "  passes of 16,384 tokens"
    (line,) = (line for line in plan(small, uses, AUTO_SIZED, None).lines() if "passes of" in line)
    assert line.endswith("activations recomputed; they are sized once the devices are known (engine.device_memory_gb)")
    assert not any("passes of" in line for line in plan(small, uses, ON_CUDA, 17).lines())
    (error,) = plan(small, {ACTOR: TRAINED}, AUTO_SIZED, 3.9).find_errors()
    assert "workload.actor.num=4" in error.what


@pytest.mark.parametrize(("longest", "length"), [(1, 64), (256, 256), (257, 512), (600, 768), (1024, 1024)])
def test_cache_of_the_torch_engine_is_as_long_as_allocated(small, longest, length):
    def cache(rollout, tokens):
        engine = replace(ON_CUDA, rollout=rollout)
        return bytes_of(small, ModelUse("rollout", "", longest=tokens), engine).kv_cache

    assert cache("torch", longest) == cache("torch", length) == cache("vllm", length)
    assert cache("vllm", longest) * length == cache("vllm", length) * longest


def test_output_layer_with_adapters_is_the_models_own(small):
    own = ModelShape.of(AutoConfig.for_model("qwen2", **{**SIZES, "tie_word_embeddings": False}))
    head, score = LoraSettings(targets=("lm_head",)), LoraSettings(targets=("q_proj", "score"))
    assert own.find_target_errors(head) == own.find_target_errors(LoraSettings(targets="all-linear")) == []
    message = "the output layer shares the embedding's weight, so it cannot have an adapter"
    assert small.find_target_errors(head) == [message]
    for scoring in (own.with_score_head(), small.with_score_head()):
        assert scoring.find_target_errors(score) == []
        assert scoring.find_target_errors(head)[0].startswith("no linear layer is named 'lm_head'")
    assert "did you mean" not in own.find_target_errors(score)[0]
