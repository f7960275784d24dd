# SPDX-License-Identifier: Apache-2.0
"""Measure how fast states are written and read here, and extrapolate to models that do not fit here.

::

    b  bytes of a rank's state        12 P / G      P parameters on G devices: weights and two moments in float32
    w  writes of a process, GB/s      measured      checksum and file in memory, over an old file
    r  reads of a process, GB/s       measured      file and checksum
    n  between two nodes, GB/s        assumed       as the table says; each node of g devices sends and receives g b

    written in                        b / w         in the background of a rollout; an update waits for what is left
    to the next node, on several      g b / n       at each commit
    loaded after a loss               b / r
    memory of a node                  3 g b         one more while a copy is made; as much again for its neighbour's
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dlrover.python.rl.runtime.checkpoint.state_file import read_state, write_state
from tests.chaos.tables import markdown

_GB = 1e9
_NETWORK_GB_S = 25.0  # 200 Gb/s
_PER_NODE = 8
_SHAPES = {"7 B on 8": (7e9, 8), "70 B on 64": (70e9, 64)}


def speeds(nbytes: int = 1 << 29, rounds: int = 5) -> dict[str, float]:
    """GB/s, medians."""
    memory = Path("/dev/shm")
    state = {"weights": torch.randn(nbytes // 4)}
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        first_s = _seconds(lambda: write_state(folder / "state", {}, state, durable=False))
        again_s, read_s = [], []
        for _ in range(rounds):
            (folder / "state").rename(folder / "old")
            again_s.append(_seconds(lambda: write_state(folder / "state", {}, state, False, folder / "old")))
            read_s.append(_seconds(lambda: read_state(folder / "state")))
    gigabytes = nbytes / _GB
    return {
        "first_write": gigabytes / first_s,
        "write": gigabytes / median(again_s),
        "read": gigabytes / median(read_s),
    }


def _seconds(act: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def extrapolate(speed: dict[str, float]) -> str:
    """The table, with the formulas that it follows from."""
    rows = []
    for name, (parameters, devices) in _SHAPES.items():
        rank_gb = 12 * parameters / devices / _GB
        on_node, nodes = min(_PER_NODE, devices), max(devices // _PER_NODE, 1)
        sent_s = on_node * rank_gb / _NETWORK_GB_S if nodes > 1 else 0.0
        steps_kept = 6 if nodes > 1 else 3
        rows.append(
            [
                name,
                f"{rank_gb:.1f}",
                f"{rank_gb / speed['write']:.1f}",
                f"{sent_s:.1f}",
                f"{rank_gb / speed['read']:.1f}",
                f"{steps_kept * on_node * rank_gb:.0f}",
                f"{12 * parameters / _GB:.0f}",
            ]
        )
    head = ["model on devices", "a rank's state, GB", "written in, s", "sent in, s", "loaded in, s"]
    head += ["memory of a node, GB", "a copy, GB"]
    measured = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in speed.items())
    assumed = f"n = {_NETWORK_GB_S:g} GB/s between nodes of {_PER_NODE} devices"
    text = f"From GB/s of one process here: {measured}. Assumed: {assumed}."
    formulas = (__doc__ or "").partition("::\n\n")[2].rstrip()
    return f"{text}\n\n```text\n{formulas}\n```\n\n{markdown(head, rows)}"
