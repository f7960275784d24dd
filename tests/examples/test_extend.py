# SPDX-License-Identifier: Apache-2.0
"""The files of the guide, which extend the package by name from outside, run in their own folder."""

import re
import shutil

import numpy as np
import pytest

from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.recipe.base.config import LogConfig
from dlrover.python.rl.recipe.reporting.trackers import validate_log
from dlrover.python.rl.trainer.plan import plan_of
from tests.support.commands import ROOT, run_python
from tests.support.run_files import read_lines, undocumented, write_rows

EXAMPLES = ROOT / "docs/extending/examples"
ALGORITHM = ROOT / "docs/guides/own_algorithm"
DATA = ROOT / "docs/guides/own_data"
EXAMPLE_GUIDE = ROOT / "docs/guides/learn-from-examples.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=1, max_positions=64)


def run(folder, model, job, files, *overrides, code=0):
    """Run a guide's job in ``folder``, which has its files and nothing else of ours; returns its metrics and errors."""
    for path in (job, *files, DATA / "problems.jsonl"):
        shutil.copy(path, folder)
    settings = ["--local", "job_dir=out", f"config.model={model}", "+config.engine.threads=1", *overrides]
    done = run_python(folder, "-m", "dlrover.python.rl.master.main", "run", job.name, *settings, code=code)
    metrics = folder / "out/metrics.jsonl"
    return [row for row in (read_lines(metrics) if metrics.exists() else []) if row["step"]], done.stderr


def succeed(*arguments):
    rows, _ = run(*arguments)
    assert [row["step"] for row in rows] == [1, 2]
    assert undocumented(rows) == []


TRAIN = "config.data.train=problems.jsonl"


@pytest.mark.slow
def test_own_engine_and_transport_train_like_the_built_in_ones(tmp_path, model):
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
    samples = [read_lines(tmp_path / name / "out/samples.jsonl") for name in ("own", "builtin")]
    texts = [[row["completion"] for row in rows] for rows in samples]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_column_of_an_engine_reaches_the_loss(tmp_path, model):
    files = [EXAMPLES / "plain_engine.py", EXAMPLES / "margin.py"]
    rows, _ = run(tmp_path, model, EXAMPLES / "margin.yaml", files, TRAIN)
    assert len(rows) == 2
    assert all(row["policy/margin"] > 0 for row in rows)


WRONG_NAMES = {
    "config.engine.rollout=plain_engine:PlainRoloutEngine": "did you mean 'PlainRolloutEngine'",
    "config.engine.weight_sync=file_transport:FileTransprot": "did you mean 'FileTransport'",
}
WRONG_OPTION = {"config.engine.rollout_options={flot64: true}": "did you mean 'float64'"}


@pytest.mark.slow
@pytest.mark.parametrize("hints", [WRONG_NAMES, WRONG_OPTION], ids=["names", "option"])
def test_wrong_name_or_option_is_refused_before_the_start(tmp_path, model, hints):
    files = [EXAMPLES / "plain_engine.py", EXAMPLES / "file_transport.py"]
    rows, errors = run(tmp_path, model, EXAMPLES / "grpo.yaml", files, TRAIN, *hints, code=2)
    assert rows == []
    assert [hint for hint in hints.values() if hint not in errors] == []


@pytest.mark.slow
def test_own_algorithm_trains(tmp_path, model):
    succeed(tmp_path, model, ALGORITHM / "grpo.yaml", [ALGORITHM / "above_median.py"], TRAIN)


@pytest.mark.slow
def test_own_environment_trains(tmp_path, model):
    files = [DATA / "guess.py", DATA / "digits.jsonl"]
    data = ("config.data.train=digits.jsonl", "config.rollout.env_path=guess.py")
    succeed(tmp_path, model, DATA / "guess.yaml", files, *data)


