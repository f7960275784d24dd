"""From plain mappings to frozen dataclasses, every problem reported at once."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.config.given import completed, plain

T = TypeVar("T")

_STRICT = ConfigDict(extra="forbid", strict=False, arbitrary_types_allowed=True)
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def parse(schema: type[T], data: Any, where: str) -> tuple[T | None, list[Problem]]:
    """Read ``data`` as the dataclass ``schema``.

    Where a field's default is a dataclass and only a part of it is given, the rest is as in that default.

    Args:
        schema: a dataclass; its annotations are the types, ``annotated_types`` bounds the ranges, its class variable
            ``other_names``, if there is one, what else its keys may be called; such a key is warned of.
        data: a mapping or ``DictConfig``.
        where: how the mapping is called in the problems' places.

    Returns:
        The instance and no problems, or None and all of them.
    """
    try:
        values = completed(schema, plain(data), where)
        return _adapter(schema).validate_python(values), []
    except InvalidJob as error:
        return None, list(error.problems)
    except ValidationError as error:
        return None, [_problem(schema, item, where) for item in error.errors()]


def salvage(schema: type[T], data: Any, where: str) -> tuple[T | None, list[Problem]]:
    """Like :func:`parse`, and beside the problems an instance of what is right, where there can be one.

    Wrong and unknown values are left out, missing texts are ``""``: enough to look for the problems of the rest, never
    to be run.
    """
    try:
        values = copy.deepcopy(completed(schema, plain(data), where))
        return _adapter(schema).validate_python(values), []
    except InvalidJob as error:
        return None, list(error.problems)
    except ValidationError as error:
        problems = [_problem(schema, item, where) for item in error.errors()]
        for item in error.errors():
            _mend(values, item)
    try:
        return _adapter(schema).validate_python(values), problems
    except ValidationError:
        return None, problems


def _mend(values: Any, item: Mapping[str, Any]) -> None:
    """Take the value that an error is about out of ``values``, or put a missing one in."""
    *parents, last = item["loc"] or ("",)
    for part in parents:
        # Parts that are no keys name the branch of a union: the value before them is the one that is wrong.
        if not isinstance(values, dict) or part not in values:
            return
        values = values[part]
    if isinstance(values, dict) and item["type"] in ("missing", "missing_argument"):
        values[last] = ""
    elif isinstance(values, dict):
        values.pop(last, None)


def require(schema: type[T], data: Any, where: str) -> T:
    """Like :func:`parse`, raising :class:`InvalidJob` with all problems."""
    value, problems = parse(schema, data, where)
    if value is None:
        raise InvalidJob(problems)
    return value


def _adapter(schema: type[T]) -> TypeAdapter[T]:
    for dataclass in _nested(schema):
        if "__pydantic_config__" not in vars(dataclass):
            dataclass.__pydantic_config__ = _STRICT
    return TypeAdapter(schema)


def _nested(schema: Any) -> list[type[Any]]:
    """``schema`` and every dataclass its fields mention."""
    found: list[type[Any]] = []
    waiting = [schema]
    while waiting:
        kind = waiting.pop()
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind not in found:
            found.append(kind)
            waiting.extend(get_type_hints(kind).values())
        waiting.extend(getattr(kind, "__args__", ()))
    return found


def _problem(schema: Any, item: Mapping[str, Any], where: str) -> Problem:
    path = _path(item)
    place = ".".join([where, *map(str, path)]) if where else ".".join(map(str, path))
    if item["type"] in _UNKNOWN:
        known = _fields_at(schema, path[:-1])
        return Problem(place, f"unknown key '{path[-1]}'{hint(str(path[-1]), known)}")
    if item["type"] in ("missing", "missing_argument"):
        return Problem(place, "is required")
    return Problem(place, f"{_lower(item['msg'])}, got {item['input']!r}")


def _path(item: Mapping[str, Any]) -> list[Any]:
    """Where an error is, without pydantic's words for the members of a union, which have brackets; so may have a key
    of the user's that nobody knows, which is the last part."""
    end = len(item["loc"]) - (item["type"] in _UNKNOWN)
    named = [part for part in item["loc"][:end] if not (isinstance(part, str) and "[" in part)]
    return [*named, *item["loc"][end:]]


def _lower(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _fields_at(schema: Any, path: list[Any]) -> list[str]:
    kind = schema
    for part in path:
        hints = get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        candidates = _nested(hints[part]) if part in hints else [kind]
        kind = candidates[0] if candidates else kind
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
