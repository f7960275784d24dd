# SPDX-License-Identifier: Apache-2.0
"""The rollout engine on vLLM, which runs in this process; its tensor-parallel workers are child processes."""

import itertools
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import Completion, Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.weights import DeviceKind, Part, WeightSnapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory, Kind
from dlrover.python.rl.engine.memory.offload import BROKEN_OFF, RELEASED, OffloadState, divide_bytes
from dlrover.python.rl.engine.model.loading import DTYPES
from dlrover.python.rl.engine.model.spec import count_weight_bytes, get_head_width, load_meta_causal_lm
from dlrover.python.rl.engine.rollout.requests import Key, RunningRequests, as_batch
from dlrover.python.rl.engine.vllm import INFO, VllmOptions, engine_arguments
from dlrover.python.rl.engine.vllm.runner import (
    OffloadableRunner,
    RestartingRunner,
    Runner,
    SleepingRunner,
    check_head_width,
)


class VllmRolloutEngine:
    """Implements :class:`~dlrover.python.rl.engine.api.base.BaseRolloutEngine`.

    Tokens are sampled by the same rule and from the same random numbers as in the ``torch`` engine (see
    ``vllm/worker.py``), so a sample depends neither on its batch nor on interruptions, beyond the rounding of its
    logits. Weights are written in place by vLLM's own loader and read back, bit for bit, before they are served.

    On a GPU ``cpu()`` and ``meta()`` are vLLM's sleep of level 1 and 2. On a CPU vLLM cannot sleep: it is ended, and
    ``cuda()`` starts it again, which takes seconds.

    Args:
        model: folder or hub name.
        settings: ``backend`` takes ``VllmOptions``.
        memory: accounts for the device.

    Raises:
        MissingExtra: vLLM is not installed (when this module is imported).
        EngineError: there is no such model or option, or vLLM does not start with them.
        OutOfDeviceMemory: it does not fit the free capacity of ``memory``.
    """

    info = INFO

    def __init__(self, model: str | Path, settings: RolloutSettings, memory: DeviceMemory | None = None) -> None:
        options, errors = parse(VllmOptions, dict(settings.backend), "backend")
        if options is None:
            raise EngineError("; ".join(map(str, errors)))
        self.version = -1
        self._lm, folder = load_meta_causal_lm(model)
        if settings.device == "cpu":
            check_head_width(get_head_width(self._lm))
        arguments = engine_arguments(folder, self._lm, settings, options)
        self._requests = RunningRequests(self._lm, arguments["max_model_len"])
        self._names: dict[int, str] = {}
        self._submissions = itertools.count()
        self._offload = OffloadState(memory or DeviceMemory(settings.device), "vllm")
        nbytes = count_weight_bytes(self._lm, DTYPES[settings.precision])
        self._offload.bring("weights", divide_bytes(nbytes, settings.tensor_parallel_size))
        offloadable = RestartingRunner if settings.device == "cpu" else SleepingRunner
        with ExitStack() as undo:
            undo.callback(self._offload.leave, "meta")
            with self._offload.computing():
                self._offloadable: OffloadableRunner = offloadable(partial(Runner, arguments))
            undo.callback(self._offloadable.close)
            self._offload.bring("kv_cache", self._offloadable.runner.cache_bytes())
            undo.pop_all()

    @property
    def tokenizer(self) -> Any:
        return self._lm.tokenizer

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        self._requests.check(prompts.ragged("tokens"), sampling)
        self._offload.check_ready()
        numbers = self._requests.add_batch(prompts, sampling, seed)
        completions: dict[int, Completion] = {}
        try:
            while self._requests.by_number:
                completions |= self._step()
        except BaseException:
            self.abort()
            raise
        return as_batch([completions[number] for number in numbers])

    def check(self, tokens: Ragged, sampling: SamplingParams) -> None:
        self._requests.check(tokens, sampling)

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        self._requests.add(requests, sampling, seed)

    def advance(self) -> list[Completion]:
        """One step of vLLM: a token for each sequence that it has capacity for, or part of a prompt.

        Returns:
            Completions in the order of their requests.
        """
        self._offload.check_ready()
        finished = self._step() if self._requests.by_number else {}
        return [finished[number] for number in sorted(finished)]

    def abort(self, keys: Sequence[Key] | None = None) -> list[Completion]:
        numbers = self._requests.numbers(keys)
        self._withdraw(numbers)
        return [self._requests.remove(number, "aborted") for number in numbers]

    @property
    def running(self) -> int:
        return len(self._requests)

    def _step(self) -> dict[int, Completion]:
        """Submit what is not submitted, and step once; returns completions by number."""
        runner = self._offloadable.runner
        for number, running in self._requests.by_number.items():
            if number not in self._names:
                self._names[number] = str(next(self._submissions))
                runner.submit(self._names[number], running, self._lm.eos_ids)
        numbers = {name: number for number, name in self._names.items()}
        try:
            with self._offload.computing():
                new_tokens = [(numbers[name], token, logprob) for name, token, logprob in runner.step()]
            finished = self._requests.append(new_tokens, self.version)
        except EngineError:
            self._withdraw(self._requests.by_number)  # The other tokens of this step are generated again.
            raise
        self._withdraw(finished)
        return {number: self._requests.remove(number, reason) for number, reason in finished.items()}

    def _withdraw(self, numbers: Collection[int]) -> None:
        """Abort these requests in vLLM; they keep their tokens, and can be submitted again."""
        names = [self._names.pop(number) for number in list(numbers) if number in self._names]
        if names:
            self._offloadable.runner.abort(names)

    # -- weights and memory -------------------------------------------------------------------------------------------

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Verify and load new weights; while the old ones are offloaded, they wait in host memory."""
        self._lm.check(weights, serving=-1 if rewind else self.version)
        self._withdraw(self._requests.by_number)
        # Stays if loading breaks off: a mixture has no version.
        self.version, self._offload.unready_reason = -1, BROKEN_OFF
        with self._offload.computing():
            self._offloadable.load(weights)
        if self._offload.place == "meta":
            self._offload.place = "cpu"
        self.version, self._offload.unready_reason = weights.version, ""

    def cpu(self) -> None:
        if self._offload.unready_reason:
            self.meta()
        elif self._offload.footprint():
            self._sleep("cpu")

    def meta(self) -> None:
        self._sleep("meta")
        self.version, self._offload.unready_reason = -1, RELEASED

    def cuda(self, part: Part = "all") -> None:
        for kind in self._offload.missing_kinds(part):
            self._wake(kind)

    def place(self) -> DeviceKind:
        return self._offload.place

    def footprint(self) -> dict[str, int]:
        """Bytes on the device by kind; with several ranks, on the device of each."""
        return self._offload.footprint()

    def close(self) -> None:
        self._requests.by_number.clear()
        self._names.clear()
        self._offloadable.close()
        self._offload.leave("meta")

    def _wake(self, kind: Kind) -> None:
        self._offload.bring(kind)
        try:
            with self._offload.computing():
                self._offloadable.wake(kind)
        except BaseException:
            has_weights = self._offloadable.has_weights
            self._offload.leave("cpu" if has_weights else "meta")
            if not has_weights:
                self.version, self._offload.unready_reason = -1, self._offload.unready_reason or BROKEN_OFF
            raise

    def _sleep(self, place: DeviceKind) -> None:
        self._withdraw(self._requests.by_number)
        self._offloadable.sleep(keep_weights=place == "cpu")
        self._offload.leave(place)
