# SPDX-License-Identifier: Apache-2.0
"""The rollout engine on plain PyTorch: continuous batching over a key-value cache of slots.

Waiting requests get a row of the cache, generate a token per step, and free the row.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.api.base import Finish, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import find_rollout_errors, raise_engine_errors, read_options
from dlrover.python.rl.engine.api.weights import DeviceKind, Part, WeightSnapshot, verify_snapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.memory.offload import BROKEN_OFF, RELEASED, raise_unless_ready
from dlrover.python.rl.engine.model.loading import DTYPES, CausalLM
from dlrover.python.rl.engine.model.spec import load_causal_lm
from dlrover.python.rl.engine.rollout.requests import NewToken, RolloutEngineBase, RunningRequests, choose
from dlrover.python.rl.engine.rollout_torch import INFO, TorchOptions, fused, rounded_capacity
from dlrover.python.rl.engine.rollout_torch.cache import Scheduler
from dlrover.python.rl.engine.rollout_torch.decoder import Decoder, HuggingFaceDecoder, Ids, Prefix

Computing: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class _Draw:
    """Active requests whose tokens are sampled in one call."""

    numbers: list[int]
    sampling: SamplingParams
    uniform: Any  # float64 `[len(numbers)]`
    rows: Any  # int64 `[len(numbers)]`, of the logits; None: all


class ContinuousBatch:
    """Runs the decoder for the running requests.

    A step reads the last token of each active sequence, and the prompts of those that take free rows; then all get
    their next token. At most ``rows`` sequences are decoded at a time, and ``prefill_tokens``, padding included, read;
    ``computing`` is entered for both.
    """

    def __init__(
        self, requests: RunningRequests, decoder: Decoder, rows: int, prefill_tokens: int, computing: Computing
    ) -> None:
        self._requests, self._decoder, self._computing = requests, decoder, computing
        self._rows, self._prefill_tokens = rows, prefill_tokens
        self._scheduler = Scheduler(rows)
        self._needed, self._length = 0, 0
        self._prefixes: dict[bytes, Prefix] = {}

    def add(self, numbers: Sequence[int]) -> None:
        """Queue these running requests behind the others."""
        longest = max((self._requests.by_number[number].max_length for number in numbers), default=0)
        self._needed = max(self._needed, longest) if self._scheduler.has_requests else longest
        self._scheduler.add(numbers)

    @torch.inference_mode()
    def step(self, version: int) -> dict[int, Finish]:
        """Generate a token, stamped with ``version``, for each sequence that has a row; at least one request must run.

        Returns the requests that have finished, by number. After any error all requests are as before the step.

        Raises:
            EngineError: the logits are not finite.
        """
        try:
            with self._computing():
                new_tokens = self._compute()
            return self._requests.append(new_tokens, version)
        except BaseException:
            self.release()
            raise

    @torch.inference_mode()
    def remove(self, numbers: Collection[int]) -> None:
        """Free the rows of these requests, or their places in the queue."""
        active = len(self._scheduler.active)
        rows = self._scheduler.remove(numbers)
        if len(rows) < active:
            self._decoder.select_rows(rows)

    def requeue(self) -> None:
        """Return all requests to the queue, to be read again: the cached keys and values are no longer valid."""
        self._scheduler.requeue()
        self._prefixes = {}
        self._decoder.select_rows([])

    def release(self) -> None:
        """Return all requests to the queue and free the cache."""
        self.requeue()
        self._decoder.clear()

    @torch.inference_mode()
    def restore(self) -> None:
        """Allocate a cache of the same size as the last one."""
        if self._length and not self._decoder.capacity:
            self._scheduler.rows = self._decoder.allocate(self._rows, self._length)

    # -- schedule, run, record ----------------------------------------------------------------------------------------

    def _compute(self) -> list[NewToken]:
        """The next token of every active request, after admission, and its log-prob."""
        self._resize_cache()
        active = list(self._scheduler.active)
        admitted = self._scheduler.admit()
        # What the device needs from the host is there before it computes: a copy would wait until it has done so, and
        # only then could it be given more to do.
        draws = self._draws()
        logits = self._forward(active, admitted)
        new_tokens: list[NewToken] = []
        for draw in draws:
            selected = logits if draw.rows is None else logits[draw.rows]
            tokens, logprobs = choose(selected, draw.sampling, draw.uniform)
            new_tokens += zip(draw.numbers, tokens.tolist(), logprobs.tolist(), strict=True)
        return new_tokens

    def _draws(self) -> list["_Draw"]:
        """Of all active requests."""
        device, numbers = self._decoder.store.device, self._scheduler.active
        running = [self._requests.by_number[number] for number in numbers]
        rows_by_key: dict[tuple[Any, ...], list[int]] = {}
        for row, request in enumerate(running):
            rows_by_key.setdefault(request.sampling_key, []).append(row)
        draws = []
        for rows in rows_by_key.values():
            uniform = torch.tensor([running[row].next_uniform() for row in rows], dtype=torch.float64, device=device)
            index = torch.tensor(rows, device=device) if len(rows_by_key) > 1 else None
            draws.append(_Draw([numbers[row] for row in rows], running[rows[0]].sampling, uniform, index))
        return draws

    def _forward(self, active: Sequence[int], admitted: Sequence[int]) -> Any:
        """Logits of the next token of every active request, then of those that get a row: ``[rows, vocab]``."""
        parts = []
        if active:
            last = [self._requests.by_number[number].tokens[-1] for number in active]
            parts.append(self._decoder.step(torch.tensor(last)))
        parts += self._prefill(admitted)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _resize_cache(self) -> None:
        """Make rows as long as needed; active requests are read again if the cache has to be replaced."""
        if not self._scheduler.waiting:
            return
        needed = rounded_capacity(self._needed)
        too_few_rows = not self._scheduler.active and self._scheduler.rows < self._rows
        if needed > self._decoder.capacity or (too_few_rows and needed < self._decoder.capacity):
            self.requeue()
            self._scheduler.rows, self._length = self._decoder.allocate(self._rows, needed), needed

    def _prefill(self, numbers: Sequence[int]) -> list[Any]:
        """Give each a row; logits of their next tokens, ``[rows, vocab]`` in parts within the token budget.

        Equal sequences are read once if they are in one part or adjacent, as the samples of a prompt are.
        """
        logits: list[Any] = []
        keys: list[bytes] = []
        unread: dict[bytes, Ids] = {}
        for number in numbers:
            sequence = self._requests.by_number[number].sequence
            key = sequence.tobytes()
            if key not in self._prefixes and key not in unread:
                padded_tokens = (len(unread) + 1) * max(map(len, [*unread.values(), sequence]))
                if unread and padded_tokens > self._prefill_tokens:
                    logits.append(self._add_rows(keys, unread))
                    keys, unread = [], {}
                unread[key] = sequence
            keys.append(key)
        if keys:
            logits.append(self._add_rows(keys, unread))
            upcoming = [self._requests.by_number[number].sequence.tobytes() for number in self._scheduler.upcoming()]
            self._prefixes = {key: self._prefixes[key] for key in upcoming if key in self._prefixes}
        return logits

    def _add_rows(self, keys: Sequence[bytes], unread: Mapping[bytes, Ids]) -> Any:
        if unread:
            self._prefixes.update(zip(unread, self._decoder.prefill(list(unread.values())), strict=True))
        prefixes = [self._prefixes[key] for key in keys]
        self._decoder.add_rows(prefixes)
        self._prefixes = {keys[-1]: prefixes[-1]}
        return torch.stack([prefix.logits for prefix in prefixes])


class TorchRolloutEngine(RolloutEngineBase):
    """Implements :class:`~dlrover.python.rl.engine.api.base.BaseRolloutEngine`.

    A step generates a token for each active sequence. A prompt is read once for all its samples.

    A completion depends on the weights, its prompt and its own seed. Its batch changes its logits only by the rounding
    of matrix products (about 1e-6 in float32, 1e-2 in bfloat16), which decides a token only at a tie of that size.

    ``model`` is a folder or hub name, or a loaded model, which the engine takes over.

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
            raise EngineError(f"the engine shall run on {settings.device}, but its memory is of {self._memory.device}")
        lm = model if isinstance(model, CausalLM) else load_causal_lm(model)
        if not lm.eos_ids:
            raise EngineError(f"'{model}' names no end-of-sequence token: its completions would never finish")
        self._name = self._memory.owner("rollout engine")
        self._decoder = _make_decoder(lm, settings, options, self._memory, self._name)
        self._requests = RunningRequests(dataclasses.replace(lm, model=None))
        computing = partial(self._memory.computing, self._name)
        self._batch = ContinuousBatch(
            self._requests, self._decoder, settings.max_batch, options.prefill_tokens, computing
        )
        self._lacks = ""
        self._has_cache = True

    def _queue(self, numbers: Sequence[int]) -> None:
        self._batch.add(numbers)

    def _step(self, max_tokens: int | None) -> dict[int, Finish]:
        return self._batch.step(self.version)

    def _withdraw(self, numbers: Collection[int]) -> None:
        self._batch.remove(numbers)

    # -- weights ------------------------------------------------------------------------------------------------------

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Write new weights in place; after :meth:`meta` to host memory, unless ``cuda("weights")`` came before."""
        store = self._decoder.store
        verify_snapshot(weights, store.shapes, serving=-1 if rewind else self.version)
        if store.place == "meta":
            store.host()
        # Stays if writing breaks off: a mixture of versions is not served.
        self.version, self._lacks = -1, BROKEN_OFF
        store.write(weights)
        self.version, self._lacks = weights.version, ""
        self._batch.requeue()

    # -- memory -------------------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        self._release()
        self._decoder.store.cpu()
        self._rebind()

    def cuda(self, part: Part = "all") -> None:
        """Bring ``part`` to the device; the cache has its last size, the first is allocated with the first request."""
        if part in ("all", "weights") and self.place() != "cuda":
            self._decoder.store.cuda()
            self._rebind()
        if part in ("all", "kv_cache"):
            self._batch.restore()
            self._has_cache = True

    def meta(self) -> None:
        """Release weights and key-value cache; running requests stay, and continue with the next weights."""
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


def _make_decoder(
    lm: CausalLM, settings: RolloutSettings, options: TorchOptions, memory: DeviceMemory, owner: str
) -> Decoder:
    dtype, share = DTYPES[settings.precision], settings.gpu_memory_utilization
    if options.forward != "huggingface" and fused.is_supported(lm):
        graphs = not options.enforce_eager and torch.device(memory.device).type == "cuda"
        return fused.FusedDecoder(lm, dtype, memory, owner, share, graphs)
    if options.forward == "fused":
        raise EngineError(f"the fused forward pass does not fit this model of type '{lm.model.config.model_type}'")
    return HuggingFaceDecoder(lm, dtype, memory, owner, share)
