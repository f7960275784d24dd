# SPDX-License-Identifier: Apache-2.0
"""Whole jobs under a real master on real Ray, undisturbed and while their processes die or hang.

Each job is struck by several faults, so that few of them have to be started; every one must end in the very result of
an undisturbed run, and leave nothing.
"""

import signal
from dataclasses import replace

import pytest
import ray

from dlrover.python.rl.common.errors import JobConflict, StaleCall, StaleEpoch
from dlrover.python.rl.common.names import NAMESPACE, master_name
from dlrover.python.rl.config.spec import CheckpointSpec
from dlrover.python.rl.control.events import CauseKind, MemberLost, MemberStarted, Released, TrainerLost
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.client.on_ray import follow, start_master, stop_master
from dlrover.python.rl.master.job import check_job
from dlrover.python.rl.master.process.rl_master import RLMaster
from dlrover.python.rl.runtime.checkpoint.member_state import CommitRequest
from dlrover.python.rl.runtime.checkpoint.runs import newest_commit, roots_of
from dlrover.python.rl.runtime.member.arguments import CallHeader
from dlrover.python.rl.runtime.ray.processes.actors import end, launch
from dlrover.python.rl.runtime.run.folder import begin
from dlrover.python.rl.trainer.port import COMMIT, RAW_CALL
from tests.ray.recovery_stage import HANG_AFTER_S, Shape, Stage, describe
from tests.support.commands import wait_for
from tests.support.manual_clock import within
from tests.support.toy_job import mark_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

