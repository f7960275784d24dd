# SPDX-License-Identifier: Apache-2.0
"""Evaluation on the way: when, of what, without a trace in the training; the best model; and an early end."""

import json
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
from tests.support.example_jobs import EXAMPLES, PAIRS, log_probs, metrics_of, stage, write_rows

HELD_OUT = [{"prompt": "7+7=", "response": "14"}, {"prompt": "1=", "response": "one, and a good deal more"}]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model", hidden=32, layers=1, max_positions=64)
    write_rows(folder / "examples.jsonl", EXAMPLES)
    write_rows(folder / "pairs.jsonl", PAIRS)
    write_rows(folder / "held_out.jsonl", HELD_OUT)
    return folder


def config_of(inputs, kind="sft", **more):
    data = {"train": str(inputs / "examples.jsonl"), "eval": str(inputs / "held_out.jsonl")}
    return {
        "model": str(inputs / "model"),
        "data": data if kind == "sft" else {"train": str(inputs / "pairs.jsonl")},
        "batch_size": 2,
        "epochs": 2.5,
        "optimizer": {"lr": 1e-2},
        "engine": {"threads": 1},
        **more,
    }


@pytest.mark.feature(128)
def test_evaluation_comes_in_its_steps_and_leaves_weights_and_random_states_alone(inputs, tmp_path):
    ends = {}
    for every in (0, 2):
        job = stage("sft", tmp_path / str(every), config_of(inputs, eval_every=every))
        job.run()
        dumped = state_tree.dump(job.workload("ACTOR").state_dict())
        ends[every] = dumped.skeleton, [bytes(buffer) for buffer in dumped.buffers]
    assert ends[0] == ends[2]
    steps = [[row["step"] for row in metrics_of(tmp_path / str(every)) if "eval/loss" in row] for every in (0, 2)]
    assert steps == [[], [2, 4, 5]]
    for without, with_ in zip(metrics_of(tmp_path / "0"), metrics_of(tmp_path / "2"), strict=True):
        assert without["loss"] == with_["loss"]


@pytest.mark.parametrize(
    ("given", "steps"),
    [({"eval": "held_out.jsonl"}, [5]), ({"eval_share": 0.3}, [4]), ({}, [])],
)
def test_rows_to_evaluate_on_are_used_after_the_last_step_where_nothing_says_when(inputs, tmp_path, given, steps):
    files = {name: str(inputs / value) if name == "eval" else value for name, value in given.items()}
    stage("sft", tmp_path, config_of(inputs, data={"train": str(inputs / "examples.jsonl"), **files})).run()
    assert [row["step"] for row in metrics_of(tmp_path) if "eval/loss" in row] == steps


@pytest.mark.feature(129)
@pytest.mark.parametrize("averaging", ["token", "sequence"])
@pytest.mark.parametrize("budget", [8, 1024])
def test_cross_entropy_and_perplexity_are_weighted_by_tokens_over_uneven_batches(inputs, tmp_path, averaging, budget):
    engine = {"threads": 1, "max_tokens_per_microbatch": budget}
    config = config_of(inputs, eval_every=1, epochs=0.5, averaging=averaging, engine=engine)
    stage("sft", tmp_path, config).run()
    (row,) = metrics_of(tmp_path)
    told = np.concatenate(log_probs(str(tmp_path / "model"), HELD_OUT))
    assert row["eval/loss"] == pytest.approx(-told.mean(), abs=1e-5)
    assert row["eval/perplexity"] == pytest.approx(math.exp(-told.mean()), rel=1e-5)


