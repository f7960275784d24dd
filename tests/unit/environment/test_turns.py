# SPDX-License-Identifier: Apache-2.0
"""Guarded episodes, whose faults stay with their samples; tokens of a trajectory, and who wrote them."""

import asyncio
import time
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import GENERATED, ColumnSpec, SequenceColumns
from dlrover.python.rl.environment.core.functions import load_environment
from dlrover.python.rl.environment.core.turns import Guard, Trajectory
from dlrover.python.rl.environment.sandbox.environment_process import IsolatedEnvironment
from tests.support import user_environments
from tests.support.manual_clock import within


def encode(text):
    return [ord(character) for character in text]


def wrote(tokens, version=1):
    return tokens, {"logprobs": [-0.5] * len(tokens), "versions": [version] * len(tokens)}


@pytest.mark.feature(87)
def test_trajectory_continued_is_one_sequence():
    trajectory = Trajectory(encode, "ask ")
    assert trajectory.context == encode("ask ")
    trajectory.act("word", *wrote([900, 901]))  # not the text's own tokens
    trajectory.reward(0.25)
    trajectory.observe("ask word seen ")
    trajectory.act("end", *wrote([902], version=2))
    trajectory.reward(1.0)
    (sequence,) = trajectory.sequences
    assert sequence.tokens == [*encode("ask "), 900, 901, *encode(" seen "), 902]
    assert sequence.values["action_mask"] == [False] * 4 + [True] * 2 + [False] * 6 + [True]
    assert sequence.values["logprobs"] == [0.0] * 4 + [-0.5] * 2 + [0.0] * 6 + [-0.5]
    assert sequence.values["versions"] == [-1] * 4 + [1] * 2 + [-1] * 6 + [2]
    assert sequence.values["token_rewards"] == [0.0] * 5 + [0.25] + [0.0] * 6 + [1.0]


@pytest.mark.feature(88)
def test_trajectory_of_another_state_begins_a_sequence():
    trajectory = Trajectory(encode, "ask ")
    trajectory.act("word", *wrote([900]))
    trajectory.observe("summary")
    trajectory.act("end", *wrote([901]))
    assert [sequence.tokens for sequence in trajectory.sequences] == [[*encode("ask "), 900], [*encode("summary"), 901]]
    assert trajectory.context == [*encode("summary"), 901]
    trajectory = Trajectory(encode, "ask ", tokens=[7, 8])
    trajectory.act("word<end>", *wrote([900]))
    trajectory.observe("ask word more")
    assert [sequence.tokens for sequence in trajectory.sequences] == [[7, 8, 900], encode("ask word more")]


def test_trajectory_refuses_wrong_columns():
    trajectory = Trajectory(encode, "ask")
    for columns, fault in (
        ({"logprobs": [0.0], "versions": [0, 0]}, "1 logprobs for 2 tokens"),
        ({"logprobs": [0.0, 0.0]}, "0 versions for 2 tokens"),
        ({**wrote([1, 2])[1], "versoins": [0, 0]}, "not declare the column 'versoins'.* 'versions'"),
    ):
        with pytest.raises(DataError, match=fault):
            trajectory.act("ab", [1, 2], columns)
        assert trajectory.context == encode("ask")
    with pytest.raises(DataError, match="no action to reward"):
        trajectory.reward(1.0)


def test_trajectory_fills_engine_columns_as_declared():
    columns = {
        "experts": ColumnSpec("int16", fill=-1, shape=(2, 1)),
        "margin": ColumnSpec("float64", fill=9),
        "passes": ColumnSpec("int64", fill=-7, per="sample"),
    }
    trajectory = Trajectory(encode, "a", columns={**GENERATED, **columns})
    for margin, more in ((0.5, {"passes": 3}), (0.25, {})):
        trajectory.act("b", [900], {**wrote([900])[1], "experts": np.full((1, 2, 1), 4), "margin": [margin], **more})
        trajectory.observe("ab c" if margin == 0.5 else "other")
    stacked = SequenceColumns.stack(trajectory.sequences, columns)
    assert [row.tolist() for row in stacked["margin"]] == [[9, 0.5, 9, 9, 0.25], [9] * 5]
    assert [row[:, 0, 0].tolist() for row in stacked["experts"]] == [[-1, 4, -1, -1, 4], [-1] * 5]
    assert (stacked["experts"].values.shape, stacked["experts"].values.dtype) == ((10, 2, 1), "int16")
    assert stacked["passes"].tolist() == [3, -7]
    assert SequenceColumns.stack([], columns)["experts"].values.shape == (0, 2, 1)


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=4), st.text("cd", max_size=4), st.booleans()), max_size=6))
def test_trajectory_columns_are_as_long_as_the_tokens(turns):
    trajectory, state = Trajectory(encode, "s"), "s"
    for action, seen, continues in turns:
        trajectory.act(action, *wrote([1000 + at for at in range(len(action))]))
        state = state + action + seen if continues else f"new {seen}"
        trajectory.observe(state)
    for sequence in trajectory.sequences:
        columns = [values for values in sequence.values.values() if isinstance(values, list)]
        assert {len(column) for column in columns} == {len(sequence.tokens)}
        assert len(columns) == 5
        assert [token >= 1000 for token in sequence.tokens] == sequence.values["action_mask"]
    acted = [token for sequence in trajectory.sequences for token in sequence.tokens if token >= 1000]
    assert len(acted) == sum(len(action) for action, _, _ in turns)
    assert len(trajectory.sequences) == 1 + sum(not continues for _, _, continues in turns)


