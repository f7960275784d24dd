# SPDX-License-Identifier: Apache-2.0
"""One seed of the simulation of masters: faults at random, then quiet, in which the job must finish."""

import errno
import logging
import shutil
from pathlib import Path
from tempfile import mkdtemp

from dlrover.python.rl.control.state import Phase
from tests.protocol.loops_world import World
from tests.protocol.masters_job import LEASE_S, Job

FAULTS = (
    "worker dies",
    "standby dies",
    "trainer dies",
    "worker hangs",
    "trainer hangs",
    "master dies",
    "master freezes",
    "master is replaced while it is frozen",
    "master is replaced while it is cut off",
    "node is lost",
    "journal's disk is full",
    "journal's disk falters",
    "everything is slow",
    "Ray's head is away",
)
TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
OF_TRAINER = ("trainer dies", "trainer hangs")
_FAULTY_S, _QUIET_S = 60.0, 900.0


class Faults:
    def __init__(self, job: Job) -> None:
        self.job, self.world, self.rng = job, job.world, job.world.rng
        self.until_s = self.world.now_s + _FAULTY_S

    def go_on(self) -> None:
        """A fault, and later the next one."""
        if self.world.now_s > self.until_s or self.job.is_over():
            return
        self.strike(self._any())
        if self.rng.random() < 0.4:  # in the middle of what the first one has set off
            self.world.after(0.03 * self.rng.random(), lambda: self.strike(self._any()))
        self.world.after(self.rng.choice((0.05, 0.5, 2.0, 8.0)) * self.rng.random() * 2, self.go_on)

    def _any(self) -> str:
        """Choose a fault; in a restart of the job often the trainer's, which is up for a short part of it."""
        is_restarting = self.job.phase is Phase.RESTARTING and self.rng.random() < 0.5
        return self.rng.choice(OF_TRAINER if is_restarting else FAULTS)

    def strike(self, fault: str) -> None:
        phase = self.job.phase
        if getattr(self, f"_{fault.replace(' ', '_').replace(chr(39), '')}")() is not False:
            self.world.trace("FAULT", fault, "in", phase)
            self.world.reached[f"{fault} / {phase.value if phase else 'nothing'}"] += 1

    def _one(self, part):
        matching = [actor for name, actor in sorted(self.job.cluster.actors.items()) if part(name)]
        return self.rng.choice(matching) if matching else None

    def _do(self, part, method):
        actor = self._one(part)
        if actor is None:
            return False
        self.world.trace("fault at", actor.name)
        getattr(actor, method)()
        return True

    def _worker_dies(self):
        return self._do(lambda name: "/trainer/" not in name and "standby" not in name, "die")

    def _standby_dies(self):
        return self._do(lambda name: "standby" in name, "die")

    def _trainer_dies(self):
        return self._do(lambda name: "/trainer/" in name, "die")

    def _worker_hangs(self):
        return self._do(lambda name: "/trainer/" not in name, "stick")

    def _trainer_hangs(self):
        return self._do(lambda name: "/trainer/" in name, "stick")

    def _restart_later(self):
        self.world.after(self.rng.uniform(0.5, 3.0), self.job.start_master)

    def _is_served(self):
        return self.job.cluster.master is self.job.master and not self.job.master.is_dead

    def _master_dies(self):
        if not self._is_served() or self.job.is_over():
            return False
        self.job.master.kill()
        self._restart_later()
        return True

    def _master_freezes(self):
        if not self._is_served():
            return False
        self.job.master.thaws_s = self.world.now_s + self.rng.choice((0.3, 3.0, 15.0)) * self.rng.random()
        return True

    def _master_is_replaced_while_it_is_frozen(self):
        if not self._is_served() or self.job.is_over():
            return False
        self.job.master.thaws_s = self.world.now_s + self.rng.uniform(0.5, 25.0)
        self._restart_later()
        return True

    def _master_is_replaced_while_it_is_cut_off(self):
        if not self._is_served() or self.job.is_over():
            return False
        self.job.start_master()
        return True

    def _node_is_lost(self):
        alive = [node for node, is_alive in self.job.cluster.nodes.items() if is_alive]
        if len(alive) < 3:
            return False
        self.job.cluster.lose_node(self.rng.choice(sorted(alive)))
        self.world.after(self.rng.uniform(1.0, 20.0), self.job.cluster.add_node)
        return True

    def _journals_disk_is_full(self):
        self._fail_disk("pwrite", errno.ENOSPC)

    def _journals_disk_falters(self):
        self._fail_disk(self.rng.choice(("pwrite", "fsync")), self.rng.choice(TRANSIENT))

    def _fail_disk(self, call, number):
        self.job.failing = call, number
        self.world.after(self.rng.uniform(0.2, 6.0), lambda: setattr(self.job, "failing", None))

    def _everything_is_slow(self):
        self.world.slowness = 50.0
        self.world.after(self.rng.uniform(0.5, 6.0), lambda: setattr(self.world, "slowness", 1.0))

    def _Rays_head_is_away(self):  # noqa: N802 -- as the fault is called
        self.job.cluster.is_away = True
        self.world.after(self.rng.uniform(0.5, 8.0), lambda: setattr(self.job.cluster, "is_away", False))


def run(seed: int) -> World:
    """Simulate one job; returns its world. Raises Violation, with the trace as ``lines``."""
    folder = Path(mkdtemp(prefix="masters-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    world = World(seed)
    job = Job(world, folder)
    logging.disable(logging.CRITICAL)
    try:
        play(job)
    except Exception as error:
        error.add_note(f"seed {seed}: python tests/protocol/replay_protocol.py masters {seed}")
        error.lines = world.lines
        raise
    finally:
        logging.disable(logging.NOTSET)
        job.close()
        world.close()
        shutil.rmtree(folder, ignore_errors=True)
    return world


def play(job: Job) -> None:
    """Faults, and then none, until the job has finished and nothing of it is left."""
    with job.environment():
        rng = job.world.rng
        job.begin()
        faults = Faults(job)
        job.world.after(rng.choice((1.5, 3.0, 10.0)) * rng.random(), faults.go_on)
        job.world.run(job.is_over, _FAULTY_S + _QUIET_S)
        job.check_end()
        # A master that was replaced before it did anything ends after five minutes.
        job.world.run(lambda: not job.left_over(), 300.0 + 3 * LEASE_S)
