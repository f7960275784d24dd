# SPDX-License-Identifier: Apache-2.0
"""From plain mappings to frozen dataclasses, with defaults filled in and all errors reported at once."""

import copy
import dataclasses
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import hint, nearest, nearest_path
from dlrover.python.rl.common.redaction import HIDDEN
from dlrover.python.rl.config.plain import to_plain
from dlrover.python.rl.config.secrets import without_secrets
from dlrover.python.rl.config.validators import nested_dataclasses, validator_of

T = TypeVar("T")

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_REQUIRED = ("missing", "missing_argument")

_NO_MAPPING = ("dataclass_type",)
_NO_DICT = ("dict_type", "mapping_type")
_NO_LIST = ("tuple_type", "list_type")
_ALMOST = 0.8
"""Similarity from which an unknown key is taken to mean one of another place."""

_MENDED = 6
"""Rounds in which what stands for a wrong value may be wrong itself."""

OTHER_NAMES = "other_names"
"""The class variable of a schema that maps dotted keys of other libraries to those of its own fields: names, or
:class:`Translation` where the values differ too."""


@dataclasses.dataclass(frozen=True)
class Translation:
    """A key of another library whose values have other names here."""

    name: str
    """The key here."""

    values: Mapping[Any, Any]
    """The value here of each value there."""


ELSEWHERE = "elsewhere"
"""The class variable of a schema that maps dotted keys of other libraries to what answers them."""

NAMED = "named"
"""The class variable of a schema with the keys of its open mappings that have a ``name``."""

_MISSING = object()


def parse(schema: type[T], data: Any, where: str) -> tuple[T | None, list[ConfigError]]:
    """Read ``data`` as a dataclass: the instance and no errors, or None and all of them.

    Args:
        schema: its annotations are the types, ``annotated_types`` bounds the ranges; its class variable
            ``other_names`` maps further keys to its own, each accepted with a warning. A field whose default is a
            dataclass may be given in part: the rest is as in that default.
        data: a mapping or ``DictConfig``.
        where: the prefix of the errors' places.
    """
    value, errors = salvage(schema, data, where)
    return (None if errors else value), errors


def salvage(schema: type[T], data: Any, where: str) -> tuple[T | None, list[ConfigError]]:
    """Like :func:`parse`, but with an instance beside the errors, for finding further errors and never to be run.

    It lacks wrong and unknown values, and has ``""`` for missing ones and ``{}`` for what should be a mapping with
    certain keys; None where even that is not an instance.
    """
    errors: list[ConfigError] = []
    try:
        plain = to_plain(data, where)
    except InvalidJob as error:
        plain, errors = error.salvaged, list(error.errors)
    try:
        values = complete_values(schema, plain, where)
    except InvalidJob as error:
        values, errors = _with_defaults(schema, error.salvaged), [*errors, *error.errors]
    wrong = [error.where for error in errors]
    for _ in range(_MENDED):
        try:
            return _validate(schema, values), errors
        except ValidationError as error:
            items: list[dict[str, Any]] = [{**item, "loc": _path(item, values)} for item in error.errors()]
        found = [(item["type"] in _UNKNOWN, fault) for item in items for fault in _config_errors(schema, item, where)]
        # Where something stands for a wrong part, what is wrong with the whole says nothing.
        errors += [fault for fault in _join_branches([fault for _, fault in found]) if not _overlaps(fault, wrong)]
        wrong += [fault.where for is_unknown, fault in found if not is_unknown]
        wrong += [place for item in items if (place := _list_around(values, item["loc"], where))]
        values = copy.deepcopy(values)
        for item in items:
            values = _mended(values, item)
    return None, errors


def _overlaps(error: ConfigError, places: Sequence[str]) -> bool:
    place = error.where
    return lies_in(place, places) or any(not place or lies_in(other, [place]) for other in places)


def lies_in(place: str, places: Sequence[str]) -> bool:
    """Whether ``place`` is one of ``places`` or below one."""
    return any(f"{place}.".startswith(f"{other}.") for other in places)


def _validate(schema: type[T], values: Any) -> T:
    instance: T = validator_of(schema).validate_python(values)
    return instance


def _list_around(values: Any, loc: Sequence[Any], where: str) -> str:
    """The place of the list that an error lies in, which goes with it; "" if there is none."""
    inner, path = values, [where] if where else []
    for part in loc[:-1]:
        inner = inner.get(part) if isinstance(inner, dict) else None
        path.append(str(part))
        if not isinstance(inner, dict):
            return ".".join(path)
    return ""


def _mended(values: Any, item: Mapping[str, Any]) -> Any:
    """``values`` without the faulty value of an error, or what holds it if that is no mapping; with a missing one, or
    an empty mapping in place of something else."""
    if not isinstance(values, dict):
        return {} if item["type"] in _NO_MAPPING else values
    path, inner = list(item["loc"]), values
    while len(path) > 1 and isinstance(inner.get(path[0]), dict):
        inner = inner[path.pop(0)]
    if not path:
        return values
    if len(path) == 1 and item["type"] in (*_REQUIRED, *_NO_MAPPING):
        inner[path[0]] = "" if item["type"] in _REQUIRED else {}
    else:
        inner.pop(path[0], None)
    return values


