# SPDX-License-Identifier: Apache-2.0
"""When a request ends, and its text: over the byte tokenizer, where a character can be several tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import Request, SamplingParams
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer
from dlrover.python.rl.engine.rollout.requests import FinishRules, RunningRequest

EOS = 258
RULES = FinishRules(make_byte_tokenizer(), (EOS,))


def run(tokens, **changes):
    """Record tokens until the request ends; how many were taken, why it ended, and its completion."""
    running = RunningRequest(Request.fresh(0, 0, [1]), SamplingParams(**{"max_new_tokens": 50, **changes}), (0,))
    for count, token in enumerate(tokens, 1):
        running.tokens.append(token)
        running.columns.append({"logprobs": -1.0, "versions": 0})
        if (finish := RULES.finish_reason(running)) is not None:
            return count, finish, RULES.completion(running, finish)
    return len(tokens), None, RULES.completion(running, "aborted")


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("one STOP two", {"stop": ("STOP",)}, (8, "stop", "one ")),
        ("one STOP two", {"stop": ("STOP",), "keep_stop": True}, (8, "stop", "one STOP")),
        ("one STOP two", {"stop": ("two", "OP", "STOP")}, (8, "stop", "one ")),
        ("a\n\nb", {"stop": ("\n\n",)}, (3, "stop", "a")),
        ("grün ist grün", {"stop": ("ün",)}, (5, "stop", "gr")),
        ("one two", {"stop": ("three",), "max_new_tokens": 5}, (5, "length", "one t")),
        ("aaab", {"stop": ("aab",), "max_new_tokens": 4}, (4, "stop", "a")),
    ],
)
def test_a_stop_string_ends_where_it_is_complete(text, changes, expected):
    count, finish, completion = run(text.encode(), **changes)
    assert (count, finish, completion.text) == expected
    assert completion.request.done.tolist() == list(text.encode()[:count])


def test_of_two_that_end_together_the_longer_is_cut_off():
    assert run(b"one STOP", stop=("OP", "STOP"))[2].text == "one "


def test_end_of_sequence_comes_before_all_other_reasons():
    assert run([65, EOS, 66], max_new_tokens=2, stop=("A",))[:2] == (1, "stop")
    count, finish, completion = run([65, EOS], max_new_tokens=2)
    assert (count, finish, completion.text) == (2, "eos", "A")
    assert completion.request.done.tolist() == [65, EOS]
    assert run([65, EOS, 66], ignore_eos=True)[1] is None


def test_special_tokens_inside_a_stop_string_have_no_text():
    assert run([*b"ST", 256, 257, 256, 257, 256, 257, *b"OP", 67], stop=("STOP",))[0] == 10


TURN = RULES.tokenizer.convert_ids_to_tokens(256)


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, f"ab{TURN}")])
def test_a_special_token_is_a_stop_string(keep, text):
    count, finish, completion = run([*b"ab", 256, *b"cd"], stop=("X", TURN), keep_stop=keep)
    assert (count, finish, completion.text) == (3, "stop", text)
    assert completion.request.done.tolist() == [*b"ab", 256]
    assert run([*b"aX", 256], stop=("X", TURN))[2].text == "a"
    assert run([*b"ab", 257], stop=(TURN,))[1] is None


def test_thought_tags_that_are_special_tokens_stay_in_the_text():
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ("[THINK]", "[/THINK]", "[X]")])
    tokens = tokenizer("[THINK]a[X] \u00e4[/THINK] b")["input_ids"]
    request = Request(0, 0, np.array([1]), np.array([*tokens, 256, EOS]), *np.zeros((2, len(tokens) + 2)))
    running = RunningRequest(request, SamplingParams(), (0,))
    assert FinishRules(tokenizer, (EOS,)).completion(running, "eos").text == "[THINK]a \u00e4[/THINK] b"


def test_a_stop_string_that_no_text_contains_is_refused():
    RULES.check(SamplingParams(stop=("X", TURN)))
    with pytest.raises(EngineError, match="stop string .* has the special token"):
        RULES.check(SamplingParams(stop=(f"{TURN}\n",)))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([*"abä€", "\U0001f600", 256, 257]), max_size=25),
       st.lists(st.text("abä€\U0001f600", min_size=1, max_size=4), min_size=1, max_size=3))  # fmt: skip
def test_the_window_finds_what_decoding_everything_finds(parts, stops):
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    decode = RULES.tokenizer.decode
    expected = next(
        (count for count in range(1, len(tokens) + 1)
         if any(stop in decode(tokens[:count], skip_special_tokens=True) for stop in stops)), None
    )  # fmt: skip
    count, finish, completion = run(tokens, stop=tuple(stops), max_new_tokens=200)
    assert (count if finish == "stop" else None) == expected
    if finish == "stop":
        assert not any(stop in completion.text for stop in stops)
