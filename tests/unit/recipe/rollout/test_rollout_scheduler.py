# SPDX-License-Identifier: Apache-2.0
"""Samples and their environments, many at once and turn by turn, and samples kept for a lost rollout's replacement."""

import asyncio
import math
import time
from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.columns import SampleView
from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.recipe.rollout.episodes import summarize_rows
from dlrover.python.rl.recipe.rollout.kept_samples import KeptSamples
from tests.support import rolled_environments
from tests.support.scripted import SAMPLING, Rolling, groups, rolling, texts

OURS = "tests.support.rolled_environments"


@pytest.fixture(autouse=True)
def nothing_seen():
    rolled_environments.seen.clear(), rolled_environments.asleep.clear(), rolled_environments.napping.clear()


def word(context, index):
    return "word "


def seen(call):
    return [entry[1:] for entry in rolled_environments.seen if entry[0] == call]


def fetched(say, *infos, samples=1, prompt="ask ", **limits):
    """The samples of groups with these ``extra_info``, in the environment of this suite."""
    with rolling(say, OURS, **limits) as rolled:
        return rolled.fetch(groups(*infos, prompt=prompt), samples=samples)


@pytest.mark.feature(75)
def test_environment_without_data_gives_the_first_state():
    taken = fetched(word, {"seed": 4}, {"seed": 9}, prompt="", samples=2)
    assert taken.objects("prompt") == ["game 4: "] * 2 + ["game 9: "] * 2
    assert taken.objects("error") == [None] * 4


@pytest.mark.feature(87)
def test_continued_states_are_one_sequence_of_the_engines_ids():
    with rolling(word, OURS) as rolled:
        taken = rolled.fetch(groups({}))
        eos = rolled.engine.tokenizer.eos_token_id
    assert len(taken) == 1
    (mask,), (tokens,), (rewards,) = (list(taken.ragged(n)) for n in ("action_mask", "tokens", "token_rewards"))
    action = [*b"word ", eos]
    assert tokens.tolist() == [*b"ask ", *action, *b"seen ", *action]
    assert mask.tolist() == [False] * 4 + [True] * 6 + [False] * 5 + [True] * 6
    assert rewards.tolist() == [0.0] * 9 + [0.25] + [0.0] * 10 + [0.5]
    assert taken.ragged("logprobs")[0].tolist() == [-float(chosen) for chosen in mask]
    assert taken.ragged("versions")[0].tolist() == [int(chosen) - 1 for chosen in mask]
    assert taken.dense("reward").tolist() == [0.75]
    assert taken.objects("completion") == ["word seen word "]


def test_prompt_without_extra_info_has_an_empty_one():
    empty, none = (fetched(word, info).objects("extra_info") for info in ({}, None))
    assert empty == none


def test_reward_of_a_sample_is_summed_without_rounding():
    taken = fetched(word, {"rewards": [0.1, 0.9]}, {"rewards": [33.3, 66.7]})
    assert taken.dense("reward").tolist() == [1.0, 100.0]


@pytest.mark.feature(88)
def test_other_state_is_another_sequence_of_the_sample():
    taken = fetched(word, {"habit": "unrelated", "until": 3}, {"until": 1}, samples=2)
    assert taken.dense("prompt_id").tolist() == [0] * 6 + [1] * 2
    assert taken.dense("sample_index").tolist() == [0, 0, 0, 1, 1, 1, 0, 1]
    assert taken.objects("prompt") == ["ask ", "another ", "another "] * 2 + ["ask "] * 2
    assert texts(taken, "action_mask")[:3] == ["word <|im_end|>"] * 3
    numbers = taken.dense("trajectory")
    assert len(set(numbers.tolist())) == 4
    assert (numbers[:3] == numbers[0]).all()
    summary = summarize_rows(taken)
    assert sorted(SampleView.of(summary).reward.tolist()) == [0.25, 0.25, 1.5, 1.5]
    advantages = GRPO().annotate(summary.with_columns(reward=np.array([1.0, 0, 0, 0, 0, 0, 0, 0]))).dense("advantage")
    assert len(set(advantages[:3].tolist())) == 1
    assert advantages[0] == -advantages[3] > 0


