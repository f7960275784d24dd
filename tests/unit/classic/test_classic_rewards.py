# SPDX-License-Identifier: Apache-2.0
"""Environments that travel to the processes which judge."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlrover.python.rl.classic import EnvBase
from dlrover.python.rl.classic.envs import load_samples, write_rewards, write_samples
from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.data.conversation import normalize_sft
from dlrover.python.rl.environment.core.functions import load_function
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier

ROOT = Path(__file__).resolve().parents[3]
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


OWN = """
import sys
sys.path.insert(0, "{root}")
from pathlib import Path
from dlrover.python.rl.classic import EnvBase
from dlrover.python.rl.classic.envs import load_samples, write_rewards

BONUS = 2.5

class Own(EnvBase):
    def get_reward(self, text):
        return BONUS + len(text)

samples = load_samples([Own([dict(role="user", content="?")])], "train_dataset")
print(write_rewards(Path("{folder}"), {{"train": samples}}))
"""


class Judging(EnvBase):
    def get_reward(self, text):
        return float(text.count(str(self.answer)))


class Failing(EnvBase):
    def get_reward(self, text):
        raise ArithmeticError("not this one")


def judge(name, completion, row):
    return load_function(name)(completion, None, row["extra_info"])


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def written(folder, *environments, **options):
    """The rows of a data set, and the name of its reward function."""
    samples = load_samples(environments, "train_dataset")
    rows = rows_of(write_samples(folder, "train", samples, scored=True))
    return rows, write_rewards(folder, {"train": samples}, **options)


def test_a_row_leads_to_its_own_environment(tmp_path):
    rows, name = written(tmp_path / "data", Judging(ASKED, 4), Judging(ASKED, 5))
    assert [row["messages"] for row in rows] == [ASKED, ASKED]
    assert [row["answer"] for row in rows] == ["4", "5"]
    assert [judge(name, "4, 4 or 5", row) for row in rows] == [2.0, 1.0]


def test_new_environments_are_seen_in_the_same_file(tmp_path):
    for answer, reward in ((4, 1.0), (5, 0.0)):
        (row,), name = written(tmp_path, Judging(ASKED, answer))
        assert judge(name, "4", row) == reward


def test_an_empty_completion_has_the_reward_of_a_missing_one_if_there_is_one(tmp_path):
    (row,), without = written(tmp_path / "a", Judging(ASKED, 4))
    _, having = written(tmp_path / "b", Judging(ASKED, 4), empty_reward=-101.0)
    assert judge(without, "", row) == 0.0
    assert judge(having, "", row) == -101.0
    assert judge(having, "4", row) == 1.0


def test_a_sample_without_rewards_has_none(tmp_path):
    (row,), name = written(tmp_path, EnvBase(ASKED))
    with pytest.raises(ValueError, match="has no get_reward"):
        judge(name, "4", row)


def test_what_cannot_be_pickled_is_said(tmp_path):
    sample = Judging(ASKED)
    sample.lock = threading.Lock()
    with pytest.raises(TypeError, match="the samples of train cannot be pickled"):
        write_rewards(tmp_path, {"train": load_samples([sample], "train_dataset")})


def test_the_class_of_a_script_goes_along(tmp_path):
    """The process that judges imports neither the script nor torch."""
    file = tmp_path / "own.py"
    file.write_text(OWN.format(root=str(ROOT), folder=str(tmp_path)), encoding="utf-8")
    made = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    asked = (
        f"import sys, json; sys.path.insert(0, {str(ROOT)!r})\n"
        "from dlrover.python.rl.environment.core.functions import load_function\n"
        f"judge = load_function({made.stdout.strip()!r})\n"
        "print(judge('four', None, {'split': 'train', 'number': 0}), 'torch' in sys.modules)\n"
    )
    judged = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    assert judged.stdout == "6.5 False\n", judged.stderr


def test_a_folder_with_odd_letters_is_found(tmp_path):
    (first, second), name = written(tmp_path / "my runs.v1:2 100%", Judging(ASKED, 4), Failing(ASKED))
    with DeadlineVerifier(name, timeout_s=20.0) as verifier:
        assert verifier("4", None, first["extra_info"]) == 1.0
        with pytest.raises(VerifierError, match=r"get_reward raised ArithmeticError: not this one"):
            verifier("4", None, second["extra_info"])


def test_examples_carry_no_environments_and_end_with_the_answer(tmp_path):
    talk = [*ASKED, {"role": "assistant", "content": "4"}]
    file = write_samples(tmp_path, "train", load_samples([Judging(ASKED, 4), EnvBase(talk)], "train_dataset"))
    assert [normalize_sft(row)["messages"] for row in rows_of(file)] == [talk, talk]
    assert list(tmp_path.iterdir()) == [Path(file)]
