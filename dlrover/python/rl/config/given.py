"""What a user gave, as a schema's own keys and with what the schema's defaults say of the rest."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrover.python.rl.common.errors import InvalidJob, Problem
from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)

OTHER_NAMES = "other_names"
"""The class variable of a schema that maps dotted keys, as other libraries call them, to those of its own fields."""

_NOT_THERE = object()


def plain(value: Any) -> Any:
    """An OmegaConf container as plain dicts and lists, interpolations resolved; anything else as it is.

    Raises:
        InvalidJob: an interpolation cannot be resolved, or a mandatory value (``???``) is missing.
    """
    if not isinstance(value, DictConfig | ListConfig):
        return value
    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        where = str(getattr(error, "full_key", "") or "config")
        raise InvalidJob([Problem(where, str(error).splitlines()[0])]) from error


def completed(schema: type[Any], given: Any, where: str) -> Any:
    """``given`` by the schema's own keys, and with what the defaults of its fields have that is not given.

    Args:
        schema: a dataclass.
        given: plain values; what is no mapping stays as it is.
        where: how the mapping is called in the problems' places.

    Raises:
        InvalidJob: a value is there by two names.
    """
    return _with_defaults(schema, _in_own_names(schema, given, where))


def _in_own_names(schema: type[Any], values: Any, where: str) -> Any:
    """``values`` with the schema's own keys where there are others, which are warned of.

    Raises:
        InvalidJob: a value is there by both.
    """
    for other, name in getattr(schema, OTHER_NAMES, {}).items():
        value = _pick(values, other.split("."))
        if value is _NOT_THERE:
            continue
        place = f"{where}.{other}" if where else other
        if _pick(values, name.split(".")) is not _NOT_THERE:
            raise InvalidJob([Problem(place, f"is another name of {name}, which is given too")])
        _LOG.warning("%s is taken as %s, which is its name here", place, name)
        values = _with(_without(values, other.split(".")), name.split("."), value)
    return values


def _pick(values: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return _NOT_THERE
        values = values[part]
    return values


def _without(values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A copy without a key, nor mappings that are empty without it."""
    first, *rest = path
    inner = _without(values[first], rest) if rest else {}
    others = {key: value for key, value in values.items() if key != first}
    return {**others, first: inner} if inner else others


def _with(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy with a key; as it is where there is no mapping for it, which is wrong in itself."""
    first, *rest = path
    inner = values.get(first)
    if rest and not isinstance(inner, Mapping | None):
        return dict(values)
    return {**values, first: _with(inner or {}, rest, value) if rest else value}


def _with_defaults(kind: Any, given: Any, default: Any = None) -> Any:
    """``given`` for a dataclass ``kind``, with what its ``default`` has that another one of its kind would not."""
    if not isinstance(given, Mapping) or not dataclasses.is_dataclass(kind):
        return given
    hints, values = get_type_hints(kind), dict(given)
    for field in (field for field in dataclasses.fields(kind) if field.init):
        usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        told = usual if default is None else getattr(default, field.name)
        if field.name in given and dataclasses.is_dataclass(told):
            values[field.name] = _with_defaults(type(told), given[field.name], told)
        elif field.name in given:
            values[field.name] = _with_defaults(hints[field.name], given[field.name])
        elif default is not None and told != usual:
            values[field.name] = told
    return values