def require(schema: type[T], data: Any, where: str) -> T:
    """Like :func:`parse`, raising :class:`InvalidJob` with all errors."""
    value, errors = parse(schema, data, where)
    if value is None:
        raise InvalidJob(errors)
    return value


def _config_errors(schema: Any, item: Mapping[str, Any], where: str) -> list[ConfigError]:
    """The error of an item; of an unknown key that begins keys of other libraries, one for each key below it."""
    path = ".".join(map(str, item["loc"]))
    foreign = [*getattr(schema, ELSEWHERE, {}), *getattr(schema, OTHER_NAMES, {})]
    if item["type"] in _UNKNOWN and any(f"{key}.".startswith(f"{path}.") for key in foreign):
        keys = [".".join([path, *below]) for below in _leaves(item["input"])]
        return [answer(schema, ConfigError(f"{where}.{key}" if where else key, _foreign(key, foreign))) for key in keys]
    return [_config_error(schema, item, where)]


def _join_branches(errors: Sequence[ConfigError]) -> list[ConfigError]:
    """One error for each place: of a value that fits no branch of a union, pydantic says why for each. A branch that
    finds a fault inside the value has read the rest."""
    by_place: dict[str, list[str]] = {}
    above = {error.where[:end] for error in errors for end, letter in enumerate(error.where) if letter == "."}
    for error in errors:
        if error.where not in above:
            by_place.setdefault(error.where, []).append(error.what)
    return [ConfigError(place, _one_of(texts)) for place, texts in by_place.items()]


