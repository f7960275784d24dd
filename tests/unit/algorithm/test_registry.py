# SPDX-License-Identifier: Apache-2.0
"""Algorithms by name."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.dr_grpo import DrGRPO
from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.algorithm.registry import ALGORITHMS, PRESETS, make_algorithm
from dlrover.python.rl.common import extensions
from dlrover.python.rl.common.errors import InvalidJob
from tests.support.loss_updates import rows_of


def errors_of(name, options=None):
    with pytest.raises(InvalidJob) as caught:
        make_algorithm(name, options)
    return [str(error) for error in caught.value.errors]


def test_make_algorithm_knows_every_name():
    for name in ALGORITHMS.builtin:
        assert type(make_algorithm(name)) is ALGORITHMS.load(name)
    assert set(PRESETS) <= set(ALGORITHMS.builtin)
    assert type(make_algorithm("grpo")) is GRPO
    assert make_algorithm("grpo", {"clip_high": 1, "normalize": "none"}) == GRPO(clip_high=1, normalize="none")
    assert make_algorithm("dr_grpo", {"averaging": "constant", "max_tokens": 9}).max_tokens == 9
    assert make_algorithm("dr_grpo", {"max_tokens": None}) == DrGRPO()


@pytest.mark.feature(111, 112, 114)
def test_presets_have_the_options_of_their_sources():
    ppo, grpo, dr_grpo = map(make_algorithm, ("openai_ppo", "deepseek_grpo", "dr_grpo"))
    assert (ppo.kl_in, ppo.kl_estimator, ppo.kl_coef > 0, type(ppo)) == ("reward", "k1", True, PPO)
    assert (grpo.kl_in, grpo.kl_estimator, grpo.averaging, grpo.normalize) == ("loss", "k3", "sequence", "std")
    assert (grpo.kl_coef > 0, dr_grpo.averaging, dr_grpo.kl_coef) == (True, "token", 0)
    assert make_algorithm("openai_ppo", {"kl_coef": 0.5, "lam": 1.0}) == PPO(kl_coef=0.5, lam=1.0)
    assert make_algorithm("ipo", {"beta": 0.3}) == DPO(beta=0.3, kind="ipo", token_means=True)
    assert make_algorithm("conservative_dpo").label_smoothing == 0.1


def test_reference_page_names_existing_algorithms():
    page = (Path(__file__).parents[3] / "docs/api/algorithms.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) > 10 and set(names) <= ALGORITHMS.builtin.keys()


def test_unknown_algorithm_gives_the_nearest_name():
    (error,) = errors_of("grop")
    assert error.startswith("algorithm.name: no algorithm is called 'grop'; did you mean 'grpo'?")
    (error,) = errors_of("xyz")
    assert f"there are {', '.join(sorted(ALGORITHMS.builtin))}" in error


def test_installed_package_registers_an_algorithm(own_algorithms, monkeypatch):
    point = EntryPoint("median", "above_median:AboveMedian", ALGORITHMS.group)
    monkeypatch.setattr(extensions, "entry_points", lambda group: [point] if group == point.group else [])
    assert make_algorithm("median", {"quantile": 0.25}).quantile == 0.25
    (error,) = errors_of("medan")
    assert "did you mean 'median'?" in error


def test_wrong_options_are_problems_of_the_job():
    options = {"clip_lo": 1, "clip_high": "much", "kl_coef": -1, "averaging": "mean", "normalize": None}
    assert sorted(errors_of("grpo", options)) == [
        "algorithm.averaging: input should be 'token' or 'sequence', got 'mean'",
        "algorithm.clip_high: input should be a valid number, got 'much'",
        "algorithm.clip_lo: unknown key 'clip_lo'; did you mean 'clip_low'?",
        "algorithm.kl_coef: input should be greater than or equal to 0, got -1",
        "algorithm.normalize: input should be 'none', 'std' or 'std_unbiased', got None",
    ]
    assert errors_of("dr_grpo", {"averaging": "constant"}) == [
        "algorithm: max_tokens goes with averaging 'constant': give both or neither, got {'averaging': 'constant'}"
    ]


@pytest.fixture
def own_algorithms(tmp_path, monkeypatch):
    guide = Path(__file__).parents[3] / "docs/guides/own_algorithm/above_median.py"
    monkeypatch.syspath_prepend(str(guide.parent))
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "other.py").write_text("class Median:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return guide


def test_own_algorithm_is_one_short_file(own_algorithms):
    assert len(own_algorithms.read_text(encoding="utf-8").splitlines()) < 60
    algorithm = make_algorithm("above_median:AboveMedian", {"quantile": 0.25, "clip_high": 0.3})
    rows = rows_of([0, 0, 0, 0, 7, 7], [0.0, 1.0, 2.0, np.nan, 5.0, 5.0], [2, 2, 2, 2, 3, 3])
    assert algorithm.annotate(rows).dense("advantage").tolist() == [0, 1, 1, 0, 0, 0]
    assert errors_of("above_median:AboveMedian", {"quantil": 1.0}) == [
        "algorithm.quantil: unknown key 'quantil'; did you mean 'quantile'?"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("above_median:AboveMedan", "module 'above_median' has no 'AboveMedan'; did you mean 'AboveMedian'?"),
        ("above_medan:AboveMedian", "module 'above_medan' cannot be imported: no module named 'above_medan'"),
        ("broken:Thing", "module 'broken' cannot be imported: no module named 'nothing_of_this_name'"),
        ("other:Median", "'other:Median' is not an algorithm: a dataclass with needs, check_group_size, annotate, l"),
    ],
)
@pytest.mark.usefixtures("own_algorithms")
def test_own_algorithm_failing_to_load_is_refused(name, message):
    (error,) = errors_of(name)
    assert error.startswith(f"algorithm.name: {message}")
