# SPDX-License-Identifier: Apache-2.0
"""The engines that ``benchmarks.rollout`` runs against each other, each on the same work."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from dlrover.python.rl.engine.api.base import Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

ANSWER_S = 600.0
"""How long vLLM may take to start, or for one work."""


@dataclass(frozen=True)
class Work:
    """Sequences to draw at temperature 1, each to exactly its length.

    Attributes:
        name: what the tables call it.
        prompts: token ids.
        lengths: new tokens of each.
        at_a_time: sequences that decode side by side.
    """

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    at_a_time: int

    @property
    def tokens(self) -> int:
        """New tokens in all."""
        return sum(self.lengths)


class Side(Protocol):
    """One engine; :meth:`run` draws everything and returns how many tokens it drew for each sequence."""

    name: str

    def run(self, work: Work) -> list[int]:
        """Do the work once."""
        ...

    def close(self) -> None:
        """End what it has started."""
        ...


class Torch:
    """This project's engine: log-probs of every token and texts included, which the others do not give here."""

    name = "torch engine"

    def __init__(self, model: Path, precision: Precision, at_a_time: int) -> None:
        self._engine = TorchRolloutEngine(model, RolloutSettings(max_batch=at_a_time, precision=precision))

    def run(self, work: Work) -> list[int]:
        """Add all requests, of which a batch is decoded at a time, and advance to the end."""
        for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
            self._engine.add([Request.fresh(number, 0, prompt)], sampling, (0,))
        done = {}
        while self._engine.running:
            done.update({item.request.prompt_id: len(item.request.done) for item in self._engine.advance()})
        return [done[number] for number in range(len(work.prompts))]

    def close(self) -> None:
        """Release it."""
        self._engine.close()


class _Lengths(StoppingCriteria):
    """Ends each row at its own length."""

    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        self._ends = torch.tensor(lengths) + prompt

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        return self._ends <= input_ids.shape[1]


class Transformers:
    """``generate`` of the library, batch after batch.

    Args:
        model: the model's folder.
        precision: of its weights.
        attention: which of the library's attentions.
        cache: its ``cache_implementation``; None is its default.
        sort: put sequences of similar length, which no engine knows beforehand, in one batch.
    """

    def __init__(
        self, model: Path, precision: Precision, attention: str, cache: str | None = None, sort: bool = False
    ) -> None:
        options = [attention, f"{cache} cache" if cache else "", "lengths known beforehand" if sort else ""]
        self.name = f"transformers generate ({', '.join(filter(None, options))})"
        options = {"dtype": DTYPES[precision], "attn_implementation": attention}
        self._model = AutoModelForCausalLM.from_pretrained(model, **options)
        self._model.generation_config.eos_token_id = None  # no row ends early, and nothing has to be looked for
        self._cache, self._sort = cache, sort

    def run(self, work: Work) -> list[int]:
        """Draw, a batch at a time; a row that has reached its length waits for the longest of its batch."""
        order = np.argsort(work.lengths, kind="stable") if self._sort else np.arange(len(work.lengths))
        counts = [0] * len(order)
        for start in range(0, len(order), work.at_a_time):
            chosen = order[start : start + work.at_a_time].tolist()
            lengths = [work.lengths[row] for row in chosen]
            prompts = torch.tensor([work.prompts[row] for row in chosen])
            out = self._generate(prompts, lengths)
            for row, length in zip(chosen, lengths, strict=True):
                counts[row] = min(length, out.shape[1] - prompts.shape[1])
        return counts

    @torch.inference_mode()
    def _generate(self, prompts: Any, lengths: list[int]) -> Any:
        more: dict[str, Any] = {"cache_implementation": self._cache} if self._cache else {}
        if len(set(lengths)) > 1:
            more["stopping_criteria"] = [_Lengths(prompts.shape[1], lengths)]
        return self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max(lengths),
            pad_token_id=0,
            **more,
        )

    def close(self) -> None:
        """Nothing to end."""


class Processes:
    """Run a side in ``count`` processes of one thread; process ``i`` has the sequences ``i``, ``i + count``, ..."""

    def __init__(self, count: int, make: Callable[[int], Side], at_a_time: int) -> None:
        """``make(n)``, which is pickled, makes the side with ``n`` sequences at a time."""
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        self._share = -(-at_a_time // count)
        self._processes = [
            context.Process(target=_serve, args=(make, self._share, far), daemon=True) for _, far in pipes
        ]
        self._pipes = [near for near, _ in pipes]
        for process, (_, far) in zip(self._processes, pipes, strict=True):
            process.start()
            far.close()
        names = {self._answer(pipe) for pipe in self._pipes}
        self.name = f"{names.pop()}, {count} processes"

    def run(self, work: Work) -> list[int]:
        """Hand each its part, and wait for all."""
        count = len(self._pipes)
        for number, pipe in enumerate(self._pipes):
            pipe.send(Work(work.name, work.prompts[number::count], work.lengths[number::count], self._share))
        counts = [0] * len(work.lengths)
        for number, pipe in enumerate(self._pipes):
            counts[number::count] = self._answer(pipe)
        return counts

    @staticmethod
    def _answer(pipe: Any) -> Any:
        if not pipe.poll(ANSWER_S):
            raise RuntimeError(f"a process did not answer within {ANSWER_S:.0f} s")
        return pipe.recv()

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=60.0)
            process.terminate()


def _serve(make: Callable[[int], Side], share: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    side = make(share)
    pipe.send(side.name)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(side.run(pipe.recv()))
    side.close()


class Vllm:
    """vLLM in a separate process, which may have another environment."""

    name = "vLLM"

    def __init__(self, python: str, model: Path, precision: Precision, at_a_time: int, threads: int) -> None:
        cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(threads), **cores}
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("_rollout_vllm.py")), str(model), str(at_a_time), DTYPES[precision]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def run(self, work: Work) -> list[int]:
        """Hand over the prompts and lengths, which takes a millisecond, and wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([work.prompts, work.lengths]) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        overdue = threading.Timer(ANSWER_S, self._process.kill)
        overdue.start()
        try:
            for line in self._process.stdout:
                if line.startswith("# "):
                    return line[2:].strip()
                sys.stderr.write(line)
        finally:
            overdue.cancel()
        raise RuntimeError(f"vLLM ended, or did not answer within {ANSWER_S:.0f} s; its own messages are above")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=60.0)
