# SPDX-License-Identifier: Apache-2.0
"""Adapters alone, behind one copy of the model that they are added to.

::

    sender                                          receivers
      the model without adapters   ---- once ---->    kept, as bytes
      the adapters of version 7    ------------->     added to it, tensor by tensor, where the engine takes them
      the adapters of version 8    ------------->

Of a 7 B model with adapters of rank 16 those are 0.2 GB in float32, and the model 15 GB in bf16.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.api.weights import Adapters, WeightSnapshot, WeightStamp, adapted_stamp
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, Ticket, WeightSource, WeightTransport

_MODEL, _ADAPTERS = "model", "adapters"


class AdaptedSource(WeightSource, Protocol):
    """A source whose adapters alone change."""

    @property
    def adapter_scale(self) -> float | None:
        """The factor of ``up @ down``; None: the source has no adapters, and lacks the rest of this."""

    @property
    def base_version(self) -> int:
        """Another one, on all train ranks, once the weights may have changed to which the adapters are added."""

    def named_base_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        """``named_weights`` without the adapters."""

    def named_adapters(self) -> Iterator[tuple[str, Any]]:
        """Under the names of their weights with ``DOWN`` (``[rank, inputs]``) or ``UP`` (``[outputs, rank]``); a
        collective, too."""

    def any_rank(self, flag: bool) -> bool:
        """Return True on all ranks that gather weights together, if ``flag`` is true on one of them. A collective."""


class _Adapters:
    """The adapters of a source, as one of their own."""

    def __init__(self, source: AdaptedSource) -> None:
        self.source: AdaptedSource = weakref.proxy(source)

    @property
    def version(self) -> int:
        return self.source.version

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        return self.source.named_adapters()


@dataclass(eq=False)
class _Base:
    """The model under a source's adapters, as a source of its own, and what has become of it."""

    owner: "weakref.ref[AdaptedSource]"
    version: int
    adapters: _Adapters
    transport: WeightTransport
    ticket: Ticket | None = None
    is_sent: bool = False
    stamp: WeightStamp | None = None  # on the rank that leads

    def is_of(self, source: Any) -> bool:
        owner = self.owner()
        return owner is not None and owner is source and self.version == owner.base_version

    def named_weights(self, dtype: Any = None) -> Iterator[tuple[str, Any]]:
        return self.adapters.source.named_base_weights(dtype)


def _keeps(transport: Any, ticket: Ticket) -> bool:
    """Whether receivers still get what was sent with ``ticket``."""
    keeps = getattr(transport, "keeps", None)
    return keeps is None or bool(keeps(ticket))


class AdapterTransport:
    """Implements ``WeightTransport`` over transports that keep what was sent: one for models that are sent whole, and
    if need be one for the model under the adapters and one for these. ``make`` gets a name to be added to the channel.
    """

    def __init__(self, make: Callable[[str], WeightTransport], settings: SyncSettings) -> None:
        self.settings = settings
        self._make, self._whole = make, make("")
        self._parts: dict[str, WeightTransport] = {}
        self._base: _Base | None = None
        self._received: tuple[str, WeightSnapshot] | None = None

    def _part(self, name: str) -> WeightTransport:
        if name not in self._parts:
            self._parts[name] = self._make(name)
        return self._parts[name]

    # -- the sender ---------------------------------------------------------------------------------------------------

    def offer(self, source: WeightSource) -> Ticket:
        scale = getattr(source, "adapter_scale", None)
        if scale is None:
            return self._whole.offer(source)
        base = self._renewed_base(source)
        if base.ticket is None or not base.is_sent or not _keeps(base.transport, base.ticket):
            base.ticket, base.is_sent = base.transport.offer(base), False
        return replace(self._part(_ADAPTERS).offer(base.adapters), base=base.ticket, scale=scale)

    def _renewed_base(self, source: Any) -> _Base:
        """That which was offered before, if it is still the source's; else a new one, which replaces it."""
        base = self._base
        if base is None or not base.is_of(source):
            if _MODEL in self._parts:
                self._parts.pop(_MODEL).close()
            base = _Base(weakref.ref(source), source.base_version, _Adapters(source), self._part(_MODEL))
            self._base = base
        return base

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        if ticket.base is None:
            return self._whole.send(ticket, source)
        base = self._base
        if base is None or not base.is_of(source):
            raise WeightSyncError(f"{ticket} was offered, and the source has another model under its adapters")
        is_new = base.adapters.source.any_rank(not base.is_sent)
        try:
            if is_new:
                base.is_sent = False
                base.stamp = base.transport.send(ticket.base, base)
                base.is_sent = True
        finally:  # after a failure, too: the other ranks take part in this
            stamp = self._part(_ADAPTERS).send(ticket, base.adapters)
        if stamp is None or base.stamp is None:
            return None  # this rank does not lead
        return adapted_stamp(base.stamp, stamp, ticket.scale)

    # -- the receivers ------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        if ticket.base is None:
            self._received = None
            return self._whole.receive(ticket)
        base = self._receive_base(ticket.base)
        adapters = Adapters(self._part(_ADAPTERS).receive(replace(ticket, base=None)), ticket.scale)
        locks = [lock for lock in (base.lock_pages, adapters.factors.lock_pages) if lock is not None]

        def lock_pages(device: torch.device) -> bool:
            return all([lock(device) for lock in locks])

        return replace(base, version=ticket.version, adapters=adapters, lock_pages=lock_pages if locks else None)

    def _receive_base(self, ticket: Ticket) -> WeightSnapshot:
        if self._received is None or self._received[0] != ticket.id:
            self._received = None  # before another one comes
            self._received = ticket.id, self._part(_MODEL).receive(ticket)
        return self._received[1]

    def close(self) -> None:
        with ExitStack() as stack:
            for transport in (self._whole, *self._parts.values()):
                stack.callback(transport.close)
        self._parts, self._base, self._received = {}, None, None
