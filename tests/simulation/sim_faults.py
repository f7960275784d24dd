# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, when, and a count of which fault met which situation."""

import errno
from collections.abc import Callable
from random import Random
from typing import Any

from sim_cluster import Proc

from dlrover.python.rl.control.events import Cause, CauseKind, StopRequested

PROCESS_FAULTS = ("member_crash", "member_stop", "member_stuck", "standby_crash", "trainer_crash", "trainer_stop")
NODE_FAULTS = ("node_kill", "node_cut")
JOURNAL_FAULTS = ("journal_kill", "journal_power", "disk_full")
MASTER_FAULTS = ("master_kill", "master_power")
RARE_FAULTS = ("user_error", "stop")
FAULTS = (*PROCESS_FAULTS, *NODE_FAULTS, *JOURNAL_FAULTS, *MASTER_FAULTS, *RARE_FAULTS)

_ALWAYS = (*NODE_FAULTS, *JOURNAL_FAULTS, *MASTER_FAULTS, "stop")
SITUATIONS: dict[str, tuple[str, ...]] = {
    "created": _ALWAYS,
    "placed": (*_ALWAYS, *PROCESS_FAULTS),
    "opening": FAULTS,
    "stepping": FAULTS,
    "recovering": FAULTS,
    "restarting": _ALWAYS,
    "ending": _ALWAYS,
    "away": (*PROCESS_FAULTS, *NODE_FAULTS, "user_error"),
}
"""Situation to the faults that can meet it."""


def situation(job: Any) -> str:
    """Where the job is, coarsely."""
    if job.master is None or not job.master.alive:
        return "away"
    state = job.master.state
    if state.phase == "running":
        if not state.opened:
            return "opening"
        up = state.trainer.phase == "up" and all(member.phase == "up" for member in state.members.values())
        return "stepping" if up else "recovering"
    return str(state.phase.value)


