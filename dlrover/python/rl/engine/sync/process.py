"""Weights for another engine of the same process, through host memory."""

import os
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.sync.base import (
    Offers,
    Seal,
    SyncSettings,
    Ticket,
    WeightSource,
    assemble,
    exhaust,
)
from dlrover.python.rl.engine.sync.buckets import Arena, Bytes, Tally, copy_to_host
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp

_SENDERS: "WeakValueDictionary[str, ProcessTransport]" = WeakValueDictionary()
"""Those of this process that have offered something: how a ticket, which is copied on its way, finds its sender."""


class ProcessTransport(Offers):
    """Implements :class:`~dlrover.python.rl.engine.sync.base.WeightTransport`.

    The sender keeps the version that it sent last; receivers share it.
    """

    def __init__(self, settings: SyncSettings | None = None) -> None:
        super().__init__(settings or SyncSettings())
        self._id = uuid4().hex
        self._arena = Arena()
        self._sent: tuple[Ticket, Bytes, Seal] | None = None

    def _where(self) -> dict[str, Any]:
        _SENDERS[self._id] = self
        return {"process": os.getpid(), "sender": self._id}

    def send(self, ticket: Ticket, source: WeightSource) -> WeightStamp | None:
        """Copy the weights to where :meth:`receive` finds them."""
        stream = self._pieces(ticket, source, self.settings.bucket)
        if not self.settings.leads:
            exhaust(stream)
            return None
        flat, tally = self._arena.take(ticket.table.nbytes), Tally(ticket.table)
        for offset, piece in stream:
            copy_to_host(flat[offset : offset + len(piece)], piece)
            tally.take(flat, 0, offset + len(piece))
        seal = Seal.of(ticket, tally.crcs)
        self._sent = ticket, flat, seal
        return seal.stamp

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """What was sent with ``ticket``: the memory is the sender's, and so are the fingerprints.

        Raises:
            WeightSyncError: it was not sent, not to the end, or a later version took its place; or its sender is in
                another process, or gone; or the ticket is not the one that it was sent with.
        """
        where, refused = ticket.where, f"no weights of version {ticket.version} from {ticket.sender} are here"
        sender = _SENDERS.get(where["sender"])
        if sender is None:
            raise WeightSyncError(f"{refused}, in process {os.getpid()}: process {where['process']} has offered them")
        if sender._sent is None:
            raise WeightSyncError(f"{refused}: there are none yet")
        sent, flat, seal = sender._sent
        if sent.id != ticket.id:
            raise WeightSyncError(f"{refused}: the last is version {sent.version}")
        return assemble(ticket, flat, seal.crcs, seal)

    def close(self) -> None:
        """Forget what was sent."""
        self._sent = None
        _SENDERS.pop(self._id, None)
