"""One process of a train engine: a rank's part of the user's module."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.engine.base import Part, Place
from dlrover.python.rl.engine.module_engine import ModuleEngine
from dlrover.python.rl.engine.sync.base import Ticket
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.session.hosted import Hosted
from dlrover.python.rl.session.routes import Route, Routes
from dlrover.python.rl.session.split import Part as Share
from dlrover.python.rl.session.terms import TrainTerms


class TrainProcess(Hosted):
    """Holds a :class:`~dlrover.python.rl.engine.module_engine.ModuleEngine`."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._routes = Routes("", False, "cpu")

    def open(self, terms: TrainTerms, payload: bytes) -> None:
        """Make this rank's part of the module; see the engine for what it raises."""
        who = f"{terms.name}[{terms.rendezvous.rank}]"
        self._engine = ModuleEngine(who, payload, terms.settings, terms.rendezvous)
        self._routes = Routes(who, terms.rendezvous.rank == 0, terms.settings.device)

    def users_method(self, name: str) -> Callable[..., Any]:
        """A method of the module; its first argument says what part of the rows it gets."""
        return partial(self._call, name)

    def _call(self, name: str, share: Share | None, /, *args: Any, **kwargs: Any) -> Any:
        rows, of = (share.rows, share.of) if share is not None else (0, 0)
        return self._engine.call(name, rows, of, args, kwargs)

    # -- the engine's verbs: see ModuleEngine -------------------------------------------------------------------------

    def train(self, mode: bool) -> None:
        self._engine.train(mode)

    def training(self) -> bool:
        return bool(self._engine.training)

    def publish(self) -> WeightSnapshot | None:
        weights: WeightSnapshot | None = self._engine.publish()
        return weights

    def receive(self, weights: WeightSnapshot) -> WeightStamp:
        stamp: WeightStamp = self._engine.receive(weights)
        return stamp

    def offer(self, route: Route) -> Ticket:
        return self._routes.end(route).offer(self._engine)

    def send(self, ticket: Ticket, route: Route) -> WeightStamp | None:
        return self._routes.end(route).send(ticket, self._engine)

    def take(self, ticket: Ticket, route: Route) -> WeightStamp:
        return self.receive(self._routes.end(route).receive(ticket))

    def save(self, path: Path) -> None:
        self._engine.save(path)

    def cpu(self) -> None:
        self._engine.cpu()

    def cuda(self, part: Part) -> None:
        self._engine.cuda(part)

    def meta(self) -> None:
        self._engine.meta()

    def place(self) -> Place:
        place: Place = self._engine.place()
        return place

    def footprint(self) -> dict[str, int]:
        held: dict[str, int] = self._engine.footprint()
        return held

    def release_cache(self) -> None:
        self._engine.release_cache()

    def close(self) -> None:
        self._routes.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
