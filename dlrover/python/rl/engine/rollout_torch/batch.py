# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: waiting requests get a row of the cache, generate a token per step, and free the row.

On CUDA the device computes the next step while the host takes the tokens of the one before::

    device   step 1 | step 2      | step 3      |
    host            | tokens of 1 | tokens of 2 | ...

Step 2 reads the tokens of step 1 on the device. If one of them finished its request, step 2 has computed another token
for it, which is dropped.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeAlias

import torch

from dlrover.python.rl.engine.api.base import Finish, SamplingParams
from dlrover.python.rl.engine.rollout.requests import NewToken, RunningRequests
from dlrover.python.rl.engine.rollout.sampling import choose, sampling_key
from dlrover.python.rl.engine.rollout_torch import rounded_capacity
from dlrover.python.rl.engine.rollout_torch.decoder import ROW_GROUP, HuggingFaceDecoder, Ids, Prefix, to_device
from dlrover.python.rl.engine.rollout_torch.fused import FusedDecoder

Computing: TypeAlias = Callable[[], AbstractContextManager[None]]
Decoder: TypeAlias = HuggingFaceDecoder | FusedDecoder

ADMIT_SHARE = 16
"""Requests are admitted once ``1 / ADMIT_SHARE`` of all rows is free."""


class Scheduler:
    """Requests, by number, in two states: waiting in order, or active in rows 0, 1, 2, ... without a gap.

    Older requests precede newer ones, group by group: a freed row is taken by the oldest request of the next group,
    whose row is filled likewise, and waiting requests take the last rows. So rows of similar length stay adjacent, at
    the cost of a few moves.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows  # most requests that are active at a time
        self.active: list[int] = []  # the request in each row
        self.waiting: deque[int] = deque()  # the next first

    def add(self, numbers: Iterable[int]) -> None:
        self.waiting.extend(numbers)

    def admit(self) -> list[int]:
        """Activate and return as many waiting requests as fit, in the rows after those in use.

        Reading one prompt takes nearly as long as reading several, so with many rows it waits for a few free ones.
        """
        admitted = [self.waiting.popleft() for _ in range(self.admissible())]
        self.active += admitted
        return admitted

    def admissible(self) -> int:
        """Count the requests that :meth:`admit` would activate."""
        free_rows = max(0, min(self.rows - len(self.active), len(self.waiting)))
        return 0 if free_rows < min(self.rows // ADMIT_SHARE, len(self.waiting)) else free_rows

    def remove(self, numbers: Collection[int]) -> list[int]:
        """Remove requests; returns for each row still in use the row its request had before: the same or a later."""
        removed = set(numbers)
        self.waiting = deque(number for number in self.waiting if number not in removed)
        free = {row for row, number in enumerate(self.active) if number in removed}
        order = list(range(len(self.active) - len(free)))
        for row in (row for row in order if row in free):
            # Filled from a later row, so that rows can be moved in ascending order.
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
"""Requests whose tokens are sampled in one call: their numbers and parameters, random numbers (float64), and rows of
the logits (int64; None: all)."""


class _Step:
    """New tokens of active requests, which the device may still be computing."""

    def __init__(self, draws: Sequence[_Draw], logits: Any) -> None:
        chosen = [
            choose(logits if rows is None else logits[rows], sampling, uniform) for _, sampling, uniform, rows in draws
        ]
        self._numbers = [numbers for numbers, *_ in draws]
        self._results = [(_to_host(tokens), _to_host(logprobs)) for tokens, logprobs in chosen]
        self.tokens: Any = chosen[0][0] if len(chosen) == 1 else None
        """Tokens of the rows that are still in use, int64 ``[rows]`` on the device; None unless sampled in one call."""
        self._arrived = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None

    def select(self, rows: Sequence[int]) -> None:
        """Row ``i`` is now what ``rows[i]`` was; for tokens that were sampled in one call."""
        self.tokens = self.tokens[to_device(torch.tensor(rows), self.tokens.device)]

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()  # waits: for a step on the device

    def new_tokens(self) -> list[NewToken]:
        self.wait()  # waits: likewise
        new_tokens: list[NewToken] = []
        for numbers, (tokens, logprobs) in zip(self._numbers, self._results, strict=True):
            new_tokens += zip(numbers, tokens.tolist(), logprobs.tolist(), strict=True)
        return new_tokens


def _to_host(tensor: Any) -> Any:
    """A copy in host memory, which comes while the host goes on; of a host's tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class ContinuousBatch:
    """Runs the decoder for the running requests.

    A step reads the last token of each active sequence, and the prompts of those that take free rows; then all get
    their next token. At most ``rows`` sequences are decoded at a time, and ``prefill_tokens``, padding included, read;
    ``computing`` is entered for both. With ``runs_ahead`` the next step is begun before the tokens of one are taken.
    """

    def __init__(  # noqa: PLR0913 - one of each kind
        self,
        requests: RunningRequests,
        decoder: Decoder,
        rows: int,
        prefill_tokens: int,
        computing: Computing,
        runs_ahead: bool = False,
    ) -> None:
        self._requests, self._decoder, self._computing = requests, decoder, computing
        self._rows, self._prefill_tokens, self._runs_ahead = rows, prefill_tokens, runs_ahead
        self._scheduler = Scheduler(rows)
        self._needed, self._length = 0, 0
        self._prefixes: dict[bytes, Prefix] = {}
        self._ahead: _Step | None = None

    def add(self, numbers: Sequence[int]) -> None:
        """Queue these running requests behind the others."""
        running = [self._requests.by_number[number] for number in numbers]
        lengths = [len(each.request.prompt) + each.sampling.max_new_tokens for each in running]
        longest = max(lengths, default=0)
        is_empty = not (self._scheduler.active or self._scheduler.waiting)
        self._needed = longest if is_empty else max(self._needed, longest)
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
                step, self._ahead = self._ahead or self._begin(), None
                if self._goes_on(step):
                    draws = self._draws(after=1)
                    self._ahead = _Step(draws, self._decoder.step(step.tokens)[:, : self._requests.known_ids])
                new_tokens = step.new_tokens()
            running = self._requests.by_number  # those that were removed meanwhile are not
            return self._requests.append([each for each in new_tokens if each[0] in running], version)
        except BaseException:
            self.release()
            raise

    @torch.inference_mode()
    def remove(self, numbers: Collection[int]) -> None:
        """Free the rows of these requests, or their places in the queue."""
        active = len(self._scheduler.active)
        rows = self._scheduler.remove(numbers)
        if not rows:
            self._drop_step()
        if len(rows) < active:
            self._decoder.select_rows(rows)
            if self._ahead is not None:
                self._ahead.select(rows)

    def requeue(self) -> None:
        """Return all requests to the queue, to be read again: the cached keys and values are no longer valid."""
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
        """Allocate a cache of the same size as the last one."""
        if self._length and not self._decoder.capacity:
            self._scheduler.rows = self._decoder.allocate(self._rows, self._length)

    # -- schedule, run, record ----------------------------------------------------------------------------------------

    def _begin(self) -> _Step:
        """The next token of every active request, after admission.

        Rows are as long as needed; active requests are read again if the cache has to be replaced.
        """
        needed = rounded_capacity(self._needed)
        too_few_rows = not self._scheduler.active and self._scheduler.rows < self._rows
        is_replaced = self._lacks_room() or (too_few_rows and needed < self._decoder.capacity)
        if self._scheduler.waiting and is_replaced:
            self.requeue()
            self._scheduler.rows, self._length = self._decoder.allocate(self._rows, needed), needed
        active = list(self._scheduler.active)
        admitted = self._scheduler.admit()
        # What the device needs from the host is there before it computes: a copy would wait until it has done so, and
        # only then could it be given more to do.
        draws, parts = self._draws(), []
        if active:
            last = [self._requests.by_number[number].tokens[-1] for number in active]
            parts.append(self._decoder.step(torch.tensor(last)))
        parts += self._prefill(admitted)
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return _Step(draws, logits[:, : self._requests.known_ids])

    def _goes_on(self, step: _Step) -> bool:
        """Return True if the step after this one has the same requests, as far as can be said without its tokens."""
        if not self._runs_ahead or step.tokens is None:
            return False
        if self._scheduler.waiting and (self._lacks_room() or self._scheduler.admissible()):
            return False
        running = map(self._requests.by_number.__getitem__, self._scheduler.active)
        return all(len(request.tokens) + 1 < request.sampling.max_new_tokens for request in running)

    def _drop_step(self) -> None:
        """Forget the step that was begun ahead; its tokens are generated again."""
        step, self._ahead = self._ahead, None
        if step is not None:
            step.wait()  # waits: for a step on the device, which reads what may be freed next

    def _draws(self, after: int = 0) -> list[_Draw]:
        """Group all active requests by how they are sampled, for the step that comes ``after`` others."""
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
            running = self._requests.by_number
            upcoming = {running[number].sequence.tobytes() for number in islice(self._scheduler.waiting, 1)}
            self._prefixes = {key: prefix for key, prefix in self._prefixes.items() if key in upcoming}
        return logits

    def _add_rows(self, keys: Sequence[bytes], unread: Mapping[bytes, Ids]) -> Any:
        if unread:
            self._prefixes.update(zip(unread, self._decoder.prefill(list(unread.values())), strict=True))
        prefixes = [self._prefixes[key] for key in keys]
        self._decoder.add_rows(prefixes)
        self._prefixes = {keys[-1]: prefixes[-1]}
        return torch.stack([prefix.logits for prefix in prefixes])
