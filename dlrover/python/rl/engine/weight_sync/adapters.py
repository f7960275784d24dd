# SPDX-License-Identifier: Apache-2.0
"""Adapters alone, behind one copy of the model that they are added to.

::

    sender                                          receivers
      the model without adapters   ---- once ---->    kept, as bytes
      the adapters of version 7    ------------->     added to it, tensor by tensor, where the engine takes them
      the adapters of version 8    ------------->

Of a 7 B model with adapters of rank 16 those are 0.2 GB in float32, and the model 15 GB in bf16.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dlrover.python.rl.engine.api.weights import Adapters, WeightSnapshot, WeightStamp, adapted_stamp
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, Ticket, WeightSource, WeightTransport


class AdaptedSource(WeightSource, Protocol):
    """A source whose adapters alone change."""

    @property
    def adapter_scale(self) -> float | None:
        """How often ``up @ down`` is added to a weight; None: the source has no adapters, and lacks the rest."""

    @property
    def base_version(self) -> int:
        """Changes with the weights to which they are added."""

    def named_base_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        """``named_weights`` without the adapters."""

    def named_adapters(self) -> Iterator[tuple[str, Any]]:
        """Under the names of their weights with ``DOWN`` (``[rank, inputs]``) or ``UP`` (``[outputs, rank]``); a
        collective, too."""

    def any_rank(self, flag: bool) -> bool:
        """Whether a rank that gathers with this one has a true ``flag``: a collective of those."""


@dataclass(frozen=True, eq=False)
class _Base:
    source: AdaptedSource
    version: int

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        return self.source.named_base_weights(dtype)


@dataclass(frozen=True, eq=False)
class _Factors:
    source: AdaptedSource

    @property
    def version(self) -> int:
        return self.source.version

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        return self.source.named_adapters()


class AdapterTransport:
    """Implements ``WeightTransport`` over two that keep what was sent: ``whole`` has models, ``alone`` the adapters."""

    def __init__(self, whole: WeightTransport, alone: WeightTransport, settings: SyncSettings) -> None:
        self._whole, self._alone, self.settings = whole, alone, settings
        self._base: _Base | None = None
        self._factors: _Factors | None = None
        self._offered: Ticket | None = None
        self._sent: WeightStamp | None = None
        self._has_sent = False
        self._received: tuple[str, WeightSnapshot] | None = None

    # -- the sender ---------------------------------------------------------------------------------------------------

    def offer(self, source: WeightSource) -> Ticket:
        scale = getattr(source, "adapter_scale", None)
        if scale is None:
            return self._whole.offer(source)
        base, factors = self._views_of(source)
        is_new = base.source.any_rank(self._offered is None)
        try:
            if is_new:
                self._offered, self._has_sent = self._whole.offer(base), False
        finally:
            ticket = self._alone.offer(factors)  # after a failure too: the other ranks take part in it
        return replace(ticket, base=self._offered, scale=scale)

    def _views_of(self, source: Any) -> tuple[_Base, _Factors]:
        if self._base is None or self._factors is None or self._base.source is not source:
            self._base, self._factors, self._offered = _Base(source, source.base_version), _Factors(source), None
        elif self._base.version != source.base_version:
            self._base, self._offered = _Base(source, source.base_version), None
        return self._base, self._factors

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        if ticket.base is None:
            return self._whole.send(ticket, source)
        base, factors = self._views_of(source)
        is_new = base.source.any_rank(not self._has_sent)
        try:
            if is_new:
                self._has_sent = False
                self._sent = self._whole.send(ticket.base, base)
                self._has_sent = True
        finally:
            stamp = self._alone.send(ticket, factors)
        return stamp and self._sent and adapted_stamp(self._sent, stamp, ticket.scale)

    # -- the receivers ------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        if ticket.base is None:
            self._received = None
            return self._whole.receive(ticket)
        base, adapters = self._receive_base(ticket.base), Adapters(self._alone.receive(ticket), ticket.scale)

        def lock_pages(device: torch.device) -> bool:
            return all([lock(device) for lock in (base.lock_pages, adapters.factors.lock_pages) if lock is not None])

        return replace(base, version=ticket.version, adapters=adapters, lock_pages=lock_pages)

    def _receive_base(self, ticket: Ticket) -> WeightSnapshot:
        if self._received is None or self._received[0] != ticket.id:
            self._received = None  # before another one comes
            self._received = ticket.id, self._whole.receive(ticket)
        return self._received[1]

    def close(self) -> None:
        self._received = None
        self._whole.close()
        self._alone.close()
