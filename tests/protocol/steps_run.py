# SPDX-License-Identifier: Apache-2.0
"""Playing one simulated job to its end, and comparing it with an undisturbed one."""

from functools import cache
from types import SimpleNamespace
from unittest import mock

from dlrover.python.rl.common.errors import CheckpointMissing
from dlrover.python.rl.runtime.checkpoint import member_state, node_memory
from tests.protocol.loops_world import silence, simulated_disk
from tests.protocol.steps_job import WITHIN_S, StepsJob, terms_of
from tests.protocol.steps_world import CopyThread, Violation, simulated


class Lost(Exception):
    """The job ended because all its commits are lost, as they may be."""


@cache
def expected(trainer, together):
    """Return an undisturbed job's results."""
    seed = next(seed for seed in range(4) if terms_of(seed).trainer is trainer and (seed // 2 % 2 == 0) == together)
    with simulated_disk() as folder:
        job = StepsJob(seed, folder)
        job.faults_left, job.faults_on = 0, False
        return play(job)


def run(seed):
    """Simulate one job; returns its world. Raises Violation, with the trace as ``lines``."""
    terms = terms_of(seed)
    wanted = expected(terms.trainer, terms.classes["ACTOR"].needs_own_process)
    with simulated_disk() as folder:
        job = StepsJob(seed, folder)
        try:
            results = play(job)
            differing = [name for name in ("end", "logs") if results[name] != wanted[name]]
            differing += [name for name, state in results["members"].items() if state != wanted["members"][name]]
            if differing:
                raise Violation(f"{differing} differ from an undisturbed run's")
        except Lost:
            job.world.reached["all commits are lost"] += 1
        except Exception as error:
            error.add_note(f"seed {seed}: python -m tests.protocol.replay_protocol steps {seed}")
            error.lines = job.world.lines
            raise
    return job.world


def play(job):
    world = job.world

    def folder_here():
        process = world.current
        inside = getattr(process, "inside", None)
        node = inside[-1][1].host._state.node if inside else getattr(process, "node", None) or process.origin
        return job.folder / node / "memory"

    with (
        silence(),
        mock.patch.object(node_memory, "_memory_folder", folder_here),
        mock.patch.object(node_memory, "_hold", lambda root: None),
        mock.patch.object(member_state, "threading", SimpleNamespace(Thread=Copy)),
        mock.patch.object(member_state, "AT_ONCE_BYTES", 1 << 20 if job.terms.at_once else 0),
        simulated(world),
    ):
        job.start_trainer()
        world.run(lambda: job.trainer.is_done, WITHIN_S)
        for process in world.processes:  # a trainer that was replaced is not job.trainer
            if isinstance(process.error, Violation):
                raise process.error
        if job.allowed and isinstance(job.trainer.error, CheckpointMissing):
            raise Lost from job.trainer.error
        if job.trainer.error is not None:
            raise Violation(f"the trainer ended with {job.trainer.error!r}") from job.trainer.error
        return job.outcome()


class Copy(CopyThread):
    """A thread in the background that knows the node that it was begun on."""

    def start(self):
        super().start()
        begun_by = self.world.current
        inside = getattr(begun_by, "inside", None)
        self._process.origin = inside[-1][1].host._state.node if inside else begun_by.node
        self._process.member = inside[-1][1] if inside else None
