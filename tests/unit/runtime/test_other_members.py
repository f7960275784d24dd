# SPDX-License-Identifier: Apache-2.0
"""Workers that take over the state of more or fewer of them."""

import dataclasses
import logging

import numpy as np
import pytest

from dlrover.python.rl.common.errors import CheckpointMissing, ConfigError, InvalidJob, OtherLayout
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.runtime.checkpoint.commits import StoreCheckpoints
from dlrover.python.rl.runtime.checkpoint.member_state import MemberState
from dlrover.python.rl.runtime.checkpoint.runs import Roots
from dlrover.python.rl.runtime.member.inspection import inspect_job
from dlrover.python.rl.runtime.run.folder import earlier_description
from dlrover.python.rl.runtime.run.names import DESCRIPTION
from dlrover.python.rl.trainer.workload import BaseWorkload, Setting
from tests.support.role_group_toys import StageTrainer

ROWS = 12


class Rows:
    """A workload with its share of the rows; ``cut`` is another way to divide them."""

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


def test_other_division_of_the_state_needs_a_willing_workload(tmp_path):
    Run(tmp_path, 2).commit(5)
    assert Run(tmp_path, 2, cut="columns").restore(5) == shares(2)
    with pytest.raises(OtherLayout, match="cut otherwise"):
        Run(tmp_path, 2, cut="columns", takes=False).restore(5)
    with pytest.raises(CheckpointMissing, match="step 5 has no ACTOR-0"):
        Run(tmp_path, 3, takes=False).restore(5)


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


class Sized(Keeping):
    @classmethod
    def settings_of_state(cls, config):
        if config["size"] == "broken":
            raise KeyError("of the user's own")
        if config["size"] == "invalid":
            raise InvalidJob([ConfigError("config.size", "is reported by check_config")])
        place = config.get("of")
        setting = Setting(place, None if place == "elsewhere" else place)
        return {"size": config["size"], "part": config.get("part"), "of": setting}


class Seeded(StageTrainer):
    @classmethod
    def settings_of_state(cls, config):
        seed = config.get("seed", 0)
        return {"seed": seed, "parity": Setting(seed, kind=seed % 2)}


def job_of(path, config, workload="Sized", number=2, trainer="StageTrainer"):
    text = f"name: job\ntrainer: {{module: {__name__}, class: {trainer}, device_type: CPU, device_per_node: 8}}\n"
    text += f"workload: {{actor: {{module: {__name__}, class: {workload}, num: {number}}}}}\njob_dir: {path}\n"
    return load_job_text(f"{text}checkpoint: {{resume: latest}}\nconfig: {config}\n", "job")


def refusals(job):
    return inspect_job(job, earlier_description(job)).errors


def test_other_numbers_are_refused_for_an_undivided_state(tmp_path):
    run = Run(tmp_path, 2)
    run.commit(5)
    request = run.checkpoints.persist_request()
    copies = {ProcessId("ACTOR", rank): member.persist(request) for rank, member in enumerate(run.members)}
    run.checkpoints.persisted(copies)
    accepted = [("Dividing", 3, "false"), ("Keeping", 2, "false")]
    for workload, number, broken in (*accepted, ("Keeping", 3, "false"), ("Dividing", 3, "true")):
        is_refused = (workload, number, broken) not in accepted
        errors = inspect_job(job_of(tmp_path, f"{{broken: {broken}}}", workload, number)).errors
        assert [error.where for error in errors] == ["checkpoint.resume"] * is_refused
        message = "holds the state of ACTOR x2, and this job's workers with state are ACTOR x3"
        assert not is_refused or message in errors[0].what


@pytest.fixture
def begin(tmp_path):
    """Begin a run with this config: its description is written, and step 5 committed."""

    def begin(config, trainer="StageTrainer", is_committed=True):
        job = job_of(tmp_path, config, trainer=trainer)
        (tmp_path / DESCRIPTION).write_text(job_to_yaml(job))
        if is_committed:
            Run(tmp_path, 2).commit(5)
            assert refusals(job) == ()
        return job

    return begin


def test_settings_of_a_state_stay_once_it_is_committed(begin, tmp_path, caplog):
    other = job_of(tmp_path, "{size: 8, part: {a: 2, b: x}}")
    begin("{size: 4, part: {a: 1, b: x}}", is_committed=False)
    assert refusals(other) == (), "nothing was committed yet"
    begin("{size: 4, part: {a: 1, b: x}}")
    whole, part = refusals(other)
    was = "8, but by its job.yaml the run was begun with 4, which its state depends on"
    assert str(whole) == f"config.size: {was}: continue with that, or begin another run"
    assert str(part).startswith("config.part.a: 2, but by its job.yaml the run was begun with 1, ")
    (none,) = refusals(job_of(tmp_path, "{size: 4}"))
    assert str(none).startswith("config.part: null, but by its job.yaml the run was begun with {a: 1, b: x}, ")
    with caplog.at_level(logging.WARNING):
        assert refusals(job_of(tmp_path, "{size: broken}")) == (), "check_config reports it"
        assert refusals(job_of(tmp_path, "{size: invalid}")) == ()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ['Sized.settings_of_state: KeyError: "of the user\'s own"']
    fresh = dataclasses.replace(other, checkpoint=dataclasses.replace(other.checkpoint, resume="never"))
    assert refusals(fresh) == ()
    (tmp_path / DESCRIPTION).write_text("broken: [")
    assert refusals(other) == ()
    (tmp_path / DESCRIPTION).unlink()
    assert refusals(other) == ()


def test_different_unknown_setting_is_a_remark(begin, tmp_path):
    before = earlier_description(begin("{size: 4, of: here}"))
    elsewhere = job_of(tmp_path, "{size: 4, of: elsewhere}")
    inspection = inspect_job(elsewhere, before)
    line = "config.of: elsewhere, but by its job.yaml the run was begun with here"
    line += ": it continues with the value in its last commit, not with this one"
    assert (inspection.errors, inspection.about) == ((), (line,))
    (error,) = inspect_job(job_of(tmp_path, "{size: 4, of: there}"), before).errors
    assert error.where == "config.of"
    assert inspect_job(elsewhere, job_to_yaml(elsewhere)).about == (), "it is the same"


def test_settings_of_the_state_of_a_trainer_stay_too(begin, tmp_path):
    begin("{size: 4, seed: 1}", "Seeded")
    refused = refusals(job_of(tmp_path, "{size: 5, seed: 2}", trainer="Seeded"))
    assert [error.where for error in refused] == ["config.seed", "config.parity", "config.size"]
    assert str(refused[1]).startswith("config.parity: 2, but by its job.yaml the run was begun with 1, ")
    (of_seed,) = refusals(job_of(tmp_path, "{size: 4, seed: 3}", trainer="Seeded"))
    assert of_seed.where == "config.seed", "both are odd"


@pytest.mark.parametrize("size", ["${config.part}", "${.part}", "a\\${b}", "1.0"])
def test_settings_with_references_are_compared_by_value(begin, tmp_path, size):
    begin(f"{{size: '{size}', part: 1.0}}")
    (error, *_) = refusals(job_of(tmp_path, f"{{size: '{size}2', part: 1.0}}"))
    assert error.where == "config.size"


def test_description_in_an_object_store_counts_before_one_here(begin, tmp_path):
    job = begin("{size: 4}")
    begin("{size: 8}")
    store = tmp_path / "store"
    store.mkdir()
    archived = dataclasses.replace(job, archive=f"file://{store}")
    assert refusals(archived) != (), "none is there"
    (store / DESCRIPTION).write_text(job_to_yaml(job))
    assert refusals(archived) == ()
