# SPDX-License-Identifier: Apache-2.0
"""``python -m docs.generate`` writes the generated parts of all pages: they are committed, so that GitHub shows them.

A part stands between ``<!-- generated: KIND SOURCE -->`` and ``<!-- /generated -->``:

* ``code examples/x.py``: a fenced block with a file, named from the root of the repository.
* ``page benchmarks/results/x.md``: a Markdown file.
* ``fields module.Class``: a table of the fields of a configuration class; ``own fields``: the inherited ones left out.
* ``keys module.Class``: a table of all its dotted keys, nested classes included.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs"

_PART = re.compile(
    r"^(<!-- generated: ([a-z ]+) (\S+) -->\n)(?:(?!<!-- generated).)*?^(<!-- /generated -->)$",
    re.DOTALL | re.MULTILINE,
)
_COMPARISONS = {"Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<="}
_LANGUAGES = {".jsonl": "json", ".py": "python"}


def generate(text: str) -> str:
    """Return a page with its generated parts written from their sources."""
    return _PART.sub(lambda part: f"{part[1]}\n{_WRITERS[part[2]](part[3])}\n\n{part[4]}", text)


def remove_generated(text: str) -> str:
    """Return a page without its generated parts; their lines are empty."""
    return _PART.sub(lambda part: "\n" * part[0].count("\n"), text)


def outdated_pages(root: Path = PAGES) -> Iterator[tuple[Path, str]]:
    """Yield each page that differs from its sources, with the text that it should have."""
    for page in sorted(root.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (generated := generate(text)) != text:
            yield page, generated


def code_block(path: str) -> str:
    suffix = Path(path).suffix
    return f"```{_LANGUAGES.get(suffix, suffix[1:])}\n{markdown(path)}\n```"


def markdown(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8").rstrip()


def type_text(kind: Any) -> str:
    """Describe a field's type for people: ``int > 0``, ``'CPU' or 'GPU'``."""
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        names = [(rule, type(rule).__name__) for rule in arguments[1:]]
        # Equal types are cached, and 0 equals 0.0: both are written alike.
        bounds = [f"{_COMPARISONS[name]} {getattr(rule, name.lower()):.12g}" for rule, name in names]
        return " ".join([type_text(arguments[0]), *(bound for bound in bounds if "inf" not in bound)])
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, arguments))
    if kind is type(None):
        return "none"
    if kind is Any:
        return "anything"
    if dataclasses.is_dataclass(kind):
        return "mapping"
    if get_origin(kind) in (Union, UnionType):  # equal unions are cached, in the order of the first one in the process
        return " or ".join(sorted(map(type_text, arguments), key=lambda text: (text == "none", len(text), text)))
    arguments = tuple(part for part in arguments if part is not ...)
    if arguments:
        name = get_origin(kind).__name__.replace("Mapping", "mapping").replace("tuple", "list")
        inner = [type_text(part) for part in (arguments if name == "mapping" else dict.fromkeys(arguments))]
        return f"{name} of {' to '.join(inner) if name == 'mapping' else ', '.join(inner)}"
    return kind.__name__


def default_text(field: dataclasses.Field[Any]) -> str:
    """Describe a field's default as a job file writes it."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(value):
        usual = {part.name: part.default for part in dataclasses.fields(value)}
        own = [
            f"`{name}: {item}`" for name, item in vars(value).items() if usual[name] not in (item, dataclasses.MISSING)
        ]
        return ", with ".join(["see its table", *own])
    if value in ({}, (), []):
        return "none given"
    if value is None or value == "":
        return "none"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def field_comments(config: type, own: bool = False) -> dict[str, str]:
    """Map each field of a configuration class to the string below it."""
    comments = {}
    for base in [config] if own else reversed(config.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for pair in pairwise(definition.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    comments[name] = " ".join(text.split())
    return {name: text.replace("``", "`").replace("|", "or") for name, text in comments.items()}


def field_table(config: type, own: bool = False) -> str:
    comments, types = field_comments(config, own), get_type_hints(config, include_extras=True)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(config):
        if not own or field.name in config.__annotations__:
            kind, meaning = type_text(types[field.name]).replace("|", "or"), comments.get(field.name, "its own table")
            rows.append(f"| `{field.name.rstrip('_')}` | {kind} | {default_text(field)} | {meaning} |")
    return "\n".join(rows)


def key_table(config: type) -> str:
    return "\n".join(["| key | meaning |", "|---|---|", *key_rows(config)])


def key_rows(config: type, prefix: str = "") -> Iterator[str]:
    """Yield a row for each dotted key of a configuration class, with its default in a job that names none."""
    comments, types = field_comments(config), get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        key, kind = f"{prefix}{field.name.rstrip('_')}", types[field.name]
        nested = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and dataclasses.is_dataclass(part)]
        if nested and get_origin(kind) is not Mapping:
            yield from key_rows(nested[0], f"{key}.")
        else:
            default = default_text(field)
            default = default if default == "required" else f"default {default}"
            yield f"| `{key}`<br>{type_text(kind).replace('|', 'or')}; {default} | {comments.get(field.name, '')} |"


def load_class(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


_WRITERS = {
    "code": code_block,
    "page": markdown,
    "fields": lambda name: field_table(load_class(name)),
    "own fields": lambda name: field_table(load_class(name), own=True),
    "keys": lambda name: key_table(load_class(name)),
}


def main() -> None:
    for page, text in outdated_pages():
        page.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
