# SPDX-License-Identifier: Apache-2.0
"""Samples and data sets, checked; environments that judge elsewhere; the places of RLFusion's classes."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import dlrover.python.rl.classic as classic
from dlrover.python.rl.classic import AIME2025, CapyBaraSFTDataset, EnvBase, IntellectMathDataset, MathDataset
from dlrover.python.rl.classic import get_boxed_answer as boxed
from dlrover.python.rl.classic.envs import load_samples, write_rewards, write_samples
from dlrover.python.rl.common.errors import DataError, VerifierError
from dlrover.python.rl.data.conversation import normalize_sft
from dlrover.python.rl.environment.core.functions import load_function
from dlrover.python.rl.environment.sandbox.reward_process import DeadlineVerifier
from tests.support.run_files import read_lines, write_rows

ASKED = [{"role": "system", "content": "Be concise."}, {"role": "user", "content": "What is 2 + 2?"}]


class Judging(EnvBase):
    def get_reward(self, text):
        return float(text == self.answer)


@pytest.mark.feature(77)
def test_sample_is_an_environment_or_a_dict():
    env = EnvBase(prompt=ASKED, answer="4")
    (sample,) = load_samples([env], "train_dataset")
    assert (sample.prompt, sample.answer, sample.environment, sample.has_reward) == (ASKED, "4", env, False)
    assert load_samples([Judging(ASKED)], "train_dataset", rewards=True)[0].has_reward
    (sample,) = load_samples([{"prompt": ASKED, "answer": 4}], "train_dataset", answers=True)
    assert (sample.prompt, sample.answer) == (ASKED, 4)


def test_each_sample_is_asked_for_once():
    class Drawing(list):
        def __getitem__(self, index):
            self.asked = [*getattr(self, "asked", []), index]
            return super().__getitem__(index)

    samples = Drawing([EnvBase(ASKED), EnvBase(ASKED)])
    load_samples(samples, "train_dataset")
    assert samples.asked == [0, 1]


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        ({"prompt": "2+2"}, "must have a prompt, a list of messages, not str"),
        ({}, "must have a prompt, a list of messages, not None"),
        ({"prompt": [{"role": "asistant", "content": ""}]}, "unknown role 'asistant'; did you mean 'assistant'"),
        ({"prompt": [{"role": "user", "content": 3}]}, "content must be text, not int"),
        ({"prompt": ["hello"]}, "must be a dict of role and content, not str"),
        ({"prompt": ASKED, "answer": [4]}, "an answer that is text, a number or None, not list"),
        ({"prompt": ASKED, "answer": True}, "not bool"),
    ],
)
def test_wrong_sample_is_named_by_its_number(sample, fault):
    with pytest.raises(ValueError, match=r"train_dataset\[1\]") as caught:
        load_samples([EnvBase(ASKED), sample], "train_dataset")
    assert fault in str(caught.value)


ANSWERED = [*ASKED, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("samples", "needs", "message"),
    [
        ([EnvBase(ASKED, 4)], {"rewards": True}, r"train_dataset\[0\] has no reward: EnvBase must define get_reward"),
        ([EnvBase(ASKED)], {"answers": True}, r"train_dataset\[0\] has nothing to train on"),
        ([EnvBase(ANSWERED, 4)], {"answers": True}, "has both an answer and an assistant's message"),
        ([{}] * 25, {}, "and 5 more"),
        ([], {}, "train_dataset is empty"),
        (iter([EnvBase(ASKED)]), {}, "must have a length"),
    ],
)
def test_samples_unfit_for_their_purpose_are_refused(samples, needs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        load_samples(samples, "train_dataset", **needs)


@pytest.mark.feature(78)
def test_math_dataset_rewards_the_right_sum_most():
    dataset = MathDataset(num_samples=200, min_val=0, max_val=50, operand="add")
    assert len(dataset) == 200
    for problem in dataset:
        first, second = [int(word.strip("?")) for word in problem.question.split() if word.strip("?").isdigit()][:2]
        assert problem.answer == first + second
        right, wrong, no_box = map(problem.get_reward, (f"\\boxed{{{problem.answer}}}", "\\boxed{-1}", "nothing"))
        assert right > wrong > no_box


@pytest.mark.feature(79)
def test_the_last_box_counts_with_its_nested_braces():
    assert boxed("\\boxed{1} and \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert boxed("no box") is None


# -- data sets of the hub, from files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "column"), [(IntellectMathDataset, "question"), (AIME2025, "problem")])
def test_problems_of_a_local_file_reward_the_box_alone(tmp_path, kind, column):
    rows = [{column: "What is 6 x 7?", "answer": 42}, {column: "Put 1 in a \\boxed{}.", "answer": "1", "id": 3}]
    dataset = kind(path=write_rows(tmp_path / "problems.jsonl", rows))
    assert len(dataset) == 2
    assert dataset[0].prompt[0]["content"] == "What is 6 x 7?\n\nPut the final answer in \\boxed{}."
    assert dataset[1].prompt[0]["content"] == "Put 1 in a \\boxed{}."
    texts = ("so \\boxed{42.0}", "42", "\\boxed{41}")
    assert [dataset[0].get_reward(text) for text in texts] == [1.0, 0.0, 0.0]
    assert len(kind(path=tmp_path / "problems.jsonl", num_samples=1)) == 1


def test_conversations_of_a_local_file_in_both_layouts(tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": turns}, {"conversation": [{"input": "Hi", "output": "Hello"}], "source": "x"}]
    dataset = CapyBaraSFTDataset(path=write_rows(tmp_path / "talks.jsonl", rows))
    assert [sample.prompt for sample in dataset] == [turns, turns]
    assert [sample.answer for sample in dataset] == [None, None]


@pytest.mark.parametrize(
    ("kind", "rows", "arguments", "message"),
    [
        (AIME2025, [{"text": "?"}], {}, r"jsonl:1: needs one of problem, question as text, and 'answer'; it has text"),
        (CapyBaraSFTDataset, [{"text": "?"}], {}, r"needs 'messages' or 'conversation'; it has text"),
        (AIME2025, None, {}, "no such file"),
        (AIME2025, [{"text": "?"}], {"num_samples": 0}, "num_samples must be above 0, not 0"),
    ],
)
def test_dataset_of_an_unfit_file_is_refused(tmp_path, kind, rows, arguments, message):
    if rows:
        write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises((DataError, ValueError), match=message):
        kind(path=tmp_path / "a.jsonl", **arguments)


# -- environments travel to the processes that judge ------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[3]
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]

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


class Counting(EnvBase):
    def get_reward(self, text):
        return float(text.count(str(self.answer)))


class Failing(EnvBase):
    def get_reward(self, text):
        raise ArithmeticError("not this one")


def judge(name, completion, row):
    return load_function(name)(completion, None, row["extra_info"])


def stored(folder, *environments, **options):
    """The rows of a data set, and the name of its reward function."""
    samples = load_samples(environments, "train_dataset")
    rows = read_lines(write_samples(folder, "train", samples, scored=True))
    return rows, write_rewards(folder, {"train": samples}, **options)


def test_row_leads_to_its_own_environment(tmp_path):
    for answers in (("4", "5"), ("5", "6")):  # the second data set takes the place of the first
        rows, name = stored(tmp_path / "data", *(Counting(QUESTION, int(answer)) for answer in answers))
        assert [row["messages"] for row in rows] == [QUESTION, QUESTION]
        assert tuple(row["answer"] for row in rows) == answers
        assert [judge(name, "4, 4 or 5", row) for row in rows] == ([2.0, 1.0] if "4" in answers else [1.0, 0.0])


def test_empty_completion_has_the_empty_reward_if_given(tmp_path):
    (row,), without = stored(tmp_path / "a", Counting(QUESTION, 4))
    _, having = stored(tmp_path / "b", Counting(QUESTION, 4), empty_reward=-101.0)
    assert judge(without, "", row) == 0.0
    assert [judge(having, text, row) for text in ("", "4")] == [-101.0, 1.0]


def test_a_sample_without_rewards_has_none(tmp_path):
    (row,), name = stored(tmp_path, EnvBase(QUESTION))
    with pytest.raises(ValueError, match="has no get_reward"):
        judge(name, "4", row)


def test_unpicklable_sample_is_refused(tmp_path):
    sample = Counting(QUESTION)
    sample.lock = threading.Lock()
    with pytest.raises(TypeError, match="the samples of train cannot be pickled"):
        write_rewards(tmp_path, {"train": load_samples([sample], "train_dataset")})


def test_the_class_of_a_script_goes_along(tmp_path):
    """The process that judges imports neither the script nor torch."""
    file = tmp_path / "own.py"
    file.write_text(OWN.format(root=str(ROOT), folder=str(tmp_path)), encoding="utf-8")
    script = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert script.returncode == 0, script.stderr
    program = (
        f"import sys, json; sys.path.insert(0, {str(ROOT)!r})\n"
        "from dlrover.python.rl.environment.core.functions import load_function\n"
        f"judge = load_function({script.stdout.strip()!r})\n"
        "print(judge('four', None, {'split': 'train', 'number': 0}), 'torch' in sys.modules)\n"
    )
    judge = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert judge.stdout == "6.5 False\n", judge.stderr


def test_a_folder_with_odd_letters_is_found(tmp_path):
    (first, second), name = stored(tmp_path / "my runs.v1:2 100%", Counting(QUESTION, 4), Failing(QUESTION))
    with DeadlineVerifier(name, timeout_s=20.0) as verifier:
        assert verifier("4", None, first["extra_info"]) == 1.0
        with pytest.raises(VerifierError, match=r"get_reward raised ArithmeticError: not this one"):
            verifier("4", None, second["extra_info"])


def test_examples_carry_no_environments_and_end_with_the_answer(tmp_path):
    talk = [*QUESTION, {"role": "assistant", "content": "4"}]
    samples = load_samples([Counting(QUESTION, 4), EnvBase(talk)], "train_dataset", answers=True)
    file = write_samples(tmp_path, "train", samples)
    assert [normalize_sft(row)["messages"] for row in read_lines(file)] == [talk, talk]
    assert list(tmp_path.iterdir()) == [Path(file)]


# -- the import lines of RLFusion -------------------------------------------------------------------------------------


RLFUSION = """
from rlfusion.envs import EnvBase
from rlfusion.datasets import MathDataset
from rlfusion.trainers.sft_trainer import SFTTrainer
from rlfusion.trainers.grpo_trainer import GRPOTrainer
from rlfusion.trainers.onpolicy_distillation_trainer import OnPolicyDistillationTrainer
"""


def test_import_lines_of_rlfusion_work_with_the_new_name():
    places = {}
    exec(RLFUSION.replace("rlfusion", "dlrover.python.rl.classic"), places)
    names = {"EnvBase", "MathDataset", "SFTTrainer", "GRPOTrainer", "OnPolicyDistillationTrainer"}
    assert {name: places[name] for name in names} == {name: getattr(classic, name) for name in names}
