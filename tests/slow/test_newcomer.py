# SPDX-License-Identifier: Apache-2.0
"""The first job of ``docs/guides/service.md``, typed as the page has it, with the command line only."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "service.md"


def blocks(heading, language="shell"):
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    fence = rf"^```{language}\n(.*?)^```$"
    return [text.splitlines() for text in re.findall(fence, section, re.MULTILINE | re.DOTALL)]


class Shell:
    """A terminal. The port of the page may be taken here, so another one is typed."""

    def __init__(self, folder, port):
        self.folder, self.port, self.service = folder, port, None
        self.home = folder.with_name(f"{folder.name}-home")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "HOME": str(self.home), "PATH": path}
        self.home.mkdir()

    def type(self, line, wait=True):
        line = line.replace("8470", str(self.port))
        words = shlex.split(line)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.environment[name] = value
            return ""
        options = {"cwd": self.folder, "env": self.environment, "text": True, "start_new_session": True}
        with open(self.folder / "terminal.log", "a") as log:
            options |= {"stdout": subprocess.PIPE if wait else log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen([word for word in words if word != "&"], **options)
        if not wait:
            return process
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, f"{line}\n{output}"
        return output

    def status(self, name):
        return json.loads(self.type(f"dlrover-rl status {name} --json"))


@pytest.fixture
def shell(tmp_path):
    shell = Shell(tmp_path, 18470)
    yield shell
    if shell.service is not None and shell.service.poll() is None:
        shell.service.terminate()
        assert shell.service.wait(120) == 0


def test_first_job_of_the_page_runs_as_typed(shell):
    begin, during, end = blocks("The first job")
    for line in begin:
        if line.startswith("dlrover-rl serve"):
            shell.service = shell.type(line, wait=False)
            wait_for((shell.home / ".dlrover-rl/service/address").exists)
        elif line.startswith("dlrover-rl attach"):
            wait_for(lambda: shell.status("first")["step"] >= 1)
            attached = shell.type(line, wait=False)
            wait_for(lambda: "\nfirst  step" in (shell.folder / "terminal.log").read_text())
            os.killpg(attached.pid, signal.SIGINT)
            assert attached.wait(30) == 0
        else:
            shell.type(line)
    assert shell.status("first")["phase"] == "running"
    wait_for(lambda: shell.status("second")["step"] >= 1)
    sizes = []
    for line in during:
        began_s = time.monotonic()
        output = shell.type(line)
        if " logs " in line:
            assert output.strip()
        if " stop " in line:
            assert "second: stopped" in output and time.monotonic() - began_s < 15
        if " resize " in line:
            sizes.append(shell.status("first")["roles"]["ROLLOUT"])
            step = shell.status("first")["step"]
            wait_for(lambda step=step: shell.status("first")["step"] >= step + 2)
    assert sizes == [3, 2]
    outputs = {line.split()[1]: shell.type(line) for line in end}
    assert "finished" in outputs["wait"] and "finished" in outputs["explain"]
    assert (shell.folder / "results/model/config.json").exists()
    assert list((shell.folder / "results/model").glob("*.safetensors"))
    (metrics,) = {path.resolve() for path in shell.folder.rglob("first/*/metrics.jsonl")}
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert sorted(set(steps)) == list(range(201))
    (program,) = blocks("Clients", "python")
    (shell.folder / "watch.py").write_text("\n".join(program).replace("8470", str(shell.port)))
    events = shell.type(f"{sys.executable} watch.py").splitlines()
    numbers = [int(event.split()[0]) for event in events]
    assert numbers == sorted(set(numbers)) and events[-1].split()[1] == "finished"
    assert sum(event.split()[1] == "resized" for event in events) == 2
    for line in blocks("Who may do what")[0]:
        shell.type(line)
