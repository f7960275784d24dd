# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests in a browser."""

import re
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from tests.support.commands import CLI


@contextmanager
def serve(folder):
    """Serve the runs in ``folder``, as `dlrover-rl view` does, and yield the address."""
    with subprocess.Popen([*CLI, "view", str(folder), "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
        try:
            yield re.search(r"http://\S+", server.stderr.readline())[0]
        finally:
            server.terminate()


def until(page, expression, limit_s=10.0):
    """Wait until an expression is true. Playwright's own wait would evaluate text, which the page's policy forbids."""
    end_s = time.monotonic() + limit_s
    while not page.evaluate(expression):
        assert time.monotonic() < end_s, f"after {limit_s:g} s it is not true that {expression}"
        time.sleep(0.05)


def wait_for_view(page):
    page.wait_for_selector("#content:not([aria-busy]) h1")
    until(page, "[...document.querySelectorAll('.plot')].every((each) => each.querySelector('canvas'))")


def axe_source():
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
