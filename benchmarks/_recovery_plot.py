# SPDX-License-Identifier: Apache-2.0
"""The recovery benchmark as a picture."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: seconds until a job has healed, by fault, beside R; and the effective training time."""
    if "faults" not in results:
        return
    raw_s = median(results["faults"]["R"])
    faults = {name: samples for name, samples in results["faults"].items() if name != "R"}
    figure = Figure(figsize=(9, 5), dpi=120)
    FigureCanvasAgg(figure)
    bars = figure.add_subplot()
    names = list(faults)[::-1]
    healed = [median(one["healed_s"] for one in faults[name]) for name in names]
    noticed = [median([one["noticed_s"] for one in faults[name] if one["noticed_s"]] or [0.0]) for name in names]
    bars.barh(names, healed, color="tab:blue", label="healed")
    bars.barh(names, noticed, color="tab:orange", height=0.4, label="noticed")
    bars.axvline(raw_s, color="black", linestyle="--", label=f"R = {raw_s:.1f} s: a raw Ray actor restart")
    bars.set_xscale("log")
    bars.set_xlabel("seconds after the fault")
    bars.set_title(_title(results), fontsize=9)
    bars.legend(fontsize=8)
    bars.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def _title(results: Mapping[str, Any]) -> str:
    effective = results.get("effective", {})
    labels = [f"{name} {figures['percent']:.1f} %" for name, figures in effective.items()]
    return "effective time at one fault per 10 steps of 2 R: " + ", ".join(labels) if labels else "recovery by fault"
