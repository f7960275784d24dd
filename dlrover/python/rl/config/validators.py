# SPDX-License-Identifier: Apache-2.0
"""Pydantic's validators of dataclasses, with booleans, numbers and texts kept apart: ``true`` is not 1, and neither is
``"1"``."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import PydanticKnownError, SchemaValidator

_STRICT = ConfigDict(extra="forbid", strict=False, arbitrary_types_allowed=True)

_VALUES = ("default", "expected", "metadata", "serialization")
"""Keys of a core schema with something else than schemas."""

_validators: dict[Any, SchemaValidator] = {}
"""By schema; to make one takes longer than to use it."""


def validator_of(schema: Any) -> SchemaValidator:
    """``schema`` is a dataclass, whose annotations and those of the dataclasses in it are the types."""
    if schema not in _validators:
        for dataclass in nested_dataclasses(schema):
            if "__pydantic_config__" not in vars(dataclass):
                dataclass.__pydantic_config__ = _STRICT
        _validators[schema] = SchemaValidator(_kept_apart(TypeAdapter(schema).core_schema))
    return _validators[schema]


def nested_dataclasses(schema: Any) -> list[type[Any]]:
    """``schema`` and every dataclass its fields mention."""
    classes: list[type[Any]] = []
    pending = [schema]
    while pending:
        kind = pending.pop()
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind not in classes:
            classes.append(kind)
            pending.extend(get_type_hints(kind).values())
        pending.extend(getattr(kind, "__args__", ()))
    return classes


def _kept_apart(schema: Any) -> Any:
    """A core schema whose numbers and booleans look at the type of a value before they convert it."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_kept_apart, schema))
    if not isinstance(schema, dict):
        return schema
    parts = {key: part if key in _VALUES else _kept_apart(part) for key, part in schema.items()}
    kind = parts.get("type")
    check = _CHECKS.get(kind) if isinstance(kind, str) else None
    if kind == "literal" and "off" in parts["expected"]:  # YAML 1.1 reads it as false
        check = {"type": "no-info", "function": lambda value: "off" if value is False else value}
    return parts if check is None else {"type": "function-before", "function": check, "schema": parts}


def _refuse_as_integer(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise PydanticKnownError("int_type")
    return value


def _refuse_as_number(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise PydanticKnownError("float_type")
    return value


def _refuse_as_boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise PydanticKnownError("bool_type")
    return value


_CHECKS: Mapping[str, Mapping[str, Any]] = {
    kind: {"type": "no-info", "function": check}
    for kind, check in {"int": _refuse_as_integer, "float": _refuse_as_number, "bool": _refuse_as_boolean}.items()
}
