# SPDX-License-Identifier: Apache-2.0
"""The master's process: the production brain on a simulated disk, which may be killed at any point of its journal."""

from collections import deque
from collections.abc import Callable
from typing import Any

from sim_cluster import Cluster, Proc
from sim_disk import Killed, SimDisk
from sim_executor import SimExecutor, died
from sim_referee import Referee
from sim_world import Violation, World

from dlrover.python.rl.common.names import ProcessId, ProcessKind
from dlrover.python.rl.control.events import CauseKind, Event, MasterStarted, Submitted, make_lost_event

HANG_AFTER_S = 3.0
BEAT_S = 0.5


class WatchedStore:
    """A journal that knows whether its last line was written."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.appended: bool | None = False

    def append(self, *lines: bytes) -> None:
        self.appended = None
        self.inner.append(*lines)
        self.appended = True

    def read(self) -> list[bytes]:
        return self.inner.read()

    def close(self) -> None:
        self.inner.close()


class SimMaster:
    """One process of the master.

    Args:
        modules: the production modules.
        disk: where the journal is.
        referee: looks at every step.
    """

    def __init__(self, world: World, cluster: Cluster, modules: Any, disk: SimDisk, referee: Referee) -> None:
        self.world, self.cluster, self.modules, self.disk, self.referee = world, cluster, modules, disk, referee
        self.alive = True
        self.queue: deque[Event] = deque()
        self.blocked = False
        self.noise = (0.0, 0.0)
        self.on_death: Callable[[], None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        self.since_s = world.now_s
        self.executor: Any = None
        self.brain: Any = None

    def begin(self, settings: Submitted, talk: Any) -> None:
        """Come up, for the first time or again."""
        self.world.trace("master up")
        try:
            self.store = WatchedStore(self.modules.journal_store.FileStateStore(self.disk.path("journal")))
        except Killed:
            self.die()
            return
        except OSError:  # no room even to begin: the cluster starts it once more
            self.die()
            return
        self.brain = self.modules.brain.Brain(self.store, *[lambda: self.world.now_s] * 2)
        self.referee.replayed(self.brain.state)
        self.settings = settings
        self.executor = SimExecutor(self.world, self.cluster, self.send, self._here, talk)
        self.take(MasterStarted())

    def _came_up(self) -> None:
        """The journal knows that there is another process; only now it may act."""
        state = self.brain.state
        if state.settings is None:
            self.take(self.settings)
        else:
            self.executor.adopt(state, self.modules.state.processes(state) if state.phase.live else {})
            for command in self.modules.machine.outstanding(self.brain.state):
                self.executor.execute(command)
        self.world.after(1.0, self._pulse)

    def _here(self) -> bool:
        return self.alive

    @property
    def state(self) -> Any:
        return self.brain.state

    # -- news ---------------------------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """A report on its way: late, twice, or overtaken."""
        again, late_s = self.noise
        self.world.after(self.world.rng.random() * late_s, self.take, event)
        if self.world.rng.random() < again:
            self.world.after(self.world.rng.random() * late_s * 4, self.take, event)

    def take(self, event: Event) -> None:
        """News has arrived."""
        if not self.alive:
            return
        self.queue.append(event)
        while self.queue and self.alive and not self.blocked:
            self._handle(self.queue.popleft())

    def _handle(self, event: Event) -> None:
        before = self.brain.state
        self.referee.expect(before, event, self.world.now_s)
        try:
            self.store.appended = False
            commands = self.brain.handle(event)
        except Killed:
            self.referee.written = self.store.appended
            self.die()
            return
        except OSError:
            self.referee.written = None  # its line may be on the disk
            self.blocked = True
            self.queue.appendleft(event)
            self.world.after(0.5, self._unblock)
            return
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        after = self.brain.state
        if after is not before:
            self.world.trace("event", event)
        self.referee.stepped(before, event, after, commands)
        if isinstance(event, MasterStarted):
            self._came_up()
            return
        for command in commands:
            self.executor.execute(command)
        if after is not before:
            self.after_step()

    def _unblock(self) -> None:
        self.blocked = False
        if self.alive and self.queue:
            self.take(self.queue.pop())

    def die(self) -> None:
        """The process is killed."""
        if not self.alive:
            return
        self.world.trace("master gone")
        self.alive = False
        if self.executor is not None:
            self.cluster.node_watchers.remove(self.executor._node_lost)
        self.on_death()

    # -- who makes no progress ----------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        if not self.alive or self.state.phase.terminal:
            return
        liveness, now_s = self.modules.liveness, self.world.now_s
        up = self.modules.state.processes(self.state) if self.state.phase.live else {}
        roles = self.state.settings.roles if self.state.settings is not None else {}
        procs = {
            process_id: self.cluster.procs[process.pid - 1]
            for process_id, process in up.items()
            if process_id.kind is not ProcessKind.STANDBY
        }
        signs = [self._sign(process_id, proc) for process_id, proc in procs.items()]
        limits = {role: HANG_AFTER_S for role in [*roles, "trainer"]}
        for sign, _ in liveness.hangs(signs, limits, liveness.Listening(BEAT_S, self.since_s), now_s):
            self._kill_hung(sign.process_id, procs[sign.process_id])
        self.world.after(1.0, self._pulse)

    def _sign(self, process_id: ProcessId, proc: Proc) -> Any:
        heard_s = self.world.now_s if proc.heard_s is None else proc.heard_s
        stuck = proc.stuck_s is not None and proc.stuck_s <= heard_s
        since_s = proc.stuck_s if proc.stuck_s is not None and stuck else heard_s
        assert proc.identity is not None
        method = "update" if stuck else ""
        return self.modules.liveness.Sign(process_id, proc.identity[1], method, since_s, 1, heard_s)

    def _kill_hung(self, process_id: ProcessId, proc: Proc) -> None:
        if proc.works and not proc.node.cut:
            raise Violation(f"{process_id} works and was taken for hung")
        if not proc.alive:
            return
        proc.watchers = []
        self.cluster.end(proc)
        assert proc.identity is not None
        lost = make_lost_event(process_id, proc.identity[1], died(process_id, CauseKind.HUNG))
        self.send(lost)
