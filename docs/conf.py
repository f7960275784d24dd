"""Sphinx configuration. What can be read off the code is: ``<!-- modules: room -->`` on a page becomes the reference of
the room's modules, ``<!-- fields: module.Class -->`` the table of a configuration's keys."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dlrover" / "python" / "rl"
sys.path.insert(0, str(ROOT))

project = "DLRover RL"
copyright = "DLRover RL contributors, Apache License 2.0"
author = "DLRover RL contributors"
release = "0.1.0"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "DLRover RL"
html_show_sourcelink = False

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Backends live in environments of their own; their engines' pages need no more than their names.
autodoc_mock_imports = ["deepspeed", "megatron", "vllm"]
python_use_unqualified_type_names = True

nitpicky = True
# No network, so nothing outside this package has a page to point to; and names that only an annotation shows.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!dlrover).*\..*"),
    (r"py:(class|obj)", r"dlrover\..*\.([A-Z]|_\w+)"),
    (r"py:.*", r"[A-Z_][A-Za-z_]?|Any|inf|str|int|float|bool|bytes|type|None|list|dict|tuple|set|object"),
    (r"py:.*", r"\w+\[(str|int)"),
    (r"py:class", r"(\\n|\n)"),  # a line's end that stands in a default value
]

_MODULES = re.compile(r"<!-- modules: (\S+) -->")
_FIELDS = re.compile(r"<!-- (own )?fields: (\S+)\.(\w+) -->")
_COMPARISONS = {"Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<="}


def modules_of(room: str) -> list[str]:
    """Dotted names of the public modules of a room, its packages' own docstrings left to the page's introduction."""
    files = sorted(file for file in (PACKAGE / room).rglob("*.py") if not file.name.startswith("_"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]


def list_modules(app, docname, source):
    """Put the reference of each of its modules where a page says ``<!-- modules: room -->``."""

    def reference(match):
        blocks = []
        for name in modules_of(match[1]):
            title = name.removeprefix("dlrover.python.rl.")
            blocks.append(f"## `{title}`\n\n```{{eval-rst}}\n.. automodule:: {name}\n```\n")
        return "\n".join(blocks)

    source[0] = _MODULES.sub(reference, source[0])


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
            f"`{name}: {told}`" for name, told in vars(value).items() if usual[name] not in (told, dataclasses.MISSING)
        ]
        return ", with ".join(["see its table", *own])
    if value in ({}, (), []):
        return "none given"
    if value is None or value == "":
        return "none"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def list_fields(app, docname, source):
    """Put the table of a configuration's keys where a page says ``<!-- fields: module.Class -->``.

    Where it says ``own fields``, the inherited ones are left out.
    """

    def table(match):
        config = getattr(importlib.import_module(match[2]), match[3])
        comments = {}
        for base in [config] if match[1] else reversed(config.__mro__[:-1]):
            told = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
            comments |= {name: text for (where, name), text in told.items() if where == base.__name__}
        types = get_type_hints(config, include_extras=True)
        rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
        for field in dataclasses.fields(config):
            if match[1] and field.name not in config.__annotations__:
                continue
            meaning = " ".join(comments.get(field.name, ["its own table"])).strip().replace("``", "`")
            kind = type_text(types[field.name]).replace("|", "or")
            rows.append(f"| `{field.name.rstrip('_')}` | {kind} | {default_text(field)} | {meaning} |")
        return "\n".join(rows)

    source[0] = _FIELDS.sub(table, source[0])


class Sections(GoogleDocstring):
    """Google's sections, with plain sentences under ``Returns:``: the type stands in the signature."""

    def _consume_returns_section(self, preprocess_types=False):
        return [("", "", self._dedent(self._consume_to_next_section()))]


def google_sections(app, what, name, obj, options, lines):
    """Read ``Args:``, ``Returns:`` and their kin.

    The napoleon extension is not loaded as such: it takes "Divides the logits: 0 is greedy" under a field for a type.
    """
    if what not in ("attribute", "data"):
        kind = "method" if what == "property" else what
        lines[:] = Sections(list(lines), Config(napoleon_use_ivar=True), app, kind, name, obj, options).lines()


def short_names(app, env, node, contnode):
    """Let ``:class:`InvalidJob` `` lead to the only InvalidJob there is, whichever module it is written in."""
    domain = env.domains["py"]
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or "." in target:
        return None
    if len({entry[1].node_id for entry in domain.find_obj(env, None, None, target, None, 1)}) != 1:
        return None
    node["refspecific"] = True
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, contnode)


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", list_modules)
    app.connect("source-read", list_fields)
    app.connect("autodoc-process-docstring", google_sections)
    app.connect("missing-reference", short_names)
