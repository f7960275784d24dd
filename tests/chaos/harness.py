# SPDX-License-Identifier: Apache-2.0
"""A chaos run from its beginning to its verdict."""

import json
import os
import queue
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dlrover.python.rl.common.errors import DLRoverRLError
from dlrover.python.rl.common.names import RLRoleType, master_name
from dlrover.python.rl.config.spec import CheckpointSpec, JobSpec, LivenessSpec, MasterSpec, RestartSpec
from dlrover.python.rl.control.events import Cause, CauseKind
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.client.on_ray import stop_master
from dlrover.python.rl.master.job import check_job, run_here, run_on_ray
from dlrover.python.rl.master.process.status import JobStatus
from dlrover.python.rl.runtime.ray.processes.actors import find, sweep
from tests.chaos.damage import small_disk
from tests.chaos.fault_table import render_measured
from tests.chaos.faults import CORRUPTING, NODE_LOSSES, Burst
from tests.chaos.findings import false_alarms, findings_of, lost_commits
from tests.chaos.gates import FOLDER, Gates
from tests.chaos.injector import Injected, Injector, Target
from tests.chaos.job import tiny_job
from tests.chaos.ledger import Recorder, is_stopped
from tests.chaos.verdict import differences, leftovers, read_rows, redone_steps, violations
from tests.chaos.workloads import EXECUTIONS
from tests.ray.two_nodes import TwoNodes
from tests.support.commands import ROOT as REPOSITORY

HANG_S = 10.0
"""Seconds without progress after which a process is treated as hung; loading a model on busy cores takes some of it."""

_MANY = 100_000
_DISK_MB = 64
_REWARD_S, _GROUP = 2.0, 4
_STALLED_S = 240.0
_CLASSES = {RLRoleType.ACTOR: "ChaosActor", RLRoleType.ROLLOUT: "ChaosRollout", RLRoleType.REWARD: "ChaosReward"}


@dataclass
class Outcome:
    """The end of a run."""

    status: JobStatus
    recorder: Recorder
    faults: list[Injected] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def chaos_job(
    inputs: Path, folder: Path, name: str, steps: int, seed: int, hang_after_s: float = HANG_S, max_staleness: int = 0
) -> JobSpec:
    """The tiny GRPO job with the workloads of this package, limits that are out of the way, and short patience.

    Model and problems are in ``inputs``, for all runs that are compared; ``folder`` gets the job directory ``out``, and
    ``shared`` for harness and processes."""
    job = tiny_job(inputs, steps)
    shared = folder / "shared"
    (shared / "tmp").mkdir(parents=True, exist_ok=True)
    workloads = {
        role: replace(spec, module="tests.chaos.workloads", class_=_CLASSES[role], hang_after_s=hang_after_s, standby=1)
        for role, spec in job.workloads.items()
    }
    # One of its calls may have to end a whole group of endless samples.
    longest_s = hang_after_s + _GROUP * _REWARD_S
    workloads[RLRoleType.REWARD] = replace(workloads[RLRoleType.REWARD], standby=0, hang_after_s=longest_s)
    workloads[RLRoleType.ROLLOUT] = replace(workloads[RLRoleType.ROLLOUT], per_node=1)
    reward = {"function": "tests.chaos.graded:judge", "timeout_s": _REWARD_S}
    changed = {"seed": seed, "steps": steps, "reward": reward, "rollout": {"max_staleness": max_staleness}}
    return replace(
        job,
        name=name,
        trainer=replace(job.trainer, node_number=2, device_type="CPU", device_per_node=4, hang_after_s=hang_after_s),
        workloads=workloads,
        groups=(),
        env={**job.env, FOLDER: str(shared), "TMPDIR": str(shared / "tmp")},
        config=OmegaConf.merge(job.config, changed),
        job_dir=folder / "out",
        work_dir=str(REPOSITORY),
        search_path=(str(REPOSITORY),),
        restart=RestartSpec(_MANY, _MANY, backoff_s=0.1, node_max_failures=_MANY),
        checkpoint=CheckpointSpec(every=5),
        liveness=LivenessSpec(),
        master=MasterSpec(max_restart=_MANY),
    )


def run_job(
    job: JobSpec, cluster: TwoNodes, plan: tuple[Burst, ...], log: Callable[[str], None], here: bool = False
) -> Outcome:
    """Run a job to its end while the faults of ``plan`` strike. Afterwards nothing of it may be left."""
    shared = job.job_dir.parent / "shared"
    kept_dir = job.job_dir.with_name("kept")
    with small_disk(job.job_dir, _DISK_MB) if plan else nullcontext(False) as own_disk:
        recorder = Recorder(job)
        target = Target(recorder, cluster, Gates(shared), job.job_dir, own_disk)
        injector = Injector(plan, target, log)
        began_s = time.monotonic()
        with recorder, injector if plan else nullcontext():
            status, stall = _follow_to_end(job, recorder, target.errands, here)
            seconds = time.monotonic() - began_s
        outcome = Outcome(status, recorder, injector.done, stall, seconds)
        shutil.rmtree(kept_dir, ignore_errors=True)
        shutil.copytree(job.job_dir, kept_dir)
    outcome.problems += _end_problems(outcome, injector, sum(len(burst.faults) for burst in plan))
    ledger = recorder.ledger
    run = ledger.submitted.run if ledger.submitted else ""
    _wake_the_unreachable(outcome.faults)
    pids = ledger.pids() - {os.getpid()}
    outcome.problems += [f"left over: {left}" for left in leftovers(job.name, run, shared, pids)]
    return outcome


