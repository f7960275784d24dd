# SPDX-License-Identifier: Apache-2.0
"""The four parts of the recovery benchmark."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._live import Healed, Live
from benchmarks._raw_restart import RawRestart
from benchmarks._recovery_job import HANG_S, bench_job, chunks_per_second, with_hang_after
from dlrover.python.rl.config.spec import JobSpec, LivenessSpec
from dlrover.python.rl.runtime.ray.processes.actors import process_env
from tests.ray.two_nodes import TwoNodes

_STEPS_PER_FAULT = 10
_STEP_S = 1.0
_STATES_MB = (1, 8)
_RAYS_NICENESS = 15


@dataclass(frozen=True)
class Sizes:
    """The amount of measurements of each kind."""

    rounds: int
    node_rounds: int
    effective_steps: int
    cost_rounds: int
    cost_steps: int
    healthy_steps: int


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


# -- each fault -------------------------------------------------------------------------------------------------------


def per_fault(work: Path, cluster: TwoNodes, sizes: Sizes) -> dict[str, Any]:
    """R and each fault, once a round. Seconds."""
    timings: dict[str, Any] = {"R": []}
    with ExitStack() as stack:
        kinds = {"warm": {"standby": 1}, "cold": {}, "plain": {"trainer": "PlainLoop"}}
        kinds |= {"group": {"standby": 1, "ranks": 2}, "cold-group": {"ranks": 2}}
        warm, cold, plain, group, cold_group = lives = tuple(
            _begun(stack, bench_job(f"bench-{name}", work / name, **more)) for name, more in kinds.items()
        )
        raw = RawRestart(process_env(cold.job))
        stack.callback(raw.close)
        faults: dict[str, Callable[[], Healed]] = {
            "worker crash, standby": lambda: warm.strike("ROLLOUT[0]"),
            "stateful worker crash, standby": lambda: warm.strike("ACTOR[0]"),
            "rank of two crash, standby": lambda: _strike_rank(group),
            "rank of two crash, cold": lambda: _strike_rank(cold_group),
            "worker crash, cold": lambda: cold.strike("ROLLOUT[0]"),
            "stateful worker crash, cold": lambda: cold.strike("ACTOR[0]"),
            "trainer crash": lambda: cold.strike("trainer"),
            "master crash": lambda: cold.strike("master"),
            f"worker hang (limit {HANG_S:g} s), standby": lambda: warm.strike("ROLLOUT[0]", signal.SIGSTOP),
            f"trainer hang (limit {HANG_S:g} s)": lambda: cold.strike("trainer", signal.SIGSTOP),
            "worker crash, whole job restarts": lambda: _strike_plain(plain),
        }
        for number in range(sizes.rounds):
            timings["R"].append(raw.measure())
            _say(f"round {number + 1}: R {timings['R'][-1]:.2f} s")
            for name, fault in faults.items():
                _until_all_well(lives)
                _note(timings, name, fault())
    for _ in range(sizes.node_rounds):
        _note(timings, "node loses power", _strike_node(work, cluster, cluster.kill_node))
        _note(timings, "node is cut off", _strike_node(work, cluster, cluster.stop_raylet))
    return timings


def _begun(stack: ExitStack, job: JobSpec) -> Live:
    live = stack.enter_context(Live(job))
    live.until_well()
    return live


def _until_all_well(lives: Iterable[Live]) -> None:
    """A standby that is started for one would slow the recovery of another."""
    for live in lives:
        live.until_well()


def _note(timings: dict[str, Any], name: str, healed: Healed) -> None:
    _say(f"{name}: noticed {healed.noticed_s}, healed {healed.healed_s:.2f} s, {healed.cause}")
    timings.setdefault(name, []).append(asdict(healed))


def _strike_rank(group: Live) -> Healed:
    """Kill rank 1 of a group, whose rank 0 keeps its process."""
    group.until_well()
    pid = group.ledger.up["ACTOR[0]"].pid
    healed = group.strike("ACTOR[1]")
    if group.ledger.up["ACTOR[0]"].pid != pid:
        raise RuntimeError("rank 0 has got another process")
    return replace(healed, cause=f"{healed.cause}, rank 0 kept its process")


def _strike_plain(plain: Live) -> Healed:
    """Kill a worker of a job without steps: all of it begins again."""
    plain.until_well()
    old = plain.ledger.pids()
    step = max(call["step"] for call in plain.calls())
    victim, at_s = plain.ledger.up["ROLLOUT[0]"], time.time()
    os.kill(victim.pid, signal.SIGKILL)
    losses = len(plain.ledger.losses)
    plain.until(lambda: len(plain.ledger.losses) > losses, "loss")

    def first_call() -> dict[str, Any] | None:
        return next((call for call in plain.calls() if call["at_s"] > at_s and call["pid"] not in old), None)

    first = plain.until(first_call, "call of the new incarnation")
    loss = plain.ledger.losses[losses]
    return Healed(loss.at_s - at_s, first["at_s"] - at_s, 2 * step, loss.cause.kind.value)


def _strike_node(work: Path, cluster: TwoNodes, strike: Callable[[int], object]) -> Healed:
    """Take away the node that is not the head; what was on it starts on the head. Another one joins then."""
    index = len(cluster.nodes) - 1
    with Live(bench_job("bench-nodes", work / "nodes", nodes=2, rollouts=2)) as spread:
        spread.until_well()
        healed = _lose(spread, cluster.node_id(index), lambda: strike(index))
    cluster.add_node()
    if index in cluster.stopped:
        cluster.continue_raylet(index)
    return healed


def _lose(spread: Live, node: str, strike: Callable[[], object]) -> Healed:
    lost = [up for up in spread.ledger.up.values() if up.node == node and "[" in up.who]
    if not lost:
        raise RuntimeError(f"no worker runs on the node {node}")
    at_s, old = time.time(), spread.ledger.pids()
    strike()
    loss = spread.until(
        lambda: next((one for one in spread.ledger.losses if one.at_s > at_s and one.node == node), None), "node's loss"
    )
    names = [up.who for up in lost]
    spread.until(
        lambda: all(who in spread.ledger.up and spread.ledger.up[who].pid not in old for who in names),
        f"return of {names}",
    )
    pids = {spread.ledger.up[who].pid for who in names}
    first = spread.until(lambda: spread.last_call(at_s, pids), "call of a replacement")
    return Healed(loss.at_s - at_s, first["at_s"] - at_s, 0, loss.cause.kind.value)


# -- effective time ---------------------------------------------------------------------------------------------------


def effective_time(work: Path, raw_s: float, sizes: Sizes) -> dict[str, Any]:
    """The share of the time that steps take which nothing disturbs, at one fault per ten steps of 2 R each."""
    chunks = int(raw_s * median(chunks_per_second() for _ in range(5)))
    results = {}
    for name, standby in (("with standby", 1), ("cold", 0)):
        job = bench_job(f"bench-effective-{standby}", work / f"effective-{standby}", standby=standby)
        job.config.steps, job.config.chunks, job.config.sleep_s = sizes.effective_steps, chunks, 0.0
        results[name] = _effective(with_hang_after(job, 20 * raw_s), raw_s)
        _say(f"effective time {name}: {results[name]}")
    return results


def _effective(job: Any, raw_s: float) -> dict[str, Any]:
    chance, struck, victims = random.Random("effective"), 0, ("ROLLOUT[0]", "trainer", "ACTOR[0]", "master")
    total = int(job.config.steps)
    with Live(job) as live:
        for step in range(_STEPS_PER_FAULT // 2, total, _STEPS_PER_FAULT):
            live.until(lambda step=step: len(live.reports) >= step, f"step {step}", 60 * raw_s * _STEPS_PER_FAULT)
            live.until(live.ledger_complete, "complete job")
            time.sleep(chance.uniform(0.0, 2 * raw_s))  # anywhere in a step
            os.kill(live.ledger.up[victims[struck % len(victims)]].pid, signal.SIGKILL)
            struck += 1
        live.join(60 * raw_s * _STEPS_PER_FAULT)
        reports = {report.step: report.metrics for report in live.reports}
    # Most steps are disturbed by nothing, so the median is what a step takes.
    ends = [reports[step]["at_s"] for step in sorted(reports)]
    step_s = median(later - earlier for earlier, later in zip(ends, ends[1:], strict=False))
    seconds = ends[-1] - reports[min(reports)]["began_s"]
    return {
        "step_s": step_s,
        "steps": total,
        "faults": struck,
        "seconds": seconds,
        "percent": 100 * step_s * total / seconds,
    }


# -- what it costs when nothing fails ---------------------------------------------------------------------------------


def fault_free_cost(work: Path, sizes: Sizes) -> dict[str, Any]:
    """Return how much longer a step of a second takes with journal, commits and beats than without; jobs in turn."""
    return {f"{state_mb} MB": _cost(work, sizes, state_mb) for state_mb in _STATES_MB}


def _cost(work: Path, sizes: Sizes, state_mb: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"durable": [], "plain": []}
    for number in range(sizes.cost_rounds):
        order = ("durable", "plain") if number % 2 == 0 else ("plain", "durable")
        for name in order:
            times[name] += _step_times(work, name, sizes.cost_steps, state_mb)
        messages = {name: round(median(timings), 4) for name, timings in times.items()}
        _say(f"cost with {state_mb} MB, round {number + 1}: {messages}")
    steps = {name: {"step_s": median(timings), "steps": len(timings)} for name, timings in times.items()}
    percent = 100 * (steps["durable"]["step_s"] - steps["plain"]["step_s"]) / _STEP_S
    return {**steps, "percent": percent}


def _step_times(work: Path, name: str, steps: int, state_mb: int) -> list[float]:
    loop = "DurableLoop" if name == "durable" else "PlainLoop"
    job = bench_job(
        f"bench-cost-{name}", work / f"cost-{name}", loop, sleep_s=_STEP_S / 2, steps=steps, state_mb=state_mb
    )
    job.config.notes = False
    if name == "plain":
        job = replace(with_hang_after(job, 1e6), liveness=LivenessSpec(beat_s=3600.0, lease_s=1e6))
    with Live(job) as live:
        live.join(60.0 + 3 * steps)
        ends = [report.metrics["at_s"] for report in sorted(live.reports, key=lambda report: report.step)]
    # The first step warms up; the commit of a step lies between its report and the next one's.
    return [later - earlier for earlier, later in zip(ends[1:], ends[2:], strict=False)]


# -- false alarms -----------------------------------------------------------------------------------------------------


def false_alarms(work: Path, sizes: Sizes) -> dict[str, Any]:
    """Losses that are noted in a healthy job of short steps while every core is kept busy by others."""
    job = bench_job("bench-alarms", work / "alarms", standby=1, sleep_s=0.0, steps=sizes.healthy_steps, notes=False)
    began_s = time.monotonic()
    with _busy_cores(), Live(job) as live:
        status = live.join(3.0 * sizes.healthy_steps + 120.0)
        losses = live.recorder.read().real_losses()
    messages = [f"{loss.who}: {loss.cause.kind.value}: {loss.cause.message}" for loss in losses]
    seconds = time.monotonic() - began_s
    return {"steps": status.step, "losses": len(losses), "told": messages, "seconds": seconds}


@contextmanager
def _busy_cores() -> Iterator[None]:
    """One busy process for each core, of the priority that Ray gives the job's."""
    busy = f"import os\nos.nice({_RAYS_NICENESS})\nwhile True: pass"
    burners = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
