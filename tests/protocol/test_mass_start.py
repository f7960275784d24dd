# SPDX-License-Identifier: Apache-2.0
"""A master with 10,000 workers: what it does at once while they start, for a heartbeat, and when it is started again.

Times are of the processor, without the collector's pauses, which here also looks through the simulated cluster.
"""

import asyncio
import gc
import time

import pytest

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.control.liveness import Work
from dlrover.python.rl.control.machine import replay
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.process.brain import JOURNAL
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.member.heartbeat import BeatAnswer, Heartbeat
from tests.protocol.loops_world import Process, World, silence
from tests.protocol.masters_job import Job
from tests.protocol.masters_terms import Terms
from tests.support.manual_clock import within

MEMBERS, PER_NODE = 10_000, 8
NODES = MEMBERS // PER_NODE + 1
JOB = f"""
name: sim
job_dir: {{folder}}
trainer: {{{{module: toys, class: Loop, node_number: {NODES}, device_per_node: {PER_NODE}, device_type: CPU}}}}
workload: {{{{actor: {{{{module: toys, class: Policy, num: {MEMBERS}, per_node: {PER_NODE}}}}}}}}}
liveness: {{{{beat_s: 5, lease_s: 60, start_timeout_s: 600}}}}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]


class Timed(Job):
    """Notes how long each turn of a master's event loop takes; what runs in threads does not count."""

    def __init__(self, world, folder):
        super().__init__(world, folder, Terms(nodes=NODES + 1), JOB.format(folder=folder))
        self.turns_s, self._in_threads_s = [], 0.0

    async def _to_thread(self, function, *arguments, **named):
        await asyncio.sleep(self.world.latency_s())
        began_s = time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            self._in_threads_s += time.thread_time() - began_s

    def timed(self, turn):
        def timed_turn(process):
            self._in_threads_s, began_s = 0.0, time.thread_time()
            turn(process)
            self.turns_s.append(time.thread_time() - began_s - self._in_threads_s)

        return timed_turn

    def is_running(self):
        master = getattr(self.master, "rl_master", None)
        return master is not None and master._state.phase is Phase.RUNNING


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    world = World(1)
    job = Timed(world, tmp_path_factory.mktemp("mass"))
    gc.disable()
    try:
        with silence(), pytest.MonkeyPatch.context() as patch, job.environment():
            patch.setattr(Process, "turn", job.timed(Process.turn))
            job.begin()
            world.run(job.is_running, 3600.0)
            yield job
    finally:
        gc.enable()
        job.close()
        world.close()


def test_other_requests_wait_for_less_than_a_tenth_of_a_second(started):
    assert len(started.turns_s) > MEMBERS
    assert max(started.turns_s) < 0.1


def outcome_of(coroutine):
    """The answer of a process that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits")


def test_a_heartbeat_takes_less_than_20_microseconds(started):
    answers = [
        started.master.rl_master.beat(Heartbeat(ProcessId("ACTOR", rank), 1, work=Work())) for rank in range(MEMBERS)
    ]
    began_s = time.thread_time()
    outcomes = [outcome_of(answer) for answer in answers]
    assert (time.thread_time() - began_s) / MEMBERS < 20e-6
    assert BeatAnswer.REPLACED not in outcomes


def test_the_start_is_replayed_within_a_second(started):
    with within(1.0, time.thread_time):
        state = replay(decode(read_lines(started.folder / JOURNAL)))
    assert (state.phase, state.members.up) == (Phase.RUNNING, MEMBERS)
