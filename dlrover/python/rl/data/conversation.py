# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: prompts, conversations and examples are encoded by the same functions.
"""Texts and conversations as tokens, with a mask of the trained ones; supervised examples from source to batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from os.path import commonprefix
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.common.names import hint, nearest
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.jsonl import (
    TEMPLATE_KEYS,
    describe_columns,
    find_message_faults,
    find_template_faults,
    normalize_row,
    raise_errors,
    sort_by_line,
    surrogate_faults,
    template_kwargs_of,
)
from dlrover.python.rl.data.model_text import THOUGHT_TAGS
from dlrover.python.rl.data.source import RowReader, SourceRows, normalize_rows

Tokenizer: TypeAlias = Any  # a Hugging Face tokenizer. Conversations need a fast one with a chat template.
Turns: TypeAlias = Literal["all", "last"]  # which assistant turns are trained
Messages: TypeAlias = Sequence[Mapping[str, Any]]

Render: TypeAlias = Callable[..., str]
"""``render(messages, generation=False)`` by a chat template; ``generation`` adds the generation prompt."""

NO_KWARGS: Mapping[str, Any] = MappingProxyType({})

_MARK = "0f6e9a3c"  # replaces a text to find what a template puts around it
Span: TypeAlias = tuple[int, int]  # first character, and the one after the last


@dataclass(frozen=True)
class Encoded:
    """One sequence: token ids and a mask, both ``[seq]``; the first token is never trained."""

    tokens: list[int]
    action_mask: list[bool]

    @property
    def trained(self) -> int:
        return sum(self.action_mask)

    def with_mask(self, mask: Sequence[bool]) -> "Encoded":
        return Encoded(self.tokens, [False, *mask[1:]])


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Messages, template_kwargs: Mapping[str, Any] = NO_KWARGS
) -> list[int]:
    """Encode a prompt as in inference: raw text, or messages with the generation prompt.

    Tokens that the tokenizer adds before a text (beginning of sequence) come first, unless the text begins with them;
    tokens that it adds after a text (end of sequence) are left out."""
    tokens = _tokenize(tokenizer, prompt_text(tokenizer, prompt, template_kwargs))
    opening = _find_opening(tokenizer, prompt, tokens) if isinstance(prompt, str) else []
    return tokens if tokens[: len(opening)] == opening else [*opening, *tokens]


def prompt_text(tokenizer: Tokenizer, prompt: str | Messages, template_kwargs: Mapping[str, Any] = NO_KWARGS) -> str:
    if isinstance(prompt, str):
        return prompt
    return _render(tokenizer, prompt, generation=True, template_kwargs=template_kwargs)


def find_think_prefix(prompt: str) -> str:
    r"""Return the end of a rendered prompt that opens thoughts (``<think>\n``), or ""."""
    end = len(prompt.rstrip())
    return next((prompt[end - len(tag) :] for tag in THOUGHT_TAGS if prompt.endswith(tag, 0, end)), "")


def continue_chat(
    tokenizer: Tokenizer,
    text: str,
    messages: Messages,
    action: str,
    answers: Messages,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> str:
    """Render a conversation: the prompt ``text``, the policy's ``action``, the ``answers`` and the generation prompt.

    The result begins with ``text + action`` unless the template rewrites history, for example drops old thoughts. White
    space that the template removes from the action remains."""

    def render(content: str) -> str:
        chat = [*messages, {"role": "assistant", "content": content}, *answers]
        return _render(tokenizer, chat, generation=True, template_kwargs=template_kwargs)

    whole, marked = render(action), render(_MARK)
    if whole.startswith(text + action) or not marked.startswith(text + _MARK):
        return whole
    joined = text + action + marked.removeprefix(text + _MARK)
    return joined if "".join(joined.split()) == "".join(whole.split()) else whole


def encode_example(
    tokenizer: Tokenizer,
    row: Mapping[str, Any],
    mode: Turns = "all",
    mask_prompt: bool = True,
    eos_ids: Sequence[int] = (),
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> list[Encoded]:
    """Encode a supervised example, ``{"prompt": text, "response": text}`` or ``{"messages": [...]}``; raises DataError.

    ``prompt`` may hold messages, and ``response`` or ``answer`` the last answer. ``tools`` and ``chat_template_kwargs``
    are arguments of the chat template, which override ``template_kwargs``. Other keys are ignored. Raw text trains the
    response and the end-of-sequence token; prompt and response are tokenised separately, as in inference. A
    conversation trains each assistant turn from the end of its header to its end marker. If the template rewrites
    history (hides old thoughts), each trained turn becomes a separate sequence, which ends with it.

    If the last trained turn of a sequence ends neither with the tokenizer's end-of-sequence token nor with one of the
    generation config's ``eos_ids``, the former is appended and trained, and the following text is cut (as in TRL since
    pull request 3091): otherwise the model would never learn to end an answer."""
    row = normalize_sft(row)
    render = make_renderer(tokenizer, row, template_kwargs)
    if "messages" not in row:
        encoded = [encode_raw(tokenizer, row["prompt"], row["response"])]
    elif mask_prompt or _is_answer(row["messages"][-1]):
        encoded = _encode_messages(tokenizer, render, row["messages"], mode if mask_prompt else "last", eos_ids)
    else:
        encoded = [_encode_spans(tokenizer, render(row["messages"]), [])]
    masked = [item.with_mask(item.action_mask if mask_prompt else [True] * len(item.tokens)) for item in encoded]
    return [item for item in masked if item.trained]


def normalize_sft(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a supervised example as ``prompt`` and ``response``, or as ``messages``; raises DataError.

    TRL's other forms are accepted: ``text``, which is trained whole, and ``completion``, text or messages."""
    row = normalize_row(row)
    if "text" in row and not {"prompt", "messages"} & row.keys():
        row |= {"prompt": "", "response": row.pop("text")}
    if "completion" in row and "response" not in row:
        completion = row.pop("completion")
        if isinstance(completion, list) and "messages" in row:
            row["messages"] = [*row["messages"], *completion]
        else:
            row["response"] = completion
    messages = row.get("messages")
    if isinstance(messages, list) and messages and not _is_answer(messages[-1]):
        answer = row.pop("response", row.get("answer"))
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
        if answer is not None:
            row["messages"] = [*messages, {"role": "assistant", "content": answer}]
    if faults := [*_sft_faults(row), *find_template_faults(row)]:
        raise DataError([ConfigError("data", fault) for fault in faults])
    return row


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _sft_faults(row: Mapping[str, Any]) -> list[str]:
    if "messages" in row:
        faults = find_message_faults(row["messages"])
        roles = [] if faults else [message["role"] for message in row["messages"]]
        if roles and "assistant" not in roles:
            faults = ["no assistant turn to train"]
        elif roles and roles[0] == "assistant":
            faults = ["begins with the assistant: there is no prompt for its turn"]
        return [*faults, *(["ends with an answer, and also has a 'response'"] if "response" in row else [])]
    if "prompt" not in row or "response" not in row:
        absent = [key for key in ("prompt", "response") if key not in row]
        columns = describe_columns(row, *absent)
        close = next((key for key in row if "data.keys" not in columns and nearest(key, absent)), "")
        advice = hint(close, absent) if close else columns
        return [f"needs 'prompt' and 'response', or 'messages'{f': unknown key {close!r}' if close else ''}{advice}"]
    texts = ("prompt", "response")
    faults = [f"'{key}' must be text" for key in texts if not isinstance(row[key], str)]
    return faults or [fault for key in texts for fault in surrogate_faults(key, row[key])]