def test_state_without_room_for_an_action_ends_the_sample():
    taken = fetched(word, {"habit": "long"}, {"reset": "x" * 1000}, longest=1000)
    assert taken.dense("turns").tolist() == [1, 0]
    assert taken.objects("error") == [None, "the first state leaves no room for an action: it has 1000 tokens"]
    assert not taken.dense("finished").any()
    assert taken.dense("reward")[0] == 0.25
    assert taken.ragged("tokens")[0].tolist() == [*b"ask word ", 257 + 1]
    assert taken.ragged("action_mask")[0][-1]


def test_turn_is_cut_at_the_room_left():
    """The second one is cut off, and counts as such."""
    taken = fetched(word, {}, longest=len("ask word \0seen wo"))
    assert (taken.objects("completion"), taken.dense("turns").tolist()) == (["word seen wo"], [2])
    assert (taken.objects("error"), taken.dense("finished").tolist()) == ([None], [False])


@pytest.mark.feature(92)
def test_pool_serves_an_evaluation_beside_open_samples():
    with rolling(word, f"{OURS}:Pool", 3) as rolled:
        under_way = groups({"ends": False}, {"ends": False}, {"ends": False})
        rolled.sample(under_way, enough=1)
        answers = rolled.loop.run(rolled.scheduler.generate(groups({"ends": True}), SAMPLING, (5, 0)))
        assert answers.objects("error") == [None]
        assert rolled.fetch(under_way).objects("error") == [None] * 3


@pytest.mark.feature(94)
def test_two_outputs_of_each_prompt_come_in_order():
    """The environment is a hook after each generation: its next state is generated from again."""
    say = lambda context, index: f"out {index} of {context.split()[0]} "  # noqa: E731
    taken = fetched(say, *[{"habit": "unrelated"}] * 3, samples=2)
    outputs = [f"out {index} of {state} " for index in (0, 1) for state in ("ask", "another")]
    assert taken.objects("completion") == outputs * 3


@pytest.mark.feature(96)
def test_turn_under_new_weights_has_their_version():
    with rolling(word, OURS) as rolled:
        wanted = groups({"until": 3}, {"until": 1})
        rolled.sample(wanted, enough=1)
        rolled.engine.version = 4
        taken = rolled.fetch(wanted)
    versions = taken.ragged("versions")[0][taken.ragged("action_mask")[0]].tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 4}
    assert (taken.dense("min_version").tolist(), taken.dense("version").tolist()) == ([0, 0], [4, 0])


def test_later_turns_have_their_own_seeds():
    with rolling(word, OURS) as rolled:
        rolled.fetch(groups({"until": 3}, created_step=6))
        assert list(rolled.engine.seeds.values()) == [(5, 6), (5, 6, 0, 1), (5, 6, 0, 2)]


def test_sample_waiting_for_its_environment_makes_room():
    """One place in the engine, and samples whose environment takes its time: others are under way."""
    with rolling(word, OURS, room=1) as rolled:
        rolled.sample(groups(*[{"nap": 0.4, "until": 1}] * 4))
    assert max(rolled_environments.asleep) > 1


def test_abandoned_episode_is_closed():
    with rolling(word, OURS, 50) as rolled:
        endless = groups({"until": 99, "nap": 0.05})
        rolled.sample(endless, patience_s=0.1)
        rolled.sample(groups({"until": 1}, created_step=2))
        assert len(seen("close")) == 2
    assert seen("shutdown") == [()]


