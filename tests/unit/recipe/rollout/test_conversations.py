# SPDX-License-Identifier: Apache-2.0
"""Episodes of messages: their tokens are those that the model's chat template has for the whole conversation."""

import pytest

from dlrover.python.rl.environment.core.messages import make_assistant_message
from dlrover.python.rl.recipe.base.config import RewardConfig
from dlrover.python.rl.recipe.roles.reward import RewardWorkload
from tests.support import chat_environments
from tests.support.scripted import groups, rolling, texts

TOOLS = "dlrover.python.rl.environment.core.tools:ToolEnvironment"
OPTIONS = {"tools": {"add": "tests.support.chat_environments:add"}, "judge": "tests.support.chat_environments:judge"}
ASKING = "tests.support.chat_environments:Asking"
CALL = '<tool_call>\n{"name": "add", "arguments": {"first": 2}}\n</tool_call>'
NUMBERS = {name: {"type": "integer"} for name in ("first", "second")}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["first"]}
ADD = {"type": "function", "function": {"name": "add", "description": "The sum.", "parameters": PARAMETERS}}


def played(say, infos, where=ASKING, *, prompt="ask", template=chat_environments.TEMPLATE, **options):
    chat_environments.seen.clear()
    with rolling(say, where, **options) as rolled:
        rolled.engine.tokenizer.chat_template, rolled.max_new_tokens = template, 100
        taken = rolled.fetch(groups(*infos, prompt=prompt))
        return taken, rolled.engine.tokenizer