def _wake_the_unreachable(faults: Sequence[Injected]) -> None:
    """Nobody can end a process that was stopped on a node without a raylet. It has to end itself as soon as it runs."""
    lost = {fault.node for fault in faults if fault.kind in NODE_LOSSES}
    for fault in faults:
        if fault.kind not in NODE_LOSSES and fault.node in lost and is_stopped(fault.pid):
            os.kill(fault.pid, signal.SIGCONT)


def _follow_to_end(
    job: JobSpec, recorder: Recorder, errands: "queue.SimpleQueue[Callable[[], None]]", here: bool
) -> tuple[JobStatus, list[str]]:
    """Return the job's end, and the reason if the harness ended it because nothing was committed for too long."""
    with ThreadPoolExecutor(1, "chaos-client") as pool:
        checked = check_job(job, local=here)
        client = pool.submit(lambda: run_here(checked) if here else run_on_ray(checked, connected=True))
        commits, since_s, stall = 0, time.monotonic(), []
        while not client.done():
            with suppress(queue.Empty):
                errands.get(timeout=0.2)()
            if len(recorder.commits) > commits:
                commits, since_s = len(recorder.commits), time.monotonic()
            if not stall and time.monotonic() - since_s > _STALLED_S:
                up = ", ".join(sorted(recorder.ledger.up))
                stall = [f"no commit for {_STALLED_S:g} s after step {recorder.step}; up: {up}"]
                _give_up(job.name)
        error = client.exception()
        if error is not None:
            cause = Cause(CauseKind.INTERNAL, "client", repr(error))
            return JobStatus(job.name, Phase.FAILED, 0, 0, f"the client: {error!r}", cause), stall
        return client.result(), stall


def _give_up(name: str) -> None:
    """End a job that stands still, cleanly or else by force."""
    master = find(master_name(name))
    try:
        stop_master(master, "it stands still")
    except DLRoverRLError:
        sweep(name)


def _end_problems(outcome: Outcome, injector: Injector, planned: int) -> list[str]:
    status, problems = outcome.status, []
    if status.phase is not Phase.FINISHED:
        problems.append(f"the job is {status.phase.value}: {status.reason} {status.cause}")
    if status.restarts:
        problems.append(f"the whole job was restarted {status.restarts} times")
    if len(injector.done) < planned:
        problems.append(f"only {len(injector.done)} of {planned} faults struck: {injector.problem}")
    elif injector.problem:
        problems.append(f"injecting: {injector.problem}")
    alarms = false_alarms(outcome.faults, outcome.recorder.ledger)
    problems += [f"false alarm: {loss.who} ({loss.cause.kind.value}): {loss.cause.message}" for loss in alarms]
    return problems


def judge(oracle: Path, chaos: Path, outcome: Outcome, config: Any) -> tuple[list[str], dict[int, int]]:
    """Return the violations of a disturbed run, and the steps it repeated.

    Where rollouts run ahead, the two runs are not compared, and repeated steps not counted.
    """
    ahead = config.rollout.max_staleness > 0
    redone = {} if ahead else redone_steps(read_rows(chaos / "shared" / EXECUTIONS))
    allowed = len(outcome.faults) + sum(fault.kind in CORRUPTING for fault in outcome.faults)
    kept_dir = chaos / "kept"
    problems = [
        *outcome.problems,
        *(violations(kept_dir, config) if ahead else differences(oracle / "kept", kept_dir, config.steps)),
        *lost_commits(outcome.recorder.commits, outcome.faults),
        *(f"left in the job's directory: {path}" for path in kept_dir.glob("commits*")),
    ]
    if sum(redone.values()) > allowed:
        problems.append(f"{sum(redone.values())} steps were done again for {len(outcome.faults)} faults: {redone}")
    return problems, redone


def report(data: Mapping[str, Any], status: JobStatus, command: str, ahead: bool = False) -> str:
    """The run as text: the faults by kind, what they were noted as, and the verdict."""
    ends = "every problem trained on once, none too stale" if ahead else "ends bit for bit as undisturbed"
    recoveries = {str(cause): count for cause, count in status.recoveries.items()}
    lines = [
        render_measured([data]),
        "",
        f"{data['seconds']:.0f} s; masters {status.masters}, job restarts {status.restarts}, recoveries {recoveries}",
        *(f"VIOLATION: {problem}" for problem in data["problems"]),
        f"verdict: {'FAILED' if data['problems'] else f'{ends}, nothing lost, nothing left over'}",
        f"again: {command}",
    ]
    return "\n".join(lines)


def as_json(outcome: Outcome, problems: list[str], redone: Mapping[int, int]) -> dict[str, Any]:
    """The run for machines."""
    recorder = outcome.recorder
    findings = findings_of(outcome.faults, recorder.ledger, recorder.commits)
    rows: dict[str, list[Any]] = {"findings": findings, "commits": recorder.commits}
    numbers = {"seconds": outcome.seconds, "redone": {str(step): count for step, count in redone.items()}}
    return {**numbers, "problems": problems, **{name: [asdict(row) for row in of] for name, of in rows.items()}}


def save(folder: Path, text: str, data: Mapping[str, Any]) -> None:
    """Write the report beside the run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
