# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests in a browser."""

from pathlib import Path

from tests.support.commands import wait_for


def until(page, expression, limit_s=10.0):
    """Wait until an expression is true. Playwright's own wait would evaluate text, which the page's policy forbids."""
    wait_for(lambda: page.evaluate(expression), limit_s)


def wait_for_view(page):
    page.wait_for_selector("#content:not([aria-busy]) h1")
    until(page, "[...document.querySelectorAll('.plot')].every((each) => each.querySelector('canvas'))")


def axe_source():
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
