# SPDX-License-Identifier: Apache-2.0
"""Samples that a lost rollout had finished are not drawn again, unless the run no longer stands on their weights."""

from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.recipe.rollout.episodes import KeptSamples
from tests.support.scripted import Rolling, groups

WANTED = groups({"answer": "7"}, {"answer": "8"}, {"answer": "9"})
STAMP = WeightStamp(0, "aa")


def say(context, index):
    """Later samples are longer."""
    return "word " * (1 + 4 * index)


def member(folder, stamp=STAMP, rank=0):
    made = Rolling(say, copies=KeptSamples(folder, rank))
    made.scheduler._copies.note(stamp)
    return made


@pytest.fixture
def lost(tmp_path):
    """The samples that a worker has finished in the ten steps that it had."""
    made = member(tmp_path)
    advance = made.engine.advance

    def ten_times():
        if made.engine.steps == 10:
            raise EngineError("the end")
        return advance()

    made.engine.advance = ten_times
    with pytest.raises(EngineError, match="the end"):
        made.sample(WANTED, samples=3)
    settle(made)
    return {0}


def settle(made):
    made.scheduler._copies._writer.shutdown(wait=True)


def drawn(made):
    return {key[1] for key in made.engine.seeds}


def test_the_next_process_draws_only_the_others(tmp_path, lost):
    calm = Rolling(say).fetch(WANTED, samples=3)
    made = member(tmp_path)
    assert made.fetch(WANTED, samples=3).objects("completion") == calm.objects("completion")
    assert drawn(made) == {0, 1, 2} - lost


def test_a_whole_group_needs_no_engine(tmp_path):
    before = member(tmp_path)
    before.fetch(WANTED, samples=2)
    settle(before)
    made = member(tmp_path)
    assert len(made.fetch(WANTED, samples=2)) == 6 and not made.engine.seeds


@pytest.mark.parametrize(
    "stamps",
    [
        pytest.param([WeightStamp(0, "bb")], id="other weights of that version"),
        pytest.param([WeightStamp(0, "bb"), WeightStamp(1, "cc")], id="the run went back, and on"),
    ],
)
def test_what_other_weights_have_drawn_is_drawn_again(tmp_path, lost, stamps):
    for stamp in stamps:
        KeptSamples(tmp_path, 1).note(stamp)  # another worker, while this one was away
    made = member(tmp_path, stamps[-1])
    made.fetch(WANTED, samples=3)
    assert drawn(made) == {0, 1, 2}


def test_what_earlier_weights_have_drawn_still_counts(tmp_path, lost):
    made = member(tmp_path, WeightStamp(1, "cc"))
    made.fetch(WANTED, samples=3)
    assert drawn(made) == {0, 1, 2} - lost


def test_stamps_that_cannot_be_written_make_nothing_valid(tmp_path, lost, monkeypatch):
    def full(path, text):
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        KeptSamples(tmp_path, 1).note(WeightStamp(0, "bb"))
    made = member(tmp_path, WeightStamp(1, "cc"))
    made.fetch(WANTED, samples=3)
    assert drawn(made) == {0, 1, 2}


def test_other_questions_get_other_samples(tmp_path, lost):
    made = member(tmp_path)
    made.fetch(groups({}, {}, {}, prompt="another "), samples=3)
    assert drawn(made) == {0, 1, 2}


def test_samples_of_groups_that_nobody_wants_are_forgotten_and_torn_files_are_not_read(tmp_path, lost):
    kept = KeptSamples(tmp_path, 0)
    files = sorted((tmp_path / "0").iterdir())
    kept.retain([])
    kept._writer.shutdown(wait=True)
    assert not list((tmp_path / "0").iterdir())
    files[0].write_text("{")
    assert member(tmp_path).fetch(WANTED, samples=3) is not None
