# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a trajectory stand in which sequence, and who wrote them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import GENERATED, ColumnSpec, SequenceColumns
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer
from dlrover.python.rl.environment.core.turns import Trajectory


def encode(text):
    return [ord(character) for character in text]


def wrote(tokens, version=1):
    return tokens, {"logprobs": [-0.5] * len(tokens), "versions": [version] * len(tokens)}


@pytest.mark.feature(87)
def test_a_state_that_goes_on_stays_in_one_sequence_and_the_engines_ids_are_untouched():
    trajectory = Trajectory(encode, "ask ")
    assert trajectory.context == encode("ask ")
    trajectory.act("word", *wrote([900, 901]))  # Not what the text would be encoded to.
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
def test_another_state_begins_another_sequence_of_the_same_trajectory():
    trajectory = Trajectory(encode, "ask ")
    trajectory.act("word", *wrote([900]))
    trajectory.observe("summary")
    trajectory.act("end", *wrote([901]))
    first, second = trajectory.sequences
    assert first.tokens == [*encode("ask "), 900]
    assert second.tokens == [*encode("summary"), 901]
    assert trajectory.context == second.tokens


def test_a_state_without_the_whole_action_is_another_one():
    trajectory = Trajectory(encode, "ask ")
    trajectory.act("word<end>", *wrote([900]))
    trajectory.observe("ask word more")
    assert len(trajectory.sequences) == 2


def test_the_first_states_tokens_may_be_known():
    trajectory = Trajectory(encode, "ask", tokens=[7, 8])
    trajectory.act("a", *wrote([9]))
    trajectory.observe("askab")
    assert trajectory.context == [7, 8, 9, ord("b")]


def test_what_cannot_be():
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


def test_engine_columns_over_turns_are_filled_as_declared():
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
def test_every_column_is_as_long_as_the_tokens_and_actions_are_whole(turns):
    trajectory, state = Trajectory(encode, "s"), "s"
    for action, seen, goes_on in turns:
        trajectory.act(action, *wrote([1000 + at for at in range(len(action))]))
        state = state + action + seen if goes_on else f"new {seen}"
        trajectory.observe(state)
    for sequence in trajectory.sequences:
        columns = [values for values in sequence.values.values() if isinstance(values, list)]
        assert {len(column) for column in columns} == {len(sequence.tokens)}
        assert len(columns) == 5
        assert [token >= 1000 for token in sequence.tokens] == sequence.values["action_mask"]
    assert sum(map(sum, (sequence.values["action_mask"] for sequence in trajectory.sequences))) == sum(
        len(a) for a, _, _ in turns
    )
    assert len(trajectory.sequences) == 1 + sum(not goes_on for _, _, goes_on in turns)


def test_a_chat_of_several_turns_has_the_tokens_of_its_template():
    """The sampled end marker is a token of each answer, and the template's own is not encoded beside it; an answer that
    was cut off gets the template's."""
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
