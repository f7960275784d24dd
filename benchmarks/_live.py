# SPDX-License-Identifier: Apache-2.0
"""A job that runs in the background while it is measured from outside."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._recovery_job import CALLS
from dlrover.python.rl.common.names import master_name
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.master.client.on_ray import stop_master
from dlrover.python.rl.master.job import check_job, run_on_ray
from dlrover.python.rl.master.process.status import JobStatus
from dlrover.python.rl.runtime.ray.processes.actors import find
from dlrover.python.rl.trainer.trainer import StepReport
from tests.chaos.ledger import Ledger, Loss, Recorder, Up
from tests.support.commands import is_alive

_LOOK_S = 0.005
_LATEST_S = 300.0


@dataclass(frozen=True)
class Healed:
    """One fault.

    Attributes:
        noticed_s: seconds until the loss was noted; None if no process notes it (a master's).
        healed_s: seconds until the first good call after it.
        redone: calls whose work was done twice.
        cause: the cause that was noted.
    """

    noticed_s: float | None
    healed_s: float
    redone: int = 0
    cause: str = ""


class Live:
    """Runs a job in a thread inside the block; the process is connected to Ray already.

    Args:
        job: what to run.

    Attributes:
        reports: the trainer's, as they came.
        status: how it ended, once it has.
    """

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.reports: list[StepReport] = []
        self.status: JobStatus | None = None
        self.error: BaseException | None = None
        self.recorder = Recorder(job)
        self._thread = threading.Thread(target=self._run, name=f"live-{job.name}", daemon=True)

    def __enter__(self) -> "Live":
        shutil.rmtree(self.job.job_dir.parent, ignore_errors=True)
        self.job.job_dir.parent.mkdir(parents=True)
        self.recorder.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        if self._thread.is_alive():
            stop_master(find(master_name(self.job.name)), "measured")
        self._thread.join(timeout=_LATEST_S)
        self.recorder.__exit__()

    def _run(self) -> None:
        try:
            self.status = run_on_ray(check_job(self.job), self.reports.append, connected=True)
        except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
            self.error = error

    def join(self, timeout_s: float) -> JobStatus:
        """Wait for the job's end.

        Raises:
            TimeoutError: it has not ended.
            RuntimeError: it did not finish well.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.job.name} has not ended after {timeout_s:g} s")
        if self.status is None or self.status.phase.value != "finished":
            raise RuntimeError(f"{self.job.name} did not finish: {self.status or self.error!r}")
        return self.status

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The journal as it is now."""
        return self.recorder.ledger

    def calls(self) -> list[dict[str, Any]]:
        """Every finished call so far."""
        path = Path(self.job.config.folder) / CALLS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def last_call(self, after_s: float, pids: set[int] | None = None) -> dict[str, Any] | None:
        """The first call that finished after ``after_s``, in one of the processes ``pids``."""
        return next(
            (call for call in self.calls() if call["at_s"] > after_s and (pids is None or call["pid"] in pids)), None
        )

    def until(self, condition: Callable[[], Any], event: str, timeout_s: float = _LATEST_S) -> Any:
        """Wait until ``condition`` is true, and return its value.

        Raises:
            TimeoutError: it never was.
            RuntimeError: the job ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (outcome := condition()):
            if not self._thread.is_alive():
                raise RuntimeError(f"{self.job.name} ended while waiting for {event}: {self.status or self.error!r}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.job.name}: no {event} within {timeout_s:g} s; up: {sorted(self.ledger.up)}")
            time.sleep(_LOOK_S)
        return outcome

    def until_well(self) -> None:
        """Wait until everybody is up and works."""
        self.until(self.ledger_complete, "complete job")
        now_s = time.time()
        self.until(lambda: self.last_call(now_s), "call")

    def ledger_complete(self) -> bool:
        """Return True if all processes are up."""
        return self.recorder.ledger.complete()

    # -- striking -----------------------------------------------------------------------------------------------------

    def strike(self, who: str, number: int = signal.SIGKILL) -> Healed:
        """Signal one process of the job and wait until the job has healed."""
        self.until_well()
        victim, before = self.ledger.up[who], self.ledger
        at_s = time.time()
        os.kill(victim.pid, number)
        if who == "master":
            return self._healed_master(at_s, before)
        loss: Loss = self.until(lambda: self._loss(victim), f"loss of {who}")
        back: Up = self.until(lambda: self._return(victim), f"return of {who}")
        pids = None if who == "trainer" else {back.pid}
        since_s = back.at_s if who == "trainer" else at_s
        first = self.until(lambda: self.last_call(since_s, pids), f"call after the loss of {who}")
        return Healed(loss.at_s - at_s, first["at_s"] - at_s, self._redone(at_s), loss.cause.kind.value)

    def _healed_master(self, at_s: float, before: Ledger) -> Healed:
        def back() -> Up | None:
            master = self.ledger.up.get("master")
            return master if master is not None and master.at_s > at_s and is_alive(master.pid) else None

        master = self.until(back, "new master")
        kept = {who: up.pid for who, up in before.up.items() if who != "master"}
        adopted = sum(
            self.ledger.up.get(who) is not None and self.ledger.up[who].pid == pid for who, pid in kept.items()
        )
        return Healed(None, master.at_s - at_s, len(kept) - adopted, f"{adopted}/{len(kept)} re-adopted")

    def _loss(self, victim: Up) -> Loss | None:
        return next((loss for loss in self.ledger.losses if loss.pid == victim.pid), None)

    def _return(self, victim: Up) -> Up | None:
        up = self.ledger.up.get(victim.who)
        return up if up is not None and up.pid != victim.pid else None

    def _redone(self, at_s: float) -> int:
        """Finished calls around a fault that had been finished before."""
        keys = [(call["who"], call["step"]) for call in self.calls() if call["at_s"] > at_s - 0.5]
        return len(keys) - len(set(keys))
