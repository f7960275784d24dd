"""Arguments of the constructors: their names and values are checked before anything else happens."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt

from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.engine.base import SamplingParams

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]
PositiveNumber = Annotated[float, Gt(0)]

T = TypeVar("T")

_GENERATION = {"top_k": "top_k", "top_p": "top_p", "stop": "stop", "stop_strings": "stop"}
"""What ``generation_args`` may hold, and what rollout engines call it."""


def names_arguments(kind: type[T]) -> type[T]:
    """Let the constructor of a class name the nearest argument where one is unknown."""
    made: Callable[..., None] = vars(kind)["__init__"]
    known = [name for name in inspect.signature(made).parameters if name != "self"]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            faults = [f"'{name}'{hint(name, known)}" for name in unknown]
            raise TypeError(f"{kind.__name__} has no argument {', '.join(faults)}")
        made(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def sampling_of(max_new_tokens: int, temperature: float, generation_args: Mapping[str, Any] | None) -> SamplingParams:
    """How completions are drawn.

    Args:
        max_new_tokens: tokens at most, the end-of-sequence token included.
        temperature: divides the logits; 0 is greedy.
        generation_args: ``top_k``, ``top_p`` and ``stop`` (or ``stop_strings``).

    Raises:
        ValueError: it holds something else; gives the nearest.
    """
    further: dict[str, Any] = {}
    for name, value in (generation_args or {}).items():
        if name not in _GENERATION:
            raise ValueError(f"generation_args has no '{name}'{hint(name, _GENERATION)}")
        further[_GENERATION[name]] = (value,) if isinstance(value, str) else value
    if "stop" in further:
        further["stop"] = tuple(further["stop"])
    return SamplingParams(max_new_tokens, temperature, **further)
