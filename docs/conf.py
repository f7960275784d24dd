# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration.

The pages of ``api/`` name each public class and function; all others are internal and have no page.
"""

import pkgutil
import sys
from pathlib import Path

from sphinx.ext.napoleon import Config, GoogleDocstring

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
    app.connect("autodoc-process-docstring", google_sections)
    app.connect("missing-reference", short_names)
