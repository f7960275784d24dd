# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: reading, and the hints for what cannot be read, which need the same walk
"""Reads plain mappings as frozen dataclasses, with defaults filled in and all errors reported at once.

The reader walks through dataclasses, mappings and lists, and gives pydantic each other value alone: a wrong part is
left out with an error, and its neighbours are read. Booleans, numbers and texts differ: neither ``true`` nor ``"1"``
is 1."""

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticKnownError, SchemaValidator

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.log import HIDDEN
from dlrover.python.rl.common.names import hint, nearest, nearest_path
from dlrover.python.rl.config.plain import to_plain
from dlrover.python.rl.config.secrets import without_secrets

T = TypeVar("T")

_ALMOST = 0.8  # similarity from which an unknown key is taken to mean one of another place
OTHER_NAMES = "other_names"
"""The class variable of a schema that maps dotted keys of other libraries to the schema's own, or to a
:class:`Translation` where the values differ too."""

KEY_NAMES: Mapping[str, Any] = yaml.safe_load((files(__package__) / "other_names.yaml").read_text(encoding="utf-8"))


def names_by_alias(section: str) -> dict[str, str]:
    """Return the names here, or the answers, by the names in a section of ``other_names.yaml``."""
    return {alias: name for name, aliases in KEY_NAMES[section].items() for alias in aliases}


@dataclasses.dataclass(frozen=True)
class Translation:
    """A key of another library whose values have other names here."""

    name: str  #: the key here
    values: Mapping[Any, Any]  #: the value here of each value there


ELSEWHERE = "elsewhere"  # the class variable of a schema that maps dotted keys of other libraries to what answers them
NAMED = "named"  # the class variable of a schema with the keys of its open mappings that have a ``name``
_MISSING = object()
_WRONG = object()  # stands for a value that has an error


def parse(schema: type[T], data: Any, where: str) -> tuple[T | None, list[ConfigError]]:
    """Read ``data`` as a dataclass: the instance and no errors, or None and all of them.

    Args:
        schema: its annotations are the types, ``annotated_types`` bounds the ranges; its class variable
            ``other_names`` maps further keys to its own. A field whose default is a dataclass may be given in part: the
            other values are the default's.
        data: a mapping or ``DictConfig``.
        where: the prefix of the errors' places."""
    value, errors = salvage(schema, data, where)
    return (None if errors else value), errors


def salvage(schema: type[T], data: Any, where: str) -> tuple[T | None, list[ConfigError]]:
    """Like :func:`parse`, but with an instance beside the errors, for finding further errors and never to be run. It
    lacks wrong and unknown values, and has empty ones in place of missing ones; None if even that is impossible."""
    errors: list[ConfigError] = []
    try:
        plain = to_plain(data, where)
    except InvalidJob as error:
        plain, errors = error.salvaged, list(error.errors)
    unresolved = [error.where for error in errors]  # further errors in these places, or around them, are no news
    try:
        plain = rename_keys(schema, plain, where)[0]
    except InvalidJob as error:
        plain, errors = error.salvaged, [*errors, *error.errors]
    reader = _Reader(schema, where)
    value = reader.read(schema, plain, ())
    for fault in reader.errors:
        is_around = any(not fault.where or lies_in(place, [fault.where]) for place in unresolved)
        errors += [] if is_around or lies_in(fault.where, unresolved) else [fault]
    return (None if value is _WRONG else value), errors


def lies_in(place: str, places: Sequence[str]) -> bool:
    """Return True if ``place`` is one of ``places`` or below one."""
    return any(f"{place}.".startswith(f"{other}.") for other in places)


def require(schema: type[T], data: Any, where: str) -> T:
    """Like :func:`parse`, raising :class:`InvalidJob` with all errors."""
    value, errors = parse(schema, data, where)
    if value is None:
        raise InvalidJob(errors)
    return value


def check_fields(instance: Any) -> None:
    """Raise ValueError for numbers, texts and booleans in a dataclass instance that their annotations forbid."""
    reader = _Reader(type(instance), "")
    for field in dataclasses.fields(instance):
        annotation = _hints(type(instance))[field.name]
        kinds = [getattr(branch, "__origin__", branch) for branch in _branches(annotation)]
        if all(kind in (bool, int, float, str, NoneType, Literal) for kind in kinds):
            reader.read(annotation, getattr(instance, field.name), (field.name,))
    if reader.errors:
        raise ValueError("; ".join(map(str, reader.errors)))


