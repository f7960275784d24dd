"""A rollout engine on vLLM, in this process; its tensor-parallel workers are processes that end with it."""

import itertools
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import Completion, Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.memory import DeviceMemory, Kind
from dlrover.python.rl.engine.offload import Part, Place
from dlrover.python.rl.engine.requests import as_batch
from dlrover.python.rl.engine.roster import Key, Roster
from dlrover.python.rl.engine.tenancy import BROKEN_OFF, RELEASED, Tenancy, part_of
from dlrover.python.rl.engine.torch.outline import head_width, outline_causal_lm, weight_bytes
from dlrover.python.rl.engine.torch.precision import DTYPES
from dlrover.python.rl.engine.vllm.residents import Resident, Restarter, Sleeper
from dlrover.python.rl.engine.vllm.runner import Runner, check_head_width
from dlrover.python.rl.engine.vllm.settings import VllmOptions, engine_arguments
from dlrover.python.rl.engine.weights import WeightSnapshot


class VllmRolloutEngine:
    """Implements :class:`~dlrover.python.rl.engine.base.RolloutEngine`.

    Tokens are drawn by the same rule and from the same random numbers as in the ``torch`` engine (see
    ``vllm/drawing.py``), so a sample depends neither on its batch nor on interruptions, beyond the rounding of its
    logits. Weights are written in place by vLLM's own loader and read back, bit for bit, before they are served.

    On a GPU ``cpu()`` and ``meta()`` are vLLM's sleep of level 1 and 2. On a CPU it cannot sleep: there vLLM is ended,
    and ``cuda()`` starts it anew, which takes seconds.

    Args:
        model: folder or hub name.
        settings: ``backend`` takes :class:`~dlrover.python.rl.engine.vllm.settings.VllmOptions`.
        memory: accounts for the device.

    Raises:
        MissingExtra: vLLM is not installed (when this module is imported).
        EngineError: there is no such model or option, or vLLM does not start with them.
        OutOfDeviceMemory: it does not fit what ``memory`` has left.
    """

    def __init__(self, model: str | Path, settings: RolloutSettings, memory: DeviceMemory | None = None) -> None:
        options, problems = parse(VllmOptions, dict(settings.backend), "backend")
        if options is None:
            raise EngineError("; ".join(map(str, problems)))
        self.version = -1
        self._lm, folder = outline_causal_lm(model)
        if settings.device == "cpu":
            check_head_width(head_width(self._lm))
        arguments = engine_arguments(folder, self._lm, settings, options)
        self._roster = Roster(self._lm, arguments["max_model_len"])
        self._names: dict[int, str] = {}
        self._submissions = itertools.count()
        self._at = Tenancy(memory or DeviceMemory(settings.device), "vllm")
        whole = weight_bytes(self._lm, DTYPES[settings.precision])
        self._at.bring("weights", part_of(whole, settings.tensor_parallel_size))
        resident = Restarter if settings.device == "cpu" else Sleeper
        with ExitStack() as undone:
            undone.callback(self._at.leave, "meta")
            with self._at.computing():
                self._resident: Resident = resident(partial(Runner, arguments))
            undone.callback(self._resident.close)
            self._at.bring("kv_cache", self._resident.runner.cache_bytes())
            undone.pop_all()

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._lm.tokenizer

    # -- drawing ------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete each prompt ``samples_per_prompt`` times; see the port for the columns."""
        self._roster.check(prompts.ragged("tokens"), sampling)
        self._at.check_ready()
        numbers = self._roster.add_batch(prompts, sampling, seed)
        done: dict[int, Completion] = {}
        try:
            while self._roster.samples:
                done |= self._step()
        except BaseException:
            self.abort()
            raise
        return as_batch([done[number] for number in numbers])

    def check(self, tokens: Ragged, sampling: SamplingParams) -> None:
        """Refuse prompts that :meth:`generate` would refuse."""
        self._roster.check(tokens, sampling)

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        """Take in samples to draw, beside those that run already; nothing is drawn before :meth:`advance`."""
        self._roster.add(requests, sampling, seed)

    def advance(self) -> list[Completion]:
        """One step of vLLM: a token more of each sequence that it has room for, or part of a prompt that is read.

        Returns:
            Those that have ended, the first added first.
        """
        self._at.check_ready()
        ended = self._step() if self._roster.samples else {}
        return [ended[number] for number in sorted(ended)]

    def abort(self, keys: Sequence[Key] | None = None) -> list[Completion]:
        """End these running requests, or all; each comes back as far as it got."""
        numbers = self._roster.numbers(keys)
        self._withdraw(numbers)
        return [self._roster.end(number, "aborted") for number in numbers]

    @property
    def running(self) -> int:
        """Requests taken in that have not ended."""
        return len(self._roster)

    def _step(self) -> dict[int, Completion]:
        """One step of vLLM, all that runs being submitted; what has ended, by number."""
        runner = self._resident.runner
        for number, sample in self._roster.samples.items():
            if number not in self._names:
                self._names[number] = str(next(self._submissions))
                runner.submit(self._names[number], sample, self._lm.eos_ids)
        numbers = {name: number for number, name in self._names.items()}
        try:
            with self._at.computing():
                drawn = [(numbers[name], token, logprob) for name, token, logprob in runner.step()]
            ended = self._roster.note(drawn, self.version)
        except EngineError:
            self._withdraw(self._roster.samples)  # What was drawn beside is drawn again.
            raise
        self._withdraw(ended)
        return {number: self._roster.end(number, why) for number, why in ended.items()}

    def _withdraw(self, numbers: Collection[int]) -> None:
        """Have vLLM forget these samples; what they have drawn stays, and they can be submitted again."""
        names = [self._names.pop(number) for number in list(numbers) if number in self._names]
        if names:
            self._resident.runner.abort(names)

    # -- weights and memory -------------------------------------------------------------------------------------------

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Take over new weights; running requests go on with them, their keys and values computed anew.

        While the weights are not on the device they are kept in host memory, and written when they are brought.
        """
        self._lm.check(weights, serving=-1 if rewind else self.version)
        self._withdraw(self._roster.samples)
        self.version, self._at.lacks = -1, BROKEN_OFF  # Holds if it breaks off: a mixture has no version.
        with self._at.computing():
            self._resident.take(weights)
        if self._at.place == "meta":
            self._at.place = "cpu"
        self.version, self._at.lacks = weights.version, ""

    def cpu(self) -> None:
        """Free the device; the weights stay on the host."""
        if self._at.lacks:
            self.meta()
        elif self._at.footprint():
            self._sleep("cpu")

    def meta(self) -> None:
        """Free the device and forget the weights."""
        self._sleep("meta")
        self.version, self._at.lacks = -1, RELEASED

    def cuda(self, part: Part = "all") -> None:
        """Bring ``part`` to the device; after :meth:`meta` there is room for weights then, and nothing in it."""
        for kind in self._at.missing(part):
            self._wake(kind)

    def place(self) -> Place:
        """Where the weights are."""
        return self._at.place

    def footprint(self) -> dict[str, int]:
        """Bytes on the device by kind; with several ranks, on each one's."""
        return self._at.footprint()

    def close(self) -> None:
        """End vLLM and its workers."""
        self._roster.samples.clear()
        self._names.clear()
        self._resident.close()
        self._at.leave("meta")

    def _wake(self, kind: Kind) -> None:
        self._at.bring(kind)
        try:
            with self._at.computing():
                self._resident.wake(kind)
        except BaseException:
            self._at.leave("cpu" if self._resident.keeps else "meta")
            if not self._resident.keeps:
                self.version, self._at.lacks = -1, self._at.lacks or BROKEN_OFF
            raise

    def _sleep(self, place: Place) -> None:
        self._withdraw(self._roster.samples)
        self._resident.sleep(keep=place == "cpu")
        self._at.leave(place)
