"""Weights from a train engine to another engine of the script: the script sees names and numbers, never the bytes."""

from dataclasses import dataclass
from typing import Any

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.weights import WeightStamp
from dlrover.python.rl.session.routes import Way, route_between


@dataclass(frozen=True)
class SyncReport:
    """What a sync did.

    Attributes:
        stamp: which weights the receiver has now: compared with the sender's on every one of its ranks.
        way: how they went.
    """

    stamp: WeightStamp
    way: Way


def sync(source: Any, target: Any, timeout_s: float) -> SyncReport:
    """Send the weights of the ranks of ``source`` to every rank of ``target``.

    Raises:
        SessionError: one of them is not built.
        InvocationError: a process failed or is late. Its cause is a ``WeightSyncError`` when names, shapes or bytes are
            not what they should be: the receiver has its old weights then.
        WeightSyncError: the receiver's ranks have not taken over what was sent.
    """
    from_crew, to_crew = source._running("a weight sync"), target._running("a weight sync")
    session = source._session
    route = route_between(from_crew, to_crew, session.slots, session.id, session.hosting.separate)
    senders, takers = range(len(from_crew.seats)), range(len(to_crew.seats))
    if route.way == "object store":
        sent = [source._submit(rank, "engine.publish", ()) for rank in senders]
        # The first rank's result is the weights: the takers wait for it, this process never sees it.
        taken = [target._submit(rank, "engine.receive", (sent[0],)) for rank in takers]
        stamps = session.gather([*taken, *sent[1:]], timeout_s)[: len(taken)]
    else:
        ticket = source._ask("engine.offer", route, timeout_s=timeout_s)[0]
        sent = [source._submit(rank, "engine.send", (ticket, route)) for rank in senders]
        taken = [target._submit(rank, "engine.take", (ticket, route)) for rank in takers]
        stamps = session.gather([*taken, *sent], timeout_s)[: len(taken) + 1]
    if len(set(stamps)) != 1:
        told = "; ".join(f"{target.name}[{rank}] {stamp}" for rank, stamp in zip(takers, stamps, strict=False))
        raise WeightSyncError(f"{target.name} has other weights than {source.name} sent, {stamps[-1]}: {told}")
    return SyncReport(stamps[0], route.way)
