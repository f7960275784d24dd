# SPDX-License-Identifier: Apache-2.0
"""Evaluation on the way, the best model, an early end, and updates that are not finite."""

import math
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from dlrover.python.rl.common.errors import InvalidJob, NonFiniteUpdate
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.typed import require
from dlrover.python.rl.data import state_tree
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import KeepConfig
from dlrover.python.rl.recipe.dpo import DPOConfig, DPOTrainer
from dlrover.python.rl.recipe.reporting.run_log import ModelSaver, validate_keep
from dlrover.python.rl.recipe.sft import SFTConfig, SFTTrainer
from dlrover.python.rl.recipe.trainers.examples import Measured, PairData, SFTData, load_examples, validate_examples
from dlrover.python.rl.recipe.workloads import ActorWorkload, ReferenceWorkload, RewardWorkload, RolloutWorkload
from dlrover.python.rl.trainer.plan import plan_of
from dlrover.python.rl.trainer.workload import trainer_invocation
from tests.support.example_jobs import EXAMPLES, PAIRS, log_probs, stage
from tests.support.run_files import metrics_of, read_json, read_lines, write_rows

HELD_OUT = [{"prompt": "7+7=", "response": "14"}, {"prompt": "1=", "response": "one, and a good deal more"}]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model", hidden=32, layers=1, max_positions=64)
    for name, rows in {"examples": EXAMPLES, "pairs": PAIRS, "held_out": HELD_OUT}.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def config_of(inputs, kind="sft", **more):
    files = ("examples", "held_out") if kind == "sft" else ("pairs", "pairs")
    data = {side: str(inputs / f"{file}.jsonl") for side, file in zip(("train", "eval"), files, strict=True)}
    config = {"model": str(inputs / "model"), "data": data, "batch_size": 2, "epochs": 2.5, "optimizer": {"lr": 1e-2}}
    return {**config, "engine": {"threads": 1}, **more}


def evaluated_steps(folder):
    return [row["step"] for row in metrics_of(folder) if "eval/loss" in row]


@pytest.mark.feature(128)
def test_evaluation_in_its_steps_changes_no_state(inputs, tmp_path):
    ends = {}
    for every in (0, 2):
        job = stage("sft", tmp_path / str(every), config_of(inputs, eval_every=every))
        job.run()
        dumped = state_tree.dump(job.workload("ACTOR").state_dict())
        ends[every] = dumped.skeleton, [bytes(buffer) for buffer in dumped.buffers]
    assert ends[0] == ends[2]
    assert [evaluated_steps(tmp_path / every) for every in ("0", "2")] == [[], [2, 4, 5]]
    losses = [[row["loss"] for row in metrics_of(tmp_path / every)] for every in ("0", "2")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("data", "steps"), [({"eval": "held_out.jsonl"}, [5]), ({"eval_share": 0.3}, [4]), ({}, [])])
def test_evaluation_comes_after_the_last_step_by_default(inputs, tmp_path, data, steps):
    files = {name: str(inputs / value) if name == "eval" else value for name, value in data.items()}
    stage("sft", tmp_path, config_of(inputs, data={"train": str(inputs / "examples.jsonl"), **files})).run()
    assert evaluated_steps(tmp_path) == steps


@pytest.mark.feature(129)
@pytest.mark.parametrize("averaging", ["token", "sequence"])
@pytest.mark.parametrize("budget", [8, 1024])
def test_cross_entropy_and_perplexity_are_weighted_by_tokens(inputs, tmp_path, averaging, budget):
    engine = {"threads": 1, "max_tokens_per_microbatch": budget}
    stage("sft", tmp_path, config_of(inputs, eval_every=1, epochs=0.5, averaging=averaging, engine=engine)).run()
    (row,) = metrics_of(tmp_path)
    expected = np.concatenate(log_probs(str(tmp_path / "model"), HELD_OUT))
    assert row["eval/loss"] == pytest.approx(-expected.mean(), abs=1e-5)
    assert row["eval/perplexity"] == pytest.approx(math.exp(-expected.mean()), rel=1e-5)