def encode_raw(tokenizer: Tokenizer, prompt: str, response: str) -> Encoded:
    """Encode a text and its continuation, which ends with the end-of-sequence token, added if absent."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token to close a response with")
    context, answer = encode_prompt(tokenizer, prompt), _tokenize(tokenizer, response)
    if not prompt and answer[: len(context)] == context:
        context = []  # a whole text, which already begins with the tokenizer's first tokens
    if answer[-1:] != [tokenizer.eos_token_id]:
        answer.append(tokenizer.eos_token_id)
    return Encoded(context + answer, [False] * len(context) + [True] * len(answer))


def _encode_messages(
    tokenizer: Tokenizer, render: Render, messages: list[dict[str, str]], mode: Turns, eos_ids: Sequence[int]
) -> list[Encoded]:
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if mode == "last":
        turns = turns[-1:]
    answers = [answer_span(render, messages, turn) for turn in turns]
    whole = render(messages)
    if all(whole.startswith(text) for text, _ in answers):
        return [_encode_closed(tokenizer, whole, [span for _, span in answers], eos_ids)]
    return [_encode_closed(tokenizer, text, [span], eos_ids) for text, span in answers]


def _encode_closed(tokenizer: Tokenizer, text: str, spans: Sequence[Span], eos_ids: Sequence[int]) -> Encoded:
    """Mask ``spans``; if the last one does not end a sequence, the end-of-sequence token replaces the text after it."""
    start, stop = spans[-1]
    own = tokenizer.eos_token_id
    if own is None or text[start:stop].endswith(tuple(tokenizer.decode([token]) for token in (own, *eos_ids))):
        return _encode_spans(tokenizer, text, spans)
    encoded = _encode_spans(tokenizer, text[:stop], spans)
    return Encoded([*encoded.tokens, own], [*encoded.action_mask, True])


def answer_span(render: Render, messages: list[dict[str, str]], turn: int) -> tuple[str, Span]:
    """Render the conversation up to ``turn``; return the text and the span of the assistant's answer in it."""
    text = render(messages[: turn + 1])
    opened = render(messages[:turn], generation=True)
    content = messages[turn]["content"]
    start = len(commonprefix([opened, text]))
    if start < len(opened):
        # The template opens a turn differently when generating (with "<think>"): the shared part is the content's.
        position = text.rfind(content)
        start = min(start, position) if position >= 0 else start
    # White space after the end marker is the template's; at the end of the content it is the assistant's.
    position = text.find(content, start) if content else -1
    return text, (start, max(start, len(text.rstrip()), position + len(content) if position >= 0 else 0))


