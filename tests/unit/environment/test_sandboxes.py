# SPDX-License-Identifier: Apache-2.0
"""Programs that a model wrote run in a container or on a service of the user, chosen by name."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from dlrover.python.rl.common.errors import VerifierError
from dlrover.python.rl.environment.sandbox import confinement
from dlrover.python.rl.environment.sandbox.confinement import SETTING, ProgramLimits
from dlrover.python.rl.environment.sandbox.containers import IMAGE_SETTING
from dlrover.python.rl.environment.verifiers.code import python_tests, run_python
from tests.support import remote_sandbox
from tests.support.manual_clock import within

REMOTE = "tests.support.remote_sandbox:Remote"
LIMITS = ProgramLimits(timeout_s=60.0)


@pytest.fixture(autouse=True)
def _chosen_again():
    confinement.confinement.cache_clear()
    yield
    confinement.confinement.cache_clear()


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A stand-in of Docker's command line, which refuses unexpected arguments."""
    script = tmp_path / "bin/docker"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\n{Path(remote_sandbox.__file__).read_text()}")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")


@pytest.fixture(params=[REMOTE, "docker", "podman"])
def sandbox(request, monkeypatch):
    """Each sandbox by its name; podman itself, where it is installed and has the image."""
    if request.param == "docker":
        request.getfixturevalue("docker")
    if request.param == "podman" and (not shutil.which("podman") or confinement._find_sandbox_fault("podman")):
        pytest.skip("podman does not run here")
    monkeypatch.setenv(SETTING, request.param)
    return request.param


def test_program_reads_and_prints_in_a_sandbox(sandbox):
    ran = run_python("import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\nsys.exit(3)", "abc\n", LIMITS)
    assert (ran.stdout, ran.stderr, ran.code) == ("cba\n", "oh\n", 3)
    assert (confinement.confinement(), confinement.sandbox_level()) == (sandbox, "external")


@pytest.mark.feature(98)
@pytest.mark.parametrize(("body", "reward"), [("2 * x", 1.0), ("3 * x", 0.0), ("print('x') or 2 * x", 1.0)])
def test_tests_of_a_program_run_in_a_sandbox(sandbox, body, reward):
    completion = f"```python\nprint('loaded')\ndef double(x): return {body}\n```"
    info = {"tests": "assert double(2) == 4\nassert double(-1) == -2", "timeout_s": 60}
    assert python_tests(completion, None, info) == reward


def test_program_in_a_sandbox_has_limits(sandbox):
    ran = run_python("while True: print('x' * 1000)", limits=ProgramLimits(timeout_s=30.0, output_bytes=1 << 16))
    assert not ran.succeeded and len(ran.stdout) <= 1 << 16
    with within(40):
        assert run_python("import time; time.sleep(90)", limits=ProgramLimits(timeout_s=5.0)).timed_out


CONFINED = {
    "a file of the user": "open({file!r})",
    "a file beside it": "open('/usr/new', 'w')",
    "a connection": "import socket; socket.create_connection(('127.0.0.1', 1), 3)",
    "much memory": "taken = bytearray(2 << 30)",
    "much disk": "open('large', 'wb').write(bytes(4 << 20))",
    "many processes": "import os\nfor n in range(100):\n    if os.fork() == 0: import time; time.sleep(9); os._exit(0)",
}


@pytest.mark.parametrize("sandbox", ["podman"], indirect=True)  # a stand-in confines nothing
@pytest.mark.parametrize("program", CONFINED)
def test_container_confines_its_program(sandbox, program, tmp_path, monkeypatch):
    (tmp_path / "private").write_text("secret")
    ran = run_python(CONFINED[program].format(file=str(tmp_path / "private")) + "\nprint('done')", limits=LIMITS)
    assert "done" not in ran.stdout and ran.code != 0


def test_image_of_containers_is_chosen_by_the_environment(docker, monkeypatch):
    monkeypatch.setenv(SETTING, "docker")
    monkeypatch.setenv(IMAGE_SETTING, "mine")
    assert run_python("print(1)", limits=LIMITS).stdout == "1\n"
    monkeypatch.setenv(IMAGE_SETTING, "other")
    confinement.confinement.cache_clear()
    with pytest.raises(VerifierError, match="(?s)docker, but cannot run programs: .*other"):
        run_python("print(1)")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("firejail", "no sandbox is called 'firejail'; there are bubblewrap, docker, limits, podman"),
        ("podmann", "did you mean 'podman'"),
        ("tests.support.remote_sandbox:Remot", "did you mean 'Remote'"),
        ("tests.support.remote_sandbox:Broken", "the service is away"),
    ],
)
def test_sandbox_that_cannot_run_programs_is_an_error(monkeypatch, name, fault):
    monkeypatch.setenv(SETTING, name)
    with pytest.raises(VerifierError, match=fault):
        confinement.confinement()
    assert confinement.sandbox_level() == "none"