@pytest.mark.feature(76)
def test_held_out_rows_are_never_trained_on(inputs, tmp_path):
    rows = [{"prompt": f"{n}:", "response": str(n)} for n in range(40)]
    where = write_rows(tmp_path / "rows.jsonl", rows)
    config = config_of(inputs, data={"train": where, "eval_share": 0.1}, batch_size=8, epochs=1.0, eval_every=3)
    job = stage("sft", tmp_path / "out", config)
    batches, submit = [], job.port.submit

    def watching(role, rank, call):
        if call.method in ("train", "measure"):
            batches.append((call.method, call.args[0].token.stored().load().dense("line").tolist()))
        return submit(role, rank, call)

    job.port.submit = watching
    job.run()
    trained = {line for method, lines in batches if method == "train" for line in lines}
    measured = {line for method, lines in batches if method == "measure" for line in lines}
    assert (len(trained), len(measured)) == (36, 4)
    assert not trained & measured
    assert json.loads((tmp_path / "out/summary.json").read_text())["held_out_rows"] == 4


@pytest.mark.feature(76)
def test_pairs_of_one_prompt_are_held_out_together(inputs, tmp_path):
    def sides(number, answer):
        asked = {"role": "user", "content": f"{number}?"}
        return {side: [asked, {"role": "assistant", "content": f"{side} {answer}"}] for side in ("chosen", "rejected")}

    rows = [sides(number, answer) for answer in range(2) for number in range(10)]
    data = PairData(train=write_rows(tmp_path / "pairs.jsonl", rows), eval_share=0.3)
    examples = load_examples(data, AutoTokenizer.from_pretrained(inputs / "model"), evaluates=True, seed=0)
    train, held_out = (set(batch.dense("line").tolist()) for batch in (examples.train, examples.held_out))
    assert len(held_out) == 6
    assert train | held_out == set(range(1, 21))
    assert {(line - 1) % 10 for line in train}.isdisjoint((line - 1) % 10 for line in held_out)


@pytest.mark.parametrize("kind", ["rm", "dpo"])
def test_pairs_are_evaluated_by_the_loss_they_are_trained_with(inputs, tmp_path, kind):
    data = {name: str(inputs / "pairs.jsonl") for name in ("train", "eval")}
    config = config_of(inputs, kind, data=data, batch_size=4, epochs=2.0, eval_every=1)
    stage(kind, tmp_path, config).run()
    first, second = metrics_of(tmp_path)
    for name in ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"):
        assert first[f"eval/{name}"] == pytest.approx(second[name], abs=1e-6), "after a step is before the next"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["examples"], summary["held_out_rows"]) == (4, 4), "pairs, of two sequences each"


def test_an_evaluated_policy_is_compared_with_the_reference_it_was_trained_against(inputs, tmp_path):
    data = {name: str(inputs / "pairs.jsonl") for name in ("train", "eval")}
    config = config_of(inputs, "dpo", data=data, batch_size=4, eval_every=1)
    stage("dpo", tmp_path / "trained", config).run()
    last = metrics_of(tmp_path / "trained")[-1]
    trained = {"model": str(tmp_path / "trained/model"), "eval_only": True}
    stage("dpo", tmp_path / "alone", config | trained | {"reference_model": str(inputs / "model")}).run()
    found = json.loads((tmp_path / "alone/summary.json").read_text())
    assert found["eval/rewards/margins"] == pytest.approx(last["eval/rewards/margins"], rel=1e-5) != 0.0
    lora = {"engine": {"threads": 1, "lora": {}}, "reference_model": "another"}
    errors = plan_of(DPOTrainer).find_errors(
        require(DPOConfig, config | trained | lora, "config"), {RLRoleType.ACTOR: 1}
    )
    assert [str(error).partition(":")[0] for error in errors if "the role" in str(error)] == ["config.reference_model"]


@pytest.mark.parametrize(
    ("data", "every", "faults"),
    [({}, None, ["config.data.eval"]), ({}, 0, ["config.data.eval"]), ({}, 1, []), ({"eval_share": 0.5}, 0, [])],
)
def test_what_was_trained_on_is_not_called_held_out(inputs, data, every, faults):
    config = config_of(inputs, data={"train": str(inputs / "examples.jsonl"), **data}, eval_only=True, eval_every=every)
    errors = plan_of(SFTTrainer).find_errors(require(SFTConfig, config, "config"), {RLRoleType.ACTOR: 1})
    assert [error.where for error in errors] == faults


