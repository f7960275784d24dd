# SPDX-License-Identifier: Apache-2.0
"""Evaluation with several answers to each prompt of several sets, by a trainer with further roles."""

import json
import math

import numpy as np
import pytest

from tests.support.policy_jobs import finished, policy_job


@pytest.mark.slow
def test_sets_have_their_own_metrics_of_several_answers_to_each_prompt(tmp_path):
    sets = {}
    for name, count in (("few", 2), ("more", 3)):
        sets[name] = str(tmp_path / f"{name}.jsonl")
        rows = [{"prompt": f"{name}{number}", "answer": "1"} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = policy_job(
        tmp_path,
        "ppo",
        data={"train": str(tmp_path / "problems.jsonl"), "eval": sets},
        steps=1,
        eval_every=1,
        eval={"samples": 4, "temperature": 1.0},
        keep={"best": "eval/more/pass@2"},
        reward={"function": "tests.support.policy_rewards:odd", "workers": 1, "timeout_s": 60.0},
    )
    folder, (metrics,) = finished(job)
    held_out = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    assert [(row["set"], row["row"]) for row in held_out] == [
        *(("few", number // 4) for number in range(8)),
        *(("more", number // 4) for number in range(12)),
    ]
    summary = json.loads((folder / "summary.json").read_text())
    for name in sets:
        right = np.array([row["reward"] for row in held_out if row["set"] == name]).reshape(-1, 4).sum(axis=1)
        assert metrics[f"eval/{name}/avg@4"] == pytest.approx(right.mean() / 4)
        assert metrics[f"eval/{name}/pass@4"] == pytest.approx((right > 0).mean())
        passes = [1 - math.comb(4 - count, 2) / math.comb(4, 2) for count in right.astype(int).tolist()]
        assert metrics[f"eval/{name}/pass@2"] == pytest.approx(np.mean(passes))
        assert summary[f"eval/{name}/accuracy"] == pytest.approx(right.mean() / 4)
    assert 0 < metrics["eval/more/avg@4"] < 1
    assert (folder / "best/config.json").is_file()
