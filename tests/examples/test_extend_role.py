# SPDX-License-Identifier: Apache-2.0
"""A role that a file outside the package adds, whose column the loss of the file's own algorithm needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.trainer.plan import plan_of

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guides/own_algorithm"
DEADLINE_S = 240.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "repetition.py").write_text((GUIDE / "repetition.py").read_text(encoding="utf-8"), encoding="utf-8")
    text = (GUIDE / "repetition.yaml").read_text(encoding="utf-8")
    text = text.replace("runs/tiny", "tiny").replace("docs/guides/own_data/problems.jsonl", "prompts.jsonl")
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_tiny_model(tmp_path / "tiny", hidden=32, layers=1, max_positions=32)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = "import sys; from dlrover.python.rl.master.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.slow
def test_the_loss_of_an_own_algorithm_gets_the_column_of_an_own_role(folder):
    outcome = run(folder, "run", "job.yaml", "--local", "job_dir=out", "+config.engine.threads=1")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    steps = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert all(0 < row["policy/repetition"] < 1 for row in steps[1:])


def test_a_job_without_the_role_is_refused_before_the_start(folder):
    from repetition import RepetitionTrainer

    config = {
        "model": "tiny",
        "data": {"train": "prompts.jsonl", "eval_rows": 2},
        "algorithm": {"name": "repetition:WithoutRepetition"},
    }
    roles = dict.fromkeys((RLRoleType.ACTOR, RLRoleType.ROLLOUT, RLRoleType.REWARD), 1)
    errors = {str(error) for error in plan_of(RepetitionTrainer).check_config(config, roles)}
    assert errors == {"workload: the role 'repetition' is required by RepetitionTrainer"}
    assert not list(plan_of(RepetitionTrainer).check_config({**config, "algorithm": {}}, roles))
    assert not list(plan_of(RepetitionTrainer).check_config(config, {**roles, RLRoleType("repetition"): 1}))


def test_the_column_has_the_declared_dtype(folder):
    from repetition import RepetitionWorkload

    from dlrover.python.rl.data.batch import Batch, Ragged
    from dlrover.python.rl.recipe.base.updates import cast_columns

    workload = RepetitionWorkload(None, {})
    workload.init_model(4)
    tokens = Ragged.from_rows([np.array([7, 7, 8, 7])])
    rows = workload.repetition(
        Batch({"tokens": tokens, "action_mask": tokens.like(np.array([False, True, True, True]))})
    )
    assert rows.ragged("repetition").values.tolist() == [0.0, 1.0, 0.0, 2 / 3]
    assert cast_columns(rows, {"repetition": "float32"}).ragged("repetition").values.dtype == np.float32