def test_a_share_that_is_held_out_is_never_trained_on_also_where_nothing_is_evaluated(inputs, tmp_path):
    data = SFTData(train=str(inputs / "examples.jsonl"), eval_share=0.5)
    examples = load_examples(data, AutoTokenizer.from_pretrained(inputs / "model"), evaluates=False, seed=0)
    assert (len(examples.train), examples.held_out) == (len(EXAMPLES) // 2, None)
    one = replace(data, train=write_rows(tmp_path / "one.jsonl", EXAMPLES[:1]))
    assert [error.where for error in validate_examples(one, False, 0)] == ["config.data.eval_share"]


def test_sums_over_ranks_of_which_one_has_no_rows():
    parts = [Measured(0.25, {"accuracy": 0.5}), Measured(0.0, {}), Measured(0.5, {"accuracy": 0.25})]
    assert Measured.total(parts) == Measured(0.75, {"accuracy": 0.75})


@pytest.mark.slow
@pytest.mark.feature(130)
def test_answers_are_drawn_and_judged_where_the_job_has_the_roles_for_it(inputs, tmp_path):
    config = config_of(inputs, batch_size=4, epochs=50.0, eval_every=50)
    config["data"] = {name: str(inputs / "examples.jsonl") for name in ("train", "eval")}
    roles = {"ACTOR": (ActorWorkload, 1), "ROLLOUT": (RolloutWorkload, 2), "REWARD": (RewardWorkload, 1)}
    answers = {"max_new_tokens": 8, "reward": {"workers": 1}}
    job = stage("sft", tmp_path / "asked", config | {"answers": answers, "keep": {"best": "eval/reward"}}, roles)
    job.run()
    for role, rank in (("REWARD", 0), ("ROLLOUT", 0), ("ROLLOUT", 1), ("ACTOR", 0)):
        job.workload(role, rank).close()
    row = metrics_of(tmp_path / "asked")[-1]
    assert (row["eval/reward"], row["eval/failed"]) == (1.0, 0.0), "it knows four sums by heart"
    told = [json.loads(line) for line in (tmp_path / "asked/held_out.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["completion"]) for row in told] == [tuple(row.values()) for row in EXAMPLES]
    assert (tmp_path / "asked/best/model.safetensors").exists()
    stage("sft", tmp_path / "plain", config | {"epochs": 1.0}).run()
    assert "eval/reward" not in metrics_of(tmp_path / "plain")[-1]


def test_roles_that_do_not_go_together_are_refused(inputs):
    def problems_of(config, **roles):
        found = plan_of(SFTTrainer).check_config(config, {RLRoleType(role): size for role, size in roles.items()})
        return {problem.where: problem.what for problem in found}

    config = config_of(inputs, eval_every=1)
    assert problems_of(config, ACTOR=1, ROLLOUT=1, REWARD=1) == {}
    assert "both" in problems_of(config, ACTOR=1, ROLLOUT=1)["workload"]
    never = config_of(inputs, eval_every=0)
    assert "need evaluations" in problems_of(never, ACTOR=1, ROLLOUT=1, REWARD=1)["config.eval_every"]
    answers = {"reward": {"function": "no.such:function"}}
    found = problems_of(config | {"answers": {"reward": {"model": "scorer"}}}, ACTOR=1, ROLLOUT=1, REWARD=1)
    assert "reward.function scores" in found["config.answers.reward.model"]
    found = problems_of(config | {"answers": answers}, ACTOR=1, ROLLOUT=1, REWARD=1)
    assert "config.answers.reward.function" in found


# -- what is kept -----------------------------------------------------------------------------------------------------


class Saved(list):
    """Notes the folders it is told to write."""

    def __call__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.append(folder.name)


def make_saver(tmp_path, **config):
    saved = Saved()
    return ModelSaver(KeepConfig(**config), tmp_path, saved), saved


@pytest.mark.parametrize(
    ("config", "values", "best"),
    [
        ({"best": "eval/loss"}, [3.0, math.nan, 2.0, 2.5, 1.0, 1.0], [1, 3, 5]),
        ({"best": "eval/rewards/accuracies"}, [0.1, 0.3, 0.2, 0.4], [1, 2, 4]),
        ({"best": "eval/loss", "best_is": "highest"}, [math.nan, 1.0, 2.0, 1.0], [2, 3]),
        ({}, [1.0, 0.5], []),
    ],
)
def test_the_best_model_by_a_named_figure_is_kept(tmp_path, config, values, best):
    saver, saved = make_saver(tmp_path, **config)
    found = []
    for step, value in enumerate(values, start=1):
        saver.update(step, {config.get("best", "x"): value})
        if len(saved) > len(found):
            found.append(step)
    assert found == best
    assert set(saved) <= {"best"}
    if best:
        assert saver.summary()["best/step"] == best[-1]


@pytest.mark.parametrize(
    ("former", "metric"),
    [("eval_loss", "eval/loss"), ("held_out_reward", "eval/reward"), ("accuracy", "eval/accuracy")],
)
def test_a_former_name_of_the_figure_is_read_with_a_note(tmp_path, caplog, former, metric):
    assert validate_keep(KeepConfig(best=former), 1, [metric]) == []
    saver, saved = make_saver(tmp_path, best=former)
    assert f"{former} is now called {metric}" in caplog.text
    saver.update(1, {metric: 2.0})
    saver.update(2, {metric: 1.0})
    assert len(saved) == (2 if metric == "eval/loss" else 1)
    assert f"best/{metric}" in saver.summary()


def test_a_figure_that_there_is_not_is_named_with_the_nearest():
    saver = ModelSaver(KeepConfig(best="acuracy"), None, None)
    with pytest.raises(InvalidJob, match="did you mean 'eval/accuracy'"):
        saver.update(1, {"eval/accuracy": 1.0, "eval/reward": 0.0})


def test_other_rows_to_evaluate_on_begin_without_a_best_model(tmp_path, caplog):
    saver, _ = make_saver(tmp_path, best="eval/accuracy", patience=1)
    saver.evaluated = "these"
    saver.update(1, {"eval/accuracy": 0.9})
    for evaluated, best in (("these", 0.9), ("others", None)):
        again, _ = make_saver(tmp_path, best="eval/accuracy", patience=1)
        again.evaluated = evaluated
        again.load_state_dict(saver.state_dict())
        assert again.summary().get("best/eval/accuracy") == best
    assert "the evaluation rows have changed" in caplog.text


def test_an_evaluation_without_the_figure_does_not_count(tmp_path, caplog):
    saver, saved = make_saver(tmp_path, best="eval/accuracy", patience=1)
    saver.update(1, {"eval/accuracy": 0.5, "eval/reward": 0.5})
    saver.update(2, {"eval/reward": 0.7})
    assert (saved, saver.should_stop) == (["best"], False)
    assert "step 2: the evaluation has no eval/accuracy" in caplog.text


def test_the_best_of_another_figure_is_not_compared_with(tmp_path):
    former, _ = make_saver(tmp_path, best="eval/accuracy")
    former.update(1, {"eval/accuracy": 0.62})
    for changed in ({"best": "eval/reward"}, {"best": "eval/accuracy", "best_is": "lowest"}):
        saver, saved = make_saver(tmp_path, **changed)
        saver.load_state_dict(former.state_dict())
        saver.update(2, {"eval/reward": -0.5, "eval/accuracy": 0.9})
        assert saved == ["best"]
    same, saved = make_saver(tmp_path, best="eval/accuracy")
    same.load_state_dict(former.state_dict())
    same.update(2, {"eval/accuracy": 0.6})
    assert saved == []


def test_an_evaluation_that_nobody_could_judge_is_not_held_against_the_model(tmp_path):
    saver, _ = make_saver(tmp_path, best="eval/reward", patience=1)
    for step, value in enumerate([math.nan, 0.5, math.nan], start=1):
        saver.update(step, {"eval/reward": value})
        assert not saver.should_stop
    saver.update(4, {"eval/reward": 0.4})
    assert saver.should_stop


def test_patience_counts_evaluations_in_a_row_through_a_restart(tmp_path):
    saver, _ = make_saver(tmp_path, best="loss", patience=2)
    for step, value in enumerate([1.0, 2.0, 0.5, 0.6], start=1):
        saver.update(step, {"loss": value})
        assert not saver.should_stop
    again, _ = make_saver(tmp_path, best="loss", patience=2)
    again.load_state_dict(saver.state_dict())
    again.update(5, {"loss": 0.5})
    assert again.should_stop


def test_the_last_folders_are_kept_and_those_of_another_course_are_not(tmp_path):
    saver, saved = make_saver(tmp_path, save_every=3, keep_last=2)
    (tmp_path / "steps/step-99").mkdir(parents=True)
    (tmp_path / "steps/mine").mkdir()
    for step in range(1, 11):
        saver.save_step(step)
    assert saved == ["step-3", "step-6", "step-9"]
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["mine", "step-6", "step-9"]


def test_a_run_that_gets_no_better_ends_and_its_best_model_is_there(inputs, tmp_path):
    config = config_of(inputs, epochs=50.0, eval_every=1, keep={"best": "eval/loss", "patience": 3})
    job = stage("sft", tmp_path, config)
    job.run()
    rows = metrics_of(tmp_path)
    losses = [row["eval/loss"] for row in rows]
    best = int(np.argmin(losses))
    assert len(rows) == best + 4 < 100
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["best/step"], told["steps"]) == (best + 1, len(rows))
    again = np.concatenate(log_probs(str(tmp_path / "best"), HELD_OUT))
    assert -again.mean() == pytest.approx(losses[best], abs=1e-5)
    before = (tmp_path / "metrics.jsonl").read_text()
    job.run()
    assert (tmp_path / "metrics.jsonl").read_text() == before, "a run that has ended has nothing left to do"


# -- numbers that are none --------------------------------------------------------------------------------------------


class Poisoned(ReferenceWorkload):
    """A reference that says NaN of the second sequence of a batch."""

    @trainer_invocation(blocking=False)
    def logprobs(self, rollouts, temperature):
        told = super().logprobs(rollouts, temperature)
        judged = told.ragged("ref_logprobs")
        values = judged.values.copy()
        values[judged.offsets[1] : judged.offsets[2]] = math.nan
        return told.with_columns(ref_logprobs=judged.like(values))


def test_a_loss_that_is_no_number_ends_the_run_with_the_step_and_the_rows(inputs, tmp_path):
    roles = {"ACTOR": (ActorWorkload, 1), "REFERENCE": (Poisoned, 1)}
    job = stage("dpo", tmp_path, config_of(inputs, "dpo", batch_size=4), roles)
    with pytest.raises(NonFiniteUpdate, match=r"step 1: the loss is nan .* not finite: .*pairs.jsonl:[1-4] ") as caught:
        job.run()
    (row,) = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert row["step"] == 1
    assert row["sample"] in str(caught.value)
    line = int(row["sample"].rpartition(":")[2])
    assert row["text"].startswith(PAIRS[line - 1]["prompt"] + PAIRS[line - 1]["rejected"])


def test_updates_that_are_not_finite_are_skipped_and_counted_if_asked(inputs, tmp_path):
    config = config_of(inputs, optimizer={"lr": 1e30, "skip_nonfinite": 1}, batch_size=4)
    with pytest.raises(NonFiniteUpdate, match="step 3: "):
        stage("sft", tmp_path, config).run()
    first, second = metrics_of(tmp_path)
    assert (first["updates/skipped"], second["updates/skipped"]) == (0.0, 1.0)
    assert second["loss"] is None


def test_a_step_that_is_not_finite_names_every_row(inputs, tmp_path):
    job = stage("sft", tmp_path, config_of(inputs, optimizer={"lr": 1e30}, batch_size=4))
    with pytest.raises(NonFiniteUpdate, match=r"step 2: the (loss|gradient norm) is nan .*examples.jsonl:[1-4],"):
        job.run()
    assert len((tmp_path / "refused.jsonl").read_text().splitlines()) == 4
    assert [row["step"] for row in metrics_of(tmp_path)] == [1]
