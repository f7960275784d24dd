# SPDX-License-Identifier: Apache-2.0
"""A thread that does the planned faults to a running job. It knows victims by their pid and asks no process of the job.

::

    for each burst: wait until its step is committed and everything before has healed -> strike, strike ...

What a fault leaves to be done later (a stopped process continues, a node joins, the disk is emptied) a helper thread
does; the next burst waits for that too.
"""

import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.damage import fill_disk, flip_bit, tear, tear_journal
from tests.chaos.faults import NODE_LOSSES, Burst, Kind, Planned
from tests.chaos.gates import Gates
from tests.chaos.ledger import Recorder, Up, is_alive
from tests.ray.two_nodes import TwoNodes

_LOOK_S = 0.01
_AHEAD = 2
_HEAL_S = 180.0
_REACH_S = 30.0
_DISK_S = 3.0
_PAUSE_S = 1.5
_RAYLET_PAUSE_S = 0.5
_PARTITION_S = 20.0
_JOIN_S = 120.0
_AFTER_PARTITION_S = 2.0

_HUNG = {Kind.HANG_ACTOR: "ACTOR[", Kind.HANG_ROLLOUT: "ROLLOUT[", Kind.HANG_REWARD: "REWARD["}
_HUNG |= {Kind.HANG_TRAINER: "trainer"}
_KILLED = {Kind.KILL_ACTOR: "ACTOR[", Kind.KILL_ROLLOUT: "ROLLOUT[", Kind.KILL_REWARD: "REWARD["}
_KILLED |= {Kind.KILL_TRAINER: "trainer", Kind.KILL_MASTER: "master", Kind.KILL_STANDBY: "-standby["}


class Stalled(Exception):
    """The job did not heal in time."""


@dataclass
class Injected:
    """A fault that struck."""

    kind: Kind
    at_s: float  # since 1970
    step: int  # the newest commit at that time
    who: str = ""  # the victim, "node" or "GCS"
    pid: int = 0
    node: str = ""  # that was lost
    note: str = ""  # what it hit, for the log
    back_s: float = 0.0  # when what the harness itself watches was back; 0 for what the journal tells


@dataclass(frozen=True)
class Target:
    """The processes and files that the injector can reach."""

    recorder: Recorder
    cluster: TwoNodes
    gates: Gates
    job_dir: Path
    own_disk: bool
    # Done by the main thread: Ray starts nodes in no other.
    errands: "queue.SimpleQueue[Callable[[], None]]" = field(default_factory=queue.SimpleQueue)


