# SPDX-License-Identifier: Apache-2.0
"""SFT, reward model and DPO: the first step by hand, learning, files, refusals, and rows over workers."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.data.source import SourceRows
from dlrover.python.rl.engine.api.base import OptimizerConfig, UpdateResult
from dlrover.python.rl.engine.model.loading import read_eos_ids
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer, write_tiny_model
from dlrover.python.rl.recipe.base.engine_workload import Machine
from dlrover.python.rl.recipe.dpo import DPOConfig, DPOTrainer
from dlrover.python.rl.recipe.grpo import GRPOConfig
from dlrover.python.rl.recipe.rm import RMConfig, RMTrainer
from dlrover.python.rl.recipe.sft import SFTConfig, SFTTrainer
from dlrover.python.rl.recipe.trainers.examples import PairData, ScoredPairData, SFTData
from dlrover.python.rl.recipe.workloads import ActorWorkload, ReferenceWorkload
from dlrover.python.rl.trainer.plan import plan_of
from dlrover.python.rl.trainer.workload import trainer_invocation
from tests.support.example_jobs import EXAMPLES, PAIRS, ROLES, log_probs, stage
from tests.support.run_files import metrics_of, read_json, write_rows

SEEDS = (0, 1, 2)
LEARNING = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Models of three seeds, examples and pairs."""
    folder = tmp_path_factory.mktemp("inputs")
    for seed in SEEDS:
        write_tiny_model(folder / f"model-{seed}", hidden=64, layers=2, max_positions=64, seed=seed)
    write_rows(folder / "examples.jsonl", EXAMPLES)
    write_rows(folder / "pairs.jsonl", PAIRS)
    return folder


def config_of(inputs, kind, seed=0, **more):
    data = {"train": str(inputs / ("examples.jsonl" if kind == "sft" else "pairs.jsonl"))}
    config = {"model": str(inputs / f"model-{seed}"), "data": data, "batch_size": 4, "epochs": 1.0}
    return {**config, "optimizer": {"lr": 1e-3}, "engine": {"threads": 1}, **more}


def ran(kind, folder, config):
    stage(kind, folder, config).run()
    return metrics_of(folder)


# -- the first step by hand --------------------------------------------------------------------------------------------
@pytest.mark.feature(108)
def test_first_loss_of_sft_is_the_mean_over_trained_tokens(inputs, tmp_path):
    (first,) = ran("sft", tmp_path, config_of(inputs, "sft"))
    expected = np.concatenate(log_probs(str(inputs / "model-0"), EXAMPLES))
    assert first["loss"] == pytest.approx(-expected.mean(), abs=1e-5)


@pytest.mark.parametrize(
    ("answer", "length", "cause"),
    [("42", 32, ""), ("4" * 40, 32, "2 of 2 rows are cut at data.max_length=32"), ("4" * 40, 64, "")],
)
def test_sft_without_a_trained_end_warns_before_it_starts(inputs, tmp_path, caplog, answer, length, cause):
    messages = [{"role": "user", "content": "6*7"}, {"role": "assistant", "content": answer}]
    rows = [{"messages": messages, "id": 1, "tool": ""}] * 2
    data = {"train": write_rows(tmp_path / "rows.jsonl", rows), "max_length": length}
    with caplog.at_level(logging.INFO):
        ran("sft", tmp_path, config_of(inputs, "sft", data=data))
    warnings = [record.message for record in caplog.records if "trains no end" in record.message]
    consequence = "trains no end of a sequence, so the model will not learn to stop"
    assert warnings == ([f"{data['train']} {consequence}: {cause}"] if cause else [])
    columns = [record.message for record in caplog.records if "unused" in record.message]
    assert columns == [f"{data['train']}: unused columns: id, tool (did you mean 'tools'?)"]


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": {"eos_token_id": [256, 258]}}, (258, 256)),
        ({"generation_config.json": {"eos_token_id": 257}, "config.json": {"eos_token_id": 256}}, (258, 257)),
        ({"config.json": {"eos_token_id": 256}}, (258, 256)),
        ({"generation_config.json": {}}, (258,)),
        ({}, (258,)),
    ],
)
def test_eos_ids_are_the_tokenizers_and_the_models(tmp_path, files, ids):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_eos_ids(tmp_path, make_byte_tokenizer()) == ids


