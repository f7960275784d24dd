# SPDX-License-Identifier: Apache-2.0
"""Guess a digit: too high, too low, right. The hidden digit is in the row's data."""


async def step(state: str, action: str, extra_info: dict) -> dict:
    guessed = next((int(letter) for letter in action if letter.isdigit()), None)
    hidden = extra_info["hidden"]
    if guessed == hidden:
        return {"next_state": None, "reward": 1.0, "done": True, "extra_info": extra_info}
    hint = "a digit, please" if guessed is None else "too high" if guessed > hidden else "too low"
    return {"next_state": f"{state}{action}\n{hint}: ", "reward": 0.0, "done": False, "extra_info": extra_info}
