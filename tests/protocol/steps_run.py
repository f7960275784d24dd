# SPDX-License-Identifier: Apache-2.0
"""Playing one simulated job to its end, and comparing it with an undisturbed one."""

import logging
import shutil
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from unittest import mock

from dlrover.python.rl.common.errors import CheckpointMissing
from dlrover.python.rl.runtime.checkpoint import member_state, node_memory
from tests.protocol.steps_job import WITHIN_S, StepsJob, terms_of
from tests.protocol.steps_world import CopyThread, Violation, simulated


class Lost(Exception):
    """The job ended because all its commits are lost, as they may be."""


@cache
def expected(trainer, together):
    """Return an undisturbed job's results."""
    folder = Path(mkdtemp(prefix="steps-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    seed = next(seed for seed in range(4) if terms_of(seed).trainer is trainer and (seed // 2 % 2 == 0) == together)
    job = StepsJob(seed, folder)
    job.faults_left, job.faults_on = 0, False
    try:
        return play(job)
    finally:
        shutil.rmtree(folder)


def run(seed):
    """Simulate one job; returns its world. Raises Violation, with the trace as ``lines``."""
    folder = Path(mkdtemp(prefix="steps-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    terms = terms_of(seed)
    wanted = expected(terms.trainer, terms.classes["ACTOR"].needs_own_process)
    job = StepsJob(seed, folder)
    try:
        try:
            results = play(job)
        except Lost:
            job.world.reached["all commits are lost"] += 1
            return job.world
        for name in ("end", "logs"):
            if results[name] != wanted[name]:
                raise Violation(f"{name}: the results differ from an undisturbed run's")
        differing = [name for name, state in results["members"].items() if state != wanted["members"][name]]
        if differing:
            raise Violation(f"the states of {differing} differ from an undisturbed run's")
    except Exception as error:
        error.add_note(f"seed {seed}: python -m tests.protocol.replay_protocol steps {seed}")
        error.lines = job.world.lines
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return job.world


@contextmanager
def silence():
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


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
        mock.patch.object(member_state, "threading", SimpleNamespace(Thread=copies_of(world))),
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


def copies_of(world):
    """The class of threads in the background: each knows the node that it was begun on."""

    class Copy(CopyThread):
        def start(self):
            super().start()
            begun_by = world.current
            inside = getattr(begun_by, "inside", None)
            self._process.origin = inside[-1][1].host._state.node if inside else begun_by.node
            self._process.member = inside[-1][1] if inside else None

    return Copy
