# SPDX-License-Identifier: Apache-2.0
"""GitHub shows what the site shows: generated parts of pages are text, and relative links and anchors exist."""

import posixpath
import re
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from test_repository import ROOT, git_files

from docs.generate import generate, outdated_pages, remove_generated
from tests.feature_table import ABSENT, QUICKLY, SECTIONS, features, shown
from tests.feature_table import PAGE as FEATURES
from tests.feature_table import page as features_page

MARKDOWN = MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=6)
"""Headings get the ids that GitHub gives them."""
UNSHOWN = re.compile(
    r"^(?:<!-- (?:/?generated|(?:own )?fields|keys)\b.*|`{3,}\{(?:literal)?include\}.*|\([\w-]+\)=)$", re.M
)
"""Lines that Sphinx would have to replace, and marks of a generated part without its other end."""
CONFIGS = "dlrover.python.rl.config.spec"
RECIPES = "dlrover.python.rl.recipe"


def page_texts():
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in git_files("*.md")}


def with_folders(files):
    """The files, and all folders above them; ``.`` is the root."""
    parents = {posixpath.dirname(file) for file in files}
    return {*files, *(with_folders(parents) if parents - {""} else {"."})}


def tokens_of(text):
    for token in MARKDOWN.parse(text):
        yield token
        yield from token.children or ()


def broken_links(pages, files):
    """A message for each relative link or image of ``pages`` whose file or anchor does not exist."""
    tokens = {name: list(tokens_of(text)) for name, text in pages.items()}
    anchors = {name: {token.attrs.get("id") for token in page} for name, page in tokens.items()}
    for name, page in tokens.items():
        for link in filter(None, (token.attrs.get("href") or token.attrs.get("src") for token in page)):
            parts = urlsplit(unquote(link))
            if parts.scheme or parts.netloc:
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), parts.path)) if parts.path else name
            if target not in files:
                yield f"{name}: {link}: no such file"
            elif parts.fragment and parts.fragment not in anchors.get(target, ()):
                yield f"{name}: {link}: no such heading"


def test_generated_parts_of_pages_are_up_to_date():
    outdated = [str(page.relative_to(ROOT)) for page, _ in outdated_pages()]
    assert not outdated, f"run `python -m docs.generate` for {', '.join(outdated)}"


def test_pages_have_nothing_for_sphinx_alone():
    lines = {name: UNSHOWN.findall(remove_generated(text)) for name, text in page_texts().items()}
    assert {name: faults for name, faults in lines.items() if faults} == {}


def test_relative_links_and_anchors_of_pages_exist():
    assert list(broken_links(page_texts(), with_folders(git_files()))) == []


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("code docs/guides/own_data/sums.jsonl", '```json\n{"prompt": '),
        ("code docs/guides/own_data/sft.yaml", "```yaml\n"),
        ("page benchmarks/results/dispatch.md", "| workers | call"),
        (f"fields {CONFIGS}.LivenessSpec", "| `beat_s` | float > 0 | `"),
        (f"own fields {RECIPES}.dpo.DPOConfig", "|---|---|---|---|\n| `data` | mapping |"),
        (f"keys {RECIPES}.dpo.DPOConfig", "| `optimizer.lr`<br>float > 0; default `"),
    ],
)
def test_generate_replaces_a_part_and_nothing_else(part, expected):
    page = f"# Title\n\n<!-- generated: {part} -->\nOLD\n<!-- /generated -->\n\nEnd.\n"
    text = generate(page)
    before, _, after = page.partition("OLD")
    assert text.startswith(f"{before}\n") and text.endswith(f"\n{after}") and "OLD" not in text
    assert f"\n{expected}" in text and generate(text) == text
    remainder = remove_generated(text)
    assert remainder.split() == ["#", "Title", "End."] and remainder.count("\n") == text.count("\n")


def test_page_with_an_old_part_is_outdated(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: code docs/guides/own_data/sft.yaml -->\n<!-- /generated -->\n", encoding="utf-8")
    ((path, text),) = outdated_pages(tmp_path)
    path.write_text(text, encoding="utf-8")
    assert path == page and list(outdated_pages(tmp_path)) == []


@pytest.mark.parametrize(
    "line",
    [
        "<!-- fields: a.B -->", "<!-- own fields: a.B -->", "<!-- keys: a.B -->", "<!-- generated: keys a.B -->",
        "<!-- /generated -->", "```{literalinclude} a.py", "````{include} a.md", "(a-target)=",
    ],
)  # fmt: skip
def test_line_for_sphinx_alone_is_seen(line):
    text = f"# Title\n{line}\nText.\n<!-- generated: code a.py -->\n```{{include}} b\n<!-- /generated -->\n"
    assert UNSHOWN.findall(remove_generated(text)) == [line]


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("[a](other.md#two-words-a_b), [a](other.md#two-words-a_b-1), [a](other.md#role), [a](other.md)", ""),
        ("[a](#here)", ""),
        ("[a](../x.py), [a](../docs), [a](..), ![a](<../a%20b.png>)", ""),
        ("[a](https://x.org/no.md#no), <mailto:a@x.org>", ""),
        ("`[a](no.md)`\n\n```text\n[a](no.md)\n```", ""),
        ("[a](no.md)", "no.md: no such file"),
        ("| [a](docs/other.md) |\n|---|", "docs/other.md: no such file"),
        ("[a][b]\n\n[b]: no.md", "no.md: no such file"),
        ("[a](#no)", "#no: no such heading"),
        ("[a](other.md#Two-Words-a_b)", "other.md#Two-Words-a_b: no such heading"),
        ("[a](other.md#two-words-a_b-2)", "other.md#two-words-a_b-2: no such heading"),
        ("[a](../x.py#no)", "../x.py#no: no such heading"),
    ],
)
def test_broken_link_is_named(link, fault):
    other = "# Two words: `a_b`!\n## Two *words* a_b\n### &lt;role&gt;\n"
    pages = {"docs/page.md": f"# Here\n{link}\n", "docs/other.md": other}
    files = with_folders({*pages, "x.py", "a b.png"})
    assert list(broken_links(pages, files)) == ([f"docs/page.md: {fault}"] if fault else [])


# -- the page of features ---------------------------------------------------------------------------------------------


def test_every_feature_has_a_test():
    names, tests = features(), shown()
    assert list(names) == list(range(1, 160))
    assert set(names) - set(tests) == set(ABSENT)
    assert set(tests) <= set(names), "numbers of no feature"


def test_feature_to_be_shown_quickly_has_a_quick_test():
    quick = shown(slow=False)
    for title, (first, *names) in SECTIONS.items():
        if title[0] in QUICKLY:
            slow = [number for number in range(first, first + len(names)) if number not in quick]
            assert set(slow) <= set(ABSENT), title


def test_page_of_features_is_up_to_date():
    assert FEATURES.read_text(encoding="utf-8") == features_page(), "write it again: python -m tests.feature_table"
