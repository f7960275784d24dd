# SPDX-License-Identifier: Apache-2.0
"""The page in Debian's chromium: a server over folders of runs, and pages that must not log an error."""

import subprocess

import pytest

from tests.page.browsing import wait_for_view
from tests.page.run_folders import write_runs
from tests.support.commands import CLI, serve_page

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The folders of the runs ``grpo`` (live), ``grpo-large`` and ``ppo`` (failed)."""
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def site(runs):
    """The address of a server of the three runs."""
    (root,) = {folder.parent for folder in runs.values()}
    with serve_page(root) as (address, _):
        yield address


@pytest.fixture(scope="session")
def exported(runs, tmp_path_factory):
    """The address of the exported file of the failed run, whose texts are hostile."""
    file = tmp_path_factory.mktemp("export") / "run.html"
    subprocess.run([*CLI, "view", str(runs["ppo"]), "--export", str(file)], check=True, timeout=60)
    return file.as_uri()


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright  # installed by `make test-page`

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """A function that opens an address and waits until its view is shown; the console must have no error."""
    contexts, errors = [], []

    def open_address(address, width=1280, height=800, dark=False):
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        wait_for_view(page)
        return page

    yield open_address
    for context in contexts:
        context.close()
    assert errors == []
