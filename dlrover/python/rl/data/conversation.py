"""Texts and conversations as tokens, with a mask over the tokens that are trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal, TypeAlias, get_args

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.data.messages import message_faults, plain_row

Tokenizer: TypeAlias = Any
"""A Hugging Face tokenizer. Conversations need a fast one with a chat template."""

Turns: TypeAlias = Literal["all", "last"]
"""Which assistant turns are trained."""

Span: TypeAlias = tuple[int, int]
"""First character and the one after the last."""


@dataclass(frozen=True)
class Encoded:
    """One sequence.

    Attributes:
        tokens: token ids, ``[seq]``.
        action_mask: True on the trained tokens, ``[seq]``; never on the first one, which nothing predicts.
    """

    tokens: list[int]
    action_mask: list[bool]

    @property
    def trained(self) -> int:
        """How many tokens are."""
        return sum(self.action_mask)

    def cut(self, max_length: int) -> "Encoded":
        """Without the tail."""
        return Encoded(self.tokens[:max_length], self.action_mask[:max_length])


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a prompt as inference sees it: raw text, or messages with the generation prompt appended."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return _tokenize(tokenizer, _render(tokenizer, prompt, generation=True))


def prompt_text(tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, str]]) -> str:
    """The text that :func:`encode_prompt` encodes."""
    return prompt if isinstance(prompt, str) else _render(tokenizer, prompt, generation=True)


def encode_example(
    tokenizer: Tokenizer,
    row: Mapping[str, Any],
    max_length: int | None = None,
    mode: Turns = "all",
    mask_prompt: bool = True,
) -> list[Encoded]:
    """Encode a supervised example, ``{"prompt": text, "response": text}`` or ``{"messages": [...]}``.

    Messages may stand under ``prompt`` too, and the last answer apart from them under ``response`` or ``answer``.

    Of raw text the response and the end-of-sequence token are trained; prompt and response are tokenised apart, so the
    prompt's tokens are those of inference. Of a conversation each assistant turn is trained from its first character
    after the header to its end marker. A template that rewrites history (one that hides old thoughts) shows an answer
    differently once the conversation goes on; then each trained turn becomes a sequence of its own, which ends with it.

    Args:
        tokenizer: a Hugging Face tokenizer.
        row: the example; other keys are not looked at.
        max_length: tokens at most; the tail is cut.
        mode: train every assistant turn or the last one only.
        mask_prompt: False trains every token but the first, prompts included.

    Returns:
        Usually one sequence, or one per trained turn; those without a trained token are left out.

    Raises:
        DataError: the row has neither form, or the tokenizer cannot encode it.
        ValueError: unknown ``mode``, or ``max_length`` below 1.
    """
    _check_arguments(mode, max_length)
    row = sft_row(row)
    faults = sft_faults(row)
    if faults:
        raise DataError("; ".join(faults))
    if "messages" not in row:
        encoded = [encode_raw(tokenizer, row["prompt"], row["response"])]
    elif mask_prompt:
        encoded = _encode_messages(tokenizer, row["messages"], mode)
    else:
        encoded = [_encode_spans(tokenizer, _render(tokenizer, row["messages"]), [])]
    finished = [_finish(item, mask_prompt) for item in encoded]
    if max_length is not None:
        finished = [item.cut(max_length) for item in finished]
    return [item for item in finished if item.trained]


def _check_arguments(mode: str, max_length: int | None) -> None:
    if mode not in get_args(Turns):
        raise ValueError(f"unknown mode '{mode}'{hint(mode, get_args(Turns))}")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, not {max_length}")


def sft_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A supervised example in one of its two forms; what is neither stays as it is, for :func:`sft_faults`."""
    row = plain_row(row)
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return row
    if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        return row
    answer = row.pop("response", row.get("answer"))
    if answer is not None:
        row["messages"] = [*messages, {"role": "assistant", "content": _text(answer)}]
    return row


def _text(answer: Any) -> Any:
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    return str(answer) if is_number else answer