def test_trajectory_of_a_chat_has_the_tokens_of_its_template():
    """A sampled end marker replaces the template's; an answer that was cut off gets the template's."""
    from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer  # which takes children seconds

    tokenizer = make_byte_tokenizer()
    messages = [{"role": "user", "content": "1+1?"}]
    answers = [("is it 2", True), ("or 3, and so", False), ("2", True)]

    def render(chat, **options):
        return tokenizer.apply_chat_template(chat, tokenize=False, **options)

    state = render(messages, add_generation_prompt=True)
    trajectory = Trajectory(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], state)
    for number, (answer, has_ended) in enumerate(answers):
        tokens = tokenizer(answer, add_special_tokens=False)["input_ids"]
        tokens = [*tokens, tokenizer.eos_token_id] if has_ended else tokens
        trajectory.act(answer, *wrote(tokens), ending=tokenizer.eos_token if has_ended else "")
        messages.append({"role": "assistant", "content": answer})
        if number < len(answers) - 1:
            messages.append({"role": "user", "content": "sure?"})
            assert trajectory.observe(render(messages, add_generation_prompt=True))
    (sequence,) = trajectory.sequences
    whole = tokenizer(render(messages).rstrip("\n"), add_special_tokens=False)["input_ids"]
    assert sequence.tokens == whole
    assert sum(sequence.values["action_mask"]) == sum(len(text) + ended for text, ended in answers)


MODULE, SCRIPT = "tests.support.user_environments", user_environments.__file__
WORDS = {
    "raise": "step raised RuntimeError: out of order",
    "none": "step returned None",
    "fallthrough": "step returned no 'next_state', and is not done",
    "nan": "step returned nan as 'reward'",
    "misspelt": "step returned an unknown field 'next_sate'",
    "huge": "next_state has 10000000 characters, 4000000 at most",
    "sleep": "step gave no answer within 1 s",
}


async def play(guard, actions, max_turns=4, **info):
    episode = await guard.reset("prompt ", info)
    try:
        for action in actions[:max_turns]:
            if episode.state is None:
                break
            await guard.step(episode, action)
    finally:
        await guard.close(episode)
    return episode


async def group(guard, plays):
    episodes = await asyncio.gather(*(play(guard, actions) for actions in plays))
    await guard.shutdown()
    return episodes


@pytest.fixture(params=["here", "isolated"])
def environment(request):
    user_environments.log.clear()
    return load_environment(MODULE) if request.param == "here" else IsolatedEnvironment(SCRIPT)


@pytest.mark.feature(91)
async def test_guard_fails_faulty_samples_and_finishes_the_group(environment):
    guard = Guard(environment, timeout_s=1.0)
    faults = dict(WORDS)
    if isinstance(environment, IsolatedEnvironment):  # it can end a call that ignores cancellation
        faults["deaf"] = "step gave no answer within 1 s"
    with within(20):
        episodes = await group(guard, [[fault] for fault in faults] + [["go ", "done"]] * 4)
    for episode, expected in zip(episodes, faults.values(), strict=False):
        assert expected in episode.failure
        assert (episode.done, episode.turns, episode.state) == (False, 0, None)
    for episode in episodes[len(faults) :]:
        assert (episode.failure, episode.done, episode.turns, episode.extra_info["turns"]) == (None, True, 2, 2)
        assert (episode.reward, episode.score) == (2.0, 1.0)
    assert sum(guard.failures.values()) == len(faults)
    assert guard.failures["step raised RuntimeError"] == 1


async def test_guard_logs_failures_of_a_kind_once(environment, caplog):
    await group(Guard(environment, timeout_s=5.0), [["raise"]] * 3)
    (text,) = [text for text in caplog.messages if "out of order" in text]
    assert "user_environments.py" in text and "in step" in text