class Faults:
    """Injects faults into a job until it is healed.

    Args:
        job: the simulated job.
    """

    def __init__(self, job: Any) -> None:
        self.job, self.world, self.cluster = job, job.world, job.cluster
        self.on = True
        self.power_too = False
        rng = self.world.rng
        self.rate_s = rng.choice([1.0, 3.0, 8.0])
        usual = [*PROCESS_FAULTS, *NODE_FAULTS, *JOURNAL_FAULTS, *MASTER_FAULTS]
        self.kinds = rng.sample(usual, rng.randint(3, len(usual)))
        if rng.random() < 0.15:
            self.kinds.append(rng.choice(RARE_FAULTS))
        self.armed = {}
        for _ in range(rng.randint(1, 3)):
            where = rng.choice(list(SITUATIONS))
            self.armed[where] = rng.choice(SITUATIONS[where])
        self.world.after(rng.expovariate(1.0 / self.rate_s), self._strike)
        self.of_disk = Random(self.world.seed)
        self.world.after(self.of_disk.expovariate(1.0 / self.rate_s), self._falter)

    def _falter(self) -> None:
        """Let the journal's disk falter for a while, and perhaps again later."""
        if self.on and self.of_disk.random() < 0.5:
            self.job.disk.error = self.of_disk.choice((errno.EIO, errno.ESTALE, errno.ETIMEDOUT))
            self.world.sometimes[f"{situation(self.job)}/disk_falters"] += 1
            self.world.after(self.of_disk.uniform(0.2, 4.0), self._answer_again)
            self.world.after(self.of_disk.uniform(5.0, 20.0), self._falter)

    def _answer_again(self) -> None:
        self.job.disk.error = None

    def _strike(self) -> None:
        if self.on:
            self.inject(self.world.rng.choice(self.kinds))
            self.world.after(self.world.rng.expovariate(1.0 / self.rate_s), self._strike)

    def entered(self, where: str) -> None:
        """The job is in another situation than before: what lies in wait there strikes."""
        fault = self.armed.pop(where, None) if self.on else None
        if fault is not None:
            self.world.after(self.world.rng.random() * 0.05, self._spring, fault)

    def _spring(self, fault: str) -> None:
        if self.on:
            self.inject(fault)

    def inject(self, fault: str) -> None:
        """Let ``fault`` happen now, if there is something for it to happen to."""
        where = situation(self.job)
        doing: Callable[[], bool] = getattr(self, f"_{fault}")
        if doing():
            self.world.sometimes[f"{where}/{fault}"] += 1
            self.world.trace("fault", fault, where)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _pick(self, kind: str) -> Proc | None:
        procs = [proc for proc in self.cluster.alive() if self._kind(proc) == kind and proc.stopped_s is None]
        return self.world.rng.choice(procs) if procs else None

    def _kind(self, proc: Proc) -> str:
        if proc.identity is None:
            return "standby"
        return str(proc.identity[0].kind)

    def _crash(self, kind: str) -> bool:
        proc = self._pick(kind)
        if proc is not None:
            self.cluster.kill(proc)
        return proc is not None

    def _stop_process(self, kind: str) -> bool:
        proc = self._pick(kind)
        if proc is not None:
            proc.stopped_s = self.world.now_s
        return proc is not None

    def _member_crash(self) -> bool:
        return self._crash("member")

    def _standby_crash(self) -> bool:
        return self._crash("standby")

    def _trainer_crash(self) -> bool:
        return self._crash("trainer")

    def _member_stop(self) -> bool:
        return self._stop_process("member")

    def _trainer_stop(self) -> bool:
        return self._stop_process("trainer")

    def _member_stuck(self) -> bool:
        proc = self._pick("member")
        if proc is not None:
            proc.stuck_s = self.world.now_s
        return proc is not None

    def _user_error(self) -> bool:
        proc = self._pick("trainer")
        if proc is None or proc.result is not None:
            return False
        proc.result = Cause(CauseKind.USER_ERROR, "trainer", "the user's own words")
        return True

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _node_kill(self) -> bool:
        nodes = [node for node in self.cluster.nodes if node.usable]
        if nodes:
            self.cluster.kill_node(self.world.rng.choice(nodes))
        return bool(nodes)

    def _node_cut(self) -> bool:
        nodes = [node for node in self.cluster.nodes if node.usable]
        if not nodes:
            return False
        node = self.world.rng.choice(nodes)
        self.cluster.cut_node(node)
        self.world.after(self.world.within(0.5, 20.0), self.cluster.heal_node, node)
        return True

    # -- the master ---------------------------------------------------------------------------------------------------

    def _master_kill(self) -> bool:
        master = self.job.master
        if master is None or not master.alive:
            return False
        master.die()
        return True

    def _master_power(self) -> bool:
        if not self._master_kill():
            return False
        self.job.disk.power_fails()
        return True

    def _journal_kill(self) -> bool:
        """The master is killed at one of its next operations on the journal's file."""
        if self.job.disk.kill_in is not None:
            return False
        self.job.disk.kill_in = self.world.rng.randint(1, 6)
        return True

    def _journal_power(self) -> bool:
        """The same, and the power fails."""
        if self._journal_kill():
            self.power_too = True
            return True
        return False

    def _disk_full(self) -> bool:
        self.job.disk.room = self.world.rng.randint(0, 300)
        self.world.after(self.world.within(0.2, 5.0), self._disk_free)
        return True

    def _disk_free(self) -> None:
        self.job.disk.room = None

    # -- people -------------------------------------------------------------------------------------------------------

    def _stop(self) -> bool:
        master = self.job.master
        if master is None or not master.alive:
            return False
        master.take(StopRequested("somebody wants it"))
        return True

    def heal(self) -> None:
        """From here on nothing goes wrong any more."""
        self.on = False
        self.job.disk.room = self.job.disk.kill_in = self.job.disk.error = None
        for node in self.cluster.nodes:
            self.cluster.heal_node(node)
        self.cluster.refill()
