# SPDX-License-Identifier: Apache-2.0
"""Measure how fast a job recovers, and what it loses: ``make bench NAME=recovery`` (``--quick`` to try it).

All figures are of one run on one machine, interleaved: in each round one raw Ray actor restart (R: kill to first good
call of a ``max_restarts=-1`` actor that imports the same), then each fault once.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._recovery_job import REPOSITORY
from benchmarks._recovery_parts import Sizes, effective_time, false_alarms, fault_free_cost, per_fault
from benchmarks._recovery_plot import draw
from tests.chaos.tables import markdown
from tests.ray.two_nodes import two_nodes

_FULL = Sizes(rounds=7, node_rounds=2, effective_steps=80, cost_rounds=4, cost_steps=12, healthy_steps=10_000)
_QUICK = Sizes(rounds=1, node_rounds=1, effective_steps=10, cost_rounds=1, cost_steps=4, healthy_steps=200)
PARTS = ("faults", "effective", "cost", "alarms")


def summary(results: dict[str, Any]) -> str:
    """The tables of a run."""
    parts = []
    if "faults" in results:
        raw_s = median(results["faults"]["R"])
        rows = [["raw Ray actor restart (R)", "-", "-", raw_s, 1.0, "-", ""]]
        for name, found in results["faults"].items():
            if name != "R":
                rows.append([name, *_fault_row(found, raw_s)])
        parts.append(
            markdown(["fault", "noticed, s", "at most", "healed, s", "in R", "calls redone", "noted as"], rows)
        )
    if "effective" in results:
        rows = [[name, *figures.values()] for name, figures in results["effective"].items()]
        parts.append(markdown(["one fault per 10 steps", "step s", "steps", "faults", "s", "effective, %"], rows))
    if "cost" in results:
        head = ["state of the role", "durable step, s", "plain step, s", "steps of each", "cost, %"]
        rows = [
            [size, *(f"{cost[name]['step_s']:.4f}" for name in ("durable", "plain")), cost["plain"]["steps"]]
            + [cost["percent"]]
            for size, cost in results["cost"].items()
        ]
        parts.append(markdown(head, rows))
    if "alarms" in results:
        alarms = results["alarms"]
        parts.append(f"{alarms['steps']} healthy steps, both cores busy: {alarms['losses']} false alarms")
    return "\n\n".join(parts)


def _fault_row(found: list[dict[str, Any]], raw_s: float) -> list[object]:
    noticed = [one["noticed_s"] for one in found if one["noticed_s"] is not None]
    healed_s = median(one["healed_s"] for one in found)
    redone = max(one["redone"] for one in found)
    causes = ", ".join(sorted({one["cause"] for one in found}))
    delays_s = [median(noticed), max(noticed)] if noticed else [None, None]
    return [*delays_s, healed_s, healed_s / raw_s, redone, causes]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few of everything, to try it")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build" / "bench-recovery")
    options = parser.parse_args(argv)
    sizes, wanted = _QUICK if options.quick else _FULL, options.parts.split(",")
    file = options.out / ("recovery-quick.json" if options.quick else "recovery.json")
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() and set(wanted) != set(PARTS) else {}
    options.out.mkdir(parents=True, exist_ok=True)
    with two_nodes(cpus=16, head_cpus=16) as cluster:
        if "faults" in wanted:
            results["faults"] = per_fault(options.work, cluster, sizes)
        raw_s = median(results.get("faults", {}).get("R", [4.0]))
        if "effective" in wanted:
            results["effective"] = effective_time(options.work, raw_s, sizes)
        if "cost" in wanted:
            results["cost"] = fault_free_cost(options.work, sizes)
        if "alarms" in wanted:
            results["alarms"] = false_alarms(options.work, sizes)
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    draw(results, file.with_suffix(".png"))
    text = summary(results)
    file.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    print(f"\nkept in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
