# SPDX-License-Identifier: Apache-2.0
"""Draw the accuracies and rewards of the runs that ``run.py`` has summarized.

python examples/real_model/plot.py SUMMARY.json ... OUT.png
"""

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot(summaries: list[Path], out: Path) -> None:
    figure = Figure(figsize=(7, 4), dpi=120)
    axes = figure.add_subplot()
    for number, summary in enumerate(json.loads(file.read_text(encoding="utf-8")) for file in summaries):
        steps, values = zip(*((int(step), value) for step, value in summary["accuracy"].items()), strict=True)
        axes.plot(steps, values, f"C{number}o-", label=f"held-out accuracy, seed {summary['seed']}")
        axes.plot(range(1, len(summary["rewards"]) + 1), summary["rewards"], f"C{number}", alpha=0.3, linewidth=1)
    axes.set(xlabel="step", ylabel="held-out accuracy; faint: reward of each step", ylim=(0, 1))
    axes.legend()
    FigureCanvasAgg(figure).print_png(out)


if __name__ == "__main__":
    *files, image = map(Path, sys.argv[1:])
    plot(files, image)
