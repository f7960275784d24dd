# SPDX-License-Identifier: Apache-2.0
"""Workers that take over the state of more or fewer of them."""

import dataclasses
import logging

import numpy as np
import pytest

from dlrover.python.rl.common.errors import CheckpointCorrupt, CheckpointMissing, ConfigError, InvalidJob, OtherLayout
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.runtime.checkpoint.commits import StoreCheckpoints
from dlrover.python.rl.runtime.checkpoint.member_state import MemberState
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.member.inspection import inspect_job
from dlrover.python.rl.runtime.run.folder import DESCRIPTION, earlier_description
from dlrover.python.rl.trainer.trainer import BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload, Setting

ROWS = 12


class Rows:
    """Has its share of the rows; ``cut`` is another way to divide them."""

    config = None

    def __init__(self, rank, size, cut="rows", takes=True):
        self.rank, self.size, self.cut, self.takes = rank, size, cut, takes
        self.rows = np.array_split(np.arange(ROWS), size)[rank]

    def takes_other_members(self, config):
        return self.takes

    def state_dict(self):
        return {"rows": self.rows, "cut": self.cut}

    def load_state_dict(self, state):
        if state["cut"] != self.cut:
            raise OtherLayout("cut otherwise")
        self.rows = state["rows"]

    def load_states(self, states):
        whole = np.concatenate([state["rows"] for state in states])
        self.rows = np.array_split(whole, self.size)[self.rank]


class Run:
    """Workers of one role, and the trainer's side."""

    def __init__(self, path, size, **how):
        self.roots = Roots("job", "run1", 1, path / "checkpoints" / "run1", path / "commits" / "run1", shared=True)
        self.checkpoints = StoreCheckpoints(self.roots, every=100)
        self.workloads = [Rows(rank, size, **how) for rank in range(size)]
        self.members = [MemberState("ACTOR", rank, 1, "", size) for rank in range(size)]

    def commit(self, step):
        request = self.checkpoints.commit_request(step, last=False)
        answers = {
            ProcessId("ACTOR", rank): member.commit(workload, request)
            for rank, (member, workload) in enumerate(zip(self.members, self.workloads, strict=True))
        }
        self.checkpoints.save(step, {"step": step})
        self.checkpoints.commit(step, answers, {})

    def restore(self, step):
        request = self.checkpoints.restore_request(step)
        for member, workload in zip(self.members, self.workloads, strict=True):
            workload.rows = np.array([])
            member.restore(workload, request)
        return [workload.rows.tolist() for workload in self.workloads]


def shares(size):
    return [part.tolist() for part in np.array_split(np.arange(ROWS), size)]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (1, 3), (11, 2), (3, 3)])
def test_more_or_fewer_members_divide_the_state_again(tmp_path, before, after):
    Run(tmp_path, before).commit(5)
    assert Run(tmp_path, after).restore(5) == shares(after)


def test_so_do_as_many_that_divide_it_otherwise_and_only_those_that_can(tmp_path):
    Run(tmp_path, 2).commit(5)
    assert Run(tmp_path, 2, cut="columns").restore(5) == shares(2)
    with pytest.raises(OtherLayout, match="cut otherwise"):
        Run(tmp_path, 2, cut="columns", takes=False).restore(5)


def test_a_workload_that_cannot_divide_its_state_again_is_not_asked_to(tmp_path):
    Run(tmp_path, 2).commit(5)
    with pytest.raises(CheckpointMissing, match="step 5 has no ACTOR-0"):
        Run(tmp_path, 3, takes=False).restore(5)


def test_another_ranks_file_is_checked_too(tmp_path):
    Run(tmp_path, 2).commit(5)
    (file,) = (tmp_path / "commits/run1").glob("step-*/ACTOR-1*")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointCorrupt, match="ACTOR-1"):
        Run(tmp_path, 1).restore(5)


# -- before anything starts -------------------------------------------------------------------------------------------


class Keeping(BaseWorkload):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Dividing(Keeping):
    @classmethod
    def takes_other_members(cls, config):
        if config["broken"]:
            raise KeyError("of the user's own")
        return True


class Nothing(BaseTrainer):
    def init(self):
        pass

    def fit(self):
        pass


class Sized(Keeping):
    @classmethod
    def settings_of_state(cls, config):
        if config["size"] == "broken":
            raise KeyError("of the user's own")
        if config["size"] == "invalid":
            raise InvalidJob([ConfigError("config.size", "is reported by check_config")])
        known = None if config.get("of") == "elsewhere" else config.get("of")
        return {"size": config["size"], "part": config.get("part"), "of": Setting(config.get("of"), known)}


class Seeded(Nothing):
    @classmethod
    def settings_of_state(cls, config):
        seed = config.get("seed", 0)
        return {"seed": seed, "parity": Setting(seed, kind=seed % 2)}


def job(path, name, number, broken="false"):
    text = f"name: job\ntrainer: {{module: {__name__}, class: Nothing, device_type: CPU, device_per_node: 8}}\n"
    text += f"workload: {{actor: {{module: {__name__}, class: {name}, num: {number}}}}}\njob_dir: {path}\n"
    return load_job_text(f"{text}checkpoint: {{resume: latest}}\nconfig: {{broken: {broken}}}\n", "job")