class _Reader:
    """Reads values by their annotations, and collects the errors."""

    def __init__(self, schema: Any, where: str) -> None:
        self._schema, self._where = schema, where
        self.errors: list[ConfigError] = []

    def read(self, annotation: Any, value: Any, path: tuple[Any, ...], default: Any = None) -> Any:
        """Return the value of a place with this annotation, or ``_WRONG``."""
        branches = _branches(annotation)
        default = default if dataclasses.is_dataclass(default) else None
        kind = next(filter(_is_dataclass, branches), None) if default is None else type(default)
        if kind is not None and isinstance(value, kind):
            return value
        if kind is not None and isinstance(value, Mapping):
            return self._read_dataclass(kind, value, path, default)
        for branch in branches:
            origin, arguments = get_origin(branch), get_args(branch)
            if isinstance(value, Mapping) and _is_mapping(origin) and arguments:
                return self._read_mapping(arguments[0], arguments[1], value, path)
            is_list = origin is list or (origin is tuple and arguments[1:] == (Ellipsis,))
            if is_list and isinstance(value, list | tuple):
                items = [self.read(arguments[0], item, (*path, number)) for number, item in enumerate(value)]
                return _WRONG if any(item is _WRONG for item in items) else origin(items)
        return self._read_leaf(annotation, kind, value, path)

    def _read_leaf(self, annotation: Any, kind: type[Any] | None, value: Any, path: tuple[Any, ...]) -> Any:
        """Return what pydantic reads; ``kind`` is a dataclass that the annotation also allows."""
        plain_kinds = [branch for branch in _branches(annotation) if not _is_dataclass(branch)]
        items: list[tuple[tuple[Any, ...], Any]] = []
        try:
            if kind is None or plain_kinds:
                leaf = annotation if kind is None else Union[tuple(plain_kinds)]  # noqa: UP007 -- made of a list
                return _validator(leaf).validate_python(value)
        except ValidationError as error:
            items = [(_place(item["loc"], value), item) for item in error.errors()]
        if kind is not None:
            ends = ["null" if item["type"] == "none_required" else _lower(item["msg"]) for _, item in items]
            ends = [end.removeprefix("input should be ") for end in ends]
            names = [field.name for field in dataclasses.fields(kind)]
            self._report(
                ", or ".join([f"must be a mapping with {', '.join(names)}", *ends]), path, value, "name" in names
            )
            return _WRONG
        places = dict.fromkeys(place for place, _ in items)
        for place in places:
            # A branch that finds a fault inside the value has read everything else.
            if not any(other[: len(place)] == place and other != place for other in places):
                self._refuse([item for at, item in items if at == place], (*path, *place))
        return _WRONG

    def _read_dataclass(self, kind: type[Any], values: Mapping[str, Any], path: tuple[Any, ...], default: Any) -> Any:
        """Return an instance with the valid values, and defaults for the others."""
        arguments, before = dict[str, Any](), len(self.errors)
        fields = [field for field in dataclasses.fields(kind) if field.init]
        for field in fields:
            usual = _default_of(field) if default is None else getattr(default, field.name)
            if field.name in values:
                value = self.read(_hints(kind)[field.name], values[field.name], (*path, field.name), usual)
                usual = usual if value is _WRONG else value
            elif usual is _MISSING:
                self._report("is required", (*path, field.name))
            arguments[field.name] = _stand_in(_hints(kind)[field.name]) if usual is _MISSING else usual
        has_wrong = len(self.errors) > before
        names = [field.name for field in fields]
        for key in (key for key in values if key not in names):
            self._refuse_key(names, values[key], (*path, key))
        try:
            return kind(**arguments)
        except (ValueError, AssertionError) as error:
            if not has_wrong:  # an instance with stand-ins for wrong parts may be invalid because of them
                self._report(_lower(str(error)), path, dict(values))
            return _WRONG

    def _read_mapping(self, key_type: Any, value_type: Any, values: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        """Return the valid items of a mapping."""
        read: dict[Any, Any] = {}
        for key, value in values.items():
            name = self.read(key_type, key, (*path, key))
            item = _WRONG if name is _WRONG else self.read(value_type, value, (*path, key))
            if item is _WRONG and name is not _WRONG and _is_dataclass(value_type):
                item = _stand_in(value_type)
            if item is not _WRONG:
                read[name] = item
        return read

    def _refuse(self, items: Sequence[Mapping[str, Any]], path: tuple[Any, ...]) -> None:
        """Report pydantic's errors for the branches of one place as one."""
        texts = [_TEXTS.get(item["type"], _lower(item["msg"])) for item in items]
        texts = [texts[0], *(text.removeprefix("input should be ") for text in texts[1:])]
        is_open = any(_TEXTS.get(item["type"]) == _NO_MAPPING for item in items)
        has_name = is_open and ".".join(map(str, path)) in getattr(self._schema, NAMED, ())
        self._report(", or ".join(texts), path, items[-1]["input"], has_name)

    def _report(self, message: str, path: tuple[Any, ...], value: Any = _MISSING, has_name: bool = False) -> None:
        """Add an error; other libraries allow a text in place of a mapping with a ``name``."""
        place = self._place_of(path)
        shown = value if value is _MISSING else without_secrets(value, place)
        if shown is not _MISSING and shown != HIDDEN:
            message += f", got {shown!r}"
            if isinstance(shown, str) and has_name:
                message += f"; did you mean {'.'.join(map(str, path))}.name={shown}?"
        self.errors.append(ConfigError(place, message))

    def _place_of(self, path: Sequence[Any]) -> str:
        return ".".join([*([self._where] if self._where else []), *map(str, path)])

    def _refuse_key(self, names: Sequence[str], value: Any, path: tuple[Any, ...]) -> None:
        """Report an unknown key; if keys of other libraries begin with it, report each key below it."""
        key = ".".join(map(str, path))
        foreign = [*getattr(self._schema, ELSEWHERE, {}), *getattr(self._schema, OTHER_NAMES, {})]
        if not any(f"{other}.".startswith(f"{key}.") for other in foreign):
            self._report(f"unknown key '{path[-1]}'{self._hint_of(names, [*map(str, path)])}", path)
            return
        for below in _leaves(value):
            near = nearest_path(".".join([key, *below]), foreign)
            fault = f"unknown key{f'; did you mean {near!r}?' if near else ''}"
            self.errors.append(answer(self._schema, ConfigError(self._place_of([*path, *below]), fault)))

    def _hint_of(self, names: Sequence[str], path: Sequence[str]) -> str:
        """Return the hint for an unknown key: the nearest key beside it, or one elsewhere with (almost) its name."""
        *parents, name = path
        places = dict[str, list[str]]()
        for key, _ in list_keys(self._schema):
            parts = key.split(".")
            for end in range(1, len(parts) + 1):
                places.setdefault(parts[end - 1], []).append(".".join(parts[:end]))
        near = name if name in places else None if nearest(name, names) else nearest(name, places, _ALMOST)
        if near is None:
            return hint(name, names)
        around = "".join(f"{part}." for part in parents)
        closest = min(places[near], key=lambda key: (not key.startswith(around), key.count(".")))
        return f"; did you mean '{f'{self._where}.{closest}'.removeprefix('config.').removeprefix('.')}'?"


_NO_MAPPING = "must be a mapping"
_TEXTS: Mapping[str, str] = {
    **dict.fromkeys(("dict_type", "mapping_type"), _NO_MAPPING),
    **dict.fromkeys(("list_type", "tuple_type"), "input should be a list, [...]"),
}
"""Messages in place of pydantic's, by the type of its error."""


def _branches(annotation: Any) -> list[Any]:
    return [*get_args(annotation)] if get_origin(annotation) in (Union, UnionType) else [annotation]


def _is_dataclass(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


_hints: Callable[[Any], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))


def _stand_in(annotation: Any) -> Any:
    """Return an empty value for a required field that is missing or wrong."""
    for branch in _branches(annotation):
        if _is_dataclass(branch):
            return _Reader(branch, "").read(branch, {}, ())
        if _is_mapping(get_origin(branch)):
            return {}
    return ""


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _MISSING if field.default is dataclasses.MISSING else field.default


def _place(loc: Sequence[Any], value: Any) -> tuple[Any, ...]:
    """Return the place of an error in ``value``, without pydantic's names of the branches of a union."""
    place: list[Any] = []
    for part in loc:
        is_index = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, Mapping) and part in value):
            place, value = [*place, part], value[part]
    return tuple(place)