def sft_faults(row: Mapping[str, Any]) -> list[str]:
    """Everything wrong with what :func:`sft_row` gave."""
    if "messages" in row:
        faults = message_faults(row["messages"])
        roles = [] if faults else [message["role"] for message in row["messages"]]
        if roles and "assistant" not in roles:
            faults = ["no assistant turn to train"]
        elif roles and roles[0] == "assistant":
            faults = ["begins with the assistant: there is no prompt for its turn"]
        return [*faults, *(["ends with an answer, and has a 'response' besides"] if "response" in row else [])]
    if "prompt" not in row or "response" not in row:
        return [f"needs 'prompt' and 'response', or 'messages'; it has {', '.join(row) or 'nothing'}"]
    return [f"'{key}' must be text" for key in ("prompt", "response") if not isinstance(row[key], str)]


def _finish(encoded: Encoded, mask_prompt: bool) -> Encoded:
    mask = encoded.action_mask if mask_prompt else [True] * len(encoded.tokens)
    return Encoded(encoded.tokens, [False, *mask[1:]])


def encode_raw(tokenizer: Tokenizer, prompt: str, response: str) -> Encoded:
    """A text and its continuation, which is closed by the end-of-sequence token.

    Raises:
        DataError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token to close a response with")
    asked = encode_prompt(tokenizer, prompt)
    answered = [*_tokenize(tokenizer, response), tokenizer.eos_token_id]
    return Encoded(asked + answered, [False] * len(asked) + [True] * len(answered))


def _encode_messages(tokenizer: Tokenizer, messages: list[dict[str, str]], mode: Turns) -> list[Encoded]:
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if mode == "last":
        turns = turns[-1:]
    answers = [answer_span(tokenizer, messages, turn) for turn in turns]
    whole = _render(tokenizer, messages)
    if all(whole.startswith(text) for text, _ in answers):
        return [_encode_spans(tokenizer, whole, [span for _, span in answers])]
    return [_encode_spans(tokenizer, text, [span]) for text, span in answers]


def answer_span(tokenizer: Tokenizer, messages: list[dict[str, str]], turn: int) -> tuple[str, Span]:
    """The conversation as rendered up to ``turn``, and the span in it that the assistant wrote there."""
    text = _render(tokenizer, messages[: turn + 1])
    opened = _render(tokenizer, messages[:turn], generation=True)
    content = messages[turn]["content"]
    start = len(commonprefix([opened, text]))
    if start < len(opened):
        # This template opens a turn otherwise when generating (with a "<think>", say). What the content shares with
        # that opening is the content's.
        found = text.rfind(content)
        start = min(start, found) if found >= 0 else start
    # White space after the end marker is the template's; at the end of the content it is the assistant's.
    found = text.find(content, start) if content else -1
    return text, (start, max(start, len(text.rstrip()), found + len(content) if found >= 0 else 0))


def _encode_spans(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Encoded:
    """Tokenise ``text``; the mask is True on the tokens of ``spans`` (rising, disjoint)."""
    if not tokenizer.is_fast:
        raise DataError("masking a conversation needs a fast tokenizer: a slow one has no character offsets")
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # Only the ends of offsets count: byte-level tokenizers may trim leading spaces off their starts.
    ends = [end for _, end in coded["offset_mapping"]]
    borders = [border for span in spans for border in span]
    if any(last < border < end for last, end in zip([0, *ends], ends, strict=False) for border in borders):
        return encode_pieces(tokenizer, text, spans)
    mask = [any(start < end <= stop for start, stop in spans) for end in ends]
    return Encoded(list(coded["input_ids"]), mask)


def encode_pieces(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Encoded:
    """Tokenise what lies in spans and between them apart, so that no token reaches over a border, as in inference."""
    tokens: list[int] = []
    mask: list[bool] = []
    borders = [0, *(border for span in spans for border in span), len(text)]
    for index, (start, stop) in enumerate(zip(borders, borders[1:], strict=False)):
        piece = _tokenize(tokenizer, text[start:stop])
        tokens += piece
        mask += [index % 2 == 1] * len(piece)
    return Encoded(tokens, mask)


def _tokenize(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], generation: bool = False) -> str:
    """The conversation as the chat template writes it: text, for what it tokenises to differs by library version."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation))
    except Exception as error:  # Templates raise what they like; the row has to be named whatever it is.
        raise DataError(f"the chat template refused the conversation: {error}") from error