@pytest.mark.parametrize("kind", [SFTData, PairData, ScoredPairData])
def test_arguments_of_the_template_are_an_option_of_the_data(kind):
    talk, answer = [{"role": "user", "content": "1"}], [{"role": "assistant", "content": "2"}]
    row = {"messages": talk, "chosen": "2", "rejected": "3"}
    if kind is SFTData:
        row = {"prompt": talk, "completion": answer}
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{{ start }}" + tokenizer.chat_template
    data, rows = kind(train="", chat_template_kwargs={"start": "go "}), SourceRows("rows", [(1, row)])
    for settings, opening in ((data, "go <|im_start|>user"), (kind(train=""), "<|im_start|>user")):
        batch, _ = settings.encode(rows, tokenizer)
        assert tokenizer.decode(batch.ragged("tokens")[0]).startswith(opening)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (GRPOConfig, {"rollout": {"chat_template_kwargs": {"a": 1}}}),  # its former name
        (GRPOConfig, {"data": {"apply_chat_template_kwargs": {"a": 1}}}),
        (GRPOConfig, {"chat_template_kwargs": {"a": 1}}),
        (DPOConfig, {"chat_template_kwargs": {"a": 1}, "data": {"train": "rows.jsonl"}}),
    ],
)
def test_other_names_of_the_templates_arguments(kind, keys):
    assert require(kind, {"model": "m", **keys}, "config").data.chat_template_kwargs == {"a": 1}


