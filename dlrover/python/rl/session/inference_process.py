"""One process of an inference engine: a rollout engine, and how a script's prompts reach it."""

from collections.abc import Sequence
from typing import Any

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import SamplingParams
from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.registry import class_at
from dlrover.python.rl.engine.sync.base import Ticket
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.session.hosted import Hosted
from dlrover.python.rl.session.prompts import as_batch
from dlrover.python.rl.session.routes import Route, Routes
from dlrover.python.rl.session.terms import InferenceTerms


class InferenceSeat:
    """Holds a rollout engine. An engine that takes more of a prompt than its tokens says so by an attribute
    ``prompt_columns``."""

    def __init__(self) -> None:
        self.engine: Any = None
        self._memory = DeviceMemory()
        self._routes: Routes | None = None

    def open(self, terms: InferenceTerms) -> None:
        """Load the model.

        Raises:
            EngineError: there is no such model, or the engine cannot run it like this.
            MissingExtra: the backend is not installed.
        """
        kind, device = terms.engine, terms.settings.device
        self._memory = DeviceMemory(device)
        self.engine = (class_at(kind) if isinstance(kind, str) else kind)(terms.model, terms.settings, self._memory)
        self._routes = Routes(terms.who, False, device, self._memory)

    def users_method(self, name: str) -> Any:
        """There is none."""
        raise AttributeError(f"an inference engine has no method '{name}'")

    def generate(self, prompts: Sequence[Any], first: int, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete the prompts; see :meth:`~dlrover.python.rl.engine.base.RolloutEngine.generate`."""
        takes = getattr(self.engine, "prompt_columns", ())
        batch = as_batch(prompts, first, self.engine.tokenizer, takes)
        drawn: Batch = self.engine.generate(batch, sampling, seed)
        return drawn

    def receive(self, weights: WeightSnapshot) -> WeightStamp:
        """Take over weights, older ones too: the script knows what it does."""
        self.engine.receive(weights, rewind=True)
        if self.engine.version != weights.version:
            raise EngineError(f"the engine serves version {self.engine.version}, not {weights.version}")
        return weights.stamp

    def take(self, ticket: Ticket, route: Route) -> WeightStamp:
        """Take over the weights of a ticket."""
        assert self._routes is not None, "open() comes first"
        return self.receive(self._routes.end(route).receive(ticket))

    def release_cache(self) -> None:
        """Give what the allocator keeps for later back to the device."""
        self._memory.release_cache()

    def close(self) -> None:
        """End what the engine has started and release everything."""
        if self._routes is not None:
            self._routes.close()
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class InferenceProcess(Hosted):
    """The object in the process."""

    def __init__(self) -> None:
        super().__init__(InferenceSeat())
