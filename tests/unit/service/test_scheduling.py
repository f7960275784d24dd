# SPDX-License-Identifier: Apache-2.0
"""Which queued jobs start, and why the others wait."""

from dlrover.python.rl.service.jobs.ledger import QueueLimits, schedule
from dlrover.python.rl.service.jobs.records import JobPhase, JobRecord

LIMITS = QueueLimits()


def job(number, cpus=1.0, **values):
    values = {"owner": "ann", "resources": {"cpu": cpus}, "sequence": number, **values}
    return JobRecord(name=f"job-{number}", run=f"r{number}", client_token=f"t{number}", **values)


def test_jobs_start_in_the_order_of_their_submission_while_there_is_room():
    starts, waits = schedule([job(3), job(1), job(2)], {"cpu": 2}, LIMITS)
    assert starts == ["r1", "r2"]
    assert waits == {"r3": "the cluster is full: 1 cpu needed, 0 available"}


def test_a_higher_priority_starts_first():
    assert schedule([job(1), job(2, priority=5)], {"cpu": 1}, LIMITS)[0] == ["r2"]


def test_a_large_job_is_not_overtaken_by_small_ones():
    running = job(1, 3, phase=JobPhase.RUNNING)
    starts, waits = schedule([running, job(2, 4), job(3, 1)], {"cpu": 4}, LIMITS)
    assert starts == []
    assert waits == {"r2": "the cluster is full: 4 cpu needed, 1 available", "r3": "behind 'job-2' in the queue"}


def test_a_job_that_the_cluster_can_never_hold_blocks_nobody():
    starts, waits = schedule([job(1, 64), job(2)], {"cpu": 4}, LIMITS)
    assert starts == ["r2"]
    assert waits == {"r1": "the cluster has too little: 64 cpu needed, 4 available"}


def test_a_kind_that_the_cluster_does_not_have_is_named():
    assert schedule([job(1, resources={"gpu": 1.0})], {"cpu": 4}, LIMITS)[1] == {
        "r1": "the cluster has too little: 1 gpu needed, 0 available"
    }


def test_an_owner_at_the_quota_blocks_nobody_else():
    limits = QueueLimits(max_running_per_owner=1)
    starts, waits = schedule([job(1), job(2), job(3, owner="bob")], {"cpu": 9}, limits)
    assert starts == ["r1", "r3"]
    assert waits == {"r2": "'ann' runs 1 jobs, the limit"}


def test_all_together_run_as_many_as_allowed():
    starts, waits = schedule([job(1), job(2), job(3)], {"cpu": 9}, QueueLimits(max_running=1))
    assert starts == ["r1"]
    assert waits == {"r2": "1 jobs run, the limit", "r3": "behind 'job-2' in the queue"}


def test_starting_and_stopping_jobs_hold_their_resources():
    active = [job(1, phase=JobPhase.STARTING), job(2, phase=JobPhase.STOPPING), job(3, phase=JobPhase.FAILED)]
    assert schedule([*active, job(4), job(5)], {"cpu": 3}, LIMITS)[0] == ["r4"]
