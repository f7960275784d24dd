# SPDX-License-Identifier: Apache-2.0
"""The queue, the ids of runs, and the store of the service."""

import sqlite3
from dataclasses import replace

import pytest

from dlrover.python.rl.common.errors import JobConflict, JournalCorrupt, ServiceUnavailable
from dlrover.python.rl.service.jobs import ledger as ledger_module
from dlrover.python.rl.service.jobs.ledger import Draft, Ledger, QueueLimits, schedule
from dlrover.python.rl.service.jobs.records import JobDescription, JobPhase, JobRecord, Observed, Schedule
from dlrover.python.rl.service.jobs.store import SqliteJobStore
from tests.support.service_stage import submission


def job(number, cpus=1.0, **values):
    values = {"owner": "ann", "resources": {"cpu": cpus}, "sequence": number, **values}
    return JobRecord(name=f"job-{number}", run=f"r{number}", client_token=f"t{number}", **values)


FULL = "the cluster is full: {} cpu needed, {} available"
SCHEDULES = {
    # jobs, CPUs, limits; the runs that start, and why others wait
    "the order of submission": ([job(3), job(1), job(2)], 2, {}, ["r1", "r2"], {"r3": FULL.format(1, 0)}),
    "a higher priority first": ([job(1), job(2, priority=5)], 1, {}, ["r2"], {"r1": FULL.format(1, 0)}),
    "a large job not overtaken by small ones": (
        [job(1, 3, phase=JobPhase.RUNNING), job(2, 4), job(3, 1)], 4, {},
        [], {"r2": FULL.format(4, 1), "r3": "behind 'job-2' in the queue"},
    ),
    "a job larger than the cluster": (
        [job(1, 64), job(2)], 4, {}, ["r2"], {"r1": "the cluster has too little: 64 cpu needed, 4 available"},
    ),
    "a missing kind of resource": (
        [job(1, resources={"gpu": 1.0})], 4, {}, [], {"r1": "the cluster has too little: 1 gpu needed, 0 available"},
    ),
    "an owner at the quota blocks no other": (
        [job(1), job(2), job(3, owner="bob")], 9, {"max_running_per_owner": 1},
        ["r1", "r3"], {"r2": "'ann' runs 1 job, the limit"},
    ),
    "as many as allowed together": (
        [job(1), job(2), job(3)], 9, {"max_running": 1},
        ["r1"], {"r2": "1 jobs run, the limit", "r3": "behind 'job-2' in the queue"},
    ),
    "starting and stopping jobs hold their resources": (
        [*(job(at, phase=phase) for at, phase in enumerate((JobPhase.STARTING, JobPhase.STOPPING, JobPhase.FAILED))),
         job(4), job(5)], 3, {}, ["r4"], {"r5": FULL.format(1, 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("jobs", "cpus", "limits", "starts", "waits"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedule_starts_jobs_and_says_why_others_wait(jobs, cpus, limits, starts, waits):
    assert schedule(jobs, {"cpu": cpus}, QueueLimits(**limits)) == (starts, waits)


def test_the_newest_run_of_a_name_outlives_an_older_one(monkeypatch):
    monkeypatch.setattr(ledger_module, "KEPT_ENDED", 1)
    ledger, runs = Ledger(QueueLimits()), iter("ab")
    ledger.capacity = {"cpu": 1.0}
    for token in ("first", "second"):
        draft = Draft(ledger, lambda: next(runs))
        record = draft.decide(submission(token=token), 0.0)
        draft.decide(Schedule(), 0.0)
        draft.decide(Observed(record.name, record.run, JobPhase.FINISHED), 1.0)
        forgotten = ledger.adopt(draft)
    assert forgotten == ["a"] and "a" not in ledger.records
    assert ledger.get("job").run == "b" and ("ann", "first") not in ledger.tokens


# -- the store --------------------------------------------------------------------------------------------------------


def test_a_folder_has_one_service_at_a_time(tmp_path):
    store = SqliteJobStore(tmp_path)
    with pytest.raises(JobConflict, match="another service uses"):
        SqliteJobStore(tmp_path)
    store.close()
    SqliteJobStore(tmp_path).close()


def spoil_version(path):
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"not a database" * 100), "jobs.sqlite cannot be read"),
        (spoil_version, "version 7"),
    ],
)
def test_store_with_an_unusable_file_is_refused(tmp_path, spoil, message):
    SqliteJobStore(tmp_path).close()
    spoil(tmp_path / "jobs.sqlite")
    with pytest.raises(JournalCorrupt, match=message):
        SqliteJobStore(tmp_path)


def test_store_is_private_and_syncs_each_write(tmp_path):
    store = SqliteJobStore(tmp_path / "state")
    full = 2  # of SQLite: with 1, NORMAL, a power cut takes the last writes
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (full,)
    store.close()
    for path in (tmp_path / "state", tmp_path / "state/jobs.sqlite"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_new_run_does_not_get_the_id_of_another():
    ids = iter(["r1", "r1", "r1", "r2", "r2", "old", "r3"])
    ledger = Ledger(QueueLimits(), [JobRecord("older", "old", "ann", "t", phase=JobPhase.FINISHED, sequence=1)], 1)
    draft = Draft(ledger, ids.__next__)
    runs = [draft.decide(submission(name), 0.0).run for name in ("one", "two", "three")]
    assert runs == ["r1", "r2", "r3"] and set(draft.descriptions) == set(runs)


def test_a_new_run_with_the_id_of_a_saved_one_is_not_saved(tmp_path):
    store = SqliteJobStore(tmp_path)
    first, second = (JobRecord(name, "r1", "ann", "t", sequence=at) for at, name in enumerate(("first", "second"), 1))
    store.write([first], [], {"r1": JobDescription("text of the first")}, ())
    with pytest.raises(ServiceUnavailable, match="nothing was changed"):
        store.write([second], [], {"r1": JobDescription("text of the second")}, ())
    assert [record.name for record in store.load()[0]] == ["first"]
    assert store.description("r1").text == "text of the first"
    store.write([replace(first, step=3)], [], {}, ())
    assert [record.step for record in store.load()[0]] == [3]
    store.close()
