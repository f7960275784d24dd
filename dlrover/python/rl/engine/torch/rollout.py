"""A rollout engine on plain PyTorch: continuous batching over a key-value cache of slots."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import Completion, Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.offload import Part, Place
from dlrover.python.rl.engine.requests import as_batch
from dlrover.python.rl.engine.roster import Roster
from dlrover.python.rl.engine.tenancy import BROKEN_OFF, RELEASED, refuse_unready
from dlrover.python.rl.engine.torch import fused
from dlrover.python.rl.engine.torch.batching import ContinuousBatch, Limits
from dlrover.python.rl.engine.torch.decoder import Decoder
from dlrover.python.rl.engine.torch.generic import HuggingFaceDecoder
from dlrover.python.rl.engine.torch.loading import CausalLM, load_causal_lm
from dlrover.python.rl.engine.torch.options import TorchOptions, torch_options
from dlrover.python.rl.engine.torch.precision import DTYPES
from dlrover.python.rl.engine.weights import WeightSnapshot


class TorchRolloutEngine:
    """Implements :class:`~dlrover.python.rl.engine.base.RolloutEngine`.

    A step draws a token for each sequence in the batch; sequences that have ended leave it, and those that wait take
    their places as soon as a sixteenth of all places is free. A prompt is read once for all its samples.

    A completion depends on the weights, its prompt and its own seed. What it is batched with changes its logits only by
    the rounding of matrix products (about 1e-6 in float32, 1e-2 in bfloat16), which decides a token only at a tie of
    that size.

    Args:
        model: folder or hub name of a causal language model, or one that is loaded, which becomes the engine's own.
        settings: how it runs; ``backend`` holds :class:`~dlrover.python.rl.engine.torch.options.TorchOptions`.
        memory: accounts for the device; one of its own if None.

    Raises:
        EngineError: there is no such model, it names no end-of-sequence token, or a setting does not fit.
        OutOfDeviceMemory: the weights do not fit the device.
    """

    def __init__(
        self, model: str | Path | CausalLM, settings: RolloutSettings | None = None, memory: DeviceMemory | None = None
    ) -> None:
        settings = settings or RolloutSettings()
        options = torch_options(settings)
        self._memory = memory or DeviceMemory(settings.device)
        if torch.device(self._memory.device) != torch.device(settings.device):
            raise EngineError(f"the engine shall run on {settings.device}, but its memory is of {self._memory.device}")
        lm = model if isinstance(model, CausalLM) else load_causal_lm(model)
        if not lm.eos_ids:
            raise EngineError(f"'{model}' names no end-of-sequence token: its completions would never finish")
        self.version = -1
        self._name = self._memory.owner("rollout engine")
        self._decoder = _decoder(lm, settings, options, self._memory, self._name)
        self._roster = Roster(dataclasses.replace(lm, model=None))
        limits = Limits(settings.max_batch, options.prefill_tokens)
        self._batch = ContinuousBatch(self._roster, self._decoder, limits, self._memory, self._name)
        self._lacks = ""
        self._has_cache = True

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._roster.endings.tokenizer

    # -- generating ---------------------------------------------------------------------------------------------------

    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete each prompt ``samples_per_prompt`` times; see the port for the columns.

        Raises:
            EngineError: a prompt is empty, holds unknown ids or leaves no room for ``max_new_tokens``; or the engine is
                offloaded, or requests run that have been added before: nothing has been generated then. Or the weights
                give logits that are not numbers.
            OutOfDeviceMemory: the device is full; names who holds what.
        """
        numbers = self._roster.add_batch(prompts, sampling, seed)
        done: dict[int, Completion] = {}
        try:
            self._check_ready()
            self._batch.take(numbers)
            while self.running:
                done.update(self._batch.step(self.version))
        finally:
            self.abort()
        return as_batch([done[number] for number in numbers])

    def check(self, tokens: Ragged, sampling: SamplingParams) -> None:
        """Refuse prompts that :meth:`generate` would refuse.

        Raises:
            EngineError: one is empty, holds unknown ids or leaves no room for ``max_new_tokens``; or the sampling
                parameters make no sense.
        """
        self._roster.check(tokens, sampling)

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        """Take in samples to draw, beside those that run already; nothing is drawn before :meth:`advance`.

        Raises:
            EngineError: as :meth:`check`; or a request runs already, comes twice, or has ended. None has been taken in
                then.
        """
        self._batch.take(self._roster.add(requests, sampling, seed))

    def advance(self) -> list[Completion]:
        """Draw a token more for each sequence in the batch; return those that have ended, the first added first.

        Raises:
            EngineError: the engine is offloaded, or its weights are broken; the requests are kept.
            OutOfDeviceMemory: the device is full; names who holds what. The requests are kept.
        """
        self._check_ready()
        ended = self._batch.step(self.version) if self.running else {}
        return [ended[number] for number in sorted(ended)]

    def abort(self, keys: Sequence[tuple[int, int]] | None = None) -> list[Completion]:
        """End these running requests, or all; each comes back as far as it got, with ``finish`` ``"aborted"``.

        Raises:
            EngineError: one of them does not run; none has been ended then.
        """
        return list(self._batch.leave(dict.fromkeys(self._roster.numbers(keys), "aborted")).values())

    @property
    def running(self) -> int:
        """Requests taken in that have not ended."""
        return len(self._roster)

    # -- weights ------------------------------------------------------------------------------------------------------

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Take over new weights in place; all of them are verified before any is used.

        After :meth:`meta` they are put in host memory, unless ``cuda("weights")`` has made room on the device.

        Args:
            weights: what arrived.
            rewind: take over older ones too.

        Raises:
            WeightSyncError: the weights do not fit, are corrupt or older; the old ones keep serving.
        """
        store = self._decoder.store
        store.check(weights, serving=-1 if rewind else self.version)
        if store.place == "meta":
            store.host()
        # Holds if writing breaks off: a mixture has no version, and is not served.
        self.version, self._lacks = -1, BROKEN_OFF
        store.write(weights)
        self.version, self._lacks = weights.version, ""
        self._batch.unseat()

    # -- where things are ---------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        """Move the weights to host memory and drop the key-value cache; running requests will be read anew."""
        self._release()
        self._decoder.store.cpu()
        self._moved()

    def cuda(self, part: Part = "all") -> None:
        """Bring ``part`` to the device.

        After :meth:`meta` there is room for the weights then, and nothing to draw from before :meth:`receive`. The
        key-value cache is as large as it was; the first one is made when requests come.

        Raises:
            OutOfDeviceMemory: it does not fit; names who holds what.
        """
        if part in ("all", "weights"):
            self._decoder.store.cuda()
            self._moved()
        if part in ("all", "kv_cache"):
            self._batch.restore()
            self._has_cache = True

    def meta(self) -> None:
        """Release weights and key-value cache; running requests stay, and go on with the weights that come."""
        self._release()
        self._decoder.store.meta()
        self._moved()
        self.version, self._lacks = -1, RELEASED

    def place(self) -> Place:
        """Where the weights are."""
        return self._decoder.store.place

    def footprint(self) -> dict[str, int]:
        """Bytes on the device by kind: ``weights``, ``kv_cache``; 0s left out."""
        return self._memory.held(self._name)

    def close(self) -> None:
        """End what runs, and release everything."""
        self.abort()
        self.meta()

    def _release(self) -> None:
        self._batch.forget()
        self._has_cache = False

    def _moved(self) -> None:
        self._decoder.bind()
        self._memory.release_cache()

    def _check_ready(self) -> None:
        refuse_unready(self.place(), self._lacks, self._has_cache)


def _decoder(
    lm: CausalLM, settings: RolloutSettings, options: TorchOptions, memory: DeviceMemory, owner: str
) -> Decoder:
    dtype, share = DTYPES[settings.precision], settings.gpu_memory_utilization
    if options.forward != "huggingface" and fused.fits(lm):
        return fused.FusedDecoder(lm, dtype, memory, owner, share)
    if options.forward == "fused":
        raise EngineError(f"the fused forward pass does not fit this model of type '{lm.model.config.model_type}'")
    return HuggingFaceDecoder(lm, dtype, memory, owner, share)
