# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests in a browser."""

import re
import subprocess
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


def wait_for_view(page):
    page.wait_for_selector("#content:not([aria-busy]) h1")
    page.wait_for_function("[...document.querySelectorAll('.plot')].every((each) => each.querySelector('canvas'))")


def axe_source():
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