@pytest.fixture
def folder_of_role(tmp_path, monkeypatch):
    shutil.copy(ALGORITHM / "repetition.py", tmp_path)
    text = (ALGORITHM / "repetition.yaml").read_text(encoding="utf-8")
    text = text.replace("runs/tiny", "tiny").replace("docs/guides/own_data/problems.jsonl", "prompts.jsonl")
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    write_tiny_model(tmp_path / "tiny", hidden=32, layers=1, max_positions=32)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_column_of_an_own_role_reaches_the_loss(folder_of_role):
    command = ("-m", "dlrover.python.rl.master.main", "run", "job.yaml", "--local", "job_dir=out")
    run_python(folder_of_role, *command, "+config.engine.threads=1")
    steps = read_lines(folder_of_role / "out/metrics.jsonl")
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert all(0 < row["policy/repetition"] < 1 for row in steps[1:])


def test_job_without_the_own_role_is_refused(folder_of_role):
    from repetition import RepetitionTrainer

    algorithm = {"name": "repetition:WithoutRepetition"}
    config = {"model": "tiny", "data": {"train": "prompts.jsonl", "eval_rows": 2}, "algorithm": algorithm}
    roles = dict.fromkeys((RLRoleType.ACTOR, RLRoleType.ROLLOUT, RLRoleType.REWARD), 1)
    errors = {str(error) for error in plan_of(RepetitionTrainer).check_config(config, roles)}
    assert errors == {"workload: the role 'repetition' is required by RepetitionTrainer"}
    assert not list(plan_of(RepetitionTrainer).check_config({**config, "algorithm": {}}, roles))
    assert not list(plan_of(RepetitionTrainer).check_config(config, {**roles, RLRoleType("repetition"): 1}))


def test_column_of_an_own_role_has_the_declared_dtype(folder_of_role):
    from repetition import RepetitionWorkload

    from dlrover.python.rl.data.batch import Batch, Ragged
    from dlrover.python.rl.recipe.base.updates import cast_columns

    workload = RepetitionWorkload(None, {})
    workload.init_model(4)
    tokens = Ragged.from_rows([np.array([7, 7, 8, 7])])
    mask = tokens.like(np.array([False, True, True, True]))
    rows = workload.repetition(Batch({"tokens": tokens, "action_mask": mask}))
    assert rows.ragged("repetition").values.tolist() == [0.0, 1.0, 0.0, 2 / 3]
    assert cast_columns(rows, {"repetition": "float32"}).ragged("repetition").values.dtype == np.float32


@pytest.fixture
def folder_of_tracker(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(class CsvTracker:.*?)```", EXAMPLE_GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_tracker.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_own_tracker_gets_the_metrics(folder_of_tracker):
    write_tiny_model(folder_of_tracker / "tiny", hidden=32, layers=1, max_positions=32)
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(4)]
    write_rows(folder_of_tracker / "sums.jsonl", rows)
    job = ["model=tiny", "data.train=sums.jsonl", "batch_size=2", "job_dir=out", "engine.threads=1"]
    tracker = "log.trackers=[{my_tracker:CsvTracker: {file: losses.csv}}]"
    run_python(folder_of_tracker, "-m", "dlrover.python.rl.recipe.sft", *job, tracker)
    steps = read_lines(folder_of_tracker / "out/metrics.jsonl")
    lines = (folder_of_tracker / "out/losses.csv").read_text(encoding="utf-8").splitlines()
    assert lines == [f"{row['step']},{row['loss']}" for row in steps]
    assert len(lines) == 2


def test_unknown_tracker_or_option_is_a_config_error(folder_of_tracker):
    config = LogConfig(("wandbb", {"my_tracker:CsvTracker": {"fil": "x"}}, "my_tracker:CvsTracker"))
    unknown, option, attribute = validate_log(config)
    assert {error.where for error in (unknown, option, attribute)} == {"config.log.trackers"}
    assert "no tracker is called 'wandbb'; did you mean 'wandb'?" in unknown.what
    assert option.what == "my_tracker:CsvTracker: got an unexpected keyword argument 'fil'"
    assert "did you mean 'CsvTracker'" in attribute.what
