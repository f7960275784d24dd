# SPDX-License-Identifier: Apache-2.0
"""The files of the guide, which extend the package by name from outside, run in their own folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.support.documented_metrics import undocumented

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/extending/examples"
ALGORITHM = ROOT / "docs/guides/own_algorithm"
DATA = ROOT / "docs/guides/own_data"
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=1, max_positions=64)


def run(folder, model, job, files, *overrides):
    """Run a guide's job in ``folder``, which has its files and nothing else of ours; returns its metrics and output."""
    for path in (job, *files):
        shutil.copy(path, folder)
    shutil.copy(DATA / "problems.jsonl", folder)
    command = [sys.executable, "-m", "dlrover.python.rl.master.main", "run", job.name, "--local", "job_dir=out"]
    command += [f"config.model={model}", "+config.engine.threads=1", *overrides]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    metrics = folder / "out/metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
    return [row for row in rows if row["step"]], outcome


def samples(folder):
    lines = (folder / "out/samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def succeed(*arguments):
    rows, outcome = run(*arguments)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert [row["step"] for row in rows] == [1, 2]
    assert undocumented(rows) == []
    return rows


TRAIN = "config.data.train=problems.jsonl"


@pytest.mark.slow
def test_an_engine_and_a_weight_transport(tmp_path, model):
    """The engine samples as the built-in one does, and has the weights of the last update that the transport sent."""
    files = [EXAMPLES / "plain_engine.py", EXAMPLES / "file_transport.py"]
    (tmp_path / "own").mkdir()
    (tmp_path / "builtin").mkdir()
    succeed(tmp_path / "own", model, EXAMPLES / "grpo.yaml", files, TRAIN)
    names = sorted(path.name for path in (tmp_path / "own/runs/weights").iterdir())
    assert len(names) >= 2
    assert all(name.endswith(".safetensors") for name in names)
    job = tmp_path / "builtin.yaml"
    text = (EXAMPLES / "grpo.yaml").read_text(encoding="utf-8")
    job.write_text(text[: text.index("  engine:")], encoding="utf-8")
    succeed(tmp_path / "builtin", model, job, [], TRAIN)
    texts = [[row["completion"] for row in samples(tmp_path / name)] for name in ("own", "builtin")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_an_engine_column_reaches_the_loss_of_the_page(tmp_path, model):
    files = [EXAMPLES / "plain_engine.py", EXAMPLES / "margin.py"]
    rows, outcome = run(tmp_path, model, EXAMPLES / "margin.yaml", files, TRAIN)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert len(rows) == 2
    assert all(row["policy/margin"] > 0 for row in rows)


WRONG_NAMES = {
    "config.engine.rollout=plain_engine:PlainRoloutEngine": "did you mean 'PlainRolloutEngine'",
    "config.engine.weight_sync=file_transport:FileTransprot": "did you mean 'FileTransport'",
}
WRONG_OPTION = {"config.engine.rollout_options={flot64: true}": "did you mean 'float64'"}


@pytest.mark.slow
@pytest.mark.parametrize("hints", [WRONG_NAMES, WRONG_OPTION], ids=["names", "option"])
def test_a_wrong_name_or_option_is_refused_before_the_start(tmp_path, model, hints):
    files = [EXAMPLES / "plain_engine.py", EXAMPLES / "file_transport.py"]
    rows, outcome = run(tmp_path, model, EXAMPLES / "grpo.yaml", files, TRAIN, *hints)
    assert (outcome.returncode, rows) == (2, [])
    assert [hint for hint in hints.values() if hint not in outcome.stderr] == []


@pytest.mark.slow
def test_an_algorithm(tmp_path, model):
    succeed(tmp_path, model, ALGORITHM / "grpo.yaml", [ALGORITHM / "above_median.py"], TRAIN)


@pytest.mark.slow
def test_an_environment(tmp_path, model):
    files = [DATA / "guess.py", DATA / "digits.jsonl"]
    data = ("config.data.train=digits.jsonl", "config.rollout.env_path=guess.py")
    succeed(tmp_path, model, DATA / "guess.yaml", files, *data)
