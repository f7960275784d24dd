"""Weights for another engine of the same process, through host memory."""

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.sync.base import (
    Offers,
    SyncSettings,
    Ticket,
    WeightSource,
    assemble,
    exhaust,
)
from dlrover.python.rl.engine.sync.buckets import Arena, Tally, copy_to_host
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp


class ProcessTransport(Offers):
    """Implements :class:`~dlrover.python.rl.engine.sync.base.WeightTransport`. Both sides use the same object.

    It keeps the version that was sent last.
    """

    def __init__(self, settings: SyncSettings | None = None) -> None:
        super().__init__(settings or SyncSettings())
        self._arena = Arena()
        self._sent: tuple[str, WeightSnapshot] | None = None

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
        snapshot = assemble(ticket, flat, tally.crcs, tally.crcs)
        self._sent = ticket.id, snapshot
        return snapshot.stamp

    def receive(self, ticket: Ticket) -> WeightSnapshot:
        """What was sent with ``ticket``.

        Raises:
            WeightSyncError: it was not sent, not to the end, or a later version took its place.
        """
        if self._sent is None or self._sent[0] != ticket.id:
            kept = f"the last is version {self._sent[1].version}" if self._sent else "there are none yet"
            raise WeightSyncError(f"no weights of version {ticket.version} from {ticket.sender} are here: {kept}")
        return self._sent[1]

    def close(self) -> None:
        """Forget what was sent."""
        self._sent = None
