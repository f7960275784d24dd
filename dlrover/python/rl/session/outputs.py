"""What ``generate`` gives, in the shape that users of vLLM know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class Logprob:
    """The log-prob of a token that was drawn."""

    logprob: float


@dataclass(frozen=True, eq=False)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: its number among those of the prompt.
        text: without special tokens.
        token_ids: all tokens, the end-of-sequence token included.
        token_logprobs: float32 ``[tokens]``.
        finish_reason: ``"stop"`` for an end-of-sequence token or stop string, ``"length"`` for ``max_new_tokens``.
        version: of the weights that drew the last token; -1 for those that the engine was made with.
    """

    index: int
    text: str
    token_ids: list[int]
    token_logprobs: npt.NDArray[np.float32]
    finish_reason: str
    version: int

    @property
    def logprobs(self) -> list[dict[int, Logprob]]:
        """For each token the log-prob it was drawn with, by its id."""
        pairs = zip(self.token_ids, self.token_logprobs.tolist(), strict=True)
        return [{token: Logprob(value)} for token, value in pairs]

    @property
    def cumulative_logprob(self) -> float:
        """Of the whole completion."""
        return float(self.token_logprobs.sum(dtype=np.float64))


@dataclass(frozen=True, eq=False)
class RequestOutput:
    """What came of one prompt.

    Attributes:
        request_id: the prompt's number in the call, as text.
        prompt: as it was given: a text, tokens, or a dict.
        prompt_token_ids: its tokens.
        outputs: its completions.
        finished: always True: ``generate`` returns when all are done.
    """

    request_id: str
    prompt: Any
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


def outputs_of(prompts: Sequence[Any], first: int, drawn: Batch) -> list[RequestOutput]:
    """The outputs of some prompts.

    Args:
        prompts: as they were given.
        first: number of the first of them in the call.
        drawn: a row for each completion, in the columns of
            :meth:`~dlrover.python.rl.engine.base.RolloutEngine.generate`, ``prompt_id`` counting from ``first``.
    """
    tokens, masks, logprobs = drawn.ragged("tokens"), drawn.ragged("action_mask"), drawn.ragged("logprobs")
    texts, finished, versions = drawn.objects("completion"), drawn.dense("finished"), drawn.dense("version")
    heads: list[list[int]] = [[] for _ in prompts]
    drawn_for: list[list[CompletionOutput]] = [[] for _ in prompts]
    for row, number in enumerate(drawn.dense("prompt_id").tolist()):
        mask, at = masks[row], number - first
        heads[at] = tokens[row][: int(mask.argmax()) if mask.any() else len(mask)].tolist()
        drawn_for[at].append(
            CompletionOutput(
                index=int(drawn.dense("sample_index")[row]),
                text=texts[row],
                token_ids=tokens[row][mask].tolist(),
                token_logprobs=logprobs[row][mask],
                finish_reason="stop" if finished[row] else "length",
                version=int(versions[row]),
            )
        )
    return [RequestOutput(str(first + at), prompt, heads[at], drawn_for[at]) for at, prompt in enumerate(prompts)]
