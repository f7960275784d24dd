# SPDX-License-Identifier: Apache-2.0
"""Masters against simulated disasters: ended, frozen, cut off and replaced, two and more of them alive at once.

Each seed is one job with the production master, brain, journal, hang detector and executor, on simulated processes,
cluster and clock. ``python -m tests.protocol.replay_protocol masters SEED`` shows one; ``--seeds N --jobs 2`` tries
many more.
"""

import errno
import gc
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.commands import Release, StartMembers, StartTrainer, Wait
from dlrover.python.rl.control.events import CauseKind, NodeLost, Progressed
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.state import EndReason, Phase
from dlrover.python.rl.master.process.brain import JOURNAL, fresh_journal
from dlrover.python.rl.master.process.rl_master import RLMaster
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from tests.protocol import masters_run
from tests.protocol.loops_world import Violation, World
from tests.protocol.masters_disk import TRANSIENT
from tests.protocol.masters_job import Job
from tests.protocol.masters_referee import Referee
from tests.protocol.masters_run import FAULTS, SITUATIONS, run
from tests.protocol.replay_protocol import reached_by
from tests.support.control_runs import OPEN, Run, lost

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
SEEDS, MORE_SEEDS = range(60), range(60, 2500)
ENDS = ("finished", "stopped", "not_retryable", "restart_limit")


@pytest.fixture(autouse=True)
def collected():
    """Processes that were killed had tasks that have not begun: they go while that is no fault."""
    yield
    gc.collect()


