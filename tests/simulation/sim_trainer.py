# SPDX-License-Identifier: Apache-2.0
"""A trainer that does durable steps: what it knows, whom it asks, and the store that its commits go to."""

from collections.abc import Callable
from typing import Any

from sim_cluster import Cluster, Proc
from sim_world import Violation, World

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import Cause, CauseKind


class StaleEpoch(Exception):
    """A later trainer has begun to commit."""


class Checkpoints:
    """Where commits go. Refuses older epochs; knows which of what it took it must never have been given."""

    def __init__(self, world: World) -> None:
        self.world, self.fence, self.committed = world, 0, 0
        self.writers: dict[int, int] = {}
        self.highest: dict[str, int] = {}

    def open(self, epoch: int) -> int:
        """Shut older epochs out; the last committed step."""
        if epoch < self.fence:
            raise StaleEpoch
        self.fence = epoch
        return self.committed

    def commit(self, epoch: int, step: int, trainer: Proc, members: dict[ProcessId, Proc]) -> None:
        """Take a step."""
        if epoch < self.fence:
            self.world.sometimes["a commit of an old epoch was refused"] += 1
            raise StaleEpoch
        if step != self.committed + 1:
            raise Violation(f"step {step} is committed after step {self.committed}")
        if self.writers.setdefault(epoch, trainer.pid) != trainer.pid:
            raise Violation(f"two processes commit in epoch {epoch}")
        self._check_members(members)
        self.committed = step
        self.world.trace("commit", epoch, step)

    def _check_members(self, members: dict[ProcessId, Proc]) -> None:
        for who, proc in members.items():
            assert proc.identity is not None
            number = proc.identity[1]
            if proc.identity[0] != who or number < self.highest.get(who, 0):
                raise Violation(f"{proc.identity} commits as {who} after incarnation {self.highest.get(who)}")
            self.highest[who] = number


class SimTrainer:
    """The code inside a trainer's process.

    Args:
        talk: the master, whichever there is (``opened``, ``progressed``, ``renew``), and the terms of the job.
        proc: the process.
        fresh: whether the workers are as new.
        seats: the workers at the start.
    """

    def __init__(
        self, world: World, cluster: Cluster, talk: Any, proc: Proc, fresh: bool, seats: dict[ProcessId, Proc]
    ) -> None:
        self.world, self.cluster, self.talk, self.proc, self.fresh = world, cluster, talk, proc, fresh
        self.epoch = proc.name[2]
        self.seats = seats
        self.numbers = {who: member.identity[1] for who, member in seats.items() if member.identity}
        self.step = 0
        self.told = False
        self.said_open = False

    def _later(self, low_s: float, high_s: float, call: Callable[[], None]) -> None:
        def go_on() -> None:
            if self.proc.works:
                call()

        self.world.after(self.world.within(low_s, high_s), go_on)

    def begin(self) -> None:
        """Run ``init``."""
        self._later(0.1, 0.6, self._init)

    def _init(self) -> None:
        if self.fresh and not all(self._answers(member) for member in self.seats.values()):
            self._fail_with_member()
        elif not self.talk.durable:
            self._later(1.0, 5.0, self._fit)
        elif self._whole(self._init):
            try:
                self.step = self.talk.checkpoints.open(self.epoch) + 1
            except StaleEpoch:
                self.cluster.kill(self.proc)
                return
            self._say_open()
            self._body()

    def _fail_with_member(self) -> None:
        """Without steps a worker's death is the trainer's error."""
        who = next((who for who, member in self.seats.items() if not self._answers(member)), "job")
        self.proc.result = Cause(CauseKind.PROCESS_DIED, str(who), f"{who} is gone")

    def _fit(self) -> None:
        """Training without steps."""
        if not all(self._answers(member) for member in self.seats.values()):
            self._fail_with_member()
        elif self.talk.healed:
            self.proc.result = ""
        else:
            self._later(1.0, 5.0, self._fit)

    def _say_open(self) -> None:
        if not self.talk.opened(self.proc, self.epoch):
            self._later(0.3, 0.6, self._say_open)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _body(self) -> None:
        self._later(0.1, 0.8, self._commit)

    def _commit(self) -> None:
        if not self._whole(self._commit):
            return
        for member in self.seats.values():
            if self.epoch < member.highest_epoch:
                self.cluster.kill(self.proc)
                return
            member.highest_epoch = self.epoch
        self.talk.check_groups(self.seats)
        try:
            self.talk.checkpoints.commit(self.epoch, self.step, self.proc, self.seats)
        except StaleEpoch:
            self.cluster.kill(self.proc)
            return
        self.cluster.memory = self.cluster.memory or self.proc.node.usable
        self.told = self.told or self.talk.progressed(self.proc, self.epoch, self.step)
        if self.step >= self.talk.total_steps:
            self.proc.result = ""
            return
        self.step += 1
        self._body()

    def _answers(self, member: Proc) -> bool:
        return member.works and member.up and self.cluster.reach(self.proc.node, member.node)

    def _whole(self, again: Callable[[], None]) -> bool:
        """Whether all workers answer; else have those that do not replaced, and come back."""
        whole = True
        for who in list(self.seats):
            member = self.seats[who]  # another one's replacement may have brought this one's along
            refuses = member.identity != (who, self.numbers[who])  # it goes on as a later incarnation
            if self._answers(member) and not refuses:
                continue
            whole, self.told = False, False
            # A call to a process that does nothing is pending; only its death ends it.
            gone = not member.alive or not self.cluster.reach(self.proc.node, member.node)
            if gone or refuses or not member.up:
                renewed = self.talk.renew(self.proc, who, self.numbers[who])
                self.seats |= renewed
                self.numbers |= {name: seat.identity[1] for name, seat in renewed.items() if seat.identity}
        if not whole:
            self._later(0.1, 0.3, again)
        return whole
