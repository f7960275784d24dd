"""Weights from a train engine to another engine of the script: the script sees names and numbers, never the bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.weights import WeightStamp
from dlrover.python.rl.session.routes import Way, route_between


@dataclass(frozen=True)
class SyncReport:
    """What a sync did.

    Attributes:
        stamp: which weights the receiver has now: on every one of its ranks those that the sender says it has sent.
        way: how they went.
    """

    stamp: WeightStamp
    way: Way


def sync(
    source: Any, target: Any, timeout_s: float, way: Way | None = None, folder: str | Path | None = None
) -> SyncReport:
    """Send the weights of the ranks of ``source`` to every rank of ``target``.

    Raises:
        SessionError: one of them is not built; or they cannot go this way.
        InvocationError: a process failed or is late. Its cause is a ``WeightSyncError`` when names, shapes or bytes are
            not what they should be: the receiver has its old weights then.
        WeightSyncError: the receiver's ranks have not taken over what was sent.
    """
    from_crew, to_crew = source._running("a weight sync"), target._running("a weight sync")
    session = source._session
    route = route_between(from_crew, to_crew, session, way, folder)
    senders, takers = range(len(from_crew.seats)), range(len(to_crew.seats))
    if route.way == "object store":
        sent = [source._submit(rank, "engine.publish", ()) for rank in senders]
        # The first rank's result is the weights: the takers wait for it, this process never sees it.
        taken = [target._submit(rank, "engine.receive", (sent[0],)) for rank in takers]
        sent[0] = source._submit(0, "engine.published", ())
    else:
        ticket = source._ask("engine.offer", route, timeout_s=timeout_s)[0]
        sent = [source._submit(rank, "engine.send", (ticket, route)) for rank in senders]
        taken = [target._submit(rank, "engine.take", (ticket, route)) for rank in takers]
    stamp, *others = session.gather([*sent, *taken], timeout_s)
    stamps = others[len(sent) - 1 :]
    if set(stamps) != {stamp}:
        told = "; ".join(f"{target.name}[{rank}] {taken}" for rank, taken in zip(takers, stamps, strict=True))
        raise WeightSyncError(f"{target.name} has other weights than {source.name} sent, {stamp}: {told}")
    return SyncReport(stamp, route.way)
