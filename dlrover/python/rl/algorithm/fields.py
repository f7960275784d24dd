"""Checks the values of a config dataclass against the types and constraints of its fields."""

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from dlrover.python.rl.common.nearest import hint


def check_fields(config: Any) -> None:
    """Raise ValueError naming every field of the dataclass instance ``config`` whose value its type forbids."""
    faults = field_faults(type(config), {field.name: getattr(config, field.name) for field in fields(config)})
    if faults:
        raise ValueError("; ".join(f"{name} {fault}" for name, fault in faults.items()))


def given(config: Any, *names: str) -> list[str]:
    """Those of the fields ``names`` of the dataclass instance ``config`` that are not as its class has them."""
    return [
        field.name for field in fields(config) if field.name in names and getattr(config, field.name) != field.default
    ]


def field_faults(config: type, values: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with ``values`` for the dataclass ``config``, by name; unknown names included."""
    types = get_type_hints(config, include_extras=True)
    known = [field.name for field in fields(config)]
    faults = {
        name: _fault(types[name], value) if name in known else f"is unknown{hint(name, known)}"
        for name, value in values.items()
    }
    return {name: fault for name, fault in faults.items() if fault}


def _fault(kind: Any, value: Any) -> str:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return "" if value in choices else f"must be one of {', '.join(map(repr, choices))}, not {value!r}"
    if get_origin(kind) is Annotated:
        base, *constraints = get_args(kind)
        return _fault(base, value) or next(filter(None, (_violation(rule, value) for rule in constraints)), "")
    if kind is bool:
        return "" if isinstance(value, bool) else f"must be true or false, not {value!r}"
    if kind in {int, float}:
        fits = isinstance(value, int | kind) and not isinstance(value, bool)
        return "" if fits else f"must be {'a number' if kind is float else 'an integer'}, not {value!r}"
    if kind is str:
        return "" if isinstance(value, str) else f"must be text, not {value!r}"
    options = [option for option in get_args(kind) if option is not NoneType]  # Annotated[...] | None
    is_optional = get_origin(kind) in (Union, UnionType) and len(options) == 1
    return _fault(options[0], value) if is_optional and value is not None else ""


def _violation(rule: Any, value: Any) -> str:
    # Written as "not inside", so that NaN breaks every rule.
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
