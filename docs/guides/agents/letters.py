# SPDX-License-Identifier: Apache-2.0
"""An agent of two turns: the policy writes, a tool counts its letters, and the policy writes again."""


def count_letters(text: str) -> int:
    return sum(letter.isascii() and letter.isalpha() for letter in text)


async def run(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = await client.chat.completions.create(model="policy", messages=messages)
    first = answer.choices[0].message
    count = count_letters(first.content)
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": "count", "content": f"{count} letters. Again:"}]
    second = ""
    async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
        second += chunk.choices[0].delta.content or ""
    return (count + count_letters(second)) / 16