def test_closing_ends_open_episodes_without_waiting(monkeypatch):
    monkeypatch.setattr("dlrover.python.rl.recipe.rollout.scheduler._CLOSING_S", 0.3)
    with rolling(word, OURS, 50) as rolled:
        rolled.sample(groups({"until": 99}, {"until": 99, "close": "late"}), enough=1, patience_s=0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert len(seen("close")) == 2


@pytest.mark.slow
def test_time_of_an_environment_stops_between_calls():
    """A call of it that was under way has its whole time left."""
    with rolling(word, OURS, timeout_s=2.0) as rolled:
        wanted = groups({"nap": 0.2, "until": 1})
        while not seen("step"):
            rolled.sample(wanted, patience_s=0.05)
        time.sleep(2.2)
        assert rolled.fetch(wanted).objects("error") == [None]


def test_scheduler_runs_inside_a_running_loop():
    """A cell of a notebook runs so."""

    async def cell():
        rolled = Rolling(word)
        return rolled.fetch(groups({}, {})), rolled.loop.close()

    taken, _ = asyncio.run(cell())
    assert taken.objects("completion") == ["word ", "word "]


def test_patience_is_asked_between_steps():
    with rolling(lambda context, index: "x" * 60) as rolled:
        standing = rolled.sample(groups({}), patience_s=0.0)
        assert (rolled.engine.steps, standing.dense("started").tolist()) == (0, [False])
        assert rolled.sample(groups({}), patience_s=math.inf).dense("complete").all()
        assert rolled.engine.steps == 61


# -- kept samples ------------------------------------------------------------------------------------------------------

WANTED = groups({"answer": "7"}, {"answer": "8"}, {"answer": "9"})
STAMP = WeightStamp(0, "aa")


def say(context, index):
    """Later samples are longer."""
    return "word " * (1 + 4 * index)


def member(folder, stamp=STAMP):
    server = Rolling(say, copies=KeptSamples(folder, 0))
    server.scheduler._copies.note(stamp)
    return server


def drawn_again(folder, stamp=STAMP, wanted=WANTED):
    """The indices of samples that the next process draws."""
    server = member(folder, stamp)
    server.fetch(wanted, samples=3)
    return {key[1] for key in server.engine.seeds}


@pytest.fixture
def lost(tmp_path):
    """The samples that a worker has finished in the ten steps that it had."""
    server = member(tmp_path)
    advance = server.engine.advance

    def ten_times():
        if server.engine.steps == 10:
            raise EngineError("the end")
        return advance()

    server.engine.advance = ten_times
    with pytest.raises(EngineError, match="the end"):
        server.sample(WANTED, samples=3)
    settle(server)
    return {0}


def settle(server):
    server.scheduler._copies._writer.shutdown(wait=True)


def test_next_process_draws_only_unfinished_samples(tmp_path, lost):
    calm, server = Rolling(say).fetch(WANTED, samples=3), member(tmp_path)
    assert server.fetch(WANTED, samples=3).objects("completion") == calm.objects("completion")
    assert {key[1] for key in server.engine.seeds} == {0, 1, 2} - lost
    assert drawn_again(tmp_path, WeightStamp(1, "cc")) <= {0, 1, 2} - lost, "later weights change nothing"


def test_whole_group_of_kept_samples_needs_no_engine(tmp_path):
    before = member(tmp_path)
    before.fetch(WANTED, samples=2)
    settle(before)
    server = member(tmp_path)
    assert len(server.fetch(WANTED, samples=2)) == 6 and not server.engine.seeds


@pytest.mark.parametrize(
    "stamps",
    [
        pytest.param([WeightStamp(0, "bb")], id="other weights of that version"),
        pytest.param([WeightStamp(0, "bb"), WeightStamp(1, "cc")], id="the run went back, and on"),
    ],
)
def test_samples_of_other_weights_are_drawn_again(tmp_path, lost, stamps):
    for stamp in stamps:
        KeptSamples(tmp_path, 1).note(stamp)  # another worker, while this one was away
    assert drawn_again(tmp_path, stamps[-1]) == {0, 1, 2}


def test_stamp_not_written_makes_no_sample_valid(tmp_path, lost, monkeypatch):
    def full(path, text):
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        KeptSamples(tmp_path, 1).note(WeightStamp(0, "bb"))
    assert drawn_again(tmp_path, WeightStamp(1, "cc")) == {0, 1, 2}


def test_kept_samples_of_other_questions_are_not_used(tmp_path, lost):
    assert drawn_again(tmp_path, wanted=groups({}, {}, {}, prompt="another ")) == {0, 1, 2}


def test_unwanted_samples_are_deleted_and_torn_files_skipped(tmp_path, lost):
    copies = KeptSamples(tmp_path, 0)
    files = sorted((tmp_path / "0").iterdir())
    copies.retain([])
    copies._writer.shutdown(wait=True)
    assert not list((tmp_path / "0").iterdir())
    files[0].write_text("{")
    assert member(tmp_path).fetch(WANTED, samples=3) is not None
