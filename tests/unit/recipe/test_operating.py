# SPDX-License-Identifier: Apache-2.0
"""Operating a run on samples: the best model, folders on the way, an early end, and where its time goes."""

import json

import pytest

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.master.job import check_job
from tests.support.policy_jobs import finished, policy_job

PHASES = {"generation", "reward", "reference", "update", "sync", "commit", "trainer"}


@pytest.mark.slow
@pytest.mark.feature(140)
def test_a_step_on_samples_is_divided_into_phases_and_its_models_are_kept(tmp_path):
    keep = {"best": "eval/reward", "patience": 1, "save_every": 1, "keep_last": 1}
    reference = {"name": "grpo", "kl_coef": 0.01}
    config = {"steps": 6, "eval_every": 1, "keep": keep, "algorithm": reference, "optimizer": {"lr": 1e-9}}
    folder, rows = finished(policy_job(tmp_path, "grpo", roles=("reference",), **config))
    assert len(rows) == 2, "with such a rate the second evaluation is not better than the first"
    for row in rows:
        phases = {name.partition("/")[2]: value for name, value in row.items() if name.startswith("time/")}
        assert phases.keys() >= PHASES
        assert sum(phases.values()) - phases["step"] == pytest.approx(phases["step"], rel=0.05)
        assert row["speed/train_tflops"] > 0
    told = json.loads((folder / "summary.json").read_text())
    assert (told["best/step"], told["best/eval/reward"]) == (1, rows[0]["eval/reward"])
    assert {path.parent.name for path in folder.rglob("model.safetensors")} == {"model", "best", "step-2"}


def test_a_figure_that_evaluations_have_not_is_refused_before_the_start(tmp_path):
    job = policy_job(tmp_path, "grpo", eval_every=1, keep={"best": "acuracy"})
    with pytest.raises(InvalidJob, match="config.keep.best: no metric 'acuracy'; did you mean 'eval/accuracy'"):
        check_job(job, local=True)
