# SPDX-License-Identifier: Apache-2.0
"""Environments of messages, and a chat template with tools."""

seen = []
"""States and actions, as they came."""

TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>
{%- if message.role == 'tool' %}user{{ "\\n" }}<tool_response>
{{ message.content }}
</tool_response>
{%- else %}{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{ "\\n" }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
"""ChatML, as Qwen's is."""


def add(first: int, second: int = 1) -> int:
    """The sum."""
    return first + second


def judge(completion, answer, extra_info):
    return float(completion.endswith(answer))


class Asking:
    """A user who asks ``extra_info["questions"]``; the first ones begin the conversation."""

    chat_template_kwargs = {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]}

    def reset(self, extra_info):
        return [{"role": "system", "content": "be brief"}, {"role": "user", "content": extra_info["questions"].pop(0)}]

    def step(self, state, action, extra_info):
        seen.append((list(state), action))
        state.clear()  # it is a copy
        questions = extra_info["questions"]
        if not questions:
            return {"reward": 1.0, "done": True}
        question = questions.pop(0)
        return {"next_state": [{"role": "user", "content": question}] if question else "text", "reward": 0.5}
