# SPDX-License-Identifier: Apache-2.0
"""Steps of a decoder as CUDA graphs, which one launch replays: the hundreds of launches of a step take a CPU several
times as long as the device needs for what they launch.

A graph is for a number of rows and a length, rounded up, so that few are recorded::

    rows in use    3 of 8    the others read token 0 at position 0, which the next prefix there overwrites
    length         70 of 128    masked beyond each row's end
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch

Step: TypeAlias = Callable[[Any, int], Any]
"""``step(inputs, longest)``: ``inputs`` int64 ``[2, rows]``, each row's token and its position below ``longest``;
returns logits ``[rows, vocab]``. It launches the same operations whatever the inputs are."""

_FEWEST_ROWS = 8
_SHORTEST = 128


def rounded_rows(rows: int, most: int) -> int:
    """The next power of two, of at least 8 and at most ``most``."""
    return min(most, max(_FEWEST_ROWS, 1 << (rows - 1).bit_length()))


def rounded_length(length: int, most: int) -> int:
    """A multiple of 128, or beyond 1024 of an eighth of the next lower power of two, of at most ``most``."""
    step = max(_SHORTEST, (1 << length.bit_length()) >> 4)
    return min(most, -(-length // step) * step)


class StepGraphs:
    """Replays ``step`` for caches of ``rows`` rows of ``length`` tokens; what is recorded has their addresses."""

    def __init__(self, step: Step, rows: int, length: int, device: Any) -> None:
        self._step, self._rows, self._length = step, rows, length
        self._inputs = torch.zeros((2, rows), dtype=torch.int64, device=device)
        self._logits: Any = None  # one for all graphs: a step's are read before the next step
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._pool: Any = None

    def __call__(self, tokens: Any, positions: Sequence[int]) -> Any:
        """Logits ``[rows, vocab]`` after ``tokens`` ``[rows]``, valid until the next call."""
        # Graphs are recorded and replayed on the current device, whatever devices the tensors are on.
        with torch.cuda.device(self._inputs.device) if self._inputs.is_cuda else nullcontext():
            return self._replay(tokens, positions)

    def _replay(self, tokens: Any, positions: Sequence[int]) -> Any:
        rows = rounded_rows(len(positions), self._rows)
        inputs = torch.zeros((2, rows), dtype=torch.int64, pin_memory=self._inputs.is_cuda)
        inputs[1, : len(positions)] = torch.tensor(positions)
        if not tokens.is_cuda:
            inputs[0, : len(positions)] = tokens
        self._inputs[:, :rows].copy_(inputs, non_blocking=True)
        if tokens.is_cuda:
            self._inputs[0, : len(positions)].copy_(tokens)
        key = rows, rounded_length(max(positions) + 1, self._length)
        if key not in self._replays:
            self._replays[key] = self._record(*key)
        self._replays[key]()
        return self._logits[: len(positions)]

    def _record(self, rows: int, longest: int) -> Callable[[], None]:
        def run() -> None:
            logits = self._step(self._inputs[:, :rows], longest)
            if self._logits is None:
                self._logits = logits.new_empty((self._rows, logits.shape[1]))
            self._logits[:rows].copy_(logits)

        return self._captured(run) if self._inputs.is_cuda else run

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once before: libraries allocate their workspaces, and choose their kernels, at the first call."""
        current, aside = torch.cuda.current_stream(self._inputs.device), torch.cuda.Stream(self._inputs.device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            run()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # Other threads may allocate meanwhile: those that write states, or send weights.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay
