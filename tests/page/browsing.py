# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests in a browser."""

from pathlib import Path


def wait_for_view(page):
    page.wait_for_selector("#content:not([aria-busy]) h1")
    page.wait_for_function("[...document.querySelectorAll('.plot')].every((each) => each.querySelector('canvas'))")


def axe_source():
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
