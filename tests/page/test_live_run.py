# SPDX-License-Identifier: Apache-2.0
"""A job on Ray is watched while one of its workers is killed."""

import os
import signal
import subprocess
import time

import pytest

from tests.chaos.outside import REPOSITORY, prepare, victims
from tests.page.browsing import until, wait_for_view
from tests.support.commands import CLI, serve_page

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.needs("playwright")]


@pytest.fixture
def live_run(tmp_path, monkeypatch):
    """The process of a run, and its folder, once it has metrics of some steps."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    folder = tmp_path / "run"
    command = [*CLI, "run", str(REPOSITORY / "examples/arithmetic/grpo.yaml"), "steps=400", f"job_dir={folder}"]
    with open(tmp_path / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        metrics = folder / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 3):
            time.sleep(0.2)
        yield process, folder
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_kill_of_a_worker_is_marked_within_five_seconds(open_page, live_run):
    process, folder = live_run
    with serve_page(folder) as (site, _):
        page = open_page(site)
        page.wait_for_selector("#connection.live")
        for view in ("run", "step", "samples", "evaluations", "events", "curves"):
            page.goto(f"{site}#{view}/.")
            until(page, f"route.view === '{view}'")
            wait_for_view(page)
            assert page.locator(".state.error").count() == 0
        rollout = next(pid for pid, name in victims(process.pid).items() if "rollout" in name.lower())
        os.kill(rollout, signal.SIGKILL)
        began_s = time.monotonic()
        row = page.locator("section tbody tr", has_text="recovery")
        row.wait_for(timeout=5000)
        assert time.monotonic() - began_s < 5 and "ROLLOUT[" in row.inner_text()
        until(page, "!document.querySelector('section tbody').innerText.includes('under way')", 60.0)
        page.close()  # before its server ends