@pytest.mark.feature(110)
def test_dpo_begins_with_log_2_and_continues_as_by_hand(inputs, tmp_path):
    first, second = ran("dpo", tmp_path, config_of(inputs, "dpo", epochs=2.0, keep={"save_every": 1, "keep_last": 9}))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    before, after = str(inputs / "model-0"), str(tmp_path / "steps/step-1")
    gain = {}
    for side in ("chosen", "rejected"):
        gain[side] = np.subtract(*([row.sum() for row in log_probs(model, PAIRS, side)] for model in (after, before)))
    margins = 0.1 * (gain["chosen"] - gain["rejected"])
    assert second["loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-5)
    for side in gain:
        assert second[f"rewards/{side}"] == pytest.approx(0.1 * gain[side].mean(), abs=1e-5)


def test_dpo_with_adapters_needs_no_reference_and_is_the_same(inputs, tmp_path):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    config = config_of(inputs, "dpo", epochs=3.0)
    config["engine"] = {**config["engine"], "lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}
    assert problems_of("dpo", config, ACTOR=1) == {}
    ends = []
    for name, roles in (("with", ROLES["dpo"]), ("without", {"ACTOR": ROLES["dpo"]["ACTOR"]})):
        stage("dpo", tmp_path / name, config, roles).run()
        ends.append((tmp_path / name / "model/model.safetensors").read_bytes())
    assert ends[0] == ends[1]


def test_dpo_over_4_bits_is_relative_to_the_rounded_model(inputs, tmp_path):
    pytest.importorskip("peft", reason="the extra 'lora' is not installed")
    pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    config = config_of(inputs, "dpo", epochs=3.0, optimizer={"name": "adamw_8bit", "lr": 1e-2})
    config["engine"] = {**config["engine"], "lora": {"rank": 2, "quantize_base": "nf4"}}
    stage("dpo", tmp_path, config, {"ACTOR": ROLES["dpo"]["ACTOR"]}).run()
    first, *_, last = metrics_of(tmp_path)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["loss"] < 0.99 * first["loss"]


@pytest.mark.parametrize(("kind", "rate"), [(SFTConfig, 1e-5), (RMConfig, 1e-5), (DPOConfig, 1e-6)])
def test_default_learning_rate_depends_on_the_recipe(kind, rate):
    config = {"model": "m", "data": {"train": "rows.jsonl"}}
    assert require(kind, config, "config").optimizer == OptimizerConfig(lr=rate)
    warming_up = {**config, "optimizer": {"warmup_steps": 3}}
    assert require(kind, warming_up, "config").optimizer == OptimizerConfig(lr=rate, warmup_steps=3)


# -- learning ----------------------------------------------------------------------------------------------------------
@pytest.mark.feature(108)
@pytest.mark.parametrize("seed", LEARNING)
def test_sft_learns_four_rows(inputs, tmp_path, seed):
    rows = ran("sft", tmp_path, config_of(inputs, "sft", seed, epochs=50.0, optimizer={"lr": 1e-2}))
    assert len(rows) == 50
    assert rows[-1]["loss"] < 0.1 * rows[0]["loss"]


@pytest.mark.feature(109, 110)
@pytest.mark.parametrize("seed", LEARNING)
@pytest.mark.parametrize(("kind", "epochs", "rate"), [("rm", 50.0, 3e-3), ("dpo", 20.0, 1e-3)])
def test_recipe_on_pairs_learns_four_pairs(inputs, tmp_path, kind, epochs, rate, seed):
    rows = ran(kind, tmp_path, config_of(inputs, kind, seed, epochs=epochs, optimizer={"lr": rate}))
    assert len(rows) == epochs
    assert rows[-1]["rewards/accuracies"] == 1.0
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["rewards/margins"] > 0


# -- what is written ---------------------------------------------------------------------------------------------------
@pytest.mark.feature(133)
def test_reward_model_loads_as_a_classifier_with_its_scores(inputs, tmp_path):
    job = stage("rm", tmp_path, config_of(inputs, "rm", epochs=3.0))
    job.run()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    assert module.config.architectures == ["Qwen2ForSequenceClassification"]
    batch, _ = ScoredPairData(train="").encode(SourceRows("pairs", list(enumerate(PAIRS))), tokenizer)
    trained = job.workload("ACTOR")._engine.evaluate(batch.select("tokens", "action_mask")).ragged("scores")
    for tokens, scores in zip(batch.ragged("tokens"), trained, strict=True):
        with torch.no_grad():
            score = module(torch.tensor(tokens)[None]).logits[0, 0]
        np.testing.assert_allclose(score, scores[-1], atol=1e-5)
    weights = module.state_dict()
    assert "score.bias" not in weights and weights["score.weight"].shape == (1, 64)


@pytest.mark.feature(133)
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_language_model_loads_with_its_weights(inputs, tmp_path, kind):
    job = stage(kind, tmp_path, config_of(inputs, kind, epochs=2.0))
    job.run()
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trained = dict(job.workload("ACTOR")._engine.named_weights())
    for name, tensor in module.state_dict().items():
        if name in trained:
            assert torch.equal(tensor, trained[name].detach())


@pytest.mark.feature(59, 64)
@pytest.mark.parametrize(("more", "counts"), [({}, (5, 1, 1)), ({"over_long": "drop"}, (4, 0, 2))])
def test_cut_and_dropped_rows_are_counted_in_the_summary(inputs, tmp_path, more, counts):
    rows = [*EXAMPLES, {"prompt": "1+1=", "response": "2" * 30}, {"prompt": "x" * 20, "response": "yes"}]
    data = {"train": write_rows(tmp_path / "rows.jsonl", rows), "max_length": 12, **more}
    ran("sft", tmp_path, config_of(inputs, "sft", data=data))
    summary = read_json(tmp_path / "summary.json")
    assert (summary["examples"], summary["cut_rows"], summary["dropped_rows"]) == counts


@pytest.mark.parametrize("kind", ["rm", "dpo"])
def test_batch_larger_than_the_data_has_pairs_several_times(inputs, tmp_path, kind):
    (row,) = ran(kind, tmp_path / "thrice", config_of(inputs, kind, batch_size=12, epochs=3.0))
    (once,) = ran(kind, tmp_path / "once", config_of(inputs, kind))
    assert row["loss"] == pytest.approx(once["loss"], abs=1e-6)


# -- what is refused ---------------------------------------------------------------------------------------------------
TRAINERS = {"sft": SFTTrainer, "rm": RMTrainer, "dpo": DPOTrainer}


def problems_of(kind, config, **roles):
    sizes = {RLRoleType(role): size for role, size in (roles or {"ACTOR": 1, "REFERENCE": 1}).items()}
    return {problem.where: problem.what for problem in plan_of(TRAINERS[kind]).check_config(config, sizes)}


@pytest.mark.parametrize("kind", TRAINERS)
def test_right_configuration_has_no_problems(inputs, kind):
    assert problems_of(kind, config_of(inputs, kind)) == {}


@pytest.mark.feature(147)
def test_each_nonpositive_number_names_its_argument(inputs):
    config = config_of(inputs, "sft", batch_size=0, epochs=0, eval_every=-1) | {"seed": -1}
    groups = {"keep": {"patience": -1, "save_every": -1, "keep_last": 0}, "data": {"max_length": 0, "eval_share": 0.0}}
    groups |= {"optimizer": {"lr": 0, "warmup_steps": -1}, "engine": {"threads": 0, "max_tokens_per_microbatch": 0}}
    problems = problems_of("sft", config | {group: config.get(group, {}) | values for group, values in groups.items()})
    names = {f"{group}.{key}" for group, values in groups.items() for key in values}
    assert {f"config.{name}" for name in names | {"batch_size", "epochs", "eval_every", "seed"}} <= set(problems)


@pytest.mark.parametrize(
    ("kind", "config", "where", "message"),
    [
        ("dpo", {"algorithm": {"name": "grpo"}}, "config.algorithm.name", "is one of dpo"),
        ("dpo", {"algorithm": {"name": "dpo", "bta": 1}}, "config.algorithm.bta", "did you mean 'beta'"),
        ("dpo", {}, "workload", "'reference' is required"),
        ("dpo", {"reference_model": "./none"}, "config.reference_model", "no such folder: ./none"),
        ("sft", {"keep": {"best": "eval/loss", "patience": 1}}, "config.keep.best", "set config.eval_every"),
        ("sft", {"eval_every": 1, "keep": {"best": "eval_los"}}, "config.keep.best", "did you mean 'eval/loss'"),
        ("rm", {"eval_every": 1, "keep": {"patience": 2}}, "config.keep.patience", "set config.keep.best"),
    ],
)
def test_wrong_configuration_is_refused_with_its_place(inputs, kind, config, where, message):
    assert message in problems_of(kind, config_of(inputs, kind, **config), ACTOR=1)[where]


def test_bad_rows_are_named_by_their_lines(inputs, tmp_path):
    where = write_rows(tmp_path / "bad.jsonl", [PAIRS[0], {"prompt": "1", "chosen": "2"}, PAIRS[1]])
    problems = problems_of("rm", config_of(inputs, "rm", data={"train": where}))
    assert "needs 'chosen' and 'rejected'" in problems[f"{where}:2"]


# -- rows over the workers of a job ------------------------------------------------------------------------------------
class Given(ActorWorkload):
    """Keeps what it is given to train on, without a model."""

    def init_model(self, *arguments):
        self.batches = []

    @trainer_invocation(target="RANK0")
    def machine(self):
        return Machine(0)

    def train(self, batch):
        self.batches.append(batch)
        return UpdateResult(0.0, 0.0, 0.0, dict.fromkeys(RMTrainer.metric_names, 0.0))

    def save(self, folder):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.feature(57, 60)
@pytest.mark.parametrize("kind", ["sft", "rm"])
def test_ranks_get_about_as_many_tokens_and_whole_pairs(inputs, tmp_path, kind):
    texts = ["x" * length for length in np.random.default_rng(0).lognormal(3.0, 0.8, 32).astype(int) + 1]
    rows = [{"prompt": "A", "response": text, "chosen": text, "rejected": f"{text[1:]}y"} for text in texts]
    data = {"train": write_rows(tmp_path / "rows.jsonl", rows)}
    config = {"model": str(inputs / "model-0"), "data": data, "batch_size": 32}
    job = stage(kind, tmp_path / "out", config, {"ACTOR": (Given, 8)})
    job.run()
    parts = [job.workload("ACTOR", rank).batches[0] for rank in range(8)]
    lines = sorted(line for part in parts for line in part.dense("line").tolist())
    assert lines == sorted([*range(1, 33)] * (1 if kind == "sft" else 2))
    loads = np.array([part.ragged("tokens").lengths.sum() for part in parts])
    assert loads.max() <= 1.06 * loads.mean()
    if kind == "rm":
        assert all((part.dense("line")[::2] == part.dense("line")[1::2]).all() for part in parts)


@pytest.mark.feature(60, 61)
@pytest.mark.parametrize("members", [3, 5])
def test_log_probs_of_several_references_return_to_their_pairs(inputs, tmp_path, members):
    pairs = [{**row, "chosen": row["chosen"] * (1 + at), "rejected": "no"} for at, row in enumerate(PAIRS)]
    config = config_of(inputs, "dpo", data={"train": write_rows(tmp_path / "pairs.jsonl", pairs)})
    roles = {"ACTOR": (ActorWorkload, 1), "REFERENCE": (ReferenceWorkload, members)}
    stage("dpo", tmp_path / "out", config, roles).run()
    (first,) = metrics_of(tmp_path / "out")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/chosen"] == pytest.approx(0.0, abs=1e-6)
