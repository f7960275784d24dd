# SPDX-License-Identifier: Apache-2.0
"""Checks dataclasses made in Python against the types and constraints of their fields; job files: ``config.typed``."""

from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt


def check_fields(config: Any) -> None:
    """Raise ValueError naming every field of the dataclass instance ``config`` whose value its type forbids."""
    types = get_type_hints(type(config), include_extras=True)
    faults = {field.name: _check(types[field.name], getattr(config, field.name)) for field in fields(config)}
    if any(faults.values()):
        raise ValueError("; ".join(f"{name} {fault}" for name, fault in faults.items() if fault))


def changed_fields(config: Any, *names: str) -> list[str]:
    """Return those of the fields ``names`` of the dataclass instance ``config`` that differ from their defaults."""
    return [
        field.name for field in fields(config) if field.name in names and getattr(config, field.name) != field.default
    ]


def _check(kind: Any, value: Any) -> str:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return "" if value in choices else f"must be one of {', '.join(map(repr, choices))}, not {value!r}"
    if get_origin(kind) is Annotated:
        base, *constraints = get_args(kind)
        return _check(base, value) or next(filter(None, (_violation(rule, value) for rule in constraints)), "")
    if kind is bool:
        return "" if isinstance(value, bool) else f"must be true or false, not {value!r}"
    if kind in {int, float}:
        fits = isinstance(value, int | kind) and not isinstance(value, bool)
        return "" if fits else f"must be {'a number' if kind is float else 'an integer'}, not {value!r}"
    if kind is str:
        return "" if isinstance(value, str) else f"must be text, not {value!r}"
    options = [option for option in get_args(kind) if option is not NoneType]  # Annotated[...] | None
    is_optional = get_origin(kind) in (Union, UnionType) and len(options) == 1
    return _check(options[0], value) if is_optional and value is not None else ""


def _violation(rule: Any, value: Any) -> str:
    # Written as "not inside", so that NaN violates every rule.
    match rule:
        case Ge(ge=bound) if not value >= bound:
            return f"must be at least {bound}, not {value!r}"
        case Gt(gt=bound) if not value > bound:
            return f"must be above {bound}, not {value!r}"
        case Le(le=bound) if not value <= bound:
            return f"must be at most {bound}, not {value!r}"
        case Lt(lt=bound) if not value < bound:
            return f"must be below {bound}, not {value!r}"
    return ""