def rendered(tokenizer, messages, **template_kwargs):
    """The tokens up to the last end marker, which the policy ends with: no line break behind it."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)
    return tokenizer(text.removesuffix("\n"), add_special_tokens=False)["input_ids"]


def calling(context, index):
    return "7" if "tool_response" in context else f"I add.\n{CALL}"


@pytest.mark.parametrize("isolated", [False, True])
def test_chat_with_tool_calls_has_the_tokens_of_its_template(isolated):
    prompt = [{"role": "user", "content": "2+1, then 7?"}]
    taken, tokenizer = played(calling, [{}], TOOLS, prompt=prompt, options=OPTIONS, isolated=isolated)
    call = {"type": "function", "function": {"name": "add", "arguments": {"first": 2}}}
    messages = [
        *prompt,
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "7"},
    ]
    assert [row.tolist() for row in taken.ragged("tokens")] == [rendered(tokenizer, messages, tools=[ADD])]
    assert texts(taken, "action_mask") == [f"I add.\n{CALL}<|im_end|>7<|im_end|>"]
    assert (taken.dense("reward").tolist(), taken.objects("error")) == ([1.0], [None])


def test_environment_of_messages_gets_messages_and_cut_turns():
    long = "x" * 120  # of which 100 tokens are generated
    answers = iter(["ask what?", long, CALL])
    taken, tokenizer = played(lambda *_: next(answers), [{"questions": ["one", "two", "three"]}])
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    contents = ("be brief", "one", "ask what?", "two", long[:100], "three")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    messages.append(make_assistant_message(CALL, turn=2))
    assert [(len(state), action) for state, action in chat_environments.seen] == [(n, messages[n]) for n in (2, 4, 6)]
    assert chat_environments.seen[-1][0] == messages[:-1]
    messages[-1] = {"role": "assistant", "content": CALL}
    options = chat_environments.Asking.chat_template_kwargs
    assert [row.tolist() for row in taken.ragged("tokens")] == [rendered(tokenizer, messages, **options)]
    assert taken.dense("reward").tolist() == [2.0]


def test_stripping_template_keeps_answers_as_generated():
    content = "{{ message.content }}\n{%- for"
    template = chat_environments.TEMPLATE.replace(content, content.replace(" }}", " | trim }}"))
    assert template != chat_environments.TEMPLATE
    taken, _ = played(lambda *_: " a \n", [{"questions": ["one", "two"]}], template=template)
    assert texts(taken, "action_mask") == [" a \n<|im_end|> a \n<|im_end|>"]


def test_template_without_old_thoughts_begins_another_sequence():
    content = "{{ message.content.split('</think>')[-1] }}\n{%- for"
    template = chat_environments.TEMPLATE.replace("{{ message.content }}\n{%- for", content)
    taken, tokenizer = played(lambda *_: "<think>hm</think>a", [{"questions": ["one", "two"]}], template=template)
    assert texts(taken, "action_mask") == ["<think>hm</think>a<|im_end|>"] * 2
    second = tokenizer.decode(taken.ragged("tokens")[1])
    assert "assistant\na<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in second
    assert len(set(taken.dense("trajectory").tolist())) == 1


def test_prompts_of_text_stay_text_for_tools():
    taken, _ = played(calling, [{}], TOOLS, prompt="2+1? ", options=OPTIONS)
    response = "\n<tool_response>\n3\n</tool_response>\n"
    assert taken.objects("completion") == [f"I add.\n{CALL}{response}7"]


@pytest.mark.parametrize(
    ("questions", "error"),
    [
        ([7], "the state that reset returned[1]: 'content' must be text"),
        (["one", {}], "the episode's state is messages, but next_state is text"),
        (["one", ["two"]], "next_state[0]: 'content' must be text"),
        (["refuse"], "data: the chat template refused the conversation: no"),
        (["one", "refuse"], "data: the chat template refused the conversation: no"),
    ],
)
def test_wrong_messages_fail_their_sample(questions, error):
    refusing = "{% if messages[-1].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    taken, _ = played(lambda *_: "yes", [{"questions": questions}], template=refusing + chat_environments.TEMPLATE)
    assert taken.objects("error") == [error]


@pytest.mark.parametrize("where", [None, ASKING])
@pytest.mark.parametrize(
    ("of_job", "of_row", "tools", "ending"),
    [
        ({}, {}, "look", "assistant\n"),
        ({"enable_thinking": False}, {}, "look", "<think></think>"),
        ({}, {"enable_thinking": False, "tools": [ADD]}, "add", "<think></think>"),
        ({"tools": None, "enable_thinking": True}, {"enable_thinking": False}, "", "<think></think>"),
    ],
)
def test_template_arguments_of_a_row_come_first(where, of_job, of_row, tools, ending):
    prompt, info = [{"role": "user", "content": "one"}], {"questions": ["one"], "chat_template_kwargs": of_row}
    with rolling(lambda *_: "yes", where, template_kwargs=of_job) as rolled:
        rolled.engine.tokenizer.chat_template = chat_environments.TEMPLATE
        taken = rolled.fetch(groups(info, prompt=prompt))
        (mask,), (tokens,) = taken.ragged("action_mask"), taken.ragged("tokens")
        text = rolled.engine.tokenizer.decode(tokens[~mask])
    assert text.endswith(ending)
    tools = tools if where or tools != "look" else ""  # which the environment declares
    assert [name for name in ("look", "add") if f'"name": "{name}"' in text] == ([tools] if tools else [])


OPENING = chat_environments.TEMPLATE.replace("assistant\n{% if", "assistant\n<think>\n{% if")
PROMPT = [{"role": "user", "content": "2+5?"}]
INLINE_CALL = '<tool_call>{"name": "add", "arguments": {"first": 2}}</tool_call>'

COMPLETIONS = [  # completion, and its rewards with reward.thoughts: ignored and scored
    (r"Is it \boxed{7}? I check", 0.0, 1.0),
    (r"Is it \boxed{7}?</think>It is 6.", 0.0, 1.0),
    (r"Is it \boxed{6}?</think>It is 7.", 1.0, 0.0),
]


def score(rollouts, **settings):
    workload = RewardWorkload(None, {})
    workload.init_verifier(RewardConfig(function="exact", timeout_s=20.0, workers=1, **settings))
    try:
        return workload.score(rollouts).dense("reward").tolist()
    finally:
        workload.close()


def test_reward_thoughts_decides_whether_thoughts_are_scored():
    with rolling(lambda _, index: COMPLETIONS[index][0]) as rolled:
        rolled.engine.tokenizer.chat_template = OPENING
        rollouts = rolled.fetch(groups({}, prompt=PROMPT), samples=len(COMPLETIONS))
    assert rollouts.objects("think_prefix") == ["<think>\n"] * 3
    assert rollouts.objects("completion") == [text for text, _, _ in COMPLETIONS]
    assert score(rollouts) == [reward for _, reward, _ in COMPLETIONS]
    assert score(rollouts, thoughts="scored") == [reward for _, _, reward in COMPLETIONS]


@pytest.mark.parametrize(
    ("actions", "reward", "turns"),
    [
        ((f"Perhaps {INLINE_CALL}, so 7",), 0.0, 1),
        ((f"Perhaps {INLINE_CALL}.</think>{INLINE_CALL}", "So?</think>7"), 1.0, 2),
    ],
)
def test_tools_of_an_opened_thought_makes_no_draft(actions, reward, turns):
    options, remaining = {"tools": {"add": "tests.support.chat_environments:add"}, "judge": "exact"}, iter(actions)
    with rolling(lambda *_: next(remaining), "tools", options=options) as rolled:
        rolled.engine.tokenizer.chat_template, rolled.max_new_tokens = OPENING, 200
        rollouts = rolled.fetch(groups({}, prompt=PROMPT))
    assert (rollouts.dense("reward").sum(), rollouts.dense("turns")[0]) == (reward, turns)
    assert "".join(texts(rollouts, "action_mask")) == "".join(f"{action}<|im_end|>" for action in actions)