def _encode_spans(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Encoded:
    """Encode ``text``, masked on the tokens of ``spans`` (rising, disjoint)."""
    if not tokenizer.is_fast:
        raise DataError("masking a conversation needs a fast tokenizer: a slow one has no character offsets")
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # Only the ends of offsets count: byte-level tokenizers may exclude leading spaces from the starts.
    ends = [end for _, end in coded["offset_mapping"]]
    borders = [border for span in spans for border in span]
    if any(last < border < end for last, end in zip([0, *ends], ends, strict=False) for border in borders):
        return encode_pieces(tokenizer, text, spans)
    mask = [any(start < end <= stop for start, stop in spans) for end in ends]
    return Encoded(list(coded["input_ids"]), mask)


def encode_pieces(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Encoded:
    """Tokenise spans and the text between them separately, so that no token crosses a border, as in inference."""
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


def _find_opening(tokenizer: Tokenizer, text: str, tokens: list[int]) -> list[int]:
    """Return the tokens that the tokenizer adds before ``text``, which alone is ``tokens``."""
    whole = list(tokenizer(text)["input_ids"])
    if whole and not tokens:  # around an empty text, tokens before and after look alike
        return _find_opening(tokenizer, _MARK, _tokenize(tokenizer, _MARK))
    starts = (at for at in range(len(whole) - len(tokens) + 1) if whole[at : at + len(tokens)] == tokens)
    return whole[: next(starts, 0)]


def make_renderer(tokenizer: Tokenizer, row: Mapping[str, Any], template_kwargs: Mapping[str, Any]) -> Render:
    """Return the chat template with the row's arguments, which override ``template_kwargs``."""
    return partial(_render, tokenizer, template_kwargs={**template_kwargs, **template_kwargs_of(row)})


def arguments_of_template(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template in the ``extra_info`` of a prompt."""
    arguments = extra_info.get("chat_template_kwargs")
    return arguments if isinstance(arguments, dict) else {}


def _render(
    tokenizer: Tokenizer, messages: Messages, generation: bool = False, template_kwargs: Mapping[str, Any] = NO_KWARGS
) -> str:
    options = {**template_kwargs, "tokenize": False, "add_generation_prompt": generation}
    try:
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except Exception as error:  # templates raise any error; the row must be named
        raise DataError(f"the chat template refused the conversation: {error}") from error


OverLong: TypeAlias = Literal["cut", "drop", "refuse"]
"""Treatment of sequences of more than ``max_length`` tokens: cut their ends, leave them out, or refuse the data."""


@dataclass(frozen=True)
class Encoding:
    max_length: int | None = None  #: maximum tokens of a sequence
    over_long: OverLong = "cut"
    assistant: Turns = "all"  #: which assistant turns are trained
    mask_prompt: bool = True  #: False trains every token but the first, prompts included
    #: tokens that end a sequence besides the tokenizer's, from the model's generation config
    eos_ids: Sequence[int] = ()
    #: arguments of the chat template, where a row has no others
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, choices in (("over_long", self.over_long, OverLong), ("assistant", self.assistant, Turns)):
            if value not in get_args(choices):
                raise ValueError(f"unknown {name} '{value}'{hint(value, get_args(choices))}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, not {self.max_length}")


@dataclass(frozen=True)
class Counts:
    """Numbers of rows: all, ``cut`` (tokens or a sequence lost to ``max_length``), ``dropped`` (nothing to train)."""

    rows: int
    cut: int
    dropped: int


def collect_sft(samples: Sequence[Any], name: str = "samples") -> SourceRows:
    """Take examples from memory: dicts, or objects with ``prompt`` and ``answer``; raises DataError for wrong ones."""
    items = [samples[index] for index in range(len(samples))]
    raw = [dict(item if isinstance(item, Mapping) else vars(item)) for item in items]
    rows, errors = normalize_rows(SourceRows(name, list(enumerate(raw, start=1))), normalize_sft)
    raise_errors(errors)
    return rows


def sft_prompt(row: Mapping[str, Any]) -> Any:
    """Return what copies share: a raw prompt, the messages before the first answer, or a whole text."""
    return messages_before_answer(row["messages"]) if "messages" in row else row["prompt"] or row["response"]


def messages_before_answer(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def encode_sft(rows: SourceRows, tokenizer: Tokenizer, encoding: Encoding | None = None) -> tuple[Batch, Counts]:
    """Encode examples by :func:`encode_example`; raises DataError for unusable rows (the first 20 are named), or if
    none is left.

    Returns ragged ``tokens`` (int64) and ``action_mask`` (bool), both ``[sequences, seq]``, and ``row`` (int64), the
    index of each sequence's row."""
    settings = encoding or Encoding()
    options = settings.assistant, settings.mask_prompt, settings.eos_ids, settings.template_kwargs
    return encode_rows(
        rows,
        lambda row: encode_example(tokenizer, row, *options),
        lambda items: fit_length(items, settings.max_length, settings.over_long),
        lambda: f"no row has a token to train on within {settings.max_length} tokens; all {len(rows)} were dropped",
    )


def encode_rows(
    rows: SourceRows,
    encode: Callable[[Mapping[str, Any]], list[Encoded]],
    fit: Callable[[list[Encoded]], list[Encoded]],
    nothing_left: Callable[[], str],
) -> tuple[Batch, Counts]:
    """Encode each row and ``fit`` its sequences, as :func:`encode_sft`; ``nothing_left`` explains why none is left."""
    encoded: list[Encoded] = []
    from_row: list[int] = []
    errors: list[ConfigError] = []
    cut = 0
    for index, row in enumerate(rows):
        try:
            whole = encode(row)
            sequences = fit(whole)
        except DataError as error:
            errors += [ConfigError(rows.location(index), fault.what) for fault in error.errors]
            continue
        encoded += sequences
        from_row += [index] * len(sequences)
        lengths = [sum(len(item.tokens) for item in items) for items in (sequences, whole)]
        cut += 0 < lengths[0] < lengths[1]
    raise_errors(sort_by_line(errors))
    if not encoded:
        raise DataError([ConfigError(rows.where, nothing_left())])
    batch = Batch(
        {
            "tokens": Ragged.from_rows([item.tokens for item in encoded], dtype=np.int64),
            "action_mask": Ragged.from_rows([item.action_mask for item in encoded], dtype=np.bool_),
            "row": np.array(from_row, dtype=np.int64),
        }
    )
    return batch, Counts(len(rows), cut, dropped=len(rows) - len(set(from_row)))


def fit_length(items: Sequence[Encoded], max_length: int | None, over_long: OverLong) -> list[Encoded]:
    """Cut, drop or refuse (DataError) the sequences of a row; remove those without a trained token."""
    if max_length is None:
        return [item for item in items if item.trained]
    long = [len(item.tokens) for item in items if len(item.tokens) > max_length]
    if long and over_long == "refuse":
        raise DataError(f"{max(long)} tokens, {max_length} at most")
    if over_long == "drop":
        items = [item for item in items if len(item.tokens) <= max_length]
    cut = [Encoded(item.tokens[:max_length], item.action_mask[:max_length]) for item in items]
    return [item for item in cut if item.trained]


SFT_ROWS = RowReader(
    normalize_sft,
    prompt_of=sft_prompt,
    names=("prompt", "messages", "response", "completion", "text", "answer", *TEMPLATE_KEYS),
)
