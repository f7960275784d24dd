# SPDX-License-Identifier: Apache-2.0
"""Roles in the interpreter of another environment: what is checked before they start, and by which interpreter."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.layout import job_from_mapping, job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.master.job import check_job
from dlrover.python.rl.recipe import launch
from dlrover.python.rl.runtime.member.inspection import inspect_in_child
from dlrover.python.rl.runtime.member.interpreters import find_fault
from dlrover.python.rl.runtime.ray.cluster.api import ActorPlacement, ActorRequest
from dlrover.python.rl.runtime.ray.processes.actors import member_env
from tests.support.other_environments import make_environment

OWN = "{}.{}".format(*sys.version_info)

CLASSES = """
from dlrover.rl import BaseWorkload
from dlrover.python.rl.common.errors import ConfigError

class Elsewhere(BaseWorkload):
    needs_own_process = True

    @classmethod
    def check_config(cls, config):
        import only_there

        if config.number != only_there.NUMBER:
            yield ConfigError("config.number", f"must be {only_there.NUMBER}")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def number(self):
        pass
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return str(make_environment(tmp_path_factory.mktemp("other")))


def job_with(python, number=41, trainer="Loop"):
    Path("classes.py").write_text(CLASSES)
    toys = {"module": "tests.support.toy_jobs", "class": "Adder"}
    roles = {"actor": toys, "reward": {"module": "classes", "class": "Elsewhere", "python": str(python)}}
    about_trainer = {**toys, "class": trainer, "device_type": "CPU", "device_per_node": 2}
    data = {"trainer": about_trainer, "workload": roles, "config": {"number": number}}
    return job_from_mapping(OmegaConf.create(data), "apart", (str(Path.cwd()),))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # for the toys


def test_environment_of_the_test_finds_the_package_only_beside(other, monkeypatch):
    """Otherwise the tests below would pass without the path that a worker gets."""
    monkeypatch.delenv("PYTHONPATH")
    ended = subprocess.run([other, "-c", "import dlrover.rl"], capture_output=True, text=True, check=False, timeout=60)
    assert "No module named 'dlrover'" in ended.stderr
    assert find_fault(other) == ""


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("exit 3", "is no Python 3: exit code 3, no output"),
        ("echo hello", "is no Python 3: exit code 0, hello"),
        ("""echo '{"python": "3.9"}'""", f"is Python 3.9, and the job's is {OWN}: both need the same minor version"),
        (
            f"""echo '{{"python": "{OWN}", "error": "ImportError: no ray"}}'""",
            "cannot import Ray (ImportError: no ray)",
        ),
        (f"""echo '{{"python": "{OWN}", "ray": "2.52.0"}}'""", f"has Ray 2.52.0, and the job has {ray.__version__}"),
        (
            f"""echo '{{"python": "{OWN}", "ray": "{ray.__version__}", "error": "ImportError: no yaml"}}'""",
            "lacks what a worker imports (ImportError: no yaml)",
        ),
    ],
)
def test_find_fault_of_a_program_names_what_differs(tmp_path, script, fault):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert find_fault(str(program)).startswith(fault)
    program.chmod(0o644)
    assert find_fault(str(program)) == "is not executable"


def test_find_fault_of_a_folder_names_its_python(other):
    folder = Path(other).parents[1]
    assert find_fault(str(folder)) == f"is a folder: did you mean {other}?"
    assert find_fault(str(folder / "lib")) == "is a folder"
    assert find_fault(str(folder / "pythn")) == "does not exist"


def test_role_is_inspected_by_its_interpreter_alone(other):
    inspection = inspect_in_child(job_with(other))
    assert inspection.errors == ()
    assert "number" in inspection.methods["REWARD"]
    assert (inspection.collectives, set(inspection.stateful)) == (("REWARD",), {"ACTOR", "REWARD"})
    (error,) = inspect_in_child(job_with(other, number=3)).errors
    assert str(error) == "config.number: must be 41"
    (error,) = inspect_in_child(job_with("")).errors
    assert "check_config raised ModuleNotFoundError: No module named 'only_there'" in str(error)
    job = job_with(other)
    Path("classes.py").write_text(f"import only_there{CLASSES}")
    (error,) = inspect_in_child(job).errors
    assert str(error).startswith("workload.reward.class: module 'classes' cannot be imported: no module named")
    assert str(error).endswith("so let its methods import what only the role's environment has")


def test_unfit_interpreter_is_an_error_of_its_role(tmp_path):
    (error,) = inspect_in_child(job_with("no/python")).errors
    assert str(error) == f"workload.reward.python: {tmp_path}/no/python does not exist"


def test_roles_in_one_process_cannot_have_an_interpreter(other):
    with pytest.raises(InvalidJob, match=r"workload\.reward\.python: needs separate processes, so not in one process"):
        check_job(job_with(other), local=True)
    with pytest.raises(InvalidJob, match=r"workload\.reward\.python: needs separate processes, so not under torchrun"):
        launch.check_job(lambda: job_with(other), launch.LaunchEnv())


def test_workers_of_the_role_alone_get_interpreter_and_path(other):
    job = job_with(other)
    assert load_job_text(job_to_yaml(job), "apart", search_path=job.search_path).workloads == job.workloads
    assert "PYTHONPATH" not in member_env(job, "ACTOR")
    env = member_env(job, "REWARD")
    assert [path.name for path in Path(env["PYTHONPATH"]).iterdir() if path.name != "__pycache__"] == ["dlrover"]
    request = ActorRequest("", object, (), env, ActorPlacement(), python="/my env/bin/python")
    assert shlex.split(request.runtime_env()["py_executable"]) == ["/my env/bin/python"]
    assert ActorRequest("", object, (), {}, ActorPlacement()).runtime_env() is None
