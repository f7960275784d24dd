# SPDX-License-Identifier: Apache-2.0
"""Tasks of the package ``reasoning-gym``: one question, one answer, scored by the task's own rule."""

from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

_INSTRUCTION = "{question}\n\nGive the final answer between <answer> and </answer>."


class ReasoningGym:
    """An agent that asks the question number ``row["seed"]`` of a task.

    Args:
        task: its name, such as ``leg_counting``.
        instruction: the message, with ``{question}``.
        tag: the tag around the answer; empty: the whole text is the answer.
        options: of the task, such as ``max_animals``, with ``seed`` and ``size``, after which the questions repeat."""

    def __init__(self, task: str, instruction: str = _INSTRUCTION, tag: str = "answer", **options: Any) -> None:
        if "{question}" not in instruction:
            raise ValueError(f"instruction needs a place for {{question}}: {instruction!r}")
        self._questions = reasoning_gym.create_dataset(task, **{"size": 10_000, "seed": 0, **options})
        self._instruction, self._tag = instruction, tag

    async def run(self, client: Any, row: dict[str, Any]) -> float:
        entry = self._questions[int(row.get("seed", 0)) % len(self._questions)]
        content = self._instruction.replace("{question}", entry["question"])
        messages = [{"role": "user", "content": content}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        text = extract_answer(text, self._tag) if self._tag else text.strip()
        return float(self._questions.score_answer(text, entry))
