# SPDX-License-Identifier: Apache-2.0
"""Programs as roles, in one process: their environment, output, exit codes and ends."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.layout import job_from_mapping
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_here
from dlrover.python.rl.recipe.scripts import torchrun_environment

MEMBER = {"RANK": "3", "LOCAL_RANK": "1", "RESTART_COUNT": "2"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def ended(role, config=None):
    trainer = {"device_type": "CPU", "device_per_node": 1}
    data = {"trainer": trainer, "workload": {"train": role}, "config": config or {}}
    return run_here(check_job(job_from_mapping(OmegaConf.create(data), "programs", (str(Path.cwd()),)), local=True))


def log(status):
    return (Path(status.folder) / "logs" / "TRAIN-0.log").read_text()


def test_command_runs_in_a_shell_with_torchruns_variables():
    status = ended({"command": "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE; echo to stderr >&2"})
    assert status.phase is Phase.FINISHED
    assert sorted(log(status).splitlines()) == ["0/1 0/1", "to stderr"]


def test_list_is_a_command_without_a_shell():
    status = ended({"command": [sys.executable, "-c", "import sys; print(sys.argv[1:])", "$HOME; *"]})
    assert log(status) == "['$HOME; *']\n"


def test_command_finds_the_python_of_the_job(monkeypatch):
    """The environment need not be activated; a path that has its folder is unchanged."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert log(ended({"command": "command -v python"})) == f"{Path(sys.executable).with_name('python')}\n"
    path = f"/mine:{Path(sys.executable).parent}:/usr/bin"
    assert torchrun_environment({"PATH": path}, MEMBER, ())["PATH"] == path


def test_function_gets_the_config():
    Path("mine.py").write_text("def main(config):\n    print(config.lr * 2, sorted(config))\n")
    assert log(ended({"function": "mine:main"}, {"lr": 2.0})) == "4.0 ['lr']\n"


@pytest.mark.slow
def test_function_with_an_error_shows_its_own_frames_only():
    Path("faulty.py").write_text("def main(config):\n    raise ValueError('no such corpus')\n")
    status = ended({"function": "faulty:main"})
    assert status.phase is Phase.FAILED
    assert "exit code 1: ValueError: no such corpus" in status.reason
    assert "faulty.py" in log(status)
    assert "scripts.py" not in log(status)


@pytest.mark.slow
def test_failed_program_runs_again_until_the_limit():
    status = ended({"command": "echo started; echo 'no such corpus' >&2; exit 7"})
    assert status.phase is Phase.FAILED
    assert "exit code 7: no such corpus" in status.reason
    assert log(status).count("started") == 4


def test_missing_program_or_function_is_named():
    assert "pythn train.py: No such file or directory" in ended({"command": ["pythn", "train.py"]}).reason
    Path("nearly.py").write_text("def main(config): ...\n")
    message = r"workload\.train\.function: module 'nearly' has no 'mian'; did you mean 'main'"
    with pytest.raises(InvalidJob, match=message):
        ended({"function": "nearly:mian"})


@pytest.mark.parametrize(
    ("outer", "devices", "visible"),
    [(None, (), None), (None, (5,), "0,5"), (None, (0,), "1,0"), ("4,6,7", (2,), "4,7"), (None, (2, 3), "2,3")],
)
def test_device_at_local_rank_is_the_members_own(outer, devices, visible):
    environment = torchrun_environment({"CUDA_VISIBLE_DEVICES": outer} if outer else {}, MEMBER, devices)
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible
    assert environment["TORCHELASTIC_RESTART_COUNT"] == "2"
