# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration.

Reference tables are generated from the code: ``<!-- fields: module.Class -->`` on a page becomes the table of one
configuration class, and ``<!-- keys: module.Class -->`` the table of all its dotted keys, with those of nested classes.
The pages of ``api/`` name each public class and function; all others are internal and have no page.
"""

import dataclasses
import importlib
import pkgutil
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dlrover.rl  # noqa: E402

project = "DLRover RL"
copyright = "The DLRover RL authors, Apache License 2.0"
author = "The DLRover RL authors"
release = "0.1.0"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "DLRover RL"
html_show_sourcelink = False

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # those of torch refer to pages of torch
python_use_unqualified_type_names = True

nitpicky = True
suppress_warnings = ["ref.python"]  # the annotation `type` matches every field of that name
# No network, so nothing outside this package has a page to point to; and names that only an annotation shows.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!dlrover).*\..*"),
    (r"py:(class|obj)", r"dlrover\..*\.([A-Z]|_\w+)"),
    (
        r"py:.*",
        r"[A-Z_][A-Za-z_]?|Any|DataFrame|Future|inf|str|int|float|bool|bytes|type|None|list|dict|tuple|set|object",
    ),
    (r"py:.*", r"(\w+ \| )?(\w+\[)+(str|int|float)"),
    (r"py:class", r"Literal\[.*"),
    (r"py:class", r"(\\n|\n)"),  # a line's end that stands in a default value
]

_FIELDS = re.compile(r"<!-- (own )?fields: (\S+)\.(\w+) -->")
_KEYS = re.compile(r"<!-- keys: (\S+)\.(\w+) -->")
_COMPARISONS = {"Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<="}


def type_text(kind: Any) -> str:
    """A field's type for people: ``int > 0``, ``'CPU' or 'GPU'``."""
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        names = [(rule, type(rule).__name__) for rule in arguments[1:]]
        bounds = [f"{_COMPARISONS[name]} {getattr(rule, name.lower())}" for rule, name in names]
        return " ".join([type_text(arguments[0]), *(bound for bound in bounds if "inf" not in bound)])
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, arguments))
    if kind is type(None):
        return "none"
    if kind is Any:
        return "anything"
    if dataclasses.is_dataclass(kind):
        return "mapping"
    if type(None) in arguments:
        return " or ".join(type_text(part) for part in arguments)
    arguments = tuple(part for part in arguments if part is not ...)
    if arguments:
        name = get_origin(kind).__name__.replace("Mapping", "mapping").replace("tuple", "list")
        inner = [type_text(part) for part in (arguments if name == "mapping" else dict.fromkeys(arguments))]
        return f"{name} of {' to '.join(inner) if name == 'mapping' else ', '.join(inner)}"
    return kind.__name__


def default_text(field: dataclasses.Field) -> str:
    """A field's default as a job file would write it."""
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
    """The string below each field of a configuration class, by the field's name."""
    comments = {}
    for base in [config] if own else reversed(config.__mro__[:-1]):
        attributes = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
        comments |= {name: " ".join(text) for (where, name), text in attributes.items() if where == base.__name__}
    return {name: " ".join(text.split()).replace("``", "`").replace("|", "or") for name, text in comments.items()}


def field_row(key: str, kind: Any, field: dataclasses.Field, meaning: str) -> str:
    return f"| `{key}` | {type_text(kind).replace('|', 'or')} | {default_text(field)} | {meaning} |"


HEAD = ["| key | type | default | meaning |", "|---|---|---|---|"]


def list_fields(app, docname, source):
    """Put the table of a configuration's keys where a page says ``<!-- fields: module.Class -->``.

    Where it says ``own fields``, the inherited ones are left out.
    """

    def table(match):
        config = getattr(importlib.import_module(match[2]), match[3])
        comments = field_comments(config, own=bool(match[1]))
        types = get_type_hints(config, include_extras=True)
        fields = [field for field in dataclasses.fields(config) if not match[1] or field.name in config.__annotations__]
        rows = [
            field_row(field.name.rstrip("_"), types[field.name], field, comments.get(field.name, "its own table"))
            for field in fields
        ]
        return "\n".join([*HEAD, *rows])

    source[0] = _FIELDS.sub(table, source[0])


def key_rows(config: type, prefix: str = "") -> list[str]:
    """A row for each dotted key of a configuration class, with its default in a job that names none."""
    comments, types = field_comments(config), get_type_hints(config, include_extras=True)
    rows = []
    for field in dataclasses.fields(config):
        key, kind = f"{prefix}{field.name.rstrip('_')}", types[field.name]
        nested = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and dataclasses.is_dataclass(part)]
        if nested and get_origin(kind) is not Mapping:
            rows += key_rows(nested[0], f"{key}.")
        else:
            default = default_text(field)
            about = (
                f"{type_text(kind).replace('|', 'or')}; {default if default == 'required' else f'default {default}'}"
            )
            rows.append(f"| `{key}`<br>{about} | {comments.get(field.name, '')} |")
    return rows


def list_keys(app, docname, source):
    """Put the table of all dotted keys where a page says ``<!-- keys: module.Class -->``."""

    def table(match):
        config = getattr(importlib.import_module(match[1]), match[2])
        return "\n".join(["| key | meaning |", "|---|---|", *key_rows(config)])

    source[0] = _KEYS.sub(table, source[0])


class Sections(GoogleDocstring):
    """Google's sections, with plain sentences under ``Returns:``: the type stands in the signature."""

    def _consume_returns_section(self, preprocess_types=False):
        return [("", "", self._dedent(self._consume_to_next_section()))]


def google_sections(app, what, name, obj, options, lines):
    """Read ``Args:``, ``Returns:`` and the other sections.

    The napoleon extension is not loaded as such: it reads "Divides the logits: 0 is greedy" under a field as a type.
    """
    if what not in ("attribute", "data"):
        kind = "method" if what == "property" else what
        lines[:] = Sections(list(lines), Config(napoleon_use_ivar=True), app, kind, name, obj, options).lines()


def is_defined(name: str) -> bool:
    """Return True if the dotted ``name`` is a module, or an attribute that can be reached from one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return True


def short_names(app, env, node, contnode):
    """Link :class:`InvalidJob` to the only class of that name on an API page, whichever module defines it.

    The name of an internal object is shown without a link; one that does not exist stays a warning.
    """
    domain, target = env.domains["py"], node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    name = target.rpartition(".")[2]
    is_class = name[:1].isupper() and target.startswith("dlrover.")
    entries = domain.find_obj(env, None, None, name, None, 1) if is_class or "." not in target else []
    if len({entry[1].node_id for entry in entries}) == 1:
        node["refspecific"] = True
        link = domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], name, node, contnode)
        if link is not None:
            return link
    module, owner = node.get("py:module"), node.get("py:class")
    places = [target, f"{module}.{target}", f"{module}.{owner}.{target}"]
    return contnode if any(is_defined(place) for place in places if place.startswith("dlrover.")) else None


def setup(app):
    """Called by Sphinx."""
    for name in ("GRPOTrainer", "SFTTrainer"):  # autodoc shows a class of another name as an alias without members
        getattr(dlrover.rl, name).__name__ = name
    app.connect("source-read", list_fields)
    app.connect("source-read", list_keys)
    app.connect("autodoc-process-docstring", google_sections)
    app.connect("missing-reference", short_names)