def _one_of(texts: Sequence[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    wanted = [text.rpartition(", got ")[0] or text for text in texts]
    given = texts[-1].removeprefix(wanted[-1])
    return ", or ".join([wanted[0], *(text.removeprefix("input should be ") for text in wanted[1:])]) + given


def _leaves(value: Any) -> list[list[str]]:
    if not isinstance(value, Mapping) or not value:
        return [[]]
    return [[str(key), *below] for key, item in value.items() for below in _leaves(item)]


def _foreign(key: str, known: Sequence[str]) -> str:
    near = nearest_path(key, known)
    return f"unknown key{f'; did you mean {near!r}?' if near else ', and no other name of one'}"


def answer(schema: Any, error: ConfigError) -> ConfigError:
    """``error``; if it is of a key, or of one below it, that ``schema.elsewhere`` has, what that says."""
    for key, place in getattr(schema, ELSEWHERE, {}).items():
        if f"{error.where.removeprefix('config.')}.".startswith(f"{key}.") and error.what.startswith("unknown key"):
            return ConfigError(error.where, f"unknown key; here it is {place}")
    return error


def _config_error(schema: Any, item: Mapping[str, Any], where: str) -> ConfigError:
    path = item["loc"]
    place = ".".join([where, *map(str, path)]) if where else ".".join(map(str, path))
    if item["type"] in _UNKNOWN:
        return ConfigError(place, f"unknown key '{path[-1]}'{_hint_of_key(schema, [*map(str, path)], where)}")
    if item["type"] in _REQUIRED:
        return ConfigError(place, "is required")
    value = without_secrets(item["input"], place)
    text = _no_mapping(schema, path) if item["type"] in _NO_MAPPING else _lower(item["msg"])
    text = "input should be a list, [...]" if item["type"] in _NO_LIST else text
    text = "has to be a mapping" if item["type"] in _NO_DICT else text
    text += f", got {value!r}" if value != HIDDEN else ""
    if isinstance(value, str) and value != HIDDEN and _has_name(schema, path, item["type"]):
        text += f"; did you mean {'.'.join(map(str, path))}.name={value}?"
    return ConfigError(place, text)


def _has_name(schema: Any, path: Sequence[Any], kind: str) -> bool:
    """Return True for a mapping with a key ``name``, for which a text is a usual short form elsewhere."""
    if kind in _NO_MAPPING:
        return "name" in _fields_at(schema, path)
    return kind in _NO_DICT and ".".join(map(str, path)) in getattr(schema, NAMED, ())


def _hint_of_key(schema: Any, path: Sequence[str], where: str) -> str:
    """The nearest key beside an unknown one, or that of its name, or almost so, in another place, as jobs write it."""
    *parents, name = path
    fields, places = _fields_at(schema, parents), dict[str, list[str]]()
    for key, _ in list_keys(schema):
        parts = key.split(".")
        for end in range(1, len(parts) + 1):
            places.setdefault(parts[end - 1], []).append(".".join(parts[:end]))
    near = name if name in places else None if nearest(name, fields) else nearest(name, places, _ALMOST)
    if near is None:
        return hint(name, fields)
    around = "".join(f"{part}." for part in parents)
    found = min(places[near], key=lambda key: (not key.startswith(around), key.count(".")))
    return f"; did you mean '{f'{where}.{found}'.removeprefix('config.').removeprefix('.')}'?"


def _no_mapping(schema: Any, path: Sequence[Any]) -> str:
    optional = ", or null" if type(None) in get_args(_annotation_at(schema, path)) else ""
    return f"has to be a mapping with {', '.join(_fields_at(schema, path))}{optional}"


def _path(item: Mapping[str, Any], values: Any) -> list[Any]:
    """Where an error in ``values`` is, without pydantic's names of the branches of a union: those lead to no other
    value, and a key may be called the same."""
    path: list[Any] = []
    end = len(item["loc"]) - (item["type"] in (*_UNKNOWN, *_REQUIRED))
    for part in item["loc"][:end]:
        inner = _MISSING if values is item["input"] else _value_at(values, part)
        if inner is not _MISSING:
            path, values = [*path, part], inner
    return [*path, *item["loc"][end:]]


def _value_at(values: Any, part: Any) -> Any:
    if isinstance(values, Mapping):
        return next((value for key, value in values.items() if key == part or str(key) == part), _MISSING)
    return values[part] if isinstance(values, list | tuple) and isinstance(part, int) else _MISSING


def _lower(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def list_keys(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key of a schema, and its default as a job file would have it; ``required``."""
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        given = default is not None and default is not dataclasses.MISSING
        (kind,) = nested_dataclasses(type(default) if given else hints[field.name])[:1] or (None,)
        if kind is not None:
            yield from list_keys(kind, f"{prefix}{field.name}.")
        elif default is dataclasses.MISSING:
            yield f"{prefix}{field.name}", "required"
        else:
            yield f"{prefix}{field.name}", "null" if default is None else str(default)


def _is_collection(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping | list)


def _annotation_at(schema: Any, path: Sequence[Any]) -> Any:
    annotation = schema
    for part in path:
        kind, branches = next(iter(nested_dataclasses(annotation)), None), [annotation, *get_args(annotation)]
        plain = next((branch for branch in branches if _is_collection(branch)), None)
        if plain is not None:
            annotation = get_args(plain)[-1]
        elif kind is not None:
            annotation = get_type_hints(kind).get(part, kind)
    return annotation


def _fields_at(schema: Any, path: Sequence[Any]) -> list[str]:
    kinds = nested_dataclasses(_annotation_at(schema, path))[:1]
    return [field.name for kind in kinds for field in dataclasses.fields(kind)]


def complete_values(schema: type[Any], values: Any, where: str) -> Any:
    """Rename the keys of ``values`` to the schema's own, and add its defaults; other values than mappings stay. Raises
    InvalidJob if a value has two names."""
    return _with_defaults(schema, rename_keys(schema, values, where)[0])


def rename_keys(schema: type[Any], values: Any, where: str, later: Sequence[str] = ()) -> tuple[Any, list[str]]:
    """``values`` with the schema's own names of its keys, and a line about each that had another one. Of a value with
    two names the one in ``later`` counts. Raises InvalidJob if none of them is; what it salvages has the own names."""
    lines, errors = [], []
    for alias, target in getattr(schema, OTHER_NAMES, {}).items():
        value = _pick(values, alias.split("."))
        if value is _MISSING:
            continue
        place = f"{where}.{alias}" if where else alias
        name = target.name if isinstance(target, Translation) else target
        values, is_double = _without(values, alias.split(".")), _pick(values, name.split(".")) is not _MISSING
        if is_double and alias not in later:
            errors.append(ConfigError(place, f"is another name of {name}, which is given too"))
            continue
        if isinstance(target, Translation) and value is not None:
            if not isinstance(value, Hashable) or value not in target.values:
                allowed = ", ".join(json.dumps(item) for item in target.values)
                errors.append(ConfigError(place, f"has to be one of {allowed}, got {value!r}; here it is {name}"))
                continue
            value = target.values[value]
            lines.append(f"{place} is read as {name}={value}, its name here")
        else:
            lines.append(f"{place} is read as {name}, its name here")
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
    """A copy without a key, and without mappings that become empty."""
    first, *rest = path
    inner = _without(values[first], rest) if rest else {}
    rest_of_values = {key: value for key, value in values.items() if key != first}
    return {**rest_of_values, first: inner} if inner else rest_of_values


def _with(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy with a key; unchanged where something else than a mapping is in its way, which is an error itself."""
    first, *rest = path
    inner = values.get(first)
    if rest and not isinstance(inner, Mapping | None):
        return dict(values)
    return {**values, first: _with(inner or {}, rest, value) if rest else value}


def _with_defaults(kind: Any, partial: Any, default: Any = None) -> Any:
    """``partial`` values for a dataclass, completed where ``default`` differs from the defaults of the class."""
    if not isinstance(partial, Mapping) or not dataclasses.is_dataclass(kind):
        return partial
    hints, values = get_type_hints(kind), dict(partial)
    for field in (field for field in dataclasses.fields(kind) if field.init):
        usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = usual if default is None else getattr(default, field.name)
        if field.name in partial and dataclasses.is_dataclass(value):
            values[field.name] = _with_defaults(type(value), partial[field.name], value)
        elif field.name in partial:
            values[field.name] = _with_defaults(hints[field.name], partial[field.name])
        elif default is not None and value != usual:
            values[field.name] = value
    return values
