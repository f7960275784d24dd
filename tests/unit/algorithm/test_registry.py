"""Algorithms by name."""

from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.dr_grpo import DrGRPO
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.algorithm.registry import ALGORITHMS, make_algorithm
from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.data.batch import Batch


def problems(name, options=None):
    with pytest.raises(InvalidJob) as caught:
        make_algorithm(name, options)
    return [str(problem) for problem in caught.value.problems]


def test_every_name_makes_its_algorithm():
    assert {name: type(make_algorithm(name)) for name in ALGORITHMS} == {
        name: preset.algorithm for name, preset in ALGORITHMS.items()
    }
    assert type(make_algorithm("grpo")) is GRPO
    assert make_algorithm("grpo", {"clip_high": 1, "normalize": "none"}) == GRPO(clip_high=1, normalize="none")
    assert make_algorithm("dr_grpo", {"averaging": "constant", "max_tokens": 9}).max_tokens == 9
    assert make_algorithm("dr_grpo", {"max_tokens": None}) == DrGRPO()


def test_111_112_114_presets_are_what_their_sources_say():
    ppo, grpo, dr_grpo = map(make_algorithm, ("openai_ppo", "deepseek_grpo", "dr_grpo"))
    assert (ppo.kl_in, ppo.kl_estimator, ppo.kl_coef > 0, type(ppo)) == ("reward", "k1", True, PPO)
    assert (grpo.kl_in, grpo.kl_estimator, grpo.averaging, grpo.normalize) == ("loss", "k3", "sequence", "std")
    assert (grpo.kl_coef > 0, dr_grpo.averaging, dr_grpo.kl_coef) == (True, "token", 0)
    assert make_algorithm("openai_ppo", {"kl_coef": 0.5, "lam": 1.0}) == PPO(kl_coef=0.5, lam=1.0)
    assert make_algorithm("ipo", {"beta": 0.3}) == DPO(beta=0.3, kind="ipo", token_means=True)
    assert make_algorithm("conservative_dpo").label_smoothing == 0.1


def test_the_reference_page_knows_every_name():
    page = (Path(__file__).parents[3] / "docs/api/algorithm.md").read_text(encoding="utf-8")
    assert [name for name in ALGORITHMS if f"`{name}`" not in page] == []


def test_an_unknown_name_gives_the_nearest():
    assert problems("grop") == ["algorithm.name: 'grop' is unknown; did you mean 'grpo'?"]
    assert problems("xyz") == ["algorithm.name: 'xyz' is unknown; known: " + ", ".join(ALGORITHMS)]


def test_all_wrong_options_are_reported_at_once():
    options = {"clip_lo": 1, "clip_high": "0.2", "kl_coef": True, "averaging": "mean", "normalize": None}
    assert problems("grpo", options) == [
        "algorithm.clip_lo: is unknown; did you mean 'clip_low'?",
        "algorithm.clip_high: must be a number, not '0.2'",
        "algorithm.kl_coef: must be a number, not True",
        "algorithm.averaging: must be one of 'token', 'sequence', not 'mean'",
        "algorithm.normalize: must be one of 'none', 'std', not None",
    ]


def test_options_that_do_not_go_together_are_a_problem_of_the_job():
    assert problems("dr_grpo", {"averaging": "constant"}) == [
        "algorithm: max_tokens goes with averaging 'constant': give both or neither"
    ]
    assert problems("dr_grpo", {"max_tokens": 0}) == ["algorithm.max_tokens: must be above 0, not 0"]
    assert problems("dr_grpo", {"max_tokens": 1.5}) == ["algorithm.max_tokens: must be an integer, not 1.5"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    guide = Path(__file__).parents[3] / "docs/guides/own_algorithm/above_median.py"
    monkeypatch.syspath_prepend(str(guide.parent))
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "other.py").write_text("class Median:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return guide


def test_an_algorithm_of_ones_own_is_one_short_file(mine):
    assert len(mine.read_text(encoding="utf-8").splitlines()) < 60
    algorithm = make_algorithm("above_median:AboveMedian", {"quantile": 0.25, "clip_high": 0.3})
    rows = Batch(
        {
            "prompt_id": np.array([0, 0, 0, 0, 7, 7]),
            "reward": np.array([0.0, 1.0, 2.0, np.nan, 5.0, 5.0]),
            "action_tokens": np.array([2, 2, 2, 2, 3, 3]),
        }
    )
    assert algorithm.annotate(rows).dense("advantage").tolist() == [0, 1, 1, 0, 0, 0]
    assert problems("above_median:AboveMedian", {"quantil": 1.0}) == [
        "algorithm.quantil: is unknown; did you mean 'quantile'?"
    ]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("above_median:AboveMedan", "the module 'above_median' has no 'AboveMedan'; did you mean 'AboveMedian'?"),
        (
            "above_medan:AboveMedian",
            "'above_medan:AboveMedian' cannot be imported: ModuleNotFoundError: No module named",
        ),
        ("broken:Thing", "'broken:Thing' cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this"),
        ("other:Median", "'other:Median' is no algorithm: a dataclass with needs, check_group_size, annotate, loss"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_what_is_no_algorithm_is_refused(name, what):
    (found,) = problems(name)
    assert found.startswith(f"algorithm.name: {what}")