@pytest.mark.feature(91)
async def test_guard_survives_failing_resets_and_closes(environment):
    guard = Guard(environment, timeout_s=1.5)
    habits = ({"reset": "raise"}, {"reset": "hang"}, {"close": "raise"}, {})
    raising, hanging, late, fine = [await play(guard, ["done"], **habit) for habit in habits]
    await guard.shutdown()
    assert "reset raised KeyError: 'no such game'" in raising.failure
    assert hanging.failure == "reset gave no answer within 1.5 s"
    assert (late.failure, late.done, fine.done) == (None, True, True)
    assert sum(guard.failures.values()) == 3


@pytest.mark.feature(90)
async def test_guard_closes_episodes_done_or_at_the_turn_limit():
    user_environments.log.clear()
    guard = Guard(load_environment(MODULE))
    done = await play(guard, ["go ", "done", "never"])
    cut = await play(guard, ["go "] * 9, max_turns=3)
    assert (done.turns, done.done) == (2, True)
    assert (cut.turns, cut.done, cut.failure, cut.state) == (3, False, None, None)
    assert [closed["turns"] for closed in user_environments.log] == [2, 3]
    with pytest.raises(ValueError, match="the episode is over"):
        await guard.step(cut, "go ")
    await guard.close(cut)
    assert len(user_environments.log) == 2


@pytest.mark.feature(86)
async def test_guard_passes_data_of_a_row_unchanged(environment):
    row = {"answer": "x", "nested": {"list": [1, (2, 3)], 5: None}, "first": "begin "}
    original = deepcopy(row)
    guard = Guard(environment)
    episode = await guard.reset("prompt", row)
    first = episode.state
    result = await guard.step(episode, "go ")
    await guard.close(episode)
    await guard.shutdown()
    assert (first, result.next_state) == ("begin ", "begin go seen ")
    assert row == original
    assert {key: result.extra_info[key] for key in original} == original
    assert result.extra_info["began"]


@pytest.mark.feature(93)
async def test_guard_runs_eight_samples_at_once(environment):
    guard = Guard(environment)
    took_s = []
    for _ in range(3):  # the machine may be busy in one of them
        began = time.monotonic()
        episodes = await asyncio.gather(*(play(guard, ["nap", "done"]) for _ in range(8)))
        took_s.append(time.monotonic() - began)
        assert all(episode.done for episode in episodes)
    await guard.shutdown()
    assert min(took_s) < 0.6  # 8 naps of 0.2 s


@pytest.mark.feature(92)
async def test_guard_opens_no_more_episodes_than_it_may():
    class Watched:
        episodes = 2

        def __init__(self):
            self.open = self.most = 0

        async def reset(self, extra_info):
            self.open += 1
            self.most = max(self.most, self.open)

        async def step(self, state, action, extra_info):
            await asyncio.sleep(0.01)
            return {"next_state": state + action, "reward": 0, "done": False}

        async def close(self, extra_info):
            self.open -= 1

        async def shutdown(self):
            """Nothing is held."""

    for limits in ({"timeout_s": 0}, {"episodes": 0}):
        with pytest.raises(ValueError, match="need a positive timeout_s and episodes"):
            Guard(Watched(), **limits)
    watched = Watched()
    episodes = await group(Guard(watched), [["a", "b"]] * 8)
    assert [episode.turns for episode in episodes] == [2] * 8
    assert (watched.open, watched.most) == (0, 2)


async def test_guard_closes_episodes_of_a_cancelled_rollout():
    user_environments.log.clear()
    guard = Guard(load_environment(MODULE))
    task = asyncio.create_task(play(guard, ["sleep"]))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert len(user_environments.log) == 1


@pytest.mark.parametrize(
    ("step", "rules", "reward"),
    [
        ("{'reward': 0.0, 'done': False}", {"missing_state": "done"}, 0.0),
        ("{'reward': 0.0, 'done': False}", {"failure_reward": -1.0}, -1.0),
        ("{'next_state': None, 'reward': 0.0, 'done': False}", {}, 0.0),
    ],
)
@pytest.mark.parametrize("isolated", [False, True])
async def test_guard_step_without_a_next_state_follows_the_rules(tmp_path, step, rules, reward, isolated):
    path = tmp_path / "rl2.py"
    path.write_text(f"def step(state, action, extra_info):\n    return {step}\n")
    guard = Guard(IsolatedEnvironment(str(path)) if isolated else load_environment(str(path)), **rules)
    episode = await guard.reset("a ", {})
    await guard.step(episode, "b")
    await guard.close(episode)
    await guard.shutdown()
    assert (episode.failure, episode.reward, episode.done) == (None, reward, True)