def _leaves(value: Any) -> list[list[str]]:
    if not isinstance(value, Mapping) or not value:
        return [[]]
    return [[str(key), *below] for key, item in value.items() for below in _leaves(item)]


def answer(schema: Any, error: ConfigError) -> ConfigError:
    """Return the answer of ``schema.elsewhere`` to an unknown key, or to one below it; ``error`` if it has none."""
    for key, place in getattr(schema, ELSEWHERE, {}).items():
        if f"{error.where.removeprefix('config.')}.".startswith(f"{key}.") and error.what.startswith("unknown key"):
            return ConfigError(error.where, f"unknown key; here it is {place}")
    return error


def _lower(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def list_keys(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each dotted key of a schema, and its default as in a job file, or ``required``."""
    for field in dataclasses.fields(schema):
        default = _default_of(field)
        has_default = default is not None and default is not _MISSING
        kinds = _dataclasses_in(type(default) if has_default else _hints(schema)[field.name])
        if kinds:
            yield from list_keys(kinds[0], f"{prefix}{field.name}.")
        elif default is _MISSING:
            yield f"{prefix}{field.name}", "required"
        else:
            yield f"{prefix}{field.name}", "null" if default is None else str(default)


def _dataclasses_in(annotation: Any) -> list[Any]:
    if _is_dataclass(annotation):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in _dataclasses_in(argument)]


def rename_keys(schema: type[Any], values: Any, where: str, later: Sequence[str] = ()) -> tuple[Any, list[str]]:
    """Return ``values`` with the schema's own names of its keys, and a line about each renamed one. Of a value with two
    names the one in ``later`` counts; if neither is, InvalidJob is raised, which salvages the values with own names."""
    lines, errors = [], []
    for alias, target in getattr(schema, OTHER_NAMES, {}).items():
        value = _pick(values, alias.split("."))
        if value is _MISSING:
            continue
        place = f"{where}.{alias}" if where else alias
        name = target.name if isinstance(target, Translation) else target
        values, is_double = _without(values, alias.split(".")), _pick(values, name.split(".")) is not _MISSING
        if is_double and alias not in later:
            errors.append(ConfigError(place, f"is another name of {name}: leave one of them out"))
            continue
        shown = name
        if isinstance(target, Translation) and value is not None:
            if not isinstance(value, Hashable) or value not in target.values:
                allowed = ", ".join(json.dumps(item) for item in target.values)
                errors.append(ConfigError(place, f"must be one of {allowed}, got {value!r}; here it is {name}"))
                continue
            value = target.values[value]
            shown = f"{name}={value}"
        lines.append(f"{place} is read as {shown}, its name here")
        if value is not None:
            values = _with(values, name.split("."), value)
    if errors:
        raise InvalidJob(errors, salvaged=values)
    return values, lines


def _pick(values: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return _MISSING
        values = values[part]
    return values


def _without(values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Copy ``values`` without a key, and without mappings that become empty."""
    first, *below = path
    inner = _without(values[first], below) if below else {}
    remaining = {key: value for key, value in values.items() if key != first}
    return {**remaining, first: inner} if inner else remaining


def _with(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Copy ``values`` with a key; without it if something other than a mapping, an error itself, is in its way."""
    first, *below = path
    inner = values.get(first)
    if below and not isinstance(inner, Mapping | None):
        return dict(values)
    return {**values, first: _with(inner or {}, below, value) if below else value}


_VALUES = ("default", "expected", "metadata", "serialization")  # keys of a core schema that hold no schemas


@cache
def _validator(annotation: Any) -> SchemaValidator:
    """Return pydantic's validator of an annotation without dataclasses; making one takes longer than using it."""
    adapter: Any = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    return SchemaValidator(_kept_apart(adapter.core_schema))


def _kept_apart(schema: Any) -> Any:
    """Return a core schema whose numbers and booleans check the type of a value before they convert it."""
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


def _refusing(kind: str, wrong: Callable[[Any], bool]) -> Mapping[str, Any]:
    def check(value: Any) -> Any:
        if wrong(value):
            raise PydanticKnownError(kind)  # type: ignore[arg-type]  # one of its names
        return value

    return {"type": "no-info", "function": check}


_CHECKS: Mapping[str, Mapping[str, Any]] = {
    "int": _refusing("int_type", lambda value: isinstance(value, bool | str | bytes)),
    "float": _refusing("float_type", lambda value: isinstance(value, bool | str | bytes)),
    "bool": _refusing("bool_type", lambda value: not isinstance(value, bool)),
}
