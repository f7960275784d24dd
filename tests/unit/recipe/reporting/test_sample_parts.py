# SPDX-License-Identifier: Apache-2.0
"""The files of samples and of evaluations: parts, cuts, repeated writes, and the training of each row."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.page.samples import lineage, read_evaluation, read_evaluations, read_samples, sample_steps
from dlrover.python.rl.recipe.online.batch import StepBatch, training_columns
from dlrover.python.rl.recipe.reporting import sample_file
from dlrover.python.rl.recipe.reporting.run_log import RunLog
from dlrover.python.rl.recipe.workloads import RolloutWorkload
from dlrover.python.rl.trainer.port import Pending

# -- parts of the samples ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(sample_file, "PART_BYTES", 200)


def rows_of(step):
    return [{"prompt": f"p{step}", "reward": float(row)} for row in range(3)]


def write_steps(folder, first, last):
    log = RunLog(folder)
    for step in range(first, last + 1):
        log.begin_step(step)
        log.write_samples(step, rows_of(step))
        log.write_step(step, {"loss": 1.0})
    return log


def test_samples_of_many_steps_are_in_parts(tmp_path, small_parts):
    write_steps(tmp_path, 1, 9)
    parts = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert parts == ["steps-000001.jsonl", "steps-000003.jsonl", "steps-000005.jsonl", "steps-000007.jsonl"]
    for step in range(1, 10):
        assert read_samples(tmp_path, step) == [{"step": step, **row} for row in rows_of(step)]
    write_steps(tmp_path, 1, 1)
    assert not (tmp_path / "samples").exists(), "another run begins"


@pytest.mark.parametrize("step", [9, 7, 4, 3, 2])
def test_cut_reaches_back_into_earlier_parts(tmp_path, small_parts, step):
    write_steps(tmp_path, 1, 9)
    log = RunLog(tmp_path)
    log.begin_step(step)
    assert sample_steps(tmp_path) == (1, step - 1)
    assert read_samples(tmp_path, 9) == [{"step": 9, **row} for row in rows_of(9)], "superseded"
    write_steps(tmp_path, step, 9)
    assert [len(read_samples(tmp_path, each)) for each in range(1, 11)] == [3] * 9 + [0]
    assert not (tmp_path / "samples.superseded.jsonl").exists()


def test_repeated_write_after_a_part_began_leaves_the_rows_once(tmp_path, small_parts):
    file = tmp_path / "samples.jsonl"
    excerpt = sample_file.Excerpt(0, 10, 0)
    ends = [0]
    for step in (1, 2, 3, 3):
        at = ends[-1] if step != 3 else ends[2]
        ends.append(sample_file.write_step(file, step, rows_of(step), excerpt, at).end)
    assert [len(read_samples(tmp_path, step)) for step in (1, 2, 3)] == [3, 3, 3]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["steps-000001.jsonl"]


def test_worker_replaces_rows_of_an_earlier_attempt(tmp_path):
    write_steps(tmp_path, 1, 3)
    tokens = {name: Ragged.from_rows([[6, 7], [8, 9]]) for name in ("tokens", "logprobs")}
    tokens["action_mask"] = Ragged.from_rows([[False, True]] * 2)
    rollouts = [
        Batch({"prompt": names, "completion": names, "answer": names, **tokens}) for names in (["a", "b"], ["c", "d"])
    ]
    numbers = Batch({"reward": np.array([0.5, 1.0]), "detailed": np.array([True, False])})
    place, excerpt = (tmp_path / "samples.jsonl", 2, None, [3, 0]), sample_file.Excerpt(0, 9, 0, tokens=1)
    (workload := RolloutWorkload(None, {}))._text_of_token = str
    workload.write_samples(sample_file.WriteRequest(*place, numbers, excerpt).pack(), rollouts)
    assert [(row["prompt"], row.get("tokens")) for row in read_samples(tmp_path, 2)] == [("d", ["9"]), ("a", None)]
    assert sample_steps(tmp_path) == (1, 2)
    assert read_samples(tmp_path, 3) == [{"step": 3, **row} for row in rows_of(3)], "superseded"


def test_request_is_the_same_after_packing():
    numbers = Batch({"reward": np.array([0.5, math.inf]), "error": [None, "bad \ud83d"]})
    request = sample_file.WriteRequest(Path("samples.jsonl"), 2, None, [3, 0], numbers, sample_file.Excerpt(0, 9, 0))
    unpacked = sample_file.WriteRequest.unpack(request.pack())
    assert unpacked._replace(numbers=numbers) == request
    assert unpacked.numbers.columns == {"reward": [0.5, math.inf], "error": [None, "bad \\ud83d"]}


def test_answers_of_every_evaluation_are_kept(tmp_path):
    log = write_steps(tmp_path, 1, 1)
    for step in (0, 10, 120):
        log.write_held_out(step, [{"prompt_id": 1, "completion": f"after {step}"}])
    assert read_evaluations(tmp_path) == [0, 10, 120]
    assert read_evaluation(tmp_path, 10) == [{"step": 10, "prompt_id": 1, "completion": "after 10"}]
    assert (tmp_path / "held_out.jsonl").read_text() == (tmp_path / "evaluations/step-000120.jsonl").read_text()
    log.write_held_out(130, [{"completion": "of SFT"}, {"completion": "which has no ids"}])
    assert [row["prompt_id"] for row in read_evaluation(tmp_path, 130)] == [0, 1]


# -- what training did with each row ----------------------------------------------------------------------------------


def numbers_of(rewards, errors=None):
    count = len(rewards)
    columns = {
        "prompt_id": np.arange(count) // 2,
        "sample_index": np.arange(count) % 2,
        "retry": np.zeros(count, dtype=np.int64),
        "action_tokens": np.full(count, 3),
        "token_count": np.full(count, 5),
        "reward": np.array(rewards, dtype=np.float64),
    }
    return Batch(columns | ({"error": errors} if errors else {}))


def test_each_row_says_what_training_did_with_it():
    nan = float("nan")
    scored = numbers_of([1.0, 0.0, nan, 1.0, 1.0, 0.0], [None, None, "it broke", None, None, None])
    train = scored.with_columns(
        reward=np.array([1.0, 0.0, nan, nan, 1.0, 0.0]), masked=np.array([0, 0, 0, 0, 1, 0], dtype=bool)
    )
    filtered = numbers_of([1.0, 1.0], [None, None]).with_columns(prompt_id=np.array([9, 9]))
    batch = StepBatch(Pending([]), tuple(range(6)), scored, 3, 8, (filtered,), (6, 7), train)
    advantage = Ragged.from_rows([[0, 0, value, value, value] for value in (0.5, -0.5, 0.0, 0.0, 1.0, -1.0)])
    planned = train.with_columns(advantage=advantage, update=np.array([0, 1, -1, -1, -1, 0]))
    columns = training_columns(batch, planned, range(2))
    assert columns["mark"] == ["", "", "failed", "dropped", "masked", "", "filtered", "filtered"]
    assert columns["reason"][2:5] == ["it broke", "a sample of its group failed", "its completion was cut off"]
    assert columns["advantage"][:2].tolist() == [0.5, -0.5]
    assert columns["update"].tolist() == [0, 1, -1, -1, -1, 0, -1, -1]
    assert sorted(columns["rank"][[0, 5]].tolist()) == [0, 1], "one row of the update on each rank"
    assert columns["prompt_tokens"].tolist() == [2] * 8
    assert training_columns(batch, None, ())["mark"][0] == "dropped"


def test_row_of_a_surplus_group_says_that_others_were_enough():
    scored = numbers_of([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [None] * 6)
    batch = StepBatch.from_rollouts(Pending([]), scored, np.arange(6), 3)
    batch = batch.drop_uniform_groups(scored.dense("reward")).keep_groups(1)
    planned = batch.scored.with_columns(update=np.array([0, 0]))
    columns = training_columns(batch, planned, [0])
    assert columns["mark"] == ["", "", "filtered", "filtered", "dropped", "dropped"]
    assert columns["reason"][4] == "the step had enough other groups"


def test_row_trained_on_without_a_reward_has_not_failed():
    """Distillation trains on samples that no reward function could score."""
    scored = numbers_of([float("nan")] * 3, [None, "it broke", "it broke"])
    train = scored.with_columns(reward=np.zeros(3), masked=np.array([0, 0, 1], dtype=bool))
    batch = StepBatch(Pending([]), (0, 1, 2), scored, 2, 3, train_rows=train)
    planned = train.with_columns(update=np.array([0, 0, -1]))
    assert training_columns(batch, planned, [0])["mark"] == ["", "", "failed"]
    unnamed = replace(batch, scored=scored.select(*(name for name in scored.columns if name != "error")))
    assert training_columns(unnamed, planned, [0])["mark"] == ["", "", "masked"]


def test_step_that_trains_only_the_critic_has_no_lineage():
    scored = numbers_of([1.0, 0.0])
    batch = StepBatch(Pending([]), (0, 1), scored, 1, 2, train_rows=scored)
    planned = scored.with_columns(advantage=np.array([1.0, -1.0]), update=np.array([0, -1]))
    columns = training_columns(batch, planned, ())
    assert columns["reason"] == ["only the critic was trained", "it has no weight in the loss"]
    assert (columns["mark"], columns["update"].tolist()) == (["dropped"] * 2, [-1, -1])
    assert columns["advantage"].tolist() == [1.0, -1.0]


def test_filtered_group_names_what_was_wrong_with_it():
    """Prompt 0 lost its group to a failed sample in its first attempt; the samples of the second one are alike."""
    rewards, retries = [float("nan"), 0.0, 1.0, 1.0, 1.0, 1.0], [0, 0, 0, 1, 1, 1]
    rows = numbers_of(rewards).with_columns(
        prompt_id=np.zeros(6, dtype=np.int64), retry=np.array(retries), error=["it broke", *[None] * 5]
    )
    batch = StepBatch(Pending([]), (), rows.take([]), 0, 6, (rows,), tuple(range(6)), rows.take([]))
    columns = training_columns(batch, None, ())
    assert columns["mark"] == ["failed", "dropped", "dropped", "filtered", "filtered", "filtered"]
    assert columns["reason"][1] == "a sample of its group failed"


def test_detailed_rows_have_lists_of_their_completions_tokens():
    numbers = numbers_of([1.0, 0.0, 1.0]).with_columns(
        digest=np.arange(3),
        detailed=np.array([True, False, True]),
        token_advantages=[[0.0, 0.0, 1.0, 2.0, 3.0], None, 0.5],
    )
    texts = Batch(
        {"prompt": ["a", "b", "c"], "completion": ["x", "y", "z"], "answer": [None] * 3, "digest": np.arange(3)}
    )
    masks = [[False, False, True, True, True], [False, True]]
    tokens = Batch(
        {"tokens": [["p", "q", "r"], ["s"]], "token_logprobs": [[-1.0, -2.0, -3.0], [-4.0]], "action_mask": masks}
    )
    first, second, third = sample_file.format_rows(numbers, texts, tokens)
    assert (first["tokens"], first["token_advantages"]) == (["p", "q", "r"], [1.0, 2.0, 3.0])
    assert not {"tokens", "token_advantages", "detailed"} & second.keys()
    assert (third["tokens"], third["token_logprobs"], third["token_advantages"]) == (["s"], [-4.0], [0.5])
    plain, *_ = sample_file.format_rows(numbers, texts)
    assert not {"tokens", "token_advantages", "detailed"} & plain.keys(), "rollouts that do not report tokens"


def test_log_prob_that_is_no_number_is_written_as_null(tmp_path):
    RunLog(tmp_path).write_samples(1, [{"tokens": ["a", "b"], "token_logprobs": [float("nan"), -1.0]}])
    assert read_samples(tmp_path, 1)[0]["token_logprobs"] == [None, -1.0]


def test_console_shows_neither_tokens_nor_empty_values():
    row = {"prompt": "a", "mark": "", "rank": 0, "tokens": ["x"], "token_logprobs": [-1.0], "reward": 0.0}
    assert sample_file._format_sample(row, 10) == "prompt a  reward 0.0"


def test_lineage_leaves_out_rows_that_were_not_trained_on(tmp_path):
    log = RunLog(tmp_path)
    log.begin_step(1)
    log.write_samples(1, [{"prompt_id": 1, "rank": 0, "mark": ""}, {"prompt_id": 2, "rank": -1, "mark": "failed"}])
    assert lineage(tmp_path, 1) == [{"prompt_id": 1, "rank": 0}]


@pytest.mark.parametrize(
    ("columns", "details"),
    [
        ({"reward": [0.5, float("nan")], "error": [None, "bad \ud83d"]}, {}),
        ({"reward": [1, 2**70], 'reward/"short"': [0.0, 1.0]}, {}),
        (
            {"reward": [np.float32(0.5), RLRoleType.ACTOR]},
            {1: {"tokens": ["a", "\ud83d"], "token_logprobs": [-1.0, float("nan")]}},
        ),
        ({"reward": []}, {}),
    ],
    ids=["half a character", "a name with quotes", "a row with tokens", "no rows"],
)
def test_columns_are_encoded_as_their_rows_are(columns, details):
    rows = sample_file.SampleRows(columns, details)
    lines = sample_file.format_lines(3, rows)
    assert lines == b"".join(sample_file.format_line({"step": 3, **row}) for row in rows)
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [3] * len(columns["reward"])