@pytest.mark.timeout(900)
def test_job_under_each_fault_in_each_situation_keeps_rules():
    reached = reached_by("masters", SEEDS)
    pairs = {f"{fault} / {situation}" for situation, faults in SITUATIONS.items() for fault in faults}
    ends = {f"ended: {reason}" for reason in ENDS}
    events = {
        "a replaced trainer is refused",
        "a master is killed in a write",
        "a master is killed in a write and loses power",
    }
    assert not (pairs | ends | events) - reached.keys()
    assert reached["a replaced master leaves"] > len(SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_job_of_more_seeds_keeps_rules():
    reached = reached_by("masters", MORE_SEEDS)
    situations = SITUATIONS.keys() - {"created", "away"}
    assert not {f"{fault} / {situation}" for fault in FAULTS for situation in situations} - reached.keys()


@pytest.fixture
def job(tmp_path):
    """A job in its simulated environment, without faults."""
    world = World(0)
    job = Job(world, tmp_path)
    with job.environment():
        yield job
    job.close()
    world.close()


def test_node_lost_is_journaled_beside_other_losses(job):
    def noticed():
        return [event.node for _, event in decode(read_lines(job.folder / JOURNAL)) if isinstance(event, NodeLost)]

    job.begin()
    job.world.run(lambda: job.committed >= 3, 60.0)
    node = job.state().members[ProcessId("ACTOR", 0)].process.node
    job.cluster.lose_node(node)
    job.world.run(noticed, 120.0)
    assert noticed() == [node]


def fail_in(moment, job, failing):
    """Run a job whose journal's disk begins to fail at a ``moment``."""
    world = job.world
    if moment == "start":
        job.disk.failing = failing
    job.begin()
    if moment != "start":
        world.run(lambda: job.committed >= 3, 60.0)
        next(actor for name, actor in sorted(job.cluster.actors.items()) if "/ACTOR" in name.upper()).die()
    if moment == "recovery":
        world.run(lambda: job.state().recoveries.get("ACTOR"), 60.0)
    job.disk.failing = failing


@pytest.mark.parametrize("moment", ["start", "loss", "recovery"])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("number", TRANSIENT)
def test_journal_disk_faltering_for_seconds_costs_nothing(job, moment, call, number):
    fail_in(moment, job, ((call,), number, 1.0))
    job.world.after(10.0, lambda: setattr(job.disk, "failing", None))
    job.world.run(job.is_over, 300.0)
    job.check_end()
    assert sum(job.state().recoveries.values()) == (moment != "start")


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_journal_disk_faltering_for_a_minute_ends_job(job, call):
    fail_in("loss", job, ((call,), errno.EIO, 1.0))
    job.world.run(job.is_over, 60.0)
    state = job.master.rl_master._state
    assert state.phase is Phase.FAILED and "Input/output error" in state.reason
    job.disk.failing = None
    assert job.state().phase is Phase.RUNNING  # for the next start, which continues after the last commit
    assert fresh_journal(job.spec) == job.folder / JOURNAL


def test_seed_in_another_process_is_same_run():
    command = [sys.executable, "-W", "ignore", "-m", "tests.protocol.replay_protocol", "masters", "30"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.splitlines() == run(30).lines == run(30).lines


def test_broken_seed_has_command_to_repeat_it(monkeypatch):
    monkeypatch.setattr(masters_run, "play", lambda job: job.check_end())
    with pytest.raises(AttributeError) as caught:
        run(7)
    assert caught.value.__notes__ == ["seed 7: python -m tests.protocol.replay_protocol masters 7"]


def broken_by(seed):
    try:
        run(seed)
    except Violation as error:
        assert "python -m tests.protocol.replay_protocol masters" in error.__notes__[0]
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replaced_master_without_check_ends_needed_process(monkeypatch):
    monkeypatch.setattr(RLMaster, "_check_current", lambda self: None)
    assert any("which was replaced, ends sim/run1/" in broken_by(seed) for seed in range(40, 400))  # 42 is the first


# -- steps that break a rule, before the referee -----------------------------------------------------------------------

LOST = lost("ROLLOUT", 0)
GROUP_LOST = lost("ACTOR", 0)


def judge(event, change=lambda state: state, orders=None, reads_back=True, mourned=()):
    """Let the referee see one step of a running job with a changed outcome."""
    run, referee = Run(*OPEN), Referee(lambda process_id, number: True)
    referee._mourned.update(mourned)
    ((_, before, after, commands, at_s),) = referee.expect(run.state, [event], 99.0)
    changed = change(after)
    step = (event, before, changed if reads_back else after, commands, at_s)
    referee.handled([step], [(event, before, changed, commands if orders is None else orders)])


def ended_by_limit(state):
    return replace(state, phase=Phase.ENDING, ended_by=EndReason.RESTART_LIMIT)


@pytest.mark.parametrize("event", [LOST, GROUP_LOST, Progressed(1, 1)])
def test_referee_of_machines_step_is_silent(event):
    judge(event)


@pytest.mark.parametrize(
    ("event", "changes", "words"),
    [
        (Progressed(1, 1), {"orders": (StartTrainer(1, fresh=True),)}, "changed nothing and ordered"),
        (LOST, {"change": lambda state: replace(state, committed=7), "reads_back": False}, "leads to another state"),
        (LOST, {"change": lambda state: replace(state, epoch=0)}, "a number has fallen"),
        (LOST, {"change": lambda state: replace(state, recoveries={"ROLLOUT": 2})}, "2 recoveries for"),
        (LOST, {"change": lambda state: replace(state, restarts_by={"job": 2})}, "one restart of the job counted"),
        (LOST, {"mourned": [(ProcessId("ROLLOUT", 0), 1)]}, "were recovered before"),
        (LOST, {"orders": (StartTrainer(5, fresh=True),)}, "would not know of"),
        (LOST, {"orders": (Release(9, final=True),)}, "would not know of"),
        (LOST, {"orders": (Wait("ROLLOUT[0]#2", 99.0),)}, "waits for nothing, or too long"),
        (LOST, {"orders": (StartMembers("ROLLOUT", ((0, 1),)),)}, "a number that is not the worker's"),
        (GROUP_LOST, {"orders": (StartMembers("ACTOR", ((0, 2),)),)}, "starts a part of a group"),
        (LOST, {"orders": (StartMembers("ROLLOUT", ((0, 2),), excluded=("a",)),)}, "a node that is excluded"),
        (LOST, {"change": ended_by_limit}, "given up before its limit"),
        (lost("ROLLOUT", 0, kind=CauseKind.HUNG), {}, "of a process that works"),
    ],
)
def test_referee_of_broken_step_raises(event, changes, words):
    with pytest.raises(Violation, match=words):
        judge(event, **changes)


def test_referee_of_other_replayed_state_raises():
    run, referee = Run(*OPEN), Referee(lambda process_id, number: True)
    referee.last = run.state
    referee.replayed(run.state)
    with pytest.raises(Violation, match="replays to another state"):
        referee.replayed(Run(*OPEN, LOST).state)


def test_referee_of_replayed_pending_step_is_silent():
    run, referee = Run(*OPEN), Referee(lambda process_id, number: True)
    referee.last = run.state
    steps = referee.expect(run.state, [LOST, lost("ROLLOUT", 1)], 99.0)
    referee.pending = [steps]
    referee.replayed(steps[0][2])
    assert (referee.last, referee.pending) == (steps[0][2], [])