ROLLOUT_1_STEP_2 = {("ROLLOUT-1", "receive", 2), ("ROLLOUT-1", "generate", 2)}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Set a job up: its name, what its own processes do to themselves, and what is particular about it."""
    monkeypatch.chdir(tmp_path)

    def make(name, *faults, **shape):
        return Stage(describe(name, tmp_path / name, faults, Shape(**shape)), tmp_path / name)

    return make


def undisturbed(job):
    """It came to its end as if nothing had happened, and left nothing."""
    assert (job.status.phase, job.status.restarts, job.status.incarnation) == (Phase.FINISHED, 0, 1), job.status
    assert [report.step for report in job.reports][-1] == job.job.config.steps
    return job.result_is_exact() and job.nothing_is_left()


def stale_commits(job):
    """The answer to a trainer of epoch 1 that would commit when there is a second one."""
    roots = roots_of(job.job, job.run_id, epoch=1)
    header = CallHeader(RAW_CALL, COMMIT, epoch=1).pack()
    refusals = []
    try:
        ray.get(job.member("ACTOR", 1, 1).dlrover_invoke.remote(header, CommitRequest(99, roots)), timeout=30)
    except ray.exceptions.RayTaskError as error:
        refusals.append(type(error.cause))
    for store in (roots.commit_store(""), roots.durable_store()):
        try:
            store.commit(99, 1, {})
        except StaleEpoch as error:
            refusals.append(type(error))
    return refusals


def test_death_repeats_the_calls_of_its_scope_in_this_step(stage):
    """A rollout's death repeats that worker's calls of the step, an actor's too, the trainer's no call at all; and a
    trainer that was replaced can commit nothing."""
    faults = ("ROLLOUT-1:generate:2:kill", "trainer:middle:3:kill", "ACTOR-0:update:4:kill")
    job, refusals = stage("by-member", *faults, hold := "trainer:end:5:hold"), []

    def strike(job, step):
        if step == 4:
            job.held(hold)
            refusals.extend(stale_commits(job))
            job.let_go(hold)

    job.run(strike)
    assert undisturbed(job)
    assert job.repeated() == ROLLOUT_1_STEP_2 | {("ACTOR-0", "publish", 4), ("ACTOR-0", "update", 4)}
    assert job.losses() == [("ACTOR[0]", "process_died"), ("ROLLOUT[1]", "process_died"), ("trainer", "process_died")]
    assert job.status.recoveries == {"ACTOR": 1, "ROLLOUT": 1, "trainer": 1}
    assert job.incarnations("ACTOR") == [(0, 1), (0, 2), (1, 1)]
    assert job.incarnations("ROLLOUT") == [(0, 1), (1, 1), (1, 2)]
    assert job.epochs() == [1, 2]
    assert refusals == [StaleCall, StaleEpoch, StaleEpoch]


def test_group_restarts_together_and_a_standby_takes_over(stage):
    faults = ("ACTOR-1:update:2:kill", hold := "trainer:end:3:hold", "ROLLOUT-0:generate:4:kill")
    job = stage("by-group", *faults, actor="Team", standby=1)

    def strike(job, step):
        if step == 2:
            wait_for(lambda: "ROLLOUT-standby[0]" in job.pids())
            job.let_go(hold)

    job.run(strike)
    assert undisturbed(job)
    repeated = {(process, step) for process, _, step in job.repeated()}
    assert repeated == {("ACTOR-0", 2), ("ACTOR-1", 2), ("ROLLOUT-0", 4)}
    assert job.status.recoveries == {"ACTOR": 1, "ROLLOUT": 1}
    assert job.incarnations("ACTOR") == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [event.standby for event in job.events(MemberStarted) if event.role == "ROLLOUT"] == [-1, -1, 0]
    assert job.delay_s("ROLLOUT", 0) < 1.0


@pytest.mark.slow
def test_ranks_keep_their_processes_unless_they_are_silent(stage):
    """The first two are lost in turn; then the master, who finds a process under the name that it began with; at last a
    rank is lost while the other one is busy for ever."""
    faults = ("ACTOR-1:update:2:kill", "ACTOR-0:update:3:kill", hold := "trainer:end:3:hold")
    job = stage("keepers", *faults, "ACTOR-0:update:5:loop", "ACTOR-1:update:5:kill", actor="Keepers")

    def strike(job, step):
        if step == 3:
            job.kill(job.master_pid())
            wait_for(lambda: job.ask().masters == 2)
            job.let_go(hold)

    job.run(strike)
    assert undisturbed(job)
    pids = job.pids_of("ACTOR")
    assert sorted(pids) == [(rank, number) for rank in (0, 1) for number in (1, 2, 3, 4)]
    assert pids[0, 1] == pids[0, 2] != pids[0, 3] and pids[1, 1] != pids[1, 2] == pids[1, 3]
    assert pids[0, 3] != pids[0, 4] and pids[1, 3] != pids[1, 4]
    assert job.nothing_is_left()


def test_rank_waiting_for_a_lost_one_is_aborted_and_stays(stage):
    job = stage("waiters", "ACTOR-1:update:2:kill", actor="Waiters").run()
    assert undisturbed(job)
    pids = job.pids_of("ACTOR")
    assert sorted(pids) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert pids[0, 1] == pids[0, 2] and pids[1, 1] != pids[1, 2]
    assert job.status.recoveries == {"ACTOR": 1}


def test_killed_master_finds_every_process_again(stage):
    """First the master is stopped, and the job continues; then it is killed, and finds every process again.
    The second time a worker dies with it."""
    first, second = "trainer:end:4:hold", "trainer:end:5:hold"
    job, pids = stage("no-master", first, second), []

    def strike(job, step):
        if step >= 2 and not pids:
            pids.append(job.pids())
            job.kill(job.master_pid(), number=signal.SIGSTOP)
            job.held(first)
            job.kill(job.master_pid())
            wait_for(lambda: job.ask().masters == 2)
            pids.append(job.pids())
            job.let_go(first)
        elif step >= 4 and len(pids) == 2:
            job.held(second)
            pids.append(job.pids())
            job.kill(pids[0]["ACTOR[0]"], job.master_pid())
            job.let_go(second)

    job.run(strike)
    assert undisturbed(job)
    assert pids[0] == pids[1] == pids[2]
    assert set(pids[0]) == {"ACTOR[0]", "ACTOR[1]", "ROLLOUT[0]", "ROLLOUT[1]", "trainer"}
    assert job.repeated() == {("ACTOR-0", "publish", 5), ("ACTOR-0", "update", 5)}
    assert job.losses() == [("ACTOR[0]", "process_died")]
    assert (job.status.recoveries, job.status.masters) == ({"ACTOR": 1}, 3)
    assert [path.name for path in job.job.job_dir.glob("owner.*")] == ["owner.3.json"], "each master claims once"


def test_hung_process_is_noted_with_its_stack_and_replaced(stage):
    faults = ("ROLLOUT-0:generate:2:stop", "ROLLOUT-1:generate:3:loop", "trainer:middle:4:stop")
    job = stage("hangs", *faults).run()
    assert undisturbed(job)
    lost = job.timed(MemberLost | TrainerLost)
    assert [event.cause.who for _, event in lost] == ["ROLLOUT[0]", "ROLLOUT[1]", "trainer"]
    for fault, (at_s, event) in zip(faults, lost, strict=True):
        assert event.cause.kind is CauseKind.HUNG
        assert "commit_fault" in event.cause.detail
        assert at_s - mark_of(job.folder, fault).stat().st_mtime < HANG_AFTER_S + 3.0
    assert job.status.recoveries == {"ROLLOUT": 2, "trainer": 1}
    assert {(process, step) for process, _, step in job.repeated()} == {("ROLLOUT-0", 2), ("ROLLOUT-1", 3)}


@pytest.mark.slow
def test_process_whose_device_or_link_fails_is_replaced(stage):
    """ECC and other CUDA errors, an NCCL abort, and a rendezvous that times out once are exceptions to the program."""
    faults = ("ROLLOUT-1:generate:2:ecc", "ACTOR-1:update:3:nccl", "ACTOR-0:update:4:rendezvous")
    job = stage("machine", *faults, "trainer:middle:5:ecc", actor="Team").run()
    assert undisturbed(job)
    device, link = "device_failed", "link_failed"
    assert job.losses() == [("ACTOR[0]", link), ("ACTOR[1]", link), ("ROLLOUT[1]", device), ("trainer", device)]
    assert job.status.recoveries == {"ACTOR": 2, "ROLLOUT": 1, "trainer": 1}
    assert job.incarnations("ACTOR") == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


@pytest.mark.slow
def test_unknown_error_is_tried_once_in_fresh_processes(stage):
    job = stage("odd", "ACTOR-0:update:2:odd", "ROLLOUT-0:generate:4:odder").run()
    assert (job.status.phase, job.status.cause.kind) == (Phase.FAILED, CauseKind.USER_ERROR), job.status
    assert (job.status.cause.who, job.status.recoveries) == ("ROLLOUT[0]", {"ACTOR": 1, "ROLLOUT": 1, "trainer": 2})
    assert "an internal assertion of a library failed (again, in fresh processes)" in job.status.reason
    assert [report.step for report in job.reports] == [1, 2, 3], "the first has gone by"
    assert job.incarnations("ACTOR") == [(0, 1), (0, 2), (1, 1)]
    assert job.nothing_is_left()


OWN_ERRORS = [
    ("ROLLOUT-0:generate:2:error", "ROLLOUT[0]", 'KeyError: "the user\'s own mistake"'),
    ("trainer:middle:2:error", "trainer", 'KeyError: "the user\'s own mistake"'),
    ("ACTOR-1:update:2:leave", "ACTOR[1]", "SystemExit: 5"),
    ("trainer:middle:2:leave", "trainer", "5"),
    ("ACTOR-0:update:2:own", "ACTOR[0]", "OwnError: of a module"),
]


@pytest.mark.parametrize(
    ("fault", "process", "message"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (number > 0)) for number, case in enumerate(OWN_ERRORS)],
)
def test_job_with_a_users_error_ends_at_once(stage, fault, process, message):
    job = stage(fault.replace(":", "-").lower(), fault).run()
    assert (job.status.phase, job.status.restarts, job.status.recoveries) == (Phase.FAILED, 0, {})
    assert (job.status.cause.kind, job.status.cause.who) == (CauseKind.USER_ERROR, process)
    assert message in job.status.cause.message
    assert "not retried" in job.status.reason
    assert "leave" in fault or "commit_fault" in job.status.cause.detail
    assert (job.starts(), job.repeated()) == (1, set())
    assert job.nothing_is_left()


WITHOUT_DURABLE_STEPS = [
    ("Plain", "ACTOR-1:update:2:kill"),
    ("Plain", "trainer:middle:2:kill"),
    ("Swallowing", "ROLLOUT-1:generate:2:kill"),
]


@pytest.mark.parametrize(
    ("trainer", "fault"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (number > 0)) for number, case in enumerate(WITHOUT_DURABLE_STEPS)],
)
def test_job_without_durable_steps_restarts_once(stage, trainer, fault):
    job = stage(f"{trainer.lower()}-{fault.partition(':')[0].lower()}", fault, trainer=trainer).run()
    assert (job.status.phase, job.status.restarts, job.status.recoveries) == (Phase.FINISHED, 1, {})
    assert (job.starts(), job.epochs()) == (2, [1, 2])
    assert [event.incarnation for event in job.events(Released)] == [1, 2]
    assert [event.cause.kind for event in job.events() if hasattr(event, "cause")] == [CauseKind.PROCESS_DIED]
    assert job.nothing_is_left()


@pytest.mark.slow
def test_master_with_a_damaged_journal_ends_the_job(stage):
    job, damaged = stage("damaged", hold := "trainer:end:3:hold"), []

    def strike(job, step):
        if step == 2:
            job.held(hold)
            job.pids()
            master = job.master_pid()
            job.kill(master, number=signal.SIGSTOP)
            content = bytearray(job.journal.read_bytes())
            content[len(content) // 2] ^= 1
            job.journal.write_bytes(content)
            damaged.append(content)
            job.kill(master)

    job.run(strike)
    assert (job.status.phase, job.status.cause.kind) == (Phase.FAILED, CauseKind.INTERNAL)
    assert "journal line" in job.status.reason and str(job.journal) in job.status.reason
    assert [file.name for file in job.job.job_dir.glob("journal*")] == ["journal.jsonl"]
    assert job.journal.read_bytes() == damaged[0]
    assert job.repeated() == set()
    assert job.nothing_is_left()


@pytest.mark.slow
def test_run_resumes_at_the_last_copy_of_a_stopped_one(stage):
    keep = CheckpointSpec(every=2, resume="latest")
    job = stage("goes-on", hold := "trainer:end:5:hold", steps=8, checkpoint=keep)
    master = start_master(check_job(job.job))
    try:
        job.held(hold)
        first = job.run_id
        stop_master(master, "enough")
        assert follow(master, deadline_s=60).phase is Phase.STOPPED
    finally:
        end(master)
    copy = newest_commit(job.job.job_dir)
    assert copy is not None
    job.run()
    store, manifest = copy
    assert (store.run, manifest.step) in [(first, 2), (first, 4)]  # step 4's may have been under way
    assert job.run_id != first
    assert [report.step for report in job.reports] == list(range(manifest.step + 1, 9))
    assert undisturbed(job)


def test_job_whose_workers_ask_the_master_finishes(stage):
    activities = []
    job = stage("plain", trainer="AsksMaster", rollouts=0, steps=3).run(announce=activities.append)
    assert undisturbed(job)
    assert (job.status.recoveries, job.status.masters, job.status.activity) == ({}, 1, "")
    rows = [(report.step, report.total_steps, report.metrics["reward"]) for report in job.reports]
    assert rows == [(1, 3, 1.0), (2, 3, 3.0), (3, 3, 6.0)]
    assert activities[0] == "starting the master"
    assert "starting 2 processes" in activities


def test_results_taken_by_ray_survive_a_dead_worker(stage):
    job = stage("ray-get", "ACTOR-1:later:2:kill", trainer="GetsByRay", rollouts=0, steps=3).run()
    assert (job.status.phase, job.status.restarts, job.status.cause) == (Phase.FINISHED, 0, None)
    assert sum(job.status.recoveries.values()) == 1
    assert [(report.step, report.metrics["reward"]) for report in job.reports][-3:] == [(1, 3.0), (2, 5.0), (3, 7.0)]


@pytest.mark.slow
def test_relative_paths_start_at_the_folder_of_the_description(stage):
    job = stage("relative", rollouts=0)
    job.job.config.folder = "relative"
    assert undisturbed(job.run())


def test_master_answers_at_once_and_stops_a_job(stage):
    job = stage("endless", rollouts=0, steps=100_000)
    checked = check_job(job.job)
    master = start_master(checked)
    try:
        wait_for(lambda: job.ask().step > 2)
        with within(0.5):
            status = job.ask()
        assert {process for process, *_ in status.members} == {"ACTOR[0]", "ACTOR[1]", "trainer"}
        with pytest.raises(JobConflict, match="'endless' is running"):
            start_master(checked)
        stop_master(master, "enough")
        wait_for(lambda: job.ask().phase.terminal)
        assert (job.ask().phase, job.ask().reason) == (Phase.STOPPED, "enough")
    finally:
        end(master)
    assert job.nothing_is_left()


@pytest.mark.slow
def test_name_of_an_ended_job_is_free(stage, tmp_path):
    job = stage("again", rollouts=0, steps=2)
    start_master(check_job(job.job))
    wait_for(lambda: job.ask().phase.terminal)
    job.job = replace(job.job, job_dir=tmp_path / "second")
    assert job.run().status.phase is Phase.FINISHED
    with pytest.raises(ValueError, match="Failed to look up"):
        ray.get_actor(master_name("again"), namespace=NAMESPACE)


def test_job_too_large_for_the_cluster_fails_with_need_and_free(stage):
    job = stage("too-big", rollouts=0)
    actors = {role: replace(spec, num=200) for role, spec in job.job.workloads.items()}
    trainer = replace(job.job.trainer, device_per_node=400)
    job.job = replace(job.job, trainer=trainer, workloads=actors, placement_timeout_s=1.0)
    status = job.run().status
    assert (status.phase, status.cause.kind) == (Phase.FAILED, CauseKind.NO_RESOURCES)
    assert "needed {'cpu': 200.0}" in status.cause.message
    assert "free {" in status.cause.message
    assert job.nothing_is_left()


@pytest.mark.slow
def test_master_whose_loop_breaks_releases_everything(stage):
    class FragileMaster(RLMaster):
        def _carry_out(self, handled):
            if type(handled.event).__name__ == "TrainerStarted":
                raise RuntimeError("the loop's own mistake")
            super()._carry_out(handled)

    job = stage("fragile", rollouts=0)
    checked = check_job(job.job)
    arguments = (begin(checked.job), checked.placement, checked.inspection)
    master = launch(FragileMaster, master_name("fragile"), arguments, {})
    try:
        ray.get(master.start.remote({}), timeout=30)
        status = follow(master, deadline_s=90)
        assert (status.phase, status.cause.kind, status.cause.who) == (Phase.FAILED, CauseKind.INTERNAL, "master")
        assert "the loop's own mistake" in status.cause.message
    finally:
        end(master)
    assert job.nothing_is_left()