def test_other_numbers_are_refused_where_a_role_cannot_divide_its_state_again(tmp_path):
    run = Run(tmp_path, 2)
    run.commit(5)
    run.checkpoints.persisted(
        {
            ProcessId("ACTOR", rank): member.persist(request)
            for request in [run.checkpoints.persist_request()]
            for rank, member in enumerate(run.members)
        }
    )
    assert inspect_job(job(tmp_path, "Dividing", 3)).errors == ()
    assert inspect_job(job(tmp_path, "Keeping", 2)).errors == ()
    for refused in (job(tmp_path, "Keeping", 3), job(tmp_path, "Dividing", 3, "true")):
        (error,) = inspect_job(refused).errors
        assert error.where == "checkpoint.resume"
        assert "holds the state of ACTOR x2, and this job's workers with state are ACTOR x3" in error.what


def refusals(job):
    return inspect_job(job, earlier_description(job)).errors


def sized(path, config, trainer="Nothing"):
    text = f"name: job\ntrainer: {{module: {__name__}, class: {trainer}, device_type: CPU, device_per_node: 8}}\n"
    text += f"workload: {{actor: {{module: {__name__}, class: Sized, num: 2}}}}\njob_dir: {path}\n"
    return load_job_text(f"{text}checkpoint: {{resume: latest}}\nconfig: {config}\n", "job")


def test_settings_that_a_state_depends_on_stay_as_they_were_once_there_is_one(tmp_path, caplog):
    begun, other = sized(tmp_path, "{size: 4, part: {a: 1, b: x}}"), sized(tmp_path, "{size: 8, part: {a: 2, b: x}}")
    (tmp_path / DESCRIPTION).write_text(job_to_yaml(begun))
    assert refusals(other) == (), "nothing was committed yet"
    Run(tmp_path, 2).commit(5)
    assert refusals(begun) == ()
    whole, part = refusals(other)
    was = "8, but by its job.yaml the run was begun with 4, which its state depends on"
    assert str(whole) == f"config.size: {was}: continue with that, or begin another run"
    assert str(part).startswith("config.part.a: 2, but by its job.yaml the run was begun with 1, ")
    (none,) = refusals(sized(tmp_path, "{size: 4}"))
    assert str(none).startswith("config.part: null, but by its job.yaml the run was begun with {a: 1, b: x}, ")
    with caplog.at_level(logging.WARNING):
        assert refusals(sized(tmp_path, "{size: broken}")) == (), "check_config says what is wrong with a config"
        assert refusals(sized(tmp_path, "{size: invalid}")) == ()
    assert [record.getMessage() for record in caplog.records] == [
        'Sized.settings_of_state: KeyError: "of the user\'s own"'
    ]
    fresh = dataclasses.replace(other, checkpoint=dataclasses.replace(other.checkpoint, resume="never"))
    assert refusals(fresh) == ()
    (tmp_path / DESCRIPTION).write_text("broken: [")
    assert refusals(other) == ()
    (tmp_path / DESCRIPTION).unlink()
    assert refusals(other) == ()


def test_a_setting_that_is_not_known_here_is_said_where_it_is_another(tmp_path):
    begun = sized(tmp_path, "{size: 4, of: here}")
    (tmp_path / DESCRIPTION).write_text(job_to_yaml(begun))
    Run(tmp_path, 2).commit(5)
    before = earlier_description(begun)
    found = inspect_job(sized(tmp_path, "{size: 4, of: elsewhere}"), before)
    what = "config.of: elsewhere, but by its job.yaml the run was begun with here"
    line = f"{what}: it continues with the value in its last commit, not with this one"
    assert (found.errors, found.about) == ((), (line,))
    (error,) = inspect_job(sized(tmp_path, "{size: 4, of: there}"), before).errors
    assert error.where == "config.of"
    elsewhere = sized(tmp_path, "{size: 4, of: elsewhere}")
    assert inspect_job(elsewhere, job_to_yaml(elsewhere)).about == (), "it is the same"


def test_settings_that_a_trainers_state_depends_on_stay_too(tmp_path):
    begun = sized(tmp_path, "{size: 4, seed: 1}", "Seeded")
    (tmp_path / DESCRIPTION).write_text(job_to_yaml(begun))
    Run(tmp_path, 2).commit(5)
    assert refusals(begun) == ()
    refused = refusals(sized(tmp_path, "{size: 5, seed: 2}", "Seeded"))
    assert [error.where for error in refused] == ["config.seed", "config.parity", "config.size"]
    assert str(refused[1]).startswith("config.parity: 2, but by its job.yaml the run was begun with 1, ")
    (of_seed,) = refusals(sized(tmp_path, "{size: 4, seed: 3}", "Seeded"))
    assert of_seed.where == "config.seed", "both are odd"


@pytest.mark.parametrize("size", ["${config.part}", "${.part}", "a\\${b}", "1.0"])
def test_settings_that_refer_to_others_are_compared_by_their_values(size, tmp_path):
    begun = sized(tmp_path, f"{{size: '{size}', part: 1.0}}")
    (tmp_path / DESCRIPTION).write_text(job_to_yaml(begun))
    Run(tmp_path, 2).commit(5)
    assert refusals(begun) == ()
    (error, *_) = refusals(sized(tmp_path, f"{{size: '{size}2', part: 1.0}}"))
    assert error.where == "config.size"


def test_the_description_of_a_run_in_an_object_store_counts_before_that_of_a_folder_here(tmp_path):
    begun, other = sized(tmp_path, "{size: 4}"), sized(tmp_path, "{size: 8}")
    (tmp_path / DESCRIPTION).write_text(job_to_yaml(other))
    Run(tmp_path, 2).commit(5)
    store = tmp_path / "store"
    store.mkdir()
    archived = dataclasses.replace(begun, archive=f"file://{store}")
    assert refusals(archived) != (), "none is there"
    (store / DESCRIPTION).write_text(job_to_yaml(begun))
    assert refusals(archived) == ()
