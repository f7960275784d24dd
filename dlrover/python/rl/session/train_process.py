"""One process of a train engine: a rank's part of the user's module."""

from collections.abc import Callable
from functools import partial
from typing import Any

from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.module import Share
from dlrover.python.rl.engine.module_engine import ModuleEngine
from dlrover.python.rl.engine.sync.base import Ticket, WeightTransport
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.session.hosted import Hosted
from dlrover.python.rl.session.routes import Route, Routes
from dlrover.python.rl.session.terms import TrainTerms


class TrainSeat:
    """Holds a :class:`~dlrover.python.rl.engine.module_engine.ModuleEngine`, and its ends of weight syncs."""

    def __init__(self) -> None:
        self.engine: Any = None
        self._routes: Routes | None = None
        self._published: WeightStamp | None = None

    def open(self, terms: TrainTerms, payload: bytes) -> None:
        """Make this rank's part of the module; see the engine for what it raises."""
        who, rank = f"{terms.name}[{terms.rendezvous.rank}]", terms.rendezvous.rank
        memory = DeviceMemory(terms.settings.device)
        self.engine = ModuleEngine(who, payload, terms.settings, terms.rendezvous, memory)
        self._routes = Routes(who, rank == 0, terms.settings.device, memory)

    def users_method(self, name: str) -> Callable[..., Any]:
        """A method of the module; its first argument says what part of the rows it gets."""
        return partial(self._call, name)

    def _call(self, name: str, share: Share, /, *args: Any, **kwargs: Any) -> Any:
        return self.engine.call(name, share, args, kwargs)

    def in_training(self) -> bool:
        """Whether the module is in training mode."""
        return bool(self.engine.training)

    # -- weight sync --------------------------------------------------------------------------------------------------

    def publish(self) -> WeightSnapshot | None:
        """All weights, in host memory; None on all ranks but the first."""
        weights: WeightSnapshot | None = self.engine.publish()
        self._published = None if weights is None else weights.stamp
        return weights

    def published(self) -> WeightStamp | None:
        """Which weights :meth:`publish` gave last; None on all ranks but the first."""
        return self._published

    def offer(self, route: Route) -> Ticket:
        """What this engine has to send."""
        return self._end(route).offer(self.engine)

    def send(self, ticket: Ticket, route: Route) -> WeightStamp | None:
        """Send it; which weights it was, on the rank that leads."""
        return self._end(route).send(ticket, self.engine)

    def take(self, ticket: Ticket, route: Route) -> WeightStamp:
        """Take over the weights of a ticket."""
        stamp: WeightStamp = self.engine.receive(self._end(route).receive(ticket))
        return stamp

    def _end(self, route: Route) -> WeightTransport:
        assert self._routes is not None, "open() comes first"
        return self._routes.end(route)

    def close(self) -> None:
        """Leave the other ranks and release everything."""
        if self._routes is not None:
            self._routes.close()
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class TrainProcess(Hosted):
    """The object in the process."""

    def __init__(self) -> None:
        super().__init__(TrainSeat())
