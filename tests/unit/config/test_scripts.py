# SPDX-License-Identifier: Apache-2.0
"""Roles of a job file that name a program instead of a class."""

import pytest
from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.config.layout import job_from_mapping, job_to_yaml
from dlrover.python.rl.config.load import load_job_text

CPU = {"device_type": "CPU", "device_per_node": 2}


def job(workload, **more):
    return job_from_mapping(OmegaConf.create({"trainer": CPU, "workload": workload, **more}), "programs")


def test_a_command_needs_no_class_no_actor_and_no_trainer_class():
    spec = job({"train": {"command": "python train.py", "num": 2}}, config={"lr": 1.0})
    assert spec.trainer.class_ == "ScriptTrainer"
    assert spec.workloads["TRAIN"].class_ == "Script"
    assert spec.workloads["TRAIN"].num == 2
    assert spec.config == {"lr": 1.0, "scripts": {"train": {"command": "python train.py"}}}
    assert spec.restart.workload_max_restart == {"train": 3}


def test_what_is_written_reads_back_as_the_same_job():
    spec = job({"train": {"command": ["python", "train.py"]}, "serve": {"function": "server:main"}})
    assert load_job_text(job_to_yaml(spec), "programs", search_path=()) == spec


def test_a_command_may_have_variables_of_its_shell():
    text = r"workload: {train: {command: 'train.py --rank \${RANK} \${name}', num: 2}}"
    spec = load_job_text(text, "programs", search_path=())
    assert spec.config.scripts.train.command == "train.py --rank ${RANK} ${name}"
    assert load_job_text(job_to_yaml(spec), "programs", search_path=()) == spec


def test_limits_and_a_trainer_that_are_given_stay():
    spec = job(
        {"actor": {"module": "m", "class": "C"}, "Train": {"command": "x", "hang_after_s": 60}},
        restart={"workload_max_restart": {"train": 0}},
        trainer={**CPU, "module": "mine", "class": "Mine"},
    )
    assert spec.trainer.class_ == "Mine"
    assert spec.restart.workload_max_restart == {"train": 0}
    assert spec.workloads["TRAIN"].hang_after_s == 60


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ({"command": "x", "class": "C"}, "workload.train: has command and class: a role is a program or a class"),
        ({"command": "x", "function": "m:f"}, "workload.train: has command and function: a role runs one program"),
        ({"command": ""}, "workload.train: its command is empty"),
        ({"command": {"a": 1}}, "workload.train.command: must be text or a list of texts, got"),
        ({"command": "x", "nun": 2}, "workload.train.nun: unknown key 'nun'; did you mean 'num'?"),
    ],
)
def test_a_program_that_cannot_be_is_refused(role, message):
    with pytest.raises(InvalidJob) as refused:
        job({"train": role})
    assert message in str(refused.value)


def test_a_job_with_a_class_and_a_program_still_needs_a_trainer():
    with pytest.raises(InvalidJob, match=r"trainer\.module"):
        job({"actor": {"module": "m", "class": "C"}, "train": {"command": "x"}})