class Injector:
    """Does the faults of a plan to a target; ``problem`` says why not all of them struck."""

    def __init__(self, plan: Sequence[Burst], target: Target, log: Callable[[str], None]) -> None:
        self.done: list[Injected] = []
        self.problem = ""
        self._plan, self._target, self._log = plan, target, log
        self._recorder, self._cluster = target.recorder, target.cluster
        self._node, self._last_step = len(target.cluster.nodes) - 1, 0
        self._over = threading.Event()
        self._later: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="chaos-injector", daemon=True)

    def __enter__(self) -> "Injector":
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        self._thread.join(timeout=_HEAL_S)
        for thread in self._later:
            thread.join(timeout=_HEAL_S)

    def _run(self) -> None:
        try:
            for burst in self._plan:
                self._target.gates.allow(burst.step + _AHEAD)
                self._await(lambda burst=burst: self._due(burst), f"step {burst.step} committed and all healed")
                for planned in burst.faults:
                    self._over.wait(planned.after_s)
                    injected = _METHODS[planned.kind](self, planned)
                    self.done.append(injected)
                    self._last_step = self._recorder.step
                    struck = f"{time.strftime('%H:%M:%S', time.localtime(injected.at_s))} fault {len(self.done)}"
                    victim = f"{injected.who} {injected.pid or ''} {injected.note}".rstrip()
                    self._log(f"{struck}: {injected.kind.value} at step {injected.step}: {victim}")
        except Stalled as stalled:
            self.problem = str(stalled)
        except Exception:  # noqa: BLE001 -- a thread's error would otherwise pass unseen
            self.problem = traceback.format_exc()
        self._target.gates.allow(None)
        if self.problem:
            self._log(f"the injector ends: {self.problem}")

    def _due(self, burst: Burst) -> bool:
        recorder = self._recorder
        healed = recorder.step > self._last_step and not any(thread.is_alive() for thread in self._later)
        return recorder.step >= burst.step and healed and recorder.ledger.complete()

    def _await(self, condition: Callable[[], bool], event: str, timeout_s: float = _HEAL_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        step = self._recorder.step
        while not condition():
            if self._over.wait(_LOOK_S):
                raise Stalled(f"the job ended while waiting for: {event}")
            if self._recorder.step > step:  # it continues: only standing still counts
                step, deadline_s = self._recorder.step, time.monotonic() + timeout_s
            if time.monotonic() > deadline_s:
                up = ", ".join(sorted(self._recorder.ledger.up))
                raise Stalled(f"after {timeout_s:g} s without a commit, still not: {event}; up: {up}")

    def _injected(self, planned: Planned, **more: object) -> Injected:
        return Injected(planned.kind, time.time(), self._recorder.step, **more)  # type: ignore[arg-type]

    def _soon(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Stalled as stalled:
                self.problem = self.problem or ("" if self._over.is_set() else str(stalled))
            except Exception:  # noqa: BLE001 -- a thread's error would otherwise pass unseen
                self.problem = traceback.format_exc()

        thread = threading.Thread(target=run, name="chaos-later", daemon=True)
        self._later = [other for other in self._later if other.is_alive()] + [thread]
        thread.start()

    def _victim(self, part: str, pick: int) -> Up:
        """One that is up now; one that is being replaced is waited for."""
        victims: list[Up] = []

        def some() -> bool:
            up = sorted(self._recorder.ledger.up.items())
            is_standby = part.startswith("-")
            fitting = [one for name, one in up if (part in name if is_standby else name.startswith(part))]
            victims[:] = [one for one in fitting if is_alive(one.pid)]
            return bool(victims)

        self._await(some, f"a process {part}", _REACH_S)
        return victims[pick % len(victims)]

    def _signal(self, planned: Planned, number: int, part: str) -> Injected:
        victim = self._victim(part, planned.pick)
        injected = self._injected(planned, who=victim.who, pid=victim.pid, node=victim.node)
        os.kill(victim.pid, number)
        return injected

    def _kill_or_hang(self, planned: Planned) -> Injected:
        if planned.kind in _KILLED:
            return self._signal(planned, signal.SIGKILL, _KILLED[planned.kind])
        return self._signal(planned, signal.SIGSTOP, _HUNG[planned.kind])

    def _cut(self, planned: Planned) -> Injected:
        gate = "receive_weights" if planned.kind is Kind.CUT_RECEIVE else "publish_weights"
        self._target.gates.arm(gate)
        pid = self._target.gates.await_taken(gate, _REACH_S)
        if pid is None:
            raise Stalled(f"no process came to {gate} within {_REACH_S:g} s")
        process = next((up.who for up in self._recorder.ledger.up.values() if up.pid == pid), "")
        injected = self._injected(planned, who=process, pid=pid, note=f"inside {gate}")
        os.kill(pid, signal.SIGKILL)
        return injected

    def _poison(self, planned: Planned) -> Injected:
        injected = self._injected(planned, who="ACTOR[0]")
        self._target.gates.arm("nan_loss")
        if self._target.gates.await_taken("nan_loss", _REACH_S) is None:
            raise Stalled(f"no update within {_REACH_S:g} s")
        injected.at_s, injected.step = time.time(), self._recorder.step
        return injected

    def _damage_commit(self, planned: Planned) -> Injected:
        """Damage the newest commit and kill the actor, so that it must be read. The actor is stopped first: no newer
        commit comes in between."""
        victim = self._victim("ACTOR[", planned.pick)
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            newest = self._recorder.newest()
            if newest is None:
                raise Stalled("there is no commit to damage")
            note = self._damage(planned, newest.folder)
            injected = self._injected(planned, who=victim.who, pid=victim.pid, node=victim.node, note=note)
            injected.step = newest.step
        finally:
            os.kill(victim.pid, signal.SIGKILL)
        return injected

    def _damage_checkpoint(self, planned: Planned) -> Injected:
        """Damage the newest copy in the job's directory. Nothing reads it now, and nothing may take it for good."""
        submitted = self._recorder.ledger.submitted
        root = self._target.job_dir / "checkpoints" / (submitted.run if submitted else "")
        self._await(lambda: bool(list(root.glob("step-*/manifest.json"))), "a checkpoint", _REACH_S)
        newest = max(root.glob("step-*/manifest.json")).parent
        return self._injected(planned, note=self._damage(planned, newest))

    def _damage(self, planned: Planned, folder: Path) -> str:
        files = sorted(file for file in folder.iterdir() if file.stat().st_size)
        file = files[planned.pick % len(files)]
        if planned.kind in (Kind.FLIP_MEMORY, Kind.FLIP_DURABLE):
            return f"{folder.name}/{file.name}: bit {flip_bit(file, planned.pick)}"
        return f"{folder.name}/{file.name}: cut to {tear(file, planned.pick)} bytes"

    def _tear_journal(self, planned: Planned) -> Injected:
        injected = self._signal(planned, signal.SIGKILL, "master")
        self._await(lambda: not is_alive(injected.pid), "the master's end", _REACH_S)
        injected.note = f"{tear_journal(self._recorder.journal)} bytes of half a line"
        return injected

    def _full_disk(self, planned: Planned) -> Injected:
        if not self._target.own_disk:
            return self._injected(planned, note="skipped: the job's directory is not a separate disk")
        empty = fill_disk(self._target.job_dir)
        injected = self._injected(planned)
        return self._end_after(injected, _DISK_S, empty)

    def _kill_gcs(self, planned: Planned) -> Injected:
        injected = self._injected(planned, who="GCS", pid=self._gcs())
        os.kill(injected.pid, signal.SIGKILL)

        def later() -> None:
            self._await(lambda: self._gcs_is_back(injected.pid), "the GCS", _REACH_S)
            injected.back_s = time.time()

        self._soon(later)
        return injected

    def _gcs(self) -> int:
        """The pid of the GCS; one that is being started again is waited for."""
        self._await(lambda: self._gcs_is_back(0), "the GCS", _REACH_S)
        return self._cluster.gcs_pid()

    def _gcs_is_back(self, before: int) -> bool:
        with suppress(KeyError, IndexError):  # between the two
            return self._cluster.gcs_pid() != before
        return False

    def _lose_node(self, planned: Planned) -> Injected:
        index, cluster = self._node, self._cluster
        injected = self._injected(planned, who="node", pid=cluster.raylet_pid(index), node=cluster.node_id(index))
        ways = {Kind.CUT_NODE: cluster.stop_raylet, Kind.KILL_NODE: cluster.kill_node}
        ways.get(planned.kind, cluster.kill_raylet)(index)
        self._soon(lambda: self._replace_node(injected, index))
        return injected

    def _replace_node(self, injected: Injected, index: int) -> None:
        def is_lost() -> bool:
            return any(loss.who == "node" and loss.node == injected.node for loss in self._recorder.ledger.losses)

        if injected.kind is Kind.CUT_NODE:
            self._await(is_lost, "the partition to be noticed", _PARTITION_S)
        joined = threading.Event()

        def join() -> None:
            self._node = self._cluster.add_node()
            joined.set()

        self._target.errands.put(join)
        self._await(joined.is_set, "a node to join", _JOIN_S)
        injected.back_s = time.time()
        if injected.kind is Kind.CUT_NODE:
            self._over.wait(_AFTER_PARTITION_S)
            self._cluster.continue_raylet(index)

    def _pause(self, planned: Planned) -> Injected:
        if planned.kind is Kind.PAUSE_MASTER:
            return self._continue_after(self._signal(planned, signal.SIGSTOP, "master"), _PAUSE_S)
        of_gcs = planned.kind is Kind.PAUSE_GCS
        pid = self._gcs() if of_gcs else self._cluster.raylet_pid(self._node)
        injected = self._injected(planned, who="GCS" if of_gcs else "raylet", pid=pid)
        os.kill(injected.pid, signal.SIGSTOP)
        return self._continue_after(injected, _RAYLET_PAUSE_S)

    def _continue_after(self, injected: Injected, seconds: float) -> Injected:
        def continue_it() -> None:
            with suppress(ProcessLookupError):
                os.kill(injected.pid, signal.SIGCONT)

        return self._end_after(injected, seconds, continue_it)

    def _end_after(self, injected: Injected, seconds: float, end: Callable[[], None]) -> Injected:
        def later() -> None:
            self._over.wait(seconds)
            end()
            injected.back_s = time.time()

        injected.note = f"for {seconds:g} s"
        self._soon(later)
        return injected


_METHODS: dict[Kind, Callable[[Injector, Planned], Injected]] = {
    **dict.fromkeys(_KILLED | _HUNG, Injector._kill_or_hang),
    **dict.fromkeys((Kind.CUT_RECEIVE, Kind.CUT_PUBLISH), Injector._cut),
    Kind.NAN_LOSS: Injector._poison,
    **dict.fromkeys((Kind.FLIP_MEMORY, Kind.TEAR_MEMORY), Injector._damage_commit),
    **dict.fromkeys((Kind.FLIP_DURABLE, Kind.TEAR_DURABLE), Injector._damage_checkpoint),
    Kind.TEAR_JOURNAL: Injector._tear_journal,
    Kind.FULL_DISK: Injector._full_disk,
    Kind.KILL_GCS: Injector._kill_gcs,
    **dict.fromkeys(NODE_LOSSES, Injector._lose_node),
    **dict.fromkeys((Kind.PAUSE_MASTER, Kind.PAUSE_GCS, Kind.PAUSE_RAYLET), Injector._pause),
}
