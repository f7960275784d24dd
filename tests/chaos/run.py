# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.chaos.run``: a GRPO job on two nodes under a plan of faults, beside an undisturbed one."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dlrover.python.rl.config.spec import JobSpec
from tests.chaos.damage import clear
from tests.chaos.faults import NODE_LOSSES, Kind, schedule
from tests.chaos.harness import HANG_S, REPOSITORY, Outcome, as_json, chaos_job, judge, report, run_job, save
from tests.chaos.verdict import violations
from tests.ray.two_nodes import TwoNodes, two_nodes
from tests.support.commands import say

_NODE_CPUS = 4.0


def chaos(
    folder: Path, options: argparse.Namespace, cluster: TwoNodes, log: Callable[[str], None]
) -> tuple[Outcome, list[str]]:
    """The undisturbed run, the disturbed one, and what is wrong with that."""
    steps, seed = options.steps, options.seed
    # Memory is lost with its node, and both nodes are one machine: where nodes are lost, it must not be in the way.
    commit_to = "job_dir" if NODE_LOSSES & set(options.kinds) else "memory"

    def job(run: str) -> JobSpec:
        limits = (options.hang_after, options.max_staleness)
        job = chaos_job(folder / "inputs", folder / run, f"{run}-{seed}", steps, seed, *limits)
        commit_every = options.commit_every or job.checkpoint.commit_every
        return replace(job, checkpoint=replace(job.checkpoint, commit_to=commit_to, commit_every=commit_every))

    def undisturbed() -> JobSpec:
        alone = job("oracle")  # no process will have to be replaced
        return replace(alone, workloads={role: replace(spec, standby=0) for role, spec in alone.workloads.items()})

    plan = schedule(seed, options.faults, steps, options.kinds)
    config, ahead = job("oracle").config, options.max_staleness > 0
    oracle = run_job(undisturbed(), cluster, (), log, options.undisturbed_here)
    oracle_problems = [*oracle.problems, *(violations(folder / "oracle/kept", config) if ahead else ())]
    problems = [f"the undisturbed run: {problem}" for problem in oracle_problems]
    log(f"undisturbed: {steps} steps in {oracle.seconds:.0f} s, {oracle.status.phase.value}")
    if problems:
        return oracle, problems
    outcome = run_job(job("chaos"), cluster, plan, log)
    run_problems, redone = judge(folder / "oracle", folder / "chaos", outcome, config)
    data = as_json(outcome, run_problems, redone)
    log(text := report(data, outcome.status, command(options), ahead))
    save(folder, text, data)
    return outcome, run_problems


def command(options: argparse.Namespace) -> str:
    """The command that repeats a run."""
    kinds = "" if len(options.kinds) == len(Kind) else f" KINDS='{','.join(kind.name for kind in options.kinds)}'"
    arguments = [] if options.hang_after == HANG_S else [f"--hang-after {options.hang_after:g}"]
    arguments += [f"--max-staleness {options.max_staleness}"] if options.max_staleness else []
    arguments += [f"--commit-every {options.commit_every}"] if options.commit_every else []
    more = f" ARGS='{' '.join(arguments)}'" if arguments else ""
    return f"make chaos FAULTS={options.faults} STEPS={options.steps} SEED={options.seed}{kinds}{more}"


def kinds_of(text: str) -> tuple[Kind, ...]:
    """The kinds of a comma-separated list; all of them for an empty one."""
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    return tuple(Kind[name] for name in names) or tuple(Kind)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 when anything was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang-after", type=float, default=HANG_S, help="seconds; more on a machine that is busy")
    parser.add_argument("--max-staleness", type=int, default=0, help="how many versions rollouts run ahead")
    parser.add_argument("--commit-every", type=int, help="steps between commits; as few as the job needs by default")
    parser.add_argument("--undisturbed-here", action="store_true", help="run the undisturbed job in this process")
    parser.add_argument("--kinds", type=kinds_of, default=kinds_of(""), help=", ".join(kind.name for kind in Kind))
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "chaos")
    options = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = (options.out / str(options.seed)).resolve()
    clear(folder)
    with two_nodes(cpus=_NODE_CPUS, head_cpus=_NODE_CPUS) as cluster:
        outcome, problems = chaos(folder, options, cluster, say)
        if problems:
            shutil.copytree(cluster.session_dir / "logs", folder / "ray-logs", ignore_dangling_symlinks=True)
    for problem in problems if not outcome.faults else ():
        say(f"VIOLATION: {problem}")
    say(f"kept in {folder}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
