# SPDX-License-Identifier: Apache-2.0
"""A metric over the steps of a run, as a picture."""

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_MEAN_OF = 10


def curve_png(name: str, points: Sequence[tuple[int, float]]) -> bytes:
    """``points``, steps and values, as a PNG with the running mean of a few steps."""
    figure = Figure(figsize=(7, 4), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, values = [point[0] for point in points], [point[1] for point in points]
    axes.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    axes.plot(steps, running_mean(values, _MEAN_OF), color="tab:blue", linewidth=2, label=f"mean of {_MEAN_OF} steps")
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def running_mean(values: list[float], window: int) -> list[float]:
    """Each value's mean with up to ``window - 1`` before it."""
    return [sum(values[max(0, end - window) : end]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)]
