# SPDX-License-Identifier: Apache-2.0
"""The rollout engine on plain PyTorch: continuous batching over a key-value cache of rows."""

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.spans import phase
from dlrover.python.rl.engine.api.base import Finish, RolloutSettings
from dlrover.python.rl.engine.api.registry import find_rollout_errors, raise_engine_errors, read_options
from dlrover.python.rl.engine.api.weights import DeviceKind, Part, WeightSnapshot, verify_snapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.memory.offload import BROKEN_OFF, RELEASED, raise_unless_ready
from dlrover.python.rl.engine.model.attention import find_fixed_positions
from dlrover.python.rl.engine.model.loading import DTYPES, CausalLM
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.rollout.requests import RolloutEngineBase, RunningRequests
from dlrover.python.rl.engine.rollout_torch import INFO, TorchOptions, fused
from dlrover.python.rl.engine.rollout_torch.batch import ContinuousBatch, Decoder
from dlrover.python.rl.engine.rollout_torch.decoder import HuggingFaceDecoder


class TorchRolloutEngine(RolloutEngineBase):
    """Implements :class:`~dlrover.python.rl.engine.api.base.BaseRolloutEngine`.

    A step generates a token for each active sequence. A prompt is read once for all its samples. A completion depends
    on the weights, its prompt and its seed; its batch changes its logits only by the rounding of matrix products (about
    1e-6 in float32, 1e-2 in bfloat16), which decides a token only at a tie of that size.

    ``model`` is a folder or hub name, or a loaded model, which the engine then owns.

    Raises:
        EngineError: there is no such model, it has no end-of-sequence token, or a setting does not fit.
        OutOfDeviceMemory: the weights do not fit the device.
    """

    info = INFO

    def __init__(
        self, model: str | Path | CausalLM, settings: RolloutSettings | None = None, memory: DeviceMemory | None = None
    ) -> None:
        settings = settings or RolloutSettings()
        options = read_options(TorchOptions, settings.backend)
        raise_engine_errors(find_rollout_errors("torch", INFO, settings.tensor_parallel_size))
        self._memory = memory or DeviceMemory(settings.device)
        if torch.device(self._memory.device) != torch.device(settings.device):
            raise EngineError(f"the engine runs on {settings.device}, but its DeviceMemory is of {self._memory.device}")
        lm = (model if isinstance(model, CausalLM) else load_causal_lm(model)).masked(settings.mask_unknown_ids)
        if not lm.eos_ids:
            raise EngineError(f"'{model}' has no end-of-sequence token: its completions would never finish")
        fixed = find_fixed_positions(lm.model)
        if fixed is not None:
            lm = dataclasses.replace(lm, max_positions=min(fixed, lm.max_positions or fixed))
        self._name = self._memory.owner("rollout engine")
        on_device = lm, DTYPES[settings.precision], self._memory, self._name, settings.gpu_memory_utilization
        is_cuda = torch.device(self._memory.device).type == "cuda"
        self._decoder: Decoder
        if options.forward != "huggingface" and fused.is_supported(lm):
            self._decoder = fused.FusedDecoder(*on_device, graphs=is_cuda and not options.enforce_eager)
        elif options.forward == "fused":
            raise EngineError(f"the fused forward pass does not support model type '{lm.model.config.model_type}'")
        else:
            self._decoder = HuggingFaceDecoder(*on_device)
        self._requests = RunningRequests(dataclasses.replace(lm, model=None), columns=self.info.columns)
        computing = partial(self._memory.computing, self._name)
        self._batch = ContinuousBatch(
            self._requests, self._decoder, settings.max_batch, options.prefill_tokens, computing, runs_ahead=is_cuda
        )
        self._lacks = ""
        self._has_cache = True

    def _queue(self, numbers: Sequence[int]) -> None:
        self._batch.add(numbers)

    def _step(self, max_tokens: int | None) -> dict[int, Finish]:
        return self._batch.step(self.version)

    def _withdraw(self, numbers: Collection[int]) -> None:
        self._batch.remove(numbers)

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Write new weights in place; after :meth:`meta` to host memory, unless ``cuda("weights")`` was called."""
        store = self._decoder.store
        verify_snapshot(weights, store.shapes, serving=-1 if rewind else self.version)
        if store.place == "meta":
            store.host()
        # Remains if writing fails midway: a mixture of versions is not served.
        self.version, self._lacks = -1, BROKEN_OFF
        with phase("load weights"):
            store.write(weights)
        self.version, self._lacks = weights.version, ""
        self._batch.requeue()

    def cpu(self) -> None:
        self._release()
        self._decoder.store.cpu()
        self._rebind()

    def cuda(self, part: Part = "all") -> None:
        """Bring ``part`` to the device; the cache gets its last size, and the first request allocates the first."""
        if part in ("all", "weights") and self.place() != "cuda":
            self._decoder.store.cuda()
            self._rebind()
        if part in ("all", "kv_cache"):
            self._batch.restore()
            self._has_cache = True

    def meta(self) -> None:
        """Release weights and key-value cache; running requests continue with the next weights."""
        self._release()
        self._decoder.store.meta()
        self._rebind()
        self.version, self._lacks = -1, RELEASED

    def place(self) -> DeviceKind:
        return self._decoder.store.place

    def footprint(self) -> dict[str, int]:
        return self._memory.bytes_of(self._name)

    def close(self) -> None:
        self.abort()
        self.meta()

    def _release(self) -> None:
        self._batch.release()
        self._has_cache = False

    def _rebind(self) -> None:
        self._decoder.bind()
        self._memory.release_cache()

    def _check_ready(self) -> None:
        raise_unless_ready(self.place(), self._lacks, self._has_cache)