@pytest.mark.feature(76)
def test_held_out_rows_are_never_trained_on(inputs, tmp_path):
    where = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}:", "response": str(n)} for n in range(40)])
    data, tokenizer = SFTData(train=where, eval_share=0.1), AutoTokenizer.from_pretrained(inputs / "model")
    examples = load_examples(data, tokenizer, evaluates=True, seed=0)
    train, held_out = (set(batch.dense("line").tolist()) for batch in (examples.train, examples.held_out))
    assert (len(train), len(held_out), len(train | held_out)) == (36, 4, 40)


@pytest.mark.feature(76)
def test_pairs_of_one_prompt_are_held_out_together(inputs, tmp_path):
    def talk(number, answer):
        return [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": answer}]

    order = [(number, answer) for answer in range(2) for number in range(10)]
    rows = [{side: talk(number, f"{side} {answer}") for side in ("chosen", "rejected")} for number, answer in order]
    data = PairData(train=write_rows(tmp_path / "pairs.jsonl", rows), eval_share=0.3)
    examples = load_examples(data, AutoTokenizer.from_pretrained(inputs / "model"), evaluates=True, seed=0)
    train, held_out = (set(batch.dense("line").tolist()) for batch in (examples.train, examples.held_out))
    assert len(held_out) == 6
    assert train | held_out == set(range(1, 21))
    assert {(line - 1) % 10 for line in train}.isdisjoint((line - 1) % 10 for line in held_out)


@pytest.mark.parametrize("kind", ["rm", "dpo"])
def test_pairs_are_evaluated_by_the_loss_of_training(inputs, tmp_path, kind):
    stage(kind, tmp_path, config_of(inputs, kind, batch_size=4, epochs=2.0, eval_every=1)).run()
    first, second = metrics_of(tmp_path)
    for name in ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"):
        assert first[f"eval/{name}"] == pytest.approx(second[name], abs=1e-6), "after a step is before the next"
    summary = read_json(tmp_path / "summary.json")
    assert (summary["examples"], summary["held_out_rows"]) == (4, 4), "pairs, of two sequences each"


def test_evaluated_policy_is_compared_with_its_reference(inputs, tmp_path):
    config = config_of(inputs, "dpo", batch_size=4, eval_every=1)
    stage("dpo", tmp_path / "trained", config).run()
    last = metrics_of(tmp_path / "trained")[-1]
    trained = {"model": str(tmp_path / "trained/model"), "eval_only": True}
    stage("dpo", tmp_path / "alone", config | trained | {"reference_model": str(inputs / "model")}).run()
    margins = read_json(tmp_path / "alone/summary.json")["eval/rewards/margins"]
    assert margins == pytest.approx(last["eval/rewards/margins"], rel=1e-5) != 0.0
    lora = {"engine": {"threads": 1, "lora": {}}, "reference_model": "another"}
    dpo = require(DPOConfig, config | trained | lora, "config")
    errors = map(str, plan_of(DPOTrainer).find_errors(dpo, {RLRoleType.ACTOR: 1}))
    assert [error.partition(":")[0] for error in errors if "the role" in error] == ["config.reference_model"]


@pytest.mark.parametrize(
    ("data", "every", "faults"),
    [({}, None, ["config.data.eval"]), ({}, 0, ["config.data.eval"]), ({}, 1, []), ({"eval_share": 0.5}, 0, [])],
)
def test_evaluation_alone_needs_held_out_rows(inputs, data, every, faults):
    config = config_of(inputs, data={"train": str(inputs / "examples.jsonl"), **data}, eval_only=True, eval_every=every)
    errors = plan_of(SFTTrainer).find_errors(require(SFTConfig, config, "config"), {RLRoleType.ACTOR: 1})
    assert [error.where for error in errors] == faults


def test_held_out_share_is_not_trained_on_without_evaluation(inputs, tmp_path):
    data = SFTData(train=str(inputs / "examples.jsonl"), eval_share=0.5)
    examples = load_examples(data, AutoTokenizer.from_pretrained(inputs / "model"), evaluates=False, seed=0)
    assert (len(examples.train), examples.held_out) == (len(EXAMPLES) // 2, None)
    one = replace(data, train=write_rows(tmp_path / "one.jsonl", EXAMPLES[:1]))
    (error,) = validate_examples(one, False, 0)
    assert error.where == "config.data.eval_share" and "both sides need a row" in error.what


def test_sums_over_ranks_of_which_one_has_no_rows():
    parts = [Measured(0.25, {"accuracy": 0.5}), Measured(0.0, {}), Measured(0.5, {"accuracy": 0.25})]
    assert Measured.total(parts) == Measured(0.75, {"accuracy": 0.75})


@pytest.mark.slow
@pytest.mark.feature(130)
def test_answers_are_drawn_and_scored_by_the_jobs_roles(inputs, tmp_path):
    config = config_of(inputs, batch_size=4, epochs=50.0, eval_every=50)
    config["data"] = {name: str(inputs / "examples.jsonl") for name in ("train", "eval")}
    roles = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (RolloutWorkload, 2), "REWARD": (RewardWorkload, 1)}
    answers = {"max_new_tokens": 8, "reward": {"workers": 1}}
    job = stage("sft", tmp_path / "asked", config | {"answers": answers, "keep": {"best": "eval/reward"}}, roles)
    job.run()
    for role, rank in (("ROLLOUT", 0), ("ROLLOUT", 1), ("ACTOR", 0)):
        job.workload(role, rank).close()
    row = metrics_of(tmp_path / "asked")[-1]
    assert (row["eval/reward"], row["eval/failed"]) == (1.0, 0.0), "it knows four sums by heart"
    rows = read_lines(tmp_path / "asked/held_out.jsonl")
    assert [(row["prompt"], row["completion"]) for row in rows] == [tuple(row.values()) for row in EXAMPLES]
    assert (tmp_path / "asked/best/model.safetensors").exists()
    stage("sft", tmp_path / "plain", config | {"epochs": 1.0}).run()
    assert "eval/reward" not in metrics_of(tmp_path / "plain")[-1]


ANSWERING = ("ACTOR", "ROLLOUT", "REWARD")


@pytest.mark.parametrize(
    ("config", "roles", "where", "message"),
    [
        ({"eval_every": 1}, ("ACTOR", "ROLLOUT"), "workload", "both"),
        ({"eval_every": 0}, ANSWERING, "eval_every", "need evaluations"),
        ({"answers": {"reward": {"model": "scorer"}}}, ANSWERING, "answers.reward.model", "reward.function scores"),
    ],
)
def test_roles_and_settings_of_answers_have_to_fit(inputs, config, roles, where, message):
    sizes = {RLRoleType(role): 1 for role in roles}
    problems = plan_of(SFTTrainer).check_config(config_of(inputs, **({"eval_every": 1} | config)), sizes)
    problems = {problem.where.removeprefix("config."): problem.what for problem in problems}
    assert message in problems[where]


# -- what is kept ------------------------------------------------------------------------------------------------------
def make_saver(tmp_path, before=None, evaluated=None, **config):
    """A saver, or one with the state of the saver ``before``, and the list of the folders that it has written."""
    saved = []

    def save(folder):
        folder.mkdir(parents=True, exist_ok=True)
        saved.append(folder.name)

    saver = ModelSaver(KeepConfig(**config), tmp_path, save)
    if evaluated is not None:
        saver.evaluated = evaluated
    if before is not None:
        saver.load_state_dict(before.state_dict())
    return saver, saved


@pytest.mark.parametrize(
    ("config", "values", "best"),
    [
        ({"best": "eval/loss"}, [3.0, math.nan, 2.0, 2.5, 1.0, 1.0], [1, 3, 5]),
        ({"best": "eval/rewards/accuracies"}, [0.1, 0.3, 0.2, 0.4], [1, 2, 4]),
        ({"best": "eval/loss", "best_is": "highest"}, [math.nan, 1.0, 2.0, 1.0], [2, 3]),
        ({}, [1.0, 0.5], []),
    ],
)
def test_best_model_by_a_named_metric_is_kept(tmp_path, config, values, best):
    saver, saved = make_saver(tmp_path, **config)
    counts = [0]
    for step, value in enumerate(values, start=1):
        saver.update(step, {config.get("best", "x"): value})
        counts.append(len(saved))
    assert [step for step in range(1, len(counts)) if counts[step] > counts[step - 1]] == best
    assert set(saved) <= {"best"}
    if best:
        assert saver.summary()["best/step"] == best[-1]


@pytest.mark.parametrize(
    ("former", "metric"),
    [("eval_loss", "eval/loss"), ("held_out_reward", "eval/reward")],
)
def test_former_name_of_the_best_metric_is_read_with_a_note(tmp_path, caplog, former, metric):
    assert validate_keep(KeepConfig(best=former), 1, [metric]) == []
    saver, saved = make_saver(tmp_path, best=former)
    assert f"{former} is now called {metric}" in caplog.text
    saver.update(1, {metric: 2.0})
    saver.update(2, {metric: 1.0})
    assert len(saved) == (2 if metric == "eval/loss" else 1)
    assert f"best/{metric}" in saver.summary()


def test_unknown_best_metric_is_named_with_the_nearest():
    saver = ModelSaver(KeepConfig(best="acuracy"), None, None)
    with pytest.raises(InvalidJob, match="did you mean 'eval/accuracy'"):
        saver.update(1, {"eval/accuracy": 1.0, "eval/reward": 0.0})


def test_best_model_of_other_evaluation_rows_is_forgotten(tmp_path, caplog):
    saver, _ = make_saver(tmp_path, evaluated="these", best="eval/accuracy", patience=1)
    saver.update(1, {"eval/accuracy": 0.9})
    for evaluated, best in (("these", 0.9), ("others", None)):
        again, _ = make_saver(tmp_path, saver, evaluated, best="eval/accuracy", patience=1)
        assert again.summary().get("best/eval/accuracy") == best
    assert "the evaluation rows have changed" in caplog.text


def test_evaluation_without_the_metric_does_not_count(tmp_path, caplog):
    saver, saved = make_saver(tmp_path, best="eval/accuracy", patience=1)
    saver.update(1, {"eval/accuracy": 0.5, "eval/reward": 0.5})
    saver.update(2, {"eval/reward": 0.7})
    assert (saved, saver.should_stop) == (["best"], False)
    assert "step 2: the evaluation has no eval/accuracy" in caplog.text


@pytest.mark.parametrize(
    ("config", "accuracy", "writes"),
    [
        ({"best": "eval/reward"}, 0.9, ["best"]),
        ({"best": "eval/accuracy", "best_is": "lowest"}, 0.9, ["best"]),
        ({"best": "eval/accuracy"}, 0.6, []),
    ],
)
def test_best_model_is_compared_by_its_own_metric(tmp_path, config, accuracy, writes):
    former, _ = make_saver(tmp_path, best="eval/accuracy")
    former.update(1, {"eval/accuracy": 0.62})
    saver, saved = make_saver(tmp_path, former, **config)
    saver.update(2, {"eval/reward": -0.5, "eval/accuracy": accuracy})
    assert saved == writes


@pytest.mark.parametrize(
    ("patience", "values"),
    [(2, [1.0, 2.0, 0.5, 0.6, 0.5]), (1, [math.nan, 0.5, math.nan, 0.6])],
    ids=["in a row", "without those that are no number"],
)
def test_patience_counts_evaluations_through_a_restart(tmp_path, patience, values):
    saver, _ = make_saver(tmp_path, best="loss", patience=patience)
    for step, value in enumerate(values[:-1], start=1):
        saver.update(step, {"loss": value})
        assert not saver.should_stop
    again, _ = make_saver(tmp_path, saver, best="loss", patience=patience)
    again.update(len(values), {"loss": values[-1]})
    assert again.should_stop


def test_last_folders_are_kept_and_foreign_ones_left(tmp_path):
    saver, saved = make_saver(tmp_path, save_every=3, keep_last=2)
    (tmp_path / "steps/step-99").mkdir(parents=True)
    (tmp_path / "steps/mine").mkdir()
    for step in range(1, 11):
        saver.save_step(step)
    assert saved == ["step-3", "step-6", "step-9"]
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["mine", "step-6", "step-9"]


def test_run_without_improvement_ends_with_its_best_model(inputs, tmp_path):
    config = config_of(inputs, epochs=50.0, eval_every=1, keep={"best": "eval/loss", "patience": 3})
    job = stage("sft", tmp_path, config)
    job.run()
    losses = [row["eval/loss"] for row in metrics_of(tmp_path)]
    best = int(np.argmin(losses))
    assert len(losses) == best + 4 < 100
    summary = read_json(tmp_path / "summary.json")
    assert (summary["best/step"], summary["steps"]) == (best + 1, len(losses))
    again = np.concatenate(log_probs(str(tmp_path / "best"), HELD_OUT))
    assert -again.mean() == pytest.approx(losses[best], abs=1e-5)
    before = (tmp_path / "metrics.jsonl").read_text()
    job.run()
    assert (tmp_path / "metrics.jsonl").read_text() == before, "a run that has ended has nothing left to do"


# -- updates that are not finite ---------------------------------------------------------------------------------------
class Poisoned(ReferenceWorkload):
    """A reference that gives NaN for the second sequence of a batch."""

    @trainer_invocation(blocking=False)
    def logprobs(self, rollouts, temperature):
        batch = super().logprobs(rollouts, temperature)
        column = batch.ragged("ref_logprobs")
        values = column.values.copy()
        values[column.offsets[1] : column.offsets[2]] = math.nan
        return batch.with_columns(ref_logprobs=column.like(values))


def test_nan_loss_ends_the_run_with_the_step_and_the_rows(inputs, tmp_path):
    roles = {"ACTOR": (ActorWorkload, 1), "REFERENCE": (Poisoned, 1)}
    job = stage("dpo", tmp_path, config_of(inputs, "dpo", batch_size=4), roles)
    with pytest.raises(NonFiniteUpdate, match=r"step 1: the loss is nan .* not finite: .*pairs.jsonl:[1-4] ") as caught:
        job.run()
    (row,) = read_lines(tmp_path / "refused.jsonl")
    assert row["step"] == 1
    assert row["sample"] in str(caught.value)
    line = int(row["sample"].rpartition(":")[2])
    assert row["text"].startswith(PAIRS[line - 1]["prompt"] + PAIRS[line - 1]["rejected"])


def test_nonfinite_updates_are_skipped_if_asked(inputs, tmp_path):
    config = config_of(inputs, optimizer={"lr": 1e30, "skip_nonfinite": 1}, batch_size=4)
    with pytest.raises(NonFiniteUpdate, match=r"step 3: the (loss|gradient norm) is nan .*examples.jsonl:[1-4],"):
        stage("sft", tmp_path, config).run()
    first, second = metrics_of(tmp_path)
    assert (first["updates/skipped"], second["updates/skipped"]) == (0.0, 1.0)
    assert second["loss"] is None
    assert {row["step"] for row in read_lines(tmp_path / "refused.jsonl")} == {3}
