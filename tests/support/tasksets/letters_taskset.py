# SPDX-License-Identifier: Apache-2.0
"""A taskset of ``verifiers`` with its own harness: a chat of two turns, scored by the letters of each answer."""

import openai
import verifiers.v1 as vf

__all__ = ["LetterTasks", "TwoTurns"]


def letters(text):
    return sum(letter.isascii() and letter.isalpha() for letter in text)


class Letters(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def letters(self, trace):
        return sum(letters(message.content or "") for message in trace.assistant_messages) / 32

    @vf.reward
    async def refuses(self, trace):
        if "fail" in self.data.prompt:
            raise ZeroDivisionError("of a reward")
        return 0.0


class LettersConfig(vf.TasksetConfig):
    words: list[str] = ["one", "two"]


class LetterTasks(vf.Taskset[Letters, LettersConfig]):
    def load(self):
        for word in self.config.words:
            yield Letters(vf.TaskData(prompt=f"{word}:"), self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            for _turn in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [
                    answer.choices[0].message.model_dump(exclude_none=True),
                    {"role": "user", "content": "Again"},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
