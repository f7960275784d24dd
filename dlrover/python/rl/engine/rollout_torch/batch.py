# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: waiting requests get a row of the cache, generate a token per step, and free the row.

On CUDA the device computes the next step while the host processes the tokens of the last::

    device   step 1 | step 2      | step 3      |
    host            | tokens of 1 | tokens of 2 | ...

Step 2 reads the tokens of step 1 on the device. If a token finished its request, step 2 has computed another token for
it, which is dropped.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeAlias

import torch

from dlrover.python.rl.common.spans import phase
from dlrover.python.rl.engine.api.base import Finish, SamplingParams
from dlrover.python.rl.engine.rollout.requests import NewToken, RunningRequests
from dlrover.python.rl.engine.rollout.sampling import choose, sampling_key
from dlrover.python.rl.engine.rollout_torch import rounded_capacity
from dlrover.python.rl.engine.rollout_torch.decoder import ROW_GROUP, HuggingFaceDecoder, Ids, Prefix, to_device
from dlrover.python.rl.engine.rollout_torch.fused import FusedDecoder

Decoder: TypeAlias = HuggingFaceDecoder | FusedDecoder

ADMIT_SHARE = 16
"""Requests are admitted once ``1 / ADMIT_SHARE`` of the rows is free."""


class Scheduler:
    """Requests by number, waiting in order or active in rows 0, 1, 2, ... without a gap. Older groups of rows precede
    newer ones: a freed row gets the oldest request of the next group, whose row is filled in the same way, and waiting
    requests get the last rows. A few moves keep rows of similar length adjacent."""

    def __init__(self, rows: int) -> None:
        self.rows = rows  # maximum of active requests
        self.active: list[int] = []  # the request in each row
        self.waiting: deque[int] = deque()  # the next request first

    def add(self, numbers: Iterable[int]) -> None:
        self.waiting.extend(numbers)

    def admit(self) -> list[int]:
        """Activate the :meth:`admissible` requests in the rows after the active ones, and return them."""
        admitted = [self.waiting.popleft() for _ in range(self.admissible())]
        self.active += admitted
        return admitted

    def admissible(self) -> int:
        """Count the waiting requests that can be activated. Reading one prompt takes nearly as long as several, so with
        many rows the first waits until a few are free."""
        free_rows = max(0, min(self.rows - len(self.active), len(self.waiting)))
        return 0 if free_rows < min(self.rows // ADMIT_SHARE, len(self.waiting)) else free_rows

    def remove(self, numbers: Collection[int]) -> list[int]:
        """Remove requests; returns for each row in use the same or later row that its request was in before."""
        removed = set(numbers)
        self.waiting = deque(number for number in self.waiting if number not in removed)
        free = {row for row, number in enumerate(self.active) if number in removed}
        order = list(range(len(self.active) - len(free)))
        for row in (row for row in order if row in free):
            # A later row fills it, so that rows can be moved in ascending order.
            candidates = [later for later in range(row + 1, len(self.active)) if later not in free]
            following = [later for later in candidates if later // ROW_GROUP > row // ROW_GROUP]
            of_group = [later for later in following if later // ROW_GROUP == following[0] // ROW_GROUP]
            order[row] = min(of_group, key=self.active.__getitem__, default=candidates[-1])
            free.add(order[row])
        self.active = [self.active[row] for row in order]
        return order

    def requeue(self) -> None:
        """Return all active requests to the queue, in the order of their numbers."""
        self.waiting = deque(sorted([*self.active, *self.waiting]))
        self.active = []


_Draw: TypeAlias = tuple[list[int], SamplingParams, Any, Any]
"""Requests that are sampled in one call: their numbers, parameters, random numbers (float64), and rows of the logits
(int64; None: all)."""


class _Step:
    """New tokens of active requests, which the device may still be computing."""

    def __init__(self, draws: Sequence[_Draw], logits: Any) -> None:
        chosen = [
            choose(logits if rows is None else logits[rows], params, uniform) for _, params, uniform, rows in draws
        ]
        self._numbers = [numbers for numbers, *_ in draws]
        self._results = [(_to_host(tokens), _to_host(logprobs)) for tokens, logprobs in chosen]
        self.tokens: Any = chosen[0][0] if len(chosen) == 1 else None
        """Tokens of the rows in use, int64 ``[rows]`` on the device; None unless they were sampled in one call."""
        self._arrived = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None

    def select(self, rows: Sequence[int]) -> None:
        """Make row ``i`` what ``rows[i]`` was; for tokens that were sampled in one call."""
        self.tokens = self.tokens[to_device(torch.tensor(rows), self.tokens.device)]

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()  # waits: for a step on the device

    def new_tokens(self) -> list[NewToken]:
        self.wait()  # waits: for a step on the device
        new_tokens: list[NewToken] = []
        for numbers, (tokens, logprobs) in zip(self._numbers, self._results, strict=True):
            new_tokens += zip(numbers, tokens.tolist(), logprobs.tolist(), strict=True)
        return new_tokens


def _to_host(tensor: Any) -> Any:
    """Begin to copy a device's tensor to host memory; a host's tensor is returned as it is."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class ContinuousBatch:
    """Runs the decoder for the running requests. A step reads the last token of each active sequence, and the prompts
    of newly admitted requests; then all get their next token. At most ``rows`` sequences are decoded and
    ``prefill_tokens``, padding included, read at a time, both in the context ``computing``. With ``runs_ahead`` the
    next step begins before the tokens of the last are processed."""

    def __init__(
        self,
        requests: RunningRequests,
        decoder: Decoder,
        rows: int,
        prefill_tokens: int,
        computing: Callable[[], AbstractContextManager[None]],
        runs_ahead: bool = False,
    ) -> None:
        self._requests, self._decoder, self._computing = requests, decoder, computing
        self._rows, self._prefill_tokens, self._runs_ahead = rows, prefill_tokens, runs_ahead
        self._scheduler = Scheduler(rows)
        self._needed, self._length = 0, 0
        self._prefixes: dict[bytes, Prefix] = {}
        self._ahead: _Step | None = None

    def add(self, numbers: Sequence[int]) -> None:
        """Queue requests."""
        running = [self._requests.by_number[number] for number in numbers]
        lengths = [len(each.request.prompt) + each.sampling.max_new_tokens for each in running]
        longest = max(lengths, default=0)
        is_empty = not (self._scheduler.active or self._scheduler.waiting)
        self._needed = longest if is_empty else max(self._needed, longest)
        self._scheduler.add(numbers)

    @torch.inference_mode()
    def step(self, version: int) -> dict[int, Finish]:
        """Generate a token of ``version`` for each sequence that has a row; at least one request must run. Returns the
        finished requests, by number. After an error all requests are as before the step."""
        try:
            with self._computing(), phase("decode"):
                step, self._ahead = self._ahead or self._begin(), None
                if self._can_run_ahead(step):
                    draws = self._draws(after=1)
                    self._ahead = _Step(draws, self._decoder.step(step.tokens)[:, : self._requests.known_ids])
                new_tokens = step.new_tokens()
            running = self._requests.by_number  # requests may have been removed since the step began
            return self._requests.append([each for each in new_tokens if each[0] in running], version)
        except BaseException:
            self.release()
            raise

    @torch.inference_mode()
    def remove(self, numbers: Collection[int]) -> None:
        """Remove requests from their rows or from the queue."""
        active = len(self._scheduler.active)
        rows = self._scheduler.remove(numbers)
        if not rows:
            self._drop_step()
        if len(rows) < active:
            self._decoder.select_rows(rows)
            if self._ahead is not None:
                self._ahead.select(rows)

    def requeue(self) -> None:
        """Return all requests to the queue: the cached keys and values are no longer valid."""
        self._drop_step()
        self._scheduler.requeue()
        self._prefixes = {}
        self._decoder.select_rows([])

    def release(self) -> None:
        """Return all requests to the queue and free the cache."""
        self.requeue()
        self._decoder.clear()

    @torch.inference_mode()
    def restore(self) -> None:
        """Allocate a cache of the last size."""
        if self._length and not self._decoder.capacity:
            self._scheduler.rows = self._decoder.allocate(self._rows, self._length)

    def _begin(self) -> _Step:
        """Admit waiting requests, and begin a step for all active ones. If a sequence needs longer rows than the cache
        has, another cache replaces it, and active requests are read again."""
        needed = rounded_capacity(self._needed)
        too_few_rows = not self._scheduler.active and self._scheduler.rows < self._rows
        is_replaced = self._lacks_room() or (too_few_rows and needed < self._decoder.capacity)
        if self._scheduler.waiting and is_replaced:
            self.requeue()
            self._scheduler.rows, self._length = self._decoder.allocate(self._rows, needed), needed
        active = list(self._scheduler.active)
        admitted = self._scheduler.admit()
        # The device gets its inputs before it computes: later a copy would wait for the computation.
        draws, parts = self._draws(), []
        if active:
            last = [self._requests.by_number[number].tokens[-1] for number in active]
            parts.append(self._decoder.step(torch.tensor(last)))
        parts += self._prefill(admitted)
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return _Step(draws, logits[:, : self._requests.known_ids])

    def _can_run_ahead(self, step: _Step) -> bool:
        """Return True if the next step has the same requests, unless a token of this one finishes some."""
        if not self._runs_ahead or step.tokens is None:
            return False
        if self._scheduler.waiting and (self._lacks_room() or self._scheduler.admissible()):
            return False
        running = map(self._requests.by_number.__getitem__, self._scheduler.active)
        return all(len(request.tokens) + 1 < request.sampling.max_new_tokens for request in running)

    def _drop_step(self) -> None:
        """Drop the step that was begun ahead; its tokens are generated again."""
        step, self._ahead = self._ahead, None
        if step is not None:
            step.wait()  # waits: for a step on the device, which reads memory that may be freed next

    def _draws(self, after: int = 0) -> list[_Draw]:
        """Group all active requests by their sampling, for the step that ``after`` other steps precede."""
        device, numbers = self._decoder.store.device, self._scheduler.active
        running = [self._requests.by_number[number] for number in numbers]
        rows_by_key: dict[tuple[Any, ...], list[int]] = {}
        for row, request in enumerate(running):
            rows_by_key.setdefault(sampling_key(request.sampling), []).append(row)
        draws: list[_Draw] = []
        for rows in rows_by_key.values():
            uniform = torch.tensor([running[row].next_uniform(after) for row in rows], dtype=torch.float64)
            index = to_device(torch.tensor(rows), device) if len(rows_by_key) > 1 else None
            sampling = running[rows[0]].sampling
            draws.append(([numbers[row] for row in rows], sampling, to_device(uniform, device), index))
        return draws

    def _lacks_room(self) -> bool:
        return rounded_capacity(self._needed) > self._decoder.capacity

    def _prefill(self, numbers: Sequence[int]) -> list[Any]:
        """Read sequences into rows; returns the logits of their next tokens, ``[rows, vocab]`` in parts of the token
        budget. Equal sequences, such as a prompt's samples, are read once if they are in one part or adjacent."""
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
            running = self._requests.by_number
            upcoming = {running[number].sequence.tobytes() for number in islice(self._scheduler.waiting, 1)}
            self._prefixes = {key: prefix for key, prefix in self._prefixes.items() if key in upcoming}
        return logits

    def _add_rows(self, keys: Sequence[bytes], unread: Mapping[bytes, Ids]) -> Any:
        if unread:
            with phase("prefill"):
                self._prefixes.update(zip(unread, self._decoder.prefill(list(unread.values())), strict=True))
        prefixes = [self._prefixes[key] for key in keys]
        self._decoder.add_rows(prefixes)
        self._prefixes = {keys[-1]: prefixes[-1]}
        return torch.stack([prefix.logits for prefix in prefixes])
